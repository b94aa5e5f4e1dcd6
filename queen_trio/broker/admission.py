"""The law of admission: how many write transactions may run at once (spec 4).

Theory of operation. PostgreSQL flushes its WAL for all commits of the moment together, so that
more transactions at once make each flush carry more, until the server is busy with them before it
flushes; from there on more of them only wait longer. The law looks for that knee. Commits that
complete closely together left by the same flush: a train. The time between trains under load is
the cycle. Every tick it takes one step:

- a transaction has been running for several cycles: the budget shrinks by a quarter;
- else, somebody had to wait for a slot during the tick: it grows by one;
- else it stays: a budget that isn't used up says nothing about a larger one.

No I/O and no clock: events and `now` (seconds) come in, the budget goes out. arbiter.py applies it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable

    from queen_trio.config import AdmissionBand

# Whoever just misses a flush waits for the rest of it and for the whole next one; beside some
# execution time this makes up to three cycles without any queue.
PATIENCE_CYCLES: Final = 4.0
SHRINK_FACTOR: Final = 0.75
# Of each new interval in the smoothed cycle: one slow flush must not pass for the rule.
CYCLE_SMOOTHING: Final = 0.125


class Trains:
    """The sensor: tells WAL flushes from the times at which commits complete."""

    def __init__(self, gap_seconds: float) -> None:
        """Completions at most `gap_seconds` apart belong to one train."""
        self._gap_seconds = gap_seconds
        self._last = float("-inf")  # completion
        self._started = float("-inf")  # the current train
        self._idle = True  # since before the current train
        self._trains = 0
        self._transactions = 0
        self.cycle_seconds = 0.0

    def completed(self, now: float, *, idle: bool) -> None:
        """Note a commit; `idle` tells that none is under way behind it.

        The way from there to the next train is no cycle: nothing asked for a flush.
        """
        self._transactions += 1
        if now - self._last > self._gap_seconds:
            self._trains += 1
            if not self._idle:
                self._learn(now - self._started)
            self._started = now
        self._last = now
        self._idle = idle

    def _learn(self, interval: float) -> None:
        if not self.cycle_seconds:
            self.cycle_seconds = interval
        else:
            self.cycle_seconds += (interval - self.cycle_seconds) * CYCLE_SMOOTHING

    def take_counts(self) -> tuple[int, int]:
        """Return the trains and transactions since the last call."""
        counts = self._trains, self._transactions
        self._trains = self._transactions = 0
        return counts


class AdmissionLaw:
    """The budget, adapted by one step a tick within the band."""

    def __init__(self, band: AdmissionBand, gap_seconds: float, now: float) -> None:
        self.band = band
        self.budget = band.lo
        self.trains_per_second = 0.0
        self.transactions_per_train = 0.0
        self._trains = Trains(gap_seconds)
        self._running: dict[Hashable, float] = {}  # when admitted, oldest first
        self._saturated = False
        self._ticked = now

    @property
    def cycle_seconds(self) -> float:
        """The smoothed time between two flushes under load; 0 before two were seen."""
        return self._trains.cycle_seconds

    def admitted(self, transaction: Hashable, now: float) -> None:
        """A transaction that commits with a flush has begun."""
        self._running[transaction] = now

    def finished(self, transaction: Hashable, now: float, *, flushed: bool) -> None:
        """It has ended: with a commit that waited for a flush, or without one."""
        del self._running[transaction]
        if flushed:
            self._trains.completed(now, idle=not self._running)

    def saturated(self) -> None:
        """Somebody waits for a slot."""
        self._saturated = True

    def tick(self, now: float, band: AdmissionBand) -> int:
        """Take one step and return the budget; `band` may have changed since the last tick."""
        trains, transactions = self._trains.take_counts()
        elapsed = now - self._ticked
        self.trains_per_second = trains / elapsed if elapsed > 0 else 0.0
        self.transactions_per_train = transactions / trains if trains else 0.0
        oldest = next(iter(self._running.values()), now)
        if self.cycle_seconds and now - oldest > PATIENCE_CYCLES * self.cycle_seconds:
            self.budget = int(self.budget * SHRINK_FACTOR)
        elif self._saturated:
            self.budget += 1
        self.band = band
        self.budget = min(max(self.budget, band.lo), band.hi)
        self._saturated = False
        self._ticked = now
        return self.budget
