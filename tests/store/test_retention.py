"""Retention: what goes, what stays, what it leaves right behind itself, and whom it meets."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from queen_trio.jobs import retention as job
from queen_trio.jobs.history import KEEP, History
from queen_trio.jobs.retention import Retention
from queen_trio.store.connection import connect
from queen_trio.store.groups import GroupStore
from queen_trio.store.resources import ResourceStore
from queen_trio.store.traces import TraceStore
from tests.store.calls import Log, Part, ids
from tests.store.races import open_arena
from tests.store.test_races import ack, pop, push, race

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from queen_trio.store.pool import Pool
    from queen_trio.store.settings import ConnectionSettings
    from tests.store.races import Arena, Outcome, Step

DAY = 86_400
IDLE_DAYS = 30
MINUTE: dict[str, Any] = {"retention_enabled": True, "retention_seconds": 60}
COMPLETED: dict[str, Any] = {"retention_enabled": True, "completed_retention_seconds": 60}


@pytest.fixture
def retention(pool: Pool) -> Retention:
    return Retention(pool, IDLE_DAYS)


async def check_row(log: Log, part: UUID) -> None:
    """Hold a partition's row to its segments and its sidecar."""
    [checks] = await log.execute(
        "SELECT p.oldest_live_at IS NOT DISTINCT FROM min(s.created_at),"
        " p.log_start = coalesce(min(s.base_offset), p.last_offset + 1),"
        " p.oldest_txn_at IS NOT DISTINCT FROM (SELECT min(t.created_at) FROM queen.log_txns t"
        "  WHERE t.partition_id = p.id),"
        " p.txns_start = coalesce((SELECT min(t.base_offset) FROM queen.log_txns t"
        "  WHERE t.partition_id = p.id), p.last_offset + 1)"
        " FROM queen.log_partitions p LEFT JOIN queen.log_segments s ON s.partition_id = p.id"
        " WHERE p.id = $1 GROUP BY p.id",
        part,
    )
    assert checks == (True, True, True, True)


async def stored(log: Log, part: UUID) -> list[int]:
    """The offsets that are there."""
    rows = await log.execute(
        "SELECT base_offset, end_offset FROM queen.log_segments WHERE partition_id = $1 ORDER BY 1",
        part,
    )
    return [offset for first, last in rows for offset in range(first, last + 1)]


class TestRules:
    @pytest.mark.parametrize("rule", [MINUTE, {"max_wait_time_seconds": 60}], ids=["any", "wait"])
    async def test_what_is_too_old_goes_whatever_the_cursors_say(
        self, log: Log, retention: Retention, rule: dict[str, Any]
    ) -> None:
        await log.configure(**rule)
        part = (await log.push("a", "b")).partition_id
        await log.pop(group="g", batch=1, lease_id="held")
        await log.age(40)
        await log.push("c")
        await retention.run()
        assert await stored(log, part) == [0, 1, 2]
        await log.age(30)
        await retention.run()
        assert await stored(log, part) == [2]
        await check_row(log, part)
        assert (retention.statistics.segments, retention.statistics.messages) == (1, 2)
        assert ids(await log.pop()) == ["c"]
        await log.age(31)
        await retention.run()
        assert await stored(log, part) == []
        await check_row(log, part)
        assert await log.pop() == []
        # What comes then starts the clock anew.
        await log.push("d")
        await check_row(log, part)
        await retention.run()
        assert ids(await log.pop(lease_id="next", group="h")) == ["d"]

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"retention_seconds": 60, "completed_retention_seconds": 60},
            {"retention_enabled": True},
        ],
        ids=["no rule", "not enabled", "no age"],
    )
    async def test_what_no_rule_names_stays(
        self, log: Log, retention: Retention, options: dict[str, Any]
    ) -> None:
        await log.configure(**options)
        part = (await log.push("a")).partition_id
        await log.pop(auto_ack=True, lease_id="")
        await log.age(10 * DAY)
        await retention.run()
        assert await stored(log, part) == [0]

    async def test_completed_goes_below_the_lowest_cursor(
        self, log: Log, retention: Retention
    ) -> None:
        """Spec 8.2: where nobody has a cursor nothing is completed."""
        await log.configure(**COMPLETED)
        part = (await log.push("a", "b")).partition_id
        for name in "cde":
            await log.push(name)
        await log.age(61)
        await retention.run()
        assert await stored(log, part) == [0, 1, 2, 3, 4]
        await log.pop(group="g", batch=4, lease_id="", auto_ack=True)
        await log.pop(group="h", batch=1, lease_id="", auto_ack=True)
        await retention.run()
        assert await stored(log, part) == [0, 1, 2, 3, 4], "h has not passed the first segment"
        await log.pop(group="h", batch=2, lease_id="", auto_ack=True)
        await retention.run()
        assert await stored(log, part) == [3, 4]
        await log.pop(group="h", lease_id="", auto_ack=True)
        await retention.run()
        assert await stored(log, part) == [4]
        # A lease is not a cursor.
        await log.pop(group="g", lease_id="held")
        await retention.run()
        assert await stored(log, part) == [4]
        await check_row(log, part)

    async def test_completed_is_no_younger_than_its_age(
        self, log: Log, retention: Retention
    ) -> None:
        await log.configure(**COMPLETED)
        part = (await log.push("a")).partition_id
        await log.age(61)
        await log.push("b")
        await log.pop(auto_ack=True, lease_id="")
        await retention.run()
        assert await stored(log, part) == [1]

    async def test_two_rules_meet(self, log: Log, retention: Retention) -> None:
        await log.configure(**COMPLETED, retention_seconds=600, max_wait_time_seconds=300)
        part = (await log.push("a")).partition_id
        await log.push("b")
        await log.age(299)
        await log.pop(batch=1, auto_ack=True, lease_id="")
        await retention.run()
        assert await stored(log, part) == [1]
        await log.age(2)
        await retention.run()
        assert await stored(log, part) == []

    async def test_a_changed_rule_holds_at_once(self, log: Log, retention: Retention) -> None:
        part = (await log.push("a")).partition_id
        await log.age(61)
        await retention.run()
        await log.configure(**MINUTE)
        await retention.run()
        assert await stored(log, part) == []


