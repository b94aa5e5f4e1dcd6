"""The targets of acknowledgements: what one request says of one (partition, group), for SQL.

Shared by acks and transactions; what the arguments and verdicts mean is in sql/functions/040_ack.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec

from queen_trio.model.ack import Ack, AckResult, AckStatus
from queen_trio.model.encryption import letter_payload
from queen_trio.model.message import hash_of
from queen_trio.store import segments

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from queen_trio.store.queries import AckArguments, Store

_encode = msgspec.json.encode


class Target:
    """What one request says of one (partition, group) under one lease."""

    __slots__ = (
        "group", "lease_id", "letters", "partition_id", "results", "statuses", "transaction_ids",
        "whole",
    )  # fmt: skip

    def __init__(self, partition_id: UUID, group: str, lease_id: str) -> None:
        self.partition_id = partition_id
        self.group = group
        self.lease_id = lease_id
        # Aligned, one element an item; of a status its letter in SQL.
        self.transaction_ids: list[str] = []
        self.statuses = ""
        self.results: list[AckResult] = []
        # By position, what a dead letter would need; complete once the message has been read.
        self.letters: dict[int, dict[str, Any]] = {}
        self.whole = False
        """It completes all of the batch that its lease stands for: no hashes are needed."""

    def add(self, ack: Ack, results: Sequence[AckResult]) -> None:
        if ack.status in (AckStatus.FAILED, AckStatus.DEAD_LETTER):
            error = ack.error and ack.error.replace("\0", "\ufffd")
            for item, transaction_id in enumerate(ack.transaction_ids, len(self.statuses)):
                self.letters[item] = {"error": error, "transactionId": transaction_id}
        self.transaction_ids += ack.transaction_ids
        self.statuses += ack.status.value * len(ack.transaction_ids)
        self.results += results

    async def read_letter(self, store: Store, offset: int) -> None:
        """Read the message at `offset` into the letters of its transactionId."""
        rows = await store.segments_at(self.partition_id, [offset])
        if rows:
            record = segments.split(segments.decode(rows[0].blob))[offset - rows[0].base_offset]
            found = letter_of(record, rows[0].created_at)
        else:  # retention was faster: the dead letter still tells that it was there
            found = {"messageId": "", "payload": "null"}
        for letter in self.letters.values():
            if letter["transactionId"] == found.get("transactionId", letter["transactionId"]):
                letter.update(found, offset=offset)

    def answer(self, verdicts: str, *, lease_released: bool) -> None:
        """Fill in the results from the letters that SQL sent back, one an item."""
        if lease_released:
            for result in self.results:
                result.leaseReleased = True
        if verdicts == "c" * len(self.results):
            return
        for result, verdict in zip(self.results, verdicts, strict=True):
            if verdict == "d":
                result.dlq = True
            elif verdict == "n":
                result.noop = True
            elif verdict in _REFUSALS:
                result.success = False
                result.error = _REFUSALS[verdict].format(result.transactionId)


def results_for(acks: Sequence[Ack]) -> list[AckResult]:
    """One result for each message, in order; a success until more is known."""
    ids = chain.from_iterable([ack.transaction_ids for ack in acks])
    return [AckResult(index, transaction_id, True) for index, transaction_id in enumerate(ids)]


def sort_into_targets(acks: Sequence[Ack], results: Sequence[AckResult]) -> list[Target]:
    """Group the acks of one request; those without a partition are answered here."""
    targets: dict[tuple[UUID, str, str], Target] = {}
    start = 0
    for ack in acks:
        mine = results[start : start + len(ack.transaction_ids)]
        start += len(mine)
        if ack.partition_id is None:
            for result in mine:
                result.success = False
                result.error = "unresolvable: partitionId is not a UUID"
            continue
        key = (ack.partition_id, ack.group, ack.lease_id or "")
        target = targets.get(key)
        if target is None:
            target = targets[key] = Target(*key)
        target.add(ack, mine)
    return list(targets.values())


def ack_arguments(targets: Sequence[Target]) -> AckArguments:
    """The arguments of ack_v1: aligned, one element a target, and the letters as JSON."""
    letters = [
        {"target": position, "item": item, **letter}
        for position, target in enumerate(targets, start=1)
        for item, letter in target.letters.items()
    ]
    return (
        [target.partition_id for target in targets],
        [target.group for target in targets],
        [target.lease_id for target in targets],
        [
            b"" if target.whole else b"".join(map(hash_of, target.transaction_ids))
            for target in targets
        ],
        [target.statuses for target in targets],
        _encode(letters).decode() if letters else "[]",
    )


def letter_of(record: bytes, created_at: datetime) -> dict[str, Any]:
    """What a dead letter keeps of a message, under the names that SQL knows."""
    message = _decode_message(record)
    return {
        "transactionId": message.transactionId,
        "messageId": message.id,
        "traceId": message.traceId,
        "producerSub": message.producerSub,
        "payload": letter_payload(record, bytes(message.data)),
        "createdAt": created_at.isoformat(),
    }


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
