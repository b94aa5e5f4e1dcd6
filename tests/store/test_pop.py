"""Pop: what a claim takes, visibility, bounds, and where a new group starts (spec 1, 2, 8.3)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import trio

from queen_trio.store.elapsed import Elapsed
from tests.store.calls import GROUP, MIB, Part, delivered, ids

if TYPE_CHECKING:
    from queen_trio.store.queries import PopRow, ProbeRow
    from tests.store.calls import Log


async def fill(log: Log, partitions: int, messages: int = 1, *, queue: str = "q") -> None:
    """Push `messages` to each of the partitions p0, p1 …; m0.1 is the second one of p0."""
    await log.push_bundle(
        *(
            Part(ids=[f"m{p}.{i}" for i in range(messages)], queue=queue, partition=f"p{p}")
            for p in range(partitions)
        )
    )


class TestClaim:
    async def test_nothing_there(self, log: Log) -> None:
        assert await log.pop() == []
        await log.configure()
        assert await log.pop() == []

    async def test_it_names_what_it_took(self, log: Log) -> None:
        pushed = await log.push("a", "b")
        [row] = await log.pop_rows()
        assert row[:6] == (pushed.partition_id, "p", "q", -1, 1, 1)
        assert (row.base_offset, row.created_at) == (0, pushed.created_at)

    async def test_the_lease_is_written(self, log: Log) -> None:
        pushed = await log.push("a", "b")
        before = datetime.now(UTC)
        await log.pop(lease_id="mine")
        cursor = await log.cursor(pushed.partition_id)
        assert cursor is not None
        assert (cursor["committed"], cursor["batch_end"], cursor["worker_id"]) == (-1, 1, "mine")
        expires = datetime.fromisoformat(cursor["lease_expires_at"])
        assert timedelta(seconds=60) <= expires - before < timedelta(seconds=70)

    @pytest.mark.parametrize(("asked", "seconds"), [(None, 300), (7, 7)])
    async def test_lease_seconds(self, log: Log, asked: int | None, seconds: int) -> None:
        await log.configure()
        pushed = await log.push("a")
        await log.pop(lease_seconds=asked)
        cursor = await log.cursor(pushed.partition_id)
        assert cursor is not None
        lasts = datetime.fromisoformat(cursor["lease_expires_at"]) - datetime.fromisoformat(
            cursor["lease_acquired_at"]
        )
        assert lasts == timedelta(seconds=seconds)

    async def test_batches_follow_each_other_across_segments(self, log: Log) -> None:
        await log.push("a", "b", "c")
        await log.push("d")
        await log.push("e", "f")
        taken = []
        while batch := ids(await log.pop(batch=2, auto_ack=True)):
            taken.append(batch)
        assert taken == [["a", "b"], ["c", "d"], ["e", "f"]]

    async def test_auto_ack_commits_and_holds_nothing(self, log: Log) -> None:
        pushed = await log.push("a", "b")
        assert ids(await log.pop(auto_ack=True, lease_id="")) == ["a", "b"]
        cursor = await log.cursor(pushed.partition_id)
        assert cursor is not None
        assert (cursor["committed"], cursor["total_consumed"]) == (1, 2)
        assert cursor["batch_end"] is cursor["worker_id"] is cursor["lease_expires_at"] is None
        assert await log.pop() == []

    async def test_groups_do_not_share_cursors(self, log: Log) -> None:
        await log.push("a")
        assert ids(await log.pop()) == ["a"]
        assert ids(await log.pop(group="g")) == ["a"]
        assert ids(await log.pop(group="h")) == ["a"]

    async def test_one_partition_of_a_queue(self, log: Log) -> None:
        await fill(log, 3)
        assert ids(await log.pop(partition="p1")) == ["m1.0"]
        assert await log.pop(partition="p1") == []
        assert await log.pop(partition="absent") == []

    @pytest.mark.parametrize("odd", [{"batch": 0}, {"batch": -1}, {"partitions": 0}])
    async def test_asking_for_nothing_claims_nothing(self, log: Log, odd: dict[str, int]) -> None:
        await log.push("a")
        assert await log.pop(**odd) == []
        assert ids(await log.pop()) == ["a"]


class TestDiscovery:
    @pytest.fixture
    async def queues(self, log: Log) -> None:
        for queue in ("orders.created", "orders.paid", "users.created", "plain"):
            await log.push(queue, queue=queue)

    @pytest.mark.parametrize(
        ("namespace", "task", "found"),
        [
            ("orders", "", ["orders.created", "orders.paid"]),
            ("", "created", ["orders.created", "users.created"]),
            ("orders", "created", ["orders.created"]),
            ("orders", "lost", []),
        ],
    )
    async def test_by_namespace_and_task(
        self, log: Log, queues: None, namespace: str, task: str, found: list[str]
    ) -> None:
        got = await log.pop(queue=None, namespace=namespace, task=task, partitions=None)
        assert sorted(ids(got)) == found
        assert {m.id: m.queue for m in got} == {name: name for name in found}

    async def test_each_queue_keeps_its_own_lease_time(self, log: Log, queues: None) -> None:
        await log.configure("orders.created", lease_time=7)
        await log.pop(queue=None, namespace="orders", partitions=None)
        rows = await log.execute(
            "SELECT lease_expires_at - lease_acquired_at FROM queen.log_consumers ORDER BY 1"
        )
        assert rows == [(timedelta(seconds=7),), (timedelta(seconds=60),)]


class TestSeveralPartitions:
    async def test_the_cap(self, log: Log) -> None:
        await fill(log, 5, 2)
        assert len({m.partition for m in await log.pop(partitions=3)}) == 3
        assert len({m.partition for m in await log.pop(partitions=3)}) == 2

    async def test_no_cap(self, log: Log) -> None:
        await fill(log, 5, 2)
        assert len(await log.pop(partitions=None)) == 10

    async def test_the_budget_spans_them(self, log: Log) -> None:
        await fill(log, 3, 4)
        got = await log.pop(partitions=None, batch=6)
        assert len(got) == 6
        by_partition = [[m.offset for m in got if m.partition == p] for p in ("p0", "p1", "p2")]
        assert sorted(by_partition) == [[], [0, 1], [0, 1, 2, 3]]
        rest = await log.pop(partitions=None)
        assert [m.offset for m in rest] == [0, 1, 2, 3]  # the third; the rest of the second waits

    async def test_a_partition_comes_in_one_piece(self, log: Log) -> None:
        await fill(log, 3, 2)
        await fill(log, 3, 2, queue="other")
        for p in range(3):
            await log.push(f"late{p}", partition=f"p{p}")
        got = [m.partition for m in await log.pop(partitions=None)]
        runs = [p for i, p in enumerate(got) if i == 0 or got[i - 1] != p]
        assert sorted(runs) == ["p0", "p1", "p2"]

    async def test_the_least_recently_claimed_comes_first(self, log: Log) -> None:
        await fill(log, 3)
        order = [m.partition for _ in range(3) for m in await log.pop(auto_ack=True)]
        assert sorted(order) == ["p0", "p1", "p2"]
        await fill_again(log, order)
        assert [m.partition for _ in range(3) for m in await log.pop(auto_ack=True)] == order

    async def test_leased_ones_are_passed_over(self, log: Log) -> None:
        await fill(log, 2)
        [first] = await log.pop()
        [second] = await log.pop()
        assert {first.partition, second.partition} == {"p0", "p1"}
        assert await log.pop() == []


async def fill_again(log: Log, partitions: list[str]) -> None:
    for partition in partitions:
        await log.push(f"again-{partition}", partition=partition)


# A pop of one candidate has a path of its own, which must not matter: p is alone or not.
BESIDE = pytest.mark.parametrize("beside", [(), ("nowhere",), ("idle",), ("idle", "nowhere")])


def verdicts(rows: list[PopRow]) -> dict[str, str]:
    return {row.partition_name: row.verdict for row in rows if row.verdict is not None}


def until(rows: list[PopRow], partition: str) -> int:
    [row] = [row for row in rows if row.partition_name == partition and row.verdict is not None]
    assert row.until_ms is not None
    return row.until_ms


class TestCandidates:
    @BESIDE
    async def test_what_it_took(self, log: Log, beside: tuple[str, ...]) -> None:
        pushed = await log.push("a", "b")
        await log.push("c", "d", "e")
        await self.idle(log)
        for attempt in (1, 2):
            rows = await log.pop_rows(batch=4, lease_seconds=30, candidates=["p", *beside])
            assert [row[:6] for row in rows if row.verdict is None] == [
                (pushed.partition_id, "p", "q", -1, 1, attempt),
                (pushed.partition_id, "p", "q", -1, 3, attempt),
            ]
            assert ids(delivered(rows)) == ["a", "b", "c", "d"]
            assert verdicts(rows) == {"p": "t"} | ({"idle": "e"} if "idle" in beside else {})
            assert 29_000 < until(rows, "p") <= 30_000
            cursor = await log.cursor(pushed.partition_id)
            assert cursor is not None
            assert (cursor["committed"], cursor["batch_end"]) == (-1, 3)
            assert (cursor["worker_id"], cursor["batch_retry_count"]) == ("lease", attempt)
            await log.expire()

    @BESIDE
    async def test_auto_ack(self, log: Log, beside: tuple[str, ...]) -> None:
        pushed = await log.push("a", "b")
        await self.idle(log)
        rows = await log.pop_rows(batch=1, auto_ack=True, candidates=["p", *beside])
        assert ids(delivered(rows)) == ["a"]
        assert verdicts(rows)["p"] == "r"
        assert await log.committed(pushed.partition_id) == 0
        rows = await log.pop_rows(batch=1, auto_ack=True, candidates=["p", *beside])
        assert ids(delivered(rows)) == ["b"]
        assert verdicts(rows)["p"] == "e", "nothing is left to ask about"

    @BESIDE
    async def test_nothing_left(self, log: Log, beside: tuple[str, ...]) -> None:
        await log.push("a")
        await self.idle(log)
        await log.pop(auto_ack=True)
        rows = await log.pop_rows(candidates=["p", *beside])
        assert verdicts(rows)["p"] == "e"
        assert {row.until_ms for row in rows} == {None}

    @BESIDE
    async def test_leased(self, log: Log, beside: tuple[str, ...]) -> None:
        await log.push("a")
        await self.idle(log)
        await log.pop(lease_seconds=30)
        rows = await log.pop_rows(candidates=["p", *beside])
        assert verdicts(rows)["p"] == "l"
        assert 25_000 < until(rows, "p") <= 30_000

    @BESIDE
    @pytest.mark.parametrize("option", ["delayed_processing", "window_buffer", "min_pop_wait_time"])
    async def test_held_back(self, log: Log, beside: tuple[str, ...], option: str) -> None:
        await log.configure(**{option: 50})
        pushed = await log.push("a", "b")
        await self.idle(log)
        if option == "min_pop_wait_time":
            await log.pop(batch=1, auto_ack=True)
        else:
            await log.pop()  # a cursor, without a lease
        before = await log.cursor(pushed.partition_id)
        rows = await log.pop_rows(candidates=["p", *beside])
        assert delivered(rows) == []
        assert verdicts(rows)["p"] == "l"
        assert 40_000 < until(rows, "p") <= 50_000
        assert await log.cursor(pushed.partition_id) == before

    @BESIDE
    async def test_without_a_cursor(self, log: Log, beside: tuple[str, ...]) -> None:
        """A partition that the group hasn't seen, before or behind its point."""
        await log.push("a", partition="old")
        await self.idle(log)
        waited = Elapsed(trio.current_time())
        assert await log.store.candidates("q", "g", "new", None, waited, 10) == []
        await log.push("b")
        new = {"group": "g", "mode": "new", "batch": 1}
        rows = await log.pop_rows(candidates=["old", *beside], **new)
        assert delivered(rows) == []
        assert verdicts(rows)["old"] == "e"
        rows = await log.pop_rows(candidates=["p", *beside], **new)
        assert ids(delivered(rows)) == ["b"]
        assert verdicts(rows)["p"] == "t"

    @BESIDE
    async def test_an_unknown_group_is_subscribed(self, log: Log, beside: tuple[str, ...]) -> None:
        await log.push("a")
        await self.idle(log)
        rows = await log.pop_rows(candidates=["p", *beside], group="g", mode="all")
        assert ids(delivered(rows)) == ["a"]
        assert await log.execute(
            "SELECT consumer_group, subscription_mode FROM queen.consumer_groups_metadata"
        ) == [("g", "all")]

    async def test_the_first_that_fit_are_taken(self, log: Log) -> None:
        await fill(log, 3, 2)
        await log.pop(partition="p0", auto_ack=True)
        await log.push("more", partition="p0")
        rows = await log.pop_rows(batch=3, partitions=None, candidates=["p0", "p1", "p2"])
        assert verdicts(rows) == {"p0": "r", "p1": "t", "p2": "t"}
        assert len(delivered(rows)) == 3

    @pytest.mark.parametrize("odd", [{"batch": 0}, {"partitions": 0}, {"max_bytes": 0}])
    async def test_asking_for_nothing(self, log: Log, odd: dict[str, int]) -> None:
        await log.push("a")
        rows = await log.pop_rows(candidates=["p"], **odd)
        assert (verdicts(rows), delivered(rows)) == ({"p": "r"}, [])

    async def test_nobody_knows_them(self, log: Log) -> None:
        assert await log.pop_rows(candidates=["p"]) == []
        await log.push("a")
        assert await log.pop_rows(candidates=["other"]) == []

    async def idle(self, log: Log) -> None:
        await log.push("idle", partition="idle")
        await log.pop(partition="idle", auto_ack=True)
        await log.pop(partition="idle", group="g", auto_ack=True)
        await log.execute("DELETE FROM queen.consumer_groups_metadata")


