"""PopService over a real PostgreSQL: candidates that one pop has in flight while another looks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from queen_trio.broker.candidates import Candidates
from queen_trio.broker.deliveries import Deliveries
from queen_trio.broker.encryption import Encryption
from queen_trio.broker.hints import LocalHints
from queen_trio.broker.hotlist import Verdict
from queen_trio.broker.maintenance import Maintenance
from queen_trio.broker.pop import PopService
from queen_trio.broker.wakeups import REST_SECONDS, Wakeups
from queen_trio.config import PopConfig, SubscriptionMode
from queen_trio.errors import DatabaseUnavailable
from queen_trio.model.ids import Uuid7
from queen_trio.model.message import hash_of
from queen_trio.model.pop import Claim, PopRequest
from queen_trio.store.connection import IDLE, connect
from queen_trio.store.queries import NOTHING_VERIFIED, PopRow, Store
from queen_trio.store.system import SystemStore
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from queen_trio.store.connection import TrioConnection
    from queen_trio.store.pool import Pool
    from queen_trio.store.settings import ConnectionSettings


class GatedStore(Store):
    """The real store, whose pops can be held up, or fail."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.gate = trio.Event()
        self.gate.set()
        self.failures = 0
        self.asked = 0  # about candidates
        self.asked_all = 0
        self.behind = 0  # of all these, behind a push

    async def pop(self, *arguments: Any, **options: Any) -> list[PopRow]:
        if arguments[14] is None:
            self.asked_all += 1
        else:
            self.asked += 1
        self.behind += options.get("behind") is not None
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise DatabaseUnavailable("away")
        return await super().pop(*arguments, **options)


class Scene:
    """A PopService whose jobs don't run unless a test starts them."""

    def __init__(self, pool: Pool) -> None:
        config = PopConfig()
        self.store = GatedStore(pool)
        self.wakeups = Wakeups(self.store, config)
        self.candidates = Candidates(self.store, self.wakeups, poll_seconds=0.2)
        self.wakeups.candidates = self.candidates
        maintenance = Maintenance(SystemStore(pool))
        self.hints = LocalHints(self.wakeups, self.candidates, maintenance)
        self.encryption = Encryption(self.store, None)
        self.pops = PopService(
            self.store,
            Uuid7(),
            self.wakeups,
            self.candidates,
            self.hints,
            self.encryption,
            maintenance,
            Deliveries(),
            config,
        )
        self.claims: list[Claim | None] = []
        self.nursery: trio.Nursery

    async def push(self, partition: str, *, name: str = "") -> bool:
        """Two messages, in a push that may lead a parked pop; False when they were duplicates."""
        ids = [f"{partition}{name}{n}" for n in range(2)]
        encoded = self.encryption.encode("q", [f'{{"id":"{i}","data":1}}'.encode() for i in ids])
        keys = [("q", partition)]
        [row] = await self.store.push(
            ["q"], [partition], [2], [encoded.size], [b"".join(map(hash_of, ids))], [encoded.blob],
            [NOTHING_VERIFIED], [None], [None], [False], partial(self.wakeups.lead, keys),
        )  # fmt: skip
        if row.base_offset is None:
            return False
        self.hints.messages_available(keys)
        return True

    async def pop(
        self, wait: float | None = None, partition: str | None = None, **options: Any
    ) -> None:
        request = PopRequest(
            queue="q",
            partition=partition,
            mode=SubscriptionMode.ALL,
            partitions=None,
            timeout=wait,
            **{"batch": 2, **options},
        )
        self.claims.append(await self.pops.pop(request))

    async def ack(self) -> None:
        """All of the last claim."""
        claim = self.claims[-1]
        assert claim is not None
        for part in claim.partitions:
            await self.store.ack(
                [part.partition_id], [claim.group], [claim.lease_id], [b""], [""], "[]", [2]
            )
            self.hints.leases_ended([("q", part.partition)], claim.group)

    async def wait_parked(self) -> None:
        """Until each pop has asked the database and waits."""
        await wait_all_tasks_blocked()
        await wait_until(lambda: not self.wakeups.statistics().asking)
        await wait_all_tasks_blocked()


@pytest.fixture
def scene(pool: Pool) -> Scene:
    return Scene(pool)


async def test_who_looked_while_all_was_in_flight_gets_what_the_other_leaves(scene: Scene) -> None:
    await scene.pop()  # seeds the ring, with nothing
    scene.store.gate = trio.Event()
    await scene.push("a")
    await scene.push("b")
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in range(2):  # the first takes both candidates, and then one of them is enough
                nursery.start_soon(scene.pop, 30.0)
                await wait_all_tasks_blocked()
            scene.store.gate.set()
    assert [claim and claim.count for claim in scene.claims] == [None, 2, 2]


