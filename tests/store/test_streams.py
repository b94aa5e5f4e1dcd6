"""Streams in SQL: what a cycle does to cursors, twice, beside others, and to deleted partitions."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
import trio

from queen_trio.model.message import hash_of
from queen_trio.model.streams import StateQuery
from queen_trio.store.queries import DEFAULT_TENANT
from queen_trio.store.streams import CycleRow, StreamStore
from tests.store.calls import Log, now
from tests.store.races import open_arena, orders

if TYPE_CHECKING:
    from queen_trio.store.pool import Pool
    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster
    from tests.store.calls import Direct

GROUP = "streams.test"
NOTHING: Any = ([], [], [], [], [], [], [], [])


class Shard:
    """A query in the partition q/p."""

    def __init__(self, store: StreamStore, query_id: UUID, partition_id: UUID) -> None:
        self.store = store
        self.query_id = query_id
        self.partition_id = partition_id

    async def cycle(
        self,
        *,
        cycle_id: UUID | None = None,
        lease: str | None = None,
        last: str = "",
        count: int | None = None,
        values: dict[str, str | None] | None = None,
        key: str | None = None,
    ) -> CycleRow:
        """Commit values (or one for "key"), and `count` messages of a lease, or all it holds."""
        values = values or ({} if key is None else {"key": key})
        return await self.store.cycle(
            cycle_id or uuid4(),
            self.query_id,
            self.partition_id,
            GROUP,
            ([key.encode() for key in values], list(values.values()), [None] * len(values)),
            NOTHING,
            (lease, hash_of(last), count, count is None),
        )

    async def state(self) -> dict[str, str]:
        rows = await self.store.state(
            StateQuery(query_id=self.query_id, partition_id=self.partition_id)
        )
        return {row.key.decode(): row.value for row in rows or ()}


@pytest.fixture
async def shard(pool: Pool, log: Log) -> Shard:
    """A query whose source has the messages a to e, in segments of their own."""
    store = StreamStore(pool, DEFAULT_TENANT)
    row = await store.register("query", "q", None, "hash", reset=False)
    pushed = [await log.push(name) for name in "abcde"]
    return Shard(store, row.query_id, pushed[0].partition_id)


async def pop(log: Log) -> list[str]:
    return [message.id for message in await log.pop(group=GROUP)]


async def retain_from(log: Log, offset: int) -> None:
    """Delete the segments below `offset`, as retention does."""
    await log.execute("DELETE FROM queen.log_segments WHERE end_offset < $1", offset)
    await log.execute("UPDATE queen.log_partitions SET log_start = $1", offset)


async def test_an_attempt_that_had_committed_is_not_repeated(log: Log, shard: Shard) -> None:
    await pop(log)
    cycle: dict[str, Any] = {"cycle_id": uuid4(), "lease": "lease", "last": "e"}
    assert await shard.cycle(**cycle, key="1") == CycleRow(None, True, "q", "p")
    assert await shard.cycle(**cycle, key="2") == CycleRow(None, True, "q", "p")
    assert await shard.state() == {"key": "1"}
    assert (await shard.cycle(lease="lease", last="e")).refusal == "invalid or expired lease"


async def test_an_attempt_that_is_still_running_is_waited_for(
    settings: ConnectionSettings, log: Log, shard: Shard
) -> None:
    """The first one's connection is lost to the broker, and not to the server."""
    cycle_id = uuid4()

    async def attempt(session: Log) -> CycleRow:
        store = StreamStore(session.store.pool, DEFAULT_TENANT)
        mine = Shard(store, shard.query_id, shard.partition_id)
        return await mine.cycle(cycle_id=cycle_id, key="1", lease="lease", last="e")

    attempts = {"first": [attempt], "second": [attempt]}
    async with AsyncExitStack() as stack:
        arena = await open_arena(stack, settings, list(attempts))
        for order in orders(attempts):
            assert await pop(log) == list("abcde")
            outcomes = await arena.run_order(attempts, order)
            for outcome in outcomes.values():
                assert outcome.results == [CycleRow(None, True, "q", "p")]
            assert await log.execute("SELECT cycles FROM queen_streams.shards") == [(1,)]
            await log.execute("DELETE FROM queen_streams.shards")
            await log.execute("UPDATE queen.log_consumers SET committed = -1")


async def test_an_expired_lease_commits_nothing(log: Log, shard: Shard) -> None:
    await pop(log)
    await log.expire()
    assert (await shard.cycle(lease="lease", key="1")).refusal == "invalid or expired lease"
    assert await shard.state() == {}
    assert await pop(log) == list("abcde")


async def test_what_a_lease_leaves_comes_again_when_it_expires(log: Log, shard: Shard) -> None:
    await pop(log)
    await shard.cycle(lease="lease", last="b", count=2)
    await log.expire()
    assert await pop(log) == list("cde")


async def test_a_cursor_that_retention_has_passed(log: Log, shard: Shard) -> None:
    """The batch starts at c: two messages of it end with d, not with offset 1."""
    await retain_from(log, 2)
    assert await pop(log) == list("cde")
    await shard.cycle(lease="lease", last="d", count=2)
    assert await log.committed(shard.partition_id, GROUP) == 3
    await log.expire()
    assert await pop(log) == ["e"]


async def test_retention_within_a_batch_loses_nothing(log: Log, shard: Shard) -> None:
    assert await pop(log) == list("abcde")
    await retain_from(log, 2)
    await shard.cycle(lease="lease", last="a", count=1)
    assert await log.committed(shard.partition_id, GROUP) == 0


