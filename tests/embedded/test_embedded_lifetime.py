"""Start, use, stop, refuse: the private PostgreSQL on its good days."""

# ruff: noqa: ASYNC240 - a look at a local file may block a test

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil
import pytest
import trio
import trio.testing

from queen_trio.embedded import EmbeddedError, locks, open_embedded, progress, supervisor

if TYPE_CHECKING:
    from pathlib import Path


def held(data_dir: Path) -> bool:
    """Whether any PostgreSQL process of the directory lives."""
    descriptor = locks.lock_nowait(data_dir / "pg.lock")
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def is_private(directory: str) -> bool:
    return os.stat(directory).st_mode & 0o077 == 0


async def test_the_first_start_makes_a_cluster_and_the_second_keeps_its_data(place, sql, logged):
    data_dir = place / "deep" / "data"
    async with open_embedded(data_dir) as embedded:
        sql(embedded, "create table kept as select 42 as answer")
    assert [entry["event"].removeprefix("embedded postgres: ") for entry in logged] == [
        "initialising",
        "starting",
        "ready",
        "stopping",
        "stopped",
    ]
    assert not held(data_dir)
    assert not (data_dir / "postgres" / "postmaster.pid").exists(), "it was shut down cleanly"

    logged.clear()
    async with open_embedded(data_dir) as embedded:
        assert sql(embedded, "select answer from kept") == [(42,)]
    assert "embedded postgres: initialising" not in [entry["event"] for entry in logged]


async def test_settings_are_those_of_production(place, sql):
    async with open_embedded(place / "data", settings={"work_mem": "7MB"}) as embedded:
        rows = dict(sql(embedded, "select name, setting from pg_settings"))
        assert rows["fsync"] == "on"
        assert rows["synchronous_commit"] == "on"
        assert rows["full_page_writes"] == "on"
        assert rows["data_checksums"] == "on"
        assert int(rows["max_connections"]) >= 40, "a pool of 32 and its neighbours"
        assert rows["work_mem"] == str(7 * 1024)
        assert rows["server_encoding"] == "UTF8"
        assert rows["TimeZone"] == "UTC"
        locale = sql(embedded, "select datcollate, datctype from pg_database")
        assert set(locale) == {("C", "C")}


async def test_it_listens_on_a_private_unix_socket_alone(place):
    async with open_embedded(place / "data") as embedded:
        process = psutil.Process(embedded.pid)
        assert process.net_connections("inet") == []
        assert is_private(embedded.host), "nobody else can enter the socket's directory"
        assert os.getsid(embedded.pid) != os.getsid(0), "Ctrl-C must reach the broker alone"


async def test_the_environment_cannot_steer_it(place, monkeypatch):
    monkeypatch.setenv("PGDATA", "/nonexistent")
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGOPTIONS", "--nonsense")
    monkeypatch.setenv("LC_ALL", "xx_YY.nonsense")
    async with open_embedded(place / "data") as embedded:
        environment = psutil.Process(embedded.pid).environ()
    assert not [name for name in environment if name.startswith("PG") and name != "PGDATA"]
    assert environment.get("PGDATA") in (None, str(place / "data" / "postgres"))
    assert environment["LC_ALL"] == "C"


async def test_a_second_broker_is_refused_soon(place):
    async with open_embedded(place / "data") as embedded:
        began = trio.current_time()
        with pytest.raises(EmbeddedError, match=rf"pid {os.getpid()}\b.*QUEEN_DATA_DIR"):
            async with open_embedded(place / "data"):
                pass
        assert trio.current_time() - began < 3
        assert psutil.pid_exists(embedded.pid), "the refused one did no harm"


async def test_a_second_start_waits_for_a_predecessor_that_is_just_ending(place, nursery):
    data_dir = place / "data"
    data_dir.mkdir(mode=0o711)
    descriptor = locks.lock_nowait(data_dir / "daemon.lock")

    async def end_soon() -> None:
        await trio.testing.wait_all_tasks_blocked()
        os.close(descriptor)

    nursery.start_soon(end_soon)
    os.close(await locks.acquire_daemon_lock(data_dir / "daemon.lock"))


async def test_reserved_settings_are_refused(place):
    with pytest.raises(EmbeddedError, match="listen_addresses"):
        async with open_embedded(place / "data", settings={"listen_addresses": "*"}):
            pass
    assert not held(place / "data")


