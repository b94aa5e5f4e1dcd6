"""What remains when the broker, the server or its shell is killed."""

# ruff: noqa: ASYNC240 - a look at a local file may block a test

from __future__ import annotations

import os
import signal

import psutil
import pytest
import trio

from queen_trio.embedded import EmbeddedError, open_embedded, server, supervisor
from queen_trio.grace import Grace

pytestmark = pytest.mark.usefixtures("quick_restarts")


@pytest.fixture
def quick_restarts(monkeypatch):
    monkeypatch.setattr(server, "RESTART_BACKOFF", 0.01)


def shell_of(pid: int) -> int:
    parent = psutil.Process(pid).ppid()
    assert psutil.Process(parent).name() == "sh"
    return parent


async def broker_is_ready(broker) -> tuple[str, int]:
    line = await trio.to_thread.run_sync(broker.stdout.readline)
    assert line, await trio.to_thread.run_sync(broker.stderr.read)
    host, pid = line.rsplit(maxsplit=1)
    return host, int(pid)


async def test_no_server_outlives_a_killed_broker_and_data_survives(
    place, start_broker, until, gone, sql
):
    broker = start_broker(place / "data")
    host, pid = await broker_is_ready(broker)
    sql(host, "create table kept as select 42 as answer")
    broker.kill()
    await until(lambda: gone(pid))
    async with open_embedded(place / "data") as embedded:
        assert sql(embedded, "select answer from kept") == [(42,)]


async def test_the_next_start_may_come_at_once_after_a_kill(place, start_broker, gone, sql):
    broker = start_broker(place / "data")
    _, pid = await broker_is_ready(broker)
    broker.kill()
    async with open_embedded(place / "data") as embedded:
        assert gone(pid)
        assert sql(embedded, "select 1") == [(1,)]


async def test_an_orphan_whose_shell_was_killed_too_is_stopped_by_the_next_start(
    place, start_broker, gone, sql
):
    broker = start_broker(place / "data")
    host, pid = await broker_is_ready(broker)
    sql(host, "create table kept as select 42 as answer")
    shell = psutil.Process(shell_of(pid))
    others = [child for child in shell.children() if child.pid != pid]
    for process in (shell, *others):
        process.kill()
    broker.kill()
    await trio.to_thread.run_sync(broker.wait)
    assert not gone(pid), "nobody was left to stop it"
    async with open_embedded(place / "data") as embedded:
        assert gone(pid)
        assert sql(embedded, "select answer from kept") == [(42,)]


async def test_an_orphan_that_does_not_stop_is_killed(place, start_broker, gone, monkeypatch, sql):
    monkeypatch.setattr("queen_trio.embedded.orphans.ASK_AFTER", 0.1)
    monkeypatch.setattr("queen_trio.embedded.orphans.KILL_AFTER", 0.3)
    broker = start_broker(place / "data")
    _, pid = await broker_is_ready(broker)
    os.kill(pid, signal.SIGSTOP)
    broker.kill()
    async with open_embedded(place / "data") as embedded:
        assert gone(pid)
        assert sql(embedded, "select 1") == [(1,)]


async def test_a_broker_killed_during_initdb_does_not_block_the_next(
    place, start_broker, endless_initdb, until, sql
):
    broker = start_broker(place / "data", endless_initdb)
    await until((place / "data" / "postgres.initialising" / "PG_VERSION").exists)
    broker.kill()
    async with open_embedded(place / "data") as embedded:
        assert sql(embedded, "select 1") == [(1,)]
    assert not (place / "data" / "postgres.initialising").exists()


async def test_a_killed_broker_leaves_no_short_socket_directory(place, start_broker, until):
    broker = start_broker(place / ("x" * 120))
    host, _ = await broker_is_ready(broker)
    assert os.path.isdir(host)
    broker.kill()
    await until(lambda: not os.path.exists(host))


async def test_sigterm_ends_a_broker_cleanly(place, start_broker, gone):
    broker = start_broker(place / "data")
    _, pid = await broker_is_ready(broker)
    broker.terminate()
    assert await trio.to_thread.run_sync(broker.wait) == 0
    assert gone(pid)


@pytest.mark.parametrize("name", ["data", "x" * 120], ids=["short", "long"])
async def test_a_server_that_dies_is_restarted_where_it_was(place, name, until, sql):
    async with open_embedded(place / name) as embedded:
        sql(embedded, "create table kept as select 42 as answer")
        host, first = embedded.host, embedded.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: embedded.pid != first)
        assert embedded.host == host
        assert sql(embedded, "select answer from kept") == [(42,)]
        assert psutil.pid_exists(embedded.pid)
    assert not os.path.exists(place / name / "postgres" / "postmaster.pid")


async def test_a_server_that_dies_twice_ends_the_broker(place, until):
    with pytest.raises(  # noqa: PT012 - the body is cancelled
        EmbeddedError, match=r"died \(status 137\) again.*postgres\.log"
    ):
        async with open_embedded(place / "data") as embedded:
            first = embedded.pid
            os.kill(first, signal.SIGKILL)
            await until(lambda: embedded.pid != first)
            os.kill(embedded.pid, signal.SIGKILL)
            await trio.sleep_forever()


async def test_a_death_long_after_a_restart_is_a_new_one(place, until, monkeypatch):
    monkeypatch.setattr(server, "RESTART_PROVEN_AFTER", 0)
    async with open_embedded(place / "data") as embedded:
        for _ in range(3):
            last = embedded.pid
            os.kill(last, signal.SIGKILL)
            await until(lambda last=last: embedded.pid != last)


async def test_a_server_that_cannot_be_restarted_ends_the_broker(place):
    with pytest.raises(EmbeddedError, match=r"postgres\.log says"):  # noqa: PT012 - as above
        async with open_embedded(place / "data") as embedded:
            (place / "data" / "postgres" / "global" / "pg_control").unlink()
            os.kill(embedded.pid, signal.SIGKILL)
            await trio.sleep_forever()


async def test_a_killed_shell_leaves_no_second_server(place, until, gone, sql):
    async with open_embedded(place / "data") as embedded:
        first = embedded.pid
        os.kill(shell_of(first), signal.SIGKILL)
        await until(lambda: embedded.pid != first)
        assert gone(first)
        assert sql(embedded, "select 1") == [(1,)]


async def test_a_server_that_does_not_stop_is_killed_and_loses_nothing(
    place, until, gone, monkeypatch, sql
):
    monkeypatch.setattr(supervisor, "STOP_DEADLINE", 0.2)
    async with open_embedded(place / "data") as embedded:
        sql(embedded, "create table kept as select 42 as answer")
        pid = embedded.pid
        os.kill(pid, signal.SIGSTOP)
    await until(lambda: gone(pid))  # it has let the lock go: see below
    async with open_embedded(place / "data") as embedded:
        assert sql(embedded, "select answer from kept") == [(42,)]


async def test_the_end_of_a_shutdown_kills_a_server_that_does_not_stop(place, until, gone, sql):
    grace = Grace()
    async with open_embedded(place / "data", grace=grace) as embedded:
        sql(embedded, "create table kept as select 42 as answer")
        processes = [psutil.Process(embedded.pid), *psutil.Process(embedded.pid).children()]
        for process in processes:
            process.suspend()
        limit = trio.current_time() + 0.2
        grace.limit(limit)
    assert trio.current_time() < limit + 4, "far from the 10 s it has otherwise"
    # They were killed, and have let the lock go; the kernel takes them off its list right after.
    await until(lambda: all(gone(process.pid) for process in processes))
    async with open_embedded(place / "data") as embedded:
        assert sql(embedded, "select answer from kept") == [(42,)]
