"""PushService over a real PostgreSQL: shared commits, order, errors that stay where they are."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from queen_trio.broker.buffer import PushBuffer
from queen_trio.broker.encryption import Encryption
from queen_trio.broker.history import History
from queen_trio.broker.maintenance import Maintenance
from queen_trio.broker.push import PushService, open_push_service
from queen_trio.errors import DatabaseUnavailable
from queen_trio.model.ids import Uuid7
from queen_trio.model.message import PushItem, PushResult, PushStatus
from queen_trio.spool import Spool, open_spool
from queen_trio.store import segments
from queen_trio.store.queries import PushRow, Store
from queen_trio.store.system import SystemStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from queen_trio.broker.segment import Key
    from queen_trio.store.pool import Pool
    from tests.cluster import Cluster


class WatchedStore(Store):
    """The real store; notes the bundles and what was in flight together, and can be held up."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.bundles: list[list[Key]] = []
        self.in_flight: list[Key] = []
        self.most_in_flight = 0
        self.gate = trio.Event()
        self.gate.set()

    async def push(
        self, queues: Sequence[str], partitions: Sequence[str], *rest: Any, **more: Any
    ) -> list[PushRow]:
        keys = list(zip(queues, partitions, strict=True))
        assert not set(keys) & set(self.in_flight), "two segments of a partition in flight"
        self.bundles.append(keys)
        self.in_flight += keys
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        try:
            await self.gate.wait()
            return await super().push(queues, partitions, *rest, **more)
        finally:
            for key in keys:
                self.in_flight.remove(key)


@pytest.fixture
def store(pool: Pool) -> WatchedStore:
    return WatchedStore(pool)


@asynccontextmanager
async def serving(
    store: WatchedStore, spool: Spool | None = None
) -> AsyncIterator[tuple[PushService, list[Key]]]:
    """Without a `spool` no push may end in one: it isn't open."""
    committed: list[Key] = []
    encryption = Encryption(store, None)
    buffer = PushBuffer(spool or Spool(Path("/nonexistent"), 0), encryption)
    maintenance = Maintenance(SystemStore(store.pool))
    with trio.fail_after(30):
        async with open_push_service(
            store,
            Uuid7(),
            History(store),
            encryption,
            maintenance,
            buffer,
            lambda *_: None,
            committed.extend,
        ) as pushes:
            yield pushes, committed


def item(payload: object, partition: str = "p", transaction_id: str | None = None) -> PushItem:
    raw = msgspec.Raw(msgspec.json.encode(payload))
    return PushItem("q", raw, partition, transaction_id)


async def stored(store: Store, partition: str = "p") -> list[Any]:
    """The payloads of a partition in offset order; takes them."""
    rows = await store.pop(
        "q", partition, "", "", "g", 100_000, 1, None, True, "", "all", None, 0, 2**30
    )
    records = [r for row in rows for r in segments.split(segments.decode(row.blob))]
    return [msgspec.json.decode(record)["data"] for record in records]


def count_segments(cluster: Cluster, database: str) -> int:
    [(count,)] = cluster.execute("SELECT count(*) FROM queen.log_segments", database)
    return int(count)


async def test_concurrent_pushes_share_commits(
    store: WatchedStore, cluster: Cluster, database: str
) -> None:
    async with serving(store) as (pushes, committed), trio.open_nursery() as nursery:
        for n in range(200):
            nursery.start_soon(pushes.push, [item(n)])
    # The first goes at once, all that came meanwhile follow it together.
    assert count_segments(cluster, database) == len(store.bundles) == len(committed) <= 3
    assert sorted(await stored(store)) == list(range(200))


async def test_order_of_arrival_is_order_of_offsets(store: WatchedStore) -> None:
    async with serving(store) as (pushes, _), trio.open_nursery() as nursery:
        for n in range(100):
            if n % 10:
                nursery.start_soon(pushes.push, [item(n)])
                await wait_all_tasks_blocked()  # it has arrived; a flush may be under way
            else:
                await pushes.push([item(n)])
    assert len(store.bundles) > 10
    assert await stored(store) == list(range(100))


async def overtaken(store: WatchedStore) -> None:
    """Wait until a second call is under way: the first one lasts."""
    with trio.fail_after(10):
        while len(store.bundles) < 2:
            await trio.sleep(0.001)


async def test_one_segment_of_a_partition_is_in_flight(store: WatchedStore) -> None:
    """`WatchedStore.push` asserts it; other partitions don't wait."""
    store.gate = trio.Event()
    async with serving(store) as (pushes, _), trio.open_nursery() as nursery:
        for partition in ("a", "b", "a", "b", "c"):
            nursery.start_soon(pushes.push, [item(1, partition)])
            await wait_all_tasks_blocked()
        await overtaken(store)
        assert store.bundles == [[("q", "a")], [("q", "b"), ("q", "c")]]
        assert len(store.in_flight) == 3
        store.gate.set()
    assert store.bundles[2:] == [[("q", "a")]], "what is not under way yet takes more in"


