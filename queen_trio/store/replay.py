"""The query of the spool's replay; what it means is in sql/functions/130_replay.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from queen_trio.model.admission import Lane

from .connection import Statement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from .queries import Store

_REPLAY: Final = Statement(
    "replay",
    "SELECT ord, partition_id, base_offset, created_at, examined, found_at, found_of, found_inside"
    " FROM queen.replay_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
    lane=Lane.MAINT,
)


class ReplayRow(NamedTuple):
    """One segment: committed at `base_offset`, or not, because some of its hashes are in the log.

    The message at index `found_at[k]` has the transactionId of the one at the offset `found_of[k]`,
    inside the queue's window or not. All up to the offset `examined` has been looked through.
    """

    ord: int
    partition_id: UUID
    base_offset: int | None
    created_at: datetime | None
    examined: int | None
    found_at: list[int] | None
    found_of: list[int] | None
    found_inside: list[bool] | None


class ReplayStore:
    """Commits what waited in a spool."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def replay(
        self,
        queues: Sequence[str],
        partitions: Sequence[str],
        counts: Sequence[int],
        raw_bytes: Sequence[int],
        hashes: Sequence[bytes],
        blobs: Sequence[bytes],
        since: Sequence[datetime],
        verified: Sequence[int],
        verified_in: Sequence[UUID | None],
        verified_since: Sequence[datetime | None],
        sealed: Sequence[bool],
    ) -> list[ReplayRow]:
        """Commit a bundle; arguments are aligned, one element a segment (different partitions).

        Raises what `Store.push` raises.
        """
        rows = await self._store.pool.fetch(
            _REPLAY, self._store.tenant, queues, partitions, counts, raw_bytes, hashes, blobs,
            since, verified, verified_in, verified_since, sealed,
        )  # fmt: skip
        return [ReplayRow(*row) for row in rows]
