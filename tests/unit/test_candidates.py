"""Candidates in Trio's own time; only the store is a fake."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from queen_trio.broker.candidates import SEEDING_SECONDS, Candidates
from queen_trio.broker.wakeups import Wakeups
from queen_trio.config import PopConfig, SubscriptionMode
from queen_trio.errors import DatabaseUnavailable
from queen_trio.model.pop import PopRequest
from queen_trio.store.elapsed import Elapsed

if TYPE_CHECKING:
    from queen_trio.store.queries import Store

POLL_SECONDS = 1.0
NOW = Elapsed(0.0)


class Changes:
    """Stands for the store: notes how far back each look reaches, and at what time it came."""

    def __init__(self) -> None:
        self.looks: list[tuple[float, float]] = []
        self.away_until = 0.0
        self.names: list[str] = []
        self.seeds = 0
        self.seed_seconds = 0.0

    async def candidates(self, *_: Any) -> list[str]:
        await trio.sleep(self.seed_seconds)
        self.seeds += 1
        return self.names

    async def changes(self, seconds: float, _: int) -> list[tuple[str, str | None]]:
        await trio.lowlevel.checkpoint()
        if trio.current_time() < self.away_until:
            raise DatabaseUnavailable("away")
        self.looks.append((trio.current_time(), seconds))
        return []


def test_the_first_look_after_an_outage_reaches_back_to_the_last_one_before() -> None:
    changes = Changes()
    store: Store = changes  # type: ignore[assignment]

    async def main() -> None:
        candidates = Candidates(store, Wakeups(store, PopConfig()), POLL_SECONDS)
        await candidates.ring_for(PopRequest(queue="q", mode=SubscriptionMode.ALL), NOW, 1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(candidates.serve)
            await trio.sleep(2 * POLL_SECONDS)
            changes.away_until = trio.current_time() + 20 * POLL_SECONDS
            await trio.sleep(25 * POLL_SECONDS)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    for (before, _), (after, seconds) in pairwise(changes.looks):
        assert after - seconds <= before
    assert max(seconds for _, seconds in changes.looks) > 10 * POLL_SECONDS


def test_a_queue_with_too_many_candidates_is_not_listed_for_every_pop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("queen_trio.broker.candidates.MAX_ENTRIES", 2)
    changes = Changes()
    changes.names = ["a", "b", "c"]
    store: Store = changes  # type: ignore[assignment]
    request = PopRequest(queue="q", mode=SubscriptionMode.ALL)

    async def main() -> None:
        candidates = Candidates(store, Wakeups(store, PopConfig()), POLL_SECONDS)
        for _ in range(3):
            assert await candidates.ring_for(request, NOW, 1.0) is None
        assert changes.seeds == 1
        changes.names.pop()
        candidates.unseed("q")  # as every reseed does
        assert await candidates.ring_for(request, NOW, 1.0) is not None

    trio.run(main)


def test_one_pop_looks_at_everything_and_the_others_wait_for_what_it_finds() -> None:
    changes = Changes()
    changes.names = ["a", "b"]
    changes.seed_seconds = 2.0
    store: Store = changes  # type: ignore[assignment]
    request = PopRequest(queue="q", mode=SubscriptionMode.ALL)
    found: list[tuple[float, int | None]] = []

    async def main() -> None:
        candidates = Candidates(store, Wakeups(store, PopConfig()), POLL_SECONDS)

        async def pop(patience: float) -> None:
            ring = await candidates.ring_for(request, NOW, patience)
            found.append(
                (round(trio.current_time() - start, 3), None if ring is None else ring.ready)
            )

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pop, 10.0)
            await wait_all_tasks_blocked()
            for patience in (10.0, 10.0, 1.0):
                nursery.start_soon(pop, patience)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert found == [(1.0, None), (2.0, 2), (2.0, 2), (2.0, 2)], "who can't wait looks by itself"
    assert changes.seeds == 1


def test_when_the_look_fails_the_next_one_looks() -> None:
    class Failing(Changes):
        async def candidates(self, *_: Any) -> list[str]:
            names = await super().candidates()
            if self.seeds == 1:
                raise DatabaseUnavailable("away")
            return names

    changes = Failing()
    changes.names = ["a"]
    store: Store = changes  # type: ignore[assignment]
    request = PopRequest(queue="q", mode=SubscriptionMode.ALL)
    found: list[int | None] = []

    async def main() -> None:
        candidates = Candidates(store, Wakeups(store, PopConfig()), POLL_SECONDS)

        async def pop() -> None:
            try:
                ring = await candidates.ring_for(request, NOW, 10.0)
            except DatabaseUnavailable:
                found.append(None)
            else:
                found.append(None if ring is None else ring.ready)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(pop)

    trio.run(main)
    assert found == [None, 1, 1]
    assert changes.seeds == 2


def test_a_look_that_lasts_is_not_waited_for_as_long_as_a_pop_may_take() -> None:
    """While the database is away each pop waits for it once, not for the others' attempts too."""
    changes = Changes()
    changes.seed_seconds = 15.0
    store: Store = changes  # type: ignore[assignment]
    request = PopRequest(queue="q", mode=SubscriptionMode.ALL)

    async def main() -> None:
        candidates = Candidates(store, Wakeups(store, PopConfig()), POLL_SECONDS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(candidates.ring_for, request, NOW, 12.0)
            await wait_all_tasks_blocked()
            start = trio.current_time()
            assert await candidates.ring_for(request, NOW, 12.0) is None
            assert trio.current_time() - start == pytest.approx(SEEDING_SECONDS)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