class TestVisibility:
    async def test_delayed_processing_hides_each_message(self, log: Log) -> None:
        await log.configure(delayed_processing=60)
        await log.push("old")
        await log.age(61)
        await log.push("young")
        assert ids(await log.pop(auto_ack=True)) == ["old"]
        assert await log.pop() == []
        await log.age(61)
        assert ids(await log.pop()) == ["young"]

    async def test_window_buffer_waits_for_the_oldest(self, log: Log) -> None:
        await log.configure(window_buffer=60)
        await log.push("old")
        assert await log.pop() == []
        await log.age(61)
        await log.push("young")
        assert ids(await log.pop(auto_ack=True)) == ["old", "young"]
        await log.push("next")
        assert await log.pop() == []

    async def test_without_them_a_clock_that_stepped_back_hides_nothing(self, log: Log) -> None:
        await log.push("a")
        await log.age(-3600)
        assert ids(await log.pop()) == ["a"]

    async def test_both(self, log: Log) -> None:
        await log.configure(window_buffer=60, delayed_processing=30)
        await log.push("old")
        await log.age(40)
        assert await log.pop() == []
        await log.push("middle")
        await log.age(25)
        assert ids(await log.pop()) == ["old"]

    async def test_a_hidden_partition_gives_way(self, log: Log) -> None:
        await log.configure("slow.x", delayed_processing=60)
        await log.push("hidden", queue="slow.x")
        await log.push("seen", queue="fast.x")
        got = await log.pop(queue=None, task="x", partitions=1)
        assert ids(got) == ["seen"]

    async def test_it_does_not_count_as_an_attempt(self, log: Log) -> None:
        await log.configure(delayed_processing=60)
        await log.push("a")
        for _ in range(3):
            assert await log.pop() == []
        await log.age(61)
        assert [m.attempt for m in await log.pop()] == [1]


