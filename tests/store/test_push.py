"""Push: allocation, creation, dedup in all its cases, and bundles (spec 1, "Push")."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import pytest
import trio

from queen_trio.errors import DatabaseError
from queen_trio.model.message import hash_of
from queen_trio.store import segments
from queen_trio.store.connection import connect
from queen_trio.store.queries import VERIFIED_EVERYWHERE
from tests.store.calls import Part, ids, record

if TYPE_CHECKING:
    from queen_trio.store.connection import TrioConnection
    from queen_trio.store.settings import ConnectionSettings
    from tests.store.calls import Log


async def wait_for_lock(connection: TrioConnection) -> None:
    """Until somebody waits for a lock of this connection's transaction."""
    blocked = "SELECT FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
    with trio.fail_after(10):
        while True:
            cursor = await connection.execute(blocked, (connection.pgconn.backend_pid,))
            if await cursor.fetchall():
                return


async def counts(log: Log) -> tuple[int, int]:
    """Rows of segments and of sidecars."""
    [row] = await log.execute(
        "SELECT (SELECT count(*) FROM queen.log_segments), (SELECT count(*) FROM queen.log_txns)"
    )
    return row


class TestAllocation:
    """Of ids that may be duplicates, and of those that can't be: one such alone has its own way."""

    @pytest.fixture(autouse=True, params=[None, VERIFIED_EVERYWHERE], ids=["any", "generated"])
    def ids_are(self, log: Log, request: pytest.FixtureRequest) -> None:
        log.verified = request.param

    async def test_offsets_go_on_where_the_last_segment_ended(self, log: Log) -> None:
        first = await log.push("a", "b", "c")
        second = await log.push("d")
        assert (first.base_offset, second.base_offset) == (0, 3)
        assert first.partition_id == second.partition_id

    async def test_a_segment_and_its_sidecar_are_stored(self, log: Log) -> None:
        row = await log.push("a", "b")
        [segment] = await log.execute(
            "SELECT base_offset, end_offset, created_at, blob FROM queen.log_segments"
        )
        blob, size = segments.encode([record("a"), record("b")])
        assert segment == (0, 1, row.created_at, blob)
        [sidecar] = await log.execute(
            "SELECT base_offset, end_offset, created_at, hashes FROM queen.log_txns"
        )
        assert sidecar == (0, 1, row.created_at, hash_of("a") + hash_of("b"))
        assert await log.execute("SELECT raw_bytes FROM queen.log_segments") == [(size,)]

    async def test_the_partition_row_follows(self, log: Log) -> None:
        row = await log.push("a", "b")
        [partition] = await log.execute(
            "SELECT id, last_offset, log_start, txns_start, last_created_at, oldest_live_at,"
            " oldest_txn_at, last_write_at FROM queen.log_partitions"
        )
        at = row.created_at
        assert partition == (row.partition_id, 1, 0, 0, at, at, at, at)

    async def test_last_write_at_moves_once_a_second(self, log: Log) -> None:
        await log.push("a")
        read = "SELECT last_write_at, last_created_at, oldest_live_at FROM queen.log_partitions"
        [before] = await log.execute(read)
        await log.push("b")
        [soon] = await log.execute(read)
        assert soon[0] == before[0] < soon[1]
        assert soon[2] == before[2]
        await log.execute(
            "UPDATE queen.log_partitions SET last_write_at = last_write_at - interval '2 seconds'"
        )
        await log.push("c")
        [later] = await log.execute(read)
        assert later[0] == later[1] > soon[1]

    async def test_created_at_never_steps_back(self, log: Log) -> None:
        await log.push("a")
        ahead = datetime.now(UTC) + timedelta(hours=1)
        await log.execute("UPDATE queen.log_partitions SET last_created_at = $1", ahead)
        row = await log.push("b")
        assert row.created_at == ahead

    async def test_an_emptied_partition_gets_its_oldest_again(self, log: Log) -> None:
        await log.push("a")
        await log.execute("DELETE FROM queen.log_segments")
        await log.execute("DELETE FROM queen.log_txns")
        await log.execute(
            "UPDATE queen.log_partitions SET oldest_live_at = NULL, oldest_txn_at = NULL,"
            " log_start = 1, txns_start = 1"
        )
        row = await log.push("b")
        read = "SELECT oldest_live_at, oldest_txn_at, last_offset FROM queen.log_partitions"
        assert await log.execute(read) == [(row.created_at, row.created_at, 1)]
        assert row.base_offset == 1

    async def test_pushes_side_by_side_get_offsets_of_their_own(self, log: Log) -> None:
        await log.push("first")
        rows: list[int | None] = []

        async def push(name: str) -> None:
            rows.append((await log.push(name)).base_offset)

        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(push, f"m{n}")
        assert sorted(row or 0 for row in rows) == list(range(1, 21))
        assert await counts(log) == (21, 21)

    async def test_created_is_what_was_committed_after_the_wait_for_the_lock(
        self, log: Log, settings: ConnectionSettings
    ) -> None:
        """Who subscribed while a push waited gets what it brings. The holder writes nothing."""
        await log.push("before")
        async with (
            await connect(settings) as other,
            trio.open_nursery() as nursery,
            other.transaction(),
        ):
            await other.execute("SELECT FROM queen.log_partitions FOR NO KEY UPDATE")
            nursery.start_soon(log.push, "after")
            await wait_for_lock(other)
            assert await log.pop(group="g", mode="new", lease_id="a") == []
        assert [message.id for message in await log.pop(group="g", mode="new")] == ["after"]

    async def test_an_empty_bundle_does_nothing(self, log: Log) -> None:
        assert await log.push_bundle() == []
        assert await counts(log) == (0, 0)


