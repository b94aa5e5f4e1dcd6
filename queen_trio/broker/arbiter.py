"""The arbiter: slots for write transactions, handed out by the law of admission.py (spec 4).

A slot is taken before the connection, always: who holds a connection never waits for a slot, so
the two can't wait for each other. Nothing is reserved for a lane; when the budget is used up its
share only tells who is woken first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import trio

from queen_trio.errors import DatabaseUnavailable
from queen_trio.metrics import SECONDS, Histogram
from queen_trio.model.admission import AdmissionStatistics, Lane, LaneStatistics

from .admission import AdmissionLaw

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from queen_trio.config import FlowConfig

# Lanes whose commits wait for a flush. A pop's lease is committed asynchronously, and a
# maintenance slot spans a whole cycle of its job: neither says anything about the WAL.
_FLUSHED: Final = frozenset({Lane.PUSH, Lane.ACK})


class _LaneState:
    """One lane; `share` is its part of the budget."""

    __slots__ = (
        "admitted_total", "flushed", "inflight", "seconds", "share", "wait_seconds", "waited_total",
        "waiters",
    )  # fmt: skip

    def __init__(self, lane: Lane) -> None:
        self.share = lane.value
        self.flushed = lane in _FLUSHED
        self.inflight = 0
        self.admitted_total = 0
        self.waited_total = 0
        self.wait_seconds = 0.0
        # Tasks that wait, first come first served; they are woken with the slot in their hands.
        # The values tell who is impatient.
        self.waiters: OrderedDict[trio.lowlevel.Task, bool] = OrderedDict()
        self.seconds = Histogram(SECONDS)


class Arbiter:
    """Hands out slots; run `serve` beside it, which adapts the budget."""

    def __init__(self, config: FlowConfig, pool_limit: Callable[[], int]) -> None:
        """`pool_limit` tells how many connections there can be now: the band follows from it."""
        self._config = config
        self._pool_limit = pool_limit
        band = config.admission_band(pool_limit())
        self._law = AdmissionLaw(band, config.train_gap_us / 1e6, trio.current_time())
        self._budget = self._law.budget
        self._inflight = 0
        self._waiting = 0
        self._refused: dict[trio.lowlevel.Task, str] = {}  # until the task runs
        self._lanes = {lane: _LaneState(lane) for lane in Lane}  # in the order of waking

    def slot(
        self, lane: Lane, deadline_seconds: float = float("inf"), *, impatient: bool = False
    ) -> Slot:
        """Return `async with arbiter.slot(lane) as left`: one admitted transaction.

        `left` is what remains of `deadline_seconds`; raises `DatabaseUnavailable` when there was no
        slot in time, or `refuse_impatient` ended the wait. Entering is a point of cancellation only
        if there is none at once; a task cancelled there holds nothing.
        """
        return Slot(self, self._lanes[lane], deadline_seconds, impatient)

    def refuse_impatient(self, reason: str) -> None:
        """End the waits of the impatient with a `DatabaseUnavailable` of that text."""
        for lane in self._lanes.values():
            for task in [task for task, impatient in lane.waiters.items() if impatient]:
                del lane.waiters[task]
                self._waiting -= 1
                self._refused[task] = reason
                trio.lowlevel.reschedule(task)

    async def serve(self) -> None:
        """Adapt the budget every tick until cancelled."""
        while True:
            await trio.sleep(self._config.tick_ms / 1000)
            self.tick()

    def tick(self) -> None:
        """Take one step of the law and wake whoever fits into the budget now."""
        band = self._config.admission_band(self._pool_limit())
        self._budget = self._law.tick(trio.current_time(), band)
        self._wake()
        if self._waiting:
            self._law.saturated()

    def statistics(self) -> AdmissionStatistics:
        """Return the numbers of this moment."""
        law = self._law
        return AdmissionStatistics(
            budget=self._budget,
            lo=law.band.lo,
            hi=law.band.hi,
            trains_per_second=law.trains_per_second,
            transactions_per_train=law.transactions_per_train,
            cycle_seconds=law.cycle_seconds,
            lanes={
                lane: LaneStatistics(
                    state.inflight,
                    len(state.waiters),
                    state.admitted_total,
                    state.waited_total,
                    state.wait_seconds,
                )
                for lane, state in self._lanes.items()
            },
        )

    def seconds(self) -> Mapping[Lane, Histogram]:
        """How long slots were held, by lane: the wait for a connection and the statement."""
        return {lane: state.seconds for lane, state in self._lanes.items()}

    # -- slots ---------------------------------------------------------------------------------

    def _admit(self, lane: _LaneState) -> None:
        self._inflight += 1
        lane.inflight += 1
        lane.admitted_total += 1

    def _leave(self, lane: _LaneState) -> None:
        self._inflight -= 1
        lane.inflight -= 1
        if self._waiting:
            self._wake()

    async def _wait(self, lane: _LaneState, deadline_seconds: float, impatient: bool) -> float:
        """Wait until `_wake` has admitted us; returns what is left of the time."""
        self._law.saturated()
        task = trio.lowlevel.current_task()
        lane.waiters[task] = impatient
        self._waiting += 1
        lane.waited_total += 1

        def abort(_: object) -> trio.lowlevel.Abort:
            # Not called any more once we are rescheduled: either we wait or have an answer.
            del lane.waiters[task]
            self._waiting -= 1
            return trio.lowlevel.Abort.SUCCEEDED

        since = trio.current_time()
        admitted = False
        try:
            with trio.move_on_after(deadline_seconds):
                await trio.lowlevel.wait_task_rescheduled(abort)
                admitted = True
        finally:
            waited = trio.current_time() - since
            lane.wait_seconds += waited
        if refusal := self._refused.pop(task, None):
            raise DatabaseUnavailable(refusal)
        if not admitted:
            raise DatabaseUnavailable(
                f"no admission slot within {deadline_seconds:g} s"
                f" (budget {self._budget}, waiting {self._waiting})"
            )
        return max(deadline_seconds - waited, 0.0)

    def _wake(self) -> None:
        """Admit those that wait, while there is room: lanes below their share first."""
        while self._waiting and self._inflight < self._budget:
            waiting = [lane for lane in self._lanes.values() if lane.waiters]
            below = (lane for lane in waiting if lane.inflight < lane.share * self._budget)
            lane = next(below, waiting[0])
            task, _ = lane.waiters.popitem(last=False)
            self._waiting -= 1
            self._admit(lane)
            trio.lowlevel.reschedule(task)


class Slot:
    """One admitted transaction; a class because a generator costs twice as much on each call."""

    __slots__ = ("_arbiter", "_deadline_seconds", "_impatient", "_lane", "_since")

    def __init__(
        self, arbiter: Arbiter, lane: _LaneState, deadline_seconds: float, impatient: bool
    ) -> None:
        self._arbiter = arbiter
        self._lane = lane
        self._deadline_seconds = deadline_seconds
        self._impatient = impatient
        self._since = 0.0

    async def __aenter__(self) -> float:
        arbiter, lane = self._arbiter, self._lane
        left = self._deadline_seconds
        if arbiter._inflight < arbiter._budget and not arbiter._waiting:
            arbiter._admit(lane)
        else:
            left = await arbiter._wait(lane, left, self._impatient)
        # From here on nothing blocks: a slot that was given can't get lost.
        self._since = now = trio.current_time()
        if lane.flushed:
            arbiter._law.admitted(self, now)
        return left

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        arbiter, lane = self._arbiter, self._lane
        now = trio.current_time()
        lane.seconds.observe(now - self._since)
        if lane.flushed:
            arbiter._law.finished(self, now, flushed=kind is None)
        arbiter._leave(lane)
