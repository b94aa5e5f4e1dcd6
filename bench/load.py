"""What one client process shall do, and what it tells of it: values that cross a pipe as JSON."""

from __future__ import annotations

import json
import random
from enum import StrEnum
from itertools import cycle
from typing import TYPE_CHECKING, Final

from attrs import asdict, field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

PAD: Final = "".join(random.Random(7).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=200))
# Limit of a load that ends by its time alone.
ENDLESS: Final = 10**12


def payload(number: int) -> str:
    """Payload `number` as JSON text, about 225 bytes."""
    return f'{{"i": {number}, "pad": "{PAD}"}}'


def number(body: str | bytes) -> int:
    """The number in a payload that was received as JSON text: every consumer decodes the whole."""
    return int(json.loads(body)["i"])


class Work(StrEnum):
    """What a client process does."""

    PREPARE = "prepare"
    PUSH = "push"
    DRAIN = "drain"
    LATENCY = "latency"
    PARK = "park"
    CREATE = "create"


@frozen(kw_only=True)
class Load:
    """The work of one client process.

    `peer` is a name of `bench.peers`; `address` is a port, or a libpq connection string;
    `consumer_address` is where consumers go, if it isn't the same. Numbers of messages begin at
    `first`; `count` ends the work (PUSH), or is how many samples to take (LATENCY, PARK), or how
    many partitions to make (CREATE). `seconds` ends PUSH and bounds DRAIN.
    """

    peer: str
    work: Work = field(converter=Work)
    address: str
    consumer_address: str = ""
    queue: str
    connections: int = 1
    batch: int = 1
    partitions: int = 64
    first: int = 0
    count: int = ENDLESS
    seconds: float = 60.0
    groups: int = 0  # consumers spread over this many groups; 0 is queue mode
    pace: float = 0.02  # seconds from one message to the next
    warmup: int = 0  # calls (PUSH: per connection) that are not measured

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Load:
        return cls(**json.loads(text))


def walk(load: Load, index: int) -> Iterator[int]:
    """The partitions that connection `index` of this load pushes into, one after another, for ever.

    Each connection goes through all in the same random order, from a place of its own.
    """
    partitions = list(range(load.partitions))
    random.Random(7).shuffle(partitions)
    begin = random.Random(load.first + index).randrange(load.partitions)
    return cycle(partitions[begin:] + partitions[:begin])


@frozen(kw_only=True)
class Outcome:
    """What one client process did between `begun` and `last` (seconds of the machine's clock).

    `total` is the sum of the numbers received, `unmeasured` counts the messages of the warm-up,
    `latencies` are seconds per call (or from send to receipt), `cpu` seconds of this process;
    `is_late` tells that the time ended the work. `version` is what PREPARE learned.
    """

    count: int
    total: int
    unmeasured: int
    begun: float
    last: float
    cpu: float
    latencies: list[float]
    is_late: bool = False
    version: str = ""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Outcome:
        return cls(**json.loads(text))
