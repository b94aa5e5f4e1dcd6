"""The statements on consumer groups; what they mean is in sql/functions/070_groups.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from queen_trio.model.admission import Lane

from .connection import Statement

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from .queries import Store

_ROW = (
    "SELECT consumer_group, queue_name, mode, point, subscribed_at, partitions, members,"
    " total_lag, partitions_with_lag, oldest_pending_at, active_at, total_consumed,"
    " clock_timestamp() FROM "
)
_LIST = Statement("list_groups", _ROW + "queen.list_groups_v1($1, $2, $3)")
_LIST_ALL = Statement("list_all_groups", _ROW + "queen.list_all_groups_v1($1)")
_PARTITIONS = Statement(
    "group_partitions",
    "SELECT queue_name, partition_id, partition_name, next_offset, last_offset, lag,"
    " oldest_pending_at, has_cursor, worker_id, lease_expires_at, batch_end, deliveries, failures,"
    " total_consumed, active_at, clock_timestamp() FROM queen.group_partitions_v1($1, $2, $3)",
)
_RESUBSCRIBE = Statement(
    "resubscribe", "SELECT q FROM queen.resubscribe_v1($1, $2, $3) AS q", Lane.MAINT
)
_SEEK = Statement("seek", "SELECT queen.seek_v1($1, $2, $3, $4, $5, $6)", Lane.MAINT)
_DELETE = Statement(
    "delete_group",
    "SELECT cursors, subscriptions, queues FROM queen.delete_group_v1($1, $2, $3, $4)",
    lane=Lane.MAINT,
)


class GroupRow(NamedTuple):
    """A group in a queue; `mode` None: it has cursors but no subscription.

    `point` None is the beginning; `now` is the database's clock.
    """

    group: str
    queue: str
    mode: str | None
    point: datetime | None
    subscribed_at: datetime | None
    partitions: int
    members: int
    total_lag: int
    partitions_with_lag: int
    oldest_pending_at: datetime | None
    active_at: datetime | None
    total_consumed: int
    now: datetime


class GroupPartitionRow(NamedTuple):
    """Where a group stands in one partition; without a cursor, where it will start."""

    queue: str
    partition_id: UUID
    partition: str
    next_offset: int
    last_offset: int
    lag: int
    oldest_pending_at: datetime | None
    has_cursor: bool
    worker_id: str | None
    lease_expires_at: datetime | None
    batch_end: int | None
    deliveries: int
    failures: int
    total_consumed: int
    active_at: datetime | None
    now: datetime


class DeletedGroup(NamedTuple):
    """What a delete removed, and the queues that the group was in."""

    cursors: int
    subscriptions: int
    queues: list[str]


class GroupStore:
    """Consumer groups of one tenant; every method may raise what `Pool.fetch` raises."""

    def __init__(self, store: Store) -> None:
        self._pool = store.pool
        self._tenant = store.tenant

    async def list_groups(self, group: str | None = None) -> list[GroupRow]:
        """One row for each (group, queue): of all groups, or of one."""
        rows = await (
            self._pool.fetch(_LIST_ALL, self._tenant)
            if group is None
            else self._pool.fetch(_LIST, self._tenant, group, None)
        )
        return [GroupRow(*row) for row in rows]

    async def groups_of(self, queue: str) -> list[GroupRow]:
        """The groups that read one queue."""
        rows = await self._pool.fetch(_LIST, self._tenant, None, queue)
        return [GroupRow(*row) for row in rows]

    async def partitions(self, group: str) -> list[GroupPartitionRow]:
        """Where a group stands in every partition that it reads."""
        rows = await self._pool.fetch(_PARTITIONS, self._tenant, group, None)
        return [GroupPartitionRow(*row) for row in rows]

    async def resubscribe(self, group: str, point: datetime) -> list[str]:
        """Move the subscription point; returns the queues, '' for a discovery subscription."""
        rows = await self._pool.fetch(_RESUBSCRIBE, self._tenant, group, point)
        return [queue for (queue,) in rows]

    async def seek(
        self, group: str, queue: str, partition: str | None, *, to_end: bool, since: datetime | None
    ) -> int | None:
        """Put the cursors to the end, or to the first message since then (None: the beginning).

        Returns how many partitions moved; None when queue, partition or group are unknown.
        """
        [(moved,)] = await self._pool.fetch(
            _SEEK, self._tenant, group, queue, partition, to_end, since
        )
        return None if moved is None else int(moved)

    async def delete(self, group: str, queue: str | None, *, metadata: bool) -> DeletedGroup:
        """Remove cursors, and subscriptions where asked for, in one queue or everywhere."""
        [row] = await self._pool.fetch(_DELETE, self._tenant, group, queue, metadata)
        return DeletedGroup(*row)
