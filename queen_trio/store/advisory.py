"""Session advisory locks: one replica at a time does a background job (seeds, "Leader-gated")."""

from __future__ import annotations

from contextlib import asynccontextmanager
from enum import Enum
from typing import TYPE_CHECKING, Final

import structlog

from .connection import Statement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .connection import TrioConnection
    from .pool import Pool

log = structlog.get_logger(__name__)

_TRY_LOCK: Final = Statement("try_lock", "SELECT pg_try_advisory_lock($1::bigint)")
_UNLOCK: Final = Statement("unlock", "SELECT pg_advisory_unlock($1::bigint)")


class AdvisoryLock(Enum):
    """The locks of queen-trio in one database; the values are arbitrary, but fixed for ever."""

    SCHEMA = 0x717565656E
    RETENTION = 0x717565656F
    STATS = 0x7175656570


@asynccontextmanager
async def try_advisory_lock(pool: Pool, lock: AdvisoryLock) -> AsyncIterator[TrioConnection | None]:
    """Yield a connection that holds `lock` while the block runs, or None: another session has it.

    The lock is given back on every way out, cancellation included; where the connection is lost the
    end of its session does it. A lock that turns out not to be held any more is a warning (a pooler
    recycled the session): what it guards must be correct with two holders.
    """
    async with pool.acquire() as conn:
        [(held,)] = await conn.fetch(_TRY_LOCK, lock.value)
        if not held:
            yield None
            return
        try:
            yield conn
        finally:
            if conn.reusable:
                with conn.grace.shield():
                    await _unlock(conn, lock)
            else:
                conn.close_nowait()


async def _unlock(conn: TrioConnection, lock: AdvisoryLock) -> None:
    [(was_held,)] = await conn.fetch(_UNLOCK, lock.value)
    if not was_held:
        log.warning("pg_advisory_unlock reported not-held", lock=lock.name.lower())
