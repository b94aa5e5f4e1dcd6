"""What a push adds to the log: drafts of single requests, gathered in segments."""

from __future__ import annotations

from typing import Final

import trio

from queen_trio.model.message import PushResult, PushStatus

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

    def fail(self, error: str) -> None:
        """Settle with every message `failed`."""
        for result in self.results:
            result.status = PushStatus.FAILED
            result.error = error
        self.settle()


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