class TestCreation:
    async def test_queue_and_partition_are_made(self, log: Log) -> None:
        await log.push("a", queue="orders", partition="eu")
        [queue] = await log.store.list_queues()
        [partition] = await log.store.list_partitions("orders")
        assert (queue.name, queue.namespace, queue.task) == ("orders", "", "")
        assert (partition.name, partition.total) == ("eu", 1)

    @pytest.mark.parametrize(
        ("name", "namespace", "task"),
        [
            ("orders.created", "orders", "created"),
            ("orders.created.eu", "orders", "created.eu"),
            (".created", "", "created"),
            ("orders.", "orders", ""),
            ("orders", "", ""),
        ],
    )
    async def test_a_dotted_name_gives_namespace_and_task(
        self, log: Log, name: str, namespace: str, task: str
    ) -> None:
        await log.push("a", queue=name)
        [queue] = await log.store.list_queues()
        assert (queue.namespace, queue.task) == (namespace, task)

    async def test_a_pushed_queue_leases_for_60_seconds(self, log: Log) -> None:
        await log.push("a")
        assert await log.execute("SELECT lease_time, retry_limit FROM queen.queues") == [(60, 3)]

    @pytest.mark.parametrize("name", ["ö", "a b", "Default", "'; DROP", "\u1f600", "A", "x" * 512])
    async def test_odd_names(self, log: Log, name: str) -> None:
        await log.push("a", queue=name, partition=name)
        assert ids(await log.pop(queue=name, partition=name)) == ["a"]

    async def test_one_bundle_makes_many(self, log: Log) -> None:
        parts = [
            Part(ids=[f"{queue}{partition}"], queue=queue, partition=partition)
            for queue in ("b", "a")
            for partition in ("2", "1")
        ]
        rows = await log.push_bundle(*parts)
        assert [row.ord for row in rows] == [1, 2, 3, 4]
        assert len({row.partition_id for row in rows}) == 4
        for part in parts:
            got = await log.pop(queue=part.queue, partition=part.partition)
            assert ids(got) == part.ids

    async def test_tenants_do_not_meet(self, log: Log) -> None:
        await log.push("a")
        log.store.tenant = uuid4()
        assert await log.pop() == []
        assert (await log.push("a")).base_offset == 0