class TestBytes:
    async def test_the_first_message_always_fits(self, log: Log) -> None:
        await log.push("a", payload="x" * 1000)
        assert ids(await log.pop(max_bytes=1)) == ["a"]

    async def test_one_at_a_time(self, log: Log) -> None:
        await log.push("a", "b", payload="x" * 1000)
        assert ids(await log.pop(max_bytes=1, auto_ack=True)) == ["a"]
        assert ids(await log.pop(max_bytes=1, auto_ack=True)) == ["b"]

    async def test_what_fits_is_taken(self, log: Log) -> None:
        for name in "abcd":
            await log.push(name, payload="x" * 1000)
        await log.push("e", "f", payload="x" * 1000)
        assert ids(await log.pop(max_bytes=3500)) == ["a", "b", "c"]
        await log.expire()
        assert ids(await log.pop(max_bytes=5500)) == ["a", "b", "c", "d", "e"]

    async def test_the_bound_spans_partitions(self, log: Log) -> None:
        for p in range(4):
            await log.push(f"a{p}", partition=f"p{p}", payload="x" * 1000)
        assert len(await log.pop(max_bytes=2500, partitions=None)) == 2
        assert len(await log.pop(max_bytes=2500, partitions=None)) == 2

    async def test_a_partition_that_does_not_fit_is_not_leased(self, log: Log) -> None:
        await log.push("a", partition="1", payload="x" * 1000)
        await log.push("b", partition="2", payload="x" * 1000)
        [first] = await log.pop(max_bytes=1100, partitions=None)
        [second] = await log.pop(max_bytes=1100, partitions=None)
        assert {first.id, second.id} == {"a", "b"}
        assert second.attempt == 1

    async def test_raw_size_counts_not_the_compressed_one(self, log: Log) -> None:
        names = [f"n{i}" for i in range(20)]
        await log.push(*names, payload="x" * MIB)
        assert len(await log.pop()) == 15


