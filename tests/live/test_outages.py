"""PostgreSQL gone, full, read-only, silent or another one: what a broker says, and that it heals.

Stops and restarts under load are in test_crash.py, commits of unknown fate in test_spool.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.cluster import Cluster, running_cluster
from tests.http.api import Api, Json, data, identity, open_api
from tests.live.load import take_all
from tests.live.stalling import stalled
from tests.proxy import Mode, open_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

SECONDS = 60
# A client gives up after 30 s; whatever the outage, the broker has answered before.
PATIENCE_SECONDS = 25.0
IMPATIENT = {"QUEEN_STMT_TIMEOUT_MS": "1000"}


class Watched:
    """A parked pop and a held lease, which an outage must not cost."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.woken: list[Json | None] = []
        self.held: Json = {}

    async def park(self, nursery: trio.Nursery) -> None:
        await self.api.push("held", 1)
        answer = await self.api.pop("held", leaseSeconds=300)
        assert answer is not None
        [self.held] = answer["messages"]
        nursery.start_soon(self._wait)
        await self.api.wait_parked(1)

    async def _wait(self) -> None:
        self.woken.append(await self.api.pop("parked", wait="true", timeout=55_000))

    async def check_healed(self) -> None:
        """Block until health is back and what was buffered is in; nothing must be lost."""
        await wait_health(self.api, 200)
        while (await self.api.buffers())["bufferedMessages"]:
            await trio.sleep(0.02)
        assert not self.woken
        await self.api.push("parked", 1)
        while not self.woken:
            await trio.sleep(0.02)
        assert data(self.woken[0]) == [1]
        assert (await self.api.ack(self.held))["success"]


async def wait_health(api: Api, status: int) -> None:
    while (await api.http.get("/health")).status_code != status:
        await trio.sleep(0.05)


async def push_status(api: Api, queue: str, payload: Any, **more: Any) -> str:
    [result] = await api.push(queue, payload, **more)
    status: str = result["status"]
    return status


async def refused_clearly(api: Api, method: str, path: str, body: Json | None = None) -> None:
    """The call waits for the database, and then says that it didn't come."""
    started = time.monotonic()
    response = await api.http.request(method, path, json=body)
    assert response.status_code == 503, response.text
    assert response.json()["code"] == "database_unavailable"
    assert int(response.headers["retry-after"]) >= 1
    assert 10 < time.monotonic() - started < PATIENCE_SECONDS


async def test_killed(own_cluster: Cluster) -> None:
    environment = postgres_environment(own_cluster.settings("postgres"))
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api, trio.open_nursery() as nursery:
            watched = Watched(api)
            await watched.park(nursery)
            await trio.to_thread.run_sync(own_cluster.kill)
            assert await push_status(api, "q", 1) == "buffered"
            await wait_health(api, 503)
            await trio.to_thread.run_sync(own_cluster.start)
            await watched.check_healed()
            assert await take_all(api, "q") == [1]


async def test_out_of_connections() -> None:
    """Somebody else has them all; the broker's own were ended (53300)."""
    with running_cluster({"max_connections": "12"}) as cluster:
        environment = postgres_environment(cluster.settings("postgres"))
        with running_broker(environment) as broker, trio.fail_after(SECONDS):
            async with open_api(broker) as api, trio.open_nursery() as nursery:
                watched = Watched(api)
                await watched.park(nursery)
                with all_connections(cluster):
                    assert await push_status(api, "q", 1) == "buffered"
                    await wait_health(api, 503)
                    assert (await api.http.get("/status")).status_code == 200
                await watched.check_healed()
                assert await push_status(api, "q", 2) == "queued"
                assert await take_all(api, "q") == [1, 2]


