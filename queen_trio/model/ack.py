"""What an acknowledgement says, and what became of it (spec 2, "Ack")."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec
from attrs import frozen

if TYPE_CHECKING:
    from uuid import UUID

RETRY_WORDS: Final = frozenset({"retry"})
DEAD_LETTER_WORDS: Final = frozenset({"dlq"})
COMPLETED_WORDS: Final = frozenset({"completed", "success", "acked", "ok"})


class AckStatus(Enum):
    """What the consumer did with a message; the value is its letter in SQL."""

    COMPLETED = "c"
    FAILED = "f"
    RETRY = "r"
    DEAD_LETTER = "d"


def ack_status(word: str | None) -> AckStatus:
    """Read a status as the wire says it: absent is completed, an unknown word is failed."""
    if word is None or word in COMPLETED_WORDS:
        return AckStatus.COMPLETED
    if word in RETRY_WORDS:
        return AckStatus.RETRY
    return AckStatus.DEAD_LETTER if word in DEAD_LETTER_WORDS else AckStatus.FAILED


@frozen
class Ack:
    """The same said of some messages; `partition_id` None is a partitionId that is no UUID.

    In most requests that is all of a batch, so nothing here is kept once a message.
    """

    transaction_ids: list[str]
    partition_id: UUID | None
    group: str
    status: AckStatus = AckStatus.COMPLETED
    lease_id: str | None = None
    error: str | None = None


class AckResult(msgspec.Struct, gc=False):
    """The answer to one acknowledgement; its field names are those of the wire."""

    index: int
    transactionId: str
    success: bool
    error: str | None = None
    leaseReleased: bool = False
    dlq: bool = False
    noop: bool = False
