"""Slots of the arbiter: order of waking, cancellation, the band."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from queen_trio.broker.arbiter import Arbiter
from queen_trio.config import FlowConfig
from queen_trio.errors import DatabaseUnavailable
from queen_trio.model.admission import Lane

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TIMEOUT_SECONDS = 10.0


def arbiter_of(budget: int) -> Arbiter:
    return Arbiter(FlowConfig(admission_min=budget, admission_max=budget), lambda: 60)


def inflight(arbiter: Arbiter) -> dict[str, int]:
    return {lane.label: state.inflight for lane, state in arbiter.statistics().lanes.items()}


class Users:
    """Tasks that each hold a slot until told to leave; `admitted` has the order of admission."""

    def __init__(self, arbiter: Arbiter, nursery: trio.Nursery) -> None:
        self.arbiter = arbiter
        self.nursery = nursery
        self.admitted: list[Lane] = []
        self.leave: list[trio.Event] = []

    async def enter(self, *lanes: Lane) -> None:
        for lane in lanes:
            self.nursery.start_soon(self._use, lane)
            await trio.testing.wait_all_tasks_blocked()

    async def leave_one(self) -> None:
        self.leave.pop(0).set()
        await trio.testing.wait_all_tasks_blocked()

    async def _use(self, lane: Lane) -> None:
        async with self.arbiter.slot(lane):
            self.admitted.append(lane)
            done = trio.Event()
            self.leave.append(done)
            await done.wait()


def with_users(budget: int, test: Callable[[Users], Awaitable[None]]) -> None:
    async def main() -> None:
        arbiter = arbiter_of(budget)
        with trio.fail_after(TIMEOUT_SECONDS):
            async with trio.open_nursery() as nursery:
                await test(Users(arbiter, nursery))
                nursery.cancel_scope.cancel()
        statistics = arbiter.statistics()
        assert not any(lane.inflight or lane.waiting for lane in statistics.lanes.values())

    trio.run(main)


@pytest.mark.parametrize(
    ("pool", "band"),
    [(60, (29, 44)), (24, (8, 8)), (10, (8, 8)), (25, (8, 9)), (100, (56, 84))],
)
async def test_the_band_follows_from_the_pool(pool: int, band: tuple[int, int]) -> None:
    statistics = Arbiter(FlowConfig(), lambda: pool).statistics()
    assert (statistics.lo, statistics.hi) == band
    assert statistics.budget == band[0]


async def test_the_band_shrinks_with_what_the_server_admits_and_grows_back() -> None:
    limit = 60
    arbiter = Arbiter(FlowConfig(), lambda: limit)
    limit = 20
    arbiter.tick()
    assert (arbiter.statistics().lo, arbiter.statistics().hi) == (8, 8)
    assert arbiter.statistics().budget == 8
    limit = 60
    arbiter.tick()
    assert arbiter.statistics().budget == 29


def test_lanes_below_their_share_go_first_in_the_order_ack_pop_push_maint() -> None:
    async def test(users: Users) -> None:
        await users.enter(*[Lane.POP] * 10)
        await users.enter(Lane.POP, Lane.MAINT, Lane.PUSH, Lane.ACK, Lane.PUSH, Lane.ACK)
        assert len(users.admitted) == 10
        for _ in range(6):
            await users.leave_one()
        # Pops hold 9 of 10 slots at first: above their 4 until the sixth wake-up.
        assert users.admitted[10:] == [
            Lane.ACK, Lane.ACK, Lane.PUSH, Lane.PUSH, Lane.MAINT, Lane.POP
        ]  # fmt: skip

    with_users(10, test)


def test_shares_reserve_nothing() -> None:
    async def test(users: Users) -> None:
        await users.enter(*[Lane.MAINT] * 10)
        assert len(users.admitted) == 10

    with_users(10, test)


def test_a_lane_below_its_share_overtakes_a_crowd_above_it() -> None:
    async def test(users: Users) -> None:
        await users.enter(*[Lane.ACK] * 30)
        await users.enter(Lane.MAINT, Lane.PUSH)
        await users.leave_one()
        await users.leave_one()
        assert users.admitted[10:] == [Lane.PUSH, Lane.MAINT]
        await users.leave_one()
        assert users.admitted[12:] == [Lane.ACK]

    with_users(10, test)


def test_nobody_overtakes_within_a_lane_or_takes_what_the_woken_was_given() -> None:
    async def test(users: Users) -> None:
        await users.enter(Lane.PUSH)
        await users.enter(Lane.PUSH)
        users.leave.pop(0).set()
        # Both tasks run in the same turn: the newcomer must queue behind the woken one.
        await users.enter(Lane.PUSH)
        assert len(users.admitted) == 2
        assert inflight(users.arbiter)["push"] == 1

    with_users(1, test)


def test_a_tick_that_raises_the_budget_wakes() -> None:
    async def main() -> None:
        arbiter = Arbiter(FlowConfig(), lambda: 60)
        async with trio.open_nursery() as nursery:
            users = Users(arbiter, nursery)
            await users.enter(*[Lane.POP] * 32)
            assert len(users.admitted) == 29
            for expected in (30, 31, 32, 32):
                arbiter.tick()
                await trio.testing.wait_all_tasks_blocked()
                assert len(users.admitted) == expected
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_serve_ticks_at_its_interval() -> None:
    async def main() -> None:
        arbiter = Arbiter(FlowConfig(tick_ms=500), lambda: 60)
        async with trio.open_nursery() as nursery:
            users = Users(arbiter, nursery)
            nursery.start_soon(arbiter.serve)
            nursery.start_soon(users.enter, *[Lane.POP] * 100)
            await trio.sleep(5.1)
            assert arbiter.statistics().budget == 39
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_slot_that_does_not_come_in_time_is_an_outage() -> None:
    async def main() -> None:
        arbiter = arbiter_of(1)
        async with arbiter.slot(Lane.PUSH):
            started = trio.current_time()
            with pytest.raises(DatabaseUnavailable, match="no admission slot within 5 s"):
                async with arbiter.slot(Lane.ACK, 5.0):
                    pass
            assert trio.current_time() - started == pytest.approx(5.0)
        async with arbiter.slot(Lane.ACK, 5.0) as left:
            assert left == 5.0
        lanes = arbiter.statistics().lanes
        assert lanes[Lane.ACK].waiting == 0
        assert lanes[Lane.ACK].wait_seconds_total == pytest.approx(5.0)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_impatient_are_refused_and_nobody_else() -> None:
    async def main() -> None:
        arbiter = arbiter_of(1)
        refused = []

        async def wait(*, impatient: bool) -> None:
            try:
                async with arbiter.slot(Lane.PUSH, impatient=impatient):
                    pass
            except DatabaseUnavailable as error:
                refused.append((impatient, str(error)))

        async with trio.open_nursery() as nursery, arbiter.slot(Lane.POP):
            for impatient in (True, False, True):
                nursery.start_soon(partial(wait, impatient=impatient))
            await trio.testing.wait_all_tasks_blocked()
            arbiter.refuse_impatient("it is away")
            assert arbiter.statistics().lanes[Lane.PUSH].waiting == 1
        assert refused == [(True, "it is away")] * 2
        lane = arbiter.statistics().lanes[Lane.PUSH]
        assert (lane.inflight, lane.waiting, lane.admitted_total) == (0, 0, 1)

    trio.run(main)


def test_the_time_spent_waiting_is_taken_from_the_deadline() -> None:
    async def main() -> None:
        arbiter = arbiter_of(1)

        async def wait() -> None:
            async with arbiter.slot(Lane.ACK, 5.0) as left:
                assert left == pytest.approx(3.0)

        async with trio.open_nursery() as nursery, arbiter.slot(Lane.PUSH):
            nursery.start_soon(wait)
            await trio.sleep(2.0)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("seed", range(5))
def test_no_slot_leaks_whenever_its_user_is_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    budget = 4
    most = 0

    async def use(arbiter: Arbiter) -> None:
        nonlocal most
        with trio.move_on_after(rng.random()):
            await trio.sleep(rng.random())
            lane, patience = rng.choice(list(Lane)), rng.choice([0.1, 1.0])
            async with arbiter.slot(lane, patience, impatient=rng.random() < 0.5):
                most = max(most, sum(inflight(arbiter).values()))
                await trio.sleep(rng.random() * 0.2)
                if rng.random() < 0.1:
                    arbiter.refuse_impatient("away")
                if rng.random() < 0.1:
                    raise ValueError("the statement failed")

    async def survive(arbiter: Arbiter) -> None:
        for _ in range(20):
            try:
                await use(arbiter)
            except (ValueError, DatabaseUnavailable):
                continue

    async def main() -> None:
        arbiter = arbiter_of(budget)
        async with trio.open_nursery() as background:
            background.start_soon(arbiter.serve)
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(survive, arbiter)
            background.cancel_scope.cancel()
        assert most == budget
        assert set(inflight(arbiter).values()) == {0}
        assert not any(lane.waiting for lane in arbiter.statistics().lanes.values())
        async with trio.open_nursery() as nursery:
            for _ in range(budget):  # all of them can still be had, at once
                await arbiter.slot(Lane.PUSH, 0).__aenter__()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_cancelled_in_the_moment_of_being_woken_the_slot_is_given_back() -> None:
    async def main() -> None:
        arbiter = arbiter_of(1)
        scope = trio.CancelScope()

        async def wait() -> None:
            with scope:
                async with arbiter.slot(Lane.PUSH):
                    await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            async with arbiter.slot(Lane.PUSH):
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
            scope.cancel()  # woken, but it hasn't run yet
        assert inflight(arbiter)["push"] == 0
        async with arbiter.slot(Lane.PUSH, 0):
            pass

    trio.run(main)
