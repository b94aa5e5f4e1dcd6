"""One connection: the prepared fetch, late-shield cancellation, the statement deadline, TLS."""

from __future__ import annotations

import datetime
import os
import random
import signal
import ssl
import subprocess
import uuid
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from attrs import evolve

from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.grace import Grace
from queen_trio.store.connection import Statement, StatementLost, TrioConnection, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster

ECHO = Statement(
    "echo",
    "SELECT $1::bigint[], $2::bytea[], $3::text[], $4::uuid[], $5::timestamptz[], $6::boolean[]",
)
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC)
SLEEP = Statement("sleep", "SELECT pg_sleep($1::float8)::text")
LENGTH = Statement("length", "SELECT length($1::bytea)")
INSERT = Statement("insert", "INSERT INTO kept VALUES ($1::bigint)")


@pytest.fixture
async def conn(settings: ConnectionSettings) -> AsyncIterator[TrioConnection]:
    async with await connect(settings) as connection:
        yield connection


def backend(conn: TrioConnection) -> int:
    return conn.pgconn.backend_pid


@contextmanager
def mute(pid: int) -> Iterator[None]:
    """Stop a backend: it keeps its socket but neither answers nor hears a cancel."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# -- fetch -------------------------------------------------------------------------------------


async def test_arrays_in_binary(conn: TrioConnection) -> None:
    row: tuple[Any, ...] = (
        [1, None, -(2**63), 2**63 - 1],
        [b"\x00\xff", None, b""],
        ["grüße", None, ""],
        [uuid.UUID(int=5), None],
        [NOW, None],
        [True, None, False],
    )
    for _ in range(2):  # prepared by the first, reused by the second
        assert await conn.fetch(ECHO, *row) == [row]


@pytest.mark.parametrize("empty", [None, []])
async def test_nulls_and_empty_arrays(conn: TrioConnection, empty: list[Any] | None) -> None:
    assert await conn.fetch(ECHO, *[empty] * 6) == [(empty,) * 6]


async def test_rows_and_no_rows(conn: TrioConnection) -> None:
    series = Statement("series", "SELECT i, i::text FROM generate_series(1, $1::bigint) i")
    assert await conn.fetch(series, 3) == [(1, "1"), (2, "2"), (3, "3")]
    assert await conn.fetch(series, 0) == []
    assert await conn.fetch(Statement("void", "SET work_mem = '5MB'")) == []


async def test_two_statements_with_one_name(conn: TrioConnection) -> None:
    assert await conn.fetch(Statement("same", "SELECT 1")) == [(1,)]
    assert await conn.fetch(Statement("same", "SELECT 2")) == [(2,)]


async def test_preparation_cut_short_is_repeated(conn: TrioConnection) -> None:
    await conn.execute("CREATE TABLE locked ()")
    count = Statement("count", "SELECT count(*) FROM locked")
    async with await connect(conn.settings) as other, other.transaction():
        await other.execute("LOCK TABLE locked")
        with trio.fail_after(5), pytest.raises(DatabaseUnavailable, match="deadline"):
            await conn.fetch(count, deadline_seconds=0.05)
    assert await conn.fetch(count) == [(0,)]


async def test_a_value_too_large_is_refused_by_the_client(conn: TrioConnection) -> None:
    with pytest.raises(OverflowError):
        await conn.fetch(ECHO, [2**63], [], [], [], [], [])
    assert conn.reusable


async def test_wrong_number_of_parameters_is_our_bug_not_an_outage(conn: TrioConnection) -> None:
    with pytest.raises(TypeError, match="echo takes 6 parameters, got 1"):
        await conn.fetch(ECHO, [])
    assert conn.reusable


async def test_nul_in_text_is_permanent(conn: TrioConnection) -> None:
    with pytest.raises(DatabaseError) as caught:
        await conn.fetch(ECHO, [], [], ["\0"], [], [], [])
    assert not isinstance(caught.value, DatabaseUnavailable)
    assert caught.value.sqlstate == "22021"
    with pytest.raises(DatabaseError) as caught:  # here psycopg refuses it, without a SQLSTATE
        await conn.execute("SELECT %s", ("\0",))
    assert not isinstance(caught.value, DatabaseUnavailable)


async def test_concurrent_tasks_take_turns(conn: TrioConnection) -> None:
    echo = Statement("one", "SELECT $1::bigint")
    seen: list[int] = []

    async def ask(i: int) -> None:
        seen.append((await conn.fetch(echo, i))[0][0])

    async with trio.open_nursery() as nursery:
        for i in range(20):
            nursery.start_soon(ask, i)
    assert sorted(seen) == list(range(20))


async def test_lost_prepared_statement(conn: TrioConnection) -> None:
    one = Statement("one", "SELECT 1")
    await conn.fetch(one)
    await conn.execute("DEALLOCATE ALL")
    with pytest.raises(StatementLost) as caught:
        await conn.fetch(one)
    assert caught.value.sqlstate == "26000"
    assert not conn.reusable


async def test_stale_plan_counts_as_lost(conn: TrioConnection) -> None:
    everything = Statement("everything", "SELECT * FROM pg_temp.changing")
    await conn.execute("CREATE TEMPORARY TABLE changing (a int)")
    await conn.fetch(everything)
    await conn.execute("ALTER TABLE changing ADD b int")
    with pytest.raises(StatementLost, match="everything"):
        await conn.fetch(everything)
    assert not conn.reusable


async def test_read_only_server_dooms_the_connection(conn: TrioConnection) -> None:
    await conn.execute("CREATE TABLE kept (id bigint)")
    await conn.execute("SET default_transaction_read_only = on")
    with pytest.raises(DatabaseUnavailable) as caught:
        await conn.fetch(INSERT, 1)
    assert caught.value.sqlstate == "25006"
    assert not conn.reusable


async def test_killed_backend(conn: TrioConnection, cluster: Cluster) -> None:
    assert conn.is_quiet_nowait()
    cluster.execute(f"SELECT pg_terminate_backend({backend(conn)}, 5000)")
    assert not conn.is_quiet_nowait()
    with pytest.raises(DatabaseUnavailable, match="sleep: "):
        await conn.fetch(SLEEP, 0.0)
    assert not conn.reusable


async def test_killed_before_begin_and_before_commit(
    settings: ConnectionSettings, cluster: Cluster
) -> None:
    async with await connect(settings) as conn:
        cluster.execute(f"SELECT pg_terminate_backend({conn.info.backend_pid}, 5000)")
        with pytest.raises(DatabaseUnavailable):
            async with conn.transaction():
                pytest.fail("there is no transaction")
    async with await connect(settings) as conn:
        with pytest.raises(DatabaseUnavailable):
            async with conn.transaction():
                cluster.execute(f"SELECT pg_terminate_backend({conn.info.backend_pid}, 5000)")


async def test_close_under_a_running_statement(conn: TrioConnection) -> None:
    async def sleep() -> None:
        with pytest.raises(DatabaseUnavailable, match="closed"):
            await conn.fetch(SLEEP, 30.0)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleep)
            await trio.testing.wait_all_tasks_blocked()
            conn.close_nowait()


# -- cancellation ------------------------------------------------------------------------------


async def test_cancelled_before_sends_nothing(conn: TrioConnection) -> None:
    await conn.execute("CREATE TABLE kept (id bigint)")
    with trio.CancelScope() as scope:
        scope.cancel()
        await conn.fetch(INSERT, 1)
    assert scope.cancelled_caught
    assert await conn.fetch(Statement("count", "SELECT count(*) FROM kept")) == [(0,)]


async def test_cancelled_while_running_gets_the_result(conn: TrioConnection) -> None:
    with trio.move_on_after(0.01) as scope:
        rows = await conn.fetch(SLEEP, 0.1)
        assert scope.cancel_called
        assert rows == [("",)]
        await trio.lowlevel.checkpoint()
        pytest.fail("the next checkpoint raises")
    assert scope.cancelled_caught
    assert conn.reusable


async def test_cancelled_while_sending_gets_the_result(conn: TrioConnection) -> None:
    await conn.fetch(LENGTH, b"")
    lengths = []

    async def send() -> None:
        lengths.append(await conn.fetch(LENGTH, bytes(30_000_000)))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            with mute(backend(conn)):  # the socket's buffer fills, and the rest must wait
                nursery.start_soon(send)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
    assert lengths == [[(30_000_000,)]]
    assert conn.reusable


async def test_close_while_sending(conn: TrioConnection) -> None:
    async def send() -> None:
        with pytest.raises(DatabaseUnavailable, match="closed"):
            await conn.fetch(LENGTH, bytes(30_000_000))

    await conn.fetch(LENGTH, b"")
    with trio.fail_after(10), mute(backend(conn)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            conn.close_nowait()


async def test_acknowledged_is_stored_under_random_cancels(conn: TrioConnection) -> None:
    await conn.execute("CREATE TABLE kept (id bigint PRIMARY KEY)")
    rng = random.Random(1)
    acknowledged = set()
    for i in range(400):
        with trio.move_on_after(rng.random() * 0.0008):
            await trio.sleep(rng.random() * 0.0004)
            await conn.fetch(INSERT, i)
            acknowledged.add(i)
        assert conn.reusable
    stored = {row[0] for row in await conn.fetch(Statement("all", "SELECT id FROM kept"))}
    assert stored == acknowledged
    assert 0 < len(stored) < 400


async def test_cancelled_transaction_is_rolled_back(conn: TrioConnection) -> None:
    await conn.execute("CREATE TABLE kept (id bigint)")
    with trio.CancelScope() as scope:
        async with conn.transaction():
            await conn.fetch(INSERT, 1)
            scope.cancel()
            await conn.fetch(INSERT, 2)
    assert scope.cancelled_caught
    assert conn.reusable
    assert await conn.fetch(Statement("count", "SELECT count(*) FROM kept")) == [(0,)]


async def test_leaving_the_block_closes_even_when_cancelled(settings: ConnectionSettings) -> None:
    with trio.CancelScope() as scope:
        async with await connect(settings) as conn, conn.transaction():
            await conn.execute("SELECT 1")
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert conn.closed


async def test_mute_server_past_grace_costs_the_connection(settings: ConnectionSettings) -> None:
    conn = await connect(settings, grace=Grace(0.1))
    with mute(backend(conn)), trio.fail_after(5):
        with trio.move_on_after(0.01) as scope:
            await conn.fetch(SLEEP, 0.0)
            pytest.fail("the server said nothing")
        assert scope.cancelled_caught
    assert conn.closed


async def test_grace_is_capped_at_shutdown(settings: ConnectionSettings) -> None:
    grace = Grace(60)

    async def shut_down(fetching: trio.CancelScope) -> None:
        await trio.testing.wait_all_tasks_blocked()
        fetching.cancel()
        await trio.testing.wait_all_tasks_blocked()
        grace.limit(trio.current_time() + 0.05)  # the shield that already runs

    conn = await connect(settings, grace=grace)
    with mute(backend(conn)), trio.fail_after(5):
        async with trio.open_nursery() as nursery, trio.open_nursery() as fetching:
            fetching.start_soon(conn.fetch, SLEEP, 0.0)
            nursery.start_soon(shut_down, fetching.cancel_scope)
    assert conn.closed
    assert grace.deadline() <= trio.current_time()  # and those to come


# -- one statement behind another ---------------------------------------------------------------


TRANSACTION = Statement("transaction", "SELECT pg_current_xact_id()::text::bigint, $1::bigint")
DIVIDE = Statement("divide", "SELECT 1 / $1::integer")


async def fetch_both(
    conn: TrioConnection, first: tuple[Any, ...], second: tuple[Any, ...], **options: Any
) -> tuple[Any, Any]:
    """Send one behind the other; returns the rows of both, or their errors."""
    with suppress(DatabaseError):
        await conn.fetch(*second)  # what follows has to be prepared

    def follow() -> None:
        assert conn.takes_one_more(second[0])
        conn.send_behind_nowait(*second)
        assert not conn.takes_one_more(second[0])

    answers: list[Any] = []
    with trio.fail_after(10):
        for fetch in (partial(conn.fetch, *first, on_sent=follow, **options), conn.fetch_behind):
            try:
                answers.append(await fetch())
            except DatabaseError as error:
                answers.append(error)
            assert conn.first_is_answered
    return answers[0], answers[1]


async def test_a_statement_behind_another(conn: TrioConnection) -> None:
    for _ in range(2):
        [[one, a]], [[two, b]] = await fetch_both(conn, (TRANSACTION, 1), (TRANSACTION, 2))
        assert (a, b) == (1, 2)
        assert one != two, "both in one transaction"
        assert conn.reusable
    assert len(await conn.fetch(TRANSACTION, 3)) == 1


async def test_the_second_finds_what_the_first_has_committed(conn: TrioConnection) -> None:
    await conn.execute("CREATE TABLE kept (id bigint)")
    count = Statement("count", "SELECT count(*) FROM kept")
    assert await fetch_both(conn, (INSERT, 1), (count,)) == ([], [(1,)])


async def test_nobody_has_to_follow(conn: TrioConnection) -> None:
    sent: list[str] = []
    assert await conn.fetch(SLEEP, 0.0, on_sent=lambda: sent.append("yes")) == [("",)]
    assert sent == ["yes"]
    assert conn.reusable
    assert not conn.takes_one_more(SLEEP)


async def test_a_pipeline_that_was_begun_and_not_ended_costs_the_connection(
    conn: TrioConnection,
) -> None:
    conn.pgconn.enter_pipeline_mode()  # and the statement could not be sent
    assert not conn.reusable


async def test_what_is_not_prepared_can_not_follow(conn: TrioConnection) -> None:
    could: list[bool] = []
    await conn.fetch(SLEEP, 0.0, on_sent=lambda: could.append(conn.takes_one_more(LENGTH)))
    assert could == [False]


@pytest.mark.parametrize("failing", ["first", "second"])
async def test_of_two_each_fails_alone(conn: TrioConnection, failing: str) -> None:
    calls: list[tuple[Any, ...]] = [(DIVIDE, 0), (TRANSACTION, 2)]
    if failing == "first":
        error, rows = await fetch_both(conn, *calls)
    else:
        rows, error = await fetch_both(conn, *reversed(calls))
    assert isinstance(error, DatabaseError)
    assert error.sqlstate == "22012"
    assert rows[0][1] == 2
    assert conn.reusable


async def test_a_second_that_can_not_be_written_leaves_the_first_alone(
    conn: TrioConnection,
) -> None:
    await conn.fetch(TRANSACTION, 0)

    def follow() -> None:
        with pytest.raises(TypeError, match="transaction takes 1 parameters, got 0"):
            conn.send_behind_nowait(TRANSACTION)

    assert await conn.fetch(SLEEP, 0.0, on_sent=follow) == [("",)]
    assert conn.reusable


async def test_a_killed_backend_fails_both(conn: TrioConnection) -> None:
    kill = Statement("kill", "SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(10)::text")
    for answer in await fetch_both(conn, (kill,), (TRANSACTION, 2)):
        assert isinstance(answer, DatabaseUnavailable)
    assert not conn.reusable


async def test_the_deadline_of_the_first_is_not_the_second_s(conn: TrioConnection) -> None:
    first, second = await fetch_both(conn, (SLEEP, 30.0), (TRANSACTION, 2), deadline_seconds=0.05)
    assert "deadline of 0.05 s" in str(first)
    assert second[0][1] == 2
    assert conn.reusable


async def test_an_answer_that_nobody_fetches_costs_the_connection(conn: TrioConnection) -> None:
    await conn.fetch(TRANSACTION, 0)
    sent = partial(conn.send_behind_nowait, TRANSACTION, 2)
    assert await conn.fetch(SLEEP, 0.0, on_sent=sent) == [("",)]
    assert not conn.reusable


async def test_the_second_cancelled_while_it_runs_gets_its_rows(conn: TrioConnection) -> None:
    await conn.fetch(SLEEP, 0.0)
    with trio.fail_after(10), trio.CancelScope() as scope:
        await conn.fetch(TRANSACTION, 1, on_sent=partial(conn.send_behind_nowait, SLEEP, 0.05))
        await conn.wait_turn()
        scope.cancel()
        assert await conn.fetch_behind() == [("",)]
        await trio.lowlevel.checkpoint()
        pytest.fail("the next checkpoint raises")
    assert conn.reusable


# -- statement deadline ------------------------------------------------------------------------


async def test_deadline_cancels_on_the_server(settings: ConnectionSettings) -> None:
    async with await connect(evolve(settings, statement_timeout_ms=50)) as conn:
        with trio.fail_after(5):
            with pytest.raises(
                DatabaseUnavailable, match=r"sleep: .* deadline of 0.05 s"
            ) as caught:
                await conn.fetch(SLEEP, 30.0)
            assert caught.value.sqlstate == "57014"
            assert conn.reusable
            assert await conn.fetch(SLEEP, 0.0) == [("",)]


async def test_deadline_of_one_call(conn: TrioConnection) -> None:
    with trio.fail_after(5), pytest.raises(DatabaseUnavailable, match=r"deadline of 0\.05 s"):
        await conn.fetch(SLEEP, 30.0, deadline_seconds=0.05)
    assert conn.reusable


async def test_deadline_holds_for_cursors(settings: ConnectionSettings) -> None:
    async with await connect(evolve(settings, statement_timeout_ms=50)) as conn:
        with trio.fail_after(5), pytest.raises(DatabaseUnavailable, match=r"deadline of 0\.05 s"):
            await conn.execute("SELECT pg_sleep(30)")
        assert conn.reusable


async def test_deadline_of_a_mute_server(
    settings: ConnectionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen_trio.store.connection.CANCEL_SECONDS", 0.1)
    conn = await connect(settings)
    with mute(backend(conn)), trio.fail_after(5):
        with pytest.raises(DatabaseUnavailable, match=r"no answer within 0\.05 s") as caught:
            await conn.fetch(SLEEP, 0.0, deadline_seconds=0.05)
        assert caught.value.sqlstate is None
    assert conn.closed


async def test_server_enforces_the_limit_of_a_cancelled_client(
    settings: ConnectionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled task is past its own deadline: the server's ends the shielded statement."""
    monkeypatch.setattr("queen_trio.store.settings.SERVER_TIMEOUT_MARGIN_MS", 100)
    async with await connect(evolve(settings, statement_timeout_ms=100)) as conn:
        with trio.fail_after(5), trio.move_on_after(0.01):
            with pytest.raises(DatabaseUnavailable) as caught:
                await conn.fetch(SLEEP, 30.0)
            assert caught.value.sqlstate == "57014"
        assert conn.reusable


