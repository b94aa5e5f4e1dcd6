"""What an operator asks for: messages by status, dead letters by where and when they failed."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID


class MessageStatus(Enum):
    """What a message is to one consumer group."""

    PENDING = "pending"
    PROCESSING = "processing"
    COMPLETED = "completed"
    DEAD_LETTER = "dead_letter"


@frozen(kw_only=True)
class Page:
    """`limit` rows from the `offset`-th on; an answer may end early where it would grow large."""

    limit: int
    offset: int


@frozen(kw_only=True)
class DeadLetterFilter:
    """Which dead letters; None matches all. They failed in [since, until)."""

    queue: str | None = None
    group: str | None = None
    partition: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@frozen(kw_only=True)
class MessageFilter:
    """Which messages; None matches all, but `since` None is an hour before `until` or now.

    They were created in [since, until); `status` is judged for `group`.
    """

    group: str
    queue: str | None = None
    partition: str | None = None
    namespace: str | None = None
    task: str | None = None
    status: MessageStatus | None = None
    since: datetime | None = None
    until: datetime | None = None


class ReplayVerdict(Enum):
    """What became of a dead letter that was to be moved back into its queue."""

    MOVED = "moved"
    DUPLICATE = "duplicate"
    MISSING = "missing"


@frozen
class Replay:
    """A verdict other than `missing`, and the message that the dead letter is now."""

    verdict: ReplayVerdict
    queue: str
    partition: str
    partition_id: UUID
    offset: int
    message_id: str
    transaction_id: str


class Filing(Enum):
    """What became of a message that was to be dead-lettered by hand."""

    FILED = "filed"
    LEASED = "leased"
    BEHIND = "behind"
    NO_CURSOR = "no_cursor"
    MISSING = "missing"
