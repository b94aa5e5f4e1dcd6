"""The hot-list: which partitions may have something for a group, so that pops needn't look.

Theory of operation. For each (queue, group) that is popped from there is a ring of candidates. A
partition is in one of four states in it:

    idle        not in the ring: nothing to claim, as far as we know
    ready       worth asking the database about, in the order in which it became so
    in flight   a pop is asking about it right now
    deferred    nothing before a deadline: leased until then, or its next message is due then

             mark                  take
    idle ──────────▶ ready ◀──────────────▶ in flight ──▶ idle       verdict EMPTY
                       ▲       REQUEUE          │
                       │                        └───────▶ deferred   verdict LEASED, TOOK
                       └──── promote, deadline ─────────────┘

The database decides; the ring only saves questions. So it may hold an entry too many (a wasted
look), never one too few (a message that waits for the next reseed). What could lose an entry is
news that arrives while an answer from before it is on its way: an entry in flight notes what it
hears, and its verdict counts only as far as nothing newer contradicts it. News of messages leaves a
deferred entry where it is, since the lease or delay that it waits for is not over; a promotion says
that it is. A release says it too, of a lease that left nothing: such an entry is ready, but behind
all others, since it is one too many unless a message came meanwhile and its news was lost. Where
there was news the entry is one like any other: the end of a lease and a push may be committed side
by side, and then the former doesn't know of the latter's messages.

A ring begins unseeded: until the database has named all candidates once, absence means nothing. One
that grows too large becomes so again, and one that nobody pops from is swept.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from enum import Enum, IntEnum
from itertools import count, islice
from math import inf
from typing import TYPE_CHECKING, Final

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# A ring that nobody has popped from for so long is forgotten.
SWEEP_SECONDS: Final = 600.0
# Entries of one ring, about 150 bytes each; past it its pops let the database look for itself.
MAX_ENTRIES: Final = 200_000


class Verdict(Enum):
    """What the database said of a candidate; the value is its letter in SQL."""

    TOOK = "t"
    EMPTY = "e"
    LEASED = "l"
    REQUEUE = "r"


class _News(IntEnum):
    """What an entry in flight has heard since it was taken."""

    NOTHING = 0
    MARKED = 1
    PROMOTED = 2


class _Agenda:
    """What is to be done for all rings, so that nobody walks thousands to find the few.

    `stirred` has the rings that got a ready entry since somebody looked; deferred entries are kept
    by when they fall due, the earliest first.
    """

    def __init__(self) -> None:
        self.stirred: set[Ring] = set()
        self._heap: list[tuple[float, int, Ring, str]] = []
        self._serial = count()

    def push(self, deadline: float, ring: Ring, partition: str) -> None:
        heapq.heappush(self._heap, (deadline, next(self._serial), ring, partition))

    @property
    def earliest(self) -> float:
        return self._heap[0][0] if self._heap else inf

    def pop_due(self, now: float) -> Iterator[tuple[float, Ring, str]]:
        while self._heap and self._heap[0][0] <= now:
            deadline, _, ring, partition = heapq.heappop(self._heap)
            yield deadline, ring, partition


@define(eq=False)
class Ring:
    """The candidates of one (queue, group)."""

    queue: str
    group: str
    used_at: float
    _agenda: _Agenda
    max_entries: int = MAX_ENTRIES
    seeded: bool = False
    oversized: bool = False  # the database named too many: not to be asked before the next unseed
    _outdated: bool = False  # what the seeding under way brings
    _ready: OrderedDict[str, None] = field(factory=OrderedDict)
    # Ready, too, but nobody has told of messages: asked about when nothing else is left.
    _doubtful: OrderedDict[str, None] = field(factory=OrderedDict)
    _deferred: dict[str, float] = field(factory=dict)
    _told: set[str] = field(factory=set)  # those of them of which there was news of messages
    _in_flight: dict[str, _News] = field(factory=dict)

    def __len__(self) -> int:
        return len(self._ready) + len(self._doubtful) + len(self._deferred) + len(self._in_flight)

    @property
    def ready(self) -> int:
        """How many candidates are worth asking about now."""
        return len(self._ready) + len(self._doubtful)

    @property
    def promising(self) -> int:
        """How many of them have messages, as far as we were told."""
        return len(self._ready)

    @property
    def deferred(self) -> list[str]:
        """The partitions that wait for a deadline."""
        return list(self._deferred)

    def mark(self, partition: str) -> bool:
        """Note new messages; True when that makes the partition ready."""
        news = self._in_flight.get(partition)
        if news is not None:
            self._in_flight[partition] = max(news, _News.MARKED)
            return False
        if partition in self._deferred:
            self._told.add(partition)
            return False
        return self._make_ready(partition)

    def promote(self, partition: str) -> bool:
        """Note that what a partition was deferred for is over; True when that makes it ready."""
        if partition in self._in_flight:
            self._in_flight[partition] = _News.PROMOTED
            return False
        self._end_deferral(partition)
        return self._make_ready(partition)

    def release(self, partition: str) -> bool:
        """Note that a lease is over which left nothing: only what came since may be there.

        Whoever pushed that tells, so without news it is looked at last; but news may be lost. True
        when there was some.
        """
        if partition in self._in_flight:
            self._in_flight[partition] = _News.PROMOTED
            return False
        if partition in self._ready:
            return False
        if self._end_deferral(partition):
            return self._make_ready(partition)
        self._make_ready(partition, self._doubtful)
        return False

    def take(self, most: int) -> list[str]:
        """Take the first candidates; each of them must get a verdict."""
        taken: list[str] = []
        for entries in (self._ready, self._doubtful):
            while entries and len(taken) < most:
                partition, _ = entries.popitem(last=False)
                self._in_flight[partition] = _News.NOTHING
                taken.append(partition)
        return taken

    def take_deferred(self, most: int) -> list[str]:
        """Take some deferred entries before their time; each of them must get a verdict."""
        taken = list(islice(self._deferred, most))
        for partition in taken:
            self._end_deferral(partition)
            self._in_flight[partition] = _News.NOTHING
        return taken

    def may_ask(self, partition: str) -> bool:
        """Whether a question about this one would tell anything: nobody asks or waits for it."""
        return partition not in self._in_flight and partition not in self._deferred

    def take_these(self, partitions: Sequence[str]) -> list[str]:
        """Take those of these that are worth it, ready or not; each must get a verdict."""
        taken = [partition for partition in partitions if self.may_ask(partition)]
        for partition in taken:
            self._ready.pop(partition, None)
            self._doubtful.pop(partition, None)
            self._in_flight[partition] = _News.NOTHING
        return taken

    def settle(self, partition: str, verdict: Verdict, until: float = inf) -> None:
        """Apply the database's verdict on a taken entry; `until` is when a deferral ends."""
        news = self._in_flight.pop(partition)
        if verdict is Verdict.REQUEUE or news is _News.PROMOTED:
            self._make_ready(partition)
        elif verdict in (Verdict.LEASED, Verdict.TOOK):
            self._deferred[partition] = until
            if news is _News.MARKED:
                self._told.add(partition)
            self._agenda.push(until, self, partition)
        elif news is _News.MARKED:
            self._make_ready(partition)

    def begin_seed(self) -> None:
        """The database is being asked for `seed`, by one pop at a time."""
        self._outdated = False

    def seed(self, partitions: Sequence[str]) -> None:
        """Take in all candidates as the database names them; deferrals are looked at again.

        An `unseed` since it was asked stands.
        """
        self.seeded = not self._outdated
        for partition in partitions:
            self.promote(partition)

    def unseed(self) -> None:
        """From now on absence means nothing."""
        self.seeded = False
        self.oversized = False
        self._outdated = True

    def end_deferral(self, partition: str, deadline: float) -> bool:
        """Make ready what was deferred until `deadline`, unless it has moved on since."""
        if self._deferred.get(partition) != deadline:
            return False
        self._end_deferral(partition)
        return self._make_ready(partition)

    def _end_deferral(self, partition: str) -> bool:
        """Take an entry out of the deferred, if it is one; True when there was news of it."""
        told = partition in self._told
        self._told.discard(partition)
        self._deferred.pop(partition, None)
        return told

    def _make_ready(self, partition: str, among: OrderedDict[str, None] | None = None) -> bool:
        if partition in self._ready or (partition in self._doubtful and among is not None):
            return False
        self._doubtful.pop(partition, None)
        if len(self) >= self.max_entries:
            self.unseed()
            self._ready.clear()  # nobody takes from an unseeded ring: room for the next seed
            self._doubtful.clear()
            return False
        (self._ready if among is None else among)[partition] = None
        self._agenda.stirred.add(self)
        return True


