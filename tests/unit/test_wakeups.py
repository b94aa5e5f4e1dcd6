"""Wakeups in Trio's own time; only the store's probe is a fake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from queen_trio.broker.candidates import Candidates
from queen_trio.broker.wakeups import (
    PROBE_MAX_LINES,
    REST_SECONDS,
    TICK_SECONDS,
    Lead,
    PopKey,
    Wakeups,
)
from queen_trio.config import PopConfig
from queen_trio.errors import DatabaseUnavailable
from queen_trio.store.queries import ProbeRow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from queen_trio.store.pool import Sent
    from queen_trio.store.queries import Store

PUSH: Sent = object()  # type: ignore[assignment]  # nobody sends anything behind it


def key(queue: str | None = "q", partition: str | None = None, group: str = "g") -> PopKey:
    return PopKey(queue, partition, "" if queue else "ns", "", group)


class Probes:
    """Stands for the store: notes when it is asked for what, and answers from `available`."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, list[PopKey], list[int]]] = []
        self.available: dict[PopKey, int] = {}
        self.due_ms: dict[PopKey, int] = {}
        self.fails = False

    async def probe(
        self,
        queues: Sequence[str | None],
        partitions: Sequence[str | None],
        namespaces: Sequence[str],
        tasks: Sequence[str],
        groups: Sequence[str],
        limits: Sequence[int],
    ) -> list[ProbeRow]:
        await trio.lowlevel.checkpoint()
        columns = zip(queues, partitions, namespaces, tasks, groups, strict=True)
        keys = [PopKey(*column) for column in columns]
        self.calls.append((trio.current_time(), keys, list(limits)))
        if self.fails:
            raise DatabaseUnavailable("away")
        rows = [
            ProbeRow(n, self.available.pop(k, 0), self.due_ms.pop(k, None))
            for n, k in enumerate(keys, start=1)
        ]
        return [row for row in rows if row.available or row.due_ms is not None]


class Scene:
    """Wakeups at work, probes, and pops that note when they are woken."""

    def __init__(self, nursery: trio.Nursery, **config: Any) -> None:
        self.probes = Probes()
        store: Store = self.probes  # type: ignore[assignment]
        self.wakeups = Wakeups(store, PopConfig(**config))
        self.nursery = nursery
        self.woken: list[str] = []

    async def park(
        self, name: str, key: PopKey, then: Callable[[], Awaitable[object]] | None = None
    ) -> trio.CancelScope:
        """Park a pop that goes home after its first wake, or after what it does `then`."""
        scope = trio.CancelScope()

        async def pop() -> None:
            with scope, self.wakeups.waiter(key) as waiter:
                await waiter.wait_woken()
                if then is not None:
                    await then()
                self.woken.append(name)

        self.nursery.start_soon(pop)
        await wait_all_tasks_blocked()
        return scope

    def hotlist_says_yes(self) -> None:
        """Let the hot-list know of every partition, and of none that it waits for."""
        candidates = Candidates(self.wakeups._store, self.wakeups, 1.0)
        self.wakeups.candidates = candidates
        candidates._hotlist.ring("q", "g", 0.0).seed([])

    def probed_at(self, key: PopKey) -> list[float]:
        return [round(at, 6) for at, keys, _ in self.probes.calls if key in keys]


