"""Each nursery, and each job at each of its awaits, is ended at run time: what that costs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from queen_trio import config, daemon
from queen_trio.broker import open_broker
from queen_trio.broker.maintenance import Switch
from queen_trio.broker.push import PushService
from queen_trio.http import server as http_server
from queen_trio.jobs import runner
from queen_trio.mesh import MeshNode
from queen_trio.model.message import PushItem, PushStatus
from queen_trio.spool import open_spool
from queen_trio.store.queries import Store
from tests.brokers import postgres_environment, running_broker
from tests.http.api import open_api
from tests.http.raw import connect
from tests.live.load import Producer, take_all
from tests.live.test_prometheus import scrape
from tests.replicas import free_ports, mesh_environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from queen_trio.broker import Broker
    from queen_trio.store.pool import Pool
    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster
    from tests.http.api import Api

SECONDS = 60


class Fuse:
    """Stands for an async function: runs it, beside a task that crashes when lit."""

    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        self._run = run
        self._lit = trio.Event()
        self.starts = 0

    def light(self) -> None:
        self._lit.set()

    async def run(self, *args: Any, **kwargs: Any) -> None:
        self._lit = trio.Event()
        self.starts += 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._burn)
            await self._run(*args, **kwargs)
            nursery.cancel_scope.cancel()

    async def _burn(self) -> None:
        await self._lit.wait()
        raise RuntimeError("lit")


class Hosted:
    """A broker in this process, with what the client side of a `LiveBroker` needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mesh, jobs, http = MeshNode.serve, daemon.serve_jobs, http_server.serve
        self.fuses = {"mesh": Fuse(mesh), "jobs": Fuse(jobs), "http": Fuse(http)}

        # A method is only bound if it is a function.
        async def serve_mesh(*args: Any) -> None:
            await self.fuses["mesh"].run(*args)

        monkeypatch.setattr(MeshNode, "serve", serve_mesh)
        monkeypatch.setattr(daemon, "serve_jobs", self.fuses["jobs"].run)
        monkeypatch.setattr(http_server, "serve", self.fuses["http"].run)
        self.port, self.mesh_port, peer = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            **mesh_environment(1, self.mesh_port, [peer]),
            "PORT": str(self.port),
            "QUEEN_BIND_ADDR": "127.0.0.1",
        }
        self.error: BaseException | None = None
        self.ended = trio.Event()

    async def run(self, environment: dict[str, str]) -> None:
        """Run the daemon to its end; its error, if any, is in `error`."""
        try:
            assert await daemon.run(config.load({**environment, **self.environment})) == 0
        except Exception as error:
            self.error = error
        self.ended.set()

    async def wait_serving(self) -> None:
        await wait_listening(self.port)


@asynccontextmanager
async def hosting(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> AsyncIterator[Hosted]:
    """Run a broker in this process for the block's time."""
    hosted = Hosted(monkeypatch)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hosted.run, environment)
        await hosted.wait_serving()
        yield hosted
        nursery.cancel_scope.cancel()


@pytest.fixture
def environment(settings: ConnectionSettings, tmp_path: Path) -> dict[str, str]:
    return {
        **postgres_environment(settings),
        "FILE_BUFFER_DIR": str(tmp_path),
        "RETENTION_INTERVAL": "100",
    }


async def restarts(api: Api, nursery: str) -> float:
    """What Prometheus is told."""
    return (await scrape(api))["queen_nursery_restarts_total", nursery]