async def test_what_a_failed_pop_gave_back_is_asked_about_again(scene: Scene) -> None:
    """The database was away for one call, and nobody pushes after that."""
    await scene.pop()
    await scene.push("a")
    scene.store.failures = 1
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.candidates.serve)
            await scene.pop(30.0)
            nursery.cancel_scope.cancel()
    assert scene.store.failures == 0
    assert [claim and claim.count for claim in scene.claims] == [None, 2]


async def test_one_that_is_left_among_many_emptied_is_found_in_few_questions(scene: Scene) -> None:
    """Without that a queue of many partitions ended in one scan after another."""
    await scene.pop()
    await scene.push("left")
    ring = scene.candidates._hotlist.ring("q", "__QUEUE_MODE__", trio.current_time())
    [left] = ring.take(1)
    for n in range(1_000):
        ring.mark(f"emptied{n}")
    ring.settle(left, Verdict.REQUEUE)  # behind all others
    with trio.fail_after(10):
        await scene.pop()
    assert scene.claims[-1] is not None
    # 2, 8, 32, 128, 512, 1000: six questions, and none about the whole queue.
    assert scene.store.asked == 6
    assert scene.store.asked_all == 0


@pytest.mark.parametrize("partition", [None, "a"])
async def test_who_is_led_by_a_push_asks_once_and_the_next_in_line_not_at_all(
    scene: Scene, partition: str | None
) -> None:
    await scene.push("a")
    await scene.pop()  # a cursor, and the statements of both on the one connection
    await scene.ack()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(scene.pop, 30.0, partition)
                await scene.wait_parked()
            asked = scene.store.asked + scene.store.asked_all
            assert await scene.push("a", name="more")
            await wait_until(lambda: len(scene.claims) == 2)
            assert scene.store.asked + scene.store.asked_all == asked + 1
            assert scene.store.behind == 1
            nursery.cancel_scope.cancel()
    assert [claim and claim.count for claim in scene.claims] == [2, 2]


@pytest.mark.parametrize("partition", [None, "a"])
async def test_who_was_led_in_vain_gets_the_next(scene: Scene, partition: str | None) -> None:
    """A push that is found to be a duplicate commits nothing."""
    await scene.push("a")
    await scene.pop()
    await scene.ack()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.pop, 30.0, partition)
            await scene.wait_parked()
            assert not await scene.push("a")
            await scene.wait_parked()
            assert scene.store.behind == 1
            assert await scene.push("a", name="more")
    assert [claim and claim.count for claim in scene.claims] == [2, 2]


async def test_one_pop_is_led_to_all_of_a_push_that_it_may_have(scene: Scene) -> None:
    for name in "ab":
        await scene.push(name)
    for _ in range(2):
        await scene.pop()
        await scene.ack()
    keys = [("q", "a"), ("q", "b")]
    encoded = scene.encryption.encode("q", [b'{"id":"1","data":1}'])
    hashes = [hash_of(name) for name in "xy"]
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.pop, 30.0)
            await scene.wait_parked()
            await scene.store.push(
                ["q"] * 2, ["a", "b"], [1] * 2, [encoded.size] * 2, hashes, [encoded.blob] * 2,
                [NOTHING_VERIFIED] * 2, [None] * 2, [None] * 2, None,
                partial(scene.wakeups.lead, keys),
            )  # fmt: skip
    assert scene.claims[-1] is not None
    assert {part.partition for part in scene.claims[-1].partitions} == {"a", "b"}


@pytest.fixture
async def held(scene: Scene, settings: ConnectionSettings) -> AsyncIterator[trio.Event]:
    """Partition a is locked until the event is set, and a push into it waits for that.

    A pop is parked on the queue, or on the partition, before: `scene.park` says how.
    """
    for name in "ab":
        await scene.push(name)
    for _ in "ab":
        await scene.pop()
        await scene.ack()
    scene.claims.clear()
    free = trio.Event()
    async with trio.open_nursery() as nursery:
        scene.nursery = nursery
        async with await connect(settings) as other:
            await other.execute("BEGIN")
            await other.execute(
                "SELECT FROM queen.log_partitions WHERE name = 'a' FOR NO KEY UPDATE"
            )
            nursery.start_soon(_end, other, free)
            yield free
            free.set()
            await wait_until(lambda: other.pgconn.transaction_status == IDLE)
        nursery.cancel_scope.cancel()


async def _end(connection: TrioConnection, free: trio.Event) -> None:
    await free.wait()
    await connection.execute("COMMIT")