def play(scenario: Callable[[Scene], Awaitable[object]], **config: Any) -> None:
    """Run a scenario in mock time from 0."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            scene = Scene(nursery, **config)
            nursery.start_soon(scene.wakeups.serve)
            await wait_all_tasks_blocked()
            await scenario(scene)
            nursery.cancel_scope.cancel()

    clock = MockClock(autojump_threshold=0)
    trio.run(main, clock=clock)


def elapsed(times: list[float], start: float) -> list[float]:
    return [round(at - start, 3) for at in times]


# -- the cadence of probes -----------------------------------------------------------------------


def test_the_interval_doubles_after_three_empties_up_to_a_second() -> None:
    async def scenario(scene: Scene) -> None:
        start = trio.current_time()
        await scene.park("a", key())
        await trio.sleep(4.5)
        assert elapsed(scene.probed_at(key()), start) == [
            0.1, 0.2, 0.3, 0.5, 0.9, 1.7, 2.7, 3.7
        ]  # fmt: skip

    play(scenario)


def test_the_cadence_is_configurable() -> None:
    async def scenario(scene: Scene) -> None:
        start = trio.current_time()
        await scene.park("a", key())
        await trio.sleep(1.0)
        assert elapsed(scene.probed_at(key()), start) == [0.05, 0.2, 0.5, 0.8]

    play(scenario, wait_initial_ms=50, backoff_threshold=1, backoff_multiplier=3, max_ms=300)


def test_a_hit_starts_the_cadence_again() -> None:
    async def scenario(scene: Scene) -> None:
        start = trio.current_time()
        await scene.park("a", key())
        await scene.park("b", key())
        await trio.sleep(1.0)
        scene.probes.available[key()] = 1
        await trio.sleep(1.0)
        assert scene.woken == ["a"]
        assert elapsed(scene.probed_at(key()), start)[5:8] == [1.7, 1.8, 1.9]

    play(scenario)


def test_what_falls_due_is_probed_for_on_time() -> None:
    async def scenario(scene: Scene) -> None:
        start = trio.current_time()
        await scene.park("a", key())
        await trio.sleep(2)
        scene.probes.due_ms[key()] = 300
        await trio.sleep(1.5)
        assert elapsed(scene.probed_at(key()), start)[5:] == [1.7, 2.7, 3.0]

    play(scenario)


def test_a_pop_that_was_woken_in_vain_is_probed_for_soon() -> None:
    async def scenario(scene: Scene) -> None:
        async def pop() -> None:
            with scene.wakeups.waiter(key()) as waiter:
                while True:
                    await waiter.wait_woken()

        start = trio.current_time()
        scene.nursery.start_soon(pop)
        await trio.sleep(3)
        scene.wakeups.notify([("q", "Default")])
        await trio.sleep(0.6)
        assert elapsed(scene.probed_at(key()), start)[5:] == [1.7, 2.7, 3.1, 3.2, 3.3, 3.5]

    play(scenario)


def test_nobody_parked_means_no_probe() -> None:
    async def scenario(scene: Scene) -> None:
        scope = await scene.park("a", key())
        await trio.sleep(0.15)
        scope.cancel()
        await trio.sleep(60)
        assert len(scene.probes.calls) == 1
        assert scene.wakeups.statistics().lines == 0
        assert scene.wakeups.statistics().parked == 0

    play(scenario)


def test_a_new_line_does_not_wait_for_the_schedule_of_an_old_one() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.park("old", key("old"))
        await trio.sleep(2.75)  # the old one is probed once a second by now
        start = trio.current_time()
        await scene.park("new", key("new"))
        await trio.sleep(0.11)
        assert elapsed(scene.probed_at(key("new")), start) == [0.1]

    play(scenario)


def test_lines_that_are_due_together_share_a_call() -> None:
    async def scenario(scene: Scene) -> None:
        for n in range(50):
            await scene.park(str(n), key(f"q{n}"))
            await trio.sleep(TICK_SECONDS / 60)
        await trio.sleep(0.09)
        [(_, keys, limits)] = scene.probes.calls
        assert keys == [key(f"q{n}") for n in range(50)]
        assert limits == [1] * 50

    play(scenario)


def test_a_thousand_pops_of_a_line_are_one_probe() -> None:
    async def scenario(scene: Scene) -> None:
        for _ in range(1_000):
            scene.wakeups.waiter(key()).__enter__()
        await trio.sleep(0.11)
        [(_, keys, limits)] = scene.probes.calls
        assert keys == [key()]
        assert limits == [1_000]

    play(scenario)


def test_more_lines_than_a_probe_takes_are_all_probed() -> None:
    async def scenario(scene: Scene) -> None:
        for n in range(PROBE_MAX_LINES + 5):
            scene.wakeups.waiter(key(f"q{n}")).__enter__()
        await trio.sleep(0.11)
        assert [len(keys) for _, keys, _ in scene.probes.calls] == [PROBE_MAX_LINES, 5]

    play(scenario)


def test_a_database_that_is_away_is_asked_again() -> None:
    async def scenario(scene: Scene) -> None:
        scene.probes.fails = True
        await scene.park("a", key())
        await trio.sleep(3)
        scene.probes.fails = False
        scene.probes.available[key()] = 1
        await trio.sleep(1)
        assert scene.woken == ["a"]

    play(scenario)


# -- who is woken --------------------------------------------------------------------------------


def test_a_probe_wakes_as_many_as_can_be_served() -> None:
    async def scenario(scene: Scene) -> None:
        for name in "abcd":
            await scene.park(name, key())
        await scene.park("other", key("other"))
        scene.probes.available[key()] = 3
        await trio.sleep(0.11)
        assert sorted(scene.woken) == ["a", "b", "c"]

    play(scenario)


def test_a_commit_wakes_one_of_each_line_that_it_can_serve() -> None:
    async def scenario(scene: Scene) -> None:
        for name, parked_key in {
            "any": key(),
            "second": key(),
            "p": key(partition="p"),
            "x": key(partition="x"),
            "group": key(group="h"),
            "discovery": key(None),
            "elsewhere": key("elsewhere"),
        }.items():
            await scene.park(name, parked_key)
        scene.wakeups.notify([("q", "p")])
        await wait_all_tasks_blocked()
        assert sorted(scene.woken) == ["any", "discovery", "group", "p"]

    play(scenario)


def test_an_ack_wakes_its_own_group_only() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.park("g", key())
        await scene.park("h", key(group="h"))
        scene.wakeups.notify([("q", "p")], "h")
        await wait_all_tasks_blocked()
        assert scene.woken == ["h"]

    play(scenario)


def test_a_changed_queue_wakes_all_who_wait_for_it() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.park("a", key())
        await scene.park("b", key())
        await scene.park("discovery", key(None))
        await scene.park("other", key("other"))
        scene.wakeups.notify_queue("q")
        await wait_all_tasks_blocked()
        assert sorted(scene.woken) == ["a", "b", "discovery"]

    play(scenario)


def test_a_wake_while_the_pop_asks_is_kept() -> None:
    async def scenario(scene: Scene) -> None:
        with scene.wakeups.waiter(key()) as waiter:
            scene.wakeups.notify([("q", "p")])
            with trio.fail_after(0.001):
                await waiter.wait_woken()
            # And it is used up: the next wait is a wait.
            with trio.move_on_after(0.001) as scope:
                await waiter.wait_woken()
            assert scope.cancelled_caught

    play(scenario)


# -- wakes of those who leave --------------------------------------------------------------------


def test_a_wake_that_nobody_needs_any_more_is_passed_on() -> None:
    """The woken one found something by itself, or timed out, in the same moment."""

    async def scenario(scene: Scene) -> None:
        with scene.wakeups.waiter(key()):
            await scene.park("next", key())
            scene.wakeups.notify([("q", "p")])
        await wait_all_tasks_blocked()
        assert scene.woken == ["next"]

    play(scenario)


def test_who_is_cancelled_between_wake_and_answer_passes_it_on() -> None:
    async def scenario(scene: Scene) -> None:
        scope = await scene.park("gone", key(), then=trio.sleep_forever)
        await scene.park("next", key())
        scene.wakeups.notify([("q", "p")])
        await wait_all_tasks_blocked()
        assert scene.woken == []
        scope.cancel()
        await wait_all_tasks_blocked()
        assert scene.woken == ["next"]

    play(scenario)


def test_who_is_cancelled_unwoken_wakes_nobody() -> None:
    async def scenario(scene: Scene) -> None:
        scope = await scene.park("gone", key())
        await scene.park("next", key())
        scope.cancel()
        await wait_all_tasks_blocked()
        assert scene.woken == []
        assert scene.wakeups.statistics().parked == 1

    play(scenario)


def test_who_was_served_keeps_its_wake() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.park("first", key())
        await scene.park("second", key())
        scene.wakeups.notify([("q", "p")])
        await wait_all_tasks_blocked()
        assert scene.woken == ["first"]

    play(scenario)


# -- pushes on their way -------------------------------------------------------------------------


class Led:
    """A parked pop that a push may lead, and what it does with that."""

    def __init__(self, scene: Scene, name: str, where: PopKey, room: int = 100) -> None:
        self.scene = scene
        self.name = name
        self.where = where
        self.room = room
        self.leads: list[Lead] = []
        self.answered = trio.Event()
        self.scope = trio.CancelScope()

    async def park(self) -> Led:
        self.scene.nursery.start_soon(self._pop)
        await wait_all_tasks_blocked()
        return self

    async def _pop(self) -> None:
        with self.scope, self.scene.wakeups.waiter(self.where, self.room) as waiter:
            await waiter.wait_woken()
            if lead := waiter.take_lead():
                self.leads.append(lead)
                try:
                    await self.answered.wait()
                finally:
                    lead.end()
            self.scene.woken.append(self.name)


def test_a_push_on_its_way_leads_one_and_its_news_wakes_no_other() -> None:
    async def scenario(scene: Scene) -> None:
        scene.hotlist_says_yes()
        led = await Led(scene, "led", key()).park()
        await scene.park("other", key())
        scene.wakeups.lead([("x", "p"), ("q", "p"), ("q", "r")], PUSH)
        await wait_all_tasks_blocked()
        assert [lead.keys for lead in led.leads] == [[("q", "p"), ("q", "r")]]
        scene.wakeups.notify([("q", "p"), ("q", "r")])
        await wait_all_tasks_blocked()
        led.answered.set()
        await wait_all_tasks_blocked()
        assert scene.woken == ["led"]

    play(scenario)


def test_the_second_news_of_a_partition_is_another_s() -> None:
    """The first is the push's own; what else is committed there the led pop may have missed."""

    async def scenario(scene: Scene) -> None:
        await Led(scene, "led", key()).park()
        await scene.park("other", key())
        scene.wakeups.lead([("q", "p")], PUSH)
        scene.wakeups.notify([("q", "p")])
        await wait_all_tasks_blocked()
        assert scene.woken == []
        scene.wakeups.notify([("q", "p")])
        await wait_all_tasks_blocked()
        assert scene.woken == ["other"]

    play(scenario)


