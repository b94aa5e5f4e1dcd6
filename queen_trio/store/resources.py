"""The statements on resources and their history; see sql/functions/075_resources.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from queen_trio.model.admission import Lane

from .connection import Statement
from .pool import ACQUIRE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from .queries import Store

_OVERVIEW = Statement(
    "overview", "SELECT consumer_groups, dead_letters, database_bytes FROM queen.overview_v1($1)"
)
_DEAD_LETTERS = Statement(
    "dead_letters_by_queue",
    "SELECT queue_name, dead_letters FROM queen.dead_letters_by_queue_v1($1, $2)",
)
_FIND_PARTITIONS = Statement(
    "find_partitions",
    "SELECT queue_name, namespace, task, id, name, created_at, last_offset, log_start, pending,"
    " processing, last_write_at FROM queen.find_partitions_v1($1, $2, $3, $4)",
)
_DEPTH = Statement(
    "depth", "SELECT partition_name, pending, processing FROM queen.depth_v1($1, $2, $3)"
)
_CLEAR = Statement(
    "clear", "SELECT done_until, cleared FROM queen.clear_v1($1, $2, $3, $4, $5)", Lane.MAINT
)
_RECORD_TRAFFIC = Statement(
    "record_traffic",
    "SELECT queen.record_traffic_v1($1, $2, $3::text::jsonb, $4, $5, $6) IS NULL",
    lane=Lane.MAINT,
)
_RECORD_LAG = Statement("record_lag", "SELECT queen.record_lag_v1($1)")
_PURGE_STATS = Statement("purge_stats", "SELECT queen.purge_stats_v1($1, $2)")
_QUEUE_TRAFFIC = Statement(
    "queue_traffic",
    "SELECT at, pushed, popped FROM queen.queue_traffic_v1($1, $2, $3, $4, $5, $6, $7)",
)
_LAG_HISTORY = Statement(
    "lag_history",
    "SELECT at, queue_name, consumer_group, lag, time_lag_seconds"
    " FROM queen.lag_history_v1($1, $2, $3, $4, $5)",
)
_WORKER_HISTORY = Statement(
    "worker_history",
    "SELECT at, server_id, push_calls, pushed, pop_calls, empty_pops, popped, ack_calls, completed,"
    " failed, dead_lettered, database_errors, cpu_ms, rss_bytes, parked_pops, pool_open,"
    " pool_in_use, pool_waiting FROM queen.worker_history_v1($1, $2, $3, $4)",
)
_POSTGRES_STATS = Statement("postgres_stats", "SELECT queen.postgres_stats_v1()::text")


class OverviewRow(NamedTuple):
    consumer_groups: int
    dead_letters: int
    database_bytes: int


class FoundPartition(NamedTuple):
    queue: str
    namespace: str
    task: str
    id: UUID
    name: str
    created_at: datetime
    last_offset: int
    log_start: int
    pending: int
    processing: int
    last_write_at: datetime | None


class DepthRow(NamedTuple):
    partition: str
    pending: int
    processing: int


class TrafficRow(NamedTuple):
    """Messages of one step of a time series."""

    at: datetime
    pushed: int
    popped: int


class LagRow(NamedTuple):
    """The largest samples of one step."""

    at: datetime
    queue: str
    group: str
    lag: int
    time_lag_seconds: float


class WorkerRow(NamedTuple):
    """What one broker did in one step; the gauges (rss_bytes and after) are the largest samples."""

    at: datetime
    server_id: str
    push_calls: int
    pushed: int
    pop_calls: int
    empty_pops: int
    popped: int
    ack_calls: int
    completed: int
    failed: int
    dead_lettered: int
    database_errors: int
    cpu_ms: int
    rss_bytes: int
    parked_pops: int
    pool_open: int
    pool_in_use: int
    pool_waiting: int


class Span(NamedTuple):
    """A stretch of time, both ends included, cut into steps."""

    since: datetime
    until: datetime
    step_seconds: int


class ResourceStore:
    """Resources and history of one tenant; every method may raise what `Pool.fetch` raises."""

    def __init__(self, store: Store) -> None:
        self._pool = store.pool
        self._tenant = store.tenant

    async def overview(self) -> OverviewRow:
        """Counts that no listing of queues gives."""
        [row] = await self._pool.fetch(_OVERVIEW, self._tenant)
        return OverviewRow(*row)

    async def dead_letters(self, queue: str | None = None) -> dict[str, int]:
        """Dead letters by queue; queues without any are absent."""
        return dict(await self._pool.fetch(_DEAD_LETTERS, self._tenant, queue))

    async def find_partitions(
        self, queue: str | None, limit: int, offset: int
    ) -> list[FoundPartition]:
        """Partitions of one queue or all, by queue and name."""
        rows = await self._pool.fetch(_FIND_PARTITIONS, self._tenant, queue, limit, offset)
        return [FoundPartition(*row) for row in rows]

    async def depth(self, queue: str, group: str | None) -> list[DepthRow]:
        """What each partition owes to a group; None: to the group furthest behind."""
        return [
            DepthRow(*row) for row in await self._pool.fetch(_DEPTH, self._tenant, queue, group)
        ]

    async def clear(
        self, queue: str, partition: str | None, after: UUID | None, most: int
    ) -> tuple[UUID | None, int]:
        """Remove the messages of the next partitions; returns the last one done, and how many."""
        [(done_until, cleared)] = await self._pool.fetch(
            _CLEAR, self._tenant, queue, partition, after, most
        )
        return done_until, int(cleared)

    async def record_traffic(
        self,
        server_id: str,
        counters: str,
        queues: Sequence[str],
        pushed: Sequence[int],
        popped: Sequence[int],
        *,
        within_seconds: float | None = None,
    ) -> None:
        """Add counters (a JSON object by column) and messages by queue to the current minute.

        With `within_seconds` neither the wait for a connection nor the statement takes longer, and
        a database that can't be reached isn't waited for.
        """
        await self._pool.fetch(
            _RECORD_TRAFFIC,
            self._tenant,
            server_id,
            counters,
            queues,
            pushed,
            popped,
            deadline_seconds=ACQUIRE_SECONDS if within_seconds is None else within_seconds,
            statement_seconds=within_seconds,
            impatient=within_seconds is not None,
        )

    async def record_lag(self) -> int:
        """Sample what every group owes; returns how many (queue, group) pairs there are."""
        [(count,)] = await self._pool.fetch(_RECORD_LAG, self._tenant)
        return int(count)

    async def purge_stats(self, before: datetime, most: int) -> bool:
        """Delete up to `most` old samples of each kind; True when there may be more."""
        [(more,)] = await self._pool.fetch(_PURGE_STATS, before, most)
        return bool(more)

    async def queue_traffic(
        self, queue: str | None, namespace: str | None, task: str | None, span: Span
    ) -> list[TrafficRow]:
        """Messages in and out, over all brokers."""
        rows = await self._pool.fetch(
            _QUEUE_TRAFFIC, self._tenant, queue, namespace, task, *span
        )  # fmt: skip
        return [TrafficRow(*row) for row in rows]

    async def lag_history(self, queue: str | None, span: Span) -> list[LagRow]:
        """Samples of lag by queue and group."""
        rows = await self._pool.fetch(_LAG_HISTORY, self._tenant, queue, *span)
        return [LagRow(*row) for row in rows]

    async def worker_history(self, server_id: str | None, span: Span) -> list[WorkerRow]:
        """What each broker did."""
        rows = await self._pool.fetch(_WORKER_HISTORY, server_id, *span)
        return [WorkerRow(*row) for row in rows]

    async def postgres_stats(self) -> str:
        """How PostgreSQL does, as a JSON object."""
        [(stats,)] = await self._pool.fetch(_POSTGRES_STATS)
        return str(stats)