@frozen
class HotlistStatistics:
    """Rings, and their entries by state."""

    rings: int
    entries: int
    ready: int


class Hotlist:
    """All rings of one broker; no I/O, and the time is an argument."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._rings: dict[str, dict[str, Ring]] = {}
        self._agenda = _Agenda()

    def ring(self, queue: str, group: str, now: float) -> Ring:
        """The ring of a (queue, group), made when there is none."""
        groups = self._rings.setdefault(queue, {})
        ring = groups.get(group)
        if ring is None:
            ring = Ring(queue, group, now, self._agenda, self._max_entries)
            groups[group] = ring
        ring.used_at = now
        return ring

    def mark(self, queue: str, partition: str) -> list[Ring]:
        """Note new messages of a partition; returns the rings in which that made it ready."""
        return [ring for ring in self._rings_of(queue) if ring.mark(partition)]

    def promote(self, queue: str, partition: str, group: str) -> None:
        """Note that a lease of the group has ended early."""
        ring = self.find(queue, group)
        if ring is not None:
            ring.promote(partition)

    def release(self, queue: str, partition: str, group: str) -> Ring | None:
        """The same of a lease that left nothing; returns the ring where there was news since."""
        ring = self.find(queue, group)
        return ring if ring is not None and ring.release(partition) else None

    def unseed(self, queue: str | None = None) -> None:
        """Let the rings of a queue, or all, be seeded anew: it finds whatever was missed."""
        for name in list(self._rings) if queue is None else [queue]:
            for ring in self._rings_of(name):
                ring.unseed()

    def drop(self, queue: str) -> None:
        """Forget the rings of a queue."""
        self._rings.pop(queue, None)

    @property
    def next_deadline(self) -> float:
        """When the next deferred entry may become ready; infinite when none will."""
        return self._agenda.earliest

    def advance(self, now: float) -> list[Ring]:
        """End the deferrals that are due; returns the ring of each entry that became ready."""
        return [
            ring
            for deadline, ring, partition in self._agenda.pop_due(now)
            if ring.end_deferral(partition, deadline)
        ]

    def find(self, queue: str, group: str) -> Ring | None:
        """The ring of a (queue, group), if there is one."""
        return self._rings.get(queue, {}).get(group)

    def with_ready(self) -> list[Ring]:
        """The rings that have something to ask about."""
        rings = [
            ring
            for ring in self._agenda.stirred
            if ring.ready and self.find(ring.queue, ring.group) is ring
        ]
        self._agenda.stirred = set(rings)
        return rings

    @property
    def is_empty(self) -> bool:
        """Whether there are no rings."""
        return not self._rings

    def sweep(self, now: float) -> None:
        """Forget rings that nobody has popped from for long."""
        for queue, groups in list(self._rings.items()):
            for group, ring in list(groups.items()):
                if now - ring.used_at >= SWEEP_SECONDS:
                    del groups[group]
            if not groups:
                del self._rings[queue]

    def statistics(self) -> HotlistStatistics:
        rings = [ring for groups in self._rings.values() for ring in groups.values()]
        return HotlistStatistics(
            len(rings), sum(map(len, rings)), sum(ring.ready for ring in rings)
        )

    def _rings_of(self, queue: str) -> list[Ring]:
        groups = self._rings.get(queue)
        return list(groups.values()) if groups else []
