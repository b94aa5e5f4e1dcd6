"""Lanes in Trio's own time: no linger, as wide as they are, and a close that flushes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from queen_trio.broker.lanes import OVERTAKE_SECONDS, Lanes

if TYPE_CHECKING:
    from collections.abc import Callable

FLUSH_SECONDS = 1.0


class Store:
    """What stands ready, and flushes of it that take a second each."""

    def __init__(self, width: int) -> None:
        self.ready: deque[str] = deque()
        self.flushed: list[tuple[float, list[str]]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.lanes = Lanes(width, self.take, self.flush)

    def submit(self, *work: str) -> None:
        self.ready.extend(work)
        self.lanes.wake()

    def take(self) -> list[str] | None:
        bundle = list(self.ready)
        self.ready.clear()
        return bundle or None

    async def flush(self, bundle: list[str]) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.flushed.append((trio.current_time(), bundle))
        await trio.sleep(FLUSH_SECONDS)
        self.in_flight -= 1


def run(width: int, scenario: Callable[[Store], object]) -> Store:
    """Run `scenario` (an async function) beside the lanes, in mock time from 0."""
    store = Store(width)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.lanes.serve)
            await wait_all_tasks_blocked()
            await scenario(store)  # type: ignore[misc]
            store.lanes.close()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    start = store.flushed[0][0] if store.flushed else 0
    store.flushed = [(at - start, bundle) for at, bundle in store.flushed]
    return store


def test_an_idle_lane_takes_the_first_at_once() -> None:
    async def scenario(store: Store) -> None:
        before = trio.current_time()
        store.submit("a")
        await wait_all_tasks_blocked()
        assert store.flushed == [(before, ["a"])]

    run(1, scenario)


def test_what_comes_while_all_are_busy_goes_together() -> None:
    async def scenario(store: Store) -> None:
        store.submit("a")
        await wait_all_tasks_blocked()
        for work in "bcd":
            await trio.sleep(FLUSH_SECONDS / 4)
            store.submit(work)

    assert run(1, scenario).flushed == [(0, ["a"]), (1, ["b", "c", "d"])]


def test_work_of_one_moment_wakes_one_lane() -> None:
    async def scenario(store: Store) -> None:
        for work in "abc":
            store.submit(work)
        await wait_all_tasks_blocked()

    assert run(3, scenario).flushed == [(0, ["a", "b", "c"])]


def test_a_call_that_lasts_is_overtaken() -> None:
    async def scenario(store: Store) -> None:
        for work in "abc":
            store.submit(work)
            await wait_all_tasks_blocked()
        await trio.sleep(OVERTAKE_SECONDS / 2)
        store.submit("d")
        await trio.sleep(OVERTAKE_SECONDS)
        store.submit("e")
        await trio.sleep(OVERTAKE_SECONDS * 2)
        store.submit("f")

    store = run(3, scenario)
    assert [bundle for _, bundle in store.flushed] == [["a"], ["b", "c", "d"], ["e"], ["f"]]
    assert [round(at / OVERTAKE_SECONDS, 6) for at, _ in store.flushed[:3]] == [0, 1, 2.5]
    assert store.flushed[3][0] == FLUSH_SECONDS, "no lane is left that could overtake"


def test_what_a_busy_lane_takes_in_time_is_overtaken_by_nobody() -> None:
    async def scenario(store: Store) -> None:
        store.submit("a")
        await wait_all_tasks_blocked()
        await trio.sleep(FLUSH_SECONDS - OVERTAKE_SECONDS / 2)
        store.submit("b")
        await trio.sleep(OVERTAKE_SECONDS * 2)

    store = run(2, scenario)
    assert store.flushed == [(0, ["a"]), (FLUSH_SECONDS, ["b"])]
    assert store.most_in_flight == 1


def test_closing_flushes_what_is_ready() -> None:
    async def scenario(store: Store) -> None:
        store.submit("a")
        await wait_all_tasks_blocked()
        store.submit("b")
        store.lanes.close()
        store.submit("c")

    assert run(1, scenario).flushed == [(0, ["a"]), (1, ["b", "c"])]


def test_closing_idle_lanes_ends_them() -> None:
    async def scenario(store: Store) -> None:
        await wait_all_tasks_blocked()

    assert run(3, scenario).flushed == []


def test_an_error_of_flush_ends_them_all() -> None:
    async def flush(_: str) -> None:
        raise RuntimeError("a bug")

    lanes = Lanes(2, lambda: "work", flush)
    with pytest.raises(ExceptionGroup) as caught:
        trio.run(lanes.serve)
    assert caught.group_contains(RuntimeError, match="a bug")
