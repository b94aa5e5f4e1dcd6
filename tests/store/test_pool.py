"""The pool: who gets a connection when, and how it heals."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
from attrs import evolve

from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.store.connection import Statement, connect
from queen_trio.store.pool import (
    BACKOFF_MAX_SECONDS,
    BEHIND_SECONDS,
    CONCURRENT_CONNECTS,
    IDLE_SECONDS,
    FirstLasts,
    Pool,
    Sent,
    backoff_seconds,
    open_pool,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from trio.testing import MockClock

    from queen_trio.store.connection import TrioConnection
    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster

ONE = Statement("one", "SELECT 1")
BACKEND = Statement("backend", "SELECT pg_backend_pid()")
SLEEP = Statement("sleep", "SELECT pg_sleep($1::float8)::text")


async def hold(pool: Pool, count: int, nursery: trio.Nursery) -> Callable[[], None]:
    """Take `count` connections and keep them until the returned function is called."""
    release = trio.Event()

    async def keep(task_status: trio.TaskStatus[None]) -> None:
        async with pool.acquire():
            task_status.started()
            await release.wait()

    for _ in range(count):
        await nursery.start(keep)
    return release.set


# -- taking and putting back -------------------------------------------------------------------


async def test_opens_lazily_and_reuses_the_last_one(pool: Pool) -> None:
    assert pool.statistics().opened_total == 0
    ((first,),) = await pool.fetch(BACKEND)
    assert await pool.fetch(BACKEND) == [(first,)]
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(pool.fetch, SLEEP, 0.01)
    async with pool.acquire() as conn:
        last_used = conn
    async with pool.acquire() as conn:
        assert conn is last_used
    assert pool.statistics().in_use == 0
    assert pool.statistics().idle <= 3


async def test_never_more_than_its_size(settings: ConnectionSettings, cluster: Cluster) -> None:
    async with open_pool(settings, 3) as pool:
        most = 0
        all_in_use = trio.Event()

        async def work() -> None:
            nonlocal most
            async with pool.acquire() as conn:
                most = max(most, pool.statistics().in_use)
                if most == pool.size:
                    all_in_use.set()
                await all_in_use.wait()
                await conn.fetch(ONE)

        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(work)
        statistics = pool.statistics()
        assert most == statistics.idle == statistics.opened_total == 3
        backends = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{settings.database}'"
        assert cluster.execute(backends) == [(3,)]


async def test_waiters_are_served_in_order(settings: ConnectionSettings) -> None:
    served = []

    async def work(i: int) -> None:
        async with pool.acquire() as conn:
            served.append(i)
            await conn.fetch(ONE)

    async with open_pool(settings, 1) as pool, trio.open_nursery() as nursery:
        release = await hold(pool, 1, nursery)
        for i in range(20):
            nursery.start_soon(work, i)
            await trio.testing.wait_all_tasks_blocked()
        release()
    assert served == list(range(20))


async def test_exhausted(settings: ConnectionSettings) -> None:
    async with open_pool(settings, 2) as pool, trio.open_nursery() as nursery:
        release = await hold(pool, 2, nursery)
        with pytest.raises(DatabaseUnavailable, match=r"within 0\.01 s \(size 2, .*in use 2"):
            await pool.fetch(ONE, deadline_seconds=0.01)
        assert pool.statistics().timeouts_total == 1
        assert pool.statistics().waiting == 0
        release()


async def test_acquire_is_a_point_of_cancellation(pool: Pool) -> None:
    await pool.fetch(ONE)
    with trio.CancelScope() as scope:
        scope.cancel()
        async with pool.acquire():
            pytest.fail("cancelled before")
    assert scope.cancelled_caught
    assert pool.statistics().idle == 1


async def test_cancelled_in_the_moment_of_the_handover(settings: ConnectionSettings) -> None:
    async def hand_over_and_cancel(task_status: trio.TaskStatus[None]) -> None:
        async with pool.acquire():
            task_status.started()
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()  # wakes the waiter, and before it runs it is handed the connection

    async with open_pool(settings, 1) as pool, trio.open_nursery() as nursery:
        await nursery.start(hand_over_and_cancel)
        with trio.CancelScope() as scope:
            await pool.fetch(ONE)
        assert scope.cancelled_caught
        assert pool.statistics().idle == 1
        assert pool.statistics().in_use == 0


async def test_nothing_leaks_under_random_cancels(settings: ConnectionSettings) -> None:
    rng = random.Random(7)
    done = 0

    async def work(pool: Pool) -> None:
        nonlocal done
        for _ in range(100):
            with trio.move_on_after(rng.random() * 0.004):
                async with pool.acquire() as conn:
                    await conn.fetch(ONE)
                    await trio.sleep(rng.random() * 0.001)
                    done += 1

    async with open_pool(settings, 3) as pool:
        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(work, pool)
        await wait_until(lambda: pool.statistics().connecting == 0)
        statistics = pool.statistics()
        assert (statistics.in_use, statistics.waiting) == (0, 0)
        assert statistics.idle == statistics.opened_total - statistics.closed_total <= 3
    assert 0 < done < 1200


async def test_a_dirty_connection_is_not_handed_on(pool: Pool) -> None:
    async with pool.acquire() as conn:
        await conn.execute("BEGIN")
    assert conn.closed
    async with pool.acquire() as other:
        assert other is not conn
        assert other.reusable


async def test_psycopg_errors_leave_as_ours(pool: Pool) -> None:
    with pytest.raises(DatabaseError, match="does not exist") as caught:
        async with pool.acquire() as conn, conn.cursor() as cursor:
            await cursor.execute("SELECT * FROM missing")
    assert caught.value.sqlstate == "42P01"
    assert isinstance(caught.value.__cause__, psycopg.Error)
    assert pool.statistics().idle == 1


async def test_lost_statement_is_retried_once_on_a_fresh_connection(pool: Pool) -> None:
    async def forget(conn: TrioConnection) -> None:
        await conn.fetch(ONE)
        await conn.execute("DEALLOCATE ALL")

    async with pool.acquire() as first, pool.acquire() as second:
        await forget(first)
        await forget(second)
    assert await pool.fetch(ONE) == [(1,)]
    assert pool.statistics().opened_total == 3


# -- healing -----------------------------------------------------------------------------------


async def test_killed_idle_connection_is_never_seen(pool: Pool, cluster: Cluster) -> None:
    ((pid,),) = await pool.fetch(BACKEND)
    cluster.execute(f"SELECT pg_terminate_backend({pid}, 5000)")
    assert await pool.fetch(ONE) == [(1,)]
    assert pool.statistics().closed_total == 1


async def test_killed_busy_connection_fails_one_request(pool: Pool, cluster: Cluster) -> None:
    async with pool.acquire() as conn:
        cluster.execute(f"SELECT pg_terminate_backend({conn.pgconn.backend_pid}, 5000)")
        with pytest.raises(DatabaseUnavailable):
            await conn.fetch(ONE)
    assert await pool.fetch(ONE) == [(1,)]


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_restarted_server(own_cluster: Cluster, end: str) -> None:
    """A request during the outage waits, and is answered once the server is back."""
    async with open_pool(own_cluster.settings(), 5) as pool:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(pool.fetch, SLEEP, 0.01)
        getattr(own_cluster, end)()

        with pytest.raises(DatabaseUnavailable, match=r"last attempt: connect to"):
            await pool.fetch(ONE, deadline_seconds=0.05)
        assert pool.last_error is not None
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(pool.fetch, ONE)
            await wait_until(lambda: pool.statistics().connect_failures_total >= 2)
            await trio.to_thread.run_sync(own_cluster.start)
        assert pool.last_error is None
        assert pool.statistics().idle <= 5


async def test_attempts_are_spaced_and_single(settings: ConnectionSettings) -> None:
    """However many wait: a burst when the outage begins, then one attempt at a time."""
    attempts: list[float] = []

    async def hang_up(stream: trio.SocketStream) -> None:
        attempts.append(trio.current_time())
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, hang_up, [listener])
        port = listener.socket.getsockname()[1]
        async with open_pool(evolve(settings, host="127.0.0.1", port=port), 50) as pool:

            async def ask() -> None:
                with pytest.raises(DatabaseUnavailable):
                    await pool.fetch(ONE, deadline_seconds=0.8)

            async with trio.open_nursery() as asking:
                for _ in range(100):
                    asking.start_soon(ask)
            # At 0, after 0.125–0.25 s, and after a further 0.25–0.5 s.
            assert CONCURRENT_CONNECTS < len(attempts) <= CONCURRENT_CONNECTS + 2
            assert attempts[CONCURRENT_CONNECTS] - attempts[0] >= 0.12
            assert pool.statistics().waiting == 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("failures", "least", "most"),
    [(1, 0.125, 0.25), (2, 0.25, 0.5), (3, 0.5, 1.0), (6, 2.5, 5.0), (10_000, 2.5, 5.0)],
)
def test_backoff(failures: int, least: float, most: float) -> None:
    assert backoff_seconds(failures, 0.0) == least
    assert backoff_seconds(failures, 1.0) == most <= BACKOFF_MAX_SECONDS


async def test_an_attempt_outlives_the_request_that_caused_it(pool: Pool) -> None:
    with pytest.raises(DatabaseUnavailable):
        await pool.fetch(ONE, deadline_seconds=0)
    await wait_until(lambda: pool.statistics().connecting == 0)
    # Nobody waited any more when it was this attempt's turn, or it filled the pool.
    assert pool.statistics().idle == pool.statistics().opened_total <= 1


# -- size --------------------------------------------------------------------------------------


async def test_capped_at_what_the_server_admits(
    settings: ConnectionSettings, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen_trio.store.pool.MAINTENANCE_SECONDS", 0.05)
    role = f"limited_{settings.database}"
    cluster.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 3")
    try:
        async with open_pool(evolve(settings, user=role), 10) as pool:
            async with trio.open_nursery() as nursery:
                release = await hold(pool, 3, nursery)
                for _ in range(5):
                    nursery.start_soon(pool.fetch, ONE)
                await wait_until(lambda: pool.statistics().connect_failures_total > 0)
                assert 3 <= pool.statistics().limit < 10
                assert pool.statistics().in_use == 3
                release()
            # The server gives more: the pool grows back.
            cluster.execute(f"ALTER ROLE {role} CONNECTION LIMIT 6")
            await wait_until(lambda: pool.statistics().limit >= 6)
            async with trio.open_nursery() as nursery:
                (await hold(pool, 6, nursery))()
            assert pool.statistics().idle == 6
    finally:
        cluster.execute(f"DROP ROLE {role}")


async def test_full_from_the_start(settings: ConnectionSettings, cluster: Cluster) -> None:
    role = f"shut_out_{settings.database}"
    cluster.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 0")
    try:
        async with open_pool(evolve(settings, user=role), 10) as pool:
            with pytest.raises(DatabaseUnavailable, match="too many connections"):
                await pool.fetch(ONE, deadline_seconds=0.2)
            assert pool.last_error is not None
            assert pool.last_error.sqlstate == "53300"
            cluster.execute(f"ALTER ROLE {role} CONNECTION LIMIT 1")
            assert await pool.fetch(ONE) == [(1,)]
    finally:
        cluster.execute(f"DROP ROLE {role}")


async def test_surplus_idle_connections_are_closed(pool: Pool, mock_clock: MockClock) -> None:
    mock_clock.rate = 1.0  # time passes, and jumps where we say
    async with trio.open_nursery() as nursery:
        (await hold(pool, 3, nursery))()
    assert pool.statistics().idle == 3
    mock_clock.jump(IDLE_SECONDS / 2)
    await pool.fetch(ONE)  # keeps one of them young
    mock_clock.jump(IDLE_SECONDS / 2 + 10)
    await wait_until(lambda: pool.statistics().idle == 1)
    assert pool.statistics().closed_total == 2


# -- the end -----------------------------------------------------------------------------------


async def test_close_fails_waiters_and_frees_all(
    settings: ConnectionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen_trio.store.pool.CLOSE_SECONDS", 0.05)
    outcomes: list[str] = []

    async def ask(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(DatabaseUnavailable) as caught:
            await call()
        outcomes.append(str(caught.value))

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery, open_pool(settings, 1) as pool:
            nursery.start_soon(ask, lambda: pool.fetch(SLEEP, 30.0))
            await wait_until(lambda: pool.statistics().in_use == 1)
            nursery.start_soon(ask, lambda: pool.fetch(ONE))
            await wait_until(lambda: pool.statistics().waiting == 1)
    assert "the connection pool is closed" in outcomes[0]
    assert "the connection was closed" in outcomes[1]
    with pytest.raises(DatabaseUnavailable, match="pool is closed"):
        await pool.fetch(ONE)


async def test_close_while_connections_are_being_opened(settings: ConnectionSettings) -> None:
    """An attempt that finishes although it was cancelled must not leave its connection behind."""
    opened: list[Pool] = []
    for tenths in range(400):  # 40 moments, and later ones until a connection had been opened
        if tenths >= 40 and any(pool.statistics().opened_total for pool in opened):
            break
        with trio.move_on_after(tenths / 10_000):
            async with open_pool(settings, 2) as pool:
                opened.append(pool)
                async with pool.acquire():
                    await trio.sleep_forever()
    for pool in opened:
        statistics = pool.statistics()
        assert statistics.opened_total == statistics.closed_total
        assert (statistics.idle, statistics.in_use, statistics.connecting) == (0, 0, 0)
    assert any(pool.statistics().opened_total for pool in opened)


async def test_close_waits_for_a_running_statement(settings: ConnectionSettings) -> None:
    rows: list[object] = []

    async def ask() -> None:
        rows.append(await pool.fetch(SLEEP, 0.1))

    async with trio.open_nursery() as nursery, open_pool(settings, 1) as pool:
        nursery.start_soon(ask)
        await wait_until(lambda: pool.statistics().in_use == 1)
    assert rows == [[("",)]]


# -- who doesn't wait --------------------------------------------------------------------------


async def test_the_impatient_do_not_wait_for_a_server_that_is_away(
    settings: ConnectionSettings, tmp_path: Path
) -> None:
    """They have another way (the spool); the others wait beside them."""
    nowhere = evolve(settings, host=str(tmp_path))
    patient: list[DatabaseUnavailable] = []

    async def wait(pool: Pool) -> None:
        try:
            await pool.fetch(ONE, deadline_seconds=0.5)
        except DatabaseUnavailable as error:
            patient.append(error)

    async with open_pool(nowhere, 2) as pool:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, pool)
            for _ in range(3):
                with pytest.raises(DatabaseUnavailable, match="PostgreSQL can't be reached"):
                    await pool.fetch(ONE, deadline_seconds=60, impatient=True)
            assert not patient
        assert "no connection within" in str(patient[0])


async def test_the_impatient_wait_while_the_pool_is_busy(settings: ConnectionSettings) -> None:
    async with open_pool(settings, 1) as pool, trio.open_nursery() as nursery:
        release = await hold(pool, 1, nursery)
        rows: list[object] = []

        async def ask() -> None:
            rows.append(await pool.fetch(ONE, impatient=True))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert rows == []
        release()
        await wait_until(lambda: bool(rows))
    assert rows == [[(1,)]]


async def test_the_impatient_notice_that_the_server_is_back(own_cluster: Cluster) -> None:
    async with open_pool(own_cluster.settings(), 2) as pool:
        assert await pool.fetch(ONE, impatient=True) == [(1,)]
        await trio.to_thread.run_sync(own_cluster.stop)
        with pytest.raises(DatabaseUnavailable):
            await pool.fetch(ONE, impatient=True)
        await trio.to_thread.run_sync(own_cluster.start)
        with trio.fail_after(10):
            while True:
                try:
                    assert await pool.fetch(ONE, impatient=True) == [(1,)]
                    break
                except DatabaseUnavailable:
                    await trio.sleep(0.01)


# -- one statement behind another ----------------------------------------------------------------


class Undone:
    """Takes back nothing, but notes what it should have."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    async def __call__(self, connection: TrioConnection, rows: list[tuple[Any, ...]]) -> None:
        assert await connection.fetch(ONE) == [(1,)]  # it can be used for that
        self.rows += rows


