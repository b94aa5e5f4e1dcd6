"""What follows from a crash: a restart with backoff, or the end."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from queen_trio.backoff import FIRST_SECONDS as BACKOFF_FIRST_SECONDS
from queen_trio.supervision import (
    BACKOFF_MAX_SECONDS,
    HEALTHY_SECONDS,
    run_vital,
    supervise,
)

if TYPE_CHECKING:
    from trio.testing import MockClock


class Patient:
    """Lives for `lives` seconds each time, then crashes; notes when it was started."""

    def __init__(self, *lives: float) -> None:
        self._lives = list(lives)
        self.starts: list[float] = []
        self.cancelled = False

    async def run(self) -> None:
        self.starts.append(trio.current_time())
        if not self._lives:
            return
        try:
            await trio.sleep(self._lives.pop(0))
        except trio.Cancelled:
            self.cancelled = True
            raise
        raise RuntimeError("crash")


async def supervised(patient: Patient) -> Counter[str]:
    restarts: Counter[str] = Counter()
    await supervise("patient", patient.run, restarts)
    return restarts


def pauses(patient: Patient, lives: list[float]) -> list[float]:
    ends = [start + life for start, life in zip(patient.starts, lives, strict=False)]
    return [start - end for start, end in zip(patient.starts[1:], ends, strict=True)]


async def test_a_crash_loop_backs_off_and_is_counted(autojump_clock: MockClock) -> None:
    lives = [0.1] * 12
    patient = Patient(*lives)
    assert await supervised(patient) == {"patient": 12}
    ceilings = [min(BACKOFF_FIRST_SECONDS * 2**n, BACKOFF_MAX_SECONDS) for n in range(12)]
    assert ceilings[-1] == BACKOFF_MAX_SECONDS
    for pause, ceiling in zip(pauses(patient, lives), ceilings, strict=True):
        assert ceiling / 2 <= pause + 1e-6
        assert pause <= ceiling + 1e-6


async def test_a_minute_of_health_forgives(autojump_clock: MockClock) -> None:
    lives = [0.1] * 6 + [HEALTHY_SECONDS + 1, 0.1]  # the clock's sums are inexact
    patient = Patient(*lives)
    await supervised(patient)
    *_, before, after, next_one = pauses(patient, lives)
    assert before >= BACKOFF_FIRST_SECONDS * 2**5 / 2
    assert after <= BACKOFF_FIRST_SECONDS
    assert next_one <= BACKOFF_FIRST_SECONDS * 2


async def test_what_returns_is_not_started_again(autojump_clock: MockClock) -> None:
    """The mesh without its port does so (spec 8.26)."""
    patient = Patient()
    assert not await supervised(patient)
    assert len(patient.starts) == 1


@pytest.mark.parametrize("lives", [[1000.0], [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]])
async def test_a_stop_ends_a_life_and_a_pause(
    autojump_clock: MockClock, lives: list[float]
) -> None:
    patient = Patient(*lives)
    restarts: Counter[str] = Counter()
    with trio.move_on_after(30) as stop:
        await supervise("patient", patient.run, restarts)
    assert stop.cancelled_caught
    assert patient.cancelled is (len(lives) == 1)
    assert restarts["patient"] == len(patient.starts) - patient.cancelled


async def test_what_is_no_error_of_the_nursery_ends_all(autojump_clock: MockClock) -> None:
    async def interrupt() -> None:
        await trio.lowlevel.checkpoint()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await supervise("patient", interrupt, Counter())


# -- http ------------------------------------------------------------------------------------------


class Server:
    """Starts, and crashes when told to."""

    def __init__(self, *, starts: bool = True) -> None:
        self._starts = starts
        self.crash = trio.Event()

    async def serve(self, *, task_status: trio.TaskStatus[Any]) -> None:
        if not self._starts:
            raise OSError("no such address")
        task_status.started("address")
        await self.crash.wait()
        raise OSError("gone")


async def test_a_death_is_told_once_and_is_not_repaired() -> None:
    server = Server()
    deaths: list[Exception] = []
    async with trio.open_nursery() as nursery:
        start = partial(nursery.start, run_vital, "http", server.serve, deaths.append)
        assert await start() == "address"
        assert not deaths
        server.crash.set()
    [death] = deaths
    assert isinstance(death, ExceptionGroup)
    assert "gone" in str(death.exceptions)


async def test_what_never_started_is_no_death() -> None:
    deaths: list[Exception] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            await nursery.start(run_vital, "http", Server(starts=False).serve, deaths.append)
    assert caught.group_contains(OSError, match="no such address")
    assert not deaths


async def test_a_stop_is_no_death() -> None:
    deaths: list[Exception] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(run_vital, "http", Server().serve, deaths.append)
        nursery.cancel_scope.cancel()
    assert not deaths
