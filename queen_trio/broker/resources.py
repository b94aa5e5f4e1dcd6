"""Resources seen from above, and their history: overview, depth, clear, analytics."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from .outage import ride_out

if TYPE_CHECKING:
    from uuid import UUID

    from queen_trio.store.resources import (
        DepthRow,
        FoundPartition,
        LagRow,
        OverviewRow,
        ResourceStore,
        Span,
        TrafficRow,
        WorkerRow,
    )

    from .hints import Hints

# Partitions that one transaction clears: bounds how long pushes into them wait.
CLEAR_PARTITIONS: Final = 256


class ResourceService:
    """Shows resources; what a request asks for waits out a short outage of the database."""

    def __init__(self, store: ResourceStore, hints: Hints) -> None:
        self._store = store
        self._hints = hints

    async def overview(self) -> OverviewRow:
        """Counts that no listing of queues gives."""
        return await ride_out(self._store.overview)

    async def dead_letters(self, queue: str | None = None) -> dict[str, int]:
        """Dead letters by queue; queues without any are absent."""
        return await ride_out(partial(self._store.dead_letters, queue))

    async def find_partitions(
        self, queue: str | None, limit: int, offset: int
    ) -> list[FoundPartition]:
        """Partitions of one queue or all, by queue and name."""
        return await ride_out(partial(self._store.find_partitions, queue, limit, offset))

    async def depth(self, queue: str, group: str | None) -> list[DepthRow]:
        """What each partition owes to a group; None: to the group furthest behind."""
        return await ride_out(partial(self._store.depth, queue, group))

    async def clear(self, queue: str, partition: str | None = None) -> int:
        """Remove all messages of a queue or of one partition; returns how many they were.

        A few partitions at a time, each in one transaction: cancellation leaves whole partitions.
        Cursors move to the end, leases end. The dedup window still knows what was removed.
        """
        cleared = 0
        after: UUID | None = None
        while True:
            after, count = await ride_out(
                partial(self._store.clear, queue, partition, after, CLEAR_PARTITIONS)
            )
            if after is None:
                break
            cleared += count
        self._hints.queue_changed(queue)
        return cleared

    async def sample_lag(self) -> int:
        """Write down what every group owes now; returns how many (queue, group) pairs there are."""
        return await ride_out(self._store.record_lag)

    async def queue_traffic(
        self, queue: str | None, namespace: str | None, task: str | None, span: Span
    ) -> list[TrafficRow]:
        """Messages in and out over time."""
        return await ride_out(partial(self._store.queue_traffic, queue, namespace, task, span))

    async def lag_history(self, queue: str | None, span: Span) -> list[LagRow]:
        """Samples of lag by queue and group."""
        return await ride_out(partial(self._store.lag_history, queue, span))

    async def worker_history(self, server_id: str | None, span: Span) -> list[WorkerRow]:
        """What each broker did over time."""
        return await ride_out(partial(self._store.worker_history, server_id, span))

    async def postgres_stats(self) -> str:
        """How PostgreSQL does, as a JSON object."""
        return await ride_out(self._store.postgres_stats)