class TestFirstContact:
    """Where a group starts that has no cursor yet (spec 8.3)."""

    async def test_queue_mode_starts_at_the_beginning_whatever_it_says(self, log: Log) -> None:
        await log.push("a")
        assert ids(await log.pop(mode="new", since=datetime.now(UTC))) == ["a"]
        assert await log.execute("SELECT 1 FROM queen.consumer_groups_metadata") == []

    async def test_all(self, log: Log) -> None:
        await log.push("a")
        assert ids(await log.pop(group="g", mode="all")) == ["a"]

    async def test_new(self, log: Log) -> None:
        await log.push("a")
        assert await log.pop(group="g", mode="new") == []
        await log.push("b")
        assert ids(await log.pop(group="g", mode="new")) == ["b"]

    async def test_new_means_since_the_pop_arrived(self, log: Log) -> None:
        await log.push("before")
        await log.age(60)
        await log.push("woke it")
        assert ids(await log.pop(group="g", mode="new", waited_ms=30_000)) == ["woke it"]

    async def test_from_a_time_between_segments(self, log: Log) -> None:
        await log.push("a")
        await log.age(100)
        await log.push("b")
        await log.push("c")
        since = datetime.now(UTC) - timedelta(seconds=50)
        assert ids(await log.pop(group="g", mode="new", since=since)) == ["b", "c"]

    async def test_from_the_very_moment_of_a_message(self, log: Log) -> None:
        await log.push("a")
        at = (await log.push("b")).created_at
        assert ids(await log.pop(group="g", mode="new", since=at)) == ["b"]

    async def test_from_the_future(self, log: Log) -> None:
        await log.push("a")
        since = datetime.now(UTC) + timedelta(seconds=50)
        assert await log.pop(group="g", since=since) == []
        await log.age(-100)
        assert ids(await log.pop(group="g")) == ["a"]

    async def test_the_stored_point_wins(self, log: Log) -> None:
        await log.push("a")
        assert await log.pop(group="g", mode="new") == []
        assert await log.pop(group="g", mode="all") == []
        since = datetime.now(UTC) - timedelta(hours=1)
        assert await log.pop(group="g", mode="all", since=since) == []
        [(mode, count)] = await log.execute(
            "SELECT min(subscription_mode), count(*) FROM queen.consumer_groups_metadata"
        )
        assert (mode, count) == ("new", 1)

    async def test_a_partition_born_later_is_read_from_its_start(self, log: Log) -> None:
        await log.push("a")
        assert await log.pop(group="g", mode="new") == []
        await log.push("b", "c", partition="later")
        assert ids(await log.pop(group="g", mode="new")) == ["b", "c"]

    async def test_subscribed_before_the_queue_exists(self, log: Log) -> None:
        assert await log.pop(group="g", mode="new") == []
        await log.push("a")
        assert ids(await log.pop(group="g", mode="new")) == ["a"]

    async def test_discovery_has_points_of_its_own(self, log: Log) -> None:
        await log.push("a", queue="orders.x")
        by_task = {"queue": None, "task": "x", "group": "g", "mode": "new"}
        assert await log.pop(**by_task) == []
        assert ids(await log.pop(queue="orders.x", group="g", mode="all")) == ["a"]
        assert await log.pop(**by_task) == []
        await log.push("b", queue="users.x")
        assert ids(await log.pop(**by_task)) == ["b"]

    async def test_all_starts_where_retention_left_off(self, log: Log) -> None:
        pushed = await log.push("a")
        await log.push("b")
        await log.retain_from(pushed.partition_id, 1)
        assert ids(await log.pop(group="g", mode="all")) == ["b"]
        assert (await log.committed(pushed.partition_id, "g")) == 0

    async def test_a_point_before_what_is_left(self, log: Log) -> None:
        pushed = await log.push("a")
        await log.push("b")
        await log.retain_from(pushed.partition_id, 1)
        since = datetime.now(UTC) - timedelta(hours=1)
        assert ids(await log.pop(group="g", mode="new", since=since)) == ["b"]
        assert (await log.committed(pushed.partition_id, "g")) == 0