async def test_all_partitions_of_a_moment_share_a_commit(store: WatchedStore) -> None:
    store.gate = trio.Event()
    async with serving(store) as (pushes, _), trio.open_nursery() as nursery:
        nursery.start_soon(pushes.push, [item(0, "busy")])
        await wait_all_tasks_blocked()
        for n in range(100):
            nursery.start_soon(pushes.push, [item(n, str(n))])
        await overtaken(store)
        store.gate.set()
    assert [len(bundle) for bundle in store.bundles] == [1, 100]


async def test_who_is_cancelled_has_pushed_all_the_same(store: WatchedStore) -> None:
    store.gate = trio.Event()
    async with serving(store) as (pushes, _):
        async with trio.open_nursery() as nursery:
            for n in range(3):
                nursery.start_soon(pushes.push, [item(n)])
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        store.gate.set()
    assert sorted(await stored(store)) == [0, 1, 2]


async def test_leaving_flushes_what_was_accepted(store: WatchedStore) -> None:
    results: list[PushResult] = []

    async def push(pushes: PushService, n: int) -> None:
        results.extend(await pushes.push([item(n, str(n % 5))]))

    async with trio.open_nursery() as outside, serving(store) as (pushes, _):
        store.gate = trio.Event()
        for n in range(20):
            outside.start_soon(push, pushes, n)
        await wait_all_tasks_blocked()
        store.gate.set()
    assert [result.status for result in results] == [PushStatus.QUEUED] * 20


async def test_a_refused_segment_fails_alone(
    store: WatchedStore, cluster: Cluster, database: str
) -> None:
    """A trigger refuses one partition for good: no request sees another's error (spec 8.9)."""
    cluster.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'not this one'; END $$",
        database,
    )
    cluster.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON queen.log_partitions "
        "FOR EACH ROW WHEN (NEW.name = 'bad') EXECUTE FUNCTION refuse()",
        database,
    )
    async with serving(store) as (pushes, _):
        results = await pushes.push([item(1, "good"), item(2, "bad"), item(3, "fine")])
        again = await pushes.push([item(4, "good")])
    assert [r.status for r in results + again] == [
        PushStatus.QUEUED, PushStatus.FAILED, PushStatus.QUEUED, PushStatus.QUEUED,
    ]  # fmt: skip
    assert "not this one" in str(results[1].error)
    assert await stored(store, "good") == [1, 4]


async def test_a_duplicate_in_flight_is_one_all_the_same(store: WatchedStore) -> None:
    """Two requests with one transactionId, both before the first commit."""
    store.gate = trio.Event()
    results: list[PushResult] = []

    async def push(pushes: PushService, *payloads: str) -> None:
        results.extend(await pushes.push([item(p, transaction_id=p[0]) for p in payloads]))

    async with serving(store) as (pushes, _), trio.open_nursery() as nursery:
        for payloads in (["a1"], ["a2", "b1"], ["b2", "c1"], ["a3"]):
            nursery.start_soon(push, pushes, *payloads)
            await wait_all_tasks_blocked()
        store.gate.set()
    outcome = {(r.transaction_id, r.status) for r in results}
    assert outcome == {
        ("a", PushStatus.QUEUED), ("a", PushStatus.DUPLICATE), ("b", PushStatus.QUEUED),
        ("b", PushStatus.DUPLICATE), ("c", PushStatus.QUEUED),
    }  # fmt: skip
    assert await stored(store) == ["a1", "b1", "c1"]
    for transaction_id in "ab":
        ids = {r.message_id for r in results if r.transaction_id == transaction_id}
        assert len(ids) == 1


async def test_what_was_committed_is_told_once_it_is(store: WatchedStore) -> None:
    store.gate = trio.Event()
    async with serving(store) as (pushes, committed), trio.open_nursery() as nursery:
        nursery.start_soon(pushes.push, [item(1, "a"), item(2, "b")])
        await wait_all_tasks_blocked()
        assert committed == []
        store.gate.set()
    assert sorted(committed) == [("q", "a"), ("q", "b")]


async def test_what_is_committed_stays_so_when_the_database_goes_away_in_the_middle(
    store: WatchedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes while the original of a duplicate is read: only that segment goes to the spool.

    A segment that was answered twice would let its request go on before the others are decided.
    """

    async def away(*_: object) -> NoReturn:
        raise DatabaseUnavailable("away")

    async with open_spool(tmp_path / "spool", 1 << 20) as spool, serving(store, spool) as (p, _):
        await p.push([item("first", "a", "t")])
        monkeypatch.setattr(store, "segments_at", away)
        results = await p.push([item("again", "a", "t"), item("new", "b")])
        spooled = await spool.peek(10)
    assert [r.status for r in results] == [PushStatus.BUFFERED, PushStatus.QUEUED]
    assert [record.partition for record in spooled] == ["a"]
    assert await stored(store, "b") == ["new"]