class TestConsumers:
    async def test_those_below_go_on_at_the_start(self, log: Log) -> None:
        await log.configure(**MINUTE)
        pushed = await log.push("a", "b")
        await log.pop(group="g", batch=1)
        await log.ack(pushed.partition_id, "a:c", group="g")
        await log.age(61)
        await log.push("c", "d")
        groups = GroupStore(log.store)
        [group] = await groups.groups_of("q")
        assert group.total_lag == 3
        assert await log.trim(pushed.partition_id) == (1, 2)
        [group] = await groups.groups_of("q")
        assert group.total_lag == 2
        [queue] = await log.store.list_queues("q")
        assert (queue.total, queue.pending) == (2, 2)
        assert ids(await log.pop(group="g")) == ["c", "d"]
        assert await log.committed(pushed.partition_id, "g") == 1
        cursor = await log.cursor(pushed.partition_id, "g")
        assert cursor is not None
        assert cursor["total_consumed"] == 1
        # Nothing that is gone stands before a dead letter: the group gets past it.
        assert (await log.ack(pushed.partition_id, "c:d", group="g")).verdicts == "d"
        assert ids(await log.pop(group="g")) == ["d"]

    async def test_auto_ack_counts_what_it_delivered(self, log: Log) -> None:
        await log.configure(**MINUTE)
        pushed = await log.push("a", "b")
        await log.pop(group="g")
        await log.store.release("lease")
        await log.age(61)
        await log.push("c")
        await log.trim(pushed.partition_id)
        assert ids(await log.pop(group="g", auto_ack=True, lease_id="")) == ["c"]
        cursor = await log.cursor(pushed.partition_id, "g")
        assert cursor is not None
        assert (cursor["committed"], cursor["total_consumed"]) == (2, 1)

    async def test_a_batch_that_was_cut_can_be_acked(self, log: Log) -> None:
        """What somebody works on is gone, but not forgotten."""
        await log.configure(**MINUTE)
        part = (await log.push("a", "b")).partition_id
        await log.push("c")
        assert len(await log.pop()) == 3
        await log.age(61)
        await log.trim(part, 1)
        resources = ResourceStore(log.store)
        [queue] = await log.store.list_queues("q")
        [listed] = await log.store.list_partitions("q")
        [found] = await resources.find_partitions("q", 10, 0)
        [depth] = await resources.depth("q", None)
        assert {o.processing for o in (queue, listed, found, depth)} == {1}
        await log.trim(part)
        [queue] = await log.store.list_queues("q")
        [depth] = await resources.depth("q", None)
        assert (queue.pending, queue.processing, depth.processing) == (0, 0, 0)
        row = await log.ack(part, "a:c b:c c:c")
        assert (row.verdicts, row.lease_released) == ("ccc", True)


