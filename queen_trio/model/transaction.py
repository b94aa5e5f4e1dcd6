"""What a transaction asks for, and what became of it (spec 2, "transaction")."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from .ack import Ack, AckResult
    from .message import PushItem, PushResult


class Refusal(Enum):
    """Why a transaction was not committed: the closed set of reasons on the wire."""

    BAD_REQUEST = "bad_request"
    DUPLICATE = "duplicate"
    ACK_REJECTED = "ack_rejected"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    DATABASE = "db_error"


@frozen
class TransactionRequest:
    """Valid pushes and acks, and leases that must be live."""

    pushes: list[PushItem]
    acks: list[Ack]
    required_leases: list[str] = field(factory=list)
    producer_sub: str | None = None


@frozen
class TransactionOutcome:
    """The results of both kinds, each in the order of the request; empty after a refusal."""

    pushes: list[PushResult] = field(factory=list)
    acks: list[AckResult] = field(factory=list)
    refusal: Refusal | None = None
    error: str | None = None
