"""What is started again, when, and that it is counted."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import trio
import trio.testing

from queen_trio.supervision import BACKOFF_MAX_SECONDS, HEALTHY_SECONDS, supervise


def test_crashes_are_counted_and_spaced_until_it_returns() -> None:
    started: list[float] = []
    restarts: Counter[str] = Counter()

    async def crash_ten_times() -> None:
        started.append(trio.current_time())
        if len(started) <= 10:
            raise ValueError(len(started))

    async def main() -> None:
        await supervise("mesh", crash_ten_times, restarts)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert restarts == {"mesh": 10}
    pauses = [later - earlier for earlier, later in itertools.pairwise(started)]
    assert 0.125 <= pauses[0] <= 0.25
    assert BACKOFF_MAX_SECONDS / 2 <= pauses[-1] <= BACKOFF_MAX_SECONDS


def test_health_in_between_forgets_earlier_crashes() -> None:
    started: list[float] = []

    async def crash() -> None:
        started.append(trio.current_time())
        if len(started) == 6:
            await trio.sleep(HEALTHY_SECONDS)
        if len(started) < 8:
            raise ValueError

    async def main() -> None:
        await supervise("jobs", crash, Counter())

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert started[6] - started[5] - HEALTHY_SECONDS <= 0.25


def test_cancellation_is_no_crash() -> None:
    restarts: Counter[str] = Counter()

    async def main() -> None:
        with trio.move_on_after(5):
            await supervise("mesh", trio.sleep_forever, restarts)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert not restarts


def test_a_fault_of_the_program_itself_goes_through() -> None:
    async def exit_() -> None:
        raise SystemExit(3)

    async def main() -> None:
        await supervise("mesh", exit_, Counter())

    with pytest.raises(SystemExit):
        trio.run(main)