class TestAfterRetention:
    async def test_a_cursor_far_behind_goes_on_at_what_is_left(self, log: Log) -> None:
        pushed = await log.push("a")
        await log.pop(auto_ack=True)
        await log.push(*(f"gone{i}" for i in range(50)))
        await log.push("left", "last")
        await log.retain_from(pushed.partition_id, 51)
        assert ids(await log.pop(batch=1, auto_ack=True)) == ["left"]
        assert ids(await log.pop(batch=1, auto_ack=True)) == ["last"]
        assert (await log.committed(pushed.partition_id)) == 52

    async def test_an_empty_partition_has_nothing(self, log: Log) -> None:
        pushed = await log.push("a")
        await log.retain_from(pushed.partition_id, 1)
        assert await log.pop() == []
        assert await log.pop(group="g", mode="all") == []

    async def test_no_room_left_claims_nothing_over_a_gap(self, log: Log) -> None:
        for partition in ("1", "2"):
            pushed = await log.push("gone", partition=partition)
            await log.push(f"left{partition}", partition=partition, payload="x" * 1000)
            await log.retain_from(pushed.partition_id, 1)
            await log.execute(
                "INSERT INTO queen.log_consumers (partition_id, consumer_group) VALUES ($1, $2)",
                pushed.partition_id, GROUP,
            )  # fmt: skip
        for _ in range(2):
            [message] = await log.pop(max_bytes=1100, partitions=None)
            assert message.attempt == 1
        assert await log.pop() == []