@contextmanager
def all_connections(cluster: Cluster) -> Iterator[None]:
    """Hold every connection that the server admits, for the block's time."""
    settings = cluster.settings("postgres")
    arguments: Any = {"host": settings.host, "port": settings.port, "user": "postgres"}
    held = [psycopg.connect(**arguments, dbname="postgres", autocommit=True)]
    try:
        while True:
            held[0].execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = 'postgres' AND application_name LIKE 'queen%'"
            )
            try:
                while True:
                    held.append(psycopg.connect(**arguments, dbname="postgres"))
            except psycopg.OperationalError:
                [[others]] = (
                    held[0]
                    .execute(
                        "SELECT count(*) FROM pg_stat_activity"
                        " WHERE datname = 'postgres' AND application_name LIKE 'queen%'"
                    )
                    .fetchall()
                )
                if not others:
                    break
        yield
    finally:
        for connection in held:
            connection.close()


async def test_silent(own_cluster: Cluster) -> None:
    """Every process of PostgreSQL stopped (SIGSTOP): nothing fails, nothing answers."""
    environment = postgres_environment(own_cluster.settings("postgres")) | IMPATIENT
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api, trio.open_nursery() as nursery:
            watched = Watched(api)
            await watched.park(nursery)
            await api.push("q", 0)
            with stalled(own_cluster):
                async with trio.open_nursery() as calls:
                    held = identity(watched.held) | {"transactionId": "another"}
                    for call in (
                        partial(refused_clearly, api, "POST", "/api/v1/ack", held),
                        partial(refused_clearly, api, "POST", "/api/v1/lease/x/extend"),
                        partial(refused_clearly, api, "GET", "/api/v1/pop/queue/q"),
                    ):
                        calls.start_soon(call)
                    started = time.monotonic()
                    assert await push_status(api, "q", 1) == "buffered"
                    print(f"buffered after {time.monotonic() - started:.1f} s")
                    assert time.monotonic() - started < PATIENCE_SECONDS
                    started = time.monotonic()
                    await wait_health(api, 503)
                    print(f"unhealthy after {time.monotonic() - started:.1f} s")
            await watched.check_healed()
            assert await take_all(api, "q") == [0, 1]


async def test_a_statement_that_hangs(own_cluster: Cluster) -> None:
    """Somebody holds the row of a partition: pushes to it are spooled, the others go on."""
    settings = own_cluster.settings("postgres")
    with running_broker(postgres_environment(settings) | IMPATIENT) as broker:
        with trio.fail_after(SECONDS):
            async with open_api(broker) as api, trio.open_nursery() as nursery:
                watched = Watched(api)
                await watched.park(nursery)
                await api.push("locked", 0)
                with psycopg.connect(
                    host=settings.host, port=settings.port, user="postgres", dbname="postgres"
                ) as other:
                    other.execute(
                        "SELECT FROM queen.log_partitions p JOIN queen.queues q"
                        " ON q.id = p.queue_id WHERE q.name = 'locked' FOR UPDATE OF p"
                    )
                    statuses: list[str] = []

                    async def push() -> None:
                        statuses.append(await push_status(api, "locked", 1))

                    async with trio.open_nursery() as pushing:
                        pushing.start_soon(push)
                        assert await push_status(api, "free", 1) == "queued"
                        assert (await api.http.get("/health")).status_code == 200
                    assert statuses == ["buffered"]
                    # A pop skips the partition; it doesn't wait for it.
                    assert await api.pop("locked") is None
                await watched.check_healed()
                assert await take_all(api, "locked") == [0, 1]


class Standby(Cluster):
    """A streaming replica of a running cluster, on a port of its own."""

    def __init__(self, primary: Cluster) -> None:
        super().__init__()
        shutil.rmtree(self.data)
        self._run("pg_basebackup", "-D", str(self.data), "-h", str(primary.directory),
                  "-p", str(primary.port), "-U", "postgres", "-R", "-c", "fast",
                  "--no-sync")  # fmt: skip

    def _wait_ready(self) -> None:
        # Its postmaster.pid says "standby", and never "ready" before it is promoted.
        until = time.monotonic() + SECONDS
        while True:
            try:
                self.execute("SELECT 1")
            except psycopg.OperationalError:
                assert time.monotonic() < until, self.log.read_text()
                time.sleep(0.02)
            else:
                return

    def wait_caught_up(self, primary: Cluster) -> None:
        [[position]] = primary.execute("SELECT pg_current_wal_lsn()::text")
        until = time.monotonic() + SECONDS
        while not self.execute(f"SELECT pg_last_wal_replay_lsn() >= '{position}'")[0][0]:
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.01)