def test_news_after_the_answer_wakes_even_if_the_push_s_own_never_came() -> None:
    async def scenario(scene: Scene) -> None:
        led = await Led(scene, "led", key()).park()
        await scene.park("other", key())
        scene.wakeups.lead([("q", "p")], PUSH)
        led.answered.set()
        await wait_all_tasks_blocked()
        scene.wakeups.notify([("q", "p")])
        await wait_all_tasks_blocked()
        assert scene.woken == ["led", "other"]

    play(scenario)


def test_news_of_other_partitions_wakes_while_a_pop_is_led() -> None:
    async def scenario(scene: Scene) -> None:
        await Led(scene, "led", key()).park()
        await scene.park("other", key())
        scene.wakeups.lead([("q", "p")], PUSH)
        scene.wakeups.notify([("q", "r")])
        await wait_all_tasks_blocked()
        assert scene.woken == ["other"]

    play(scenario)


def test_a_push_leads_to_no_more_partitions_than_the_pop_can_take() -> None:
    async def scenario(scene: Scene) -> None:
        scene.hotlist_says_yes()
        led = await Led(scene, "led", key(), room=2).park()
        keys = [("q", name) for name in "abc"]
        scene.wakeups.lead(keys, PUSH)
        await wait_all_tasks_blocked()
        assert [lead.keys for lead in led.leads] == [keys[:2]]

    play(scenario)


