"""Plans: a call touches the rows that it is about, also with plans made when there was nothing.

A session keeps the generic plans of its functions. Those made on an empty or tiny table may read
all of it, which costs nothing then and a second per call once the table is large, until somebody
analyzes it. So each call is warmed up on little, run on much, and the rows it reads are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import astuple, evolve

from queen_trio.store import retention
from tests.store.calls import Direct, Log, Part, Pop, Target, now

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.cluster import Cluster

PARTITIONS = 2_000
SEGMENTS = 20  # a partition, of one message each
GROUP = "g"
TABLES = ("queues", "log_partitions", "log_segments", "log_txns", "log_consumers")

# No call below is about more than a few hundred rows; a table has 2,000 or 40,000.
FEW = 1_000

RULES: dict[str, Any] = {
    "retention_enabled": True, "retention_seconds": 36_000, "completed_retention_seconds": 3_600,
}  # fmt: skip

LOAD = f"""
INSERT INTO queen.queues (name) VALUES ('big');
INSERT INTO queen.log_partitions
       (queue_id, name, last_offset, last_created_at, last_write_at, oldest_live_at, oldest_txn_at)
SELECT id, 'p' || n, {SEGMENTS - 1}, now(), now(), now() - (1200 + n * 0.001) * interval '1 second',
       now() - (1200 + n * 0.001) * interval '1 second'
  FROM queen.queues, generate_series(1, {PARTITIONS}) n WHERE queues.name = 'big';
INSERT INTO queen.log_txns
SELECT p.id, o, o, now() - ({SEGMENTS} - o) * interval '1 minute',
       decode(md5(p.id::text || o), 'hex')
  FROM queen.log_partitions p, generate_series(0, {SEGMENTS - 1}) o WHERE p.name <> 'warm';
INSERT INTO queen.log_segments
SELECT p.id, o, o, 20, now() - ({SEGMENTS} - o) * interval '1 minute', '\\x1e7b7d0a'
  FROM queen.log_partitions p, generate_series(0, {SEGMENTS - 1}) o WHERE p.name <> 'warm';
