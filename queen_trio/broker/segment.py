"""What a push adds to the log: drafts of single requests, gathered in segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import trio
from attrs import define, field

from queen_trio.model.message import (
    PushItem,
    PushResult,
    PushStatus,
    hash_of,
    partition_of,
    valid_trace_id,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from queen_trio.model.ids import Uuid7

_encode = msgspec.json.encode

# A segment is what a pop reads at least, so it stays well below QUEEN_POP_MAX_BYTES; one request's
# items for one partition are never split, whatever their size: they are one commit.
SEGMENT_MAX_MESSAGES: Final = 2_000
SEGMENT_MAX_BYTES: Final = 4 * 1024 * 1024

Key = tuple[str, str]
"""(queue, partition)"""


class Pending:
    """How many drafts of one request are still open; `done` is set when the last is settled."""

    __slots__ = ("count", "done")

    def __init__(self) -> None:
        self.count = 0
        self.done = trio.Event()


class Draft:
    """The items of one request for one partition: committed together or not at all.

    `records`, `hashes` and `results` are aligned, one element a message; a result says `queued`
    until something else turns out.
    """

    __slots__ = ("_pending", "generated", "hashes", "records", "results", "settled", "size")

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        pending.count += 1
        self.records: list[bytes] = []
        self.hashes: list[bytes] = []
        self.results: list[PushResult] = []
        self.size = 0
        self.generated = True  # all transactionIds were made up here
        self.settled = False

    def settle(self) -> None:
        """The results stand: let the request go on once all its drafts are settled."""
        self.settled = True
        self._pending.count -= 1
        if not self._pending.count:
            self._pending.done.set()

    def buffer(self) -> None:
        """Settle with every message `buffered`."""
        for result in self.results:
            result.status = PushStatus.BUFFERED
        self.settle()

    def fail(self, error: str) -> None:
        """Settle with every message `failed`."""
        for result in self.results:
            result.status = PushStatus.FAILED
            result.error = error
        self.settle()


@define(eq=False)
class Drafted:
    """The items of one request as drafts, and the results that they will fill in, in item order."""

    pending: Pending = field(factory=Pending)
    drafts: dict[Key, Draft] = field(factory=dict)
    results: list[PushResult] = field(factory=list)
    # Items whose transactionId stood earlier in the request, each with the first one.
    repeats: list[tuple[PushResult, PushResult]] = field(factory=list)

    @classmethod
    def from_items(cls, items: Sequence[PushItem], ids: Uuid7, producer_sub: str | None) -> Drafted:
        """Make ids, hashes, records and results in one pass; `items` are valid."""
        drafted = cls()
        results = drafted.results
        producer = b',"producerSub":%b}' % _encode(producer_sub)
        firsts: dict[tuple[Key, str], PushResult] = {}
        draft: Draft | None = None
        last: Key | None = None
        for index, (item, message_id) in enumerate(zip(items, ids.take(len(items)), strict=True)):
            key = (item.queue, partition_of(item))
            if draft is None or key != last:
                draft = drafted.drafts.get(key)
                if draft is None:
                    draft = drafted.drafts[key] = Draft(drafted.pending)
                last = key
            transaction_id = item.transaction_id or message_id  # none is empty
            message_json = transaction_json = _encode(message_id)
            result = PushResult(index, message_id, transaction_id, item.queue, PushStatus.QUEUED)
            results.append(result)
            if transaction_id is not message_id:
                first = firsts.setdefault((key, transaction_id), result)
                if first is not result:
                    result.status = PushStatus.DUPLICATE
                    drafted.repeats.append((result, first))
                    continue
                draft.generated = False
                transaction_json = _encode(transaction_id)
            trace = item.trace_id
            draft.records.append(
                b"".join(  # faster than a format
                    (
                        b'{"id":',
                        message_json,
                        b',"transactionId":',
                        transaction_json,
                        b',"traceId":',
                        b"null" if trace is None else _encode(valid_trace_id(trace)),
                        b',"data":',
                        item.payload,
                        producer,
                    )
                )
            )
            draft.hashes.append(hash_of(transaction_id))
            draft.results.append(result)
        for draft in drafted.drafts.values():
            draft.size = sum(map(len, draft.records))
        return drafted

    def finish(self) -> list[PushResult]:
        """Return the results once every draft is settled; a repeat shares its first one's fate."""
        for repeat, first in self.repeats:
            repeat.message_id = first.message_id
            repeat.error = first.error
            if first.status is not PushStatus.QUEUED:
                repeat.status = first.status
        return self.results


class Segment:
    """Drafts for one partition that will be one row; no transactionId stands in it twice."""

    __slots__ = ("drafts", "key", "messages", "sealed", "size", "supplied")

    def __init__(self, key: Key, draft: Draft) -> None:
        self.key = key
        self.drafts = [draft]
        self.messages = len(draft.records)
        self.size = draft.size
        # Hashes of the ids that clients chose; ids made here can't occur twice.
        self.supplied = set() if draft.generated else set(draft.hashes)
        self.sealed = False  # in flight: takes no more

    def hashes(self) -> list[bytes]:
        """The hashes of all messages, in offset order."""
        if len(self.drafts) == 1:
            return self.drafts[0].hashes
        return [h for draft in self.drafts for h in draft.hashes]

    def add_nowait(self, draft: Draft) -> bool:
        """Take the draft in, or say no: in flight, full, or one of its ids is here already.

        A repeated id waits for the next segment, where the database decides whether it is a
        duplicate: only it knows the queue's window.
        """
        if (
            self.sealed
            or self.messages + len(draft.records) > SEGMENT_MAX_MESSAGES
            or self.size + draft.size > SEGMENT_MAX_BYTES
        ):
            return False
        if not draft.generated:
            if not self.supplied.isdisjoint(draft.hashes):
                return False
            self.supplied.update(draft.hashes)
        self.drafts.append(draft)
        self.messages += len(draft.records)
        self.size += draft.size
        return True

    def drop_duplicates(self, originals: dict[int, str]) -> None:
        """Take out the messages at these positions: duplicates of the given message ids.

        A draft of which nothing is left is settled and goes too.
        """
        position = 0
        for draft in self.drafts:
            kept = []
            for k, result in enumerate(draft.results):
                original = originals.get(position)
                position += 1
                if original is None:
                    kept.append(k)
                else:
                    result.status = PushStatus.DUPLICATE
                    result.message_id = original
            if len(kept) < len(draft.results):
                draft.records = [draft.records[k] for k in kept]
                draft.hashes = [draft.hashes[k] for k in kept]
                draft.results = [draft.results[k] for k in kept]
                if not kept:
                    draft.settle()
        self.drafts = [draft for draft in self.drafts if draft.records]
