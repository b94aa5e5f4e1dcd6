"""Retention: delete what has expired, purge sidecars, drop idle partitions (spec 4, spec 8.1, 8.2).

One replica per cycle, by an advisory lock held on its own connection; every step is a transaction
of its own and correct whoever else runs. What can't be deleted yet (no cursor has passed it) is
walked over in turns, so that a cycle's cost follows what is deletable, not how much there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
from attrs import define, evolve, field, frozen

from queen_trio.store import retention
from queen_trio.store.advisory import AdvisoryLock, try_advisory_lock
from queen_trio.store.retention import BEGINNING, Place

if TYPE_CHECKING:
    from uuid import UUID

    from queen_trio.store.connection import TrioConnection
    from queen_trio.store.pool import Pool

log = structlog.get_logger(__name__)

# One step: how many rows one transaction deletes while it holds a partition's lock.
STEP_ROWS: Final = 1_000
# One cycle, per queue: how many partitions it looks at.
CYCLE_PARTITIONS: Final = 1_000


@frozen
class RetentionStatistics:
    """What has been deleted since this broker started."""

    cycles: int = 0
    segments: int = 0
    messages: int = 0
    sidecar_rows: int = 0
    partitions: int = 0


@define(eq=False)
class Retention:
    """The job; it remembers where its walks stand."""

    pool: Pool
    partition_cleanup_days: int
    statistics: RetentionStatistics = field(factory=RetentionStatistics)
    _places: dict[UUID, Place] = field(factory=dict)
    _purge_place: Place = BEGINNING

    async def run(self) -> None:
        """Do one cycle, or nothing when another replica is doing one."""
        async with try_advisory_lock(self.pool, AdvisoryLock.RETENTION) as conn:
            if conn is None:
                return
            await self._trim(conn)
            await self._purge(conn)
            await self._drop_idle(conn)
            self._count(cycles=1)

    async def _trim(self, conn: TrioConnection) -> None:
        queues = await retention.retention_queues(conn)
        places, self._places = self._places, {}
        for queue_id, age_seconds in queues:
            after = places.get(queue_id, BEGINNING)
            found = await retention.candidates(conn, queue_id, age_seconds, after, CYCLE_PARTITIONS)
            for place, due in found:
                while due:
                    segments, messages = await retention.trim(conn, place.partition_id, STEP_ROWS)
                    self._count(segments=segments, messages=messages)
                    due = segments == STEP_ROWS
            if len(found) == CYCLE_PARTITIONS:
                self._places[queue_id] = found[-1][0]

    async def _purge(self, conn: TrioConnection) -> None:
        found = await retention.purge_candidates(conn, self._purge_place, CYCLE_PARTITIONS)
        for place, due in found:
            while due:
                rows = await retention.purge(conn, place.partition_id, STEP_ROWS)
                self._count(sidecar_rows=rows)
                due = rows == STEP_ROWS
        self._purge_place = found[-1][0] if len(found) == CYCLE_PARTITIONS else BEGINNING

    async def _drop_idle(self, conn: TrioConnection) -> None:
        for _ in range(CYCLE_PARTITIONS):
            dropped = await retention.drop_idle_partition(conn, self.partition_cleanup_days)
            if dropped is None:
                return
            self._count(partitions=1)

    def _count(self, **more: int) -> None:
        statistics = self.statistics
        self.statistics = evolve(
            statistics, **{name: getattr(statistics, name) + n for name, n in more.items()}
        )