LOCK = Statement("lock", "SELECT pg_advisory_xact_lock(7)::text")


@asynccontextmanager
async def locked(settings: ConnectionSettings) -> AsyncIterator[None]:
    """Hold the lock that LOCK waits for."""
    async with await connect(settings) as other, other.transaction():
        await other.fetch(LOCK)
        yield


async def test_two_statements_share_a_connection_which_comes_back_once(
    settings: ConnectionSettings,
) -> None:
    undone = Undone()
    async with open_pool(settings, 1) as pool:
        [(backend,)] = await pool.fetch(BACKEND)
        answers: list[int] = []

        async def follow(sent: Sent) -> None:
            [(one,)] = await sent.fetch(BACKEND, undo=undone)
            answers.append(one)

        with trio.fail_after(10):
            for _ in range(20):
                async with trio.open_nursery() as nursery:
                    await pool.fetch(SLEEP, 0.0, on_sent=partial(nursery.start_soon, follow))
                assert (pool.statistics().idle, pool.statistics().in_use) == (1, 0)
        assert answers == [backend] * 20
    assert undone.rows == []


async def test_what_comes_too_late_to_follow_runs_by_itself(settings: ConnectionSettings) -> None:
    async with open_pool(settings, 1) as pool:
        sent: list[Sent] = []
        await pool.fetch(ONE, on_sent=sent.append)
        assert await sent[0].fetch(ONE, undo=Undone()) == [(1,)]
        assert (pool.statistics().idle, pool.statistics().in_use) == (1, 0)


