"""The dedup filter, kept up with the database: what pushes and replays know of earlier ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from queen_trio.errors import DatabaseError

from .dedup import DedupFilter, DedupStatistics, Verified

if TYPE_CHECKING:
    from collections.abc import Sequence

    from queen_trio.store.queries import PushRow, Store
    from queen_trio.store.replay import ReplayRow

    from .segment import Key

log = structlog.get_logger(__name__)

# One read of a partition's history; keeps the event loop free between slices (20 ms each).
HISTORY_MESSAGES: Final = 65_536


class History:
    """The filter of one broker, shared by all who commit segments."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._dedup = DedupFilter()

    def verify(self, key: Key, hashes: Sequence[bytes]) -> Verified:
        """Say below which offset none of these hashes occurs."""
        return self._dedup.verify(key, hashes)

    async def learn(
        self,
        key: Key,
        row: PushRow | ReplayRow,
        hashes: Sequence[bytes],
        *,
        supplied: bool,
    ) -> None:
        """Take in a segment that was just committed, and what the filter has missed before it.

        `row` says where; `supplied`: clients chose some of its ids. A database that fails leaves
        the filter behind.
        """
        assert row.base_offset is not None  # noqa: S101 - it is committed
        assert row.created_at is not None  # noqa: S101
        after = self._dedup.learn(
            key, row.partition_id, row.base_offset, row.created_at, hashes, supplied=supplied
        )
        try:
            while after is not None:
                rows = await self._store.history(row.partition_id, after, HISTORY_MESSAGES)
                after = self._dedup.load(key, row.partition_id, after, rows)
        except DatabaseError as error:
            log.debug("history not read", queue=key[0], error=str(error))

    def statistics(self) -> DedupStatistics:
        """What the filter takes."""
        return self._dedup.statistics()