class TestDedup:
    async def test_a_duplicate_writes_nothing(self, log: Log) -> None:
        await log.push("a", "b")
        before = await log.execute("SELECT p FROM queen.log_partitions p")
        row = await log.push("x", "b", "a")
        assert (row.base_offset, row.created_at) == (None, None)
        assert (row.duplicate_at, row.duplicate_of) == ([1, 2], [1, 0])
        assert await counts(log) == (1, 1)
        assert await log.execute("SELECT p FROM queen.log_partitions p") == before

    async def test_other_segments_of_the_bundle_commit(self, log: Log) -> None:
        await log.push("a")
        dirty, clean = await log.push_bundle(Part(ids=["a"]), Part(ids=["a"], partition="other"))
        assert dirty.duplicate_at == [0]
        assert clean.base_offset == 0

    async def test_partitions_do_not_share_ids(self, log: Log) -> None:
        await log.push("a")
        assert (await log.push("a", partition="other")).base_offset == 0
        assert (await log.push("a", queue="other")).base_offset == 0

    async def test_outside_the_window_it_is_new(self, log: Log) -> None:
        await log.push("a")
        await log.age(3599)
        assert (await log.push("a")).duplicate_of == [0]
        await log.age(2)
        assert (await log.push("a")).base_offset == 1
        assert (await log.push("a")).duplicate_of == [1]

    async def test_the_newest_live_one_is_named_not_the_expired(self, log: Log) -> None:
        await log.push("a")
        await log.age(4000)
        await log.push("a")
        await log.push("b")
        assert (await log.push("b", "a")).duplicate_of == [2, 1]

    async def test_window_0_is_off(self, log: Log) -> None:
        await log.configure(dedup_window_seconds=0)
        assert (await log.push("a", "a")).base_offset == 0
        assert (await log.push("a")).base_offset == 2

    async def test_of_two_originals_the_first_is_named(self, log: Log) -> None:
        await log.configure(dedup_window_seconds=0)
        await log.push("a", "a")
        await log.configure(dedup_window_seconds=3600)
        row = await log.push("a", "b", "a")
        assert (row.duplicate_at, row.duplicate_of) == ([0, 2], [0, 0])

    async def test_the_original_may_have_been_retained_away(self, log: Log) -> None:
        first = await log.push("a")
        await log.push("b")
        await log.retain_from(first.partition_id, 1)
        assert (await log.push("a")).duplicate_of == [0]
        assert await log.store.segments_at(first.partition_id, [0]) == []
        await log.retain_from(first.partition_id, 2)
        assert (await log.push("b", "a")).duplicate_of == [1, 0]

    async def test_without_its_sidecar_it_is_forgotten(self, log: Log) -> None:
        first = await log.push("a")
        await log.push("b")
        await log.retain_from(first.partition_id, 1)
        await log.execute("DELETE FROM queen.log_txns WHERE end_offset < 1")
        await log.execute("UPDATE queen.log_partitions SET txns_start = 1")
        assert (await log.push("a")).base_offset == 2
        assert (await log.push("b")).duplicate_of == [1]

    async def test_originals_are_found_by_offset(self, log: Log) -> None:
        row = await log.push("a", "b")
        await log.push("c")
        found = await log.store.segments_at(row.partition_id, [2, 0, 1, 7])
        assert [(o.message_offset, o.base_offset) for o in found] == [(2, 2), (0, 0), (1, 0)]
        assert segments.split(found[1].blob) == [record("a"), record("b")]
        assert await log.store.segments_at(row.partition_id, []) == []


