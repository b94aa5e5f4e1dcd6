"""The invariants of spec 1 that no other file states as such, and the search they rest on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from queen_trio.model.message import hash_of
from tests.store.calls import Direct, Log, OneConnection, Part, ids, now

if TYPE_CHECKING:
    from queen_trio.store.pool import Pool

START = datetime(2024, 1, 1, tzinfo=UTC)


class TestOrder:
    """1: offsets are dense and in commit order, created_at is monotone in the offset."""

    async def test_many_writers_leave_no_gap(self, log: Log) -> None:
        async def write(writer: int) -> None:
            for n in range(20):
                names = [f"{writer}.{n}.{i}" for i in range(n % 3 + 1)]
                await log.push_bundle(
                    *(Part(ids=names, partition=p) for p in ("xy", "yx")[writer % 2])
                )

        async with trio.open_nursery() as nursery:
            for writer in range(5):
                nursery.start_soon(write, writer)
        for partition in "xy":
            got = await log.pop(partition=partition, batch=10_000)
            assert [m.offset for m in got] == list(range(len(got)))
            assert [m.created_at for m in got] == sorted(m.created_at for m in got)
            for writer in range(5):
                mine = [m.id for m in got if m.id.startswith(f"{writer}.")]
                assert mine == [f"{writer}.{n}.{i}" for n in range(20) for i in range(n % 3 + 1)]


class TestOneLease:
    """2: at most one live lease per (partition, group)."""

    async def test_many_consumers_share_nothing(self, log: Log) -> None:
        names = [f"m{i}" for i in range(60)]
        for name in names:
            await log.push(name)
        seen: list[str] = []

        async def consume(consumer: int) -> None:
            lease = f"lease-{consumer}"
            while len(seen) < len(names):
                for message in await log.pop(batch=3, lease_id=lease):
                    seen.append(message.id)
                    row = await log.ack(message.partition_id, f"{message.id}:c", lease=lease)
                    assert row.verdicts == "c"

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for consumer in range(4):
                    nursery.start_soon(consume, consumer)
        assert seen == names


class TestDeletion:
    """5: every offset below log_start is deleted, and so is never delivered."""

    @pytest.mark.parametrize("upto", [0, 2, 5])
    async def test_groups_behind_go_on_at_log_start(self, log: Log, upto: int) -> None:
        pushed = await log.push("a", "b")
        await log.push("c", "d", "e")
        await log.push("f")
        await log.pop(auto_ack=True, batch=1)
        await log.retain_from(pushed.partition_id, upto)
        assert ids(await log.pop()) == list("abcdef")[max(upto, 1) :]
        assert ids(await log.pop(group="g")) == list("abcdef")[upto:]


class TestDurability:
    """6: only a claim that takes nothing but leases may be forgotten by a crash."""

    async def setting_after(self, pool: Pool, **pop: object) -> str:
        async with pool.acquire() as connection, connection.transaction():
            log = Log(OneConnection(connection))
            await log.pop(**pop)
            [(value,)] = await log.execute("SHOW synchronous_commit")
            return str(value)

    async def test_a_lease_is_asynchronous(self, log: Log, pool: Pool) -> None:
        await log.push("a")
        await log.pop()
        await log.expire()
        assert await self.setting_after(pool) == "off"

    async def test_first_contact_is_not(self, log: Log, pool: Pool) -> None:
        await log.push("a")
        assert await self.setting_after(pool, group="g", mode="all") == "on"
        await log.push("b", partition="later")
        assert await self.setting_after(pool, group="g", partition="later") == "on"

    async def test_a_subscription_is_not(self, log: Log, pool: Pool) -> None:
        assert await self.setting_after(pool, group="g", mode="new") == "on"

    async def test_auto_ack_is_not(self, log: Log, pool: Pool) -> None:
        await log.push("a")
        await log.pop()
        await log.expire()
        assert await self.setting_after(pool, auto_ack=True) == "on"

    async def test_it_ends_with_the_transaction(self, log: Log, pool: Pool) -> None:
        await log.push("a")
        await log.pop()
        async with pool.acquire() as connection:
            cursor = await connection.execute("SHOW synchronous_commit")
            assert await cursor.fetchone() == ("on",)


# Segments as (how many messages, seconds after the one before).
histories = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=40)


@pytest.fixture
def direct_log(direct: Direct) -> Log:
    return Log(direct)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(histories, st.integers(-2, 125), st.integers(0, 45))
def test_the_first_offset_since_a_time(
    direct_log: Log, history: list[tuple[int, int]], since: int, forgotten: int
) -> None:
    """The gallop and bisection find what looking at every row finds."""
    partition = uuid4()
    rows: list[tuple[int, int, int]] = []
    base, at = 0, 0
    for count, gap in history:
        at += gap
        rows.append((base, base + count - 1, at))
        base += count
    rows_left = rows[forgotten:]
    txns_start = rows_left[0][0] if rows_left else base
    expected = next((first for first, _, at in rows_left if at >= since), base)

    async def run() -> int:
        await direct_log.store.configure("q", None, None, "{}", False)
        await direct_log.execute(
            "INSERT INTO queen.log_partitions (id, queue_id, name, last_offset, txns_start)"
            " SELECT $1::uuid, id, $1::uuid::text, $2, $3 FROM queen.queues",
            partition, base - 1, txns_start,
        )  # fmt: skip
        for first, last, second in rows_left:
            await direct_log.execute(
                "INSERT INTO queen.log_txns VALUES ($1, $2, $3, $4, $5)",
                partition, first, last, START + timedelta(seconds=second),
                bytes(16 * (last - first + 1)),
            )  # fmt: skip
        [(found,)] = await direct_log.execute(
            "SELECT queen.first_offset_since_v1($1, $2)",
            partition, START + timedelta(seconds=since),
        )  # fmt: skip
        return int(found)

    assert now(run()) == expected


def test_the_first_offset_of_no_partition(direct_log: Log) -> None:
    [(found,)] = now(
        direct_log.execute("SELECT queen.first_offset_since_v1($1, $2)", uuid4(), START)
    )
    assert found == 0


def test_the_first_offset_since_ever(direct_log: Log) -> None:
    pushed = now(direct_log.push("a"))
    [(found,)] = now(
        direct_log.execute(
            "SELECT queen.first_offset_since_v1($1, '-infinity')", pushed.partition_id
        )
    )
    assert found == 0


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(-1, 42), st.integers(-2, 42)
)
def test_the_hashes_of_a_range(direct_log: Log, sizes: list[int], after: int, upto: int) -> None:
    """`txn_hashes_v1` gives exactly the rows of (after, upto], wherever segments begin and end."""
    queue = str(uuid4())
    pushed_ids: list[str] = []
    for size in sizes:
        names = [f"{len(pushed_ids) + i}" for i in range(size)]
        pushed = now(direct_log.push(*names, queue=queue))
        pushed_ids += names
    found = now(
        direct_log.execute(
            "SELECT message_offset, hash FROM queen.txn_hashes_v1($1, $2, $3) ORDER BY 1",
            pushed.partition_id,
            after,
            upto,
        )
    )
    expected = [
        (offset, hash_of(str(offset)))
        for offset in range(after + 1, min(upto + 1, len(pushed_ids)))
    ]
    assert found == expected