def test_two_pushes_into_a_partition_lead_one_pop() -> None:
    async def scenario(scene: Scene) -> None:
        pops = [await Led(scene, name, key()).park() for name in ("first", "second")]
        for _ in range(2):
            scene.wakeups.lead([("q", "p")], PUSH)
            await wait_all_tasks_blocked()
        assert [len(pop.leads) for pop in pops] == [1, 0]

    play(scenario)


def test_who_asks_already_is_passed_over() -> None:
    async def scenario(scene: Scene) -> None:
        with scene.wakeups.waiter(key(), 100):
            led = await Led(scene, "led", key()).park()
            for name in "pr":
                scene.wakeups.lead([("q", name)], PUSH)
            await wait_all_tasks_blocked()
        assert [lead.keys for lead in led.leads] == [[("q", "p")]]

    play(scenario)


def test_who_can_not_be_led_is_not_passed_over() -> None:
    """Else those behind it would get all."""

    async def scenario(scene: Scene) -> None:
        await Led(scene, "autoAck", key(), room=0).park()
        other = await Led(scene, "other", key()).park()
        scene.wakeups.lead([("q", "p")], PUSH)
        scene.wakeups.notify([("q", "p")])
        await wait_all_tasks_blocked()
        assert scene.woken == ["autoAck"]
        assert other.leads == []

    play(scenario)


