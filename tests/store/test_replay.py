"""replay_v1: a spooled segment is committed once, whatever became of it before (spec 8.17)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from queen_trio.errors import DatabaseError
from queen_trio.model.message import hash_of
from queen_trio.store.queries import NOTHING_VERIFIED, Store
from queen_trio.store.replay import ReplayRow, ReplayStore
from queen_trio.store.sqlstate import ENCRYPTION_DIFFERS

if TYPE_CHECKING:
    from uuid import UUID

    from queen_trio.store.pool import Pool
    from tests.cluster import Cluster

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(pool: Pool) -> Store:
    return Store(pool)


async def replay(
    store: Store,
    *ids: str,
    partition: str = "p",
    since: datetime = LONG_AGO,
    verified: int = NOTHING_VERIFIED,
    verified_in: UUID | None = None,
    verified_since: datetime | None = None,
    sealed: bool = False,
) -> ReplayRow:
    """Replay one segment of messages with these transactionIds."""
    [row] = await ReplayStore(store).replay(
        ["q"],
        [partition],
        [len(ids)],
        [1],
        [b"".join(map(hash_of, ids))],
        [b"\x1e{}\n" * len(ids)],
        [since],
        [verified],
        [verified_in],
        [verified_since],
        [sealed],
    )
    return row


async def window(store: Store, seconds: int) -> None:
    await store.configure("q", None, None, f'{{"dedup_window_seconds": {seconds}}}', False)


def age(cluster: Cluster, database: str, hours: int) -> None:
    """Make everything that is in the log older."""
    for table in ("log_segments", "log_txns"):
        cluster.execute(
            f"UPDATE queen.{table} SET created_at = created_at - interval '{hours} hours'", database
        )


async def test_new_messages_are_committed(store: Store) -> None:
    first = await replay(store, "a", "b")
    second = await replay(store, "c")
    assert (first.base_offset, second.base_offset) == (0, 2)
    assert first.partition_id == second.partition_id
    assert first.created_at is not None
    assert second.created_at is not None
    assert first.created_at <= second.created_at


async def test_what_is_in_the_window_is_a_duplicate(store: Store) -> None:
    await replay(store, "a", "b", "c")
    row = await replay(store, "x", "c", "a")
    assert row.base_offset is None
    assert (row.found_at, row.found_of, row.found_inside) == ([1, 2], [2, 0], [True, True])
    assert row.examined == 2


async def test_outside_of_the_window_it_looks_back_to_the_spooling(
    store: Store, cluster: Cluster, database: str
) -> None:
    await window(store, 3600)
    await replay(store, "a")
    age(cluster, database, hours=2)
    row = await replay(store, "a", since=datetime.now(UTC) - timedelta(hours=3))
    assert (row.found_of, row.found_inside) == ([0], [False])
    row = await replay(store, "a", since=datetime.now(UTC) - timedelta(hours=1))
    assert row.base_offset == 1


async def test_without_a_window_every_occurrence_is_told(store: Store) -> None:
    """Only one of them is the message itself; its id tells, which SQL doesn't read."""
    await window(store, 0)
    for n in range(3):
        row = await replay(store, "a", since=datetime.now(UTC) + timedelta(hours=1))
        assert row.base_offset == n
    row = await replay(store, "b", "a")
    assert (row.found_at, row.found_of, row.found_inside) == ([1, 1, 1], [0, 1, 2], [False] * 3)


async def test_what_was_seen_is_not_told_again(store: Store) -> None:
    await window(store, 0)
    await replay(store, "a")
    seen = await replay(store, "a")
    assert seen.examined is not None
    others = {"verified": seen.examined, "verified_since": LONG_AGO - timedelta(days=1)}
    again = await replay(store, "a", verified_in=seen.partition_id, **others)  # type: ignore[arg-type]
    assert again.base_offset == 1
    # Known of another partition, or not so far back, counts nothing.
    elsewhere = await replay(store, "b", partition="other")
    row = await replay(store, "a", verified_in=elsewhere.partition_id, **others)  # type: ignore[arg-type]
    assert row.found_of == [0, 1]
    row = await replay(
        store,
        "a",
        verified=1,
        verified_in=seen.partition_id,
        verified_since=LONG_AGO + timedelta(days=1),
    )
    assert row.found_of == [0, 1]


async def test_a_bundle_commits_what_is_new(store: Store) -> None:
    await replay(store, "a", partition="old")
    names = ["new", "old", "newer"]
    rows = await ReplayStore(store).replay(
        ["q"] * 3,
        names,
        [1] * 3,
        [1] * 3,
        [hash_of("a")] * 3,
        [b"\x1e{}\n"] * 3,
        [LONG_AGO] * 3,
        [NOTHING_VERIFIED] * 3,
        [None] * 3,
        [None] * 3,
        [False] * 3,
    )
    assert {names[row.ord - 1]: row.base_offset for row in rows} == {
        "new": 0,
        "old": None,
        "newer": 0,
    }
    assert len({row.partition_id for row in rows}) == 3


async def test_a_queue_that_wants_encryption_refuses_clear_text(store: Store) -> None:
    await store.configure("q", None, None, '{"encryption_enabled": true}', False)
    with pytest.raises(DatabaseError) as refusal:
        await replay(store, "a")
    assert refusal.value.sqlstate == ENCRYPTION_DIFFERS
    assert (await replay(store, "a", sealed=True)).base_offset == 0