class TestProbe:
    async def probe(self, log: Log, *groups: str, limit: int = 10) -> list[tuple[int, int]]:
        """The pops that could be served now, each with its number of partitions."""
        return [row[:2] for row in await self.rows(log, *groups, limit=limit) if row.available]

    async def rows(self, log: Log, *groups: str, limit: int = 10) -> list[ProbeRow]:
        n = len(groups)
        return await log.store.probe(
            ["q"] * n, [None] * n, [""] * n, [""] * n, list(groups), [limit] * n
        )

    async def due_ms(self, log: Log) -> int | None:
        """When nothing can be claimed now: how long until something can."""
        rows = await self.rows(log, "__QUEUE_MODE__")
        assert not [row for row in rows if row.available]
        return rows[0].due_ms if rows else None

    async def test_a_lease_is_due_when_it_runs_out(self, log: Log) -> None:
        await fill(log, 2)
        await log.pop(partition="p0", lease_seconds=50)
        await log.pop(partition="p1", lease_seconds=20)
        due_ms = await self.due_ms(log)
        assert due_ms is not None
        assert 10_000 < due_ms <= 20_000
        await log.expire()
        assert await self.probe(log, "__QUEUE_MODE__") == [(1, 2)]

    @pytest.mark.parametrize("option", ["delayed_processing", "window_buffer"])
    async def test_a_hidden_message_is_due_when_it_is_old_enough(
        self, log: Log, option: str
    ) -> None:
        await log.configure("q", **{option: 60})
        await log.push("a")
        await log.age(30)
        await log.push("b")
        due_ms = await self.due_ms(log)
        assert due_ms is not None
        assert 20_000 < due_ms <= 30_000
        assert await log.pop() == []
        await log.age(31)
        assert await self.probe(log, "__QUEUE_MODE__") == [(1, 1)]
        assert ids(await log.pop())[0] == "a"

    async def test_min_pop_wait_time_spaces_the_claims_of_a_partition(self, log: Log) -> None:
        await log.configure(min_pop_wait_time=60)
        await log.push("a", "b")
        await log.push("c", partition="other")
        assert ids(await log.pop(batch=1, partition="p", auto_ack=True)) == ["a"]
        assert await log.pop(batch=1, partition="p") == []
        assert ids(await log.pop(partitions=None)) == ["c"]
        due_ms = await self.due_ms(log)
        assert due_ms is not None
        assert 50_000 < due_ms <= 60_000
        await log.execute(
            "UPDATE queen.log_consumers SET lease_acquired_at = lease_acquired_at - interval '61 s'"
        )
        assert ids(await log.pop(partition="p")) == ["b"]

    async def test_it_counts_what_a_pop_could_claim(self, log: Log) -> None:
        await fill(log, 3)
        assert await self.probe(log, "__QUEUE_MODE__") == [(1, 3)]
        assert await self.probe(log, "__QUEUE_MODE__", limit=2) == [(1, 2)]
        await log.pop()
        assert await self.probe(log, "__QUEUE_MODE__") == [(1, 2)]
        await log.pop(partitions=None)
        assert await self.probe(log, "__QUEUE_MODE__") == []
        await log.expire()
        assert await self.probe(log, "__QUEUE_MODE__") == [(1, 3)]

    async def test_each_group_counts_from_its_own_point(self, log: Log) -> None:
        await fill(log, 2)
        await log.pop(group="all", mode="all", partition="p0", auto_ack=True)
        await log.pop(group="new", mode="new")
        probed = ("new", "all", "unknown", "__QUEUE_MODE__")
        assert await self.probe(log, *probed) == [(2, 1), (4, 2)]
        await log.push("late", partition="p1")
        assert await self.probe(log, *probed) == [(1, 1), (2, 1), (4, 2)]

    async def test_one_partition_and_discovery(self, log: Log) -> None:
        await fill(log, 2, queue="orders.x")
        group = "__QUEUE_MODE__"
        rows = await log.store.probe(
            ["orders.x", "orders.x", None, None], ["p1", "absent", None, None],
            ["", "", "orders", ""], ["", "", "", "y"], [group] * 4, [9] * 4,
        )  # fmt: skip
        assert rows == [(1, 1, None), (3, 2, None)]

    async def test_nothing_asked(self, log: Log) -> None:
        assert await log.store.probe([], [], [], [], [], []) == []