async def test_a_server_that_refuses_its_settings_is_reported_with_its_log(place):
    with pytest.raises(EmbeddedError, match=r"(?s)postgres\.log says.*work_mem"):
        async with open_embedded(place / "data", settings={"work_mem": "plenty"}):
            pass
    assert not held(place / "data")


async def test_a_fault_of_the_body_comes_out_as_itself(place):
    with pytest.raises(ZeroDivisionError) as caught:
        async with open_embedded(place / "data"):
            raise ZeroDivisionError from KeyError("its cause")
    assert isinstance(caught.value.__cause__, KeyError)
    assert not held(place / "data")


async def test_a_path_that_no_pid_file_can_hold_is_refused(place):
    with pytest.raises(EmbeddedError, match="line break"):
        async with open_embedded(place / "line\nbreak"):
            pass


async def test_cancelling_the_body_stops_the_server(place):
    with trio.CancelScope() as scope:
        async with open_embedded(place / "data"):
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert not held(place / "data")
    assert not (place / "data" / "postgres" / "postmaster.pid").exists()


async def test_cancelling_initdb_leaves_nothing_running(place, endless_initdb, until, sql):
    data_dir = place / "data"
    async with trio.open_nursery() as nursery:

        async def start() -> None:
            async with open_embedded(data_dir, binaries=endless_initdb):
                pytest.fail("cancelled too late")

        nursery.start_soon(start)
        await until((data_dir / "postgres.initialising" / "PG_VERSION").exists)
        nursery.cancel_scope.cancel()
    assert not held(data_dir)
    assert not (data_dir / "postgres").exists()
    async with open_embedded(data_dir) as embedded:
        assert sql(embedded, "select 1") == [(1,)]
    assert not (data_dir / "postgres.initialising").exists()


@pytest.fixture
async def gated(place):
    """A cluster whose next start is a recovery that lasts while the file `gate` exists."""
    data_dir, gate = place / "data", place / "gate"
    async with open_embedded(data_dir):
        pass
    (data_dir / "postgres" / "recovery.signal").touch()
    gate.touch()
    restore = f"echo gated >&2; while [ -e {gate} ]; do sleep 0.02; done; false"
    return data_dir, gate, {"restore_command": restore, "hot_standby": "off"}


async def test_a_long_recovery_has_no_deadline_and_shows_progress(
    gated, monkeypatch, nursery, until, logged, sql
):
    data_dir, gate, settings = gated
    monkeypatch.setattr(progress, "PROGRESS_INTERVAL", 0.05)

    def reports():
        """Those that show how it goes, by the last line of the server's log."""
        return [entry for entry in logged if entry.get("log_line") == "gated"]

    async def end_recovery() -> None:
        await until(lambda: len(reports()) == 3)
        gate.unlink()

    nursery.start_soon(end_recovery)
    async with open_embedded(data_dir, settings=settings) as embedded:
        assert sql(embedded, "select pg_is_in_recovery()") == [(False,)]
    assert reports()[0]["event"] == "embedded postgres: still starting"


async def test_cancelling_a_long_recovery_leaves_nothing_running(gated, monkeypatch, until):
    data_dir, _gate, settings = gated
    monkeypatch.setattr(supervisor, "STOP_DEADLINE", 0.5)
    async with trio.open_nursery() as nursery:

        async def start() -> None:
            async with open_embedded(data_dir, settings=settings):
                pytest.fail("cancelled too late")

        nursery.start_soon(start)
        await until(lambda: "gated" in (data_dir / "postgres.log").read_text())
        nursery.cancel_scope.cancel()
    # The restore command ignores the fast shutdown: what holds the lock was killed.
    assert not held(data_dir)


async def test_a_large_log_is_set_aside(place, monkeypatch):
    monkeypatch.setattr("queen_trio.embedded.cluster.LOG_LIMIT", 100)
    async with open_embedded(place / "data") as embedded:
        assert embedded.log_path.exists()
    assert "initialized" in (place / "data" / "postgres.log.1").read_text()


@pytest.mark.parametrize(
    "name",
    ["x" * 120, "a,b", "with space", "sepa\u2028rator", 'quo"te', "per%cent", "ümläut"],
    ids=lambda n: n[:10],
)
async def test_odd_paths(place, name, sql):
    async with open_embedded(place / name) as embedded:
        assert sql(embedded, "select 1") == [(1,)]
        assert is_private(embedded.host)
    if embedded.host != str(place / name / "postgres"):
        assert not os.path.lexists(embedded.host), "the short directory goes with the server"
