"""Who waits for messages, and what wakes them: local commits at once, a fused re-probe otherwise.

Theory of operation. Parked pops that want the same thing (a `PopKey`) stand in one line. A commit
into a partition wakes one waiter of each line that it can serve: one more claim is possible, not
more. What a commit can't tell (a commit or a nack on another replica whose hint was lost) is found
by re-probing: each line has its own backoff, and one SQL call a tick asks for all lines that are
due, so that 10,000 idle pops are not 10,000 queries a second (spec 8.13). A probe also tells when
the next thing falls due (a delayed message, the end of a lease), and is repeated at that moment.

A push that is on its way to the database leads one of those who wait for it: that pop's question
goes right behind it and finds what it has committed. The news of the commit, which comes in
between, is then no reason to wake another; the next news of that partition is, and any after the
answer. Where pushes take long this doesn't pay, and rests for a while.

A pop enlists *before* it asks the database: a message committed while it asks sets its event, so no
wake falls between asking and waiting. A wake that its receiver no longer needs is passed on.
"""

from __future__ import annotations

import heapq
from contextlib import contextmanager
from itertools import count, islice
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio
from attrs import define, field, frozen

from queen_trio.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from queen_trio.config import PopConfig
    from queen_trio.store.pool import Sent
    from queen_trio.store.queries import Store

    from .candidates import Candidates
    from .segment import Key

log = structlog.get_logger(__name__)

# Lines that fall due within one tick share a query; a wake may come this much early.
TICK_SECONDS: Final = 0.025
# Bounds the duration of one probe; the rest is due in the next call.
PROBE_MAX_LINES: Final = 250
# Thousands of lines take milliseconds: after so many others have their turn.
LINES_A_TURN: Final = 50
# A push looks at so many of a line for one that it can lead.
LOOK_AT_MOST: Final = 16
# After a push that lasted, none leads for so long.
REST_SECONDS: Final = 5.0
_NOTHING: Final = (0, inf)


class PopKey(NamedTuple):
    """What a parked pop waits for; `queue` None means discovery by namespace and task ('' any)."""

    queue: str | None
    partition: str | None
    namespace: str
    task: str
    group: str


@define(eq=False)
class _Line:
    """Those who wait for one key, and when to probe for them next.

    `members` counts all that stand in line, `waiters` holds those not woken yet, first come first.
    """

    key: PopKey
    due: float
    interval: float
    empties: int = 0
    members: int = 0
    waiters: dict[Waiter, None] = field(factory=dict)
    leads: dict[Key, Lead] = field(factory=dict)  # what some of them ask about before its news

    def wake_first(self) -> None:
        """Wake the one that has waited longest, if any."""
        for waiter in self.waiters:
            del self.waiters[waiter]
            waiter.wake()
            break

    def first_idle(self) -> Waiter | None:
        """The one that has waited longest; None where the first ones are all asking already."""
        first = islice(self.waiters, LOOK_AT_MOST)
        return next((waiter for waiter in first if waiter.idle), None)

    def wake_all(self) -> None:
        for waiter in self.waiters:
            waiter.wake()
        self.waiters.clear()


@frozen(eq=False)
class Lead:
    """What a pop may ask behind: a push that is on its way, and those of its keys that it wants.

    Until `end` it keeps one news of each key back, the push's own.
    """

    push: Sent
    keys: list[Key]
    _leads: dict[Key, Lead]

    def end(self) -> None:
        """Let all news wake somebody again; whoever has it does that when the answer is there."""
        for key in self.keys:
            if self._leads.get(key) is self:
                del self._leads[key]


class Waiter:
    """One parked pop; a context manager that stands in line while its block runs.

    `room` is how many partitions a push may lead it to.
    """

    __slots__ = ("_asking", "_event", "_lead", "_line", "_wakeups", "idle", "room")

    def __init__(self, wakeups: Wakeups, line: _Line, room: int) -> None:
        self._wakeups = wakeups
        self._line = line
        self._event = trio.Event()
        self._asking = False  # woken, and what for is not yet decided
        self.room = room
        self.idle = False  # waits for a wake, and has none yet
        self._lead: Lead | None = None

    def __enter__(self) -> Waiter:
        self._line.members += 1
        self._wakeups.parked += 1
        self._stand()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._line.members -= 1
        self._wakeups.parked -= 1
        self._line.waiters.pop(self, None)
        unasked = self.take_lead()
        if unasked is not None:
            unasked.end()
        if self._event.is_set() or (self._asking and (kind is not None or unasked is not None)):
            self._line.wake_first()

    async def wait_woken(self) -> None:
        """Wait for a reason to ask the database again.

        Whoever leaves by an exception before it waits again has not asked: the next in line is
        woken instead.
        """
        if self._asking:
            self._wakeups.probe_soon(self._line)  # woken in vain: what there is may not be due yet
        self._asking = False
        self.idle = not self._event.is_set()
        try:
            await self._event.wait()
        finally:
            self.idle = False
        self._asking = True
        self._event = trio.Event()
        self._stand()

    def wake(self) -> None:
        """Let it ask; whoever calls takes it out of the line."""
        self.idle = False
        self._event.set()

    def wake_to_ask(self, lead: Lead) -> None:
        """Wake it, to ask behind a push."""
        del self._line.waiters[self]
        self._line.leads.update(dict.fromkeys(lead.keys, lead))
        self._lead = lead
        self.wake()

    def take_lead(self) -> Lead | None:
        """Take what it was woken to ask behind, if anything, and owe its `end`."""
        lead, self._lead = self._lead, None
        return lead

    def _stand(self) -> None:
        if self._wakeups.draining:
            self.wake()
        else:
            self._line.waiters[self] = None