INSERT INTO queen.log_consumers (partition_id, consumer_group, committed)
SELECT p.id, '{GROUP}', {SEGMENTS // 2} FROM queen.log_partitions p WHERE p.name <> 'warm';
"""


async def warm_up(log: Log) -> None:
    """Run every call often enough for its generic plans."""
    for n in range(7):
        for queue in ("warm", f"warm{n}"):
            await log.configure(queue, retention_enabled=True, retention_seconds=3600)
            pushed = await log.push(f"m{n}", f"n{n}", queue=queue, partition="warm")
            await log.push(f"m{n}", queue=queue, partition="warm")
            lease = {"queue": queue, "group": GROUP}
            await log.pop(**lease)
            await log.store.extend("lease", 1)
            await log.store.release("lease")
            await log.pop(**lease)
            await log.ack(pushed.partition_id, f"m{n}:c", group=GROUP)
            await log.ack(pushed.partition_id, f"m{n}:c n{n}:d", group=GROUP)
            await log.store.segments_at(pushed.partition_id, [0])
            await log.pop(**lease, batch=1)
            await log.store.release("lease")
            for candidates in (["warm"], ["warm", "cold"]):
                await log.pop(**lease, batch=1, candidates=candidates)
                await log.store.release("lease")
            await log.pop(**lease, batch=1)
            await log.ack_whole(Target(pushed.partition_id, group=GROUP, whole=1))
            await log.pop(**lease, partition="warm")
            await log.pop(queue=queue, group=f"h{n}", auto_ack=True)
            await probe(log, queue, "warm")
            await retain(log)
            await log.trim(pushed.partition_id)
            await log.purge(pushed.partition_id)
            await log.drop_idle()


async def probe(log: Log, queue: str, partition: str | None) -> Any:
    return await log.store.probe([queue], [partition], [""], [""], [GROUP], [1])


async def retain(log: Log) -> None:
    """Look for what retention could do."""
    conn: Any = log.store.pool
    for queue, age in await retention.retention_queues(conn):
        await retention.candidates(conn, queue, age, retention.BEGINNING, 1_000)
    await retention.purge_candidates(conn, retention.BEGINNING, 1_000)


async def drop_warm(log: Log) -> None:
    for queue in ("warm", *(f"warm{n}" for n in range(7))):
        await log.store.delete_queue(queue)


class Reader:
    """Counts the rows that a call reads of each table."""

    def __init__(self, log: Log) -> None:
        self.log = log
        [(self.partition,)] = now(
            log.execute("SELECT id FROM queen.log_partitions WHERE name = 'p77'")
        )

    def _counts(self) -> dict[str, tuple[int, int]]:
        rows = now(
            self.log.execute(
                "SELECT relname, seq_tup_read, coalesce(idx_tup_fetch, 0)"
                " FROM pg_stat_xact_user_tables WHERE schemaname = 'queen'"
            )
        )
        return {name: (seq, idx) for name, seq, idx in rows if name in TABLES}

    def read(self, call: Coroutine[Any, Any, Any]) -> dict[str, tuple[int, int]]:
        """Run `call` and roll it back; returns (by sequential scan, by index) per table."""
        now(self.log.execute("BEGIN"))
        before = self._counts()
        now(call)
        after = self._counts()
        now(self.log.execute("ROLLBACK"))
        return {
            table: (seq - before[table][0], idx - before[table][1])
            for table, (seq, idx) in after.items()
        }


@pytest.fixture(params=["never analyzed", "emptied and vacuumed", "tiny and analyzed"])
def reader(
    request: pytest.FixtureRequest, direct: Direct, cluster: Cluster, database: str
) -> Reader:
    """A session that is warm from little, on a database that has grown since."""
    log = Log(direct)
    for table in TABLES:  # autovacuum would come to the rescue at a time of its own
        cluster.execute(f"ALTER TABLE queen.{table} SET (autovacuum_enabled = off)", database)
    if request.param != "never analyzed":
        now(warm_up(log))
        if request.param == "emptied and vacuumed":
            now(drop_warm(log))
        cluster.execute("VACUUM ANALYZE", database)
    now(warm_up(log))
    cluster.execute(LOAD, database)
    return Reader(log)


def check(rows: dict[str, tuple[int, int]], **linear: int) -> None:
    """Nothing is scanned, and of no table more is read than a call is about."""
    for table, (seq, idx) in rows.items():
        assert seq == 0, (table, rows)
        assert idx <= linear.get(table, FEW), (table, rows)


class TestReads:
    def test_push(self, reader: Reader) -> None:
        log = reader.log
        check(reader.read(log.push("new", queue="big", partition="p77")))
        parts = [Part(ids=["new"], queue="big", partition=f"p{n}") for n in range(1, 21)]
        check(reader.read(log.push_bundle(*parts)))
        check(reader.read(log.push("new", queue="big", partition="born")))

    def test_pop(self, reader: Reader) -> None:
        log = reader.log
        one = {"queue": "big", "partition": "p77"}
        check(reader.read(log.store.pop(*pop_arguments(**one, group=GROUP))))
        check(reader.read(log.store.pop(*pop_arguments(**one, group="fresh"))))
        for candidates in (["p77"], ["p77", "p78"]):
            for group in (GROUP, "fresh"):
                rows = pop_arguments(queue="big", group=group, candidates=candidates, mode="all")
                check(reader.read(log.store.pop(*rows)))
        # Linear in the partitions of the queue until they are listed by readiness.
        whole = {"log_partitions": PARTITIONS + FEW, "log_consumers": PARTITIONS + FEW}
        some = pop_arguments(queue="big", group=GROUP, partitions=5)
        check(reader.read(log.store.pop(*some)), **whole)
        check(reader.read(log.store.pop(*pop_arguments(queue="big", group="fresh"))), **whole)
        check(reader.read(probe(log, "big", "p77")))

    def test_ack(self, reader: Reader) -> None:
        log, part = reader.log, reader.partition
        now(log.store.pop(*pop_arguments(queue="big", partition="p77", group=GROUP)))
        target = Target(part, [("absent", "c"), ("absent too", "f")], group=GROUP)
        check(reader.read(log.ack_targets(target)))
        check(reader.read(log.ack_targets(*[target] * 10)))
        whole = Target(part, group=GROUP, whole=SEGMENTS // 2 - 1)
        now(log.execute("BEGIN"))
        [row] = now(log.ack_whole(whole))
        now(log.execute("ROLLBACK"))
        assert row.verdicts == ""
        check(reader.read(log.ack_whole(whole)))
        check(reader.read(log.ack_whole(*[whole] * 10)))
        check(reader.read(log.store.segments_at(part, [3, 7])))
        # On a table without rows the index of leases costs the same as any other.
        cursors = {"log_consumers": PARTITIONS + FEW}
        check(reader.read(log.store.extend("lease", 60)), **cursors)
        check(reader.read(log.store.release("lease")), **cursors)

    def test_retention(self, reader: Reader) -> None:
        """Nothing is due: a cycle doesn't look at partitions; one step looks at one of them."""
        log, part = reader.log, reader.partition
        now(log.configure("big", **RULES))
        check(rows_of_cycle(reader), log_partitions=20)
        check(reader.read(log.drop_idle()))
        check(reader.read(log.trim(part)))
        check(reader.read(log.purge(part)))
        now(log.age(3600, queue="big"))
        check(reader.read(log.trim(part, 5)))
        # What all groups but one have passed is looked at in turns, a thousand in a cycle.
        candidates = {"log_partitions": 2 * FEW, "log_consumers": 2 * FEW, "log_segments": 2 * FEW}
        check(rows_of_cycle(reader), **candidates)


def rows_of_cycle(reader: Reader) -> dict[str, tuple[int, int]]:
    """What retention's look reads, except queues: those are all asked for their rules."""
    rows = reader.read(retain(reader.log))
    del rows["queues"]
    return rows


def pop_arguments(**pop: Any) -> tuple[Any, ...]:
    return astuple(evolve(Pop(), **pop))
