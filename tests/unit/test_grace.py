"""Shields that end with the shutdown, and threads that are waited for until then."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from queen_trio.grace import Grace

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """What a thread waits for; set in the end, so that none stays behind the test."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_shield_ends_with_its_own_time_or_the_limit(
    mock_clock: trio.testing.MockClock,
) -> None:
    mock_clock.autojump_threshold = 0
    grace = Grace(10)
    with trio.CancelScope() as scope:
        scope.cancel()
        start = trio.current_time()
        with grace.shield():
            await trio.sleep_forever()
        assert trio.current_time() - start == 10
        with grace.shield(60):
            grace.limit(trio.current_time() + 3)  # a shield that is open is shortened, too
            await trio.sleep_forever()
        assert trio.current_time() - start == 13
        with grace.shield(60):
            await trio.sleep_forever()
        assert trio.current_time() - start == 13


async def test_a_thread_is_waited_for_through_a_cancellation(hanging: threading.Event) -> None:
    async with trio.open_nursery() as nursery:
        running = threading.Event()

        def call() -> int:
            running.set()
            hanging.wait()
            return 42

        async def use(results: list[int]) -> None:
            results.append(await Grace().run_sync(call))

        results: list[int] = []
        nursery.start_soon(use, results)
        while not running.is_set():  # noqa: ASYNC110 - a thread
            await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
        hanging.set()
    assert results == [42]


async def test_a_thread_is_left_behind_at_the_limit(hanging: threading.Event) -> None:
    grace = Grace()
    grace.limit(trio.current_time() + 0.01)
    with trio.fail_after(10):
        with pytest.raises(TimeoutError):
            await grace.run_sync(hanging.wait)
        with trio.CancelScope() as scope:
            scope.cancel()
            await grace.run_sync(hanging.wait)
        assert scope.cancelled_caught


async def test_nothing_is_started_past_the_limit() -> None:
    grace = Grace()
    grace.limit(trio.current_time())
    calls: list[None] = []
    with pytest.raises(TimeoutError):
        await grace.run_sync(lambda: calls.append(None))
    assert not calls


async def test_a_cancelled_task_starts_nothing() -> None:
    calls: list[None] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await Grace().run_sync(lambda: calls.append(None))
    assert scope.cancelled_caught
    assert not calls