async def lead_behind_what_waits(scene: Scene, **pop: Any) -> None:
    scene.nursery.start_soon(partial(scene.pop, **pop))
    await scene.wait_parked()
    scene.nursery.start_soon(partial(scene.push, "a", name="held"))
    await wait_until(lambda: scene.store.behind == 1)


async def test_a_push_that_waits_keeps_nobody_from_what_else_is_committed(
    scene: Scene, held: trio.Event
) -> None:
    with trio.fail_after(5):
        await lead_behind_what_waits(scene, wait=30.0)
        await scene.push("b", name="more")
        await wait_until(lambda: bool(scene.claims))
        [claim] = scene.claims
        assert claim is not None
        assert [part.partition for part in claim.partitions] == ["b"]
        # Where pushes last each would be claimed for nobody: it rests for a while.
        assert scene.wakeups._rests_until > trio.current_time() + REST_SECONDS / 2
        assert scene.store.behind == 1
        held.set()
        await scene.pop(30.0)  # what the late answer had claimed was given back
        claim = scene.claims[-1]
        assert claim is not None
        [part] = claim.partitions
        assert (part.partition, part.delivery_attempt) == ("a", 1)


async def test_a_push_that_waits_makes_no_pop_late(scene: Scene, held: trio.Event) -> None:
    with trio.fail_after(5):
        start = trio.current_time()
        await lead_behind_what_waits(scene, wait=0.2)
        await wait_until(lambda: bool(scene.claims))
        assert scene.claims == [None]
        assert trio.current_time() - start < 2


async def test_what_a_late_answer_claims_is_given_back_and_told(
    scene: Scene, held: trio.Event
) -> None:
    """Two pops: the first was led, and has gone home when the push is committed."""
    with trio.fail_after(5):
        await lead_behind_what_waits(scene, wait=0.2)
        await wait_until(lambda: bool(scene.claims))
        scene.nursery.start_soon(scene.pop, 30.0)
        await scene.wait_parked()
        held.set()
        await wait_until(lambda: len(scene.claims) == 2)
    assert scene.claims[1] is not None
    assert scene.claims[1].count == 2


async def test_in_a_shutdown_what_is_claimed_behind_a_push_is_given_back(
    scene: Scene, held: trio.Event
) -> None:
    with trio.fail_after(5):
        await lead_behind_what_waits(scene, wait=30.0)
        scene.store.pool.grace.limit(trio.current_time() + 4)
        scene.wakeups.drain()
        await wait_until(lambda: scene.claims == [None])
        held.set()
        async with scene.store.pool.acquire() as connection:
            read = "SELECT count(*) FROM queen.log_consumers WHERE committed < 3"
            leased = "SELECT count(*) FROM queen.log_consumers WHERE batch_end IS NOT NULL"

            async def count(query: str) -> int:
                [(number,)] = await (await connection.execute(query)).fetchall()
                return int(number)

            while await count("SELECT max(last_offset) FROM queen.log_partitions") < 3:
                pass
            while await count(leased):
                pass
            assert await count(read) == 2


async def test_a_pop_that_acknowledges_at_once_is_not_led(scene: Scene) -> None:
    """What it takes is gone for good, also when nobody is there any more to get it."""
    await scene.push("a")
    await scene.pop()
    await scene.ack()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(scene.pop, 30.0, auto_ack=True))
            await scene.wait_parked()
            await scene.push("a", name="more")
    assert scene.store.behind == 0
    assert scene.claims[-1] is not None


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("hotlist", [True, False])
async def test_a_push_into_many_partitions_serves_as_many(
    scene: Scene, hotlist: bool, batch: int
) -> None:
    """Each pop can take what one of them has; none waits for a probe, which nobody serves here."""
    names = "abcd"
    for name in names:
        await scene.push(name)
        await scene.pop()
        await scene.ack()
    if not hotlist:
        scene.wakeups.candidates = scene.pops._candidates = None
    keys = [("q", name) for name in names]
    encoded = scene.encryption.encode("q", [b'{"id":"1","data":1}'] * batch)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in names:
                nursery.start_soon(partial(scene.pop, 30.0, batch=batch))
                await scene.wait_parked()
            hashes = [b"".join(hash_of(f"new{name}{n}") for n in range(batch)) for name in names]
            await scene.store.push(
                ["q"] * 4, list(names), [batch] * 4, [encoded.size] * 4, hashes,
                [encoded.blob] * 4, [NOTHING_VERIFIED] * 4, [None] * 4, [None] * 4, None,
                partial(scene.wakeups.lead, keys),
            )  # fmt: skip
            if hotlist:
                scene.hints.messages_available(keys)
            else:
                scene.wakeups.notify(keys)
    assert sorted(claim.partitions[0].partition for claim in scene.claims[4:] if claim) == [*names]