@frozen
class WakeupStatistics:
    """Parked pops, those of them that ask the database just now, and what all wait for."""

    parked: int
    asking: int
    lines: int


class Wakeups:
    """All lines of one broker."""

    def __init__(self, store: Store, config: PopConfig) -> None:
        self._store = store
        self._config = config
        self._lines: dict[PopKey, _Line] = {}
        self._by_queue: dict[str | None, dict[PopKey, _Line]] = {}
        self._heap: list[tuple[float, int, _Line]] = []
        self._serial = count()
        self._changed = trio.Event()
        self._bounded: set[trio.CancelScope] = set()
        self.parked = 0
        self._asking = 0
        self._rests_until = -inf
        self.draining = False
        # Narrows the probe of a line to some partitions, and is told what it finds.
        self.candidates: Candidates | None = None

    def waiter(self, key: PopKey, room: int = 0) -> Waiter:
        """A place in the line of `key`, taken while its `with` block runs; see `Waiter.room`."""
        line = self._lines.get(key)
        if line is None:
            interval = self._config.wait_initial_ms / 1000
            line = _Line(key, trio.current_time() + interval, interval)
            self._lines[key] = line
            self._by_queue.setdefault(key.queue, {})[key] = line
            self._schedule(line)
        return Waiter(self, line, room)

    def notify(self, keys: Iterable[Key], group: str | None = None) -> None:
        """Tell that each (queue, partition) may have something to claim; `group` None: for all."""
        lines = self._by_queue
        if not lines:
            return
        for queue, partition in keys:
            for name in (queue, None):
                for line in lines.get(name, {}).values():
                    if (
                        line.key.partition in (None, partition)
                        and group in (None, line.key.group)
                        and line.leads.pop((queue, partition), None) is None
                    ):
                        line.wake_first()

    def lead(self, keys: Sequence[Key], push: Sent) -> None:
        """Let one parked pop ask right behind a push of these keys."""
        if not self.parked or trio.current_time() < self._rests_until:
            return
        of_queues: dict[str, dict[Key, None]] = {}
        for key in keys:
            if key[0] in self._by_queue:
                of_queues.setdefault(key[0], {})[key] = None
        for queue, of_queue in of_queues.items():
            for line in self._by_queue[queue].values():
                if line.key.partition is None or (queue, line.key.partition) in of_queue:
                    waiter = line.first_idle()
                    if waiter is not None and (wanted := self._wanted(line, of_queue, waiter.room)):
                        waiter.wake_to_ask(Lead(push, wanted, line.leads))
                        return

    def _wanted(self, line: _Line, keys: Iterable[Key], room: int) -> list[Key]:
        """Those of a queue's `keys` that a line waits for and nobody asks about or can have."""
        if self.candidates is None:
            room = min(room, 1)  # nothing would tell what the pop leaves of the others
        wanted = (
            key
            for key in keys
            if line.key.partition in (None, key[1])
            and key not in line.leads
            and (self.candidates is None or self.candidates.may_lead(line.key, key[1]))
        )
        return list(islice(wanted, room))

    def rest_leads(self) -> None:
        """Lead no pops for a while: a push has taken too long for that."""
        self._rests_until = trio.current_time() + REST_SECONDS

    def wake(self, queue: str, group: str) -> None:
        """Wake one pop that waits for any partition of the queue."""
        line = self._lines.get(PopKey(queue, None, "", "", group))
        if line is not None:
            line.wake_first()

    def wake_lines(self) -> None:
        """Wake one pop of every line."""
        for line in self._lines.values():
            line.wake_first()

    def notify_queue(self, queue: str) -> None:
        """Tell that anything may have changed in this queue: all who wait for it ask again."""
        for name in (queue, None):
            for line in self._by_queue.get(name, {}).values():
                line.wake_all()

    @contextmanager
    def bounded(self, deadline: float) -> Iterator[None]:
        """Cancel what a parked pop does in this block at `deadline`, or when all go home."""
        with trio.CancelScope(deadline=deadline) as scope:
            self._bounded.add(scope)
            try:
                yield
            finally:
                self._bounded.discard(scope)

    @contextmanager
    def asking(self, deadline: float) -> Iterator[None]:
        """A parked pop's look at the database, `bounded`.

        Without a bound a database that is away would keep it for as long as a connection may take.
        """
        self._asking += 1
        try:
            with self.bounded(deadline):
                yield
        finally:
            self._asking -= 1

    def drain(self) -> None:
        """Send every parked pop home, now and from now on (spec 4, "Shutdown")."""
        self.draining = True
        for scope in self._bounded:
            scope.cancel()
        for line in self._lines.values():
            line.wake_all()

    def probe_soon(self, line: _Line) -> None:
        """Start the line's backoff anew."""
        line.empties = 0
        line.interval = self._config.wait_initial_ms / 1000
        due = trio.current_time() + line.interval
        if due < line.due:
            line.due = due
            self._schedule(line)

    def statistics(self) -> WakeupStatistics:
        return WakeupStatistics(self.parked, self._asking, len(self._lines))

    async def serve(self) -> None:
        """Re-probe for parked pops until cancelled; a database that is away is asked again."""
        while True:
            self._changed = trio.Event()
            with trio.move_on_at(self._heap[0][0] if self._heap else inf):
                await self._changed.wait()
            due = self._take_due(trio.current_time() + TICK_SECONDS)
            if due:
                try:
                    found = await self._probe(due)
                except DatabaseError as error:
                    log.debug("probe failed", error=str(error), lines=len(due))
                    found = {}
                for turn in _turns(due):
                    for line in turn:
                        self._settle(line, *found.get(line.key, _NOTHING))
                    await trio.lowlevel.checkpoint()

    # -- probing -------------------------------------------------------------------------------

    def _schedule(self, line: _Line) -> None:
        heapq.heappush(self._heap, (line.due, next(self._serial), line))
        if self._heap[0][2] is line:
            self._changed.set()

    def _take_due(self, until: float) -> list[_Line]:
        due: list[_Line] = []
        while self._heap and self._heap[0][0] <= until and len(due) < PROBE_MAX_LINES:
            at, _, line = heapq.heappop(self._heap)
            if at != line.due:
                continue  # scheduled anew since
            if line.members:
                line.due = inf  # until it is settled
                due.append(line)
            else:
                self._forget(line)
        return due

    def _forget(self, line: _Line) -> None:
        line.due = inf
        del self._lines[line.key]
        siblings = self._by_queue[line.key.queue]
        del siblings[line.key]
        if not siblings:
            del self._by_queue[line.key.queue]

    async def _probe(self, due: list[_Line]) -> dict[PopKey, tuple[int, float]]:
        """For each key with anything in sight: how many can be served, seconds until one more."""
        asked: list[tuple[_Line, PopKey]] = []
        for turn in _turns(due):
            asked += [(line, key) for line in turn for key in self._probe_keys(line.key)]
            await trio.lowlevel.checkpoint()
        if not asked:
            return {}
        rows = await self._store.probe(
            [key.queue for _, key in asked],
            [key.partition for _, key in asked],
            [key.namespace for _, key in asked],
            [key.task for _, key in asked],
            [key.group for _, key in asked],
            [len(line.waiters) for line, _ in asked],
        )
        found: dict[PopKey, tuple[int, float]] = {}
        for row in rows:
            line, key = asked[row.ord - 1]
            available, seconds = found.get(line.key, _NOTHING)
            due_seconds = inf if row.due_ms is None else row.due_ms / 1000
            found[line.key] = (available + row.available, min(seconds, due_seconds))
            if row.available and key is not line.key and self.candidates is not None:
                self.candidates.promote(key.queue or "", key.partition or "", key.group)
        return found

    def _probe_keys(self, key: PopKey) -> list[PopKey]:
        """What to ask for a line: all of it, or only the partitions that the hot-list defers."""
        names = None if self.candidates is None else self.candidates.deferred(key)
        return [key] if names is None else [key._replace(partition=name) for name in names]

    def _settle(self, line: _Line, available: int, due_seconds: float) -> None:
        """Wake as many as can be served, and choose when to probe for the line again."""
        if available:
            line.empties = 0
            line.interval = self._config.wait_initial_ms / 1000
            for _ in range(available):
                line.wake_first()
        else:
            line.empties += 1
            if line.empties >= self._config.backoff_threshold:
                line.interval = min(
                    line.interval * self._config.backoff_multiplier, self._config.max_ms / 1000
                )
        line.due = min(line.due, trio.current_time() + min(line.interval, due_seconds))
        self._schedule(line)


def _turns(lines: list[_Line]) -> Iterator[list[_Line]]:
    for start in range(0, len(lines), LINES_A_TURN):
        yield lines[start : start + LINES_A_TURN]