@pytest.mark.parametrize("name", ["mesh", "jobs"])
async def test_a_crash_costs_latency_only(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str
) -> None:
    woken: list[Any] = []

    async def park(api: Api) -> None:
        woken.append(await api.pop("parked", wait="true", timeout=30_000))

    with trio.fail_after(SECONDS):
        async with hosting(monkeypatch, environment) as hosted, open_api(hosted) as api:
            producer = Producer(hosted, "q")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(park, api)
                await api.wait_parked(1)
                for _ in range(5):
                    nursery.start_soon(producer.run)
                for crash in (1, 2):
                    await producer.wait_queued(len(producer.queued) + 50)
                    hosted.fuses[name].light()
                    while hosted.fuses[name].starts != crash + 1:
                        await trio.sleep(0.01)
                    assert await restarts(api, name) == crash
                if name == "mesh":
                    await wait_listening(hosted.mesh_port)
                else:
                    await wait_runs(api)
                await api.push("parked", 1)
                while not woken:
                    await trio.sleep(0.01)
                producer.stop()
            assert not producer.failed
            producer.check(await take_all(api, "q"))
            assert (await api.http.get("/health")).status_code == 200
            signal.raise_signal(signal.SIGTERM)
            await hosted.ended.wait()
            assert hosted.error is None


async def wait_listening(port: int) -> None:
    while True:
        try:
            await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
        except OSError:
            await trio.sleep(0.01)
        else:
            return


async def wait_runs(api: Api) -> None:
    """Block until the restarted jobs run."""
    before = (await counts(api, "runs"))["retention"]
    while (await counts(api, "runs"))["retention"] == before:
        await trio.sleep(0.02)


