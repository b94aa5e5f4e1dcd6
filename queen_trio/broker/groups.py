"""Consumer groups: show them, move their cursors and subscriptions, forget them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .outage import ride_out

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from queen_trio.store.groups import DeletedGroup, GroupPartitionRow, GroupRow, GroupStore

    from .hints import Hints


class GroupService:
    """Shows and moves groups; every method waits out a short outage of the database.

    Whatever makes messages claimable wakes the pops that wait for them, on every broker.
    """

    def __init__(self, store: GroupStore, hints: Hints) -> None:
        self._store = store
        self._hints = hints

    async def list_groups(self, *, min_lag_seconds: float | None = None) -> list[GroupRow]:
        """Each group in each of its queues; or those whose oldest open message is that old."""
        rows = await ride_out(self._store.list_groups)
        if min_lag_seconds is None:
            return rows
        return [
            row
            for row in rows
            if row.oldest_pending_at is not None
            and (row.now - row.oldest_pending_at).total_seconds() >= min_lag_seconds
        ]

    async def groups_of(self, queue: str) -> list[GroupRow]:
        """The groups that read one queue."""
        return await ride_out(partial(self._store.groups_of, queue))

    async def detail(self, group: str) -> tuple[list[GroupRow], list[GroupPartitionRow]]:
        """One group by queue and by partition; two empty lists when it is unknown."""
        rows = await ride_out(partial(self._store.list_groups, group))
        return rows, await ride_out(partial(self._store.partitions, group)) if rows else []

    async def resubscribe(self, group: str, point: datetime) -> list[str]:
        """Move where cursors that don't exist yet will start.

        Returns the subscribed queues, '' for a discovery subscription; [] for an unknown group.
        """
        queues = await ride_out(partial(self._store.resubscribe, group, point))
        self._tell(queues)
        return queues

    async def seek(
        self, group: str, queue: str, partition: str | None, *, to_end: bool, since: datetime | None
    ) -> int | None:
        """Move cursors to the end, or to the first message since then (None: the beginning).

        Live leases end, retries start anew. Returns how many partitions moved; None when queue,
        partition or group are unknown.
        """
        moved = await ride_out(
            partial(self._store.seek, group, queue, partition, to_end=to_end, since=since)
        )
        self._tell([queue])
        return moved

    async def delete(self, group: str, queue: str | None, *, metadata: bool) -> DeletedGroup:
        """Forget a group's cursors in one queue or everywhere, and its subscriptions if asked."""
        deleted = await ride_out(partial(self._store.delete, group, queue, metadata=metadata))
        self._tell(deleted.queues)
        return deleted

    def _tell(self, queues: Iterable[str]) -> None:
        for queue in queues:
            # '' is a discovery subscription without a queue yet: nobody can have messages from it.
            if queue:
                self._hints.queue_changed(queue)
