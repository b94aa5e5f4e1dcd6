"""What clients of a cluster saw, and what was done to it. Times are seconds of one monotonic clock.

An event is noted when its answer has come or is given up: `answered` is None then, and whether it
happened is unknown. Nothing here does I/O; the checker reads it, the load and the faults write it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from attrs import define, field, frozen


class Place(NamedTuple):
    """Where order and uniqueness are promised."""

    queue: str
    partition: str


class Status(Enum):
    """What a pushed item was answered."""

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    BUFFERED = "buffered"
    FAILED = "failed"
    UNKNOWN = "unknown"


@frozen
class Push:
    """One attempt to push one item: the one at `index` of a request."""

    request: int
    index: int
    broker: int
    place: Place
    transaction_id: str
    sent: float
    answered: float | None
    status: Status
    message_id: str | None = None


@frozen
class Claim:
    """Messages of one partition, as one pop handed them out."""

    group: str
    place: Place
    lease: str
    sent: float
    received: float
    lease_seconds: float
    attempt: int
    transaction_ids: tuple[str, ...]
    message_ids: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"<{self.group} in {self.place.queue}/{self.place.partition}: {len(self.message_ids)}"
            f" messages {self.transaction_ids[0]} … {self.transaction_ids[-1]}, attempt"
            f" {self.attempt}, {self.sent:.3f} … {self.received:.3f}"
            f" + {self.lease_seconds:g} s, lease {self.lease}>"
        )


@frozen
class Extension:
    """A lease's life was renewed: it ends no earlier than `seconds` after `sent`."""

    lease: str
    sent: float
    seconds: float


class Verb(Enum):
    """What a consumer said of a message."""

    COMPLETED = "completed"
    FAILED = "failed"
    RETRY = "retry"
    DLQ = "dlq"


class Said(NamedTuple):
    """One item of an ack, whether the broker agreed, and whether it is a dead letter now."""

    transaction_id: str
    verb: Verb
    success: bool | None
    dead: bool = False


@frozen
class Ack:
    """What one request said of the messages of one claim; maybe in a transaction's attempt."""

    group: str
    place: Place
    lease: str
    sent: float
    answered: float | None
    said: tuple[Said, ...]
    transaction: int | None = None


class Outcome(Enum):
    """What became of one attempt of a transaction."""

    COMMITTED = "committed"
    REPEATED = "refused, for an earlier attempt has committed"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@frozen
class Transaction:
    """One attempt of a transaction: what it pushed; what it acked is an `Ack`, if it may have."""

    number: int
    sent: float
    answered: float | None
    outcome: Outcome
    pushed: tuple[tuple[Place, str], ...]


@frozen
class Seek:
    """A group was put back: to `target`, or somewhere before; to the beginning if that is None."""

    group: str
    places: tuple[Place, ...]
    sent: float
    answered: float | None
    target: str | None


class Letter(NamedTuple):
    """A dead letter: whose, and of which message."""

    group: str
    place: Place
    transaction_id: str


class Kind(Enum):
    """What can be done to a cluster."""

    BROKER_KILL = "broker kill -9"
    BROKER_STOP = "broker SIGTERM"
    MESH_CUT = "mesh cut"
    MESH_STALL = "mesh stalled"
    MAINTENANCE = "push maintenance"
    POSTGRES_KILL = "PostgreSQL kill -9"
    POSTGRES_RESTART = "PostgreSQL restart"
    POSTGRES_FREEZE = "PostgreSQL SIGSTOP"
    BACKENDS_TERMINATED = "backends terminated"
    DATABASE_CUT = "database link cut"
    HTTP_CRASH = "http nursery crashed"
    DISK_FULL = "disk full"
    MESH_CRASH = "mesh nursery crashed"
    JOBS_CRASH = "jobs nursery crashed"
    JOB_CRASH = "job crashed"
    CLOCK_JUMP = "clock jumped"


@frozen
class Blow:
    """A fault, from its first moment until everything was put back."""

    kind: Kind
    target: int | None
    began: float
    ended: float


@define
class History:
    """All of it, each list in the order of its answers."""

    groups: frozenset[str]
    """Groups that subscribed to everything, from the beginning."""
    pushes: list[Push] = field(factory=list)
    claims: list[Claim] = field(factory=list)
    extensions: list[Extension] = field(factory=list)
    acks: list[Ack] = field(factory=list)
    transactions: list[Transaction] = field(factory=list)
    seeks: list[Seek] = field(factory=list)
    moves: dict[str, Letter] = field(factory=dict)
    """Dead letters that somebody tried to move back, by id; they become `dlq:<id>`."""
    blows: list[Blow] = field(factory=list)
