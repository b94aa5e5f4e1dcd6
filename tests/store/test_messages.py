"""Messages as an operator looks at them: pages by status, one by its id (spec 2)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from queen_trio.model.inspection import MessageFilter, MessageStatus, Page
from queen_trio.model.message import hash_of
from queen_trio.store import segments
from queen_trio.store.messages import MessageStore
from tests.store.calls import GROUP, MIB

if TYPE_CHECKING:
    from tests.store.calls import Log

FIRST = Page(limit=100, offset=0)


def store(log: Log) -> MessageStore:
    return MessageStore(log.store.pool, log.store.tenant)


async def listed(
    log: Log, *, page: Page = FIRST, max_bytes: int = MIB, **which: Any
) -> list[tuple[str, str]]:
    """(transactionId, status) of a page."""
    rows = await store(log).read_page(MessageFilter(**{"group": GROUP, **which}), page, max_bytes)
    return [
        (
            json.loads(segments.split(segments.decode(row.blob))[o - row.base_offset])[
                "transactionId"
            ],
            s,
        )
        for row in rows
        for o, s in zip(row.offsets, row.statuses, strict=True)
    ]


async def prepared(log: Log) -> UUID:
    """a is completed, b a dead letter, c leased, d and e pending."""
    part = (await log.push("a", "b")).partition_id
    await log.push("c", "d")
    await log.push("e")
    await log.pop(batch=2)
    await log.ack(part, "a:c b:d")
    await log.pop(batch=1)
    return part


async def test_newest_first_with_their_status(log: Log) -> None:
    await prepared(log)
    everything = [
        ("e", "pending"),
        ("d", "pending"),
        ("c", "processing"),
        ("b", "dead_letter"),
        ("a", "completed"),
    ]
    assert await listed(log) == everything
    for status in MessageStatus:
        assert await listed(log, status=status) == [
            pair for pair in everything if pair[1] == status.value
        ]
    for limit in (1, 2, 3):
        for offset in range(6):
            page = Page(limit=limit, offset=offset)
            assert await listed(log, page=page) == everything[offset : offset + limit]


async def test_an_expired_lease_leaves_them_pending(log: Log) -> None:
    await prepared(log)
    await log.expire()
    pending = await listed(log, status=MessageStatus.PENDING)
    assert [name for name, _ in pending] == ["e", "d", "c"]
    assert await listed(log, status=MessageStatus.PROCESSING) == []


async def test_a_group_that_never_came_has_all_before_it(log: Log) -> None:
    await prepared(log)
    pending = await listed(log, group="g", status=MessageStatus.PENDING)
    assert [name for name, _ in pending] == list("edcba")
    assert await listed(log, group="g", status=MessageStatus.COMPLETED) == []
    assert await listed(log, group="g", status=MessageStatus.PROCESSING) == []


async def test_where(log: Log) -> None:
    await log.push("a", queue="shop.order", partition="x")
    await log.push("b", queue="shop.bill", partition="y")
    await log.push("c", queue="other", partition="x")
    for which, names in (
        ({}, "cba"),
        ({"queue": "other"}, "c"),
        ({"partition": "x"}, "ca"),
        ({"namespace": "shop"}, "ba"),
        ({"task": "bill"}, "b"),
        ({"queue": "nobody"}, ""),
    ):
        assert "".join(name for name, _ in await listed(log, **which)) == names, which


async def test_the_window(log: Log) -> None:
    await log.push("old")
    await log.age(3601)
    first = (await log.push("a")).created_at
    second = (await log.push("b")).created_at
    assert [name for name, _ in await listed(log)] == ["b", "a"]
    assert [name for name, _ in await listed(log, since=second)] == ["b"]
    assert [name for name, _ in await listed(log, since=first, until=second)] == ["a"]
    # The hour before `until`.
    assert await listed(log, until=first) == []
    row = await log.execute("SELECT min(created_at) FROM queen.log_segments")
    assert [name for name, _ in await listed(log, since=row[0][0])] == ["b", "a", "old"]


async def test_many_partitions_in_one_order(log: Log) -> None:
    for number in range(12):
        await log.push(str(number), partition=f"p{number % 3}")
    names = [str(n) for n in reversed(range(12))]
    assert [n for n, _ in await listed(log)] == names
    for limit, offset in ((1, 0), (1, 1), (2, 0), (4, 3), (1, 11), (9, 9)):
        page = Page(limit=limit, offset=offset)
        assert [n for n, _ in await listed(log, page=page)] == names[offset : offset + limit]


async def test_a_page_is_bounded_in_bytes(log: Log) -> None:
    for name in "abc":
        await log.push(name, payload="x" * 1000)
    assert len(await listed(log, max_bytes=1)) == 1
    assert len(await listed(log, max_bytes=2000)) == 2


async def test_retention_and_sidecars(log: Log) -> None:
    part = await prepared(log)
    await log.retain_from(part, 2)
    assert [name for name, _ in await listed(log)] == ["e", "d", "c"]
    assert await store(log).find(part, hash_of("a")) is None
    assert await listed(log, status=MessageStatus.DEAD_LETTER) == []


async def test_the_newest_of_an_id_is_found(log: Log) -> None:
    await log.configure(dedup_window_seconds=0)
    part = (await log.push("a", "b", "a")).partition_id
    await log.push("c", "a", "b")
    await log.push("d")
    for name, offset in (("a", 4), ("b", 5), ("c", 3), ("d", 6)):
        found = await store(log).find(part, hash_of(name))
        assert found is not None
        assert found.message_offset == offset
    assert await store(log).find(part, hash_of("e")) is None
    assert await store(log).find(uuid4(), hash_of("a")) is None


async def test_what_each_group_did(log: Log) -> None:
    part = await prepared(log)
    await log.pop(group="g", batch=4, lease_id="g")
    groups = {row.consumer_group: row for row in await store(log).groups(part, 1)}
    assert list(groups) == [GROUP, "g"]
    mine, theirs = groups.values()
    assert (mine.status, mine.consumed, mine.error) == ("dead_letter", True, "error-b")
    assert (theirs.status, theirs.consumed, theirs.error) == ("processing", False, None)
    assert mine.lease_expires_at is None
    assert theirs.lease_expires_at is not None
