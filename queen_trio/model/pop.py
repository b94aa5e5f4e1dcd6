"""What a pop asks for, and what it gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from .names import QUEUE_MODE_GROUP

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from queen_trio.config import SubscriptionMode


@frozen(kw_only=True)
class PopRequest:
    """A valid pop (spec 2, "GET pop"); `queue` None means discovery by namespace and task ('' any).

    `partitions` None means no cap. `since` is the subscription point asked for. `timeout` is in
    seconds; None doesn't wait at all.
    """

    queue: str | None
    mode: SubscriptionMode
    partition: str | None = None
    namespace: str = ""
    task: str = ""
    group: str = QUEUE_MODE_GROUP
    batch: int = 200
    partitions: int | None = 1
    auto_ack: bool = False
    lease_seconds: int | None = None
    since: datetime | None = None
    timeout: float | None = None


@frozen
class ClaimedSegment:
    """Messages of one segment in offset order, as entries (store/segments.py)."""

    created_at: datetime
    entries: list[bytes]


@frozen
class ClaimedPartition:
    """What a pop took from one partition, in offset order."""

    partition_id: UUID
    partition: str
    queue: str
    delivery_attempt: int
    segments: list[ClaimedSegment]


@frozen
class Claim:
    """The answer of a pop that found something; `lease_id` is empty with autoAck."""

    lease_id: str
    group: str
    partitions: list[ClaimedPartition]

    @property
    def count(self) -> int:
        """How many messages it has."""
        return sum(len(s.entries) for part in self.partitions for s in part.segments)