class TestSidecar:
    async def test_a_message_first_popped_long_after_the_window_is_ackable(
        self, log: Log, retention: Retention
    ) -> None:
        part = (await log.push("a", "b")).partition_id
        await log.age(2 * DAY)
        await retention.run()
        assert len(await log.pop()) == 2
        assert (await log.ack(part, "a:c b:c")).verdicts == "cc"

    async def test_hashes_go_after_the_window_and_after_their_segment(
        self, log: Log, retention: Retention
    ) -> None:
        await log.configure(**MINUTE, dedup_window_seconds=3600)
        part = (await log.push("a")).partition_id
        await log.age(61)
        await log.push("b")
        await retention.run()
        assert await stored(log, part) == [1]
        await log.age(3600 - 62)
        await retention.run()
        await check_row(log, part)
        assert (await log.push("a")).duplicate_of == [0], "still inside the window"
        await log.age(2)
        await retention.run()
        assert retention.statistics.sidecar_rows == 1
        await check_row(log, part)
        assert (await log.push("a")).base_offset == 2

    async def test_those_of_a_segment_that_is_there_stay(
        self, log: Log, retention: Retention
    ) -> None:
        await log.configure(**COMPLETED)
        part = (await log.push("a")).partition_id
        await log.push("b")
        await log.age(2 * DAY)
        await log.pop(batch=1, auto_ack=True, lease_id="")
        await retention.run()
        assert (retention.statistics.segments, retention.statistics.sidecar_rows) == (1, 1)
        await check_row(log, part)
        assert ids(await log.pop()) == ["b"]
        assert (await log.ack(part, "b:c")).verdicts == "c"

    async def test_they_outlive_leases_where_the_window_is_short(
        self, log: Log, retention: Retention
    ) -> None:
        await log.configure(**MINUTE, dedup_window_seconds=0)
        part = (await log.push("a")).partition_id
        await log.pop()
        await log.age(899)
        await retention.run()
        assert await stored(log, part) == []
        assert (await log.ack(part, "a:c")).verdicts == "c"
        await log.age(2)
        await retention.run()
        assert await log.execute("SELECT count(*) FROM queen.log_txns") == [(0,)]
        await check_row(log, part)

    async def test_a_cleared_queue_is_purged_too(self, log: Log, retention: Retention) -> None:
        part = (await log.push("a")).partition_id
        await log.push("b")
        await ResourceStore(log.store).clear("q", None, None, 10)
        await log.age(3601)
        await retention.run()
        assert retention.statistics.sidecar_rows == 2
        await check_row(log, part)


async def idle_partition(log: Log, queue: str = "q", *, window: int = 3600) -> UUID:
    """An empty partition, idle for a month; its hashes are gone unless `window` keeps them."""
    await log.configure(queue, **MINUTE, dedup_window_seconds=window)
    part = (await log.push("a", queue=queue)).partition_id
    await log.pop(queue=queue, group="g", lease_id="", auto_ack=True)
    await log.age(31 * DAY, queue=queue)
    await log.trim(part)
    await log.purge(part)
    return part


class TestIdlePartitions:
    async def there(self, log: Log) -> set[UUID]:
        return {part for (part,) in await log.execute("SELECT id FROM queen.log_partitions")}

    async def test_they_go_with_their_cursors(self, log: Log, retention: Retention) -> None:
        part = await idle_partition(log)
        await retention.run()
        assert await self.there(log) == set()
        assert retention.statistics.partitions == 1
        for table in ("log_consumers", "log_txns", "log_segments"):
            assert await log.execute(f"SELECT count(*) FROM queen.{table}") == [(0,)]
        # A later push makes it anew, and its group goes on.
        assert (await log.push("a")).partition_id != part
        assert ids(await log.pop(group="g")) == ["a"]

    async def test_what_is_in_use_stays(self, log: Log, retention: Retention) -> None:
        full = (await log.push("a", queue="full")).partition_id
        await log.age(31 * DAY, queue="full")
        young = await idle_partition(log, "young")
        await log.execute(
            "UPDATE queen.log_partitions SET last_write_at = now() - interval '29 days'"
            " WHERE id = $1",
            young,
        )
        born = await idle_partition(log, "born")
        await log.execute(
            "UPDATE queen.log_partitions SET last_write_at = '-infinity', created_at = now()"
            " WHERE id = $1",
            born,
        )
        # A window of a year: what was pushed in it is still a duplicate.
        remembered = await idle_partition(log, "remembered", window=365 * DAY)
        await retention.run()
        assert await self.there(log) == {full, young, born, remembered}
        assert (await log.push("a", queue="remembered")).duplicate_of == [0]

    async def test_a_locked_one_is_left_for_later(
        self, log: Log, retention: Retention, settings: ConnectionSettings
    ) -> None:
        locked = await idle_partition(log, "locked")
        await idle_partition(log, "free")
        async with await connect(settings) as holder, holder.transaction():
            await holder.execute(
                "SELECT FROM queen.log_partitions WHERE id = %s FOR NO KEY UPDATE", [locked]
            )
            await retention.run()
            assert await self.there(log) == {locked}
        await retention.run()
        assert await self.there(log) == set()