class TestVerified:
    """A caller's promise narrows the probe only where it fits; a false promise shows where."""

    LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)

    async def push_again(
        self, log: Log, upto: int, where: UUID | None, since: datetime | None
    ) -> list[int] | None:
        row = await log.push("a", "c", verified=upto, verified_in=where, verified_since=since)
        return row.duplicate_of

    @pytest.fixture
    async def partition(self, log: Log) -> UUID:
        row = await log.push("a", "b")
        await log.push("c")
        return row.partition_id

    async def test_minus_one_probes_everything(self, log: Log, partition: UUID) -> None:
        assert await self.push_again(log, -1, None, None) == [0, 2]
        assert await self.push_again(log, -1, partition, self.LONG_AGO) == [0, 2]

    async def test_it_narrows(self, log: Log, partition: UUID) -> None:
        assert await self.push_again(log, 1, partition, self.LONG_AGO) == [2]

    async def test_inside_a_segment(self, log: Log, partition: UUID) -> None:
        assert await self.push_again(log, 0, partition, self.LONG_AGO) == [2]
        row = await log.push("b", verified=0, verified_in=partition, verified_since=self.LONG_AGO)
        assert row.duplicate_of == [1]

    async def test_all_of_it_skips_the_probe(self, log: Log, partition: UUID) -> None:
        assert await self.push_again(log, 2, partition, self.LONG_AGO) is None

    async def test_of_another_partition_it_counts_for_nothing(
        self, log: Log, partition: UUID
    ) -> None:
        assert await self.push_again(log, 2, uuid4(), self.LONG_AGO) == [0, 2]
        assert await self.push_again(log, 2, None, self.LONG_AGO) == [0, 2]

    async def test_the_window_must_not_reach_further_back(self, log: Log, partition: UUID) -> None:
        recent = datetime.now(UTC) - timedelta(seconds=3590)
        assert await self.push_again(log, 2, partition, recent) == [0, 2]
        assert await self.push_again(log, 2, partition, None) == [0, 2]
        await log.configure(dedup_window_seconds=3000)
        assert await self.push_again(log, 2, partition, recent) is None

    async def test_everywhere(self, log: Log, partition: UUID) -> None:
        assert await self.push_again(log, VERIFIED_EVERYWHERE, None, None) is None
        assert await self.push_again(log, VERIFIED_EVERYWHERE - 1, None, None) == [0, 2]


class TestGuards:
    @pytest.mark.parametrize("verified", [None, VERIFIED_EVERYWHERE])
    async def test_clear_text_for_a_queue_that_encrypts(
        self, log: Log, verified: int | None
    ) -> None:
        log.verified = verified
        await log.push("a")
        await log.store.configure("q", None, None, '{"encryption_enabled": true}', False)
        with pytest.raises(DatabaseError) as caught:
            await log.push("b")
        assert caught.value.sqlstate == "QT002"
        assert await counts(log) == (1, 1)

    async def test_a_partition_stands_once_in_a_bundle(self, log: Log) -> None:
        with pytest.raises(DatabaseError, match="stands twice"):
            await log.push_bundle(Part(ids=["a"]), Part(ids=["b"]))
        assert await counts(log) == (0, 0)
        assert await log.store.list_queues() == []

    @pytest.mark.parametrize("position", range(9))
    async def test_arrays_must_fit_together(self, log: Log, position: int) -> None:
        arguments: list[list[object]] = [
            ["q", "r"], ["p", "p"], [1, 1], [5, 5], [bytes(16)] * 2, [b"x"] * 2, [-1, -1],
            [None, None], [None, None],
        ]  # fmt: skip
        arguments[position].pop()
        with pytest.raises(DatabaseError, match="do not fit together"):
            await log.store.push(*arguments)  # type: ignore[arg-type]
        assert await log.store.list_queues() == []

    @pytest.mark.parametrize(
        ("count", "hashes"),
        [(0, b""), (1, b""), (1, bytes(15)), (2, bytes(16)), (1, bytes(32)), (-1, bytes(16))],
    )
    async def test_one_hash_a_message(self, log: Log, count: int, hashes: bytes) -> None:
        with pytest.raises(DatabaseError, match="check constraint"):
            await log.store.push(["q"], ["p"], [count], [5], [hashes], [b"x"], [-1], [None], [None])
        assert await log.store.list_queues() == []

    async def test_a_bundle_fails_as_a_whole(self, log: Log) -> None:
        with pytest.raises(DatabaseError):
            await log.store.push(
                ["q", "r"], ["p", "p"], [1, 1], [5, 5], [bytes(16), bytes(16)],
                [b"x", None], [-1, -1], [None, None], [None, None],  # type: ignore[list-item]
            )  # fmt: skip
        assert await counts(log) == (0, 0)
        assert await log.store.list_queues() == []