@asynccontextmanager
async def hosted(environment: dict[str, str]) -> AsyncIterator[LiveBroker]:
    """A broker for the block's time, started while this process goes on proxying."""
    with TemporaryDirectory(prefix="queen-spool-") as spool:
        broker = LiveBroker({"FILE_BUFFER_DIR": spool, **environment})
        await trio.to_thread.run_sync(broker.start)
        try:
            with trio.fail_after(SECONDS):
                yield broker
        finally:
            broker.kill()


async def test_failover_to_a_promoted_standby(own_cluster: Cluster) -> None:
    """The old primary turns read-only (25006) and goes; the address leads to another server."""
    standby = await trio.to_thread.run_sync(Standby, own_cluster)
    try:
        await trio.to_thread.run_sync(standby.start)
        async with open_proxy(own_cluster.port) as proxy:
            environment = postgres_environment(own_cluster.settings("postgres")) | {
                "PG_HOST": "127.0.0.1",
                "PG_PORT": str(proxy.port),
            }
            async with (
                hosted(environment) as broker,
                open_api(broker) as api,
                trio.open_nursery() as nursery,
            ):
                watched = Watched(api)
                await watched.park(nursery)
                assert await push_status(api, "q", 0) == "queued"
                await trio.to_thread.run_sync(standby.wait_caught_up, own_cluster)
                own_cluster.execute("ALTER SYSTEM SET default_transaction_read_only = on")
                own_cluster.execute("SELECT pg_reload_conf()")
                while await push_status(api, "q", 1, transactionId="t1") != "buffered":
                    await trio.sleep(0.02)
                closed = (await api.metrics())["pool"]["closed_total"]
                assert closed, "a connection to a demoted primary is of no use"
                proxy.switch(Mode.CUT)
                await trio.to_thread.run_sync(own_cluster.stop)
                assert await push_status(api, "q", 2) == "buffered"
                await wait_health(api, 503)
                standby.execute("SELECT pg_promote()")
                proxy.target = standby.port
                proxy.switch(Mode.PASS)
                await watched.check_healed()
                assert await push_status(api, "q", 3) == "queued"
                stored = await take_all(api, "q")
                assert stored[0] == 0
                assert sorted(stored) == [0, 1, 2, 3]
    finally:
        await trio.to_thread.run_sync(standby.destroy)


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[None]:
    """A file system of so many MB at `path`."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs, for a PostgreSQL with a full disk, takes root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=777", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


async def test_out_of_disk(own_cluster: Cluster) -> None:
    """Tables can't grow any more (53100); what is there can still be read and acked."""
    disk = own_cluster.directory / "small"
    disk.mkdir()
    with small_disk(disk, 64):
        space = disk / "space"
        space.mkdir()
        space.chmod(0o777)
        shutil.chown(space, own_cluster.data.owner(), own_cluster.data.group())
        own_cluster.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
        own_cluster.execute("CREATE DATABASE queen TABLESPACE small")
        environment = postgres_environment(own_cluster.settings("queen"))
        with running_broker(environment) as broker, trio.fail_after(SECONDS):
            async with open_api(broker) as api, trio.open_nursery() as nursery:
                watched = Watched(api)
                await watched.park(nursery)
                filler = disk / "filler"
                filler.write_bytes(bytes(shutil.disk_usage(disk).free - (1 << 18)))
                payload = os.urandom(100_000).hex()
                pushed = 0
                while True:
                    pushed += 1
                    assert pushed < 20
                    if await push_status(api, "q", payload) == "buffered":
                        break
                assert (await api.http.get("/health")).status_code == 200
                filler.unlink()
                await watched.check_healed()
                assert await push_status(api, "q", "after") == "queued"
                assert await take_all(api, "q") == [payload] * pushed + ["after"]
        await trio.to_thread.run_sync(own_cluster.stop)