class TestCycle:
    async def test_steps_are_bounded_and_a_cycle_takes_them_all(
        self, log: Log, retention: Retention, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await log.configure(**MINUTE)
        part = (await log.push("0")).partition_id
        for n in range(1, 6):
            await log.push(str(n), f"{n}'")
        await log.age(3601)
        assert await log.trim(part, 2) == (2, 3)
        assert await stored(log, part) == [3, 4, 5, 6, 7, 8, 9, 10]
        await check_row(log, part)
        monkeypatch.setattr(job, "STEP_ROWS", 2)
        await retention.run()
        assert await stored(log, part) == []
        statistics = retention.statistics
        assert (statistics.segments, statistics.messages, statistics.sidecar_rows) == (4, 8, 6)
        await check_row(log, part)

    async def test_the_walk_passes_what_cannot_go_yet(
        self, log: Log, retention: Retention, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job, "CYCLE_PARTITIONS", 2)
        await log.configure(**COMPLETED)
        names = [f"p{n}" for n in range(5)]
        rows = await log.push_bundle(*(Part(ids=["a"], partition=name) for name in names))
        await log.age(61)
        # The walk is by age, then id: the last of it is the one that is done.
        last = max(row.partition_id for row in rows)
        [(name,)] = await log.execute("SELECT name FROM queen.log_partitions WHERE id = $1", last)
        await log.pop(partition=name, auto_ack=True, lease_id="")
        for cycle in (1, 2):
            await retention.run()
            assert (retention.statistics.cycles, retention.statistics.segments) == (cycle, 0)
        await retention.run()
        assert retention.statistics.segments == 1
        # And it begins again.
        first = min(row.partition_id for row in rows)
        [(name,)] = await log.execute("SELECT name FROM queen.log_partitions WHERE id = $1", first)
        await log.pop(partition=name, auto_ack=True, lease_id="")
        await retention.run()
        assert retention.statistics.segments == 2

    async def test_a_broken_queue_costs_nothing_of_the_others(
        self, log: Log, retention: Retention
    ) -> None:
        """One that is deleted between the list and the look."""
        for queue in ("one", "two"):
            await log.configure(queue, **MINUTE)
            await log.push("a", queue=queue)
            await log.age(61, queue=queue)
        await log.store.delete_queue("one")
        await retention.run()
        assert await log.execute("SELECT count(*) FROM queen.log_segments") == [(0,)]
        assert await log.trim((await log.push("b")).partition_id) == (0, 0)


class TestHistory:
    async def test_samples_are_taken_and_the_old_go(self, log: Log, pool: Pool) -> None:
        traces = TraceStore(pool, log.store.tenant)
        history = History(pool, ResourceStore(log.store), traces)
        part = (await log.push("a")).partition_id
        await log.pop(group="g")
        await history.sample()
        assert await log.execute("SELECT lag FROM queen.queue_lag_metrics") == [(1,)]
        await traces.add(part, "a", "g", ["flow"], "info", "{}")
        await history.purge()
        assert await log.execute("SELECT count(*) FROM queen.queue_lag_metrics") == [(1,)]
        assert await log.execute("SELECT count(*) FROM queen.message_trace_names") == [(1,)]
        older = KEEP.total_seconds() + 60
        await log.execute(
            "UPDATE queen.queue_lag_metrics SET bucket_at = bucket_at - make_interval(secs => $1)",
            older,
        )
        await log.execute(
            "UPDATE queen.message_traces SET created_at = created_at - make_interval(secs => $1)",
            older,
        )
        await history.purge()
        for table in ("queue_lag_metrics", "message_traces", "message_trace_names"):
            assert await log.execute(f"SELECT count(*) FROM queen.{table}") == [(0,)]


@pytest.fixture
async def arena(settings: ConnectionSettings) -> AsyncIterator[Arena]:
    async with AsyncExitStack() as stack:
        yield await open_arena(stack, settings, ("one", "two", "three"))


def trim(part: UUID) -> Step:
    return lambda log: log.trim(part)


class TestRaces:
    async def expired(self, log: Log, queue: str) -> UUID:
        """A segment with a and b that is too old, and a group that has read nothing yet."""
        await log.configure(queue, **MINUTE)
        part = (await log.push("a", "b", queue=queue)).partition_id
        await log.pop(queue=queue, group="g", lease_id=queue)
        await log.store.release(queue)
        await log.age(61, queue=queue)
        return part

    async def test_against_pushes(self, log: Log, arena: Arena) -> None:
        async def prepare(queue: str) -> UUID:
            return await self.expired(log, queue)

        async def check(
            queue: str, part: UUID, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert got["two"].results == [(1, 2)]
            assert await stored(log, part) == [2, 3]
            await check_row(log, part)
            assert ids(await log.pop(queue=queue, group="g")) == ["c", "d"]

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {"one": [push("c", queue=queue), push("d", queue=queue)], "two": [trim(part)]}

        assert await race(arena, sessions, check, prepare) == 10

    async def test_against_pop_and_ack(self, log: Log, arena: Arena) -> None:
        async def prepare(queue: str) -> UUID:
            part = await self.expired(log, queue)
            await log.push("c", queue=queue)
            return part

        async def check(
            queue: str, part: UUID, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            popped, acked = got["one"].results
            assert got["two"].results == [(1, 2)]
            await check_row(log, part)
            if ids(popped) == ["a", "b", "c"]:
                assert acked.verdicts == "ccc"
            else:
                # Its list of partitions may be older than the trim; then it comes again.
                assert ids(popped) in (["c"], [])
                assert acked.verdicts.endswith("c") == bool(popped)
            again = ids(await log.pop(queue=queue, group="g"))
            assert again == ([] if popped else ["c"])

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [
                    pop(queue=queue, group="g", lease_id=queue),
                    ack(part, "a:c b:c c:c", lease=queue, group="g"),
                ],
                "two": [trim(part)],
            }

        assert await race(arena, sessions, check, prepare) == 10

    async def test_against_seek(self, log: Log, arena: Arena) -> None:
        async def prepare(queue: str) -> UUID:
            part = await self.expired(log, queue)
            await log.push("c", queue=queue)
            await log.pop(queue=queue, group="g", lease_id="", auto_ack=True)
            return part

        async def check(
            queue: str, part: UUID, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert got["one"].results == [1]
            assert got["two"].results == [(1, 2)]
            await check_row(log, part)
            [group] = await GroupStore(log.store).groups_of(queue)
            assert group.total_lag == 1
            assert ids(await log.pop(queue=queue, group="g")) == ["c"]

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            def seek(log: Log) -> Any:
                return GroupStore(log.store).seek("g", queue, None, to_end=False, since=None)

            return {"one": [seek], "two": [trim(part)]}

        assert await race(arena, sessions, check, prepare) == 6

    async def test_two_holders(self, log: Log, arena: Arena) -> None:
        """A lost lock costs nothing: each segment and each hash goes once."""

        async def prepare(queue: str) -> UUID:
            part = await self.expired(log, queue)
            await log.push("c", queue=queue)
            await log.age(3601, queue=queue)
            await log.push("d", queue=queue)
            return part

        async def check(
            queue: str, part: UUID, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            trims = [got[name].results for name in ("one", "two")]
            assert sorted(trims) == [[(0, 0), (0, 0)], [(1, 2), (1, 1)]] or sorted(trims) == [
                [(0, 0), (1, 1)],
                [(1, 2), (0, 0)],
            ]
            assert await stored(log, part) == [3]
            await check_row(log, part)

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            def step(log: Log) -> Any:
                return log.trim(part, 1)

            return {name: [step, step] for name in ("one", "two")}

        assert await race(arena, sessions, check, prepare) == 20

    async def test_the_end_of_an_idle_partition_against_push_and_seek(
        self, log: Log, arena: Arena
    ) -> None:
        async def prepare(queue: str) -> UUID:
            return await idle_partition(log, queue)

        async def check(
            queue: str, part: UUID, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert got["two"].results in ([None], [part])
            assert ids(await log.pop(queue=queue, group="g")) == ["c"]

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            def seek(log: Log) -> Any:
                return GroupStore(log.store).seek("g", queue, None, to_end=False, since=None)

            return {
                "one": [push("c", queue=queue)],
                "two": [lambda log: log.drop_idle(IDLE_DAYS)],
                "three": [seek],
            }

        assert await race(arena, sessions, check, prepare) == 90
