"""Races: every interleaving of what two or three brokers may do at the same moment (spec 1)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.store.calls import Part, Target, ids
from tests.store.races import open_arena, orders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from uuid import UUID

    from queen_trio.store.settings import ConnectionSettings
    from tests.store.calls import Log
    from tests.store.races import Arena, Outcome, Step

NAMES = ("one", "two", "three")


@pytest.fixture
async def arena(settings: ConnectionSettings) -> AsyncIterator[Arena]:
    async with AsyncExitStack() as stack:
        yield await open_arena(stack, settings, NAMES)


async def race(
    arena: Arena,
    sessions: Callable[[str, Any], Mapping[str, Sequence[Step]]],
    check: Callable[[str, Any, dict[str, Outcome], tuple[str, ...]], Awaitable[None]],
    prepare: Callable[[str], Awaitable[Any]] | None = None,
) -> int:
    """Play all orders, each on a queue of its own; no step may fail. Returns how many there are.

    `prepare` fills the queue; what it returns goes on to `sessions` and `check`.
    """
    number = 0
    for number, order in enumerate(orders(sessions("", None)), start=1):
        queue = f"q{number}"
        prepared = await prepare(queue) if prepare else None
        outcomes = await arena.run_order(sessions(queue, prepared), order)
        for name, outcome in outcomes.items():
            assert not outcome.errors, (order, name, outcome.errors)
        try:
            await check(queue, prepared, outcomes, order)
        except AssertionError as error:
            error.add_note(f"in the order {order}: {outcomes}")
            raise
    return number


def push(*names: str, **part: Any) -> Step:
    return lambda log: log.push(*names, **part)


def pop(**arguments: Any) -> Step:
    return lambda log: log.pop(**arguments)


def ack(partition: UUID, words: str, **target: Any) -> Step:
    return lambda log: log.ack(partition, words, **target)


async def filled(log: Log, queue: str) -> UUID:
    """Put a and b into the queue; returns the partition's id."""
    return (await log.push("a", "b", queue=queue)).partition_id


async def delete(log: Log, *, queue: str) -> bool:
    return await log.store.delete_queue(queue)


class TestPop:
    @pytest.mark.parametrize("candidates", [None, ["p"], ["p", "nowhere"]], ids=str)
    async def test_two_pops_of_one_partition(
        self, log: Log, arena: Arena, candidates: list[str] | None
    ) -> None:
        async def prepare(queue: str) -> UUID:
            part = await filled(log, queue)
            await log.pop(queue=queue)
            await log.store.release("lease")
            return part

        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            claims = [ids(got[name].results[0]) for name in ("one", "two")]
            assert sorted(claims) == [[], ["a", "b"]]
            cursor = await log.cursor(part)
            assert cursor is not None
            assert cursor["worker_id"] == ("one" if claims[0] else "two")

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                name: [pop(queue=queue, lease_id=name, candidates=candidates)]
                for name in ("one", "two")
            }

        assert await race(arena, sessions, check, prepare) == 6

    async def test_first_contact_of_one_group_three_times(self, log: Log, arena: Arena) -> None:
        async def prepare(queue: str) -> None:
            await log.push_bundle(*(Part(ids=[p], queue=queue, partition=p) for p in "xyz"))

        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            taken = [name for o in got.values() for name in ids(o.results[0])]
            assert len(taken) == len(set(taken))
            taken += ids(await log.pop(queue=queue, group="g", partitions=None))
            assert sorted(taken) == ["x", "y", "z"]
            points = await log.execute(
                "SELECT count(*) FROM queen.consumer_groups_metadata WHERE queue_name = $1", queue
            )
            assert points == [(1,)]

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                name: [pop(queue=queue, group="g", lease_id=name, partitions=2)] for name in NAMES
            }

        assert await race(arena, sessions, check, prepare) == 90

    async def test_first_contact_new_against_a_push(self, log: Log, arena: Arena) -> None:
        """What was committed after the first pop arrived is delivered, whoever was faster."""

        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            taken = ids(got["one"].results[0] + got["one"].results[1])
            taken += ids(await log.pop(queue=queue, group="g", mode="new"))
            if order.index("one") < order.index("two"):
                assert taken == ["c"]
            else:
                assert taken in (["c"], [])

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            again = pop(queue=queue, group="g", mode="new", auto_ack=True)
            return {"one": [again, again], "two": [push("c", queue=queue)]}

        assert await race(arena, sessions, check, partial(filled, log)) == 10

    async def test_pop_against_push(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            taken = ids(got["one"].results[0]) + ids(await log.pop(queue=queue))
            assert taken == ["a", "b", "c"]

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [pop(queue=queue, auto_ack=True, lease_id="")],
                "two": [push("c", queue=queue)],
            }

        assert await race(arena, sessions, check, partial(filled, log)) == 6

    async def test_release_against_ack_and_pop(self, log: Log, arena: Arena) -> None:
        async def prepare(queue: str) -> UUID:
            part = await filled(log, queue)
            await log.pop(queue=queue, lease_id=queue)
            return part

        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            released, acked = got["one"].results[0], got["two"].results[0].verdicts
            popped = ids(got["three"].results[0])
            assert (released, acked) in {(1, "l"), (1, "c"), (0, "c")}
            committed = await log.committed(part)
            assert committed == (0 if acked == "c" else -1)
            if popped:
                assert popped in (["a", "b"], ["b"])
                assert released == 1

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [lambda log: log.store.release(queue)],
                "two": [ack(part, "a:c", lease=queue)],
                "three": [pop(queue=queue, lease_id="next")],
            }

        assert await race(arena, sessions, check, prepare) == 90


