"""Consumer groups in SQL: lag, seek, delete, and their races with pops, acks and pushes."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from queen_trio.store.groups import GroupStore
from queen_trio.store.resources import ResourceStore
from tests.store.calls import Part, ids
from tests.store.races import open_arena
from tests.store.test_races import ack, filled, pop, push, race

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from uuid import UUID

    from queen_trio.store.groups import GroupRow
    from queen_trio.store.settings import ConnectionSettings
    from tests.store.calls import Log
    from tests.store.races import Arena, Outcome, Step

OLD = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
async def arena(settings: ConnectionSettings) -> AsyncIterator[Arena]:
    async with AsyncExitStack() as stack:
        yield await open_arena(stack, settings, ("one", "two", "three"))


async def group_of(log: Log, group: str = "g") -> GroupRow:
    [row] = await GroupStore(log.store).list_groups(group)
    return row


async def lag(log: Log, group: str = "g") -> int:
    return (await group_of(log, group)).total_lag


async def seek(log: Log, *, queue: str = "q", group: str = "g", to_end: bool) -> int | None:
    return await GroupStore(log.store).seek(group, queue, None, to_end=to_end, since=None)


async def forget(log: Log, *, queue: str | None, metadata: bool = True) -> Any:
    return await GroupStore(log.store).delete("g", queue, metadata=metadata)


async def subscriptions(log: Log, queue: str) -> int:
    [(count,)] = await log.execute(
        "SELECT count(*) FROM queen.consumer_groups_metadata WHERE queue_name = $1", queue
    )
    return int(count)


class TestLag:
    async def test_equals_what_a_pop_would_deliver(self, log: Log) -> None:
        """Whatever the subscription point, lag says how many messages are still to come."""
        await log.push("a", "b")
        await log.age(60)
        await log.push("c")
        await log.age(60)
        await log.push("d", "e", partition="other")
        [(points,)] = await log.execute(
            "SELECT array_agg(DISTINCT s.created_at ORDER BY s.created_at)"
            " FROM queen.log_segments s"
        )
        assert len(points) == 3
        for number, (point, left) in enumerate(zip([OLD, *points], (5, 5, 3, 2), strict=True)):
            group = f"g{number}"
            await log.pop(queue="none", group=group, since=point)
            # The same subscription for q, without a pop that would seed a cursor.
            await log.execute(
                "UPDATE queen.consumer_groups_metadata SET queue_name = 'q'"
                " WHERE consumer_group = $1",
                group,
            )
            row = await group_of(log, group)
            assert row.total_lag == left
            taken = await log.pop(group=group, partitions=None, auto_ack=True, lease_id="")
            assert len(taken) == left
            assert row.oldest_pending_at == min(message.created_at for message in taken)
            assert await lag(log, group) == 0

    async def test_behind_retention(self, log: Log) -> None:
        part = (await log.push("a", "b")).partition_id
        await log.push("c")
        await log.pop(group="g", batch=1, auto_ack=True, lease_id="")
        assert await lag(log) == 2
        await log.retain_from(part, 2)
        assert await lag(log) == 1
        await log.pop(group="late", queue="q", batch=1)
        assert await lag(log, "late") == 1
        await log.retain_from(part, 3)
        row = await group_of(log)
        assert (row.total_lag, row.partitions_with_lag, row.oldest_pending_at) == (0, 0, None)

    async def test_a_group_with_cursors_but_no_subscription(self, log: Log) -> None:
        await log.push("a")
        await log.pop(group="g", auto_ack=True, lease_id="")
        await log.execute("DELETE FROM queen.consumer_groups_metadata")
        await log.push("b", partition="new")
        row = await group_of(log)
        # Where it would start in the new partition is for its next pop to say.
        assert (row.partitions, row.total_lag, row.mode) == (1, 0, None)

    async def test_the_earliest_of_two_subscriptions_counts(self, log: Log) -> None:
        await log.configure("n.t")
        await log.push("a", queue="n.t")
        await log.pop(queue="n.t", group="g", mode="new")
        assert await lag(log) == 0
        await log.pop(queue=None, namespace="n", group="g", mode="all", batch=1, partitions=0)
        row = await group_of(log)
        assert (row.queue, row.total_lag, row.mode) == ("n.t", 1, "all")


class TestSeek:
    async def test_seeds_partitions_without_a_cursor(self, log: Log) -> None:
        await log.pop(group="g")
        await log.push_bundle(Part(ids=["a"], partition="x"), Part(ids=["b"], partition="y"))
        assert await seek(log, to_end=True) == 2
        assert await log.pop(group="g", partitions=None) == []
        # A partition born later is delivered from its first message on.
        await log.push("c", partition="z")
        assert ids(await log.pop(group="g", partitions=None)) == ["c"]

    async def test_stops_at_retention(self, log: Log) -> None:
        part = (await log.push("a")).partition_id
        await log.push("b")
        await log.pop(group="g", auto_ack=True, lease_id="")
        await log.retain_from(part, 1)
        await seek(log, to_end=False)
        assert await log.committed(part, "g") == 0
        assert ids(await log.pop(group="g")) == ["b"]

    async def test_resets_failures(self, log: Log) -> None:
        part = (await log.push("a")).partition_id
        await log.pop(group="g")
        await log.ack(part, "a:f", group="g")
        await seek(log, to_end=False)
        cursor = await log.cursor(part, "g")
        assert cursor is not None
        assert (cursor["attempt_count"], cursor["attempt_offset"]) == (0, None)
        assert (cursor["batch_retry_count"], cursor["batch_end"]) == (0, None)


class TestMoves:
    """Whatever makes more claimable is recorded, for brokers that hear no hint (spec 4.3)."""

    async def test_are_recorded(self, log: Log) -> None:
        await log.push("a")
        await log.age(60)
        await log.pop(group="g", mode="new")
        moves: list[Callable[[], Awaitable[Any]]] = [
            partial(GroupStore(log.store).resubscribe, "g", OLD),
            partial(seek, log, to_end=False),
            partial(forget, log, queue="q"),
        ]
        for move in moves:
            assert await log.store.changes(1.0, 10) == []
            await move()
            assert await log.store.changes(1.0, 10) == [("q", None)]
            await log.execute("DELETE FROM queen.log_repairs")


class TestClear:
    async def test_goes_on_where_it_stopped(self, log: Log) -> None:
        store = ResourceStore(log.store)
        await log.push_bundle(*(Part(ids=[p], partition=p) for p in "abcde"))
        steps = []
        after: UUID | None = None
        while True:
            after, cleared = await store.clear("q", None, after, 2)
            if after is None:
                break
            steps.append(cleared)
        assert steps == [2, 2, 1]
        assert await log.pop(partitions=None) == []
        assert await log.execute("SELECT count(*) FROM queen.log_segments") == [(0,)]
        assert await log.execute("SELECT count(*) FROM queen.log_txns") == [(5,)]


class TestHistory:
    async def test_purge_deletes_old_samples_in_steps(self, log: Log) -> None:
        store = ResourceStore(log.store)
        await log.push("a")
        await log.pop(group="g")
        assert await store.record_lag() == 1
        await store.record_traffic("me", '{"pushed": 1}', ["q"], [1], [0])
        await log.execute(
            "INSERT INTO queen.stats (bucket_at, queue_name)"
            " SELECT $1, 'old' || g FROM generate_series(1, 3) g",
            OLD,
        )
        before = datetime(2021, 1, 1, tzinfo=UTC)
        assert await store.purge_stats(before, 2) is True
        assert await store.purge_stats(before, 2) is False
        for table in ("worker_metrics", "stats", "queue_lag_metrics"):
            assert await log.execute(f"SELECT count(*) FROM queen.{table}") == [(1,)]


class TestRaces:
    async def leased(self, log: Log, queue: str) -> UUID:
        part = await filled(log, queue)
        await log.pop(queue=queue, group="g", lease_id=queue)
        return part

    async def subscribed(self, log: Log, queue: str) -> UUID:
        """A group that has subscribed after a and b, has no cursor, and has c to get."""
        part = await filled(log, queue)
        await log.pop(queue=queue, group="g", mode="new")
        await log.push("c", queue=queue)
        return part

    @pytest.mark.parametrize("to_end", [True, False])
    async def test_ack_against_seek(self, log: Log, arena: Arena, to_end: bool) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            verdicts = got["one"].results[0].verdicts
            # The seek is the last word, or ended the lease before the ack came.
            assert verdicts in (("cc", "nn") if to_end else ("cc", "ll"))
            cursor = await log.cursor(part, "g")
            assert cursor is not None
            assert cursor["committed"] == (1 if to_end else -1)
            assert (cursor["batch_end"], cursor["worker_id"]) == (None, None)

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [ack(part, "a:c b:c", lease=queue, group="g")],
                "two": [partial(seek, queue=queue, to_end=to_end)],
            }

        assert await race(arena, sessions, check, partial(self.leased, log)) == 6

    @pytest.mark.parametrize("prepare", ["filled", "subscribed"])
    async def test_seek_against_pop_and_push(self, log: Log, arena: Arena, prepare: str) -> None:
        async def prepared(queue: str) -> UUID:
            if prepare == "subscribed":
                return await self.subscribed(log, queue)
            part = await filled(log, queue)
            await log.push("c", queue=queue)
            await log.pop(queue=queue, group="g", batch=1, auto_ack=True, lease_id="")
            return part

        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert got["one"].results == [1]
            committed = await log.committed(part, "g")
            assert committed in (2, 3)
            rest = ids(await log.pop(queue=queue, group="g", lease_id="rest"))
            popped = ids(got["two"].results[0])
            # What the seek had not seen is delivered, to the pop that raced or to the next.
            assert rest + (popped if popped == ["d"] else []) == ["d"][: 3 - committed]

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [partial(seek, queue=queue, to_end=True)],
                "two": [pop(queue=queue, group="g", lease_id=queue)],
                "three": [push("d", queue=queue)],
            }

        assert await race(arena, sessions, check, prepared) == 90

    async def test_delete_against_ack_and_seek(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert got["one"].results[0].verdicts in ("cc", "ll", "xx")
            assert got["three"].results[0] in (1, None)
            assert await log.cursor(part, "g") is None
            assert await subscriptions(log, queue) == 0

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [ack(part, "a:c b:c", lease=queue, group="g")],
                "two": [partial(forget, queue=queue)],
                "three": [partial(seek, queue=queue, to_end=False)],
            }

        assert await race(arena, sessions, check, partial(self.leased, log)) == 90

    async def test_delete_against_a_pop_that_seeds(self, log: Log, arena: Arena) -> None:
        """No cursor survives its subscription: it would hide a and b from the group's next life."""

        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert [ids(result) for result in got["one"].results] in ([["c"], []], [[], []])
            if await subscriptions(log, queue) == 0:
                assert await log.cursor(part, "g") is None
                assert len(await log.pop(queue=queue, group="g", mode="all")) == 3

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            again = pop(queue=queue, group="g", mode="new", lease_id=queue)
            return {"one": [again, again], "two": [partial(forget, queue=None)]}

        assert await race(arena, sessions, check, partial(self.subscribed, log)) == 10

    async def test_delete_of_the_queue_against_seek_and_clear(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert got["one"].results == [True]
            assert await log.cursor(part, "g") is None

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [lambda log: log.store.delete_queue(queue)],
                "two": [partial(seek, queue=queue, to_end=False)],
                "three": [lambda log: ResourceStore(log.store).clear(queue, None, None, 9)],
            }

        assert await race(arena, sessions, check, partial(self.leased, log)) == 90
