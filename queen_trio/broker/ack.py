"""Ack: move cursors, charge failures, dead-letter, extend leases (spec 2, "Ack").

All acknowledgements of the moment share one transaction, as pushes do; each request is still
applied by itself. The rules are in sql/functions/040_ack.sql.
"""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
import trio

from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.model.ack import Ack, AckResult, AckStatus
from queen_trio.model.message import hash_of
from queen_trio.store import segments

from .lanes import Lanes
from .outage import ride_out

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from queen_trio.store.queries import AckRow, Store

    from .wakeups import Wakeups

ACK_LANES: Final = 2
# What one call may carry; bounds how long it holds its cursor locks.
CALL_MAX_TARGETS: Final = 128

_encode = msgspec.json.encode
log = structlog.get_logger(__name__)


class _Target:
    """What one request says of one (partition, group) under one lease."""

    __slots__ = ("acks", "group", "lease_id", "letters", "partition_id", "results")

    def __init__(self, partition_id: UUID, group: str, lease_id: str) -> None:
        self.partition_id = partition_id
        self.group = group
        self.lease_id = lease_id
        self.acks: list[Ack] = []
        self.results: list[AckResult] = []
        # By position, what a dead letter would need; complete once the message has been read.
        self.letters: dict[int, dict[str, Any]] = {}

    def add(self, ack: Ack, result: AckResult) -> None:
        if ack.status in (AckStatus.FAILED, AckStatus.DEAD_LETTER):
            self.letters[len(self.acks)] = {
                "error": ack.error and ack.error.replace("\0", "\ufffd"),
                "transactionId": ack.transaction_id,
            }
        self.acks.append(ack)
        self.results.append(result)


class _Request:
    """The targets of one request that are still to be decided; `done` tells that none is left.

    `error` says why the last attempt left some open.
    """

    __slots__ = ("done", "error", "open")

    def __init__(self, targets: list[_Target]) -> None:
        self.open = targets
        self.done = trio.Event()
        self.error: DatabaseError | None = None

    def fail(self, error: DatabaseError) -> None:
        self.error = error
        self.done.set()


class AckService:
    """Accepts acknowledgements and applies them in shared calls; see `open_ack_service`."""

    def __init__(self, store: Store, wakeups: Wakeups) -> None:
        self._store = store
        self._wakeups = wakeups
        self._waiting: deque[_Request] = deque()
        self._lanes = Lanes(ACK_LANES, self._take_call, self._flush)

    async def ack(self, acks: Sequence[Ack]) -> list[AckResult]:
        """Apply the acknowledgements of one request and return one result for each, in order.

        Raises `DatabaseUnavailable` when the database stays away. Once started they are applied
        even if the caller is cancelled.
        """
        results = [AckResult(index, ack.transaction_id, True) for index, ack in enumerate(acks)]
        targets: dict[tuple[UUID, str, str], _Target] = {}
        for ack, result in zip(acks, results, strict=True):
            if ack.partition_id is None:
                result.success = False
                result.error = "unresolvable: partitionId is not a UUID"
                continue
            key = (ack.partition_id, ack.group, ack.lease_id or "")
            target = targets.get(key)
            if target is None:
                target = targets[key] = _Target(*key)
            target.add(ack, result)
        if targets:
            await ride_out(partial(self._apply, _Request(list(targets.values()))))
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
        """Send the targets; those that turn out to need a message's payload, again with it."""
        while call:
            targets = [target for request in call for target in request.open]
            rows = await self._send(targets)
            undecided: set[_Target] = set()
            for row, target in zip(rows, targets, strict=True):
                if row.needs_payload is None:
                    self._answer(target, row)
                else:
                    await self._read_letter(target, row.needs_payload)
                    undecided.add(target)
            for request in call:
                request.open = [target for target in request.open if target in undecided]
                if not request.open:
                    request.done.set()
            call = [request for request in call if request.open]

    async def _send(self, targets: list[_Target]) -> list[AckRow]:
        letters = [
            {"target": position, "item": item, **letter}
            for position, target in enumerate(targets, start=1)
            for item, letter in target.letters.items()
        ]
        return await self._store.ack(
            [target.partition_id for target in targets],
            [target.group for target in targets],
            [target.lease_id for target in targets],
            [b"".join([hash_of(ack.transaction_id) for ack in t.acks]) for t in targets],
            ["".join([ack.status.value for ack in target.acks]) for target in targets],
            _encode(letters).decode() if letters else "[]",
        )

    async def _read_letter(self, target: _Target, offset: int) -> None:
        """Read the message at `offset` into the letters of its transactionId."""
        rows = await self._store.segments_at(target.partition_id, [offset])
        if rows:
            record = segments.split(segments.decode(rows[0].blob))[offset - rows[0].base_offset]
            message = _decode_message(record)
            found = {
                "transactionId": message.transactionId,
                "messageId": message.id,
                "traceId": message.traceId,
                "producerSub": message.producerSub,
                "payload": bytes(message.data).decode(),
                "createdAt": rows[0].created_at.isoformat(),
            }
        else:  # retention was faster: the dead letter still tells that it was there
            found = {"messageId": "", "payload": "null"}
        for letter in target.letters.values():
            if letter["transactionId"] == found.get("transactionId", letter["transactionId"]):
                letter.update(found, offset=offset)

    def _answer(self, target: _Target, row: AckRow) -> None:
        assert row.verdicts is not None  # noqa: S101 - only a target that needs a payload has none
        for ack, result, verdict in zip(target.acks, target.results, row.verdicts, strict=True):
            result.leaseReleased = row.lease_released
            if verdict == "d":
                result.dlq = True
            elif verdict == "n":
                result.noop = True
            elif verdict in _REFUSALS:
                result.success = False
                result.error = _REFUSALS[verdict].format(ack.transaction_id)
        if row.more_in_queue is not None and row.more_in_partition is not None:
            self._wakeups.notify([(row.more_in_queue, row.more_in_partition)], target.group)


class _Message(msgspec.Struct):
    id: str
    transactionId: str
    data: msgspec.Raw
    traceId: str | None = None
    producerSub: str | None = None


_decode_message = msgspec.json.Decoder(_Message).decode

_REFUSALS: Final = {
    "a": "already committed: {}",
    "u": "unresolvable: {} is not in the leased batch",
    "l": "invalid or expired lease",
    "x": "consumer not found",
    "w": "not committed: an earlier message of this call was not completed",
}


@asynccontextmanager
async def open_ack_service(store: Store, wakeups: Wakeups) -> AsyncIterator[AckService]:
    """Run an AckService; leaving applies what was accepted."""
    service = AckService(store, wakeups)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.serve)  # noqa: ASYNC113 - until it runs, work queues up
        try:
            yield service
        finally:
            service.close()
