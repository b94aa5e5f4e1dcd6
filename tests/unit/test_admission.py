"""The law of admission against a model of PostgreSQL's WAL flushes; no clocks."""

from __future__ import annotations

import heapq
from itertools import count, pairwise

import pytest
from attrs import define, field

from queen_trio.broker.admission import AdmissionLaw, Trains
from queen_trio.config import AdmissionBand

GAP = 300e-6
TICK = 0.1  # 50 flushes
EXECUTE = 0.001  # what a transaction does before it asks for a flush
APART = 20e-6  # between two completions of one train


@define(eq=False)
class Pipeline:
    """Clients without end that share one WAL: a flush takes its time and carries at most `width`.

    `width` stands for whatever a real server has enough of up to some point: cores, WAL buffers.
    """

    law: AdmissionLaw
    clients: int
    width: int
    flush_seconds: float = 0.002
    now: float = 0.0
    budget: int = 0
    inflight: int = 0
    committed: int = 0
    _waiting: list[int] = field(factory=list)  # for a flush
    _events: list[tuple[float, int, str, int]] = field(factory=list)
    _order: count[int] = field(factory=count)
    _flushing: bool = False
    _names: count[int] = field(factory=count)

    def run(self, ticks: int) -> list[int]:
        """Let time pass and return the budget after each tick."""
        self.budget = self.budget or self.law.budget
        budgets: list[int] = []
        self._at(self.now + TICK, "tick")
        self._admit()
        while len(budgets) < ticks:
            self.now, _, what, name = heapq.heappop(self._events)
            if what == "tick":
                self.budget = self.law.tick(self.now, self.law.band)
                budgets.append(self.budget)
                if len(budgets) < ticks:
                    self._at(self.now + TICK, "tick")
            elif what == "executed":
                self._waiting.append(name)
            elif what == "flushed":
                self._flushing = False
            else:
                self.inflight -= 1
                self.committed += 1
                self.law.finished(name, self.now, flushed=True)
            self._admit()
            self._flush()
        return budgets

    def _at(self, when: float, what: str, name: int = 0) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, name))

    def _admit(self) -> None:
        while self.inflight < min(self.budget, self.clients):
            self.inflight += 1
            name = next(self._names)
            self.law.admitted(name, self.now)
            self._at(self.now + EXECUTE, "executed", name)
        if self.clients > self.inflight:
            self.law.saturated()

    def _flush(self) -> None:
        if self._flushing or not self._waiting:
            return
        self._flushing = True
        train, self._waiting = self._waiting[: self.width], self._waiting[self.width :]
        done = self.now + self.flush_seconds
        for position, name in enumerate(train):
            self._at(done + position * APART, "committed", name)
        self._at(done, "flushed")


def pipeline(width: int, *, clients: int = 1000, lo: int = 8, hi: int = 200) -> Pipeline:
    return Pipeline(AdmissionLaw(AdmissionBand(lo, hi), GAP, 0.0), clients, width)


def throughput(pipe: Pipeline, ticks: int) -> float:
    before = pipe.committed
    pipe.run(ticks)
    return (pipe.committed - before) / (ticks * TICK)


@pytest.mark.parametrize("width", [4, 8, 16])
def test_it_climbs_to_the_knee_and_backs_off(width: int) -> None:
    pipe = pipeline(width)
    budgets = pipe.run(100)
    assert budgets[:5] == [9, 10, 11, 12, 13]
    settled = budgets[40:]
    # More than three flushes' worth of transactions is queue; less than one leaves flushes unused.
    assert width < min(settled)
    assert max(settled) <= 6 * width
    assert any(later < earlier for earlier, later in pairwise(settled))
    # At the knee: within 3 % of all that the model can do.
    assert throughput(pipe, 20) > 0.97 * width / pipe.flush_seconds


def test_where_no_knee_is_in_the_band_it_climbs_to_its_end() -> None:
    pipe = pipeline(1000, lo=29, hi=44)
    budgets = pipe.run(30)
    assert budgets[0] == 30
    assert budgets[-5:] == [44] * 5


def test_a_server_that_gets_slower_makes_it_back_off_and_it_comes_back() -> None:
    pipe = pipeline(32, lo=8, hi=100)
    before = pipe.run(60)[-20:]
    pipe.width = 4
    during = pipe.run(60)[-20:]
    pipe.width = 32
    after = pipe.run(120)[-20:]
    assert max(during) < min(before) / 2
    assert min(after) > 1.5 * max(during)


def test_it_holds_while_the_budget_is_not_used_up() -> None:
    pipe = pipeline(16, clients=5)
    assert pipe.run(20) == [8] * 20


def test_the_sensor_sees_the_model() -> None:
    pipe = pipeline(8, lo=24, hi=24)
    pipe.run(10)
    assert pipe.law.trains_per_second == pytest.approx(1 / pipe.flush_seconds, rel=0.05)
    assert pipe.law.transactions_per_train == pytest.approx(8, rel=0.05)
    assert pipe.law.cycle_seconds == pytest.approx(pipe.flush_seconds, rel=0.05)


def test_a_stalled_server_shrinks_the_budget_to_its_floor() -> None:
    law = AdmissionLaw(AdmissionBand(8, 40), GAP, 0.0)
    for number in range(8):  # enough to know the cycle
        law.admitted(number, number * 0.002)
    for number in range(7):
        law.finished(number, 0.02 + number * 0.002, flushed=True)
    for tick in range(1, 20):  # free so far: it grows
        law.finished(6 + tick, tick * 0.5, flushed=False)
        law.admitted(7 + tick, tick * 0.5)
        law.saturated()
        law.tick(tick * 0.5, law.band)
    assert law.budget == 27
    budgets = []
    for tick in range(20, 26):
        law.saturated()
        budgets.append(law.tick(tick * 0.5, law.band))
    assert budgets == [20, 15, 11, 8, 8, 8]


def test_the_band_may_move() -> None:
    law = AdmissionLaw(AdmissionBand(29, 44), GAP, 0.0)
    assert law.tick(0.5, AdmissionBand(8, 12)) == 12
    assert law.tick(1.0, AdmissionBand(29, 44)) == 29


def test_trains_are_divided_by_the_gap() -> None:
    trains = Trains(GAP)
    for now in (1.0, 1.0003, 1.0006, 1.002, 1.0021, 1.01):
        trains.completed(now, idle=False)
    assert trains.take_counts() == (3, 6)
    assert trains.take_counts() == (0, 0)


def test_an_idle_stretch_is_no_cycle() -> None:
    trains = Trains(GAP)
    trains.completed(1.0, idle=False)
    trains.completed(1.002, idle=True)
    trains.completed(60.0, idle=True)
    trains.completed(120.0, idle=True)
    assert trains.cycle_seconds == pytest.approx(0.002)
