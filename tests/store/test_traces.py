"""Traces: found by message and by name, gone with their queue (spec 2)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from queen_trio.model.inspection import Page
from queen_trio.store.traces import TraceStore
from tests.store.calls import MIB
from tests.store.races import open_arena, orders

if TYPE_CHECKING:
    from queen_trio.store.settings import ConnectionSettings
    from tests.store.calls import Log

FIRST = Page(limit=100, offset=0)


async def test_they_go_with_their_queue(log: Log) -> None:
    part = (await log.push("a")).partition_id
    traces = TraceStore(log.store.pool, log.store.tenant)
    assert await traces.add(part, "a", "g", ["n", "m"], "info", "1")
    await log.store.delete_queue("q")
    assert await traces.of_message(part, "a", FIRST, MIB) == []
    assert await traces.names(None, FIRST) == ([], 0)
    for table in ("message_traces", "message_trace_names"):
        assert await log.execute(f"SELECT count(*) FROM queen.{table}") == [(0,)]


async def test_no_partition_no_trace(log: Log) -> None:
    traces = TraceStore(log.store.pool, log.store.tenant)
    assert await traces.add(uuid4(), "a", "g", ["n"], "info", "1") is None


async def test_tenants_do_not_meet(log: Log) -> None:
    part = (await log.push("a")).partition_id
    mine = TraceStore(log.store.pool, log.store.tenant)
    theirs = TraceStore(log.store.pool, uuid4())
    assert await theirs.add(part, "a", "g", ["n"], "info", "1") is None
    assert await mine.add(part, "a", "g", ["n"], "info", "1")
    assert await theirs.of_message(part, "a", FIRST, MIB) == []
    assert await theirs.of_name("n", None, None, FIRST, MIB) == ([], 0)
    assert await theirs.names(None, FIRST) == ([], 0)


async def test_pages(log: Log) -> None:
    part = (await log.push("a")).partition_id
    traces = TraceStore(log.store.pool, log.store.tenant)
    for number in range(4):
        await traces.add(part, "a", "g", ["n"], "info", f'"{number}"')
    page = Page(limit=2, offset=1)
    of_message = await traces.of_message(part, "a", page, MIB)
    assert [row.data for row in of_message] == ['"1"', '"2"']
    of_name, total = await traces.of_name("n", None, None, page, MIB)
    assert ([row.data for row in of_name], total) == (['"2"', '"1"'], 4)
    assert len(await traces.of_message(part, "a", FIRST, 4)) == 2
    assert len((await traces.of_name("n", None, None, FIRST, 1))[0]) == 1
    newest = (await traces.of_name("n", None, None, FIRST, MIB))[0][0]
    since, total = await traces.of_name("n", newest.created_at, None, FIRST, MIB)
    assert ([row.id for row in since], total) == ([newest.id], 1)
    _, total = await traces.of_name("n", None, newest.created_at, FIRST, MIB)
    assert total == 3


async def test_against_the_queues_end(log: Log, settings: ConnectionSettings) -> None:
    """In every interleaving: no error, and no trace is left behind."""

    async def delete(log: Log) -> bool:
        return await log.store.delete_queue("q")

    async with AsyncExitStack() as stack:
        arena = await open_arena(stack, settings, ("one", "two"))
        for order in orders({"one": [delete], "two": [delete]}):
            part = (await log.push("a")).partition_id

            async def trace(log: Log, part: UUID = part) -> UUID | None:
                traces = TraceStore(log.store.pool, log.store.tenant)
                return await traces.add(part, "a", "g", ["n"], "info", "1")

            outcome = await arena.run_order({"one": [delete], "two": [trace]}, order)
            assert outcome["one"].results == [True], (order, outcome)
            assert not outcome["two"].errors, (order, outcome)
            for table in ("message_traces", "message_trace_names"):
                assert await log.execute(f"SELECT count(*) FROM queen.{table}") == [(0,)]
