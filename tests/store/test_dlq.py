"""Dead letters: what moves them back, deletes and files them, and those against each other."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest

from queen_trio.broker.dlq import DeadLetterService
from queen_trio.broker.encryption import Encryption
from queen_trio.errors import DatabaseUnavailable
from queen_trio.model.ids import Uuid7
from queen_trio.model.inspection import DeadLetterFilter, Page, ReplayVerdict
from queen_trio.model.message import hash_of
from queen_trio.store import segments
from queen_trio.store.dlq import DeadLetterRow, DeadLetterStore, ReplayRow
from queen_trio.store.messages import MessageStore
from tests.store.calls import GROUP, MIB, ids, letter_of, record
from tests.store.races import open_arena, orders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from queen_trio.store.settings import ConnectionSettings
    from tests.store.calls import Log
    from tests.store.races import Arena, Outcome, Step

ALL = DeadLetterFilter()
FIRST = Page(limit=100, offset=0)


def letters_of(log: Log) -> DeadLetterStore:
    return DeadLetterStore(log.store.pool, log.store.tenant)


def messages_of(log: Log) -> MessageStore:
    return MessageStore(log.store.pool, log.store.tenant)


async def buried(log: Log, *names: str, group: str = GROUP, **where: Any) -> list[DeadLetterRow]:
    """Push messages and dead-letter each; returns their rows, oldest first."""
    row = await log.push(*names, **where)
    pop = {key: where[key] for key in ("queue", "partition") if key in where}
    await log.pop(group=group, batch=len(names), lease_id="bury", **pop)
    for name in names:
        await log.ack(row.partition_id, f"{name}:d", group=group, lease="")
        await log.pop(group=group, batch=len(names), lease_id="bury", **pop)
    rows = await letters_of(log).read_page(ALL, FIRST, MIB)
    mine = [row for row in rows if row.transaction_id in names]
    assert len(mine) == len(names)
    return mine[::-1]


async def replay(log: Log, letter: DeadLetterRow) -> ReplayRow:
    name = f"dlq:{letter.id}"
    blob, size = segments.encode([record(name, letter.payload)])
    return await letters_of(log).replay(
        letter.id, letter.queue_name, letter.partition_name, hash_of(name), size, blob
    )


async def left(log: Log) -> int:
    return await letters_of(log).count(ALL)


class TestReplay:
    async def test_it_moves(self, log: Log) -> None:
        first, second = await buried(log, "a", "b")
        row = await replay(log, first)
        assert (row.verdict, row.partition_id, row.message_offset) == (
            "moved", first.partition_id, 2,
        )  # fmt: skip
        assert [letter.id for letter in await letters_of(log).read_page(ALL, FIRST, MIB)] == [
            second.id
        ]
        assert ids(await log.pop(group=GROUP)) == [f"dlq:{first.id}"]

    async def test_again_it_is_a_duplicate(self, log: Log) -> None:
        [letter] = await buried(log, "a")
        await replay(log, letter)
        row = await replay(log, letter)
        assert (row.verdict, row.message_offset) == ("duplicate", 1)
        assert len(await log.pop()) == 1

    async def test_again_without_dedup(self, log: Log) -> None:
        await log.configure(dedup_window_seconds=0)
        [letter] = await buried(log, "a")
        await replay(log, letter)
        assert (await replay(log, letter)).verdict == "duplicate"
        assert len(await log.pop()) == 1

    async def test_an_id_that_is_there_takes_the_dead_letter_away(self, log: Log) -> None:
        [letter] = await buried(log, "a")
        await log.push(f"dlq:{letter.id}")
        row = await replay(log, letter)
        assert (row.verdict, row.message_offset) == ("duplicate", 1)
        assert await left(log) == 0

    async def test_of_one_that_never_was(self, log: Log) -> None:
        [letter] = await buried(log, "a")
        row = await replay(log, letter._replace(id=uuid4()))
        assert row == ReplayRow("missing", letter.partition_id, None)
        assert await left(log) == 1

    async def test_other_groups_keep_theirs(self, log: Log) -> None:
        [mine] = await buried(log, "a")
        await log.pop(group="g", lease_id="g")
        await log.ack(mine.partition_id, "a:d", group="g", lease="g")
        await replay(log, mine)
        [theirs] = await letters_of(log).read_page(ALL, FIRST, MIB)
        assert theirs.consumer_group == "g"

    async def test_into_a_partition_that_is_gone(self, log: Log) -> None:
        [letter] = await buried(log, "a")
        await log.execute("DELETE FROM queen.log_txns")
        await log.execute("DELETE FROM queen.log_partitions")
        row = await replay(log, letter)
        assert row.verdict == "moved"
        assert row.partition_id != letter.partition_id
        assert ids(await log.pop(partition="p")) == [f"dlq:{letter.id}"]

    async def test_of_another_tenant(self, log: Log) -> None:
        [letter] = await buried(log, "a")
        mine, log.store.tenant = log.store.tenant, uuid4()
        assert (await replay(log, letter)).verdict == "missing"
        assert await letters_of(log).read(letter.id) is None
        assert await left(log) == 0
        log.store.tenant = mine
        assert await left(log) == 1
        assert len(await log.store.list_queues()) == 1


class TestRaces:
    @pytest.fixture
    async def arena(self, settings: ConnectionSettings) -> AsyncIterator[Arena]:
        async with AsyncExitStack() as stack:
            yield await open_arena(stack, settings, ("one", "two", "three"))

    async def play(self, log: Log, arena: Arena, *others: str) -> list[dict[str, Outcome]]:
        """Play a replay against `others` on one dead letter, in all orders."""
        steps = {"one": "replay", **dict(zip(("two", "three"), others, strict=False))}
        outcomes = []
        for number, order in enumerate(orders({name: [_nothing] for name in steps})):
            [letter] = await buried(log, "a", queue=f"q{number}")
            sessions = {name: [self.step(kind, letter)] for name, kind in steps.items()}
            outcome = await arena.run_order(sessions, order)
            for name in steps:
                assert not outcome[name].errors, (order, outcome)
            outcomes.append(outcome)
            queue = letter.queue_name
            moved = [m for m in await log.pop(queue=queue) if m.id.startswith("dlq:")]
            assert len(moved) == self.alive(outcome, steps), (order, outcome)
            assert await letters_of(log).count(DeadLetterFilter(queue=queue)) == 0
        return outcomes

    def step(self, kind: str, letter: DeadLetterRow) -> Step:
        async def run(log: Log) -> Any:
            match kind:
                case "replay":
                    return (await replay(log, letter)).verdict
                case "delete":
                    return await letters_of(log).delete(letter.partition_id, "a", None)
                case "purge":
                    return await letters_of(log).purge(
                        DeadLetterFilter(queue=letter.queue_name), 10
                    )
                case "delete queue":
                    return await log.store.delete_queue(letter.queue_name)
            raise AssertionError(kind)

        return run

    def alive(self, outcome: dict[str, Outcome], steps: dict[str, str]) -> int:
        """How many messages have to be in the log now."""
        verdicts = [outcome[name].results[0] for name, kind in steps.items() if kind == "replay"]
        if "delete queue" in steps.values():
            return 0  # before it or with it: the queue took along what was in it
        assert verdicts.count("moved") <= 1
        return verdicts.count("moved")

    async def test_three_replays(self, log: Log, arena: Arena) -> None:
        outcomes = await self.play(log, arena, "replay", "replay")
        assert len(outcomes) == 90
        for outcome in outcomes:
            verdicts = sorted(o.results[0] for o in outcome.values())
            assert verdicts == ["duplicate", "duplicate", "moved"]

    async def test_two_replays_without_dedup(self, log: Log, arena: Arena) -> None:
        for number in range(6):
            await log.configure(f"q{number}", dedup_window_seconds=0)
        for outcome in await self.play(log, arena, "replay"):
            assert sorted(o.results[0] for o in outcome.values()) == ["duplicate", "moved"]

    @pytest.mark.parametrize("kind", ["delete", "purge"])
    async def test_against_deletion(self, log: Log, arena: Arena, kind: str) -> None:
        for outcome in await self.play(log, arena, kind):
            verdict, deleted = outcome["one"].results[0], outcome["two"].results[0]
            assert (verdict, deleted) in (("moved", 0), ("missing", 1))

    async def test_against_the_queues_end(self, log: Log, arena: Arena) -> None:
        for outcome in await self.play(log, arena, "delete queue"):
            assert outcome["one"].results[0] in ("moved", "missing")
            assert outcome["two"].results == [True]
        assert await log.store.list_queues() == []  # a late replay makes none anew

    async def test_all_at_once(self, log: Log, arena: Arena) -> None:
        await self.play(log, arena, "purge", "delete queue")

    async def test_against_its_return(self, log: Log, arena: Arena) -> None:
        """A transaction that pushes there and dead-letters the message again: partitions first."""
        for number, order in enumerate(orders({"one": [_nothing], "two": [_nothing, _nothing]})):
            queue, lease = f"q{number}", f"lease{number}"
            part = (await log.push("a", "b", queue=queue)).partition_id
            # b is buried and comes again, because a is not done.
            await log.pop(queue=queue, lease_id=lease)
            await log.ack(part, "b:d", lease=lease)
            await log.pop(queue=queue, lease_id=lease)
            [letter] = await letters_of(log).read_page(DeadLetterFilter(queue=queue), FIRST, MIB)
            outcome = await arena.run_order(
                {
                    "one": [self.step("replay", letter)],
                    "two": [
                        _push("c", queue),
                        _ack(part, "b:d", lease),
                    ],
                },
                order,
            )
            assert not any(o.errors for o in outcome.values()), (order, outcome)
            assert outcome["one"].results == ["moved"]
            assert outcome["two"].results[1].verdicts == "d"
            assert await letters_of(log).count(DeadLetterFilter(queue=queue)) <= 1

    async def test_two_purges(self, log: Log, arena: Arena) -> None:
        for order in orders({"one": [_nothing], "two": [_nothing]}):
            await buried(log, "a", "b", "c")

            async def purge(log: Log) -> int:
                return await letters_of(log).purge(DeadLetterFilter(queue="q"), 10)

            outcome = await arena.run_order({"one": [purge], "two": [purge]}, order)
            assert sorted(o.results[0] for o in outcome.values()) == [0, 3]
            await log.store.delete_queue("q")


def _push(name: str, queue: str) -> Step:
    return lambda log: log.push(name, queue=queue)


def _ack(part: UUID, words: str, lease: str) -> Step:
    return lambda log: log.ack(part, words, lease=lease)


async def _nothing(log: Log) -> None:
    """Stands for a step where only the number of steps counts."""


class TestLostAnswer:
    """A replay that commits while its answer gets lost is asked for again, and done once."""

    class Forgetful(DeadLetterStore):
        """Loses the first answer of a replay, after its commit."""

        lost = 0

        async def replay(self, *arguments: Any, **more: Any) -> ReplayRow:
            row = await super().replay(*arguments, **more)
            if not self.lost:
                self.lost += 1
                raise DatabaseUnavailable("the connection was lost")
            return row

    class Told:
        """Hints, written down."""

        def __init__(self) -> None:
            self.keys: list[Any] = []

        def messages_available(self, keys: Any) -> None:
            self.keys += keys

    @pytest.mark.parametrize("window", [3600, 0])
    async def test_it_counts_as_moved(self, log: Log, window: int) -> None:
        await log.configure(dedup_window_seconds=window)
        [letter] = await buried(log, "a")
        letters = self.Forgetful(log.store.pool, log.store.tenant)
        told = self.Told()
        service = DeadLetterService(
            letters,
            messages_of(log),
            log.store,
            Uuid7(),
            told,  # type: ignore[arg-type]
            Encryption(log.store, None),
            MIB,
        )
        moved = await service.replay(letter.id)
        assert letters.lost == 1
        assert moved is not None
        assert (moved.verdict, moved.offset) == (ReplayVerdict.MOVED, 1)
        assert told.keys == [("q", "p")]
        assert ids(await log.pop()) == [f"dlq:{letter.id}"]
        assert await service.replay(letter.id) is None
        assert told.keys == [("q", "p")]


class TestFile:
    async def file(self, log: Log, part: UUID, name: str, group: str = GROUP) -> str:
        found = await messages_of(log).find(part, hash_of(name))
        assert found is not None
        letter = letter_of(0, found.message_offset, name)
        return await letters_of(log).file(part, group, found.message_offset, json.dumps(letter))

    async def test_the_next_one_is_stepped_over(self, log: Log) -> None:
        part = (await log.push("a", "b")).partition_id
        assert await self.file(log, part, "a") == "filed"
        assert ids(await log.pop()) == ["b"]
        [letter] = await letters_of(log).read_page(ALL, FIRST, MIB)
        assert (letter.transaction_id, letter.error) == ("a", "error-a")

    async def test_one_that_was_consumed_stays_consumed(self, log: Log) -> None:
        part = (await log.push("a", "b")).partition_id
        await log.pop(auto_ack=True)
        assert await self.file(log, part, "a") == "filed"
        assert await self.file(log, part, "a") == "filed"
        assert await log.committed(part) == 1
        assert await left(log) == 1

    async def test_what_has_others_before_it(self, log: Log) -> None:
        part = (await log.push("a", "b")).partition_id
        assert await self.file(log, part, "b") == "behind"
        assert ids(await log.pop()) == ["a", "b"]

    async def test_a_live_lease_protects(self, log: Log) -> None:
        part = (await log.push("a", "b")).partition_id
        await log.pop(batch=1)
        assert await self.file(log, part, "a") == "leased"
        assert await self.file(log, part, "b") == "behind"
        await log.expire()
        assert await self.file(log, part, "a") == "filed"
        assert (await log.ack(part, "a:c")).verdicts == "n"
        assert ids(await log.pop()) == ["b"]

    async def test_a_group_without_a_cursor(self, log: Log) -> None:
        part = (await log.push("a")).partition_id
        assert await self.file(log, part, "a", "g") == "no_cursor"
        assert await left(log) == 0

    async def test_behind_what_retention_took(self, log: Log) -> None:
        part = (await log.push("a")).partition_id
        await log.pop(batch=1, auto_ack=True)
        await log.push("b")
        await log.push("c")
        await log.retain_from(part, 2)
        assert await self.file(log, part, "c") == "filed"
        assert await log.committed(part) == 2

    async def test_in_no_partition(self, log: Log) -> None:
        assert await letters_of(log).file(uuid4(), GROUP, 0, "{}") == "missing"


class TestList:
    async def test_it_filters(self, log: Log) -> None:
        await buried(log, "a", queue="one")
        await buried(log, "b", queue="two", group="g")
        [c] = await buried(log, "c", queue="two", partition="x")

        async def listed(**which: Any) -> list[str]:
            letters = letters_of(log)
            rows = await letters.read_page(DeadLetterFilter(**which), FIRST, MIB)
            assert await letters.count(DeadLetterFilter(**which)) == len(rows)
            return [row.transaction_id for row in rows]

        assert await listed() == ["c", "b", "a"]
        assert await listed(queue="two") == ["c", "b"]
        assert await listed(queue="two", group="g") == ["b"]
        assert await listed(partition="x") == ["c"]
        assert await listed(since=c.failed_at) == ["c"]
        assert await listed(until=c.failed_at) == ["b", "a"]

    async def test_a_page_is_bounded_in_bytes(self, log: Log) -> None:
        await buried(log, *"abcd")
        letters = letters_of(log)
        size = len('"a"')
        for room, count in ((1, 1), (size, 1), (size + 1, 2), (3 * size, 3), (MIB, 4)):
            assert len(await letters.read_page(ALL, FIRST, room)) == count, room
        rows = await letters.read_page(ALL, Page(limit=2, offset=1), MIB)
        assert [row.transaction_id for row in rows] == ["c", "b"]

    async def test_a_purge_ends_and_says_how_many(self, log: Log) -> None:
        await buried(log, *"abc")
        letters = letters_of(log)
        which = DeadLetterFilter(queue="q")
        assert [await letters.purge(which, 2) for _ in range(3)] == [2, 1, 0]

    async def test_a_queue_takes_those_of_lost_partitions_along(self, log: Log) -> None:
        await buried(log, "a")
        await log.execute("DELETE FROM queen.log_partitions")
        await log.store.delete_queue("q")
        assert await left(log) == 0