async def test_a_follower_cancelled_before_it_is_sent_leaves_nothing(
    settings: ConnectionSettings,
) -> None:
    undone = Undone()
    async with open_pool(settings, 1) as pool:
        await pool.fetch(BACKEND)

        async def follow(sent: Sent) -> None:
            with trio.CancelScope() as scope:
                scope.cancel()
                await sent.fetch(BACKEND, undo=undone)
            assert scope.cancelled_caught

        async with trio.open_nursery() as nursery:
            await pool.fetch(SLEEP, 0.02, on_sent=partial(nursery.start_soon, follow))
        assert (pool.statistics().idle, pool.statistics().in_use) == (1, 0)
    assert undone.rows == []


@pytest.mark.parametrize("leaves", ["patience", "cancel"])
async def test_who_leaves_before_its_turn_has_it_undone(
    settings: ConnectionSettings, leaves: str
) -> None:
    undone = Undone()
    async with open_pool(settings, 1) as pool:
        for statement in (ONE, BACKEND, LOCK):
            await pool.fetch(statement)
        left = trio.Event()

        async def follow(sent: Sent) -> None:
            with trio.CancelScope() as scope:
                if leaves == "cancel":
                    scope.deadline = trio.current_time() + BEHIND_SECONDS / 4
                with suppress(FirstLasts):
                    await sent.fetch(BACKEND, undo=undone)
                    pytest.fail("the first one is not answered yet")
            assert scope.cancelled_caught == (leaves == "cancel")
            left.set()

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery, locked(settings):
                nursery.start_soon(
                    partial(pool.fetch, LOCK, on_sent=partial(nursery.start_soon, follow))
                )
                await left.wait()
                assert (undone.rows, pool.statistics().in_use) == ([], 1)
            await wait_until(lambda: pool.statistics().idle == 1)
        assert undone.rows == await pool.fetch(BACKEND)


async def test_the_pool_closes_when_what_is_behind_is_undone(settings: ConnectionSettings) -> None:
    """A shutdown in which a push is committed late still gives back what was claimed behind it."""
    undone = Undone()
    pools: list[Pool] = []

    async def run() -> None:
        async with trio.open_nursery() as nursery, open_pool(settings, 1) as pool:
            pools.append(pool)
            for statement in (ONE, BACKEND):
                await pool.fetch(statement)
            left = trio.Event()

            async def follow(sent: Sent) -> None:
                with pytest.raises(FirstLasts):
                    await sent.fetch(BACKEND, undo=undone)
                left.set()

            on_sent = partial(nursery.start_soon, follow)
            nursery.start_soon(partial(pool.fetch, LOCK, on_sent=on_sent))
            await left.wait()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery, locked(settings):
            nursery.start_soon(run)
            await wait_until(lambda: bool(pools) and pools[0]._closed)
            assert undone.rows == []
    assert len(undone.rows) == 1
