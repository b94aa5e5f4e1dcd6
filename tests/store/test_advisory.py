"""Advisory locks: given back on every way out, and no harm where one was lost (spec 8.21)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from structlog.testing import capture_logs

from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.jobs.retention import Retention
from queen_trio.store import advisory
from queen_trio.store.advisory import AdvisoryLock, try_advisory_lock
from queen_trio.store.connection import Statement, connect
from tests.store.calls import rows_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from queen_trio.store.connection import TrioConnection
    from queen_trio.store.pool import Pool
    from queen_trio.store.settings import ConnectionSettings

LOCK = AdvisoryLock.RETENTION
WORK = Statement("work", "SELECT 1")
SLOW = Statement("slow", "SELECT pg_sleep(30)::text")
BREAKS = "1 / (random() * 0)::integer = 1"
NOT_HELD = "pg_advisory_unlock reported not-held"
SECONDS = 10


@pytest.fixture
async def watcher(settings: ConnectionSettings) -> AsyncIterator[TrioConnection]:
    async with await connect(settings) as connection:
        yield connection


async def holders(watcher: TrioConnection) -> list[int]:
    """The backends that hold a lock of this database."""
    rows = await rows_of(
        watcher,
        "SELECT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
        " WHERE l.locktype = 'advisory' AND l.granted AND d.datname = current_database()",
        [],
    )
    return [pid for (pid,) in rows]


async def wait_free(watcher: TrioConnection) -> None:
    """Block until nobody holds a lock: the server notices a closed connection in its own time."""
    with trio.fail_after(SECONDS):
        while await holders(watcher):
            await trio.sleep(0.005)


class CancelAt(trio.abc.Instrument):
    """Cancels a scope before the n-th step that one task takes."""

    def __init__(self, step: int, scope: trio.CancelScope) -> None:
        self.left = step
        self.scope = scope
        self.task = trio.lowlevel.current_task()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


class TestWaysOut:
    async def test_success(self, pool: Pool, watcher: TrioConnection) -> None:
        async with try_advisory_lock(pool, LOCK) as conn:
            assert conn is not None
            assert await holders(watcher) == [conn.info.backend_pid]
        assert await holders(watcher) == []
        assert pool.statistics().idle == 1

    async def test_somebody_else_has_it(self, pool: Pool, watcher: TrioConnection) -> None:
        async with try_advisory_lock(pool, LOCK) as first:
            async with try_advisory_lock(pool, LOCK) as second:
                assert (first is None, second is None) == (False, True)
            assert len(await holders(watcher)) == 1
            async with try_advisory_lock(pool, AdvisoryLock.STATS) as other:
                assert other is not None

    async def test_an_error_of_ours(self, pool: Pool, watcher: TrioConnection) -> None:
        with pytest.raises(ZeroDivisionError):
            async with try_advisory_lock(pool, LOCK):
                raise ZeroDivisionError
        assert await holders(watcher) == []

    async def test_an_error_of_the_database(self, pool: Pool, watcher: TrioConnection) -> None:
        async def work() -> None:
            async with try_advisory_lock(pool, LOCK) as conn:
                assert conn is not None
                await conn.execute("SELECT 1 / 0")

        with pytest.raises(DatabaseError, match="division by zero"):
            await work()
        assert await holders(watcher) == []

    async def test_a_transaction_left_open(self, pool: Pool, watcher: TrioConnection) -> None:
        async with try_advisory_lock(pool, LOCK) as conn:
            assert conn is not None
            await conn.execute("BEGIN")
        await wait_free(watcher)
        assert pool.statistics().closed_total == 1

    async def test_cancellation_costs_no_connection(
        self, pool: Pool, watcher: TrioConnection
    ) -> None:
        with trio.CancelScope() as scope:
            async with try_advisory_lock(pool, LOCK) as conn:
                assert conn is not None
                scope.cancel()
                await conn.fetch(WORK)
        assert scope.cancelled_caught
        assert await holders(watcher) == []
        assert (pool.statistics().idle, pool.statistics().closed_total) == (1, 0)

    async def test_cancellation_at_each_step(self, pool: Pool, watcher: TrioConnection) -> None:
        steps = 0
        finished = False
        while not finished:
            steps += 1
            with trio.CancelScope() as scope:
                instrument = CancelAt(steps, scope)
                trio.lowlevel.add_instrument(instrument)
                try:
                    async with try_advisory_lock(pool, LOCK) as conn:
                        assert conn is not None
                        await conn.fetch(WORK)
                        await trio.lowlevel.checkpoint()
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            finished = instrument.left > 0
            await wait_free(watcher)
            assert pool.statistics().in_use == 0
        assert steps > 4
        assert not scope.cancelled_caught

    async def test_cancellation_while_the_server_works(
        self, pool: Pool, watcher: TrioConnection
    ) -> None:
        """A statement that outlives GRACE costs the connection, and so the lock is free."""
        pool.grace.seconds = 0.05

        async def hold() -> None:
            async with try_advisory_lock(pool, LOCK) as conn:
                assert conn is not None
                await conn.fetch(SLOW)

        with trio.fail_after(SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hold)
                while not await holders(watcher):
                    await trio.sleep(0.005)
                nursery.cancel_scope.cancel()
            # Its backend notices the closed connection when it next speaks: a server's business.
            for pid in await holders(watcher):
                await watcher.execute("SELECT pg_terminate_backend(%s)", [pid])
            await wait_free(watcher)
        assert pool.statistics().closed_total == 1

    async def test_a_killed_backend(self, pool: Pool, watcher: TrioConnection) -> None:
        async def work() -> None:
            async with try_advisory_lock(pool, LOCK) as conn:
                assert conn is not None
                await watcher.execute("SELECT pg_terminate_backend(%s)", [conn.info.backend_pid])

        with pytest.raises(DatabaseUnavailable):
            await work()
        await wait_free(watcher)
        async with try_advisory_lock(pool, LOCK) as conn:
            assert conn is not None


class TestLost:
    async def test_it_is_a_warning(self, pool: Pool) -> None:
        with capture_logs() as logs:
            async with try_advisory_lock(pool, LOCK) as conn:
                assert conn is not None
                await conn.execute("SELECT pg_advisory_unlock_all()")
        assert [(line["event"], line["log_level"], line["lock"]) for line in logs] == [
            (NOT_HELD, "warning", "retention")
        ]
        assert pool.statistics().idle == 1

    @pytest.mark.parametrize(
        ("statement", "sql"),
        [
            ("_TRY_LOCK", f"SELECT pg_try_advisory_lock($1::bigint) AND {BREAKS}"),
            ("_UNLOCK", f"SELECT {BREAKS} AND $1::bigint > 0"),
        ],
    )
    async def test_an_unclear_answer_ends_the_session(
        self,
        pool: Pool,
        watcher: TrioConnection,
        monkeypatch: pytest.MonkeyPatch,
        statement: str,
        sql: str,
    ) -> None:
        """These locks outlive an error of the statement that takes or returns them."""  # fmt: skip
        monkeypatch.setattr(advisory, statement, Statement("breaks", sql))
        with pytest.raises(DatabaseError, match="division by zero"):
            async with try_advisory_lock(pool, LOCK):
                pass
        await wait_free(watcher)
        assert pool.statistics().closed_total == 1


class TestRetention:
    async def test_another_one_takes_over_when_the_holder_dies(
        self, settings: ConnectionSettings, pool: Pool, watcher: TrioConnection
    ) -> None:
        retention = Retention(pool, 30)
        async with await connect(settings) as holder:
            await holder.execute("SELECT pg_advisory_lock(%s)", [LOCK.value])
            await retention.run()
            assert retention.statistics.cycles == 0, "skipped, not waited"
            await watcher.execute("SELECT pg_terminate_backend(%s)", [holder.info.backend_pid])
            await wait_free(watcher)
            await retention.run()
            assert retention.statistics.cycles == 1

    async def test_a_holder_that_is_killed_in_a_cycle_fails_only_that(
        self, pool: Pool, watcher: TrioConnection
    ) -> None:
        """The job's runner sees the error; the next cycle runs on another connection."""
        retention = Retention(pool, 30)
        await watcher.execute("BEGIN")
        await watcher.execute("LOCK TABLE queen.queues")

        async def kill() -> None:
            while not (pids := await holders(watcher)):
                await trio.sleep(0.005)
            await watcher.execute("SELECT pg_terminate_backend(%s)", [pids[0]])

        with trio.fail_after(SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                with pytest.raises(DatabaseUnavailable):
                    await retention.run()
        await watcher.execute("ROLLBACK")
        await wait_free(watcher)
        await retention.run()
        assert retention.statistics.cycles == 1
