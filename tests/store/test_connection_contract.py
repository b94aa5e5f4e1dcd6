"""What we rely on in psycopg: run this first when its version moves (its hooks did, inside 3.3)."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import pytest
import trio
from attrs import evolve

from queen_trio.errors import DatabaseError
from queen_trio.store.connection import TrioConnection, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from queen_trio.store.settings import ConnectionSettings

# A socket buffer holds far less, so both directions have to wait many times over.
BIG = b"\x00\xff0123456789abcd" * (30 * 1024 * 1024 // 16)


@pytest.fixture
async def conn(settings: ConnectionSettings) -> AsyncIterator[TrioConnection]:
    connection = await connect(settings)
    async with connection:
        await connection.execute("CREATE TEMPORARY TABLE t (id bigint, body bytea)")
        yield connection


async def test_query(conn: TrioConnection) -> None:
    cursor = await conn.execute("SELECT %s::text, %s::bigint", ("grüße", 7))
    assert await cursor.fetchall() == [("grüße", 7)]


async def test_session_is_set_up(conn: TrioConnection) -> None:
    for name, value in {
        "statement_timeout": "32s",
        "idle_in_transaction_session_timeout": "1min",
        "application_name": "queen-trio/local",
        "TimeZone": "UTC",
        "client_encoding": "UTF8",
    }.items():
        cursor = await conn.execute("SELECT current_setting(%s)", (name,))
        assert await cursor.fetchone() == (value,)


async def test_transaction_commits_and_rolls_back(conn: TrioConnection) -> None:
    async with conn.transaction():
        await conn.execute("INSERT INTO t VALUES (1)")
    with contextlib.suppress(ZeroDivisionError):
        async with conn.transaction():
            await conn.execute("INSERT INTO t VALUES (2)")
            raise ZeroDivisionError
    cursor = await conn.execute("SELECT id FROM t")
    assert await cursor.fetchall() == [(1,)]
    assert conn.reusable


async def test_pipeline(conn: TrioConnection) -> None:
    async with conn.pipeline():
        cursors = [await conn.execute("SELECT %s::int", (i,)) for i in range(100)]
        assert [await cursor.fetchone() for cursor in cursors] == [(i,) for i in range(100)]


async def test_executemany(conn: TrioConnection) -> None:
    async with conn.cursor() as cursor:
        await cursor.executemany("INSERT INTO t VALUES (%s)", [(i,) for i in range(1000)])
        await cursor.execute("SELECT count(*) FROM t")
        assert await cursor.fetchone() == (1000,)


async def test_copy_both_ways(conn: TrioConnection) -> None:
    async with conn.cursor() as cursor:
        async with cursor.copy("COPY t FROM STDIN") as copy:
            for i in range(1000):
                await copy.write_row((i, b"x" * 1000))
        rows = 0
        async with cursor.copy("COPY t TO STDOUT") as copy:
            async for row in copy:
                rows += 1
                assert len(row) > 1000
    assert rows == 1000


async def test_big_value_both_ways(conn: TrioConnection) -> None:
    cursor = await conn.execute("SELECT %b::bytea, 1", (BIG,), binary=True)
    assert await cursor.fetchone() == (BIG, 1)


async def test_listen(conn: TrioConnection) -> None:
    await conn.execute("LISTEN news")
    await conn.execute("NOTIFY news, 'extra'")
    received = [n.payload async for n in conn.notifies(timeout=5, stop_after=1)]
    assert received == ["extra"]


async def test_listen_times_out(conn: TrioConnection) -> None:
    await conn.execute("LISTEN news")
    before = time.monotonic()
    assert [n async for n in conn.notifies(timeout=0.05)] == []
    assert 0.05 <= time.monotonic() - before < 5
    assert [n async for n in conn.notifies(timeout=0)] == []
    assert conn.reusable


async def test_listen_has_no_statement_deadline(settings: ConnectionSettings) -> None:
    async with await connect(evolve(settings, statement_timeout_ms=20)) as conn:
        await conn.execute("LISTEN news")
        with trio.move_on_after(0.1) as scope:
            async for _ in conn.notifies():
                pytest.fail("nobody notifies")
        assert scope.cancelled_caught
        assert conn.reusable


async def test_server_cursor(conn: TrioConnection) -> None:
    async with conn.transaction(), conn.cursor("big") as cursor:
        cursor.itersize = 10
        await cursor.execute("SELECT generate_series(1, 100)")
        assert [row[0] async for row in cursor] == list(range(1, 101))


async def test_error_has_a_sqlstate_and_leaves_the_connection_usable(conn: TrioConnection) -> None:
    with pytest.raises(DatabaseError, match="division by zero") as caught:
        await conn.execute("SELECT 1/0")
    assert caught.value.sqlstate == "22012"
    assert conn.reusable
