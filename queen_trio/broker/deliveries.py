"""What pops of this broker have delivered: it tells whether an ack completes all of a batch.

Most acks do, in the batch's order. Whoever remembers the batch sees that by comparing, and the
database need not: no hashes are computed, sent, read and compared there (sql/functions/040_ack). It
is a memory only: what it has forgotten, or another broker has delivered, is acked by hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from queen_trio.model.pop import Claim

_encode: Final = msgspec.json.encode

# Of messages that are out under a lease; the oldest are forgotten first.
MAX_BYTES: Final = 8 * 1024 * 1024
# In a message as `Drafted.from_items` writes it: what stands before its transactionId.
_BEFORE: Final = len('{"id":"01234567-89ab-7cde-8f01-23456789abcd"')

_Key = tuple[str, "UUID"]


class Deliveries:
    """Batches by lease and partition, each until its first ack."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._batches: OrderedDict[_Key, tuple[list[bytes], int]] = OrderedDict()

    def note(self, claim: Claim) -> None:
        """Remember what a claim delivers; nothing of one without a lease."""
        if not claim.lease_id:
            return
        for part in claim.partitions:
            entries = part.segments[0].entries
            for segment in part.segments[1:]:
                entries = entries + segment.entries
            size = sum(map(len, entries))
            self._batches[claim.lease_id, part.partition_id] = entries, size
            self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, size) = self._batches.popitem(last=False)
            self._bytes -= size

    def complete(self, lease_id: str, partition_id: UUID, transaction_ids: Sequence[str]) -> bool:
        """Say whether these are the messages of a batch, all and in its order; it is forgotten.

        False where that isn't known.
        """
        entries, size = self._batches.pop((lease_id, partition_id), ((), 0))
        self._bytes -= size
        if len(entries) != len(transaction_ids):
            return False
        return all(
            entry.startswith(b',"transactionId":%b,' % _encode(transaction_id), _BEFORE)
            for entry, transaction_id in zip(entries, transaction_ids, strict=True)
        )
