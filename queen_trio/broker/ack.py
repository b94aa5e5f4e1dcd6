"""Ack: move cursors, charge failures, dead-letter, extend leases (spec 2, "Ack").

All acknowledgements of the moment share one transaction, as pushes do; each request is still
applied by itself. The rules are in sql/functions/040_ack.sql.
"""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.model.ack import AckStatus

from .hints import tell_released
from .lanes import Lanes
from .outage import ride_out
from .targets import Target, ack_arguments, results_for, sort_into_targets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from datetime import datetime

    from queen_trio.model.ack import Ack, AckResult
    from queen_trio.store.queries import Store

    from .deliveries import Deliveries
    from .hints import Hints

# Calls in flight at most: one as a rule, the others overtake it where it lasts (lanes.py).
ACK_LANES: Final = 3
# What one call may carry; bounds how long it holds its cursor locks.
CALL_MAX_TARGETS: Final = 128


class _Request:
    """The targets of one request that are still to be decided; `done` tells that none is left.

    `error` says why the last attempt left some open.
    """

    __slots__ = ("done", "error", "open")

    def __init__(self, targets: list[Target]) -> None:
        self.open = targets
        self.done = trio.Event()
        self.error: DatabaseError | None = None

    def fail(self, error: DatabaseError) -> None:
        self.error = error
        self.done.set()


class AckService:
    """Accepts acknowledgements and applies them in shared calls; see `open_ack_service`."""

    def __init__(self, store: Store, hints: Hints, deliveries: Deliveries) -> None:
        self._store = store
        self._deliveries = deliveries
        self._hints = hints
        self._waiting: deque[_Request] = deque()
        self._lanes = Lanes(ACK_LANES, self._take_call, self._flush)

    async def ack(self, acks: Sequence[Ack]) -> list[AckResult]:
        """Apply the acknowledgements of one request and return one result for each, in order.

        Raises `DatabaseUnavailable` when the database stays away. Once started they are applied
        even if the caller is cancelled.
        """
        results = results_for(acks)
        targets = sort_into_targets(acks, results)
        for target in targets:
            target.whole = self._is_whole(target)
        if targets:
            await ride_out(partial(self._apply, _Request(targets)))
        return results

    async def extend(self, lease_id: str, seconds: int) -> tuple[int, datetime | None]:
        """Extend a lease; returns how many partitions it still held, and the earliest expiry."""
        return await ride_out(lambda: self._store.extend(lease_id, seconds))

    def close(self) -> None:
        """Let `serve` end when everything accepted has been applied."""
        self._lanes.close()

    async def serve(self) -> None:
        """Apply until `close`."""
        await self._lanes.serve()

    def _is_whole(self, target: Target) -> bool:
        ids = target.transaction_ids
        return self._deliveries.complete(
            target.lease_id, target.partition_id, ids
        ) and target.statuses == AckStatus.COMPLETED.value * len(ids)

    async def _apply(self, request: _Request) -> None:
        request.error = None
        request.done = trio.Event()
        self._waiting.append(request)
        self._lanes.wake()
        await request.done.wait()
        if request.error is not None:
            raise request.error

    def _take_call(self) -> list[_Request] | None:
        if not self._waiting:
            return None
        call: list[_Request] = []
        size = 0
        while self._waiting and (not call or size + len(self._waiting[0].open) <= CALL_MAX_TARGETS):
            request = self._waiting.popleft()
            size += len(request.open)
            call.append(request)
        if self._waiting:
            self._lanes.wake()
        return call

    async def _flush(self, call: list[_Request]) -> None:
        try:
            await self._decide(call)
        except DatabaseError as error:
            left = [request for request in call if request.open]
            if len(left) == 1 or isinstance(error, DatabaseUnavailable):
                for request in left:
                    request.fail(error)
            else:  # no request sees another's error (spec 8.9)
                for request in left:
                    await self._flush([request])
        except trio.Cancelled:
            for request in call:
                if request.open:
                    request.fail(DatabaseUnavailable("the broker is stopping"))
            raise

    async def _decide(self, call: list[_Request]) -> None:
        """Send the targets; those that turn out to need more than they said, again with it."""
        while call:
            targets = [target for request in call for target in request.open]
            whole = [len(target.results) if target.whole else 0 for target in targets]
            rows = await self._store.ack(*ack_arguments(targets), whole)
            wanted: dict[Target, int | None] = {}
            for row, target in zip(rows, targets, strict=True):
                if row.verdicts is not None:
                    target.answer(row.verdicts, lease_released=row.lease_released)
                    tell_released(
                        self._hints,
                        row.queue_name,
                        row.partition_name,
                        target.group,
                        more=row.has_more,
                    )
                else:
                    target.whole = False  # if it was, the lease is over, or acked in part
                    wanted[target] = row.needs_payload
            for request in call:
                request.open = [target for target in request.open if target in wanted]
                if not request.open:
                    request.done.set()
            # Only now: should reading fail, what has been decided is not sent again.
            for target, offset in wanted.items():
                if offset is not None:
                    await target.read_letter(self._store, offset)
            call = [request for request in call if request.open]


@asynccontextmanager
async def open_ack_service(
    store: Store, hints: Hints, deliveries: Deliveries
) -> AsyncIterator[AckService]:
    """Run an AckService; leaving applies what was accepted."""
    service = AckService(store, hints, deliveries)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.serve)  # noqa: ASYNC113 - until it runs, work queues up
        try:
            yield service
        finally:
            service.close()