# -- connecting --------------------------------------------------------------------------------


async def test_nobody_listens(settings: ConnectionSettings) -> None:
    with pytest.raises(DatabaseUnavailable, match="connect to /nowhere"):
        await connect(evolve(settings, host="/nowhere"))
    with pytest.raises(DatabaseUnavailable, match="refused"):
        await connect(evolve(settings, host="127.0.0.1", port=1))


async def test_unknown_name(settings: ConnectionSettings) -> None:
    with pytest.raises(DatabaseUnavailable, match=r"connect to no-such-host\.invalid"):
        await connect(evolve(settings, host="no-such-host.invalid"))


async def test_silent_listener_is_bounded(settings: ConnectionSettings) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port = listener.socket.getsockname()[1]
        with trio.fail_after(5), pytest.raises(DatabaseUnavailable, match=r"within 0\.05 s"):
            await connect(
                evolve(settings, host="127.0.0.1", port=port, connect_timeout_seconds=0.05)
            )


async def test_server_gone_mute_after_login_is_bounded(
    cluster: Cluster, database: str, nursery: trio.Nursery
) -> None:
    settings = cluster.settings(database, tcp=True)

    async def forward_only_the_login(client: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream(settings.host, settings.port) as server:
            await server.send_all(await client.receive_some())
            async for data in server:
                await client.send_all(data)

    listeners = await nursery.start(trio.serve_tcp, forward_only_the_login, 0)
    port = listeners[0].socket.getsockname()[1]
    with trio.fail_after(5), pytest.raises(DatabaseUnavailable, match=r"within 0\.2 s"):
        await connect(evolve(settings, port=port, connect_timeout_seconds=0.2))


async def test_tcp_by_name_with_keepalives(cluster: Cluster, database: str) -> None:
    settings = evolve(cluster.settings(database, tcp=True), host="localhost")
    async with await connect(settings) as conn:
        shown = [
            await (await conn.execute(f"SHOW {name}")).fetchone()
            for name in (
                "tcp_keepalives_idle",
                "tcp_keepalives_interval",
                "tcp_keepalives_count",
                "tcp_user_timeout",
            )
        ]
    assert shown == [("10",), ("5",), ("3",), ("25000",)]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that signs itself, for the name localhost; its key lies beside it."""
    path = tmp_path_factory.mktemp("tls") / "server.crt"
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", path.with_suffix(".key"), "-out", path]
    subprocess.run(["openssl", *request.split(), *names, *files], check=True, capture_output=True)
    return path


@pytest.fixture
async def tls_settings(
    cluster: Cluster, database: str, certificate: Path, nursery: trio.Nursery
) -> ConnectionSettings:
    """How to reach `database` by TLS.

    It ends before the server, as with a pooler: not every build of PostgreSQL has TLS.
    """
    plain = cluster.settings(database, tcp=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))

    async def pump(source: trio.abc.ReceiveStream, sink: trio.abc.SendStream) -> None:
        async for data in source:
            await sink.send_all(data)

    async def serve(client: trio.SocketStream) -> None:
        assert len(await client.receive_some(8)) == 8  # SSLRequest
        await client.send_all(b"S")
        tls = trio.SSLStream(client, context, server_side=True, https_compatible=True)
        with suppress(trio.BrokenResourceError):  # the client may refuse our certificate
            await tls.do_handshake()
            server = await trio.open_tcp_stream(plain.host, plain.port)
            async with server, trio.open_nursery() as pumps:
                pumps.start_soon(pump, server, tls)
                await pump(tls, server)
                pumps.cancel_scope.cancel()

    listeners = await nursery.start(trio.serve_tcp, serve, 0)
    port = listeners[0].socket.getsockname()[1]
    return evolve(plain, host="localhost", port=port, use_ssl=True)


async def test_tls(tls_settings: ConnectionSettings, certificate: Path) -> None:
    trusting = evolve(tls_settings, ssl_root_cert=str(certificate))
    for settings in (trusting, evolve(tls_settings, ssl_reject_unauthorized=False)):
        async with await connect(settings) as conn:
            assert conn.pgconn.ssl_in_use
            assert await conn.fetch(LENGTH, bytes(1_000_000)) == [(1_000_000,)]

    with pytest.raises(DatabaseUnavailable, match="certificate verify failed"):
        await connect(tls_settings)  # the system's authorities don't know it
    with pytest.raises(DatabaseUnavailable, match="does not match host name"):
        await connect(evolve(trusting, host="127.0.0.1"))
    with pytest.raises(DatabaseUnavailable, match="does not exist"):
        await connect(evolve(tls_settings, ssl_root_cert=str(certificate.with_name("missing"))))


async def test_tls_refused_by_the_server(settings: ConnectionSettings, cluster: Cluster) -> None:
    plain = evolve(cluster.settings(tcp=True), use_ssl=True, ssl_reject_unauthorized=False)
    with pytest.raises(DatabaseUnavailable, match="does not support SSL"):
        await connect(plain)
