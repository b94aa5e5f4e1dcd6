"""Which queues want their payloads encrypted: see sql/functions/120_encryption.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .connection import Statement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from .pool import Pool

_ENCRYPTED: Final = Statement(
    "encrypted_queues", "SELECT name FROM queen.encrypted_queues_v1($1, $2)"
)


async def encrypted_queues(pool: Pool, tenant: UUID, names: Sequence[str]) -> set[str]:
    """Return those of the named queues that are encrypted; raises what `Pool.fetch` raises."""
    return {name for (name,) in await pool.fetch(_ENCRYPTED, tenant, names)}