async def test_the_failures_of_a_message_end_when_it_is_passed(log: Log, shard: Shard) -> None:
    await pop(log)
    await log.ack(shard.partition_id, "a:c b:f", group=GROUP)
    await pop(log)
    await shard.cycle(lease="lease", last="b", count=1)
    cursor = await log.cursor(shard.partition_id, GROUP)
    assert cursor is not None
    assert (cursor["attempt_offset"], cursor["attempt_count"]) == (None, 0)
    assert (cursor["total_consumed"], cursor["committed"]) == (2, 1)


async def test_the_end_of_a_lease_tells_that_there_may_be_more(log: Log, shard: Shard) -> None:
    await log.pop(group=GROUP, batch=2)
    assert await shard.cycle(lease="lease", last="b") == CycleRow(None, True, "q", "p")


async def test_cycles_of_a_shard_follow_each_other(pool: Pool, shard: Shard) -> None:
    """Each in its own order of keys: without the shard's lock they would deadlock."""
    keys = [f"k{n}" for n in range(20)]

    async def run(order: list[str], value: str) -> None:
        for _ in range(10):
            row = await shard.cycle(values=dict.fromkeys(order, value))
            assert row.refusal is None

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, keys, "1")
            nursery.start_soon(run, keys[::-1], "2")
            nursery.start_soon(run, keys[10:] + keys[:10], "3")
    assert len(set((await shard.state()).values())) == 1


async def test_a_reset_waits_for_the_cycle_and_drops_what_it_wrote(log: Log, shard: Shard) -> None:
    await shard.cycle(key="1")
    row = await shard.store.register("query", "q", "sink", "new", reset=True)
    assert (row.query_id, row.fresh, row.matches) == (shard.query_id, False, True)
    assert await shard.state() == {}
    assert await log.execute("SELECT count(*) FROM queen_streams.shards") == [(0,)]
    assert await log.execute("SELECT sink_queue, config_hash FROM queen_streams.queries") == [
        ("sink", "new")
    ]


async def test_a_deleted_queue_takes_its_shards_along(log: Log, shard: Shard) -> None:
    await shard.cycle(key="1")
    assert await log.store.delete_queue("q")
    assert await log.execute("SELECT count(*) FROM queen_streams.state") == [(0,)]
    assert (await shard.cycle(key="1")).refusal == "unknown partition_id"


async def test_queries_of_another_tenant_are_unknown(pool: Pool, shard: Shard) -> None:
    stranger = Shard(StreamStore(pool, uuid4()), shard.query_id, shard.partition_id)
    assert (await stranger.cycle(key="1")).refusal == "unknown query_id"
    which = StateQuery(query_id=shard.query_id, partition_id=shard.partition_id)
    assert await stranger.store.state(which) is None


# -- plans, see test_plans.py ------------------------------------------------------------------

MANY = 20_000
FEW = 500
LOAD = """
INSERT INTO queen_streams.state
SELECT s.query_id, s.partition_id, convert_to(to_json('k' || g)::text, 'UTF8'), '{}', g
  FROM queen_streams.shards s, generate_series(1, $1::integer) g
"""
READ = """
SELECT sum(seq_tup_read)::bigint, sum(coalesce(idx_tup_fetch, 0))::bigint
  FROM pg_stat_xact_user_tables WHERE schemaname = 'queen_streams' AND relname = 'state'
"""


@pytest.mark.parametrize("history", ["never analyzed", "tiny and analyzed"])
def test_calls_read_what_they_are_about(
    direct: Direct, cluster: Cluster, database: str, history: str
) -> None:
    """Also in a session whose plans are from the time when there was next to nothing."""
    log = Log(direct)
    for table in ("state", "shards"):
        cluster.execute(
            f"ALTER TABLE queen_streams.{table} SET (autovacuum_enabled = off)", database
        )
    store = StreamStore(direct, DEFAULT_TENANT)  # type: ignore[arg-type]
    query_id = now(store.register("query", "q", None, "hash", reset=False)).query_id
    shard = Shard(store, query_id, now(log.push("a")).partition_id)

    def state(**narrow: Any) -> Any:
        return store.state(StateQuery(query_id=query_id, partition_id=shard.partition_id, **narrow))

    def calls() -> list[tuple[Any, int]]:
        """Each call, and how many rows it gives."""
        changes = {f'"k{n}"': "1" if n % 2 else None for n in range(100)}
        return [
            (state(keys=[b'"k7"', b'"absent"']), 1),
            (state(prefix=b'"k777'), 11),
            (state(ripe_at=7.0), 7),
            (state(ripe_at=100.0, prefix=b'"k7'), 11),
            (shard.cycle(values=changes), 0),
        ]

    for _ in range(7):
        for call, _ in calls():
            now(call)
    if history == "tiny and analyzed":
        cluster.execute("VACUUM ANALYZE", database)
        for call, _ in calls():
            now(call)
    now(log.execute("DELETE FROM queen_streams.state"))
    now(log.execute(LOAD, MANY))
    for call, rows in calls():
        now(log.execute("BEGIN"))
        [(seq, idx)] = now(log.execute(READ))
        answer = now(call)
        [(seq_after, idx_after)] = now(log.execute(READ))
        now(log.execute("ROLLBACK"))
        assert rows in (0, len(answer))
        assert seq_after == seq, "a table was scanned"
        assert idx_after - idx < FEW