class TestAck:
    async def leased(self, log: Log, queue: str) -> UUID:
        part = await filled(log, queue)
        await log.pop(queue=queue, lease_id=queue)
        return part

    async def test_ack_against_expiry_and_another_pop(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            acked, popped = got["one"].results[0].verdicts, ids(got["two"].results[1])
            # Either the ack came in time, and what it committed isn't delivered again, or it was
            # refused, and all of it is.
            assert (acked, popped) in [("cc", []), ("ll", ["a", "b"])]
            assert await log.committed(part) == (1 if acked == "cc" else -1)

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [ack(part, "a:c b:c", lease=queue)],
                "two": [
                    lambda log: log.expire(queue),
                    pop(queue=queue, lease_id=f"{queue}-next"),
                ],
            }

        async def prepare(queue: str) -> UUID:
            return await self.leased(log, queue)

        assert await race(arena, sessions, check, prepare) == 10

    async def test_two_acks_of_one_lease(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            done, failed = (got[name].results[0].verdicts for name in ("one", "two"))
            assert (done, failed) in [("c", "f"), ("l", "f")]
            assert await log.committed(part) == (0 if done == "c" else -1)

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [ack(part, "a:c", lease=queue)],
                "two": [ack(part, "b:f", lease=queue)],
            }

        async def prepare(queue: str) -> UUID:
            return await self.leased(log, queue)

        assert await race(arena, sessions, check, prepare) == 6

    @pytest.mark.parametrize("whole", [0, 1])
    async def test_crossing_acks_do_not_deadlock(self, log: Log, arena: Arena, whole: int) -> None:
        async def prepare(queue: str) -> list[UUID]:
            rows = await log.push_bundle(*(Part(ids=["a"], queue=queue, partition=p) for p in "xy"))
            await log.pop(queue=queue, lease_id=queue, partitions=None)
            return [row.partition_id for row in rows]

        async def check(
            queue: str, parts: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            rows = [row for name in ("one", "two") for row in got[name].results[0]]
            expected = [None, None, "", ""] if whole else ["c", "c", "n", "n"]
            assert sorted((row.verdicts for row in rows), key=str) == sorted(expected, key=str)
            assert sum(row.lease_released for row in rows) == 2

        def sessions(queue: str, parts: Any) -> dict[str, list[Step]]:
            def both(parts: Sequence[UUID]) -> Step:
                return lambda log: log.ack_whole(
                    *(Target(part, [("a", "c")], lease=queue, whole=whole) for part in parts)
                )

            parts = parts or []
            return {"one": [both(parts)], "two": [both(parts[::-1])]}

        assert await race(arena, sessions, check, prepare) == 6


class TestPush:
    async def test_the_same_transaction_id_twice(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            rows = [got[name].results[0] for name in ("one", "two")]
            assert sorted(r.base_offset is None for r in rows) == [False, True]
            [loser] = [r for r in rows if r.base_offset is None]
            assert loser.duplicate_of == [0]
            assert ids(await log.pop(queue=queue)) == ["same"]

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {name: [push("same", queue=queue)] for name in ("one", "two")}

        assert await race(arena, sessions, check) == 6

    @pytest.mark.parametrize("exists", [True, False])
    async def test_crossing_bundles_do_not_deadlock(
        self, log: Log, arena: Arena, exists: bool
    ) -> None:
        wanted = {"one": "xyz", "two": "zyx", "three": "yx"}

        async def prepare(queue: str) -> None:
            if exists:
                await log.push_bundle(
                    *(Part(ids=["first"], queue=queue, partition=p) for p in "zxy")
                )

        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            for p in "xyz":
                names = [name for name, parts in wanted.items() if p in parts]
                taken = await log.pop(queue=queue, partition=p)
                assert [m.offset for m in taken] == list(range(len(names) + exists))
                assert sorted(ids(taken)[exists:]) == sorted(names)
                assert sorted(m.created_at for m in taken) == [m.created_at for m in taken]

        def bundle(name: str, queue: str) -> Step:
            return lambda log: log.push_bundle(
                *(Part(ids=[name], queue=queue, partition=p) for p in wanted[name])
            )

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {name: [bundle(name, queue)] for name in wanted}

        assert await race(arena, sessions, check, prepare) == 90

    async def test_crossing_new_queues_do_not_deadlock(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            for side in ("left", "right"):
                assert len(await log.pop(queue=f"{queue}{side}")) == 2

        def bundle(name: str, queue: str, sides: Sequence[str]) -> Step:
            return lambda log: log.push_bundle(
                *(Part(ids=[name], queue=f"{queue}{side}") for side in sides)
            )

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [bundle("one", queue, ["left", "right"])],
                "two": [bundle("two", queue, ["right", "left"])],
            }

        assert await race(arena, sessions, check) == 6


class TestConfigure:
    async def test_against_pop(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert ids(got["one"].results[0]) == ["a", "b"]
            [(lasts,)] = await log.execute(
                "SELECT extract(epoch FROM lease_expires_at - lease_acquired_at)::integer"
                " FROM queen.log_consumers WHERE partition_id = $1",
                part,
            )
            committed_first = order[: order.index("one")].count("two") == 2
            assert lasts == (7 if committed_first else 60)

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [pop(queue=queue, lease_id=queue)],
                "two": [lambda log: log.configure(queue, lease_time=7)],
            }

        assert await race(arena, sessions, check, partial(filled, log)) == 6

    async def test_against_configure_and_push(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            [(lease, limit)] = await log.execute(
                "SELECT lease_time, retry_limit FROM queen.queues WHERE name = $1", queue
            )
            assert lease == 7
            assert limit == 9

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [lambda log: log.configure(queue, lease_time=7)],
                "two": [lambda log: log.configure(queue, retry_limit=9, lease_time=7)],
                "three": [push("a", queue=queue)],
            }

        assert await race(arena, sessions, check) == 90

    async def test_against_delete(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert got["one"].results[0]["lease_time"] == 7
            left = await log.store.list_queues(queue)
            assert len(left) <= 1

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [lambda log: log.configure(queue, lease_time=7)],
                "two": [partial(delete, queue=queue)],
            }

        assert await race(arena, sessions, check, partial(filled, log)) == 6


class TestDelete:
    """A queue's deletion against whatever uses it: no error, no deadlock, nothing left over."""

    async def no_orphans(self, log: Log) -> None:
        for table in ("log_segments", "log_txns", "log_consumers"):
            orphans = await log.execute(
                f"SELECT count(*) FROM queen.{table} t WHERE NOT EXISTS"
                " (SELECT FROM queen.log_partitions p WHERE p.id = t.partition_id)"
            )
            assert orphans == [(0,)], table

    async def test_against_pushes(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            left = sorted(ids(await log.pop(queue=queue, partitions=None)))
            for row in [*got["two"].results, *got["three"].results]:
                assert row.base_offset is not None
            assert set(left) <= {"a", "b", "c", "d"}
            assert ("a" in left) == ("b" in left) is False
            await self.no_orphans(log)

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [partial(delete, queue=queue)],
                "two": [push("c", queue=queue)],
                "three": [push("d", queue=queue, partition="born")],
            }

        assert await race(arena, sessions, check, partial(filled, log)) == 90

    async def test_of_two_queues_against_one_bundle(self, log: Log, arena: Arena) -> None:
        async def prepare(queue: str) -> None:
            for side in ("left", "right"):
                await filled(log, f"{queue}{side}")

        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert all(row.base_offset is not None for row in got["three"].results[0])
            await self.no_orphans(log)

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [partial(delete, queue=f"{queue}left")],
                "two": [partial(delete, queue=f"{queue}right")],
                "three": [
                    lambda log: log.push_bundle(
                        *(Part(ids=["c"], queue=f"{queue}{s}") for s in ("left", "right"))
                    )
                ],
            }

        assert await race(arena, sessions, check, prepare) == 90

    async def test_against_pops(self, log: Log, arena: Arena) -> None:
        async def prepare(queue: str) -> None:
            await log.push_bundle(*(Part(ids=[p], queue=queue, partition=p) for p in "xyz"))
            # One cursor seeded and never claimed: it is locked before the others are seeded.
            await log.pop(queue=queue, group="g", partition="y", lease_id="")
            await log.execute(
                "UPDATE queen.log_consumers SET batch_end = NULL, lease_acquired_at = NULL,"
                " worker_id = NULL"
            )

        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert got["one"].results == [True]
            assert await log.store.list_queues(queue) == []
            await self.no_orphans(log)

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [partial(delete, queue=queue)],
                "two": [pop(queue=queue, group="g", lease_id="two", partitions=None)],
                "three": [pop(queue=queue, group="h", lease_id="three", partitions=None)],
            }

        assert await race(arena, sessions, check, prepare) == 90

    async def test_against_ack(self, log: Log, arena: Arena) -> None:
        async def prepare(queue: str) -> UUID:
            part = await filled(log, queue)
            await log.pop(queue=queue, lease_id=queue)
            return part

        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert got["one"].results == [True]
            assert got["two"].results[0].verdicts in ("cd", "xx")
            await self.no_orphans(log)
            dead = await log.execute(
                "SELECT count(*) FROM queen.log_dlq WHERE partition_id = $1", part
            )
            assert dead == [(0,)]

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {
                "one": [partial(delete, queue=queue)],
                "two": [ack(part, "a:c b:d", lease=queue)],
            }

        assert await race(arena, sessions, check, prepare) == 6

    async def test_twice(self, log: Log, arena: Arena) -> None:
        async def check(
            queue: str, part: Any, got: dict[str, Outcome], order: tuple[str, ...]
        ) -> None:
            assert sorted(got[name].results[0] for name in ("one", "two")) == [False, True]

        def sessions(queue: str, part: Any) -> dict[str, list[Step]]:
            return {name: [partial(delete, queue=queue)] for name in ("one", "two")}

        assert await race(arena, sessions, check, partial(filled, log)) == 6
