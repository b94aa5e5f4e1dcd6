"""The targets of acknowledgements: what one request says of one (partition, group), for SQL.

Shared by acks and transactions; what the arguments and verdicts mean is in sql/functions/040_ack.
"""

from __future__ import annotations

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
        if verdicts == "c" * len(self.results):
            for result in self.results:
                result.leaseReleased = lease_released
            return
        for ack, result, verdict in zip(self.acks, self.results, verdicts, strict=True):
            result.leaseReleased = lease_released
            if verdict == "d":
                result.dlq = True
            elif verdict == "n":
                result.noop = True
            elif verdict in _REFUSALS:
                result.success = False
                result.error = _REFUSALS[verdict].format(ack.transaction_id)


def sort_into_targets(acks: Sequence[Ack], results: Sequence[AckResult]) -> list[Target]:
    """Group the acks of one request; those without a partition are answered here."""
    targets: dict[tuple[UUID, str, str], Target] = {}
    target: Target | None = None
    last: tuple[UUID, str, str] | None = None
    for ack, result in zip(acks, results, strict=True):
        if ack.partition_id is None:
            result.success = False
            result.error = "unresolvable: partitionId is not a UUID"
            continue
        key = (ack.partition_id, ack.group, ack.lease_id or "")
        if target is None or key != last:  # in a batch they are the same: no need to hash them
            target = targets.get(key)
            if target is None:
                target = targets[key] = Target(*key)
            last = key
        target.add(ack, result)
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
        [b"".join([hash_of(ack.transaction_id) for ack in target.acks]) for target in targets],
        ["".join([ack.status.value for ack in target.acks]) for target in targets],
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