async def test_the_death_of_http_ends_the_process_with_all_it_accepted(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    with trio.fail_after(SECONDS):
        async with hosting(monkeypatch, environment) as hosted:
            producer = Producer(hosted, "q")
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(producer.run)
                await producer.wait_queued(300)
                hosted.fuses["http"].light()
            await hosted.ended.wait()
        assert isinstance(hosted.error, ExceptionGroup)
        assert "lit" in repr(hosted.error)
        with running_broker(environment) as broker:
            async with open_api(broker) as api:
                stored = await take_all(api, "q")
        producer.check(stored)


async def test_what_waits_in_the_lanes_outlives_http(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    settings: ConnectionSettings,
) -> None:
    """One push is held up in PostgreSQL, the next ones wait behind it, when http dies."""
    push = PushService.push
    accepted = 0

    async def counted(service: PushService, *args: Any, **kwargs: Any) -> Any:
        nonlocal accepted
        accepted += 1
        return await push(service, *args, **kwargs)

    monkeypatch.setattr(PushService, "push", counted)
    with trio.fail_after(SECONDS):
        async with hosting(monkeypatch, environment) as hosted, open_api(hosted) as api:
            await api.push("q", 0)
            with psycopg.connect(
                host=settings.host, port=settings.port, user="postgres", dbname=settings.database
            ) as other:
                other.execute("SELECT FROM queen.log_partitions FOR UPDATE")
                connections = [await connect(hosted) for _ in range(5)]
                for n, connection in enumerate(connections, 1):
                    body = b'{"items":[{"queue":"q","payload":%d}]}' % n
                    await connection.send("POST /api/v1/push", body)
                    while accepted != n + 1:
                        await trio.sleep(0.005)
                hosted.fuses["http"].light()
                for connection in connections:
                    with pytest.raises((EOFError, trio.BrokenResourceError)):
                        await connection.receive()
                    await connection.aclose()
            await hosted.ended.wait()
        with running_broker(environment) as broker:
            async with open_api(broker) as api:
                assert await take_all(api, "q") == list(range(6))


def test_the_exit_code_tells_the_orchestrator(environment: dict[str, str]) -> None:
    program = """
import trio
from queen_trio import cli, config, daemon

serve = daemon.http_server.serve

async def dies(*args, task_status, **kwargs):
    async with trio.open_nursery() as nursery:
        task_status.started(await nursery.start(lambda task_status: serve(
            *args, task_status=task_status, **kwargs)))
        raise OSError("the listener broke")

daemon.http_server.serve = dies
config = config.load(%r)
cli.configure(level=config.logging.level, json=True)
raise SystemExit(cli.exit_code(daemon.run, config))
"""
    environment = environment | {"PORT": "0", "QUEEN_BIND_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", program % environment], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    names = [event["event"] for event in events]
    assert names.index("nursery crashed, stopping") < names.index("stopped")
    assert "the listener broke" in done.stderr


# -- jobs at each of their awaits ------------------------------------------------------------------


class CancelAt(trio.abc.Instrument):
    """Cancels `scope` when the task that made this has waited for the `steps`th time."""

    def __init__(self, steps: int, scope: trio.CancelScope) -> None:
        self._task = trio.lowlevel.current_task()
        self._left = steps
        self._scope = scope

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._left -= 1
            if not self._left:
                self._scope.cancel()


async def cancelled_at(step: int, run: Callable[[], Awaitable[None]]) -> bool:
    """Run `run`, cancelled at its `step`th await; whether it had that many.

    It may come to its end all the same: a statement under way is waited for.
    """
    with trio.CancelScope() as scope:
        instrument = CancelAt(step, scope)
        trio.lowlevel.add_instrument(instrument)
        try:
            await run()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return scope.cancel_called


async def spooled(broker: Broker, queue: str, count: int) -> None:
    broker.maintenance.set(Switch.PUSH, enabled=True)
    for n in range(count):
        [result] = await broker.pushes.push([PushItem(queue, b"%d" % n)])
        assert result.status is PushStatus.BUFFERED
    broker.maintenance.set(Switch.PUSH, enabled=False)


async def test_each_job_ends_cleanly_at_each_of_its_awaits(
    environment: dict[str, str], cluster: Cluster, database: str, pool: Pool, tmp_path: Path
) -> None:
    """It holds no connection and no lock then, and the next run does what it left."""
    settings = config.load(environment)
    with trio.fail_after(SECONDS):
        async with (
            open_spool(tmp_path, 1 << 30) as spool,
            open_broker(settings, Store(pool), spool) as broker,
        ):
            for job in daemon._jobs(broker):
                step = 1
                while True:
                    queue = f"{job.name}-{step}"
                    await broker.pushes.push([PushItem(queue, b"1")])
                    await spooled(broker, queue, 2)
                    if not await cancelled_at(step, job.run):
                        break
                    assert pool.statistics().in_use == 0, (job.name, step)
                    while cluster.count_advisory_locks(database):
                        await trio.sleep(0.005)
                    step += 1
                print(f"{job.name}: cancelled at {step - 1} awaits")
                assert step > 1
            await broker.spool_drain.run()
            assert broker.spool.statistics().pending_messages == 0
            [[stored, expected]] = cluster.execute(
                "SELECT sum(last_offset + 1), 3 * count(*) FROM queen.log_partitions", database
            )
            assert stored == expected


async def test_a_job_that_raises_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """Each job at once, at its first statement; they go on as soon as they can."""
    broken = True
    run_job = runner._serve_job

    async def serve_job(job: runner.Job) -> None:
        run = job.run

        async def fails() -> None:
            if broken:
                raise RuntimeError(job.name)
            await run()

        job.run = fails
        job.interval_seconds = 0.02
        await run_job(job)

    monkeypatch.setattr(runner, "_serve_job", serve_job)
    with trio.fail_after(SECONDS):
        async with hosting(monkeypatch, environment) as hosted, open_api(hosted) as api:
            while min((await counts(api, "failures")).values()) < 2:
                await trio.sleep(0.02)
            await api.push("q", 1)
            assert await take_all(api, "q") == [1]
            assert await restarts(api, "jobs") == 0
            broken = False
            failed = await counts(api, "failures")
            runs = await counts(api, "runs")
            while any(n < runs[name] + 2 for name, n in (await counts(api, "runs")).items()):
                await trio.sleep(0.02)
            assert await counts(api, "failures") == failed
            signal.raise_signal(signal.SIGTERM)
            await hosted.ended.wait()
            assert hosted.error is None


async def counts(api: Api, what: str) -> dict[str, float]:
    """Of each job, by its name."""
    samples = (await scrape(api)).samples
    return {key[1]: n for key, n in samples.items() if key[0] == f"queen_job_{what}_total"}