def test_after_a_push_that_lasted_none_leads_for_a_while() -> None:
    async def scenario(scene: Scene) -> None:
        led = await Led(scene, "led", key()).park()
        scene.wakeups.rest_leads()
        scene.wakeups.lead([("q", "p")], PUSH)
        await trio.sleep(REST_SECONDS)
        assert led.leads == []
        scene.wakeups.lead([("q", "p")], PUSH)
        await wait_all_tasks_blocked()
        assert len(led.leads) == 1

    play(scenario)


def test_only_who_waits_for_the_partition_is_led() -> None:
    async def scenario(scene: Scene) -> None:
        others = [key(partition="r"), key("other"), key(None)]
        pops = [await Led(scene, str(where), where).park() for where in others]
        led = await Led(scene, "led", key(partition="p")).park()
        scene.wakeups.lead([("q", "p")], PUSH)
        await wait_all_tasks_blocked()
        assert [len(pop.leads) for pop in (*pops, led)] == [0, 0, 0, 1]

    play(scenario)


def test_who_is_led_and_cancelled_passes_the_wake_on() -> None:
    async def scenario(scene: Scene) -> None:
        led = await Led(scene, "gone", key()).park()
        await scene.park("next", key())
        scene.wakeups.lead([("q", "p")], PUSH)
        await wait_all_tasks_blocked()
        scene.wakeups.notify([("q", "p")])
        led.scope.cancel()
        await wait_all_tasks_blocked()
        assert scene.woken == ["next"]

    play(scenario)


@pytest.mark.parametrize("again", [False, True])
def test_who_leaves_without_having_asked_passes_the_wake_on(again: bool) -> None:
    """Pops were in maintenance, say, until its time was over."""

    async def scenario(scene: Scene) -> None:
        async def pop() -> None:
            with scene.wakeups.waiter(key(), 100) as waiter:
                await waiter.wait_woken()
                scene.wakeups.notify([("q", "p")])
                if again:
                    scene.wakeups.lead([("q", "r")], PUSH)  # not to who is about to ask

        scene.nursery.start_soon(pop)
        await wait_all_tasks_blocked()
        await scene.park("next", key())
        scene.wakeups.lead([("q", "p")], PUSH)
        await wait_all_tasks_blocked()
        assert scene.woken == ["next"]
        await scene.park("later", key())
        scene.wakeups.notify([("q", "p")])
        await wait_all_tasks_blocked()
        assert scene.woken == ["next", "later"]

    play(scenario)


# -- drain ---------------------------------------------------------------------------------------


def test_drain_sends_all_home_and_keeps_nobody() -> None:
    async def scenario(scene: Scene) -> None:
        for name in "abc":
            await scene.park(name, key(name))
        scene.wakeups.drain()
        await wait_all_tasks_blocked()
        assert sorted(scene.woken) == ["a", "b", "c"]
        await scene.park("late", key())
        assert scene.woken[-1] == "late"
        assert scene.wakeups.draining

    play(scenario)
