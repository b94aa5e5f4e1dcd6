"""Stopping: parked pops are answered, what was accepted is kept, and nobody waits long."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import psutil
import psycopg
import trio

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.http.api import open_api
from tests.http.raw import connect
from tests.live.load import Producer, take_all
from tests.live.stalling import stalled
from tests.replicas import free_ports, mesh_environment

if TYPE_CHECKING:
    from pathlib import Path

    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster
    from tests.http.api import Api

PARKED = 2_000
# What a stop of so many may cost the broker, to the end of the process; measured: 0.25 s. By the
# clock it takes as much on an idle machine; here the clients, too, are one Python process.
PARKED_CPU_SECONDS = 1.0
PARKED_WALL_SECONDS = 10.0
SECONDS = 30
# Long enough for what a test does before, short enough to wait for.
BRIEF = {"QUEEN_SHUTDOWN_TIMEOUT_MS": "2000"}
BRIEF_SECONDS = 2.0


async def wait_exit(broker: LiveBroker) -> int:
    return await trio.to_thread.run_sync(broker.wait)


def cpu_seconds_used(broker: LiveBroker) -> float:
    times = psutil.Process(broker.process.pid).cpu_times()
    return float(times.user + times.system)


def cpu_seconds_of_ended() -> float:
    """Of all children that this process has waited for, to their very end."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def wait_refused(broker: LiveBroker) -> None:
    """Block until the listener is closed."""
    while True:
        try:
            await (await connect(broker)).aclose()
        except OSError:
            return
        await trio.sleep(0.01)


async def test_sigterm_answers_parked_pops_and_exits(broker: LiveBroker) -> None:
    answers: list[int] = []

    async def pop(queue: str) -> None:
        connection = await connect(broker)
        await connection.send(f"GET /api/v1/pop/queue/{queue}?wait=true&timeout=60000")
        answers.append((await connection.receive()).status)
        await connection.aclose()

    with trio.fail_after(SECONDS):
        async with open_api(broker) as api, trio.open_nursery() as nursery:
            for n in range(PARKED):
                nursery.start_soon(pop, f"q{n % 10}")
            await api.wait_parked(PARKED)
            before = cpu_seconds_used(broker) + cpu_seconds_of_ended()
            started = time.monotonic()
            broker.process.send_signal(signal.SIGTERM)
            assert await wait_exit(broker) == 0
            took = time.monotonic() - started
            cpu = cpu_seconds_of_ended() - before
    assert answers == [204] * PARKED
    print(f"SIGTERM with {PARKED} parked pops: {took:.2f} s, {cpu:.2f} s of the broker's CPU")
    assert cpu < PARKED_CPU_SECONDS
    assert took < PARKED_WALL_SECONDS
    assert broker.wait_event("stopped")["in_time"] is True


async def test_sigterm_while_postgres_is_away(own_cluster: Cluster) -> None:
    """Parked or still looking for a connection: both are sent home at once."""
    environment = postgres_environment(own_cluster.settings("postgres"))
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            parked = await connect(broker)
            await parked.send("GET /api/v1/pop/queue/q?wait=true&timeout=60000")
            await api.wait_parked(1)
            await trio.to_thread.run_sync(own_cluster.stop)
            looking = await connect(broker)
            await looking.send("GET /api/v1/pop/queue/other?wait=true&timeout=60000")
            while not (await api.metrics())["wakeups"]["asking"]:  # noqa: ASYNC110 - another process
                await trio.sleep(0.01)
            broker.process.send_signal(signal.SIGTERM)
            started = time.monotonic()
            for connection in (parked, looking):
                assert (await connection.receive()).status == 204
                await connection.aclose()
            assert await wait_exit(broker) == 0
            assert time.monotonic() - started < 3


async def test_drain_can_leave_parked_pops_alone(settings: ConnectionSettings) -> None:
    """QUEEN_DRAIN_PARKED=wait: each keeps its own timeout."""
    environment = postgres_environment(settings) | {"QUEEN_DRAIN_PARKED": "wait"}
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            connection = await connect(broker)
            started = time.monotonic()
            await connection.send("GET /api/v1/pop/queue/q?wait=true&timeout=1500")
            await api.wait_parked(1)
            broker.process.send_signal(signal.SIGTERM)
            assert (await connection.receive()).status == 204
            assert time.monotonic() - started >= 1.5
            assert await wait_exit(broker) == 0
            await connection.aclose()


async def test_sigterm_under_load_loses_nothing_and_answers_once(broker: LiveBroker) -> None:
    producer = Producer(broker, "q")
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(producer.run)
            await producer.wait_queued(1_000)
            broker.process.send_signal(signal.SIGTERM)
            assert await wait_exit(broker) == 0
        await trio.to_thread.run_sync(broker.restart)
        async with open_api(broker) as api:
            stored = await take_all(api, "q")
    assert not producer.failed
    producer.check(stored)
    # A drain answers what it accepted: nothing is there that its producer doesn't know of.
    assert set(stored) == producer.queued


async def test_readiness_turns_before_the_end(settings: ConnectionSettings) -> None:
    """A balancer that still has a connection is told to look elsewhere."""
    environment = postgres_environment(settings) | {"QUEEN_DRAIN_PARKED": "wait"}
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            parked = await connect(broker)
            await parked.send("GET /api/v1/pop/queue/q?wait=true&timeout=1000")
            await api.wait_parked(1)
            # A request whose head is under way when the signal comes is served.
            probe = await connect(broker)
            await probe.stream.send_all(b"GET /health HTTP/1.1\r\n")
            await api.metrics()
            broker.process.send_signal(signal.SIGTERM)
            await wait_refused(broker)
            await probe.stream.send_all(b"host: b\r\n\r\n")
            answer = await probe.receive()
            assert answer.status == 503
            assert answer.json()["status"] == "unhealthy"
            assert answer.headers["connection"] == "close"
            for connection in (parked, probe):
                await connection.aclose()


async def test_a_second_signal_exits_at_once(settings: ConnectionSettings) -> None:
    environment = postgres_environment(settings) | {"QUEEN_DRAIN_PARKED": "wait"}
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            parked = await connect(broker)
            await parked.send("GET /api/v1/pop/queue/q?wait=true&timeout=60000")
            await api.wait_parked(1)
            broker.process.send_signal(signal.SIGTERM)
            await trio.to_thread.run_sync(broker.wait_event, "stopping")
            started = time.monotonic()
            broker.process.send_signal(signal.SIGINT)
            assert await wait_exit(broker) == 130
            assert time.monotonic() - started < 1
            await parked.aclose()


async def test_the_deadline_ends_a_drain(settings: ConnectionSettings) -> None:
    environment = postgres_environment(settings) | {
        "QUEEN_DRAIN_PARKED": "wait",
        "QUEEN_SHUTDOWN_TIMEOUT_MS": "1000",
    }
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            parked = await connect(broker)
            await parked.send("GET /api/v1/pop/queue/q?wait=true&timeout=60000")
            await api.wait_parked(1)
            broker.process.send_signal(signal.SIGTERM)
            assert await wait_exit(broker) == 0
            await parked.aclose()


async def exits_in_time(broker: LiveBroker) -> None:
    """SIGTERM, and the end within the bound, give or take a slow machine."""
    started = time.monotonic()
    broker.process.send_signal(signal.SIGTERM)
    assert await wait_exit(broker) == 0
    took = time.monotonic() - started
    print(f"SIGTERM to exit: {took:.2f} s")
    assert took < 2.5 * BRIEF_SECONDS


async def test_a_client_that_stops_reading_is_not_waited_for(
    settings: ConnectionSettings,
) -> None:
    with running_broker(postgres_environment(settings) | BRIEF) as broker:
        with trio.fail_after(SECONDS):
            async with open_api(broker) as api:
                await api.push("q", *("x" * 1_000_000 for _ in range(12)))
                deaf = await connect(broker)
                await deaf.send("GET /api/v1/pop/queue/q?batch=100")
                head = await deaf.stream.receive_some(100)
                assert head.startswith(b"HTTP/1.1 200")
                await exits_in_time(broker)
                await deaf.aclose()
            # It was never delivered: the lease is given back, or runs out.
            await trio.to_thread.run_sync(broker.restart)
            async with open_api(broker) as api:
                assert (await api.http.get("/health")).status_code == 200


async def test_a_database_that_says_nothing_is_not_waited_for(own_cluster: Cluster) -> None:
    """Late shields would hold on to their statements for longer than a shutdown may take."""
    environment = postgres_environment(own_cluster.settings("postgres")) | BRIEF
    with running_broker(environment | {"RETENTION_INTERVAL": "50"}) as broker:
        with trio.fail_after(SECONDS):
            async with open_api(broker) as api:
                await api.push("q", 1)
                with stalled(own_cluster):
                    pushing = await connect(broker)
                    await pushing.send(
                        "POST /api/v1/push", b'{"items":[{"queue":"q","payload":2}]}'
                    )
                    parked = await connect(broker)
                    await parked.send("GET /api/v1/pop/queue/q?wait=true&timeout=60000")
                    await wait_stuck(api)
                    await exits_in_time(broker)
                for connection in (pushing, parked):
                    await connection.aclose()
            while own_cluster.count_advisory_locks():
                await trio.sleep(0.01)
            await trio.to_thread.run_sync(broker.restart)
            async with open_api(broker) as api:
                # Nobody was told what became of 2: the statement was on its way.
                assert (await take_all(api, "q"))[:1] == [1]


async def wait_stuck(api: Api) -> None:
    """Block until a statement and what else wants a connection hang."""
    while True:
        pool = (await api.metrics())["pool"]
        if pool["in_use"] and pool["in_use"] + pool["connecting"] > 1:
            return
        await trio.sleep(0.01)


# Once there is a FIFO of this name, whatever is to reach the disk waits for who would write to it.
HANGING_DISK = """
import os, runpy, sys

really, fifo = os.fsync, sys.argv[1]

def fsync(descriptor):
    if os.path.exists(fifo):
        open(fifo + ".hangs", "w").close()
        open(fifo).close()
    really(descriptor)

os.fsync = fsync
sys.argv[1:] = ["serve"]
runpy.run_module("queen_trio", run_name="__main__")
"""


async def test_a_disk_that_hangs_is_not_waited_for(
    settings: ConnectionSettings, tmp_path: Path
) -> None:
    """A spooled push hangs in fsync, and so does its thread when the process ends."""
    fifo = tmp_path / "fifo"
    environment = postgres_environment(settings) | BRIEF
    with running_broker(
        environment | {"FILE_BUFFER_DIR": str(tmp_path / "spool")},
        command=(sys.executable, "-c", HANGING_DISK, str(fifo)),
    ) as broker:
        with trio.fail_after(SECONDS):
            async with open_api(broker) as api:
                await api.http.post("/api/v1/system/maintenance", json={"enabled": True})
                os.mkfifo(fifo)
                pushing = await connect(broker)
                await pushing.send("POST /api/v1/push", b'{"items":[{"queue":"q","payload":1}]}')
                while not fifo.with_suffix(".hangs").exists():  # noqa: ASYNC110 - another process
                    await trio.sleep(0.01)
                await exits_in_time(broker)
                await pushing.aclose()
            assert broker.wait_event("spool not closed: its disk doesn't answer")
            assert broker.wait_event("stopped")["in_time"] is False
            fifo.unlink()
            await trio.to_thread.run_sync(broker.restart)  # nobody holds the directory's lock
            async with open_api(broker) as api:
                await api.http.post("/api/v1/system/maintenance", json={"enabled": False})
                await api.push("q", 2)
                # Nobody was told what became of 1: it may be on the disk.
                while 2 not in (stored := await take_all(api, "q")):
                    assert set(stored) <= {1}
            assert await trio.to_thread.run_sync(broker.stop) == 0
            assert broker.wait_event("stopped")["in_time"] is True


async def test_the_last_counts_are_written(
    broker: LiveBroker, cluster: Cluster, database: str
) -> None:
    """What happened since the flush of the last minute is in the history, too."""
    with trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            await api.push("q", 1, 2, 3)
            await api.pop("q", batch=2, autoAck=True)
        assert await trio.to_thread.run_sync(broker.stop) == 0
    counts = cluster.execute("SELECT sum(pushed), sum(popped) FROM queen.worker_metrics", database)
    assert [(int(pushed), int(popped)) for pushed, popped in counts] == [(3, 2)]


async def test_a_peer_that_stops_reading_is_not_waited_for(settings: ConnectionSettings) -> None:
    links = 0

    async def never_read(_: trio.SocketStream) -> None:
        nonlocal links
        links += 1
        await trio.sleep_forever()

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    peer = listener.socket.getsockname()[1]
    environment = {
        **postgres_environment(settings),
        **mesh_environment(1, free_ports(1)[0], [peer]),
        **BRIEF,
    }
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, never_read, [listener])
            with running_broker(environment) as broker:
                async with open_api(broker) as api:
                    while not links:
                        await trio.sleep(0.01)
                    for n in range(20):
                        items = [
                            {"queue": f"q{n}", "payload": 1, "partition": f"{m}" + "p" * 400}
                            for m in range(300)
                        ]
                        await api.push_items(*items)
                    await exits_in_time(broker)
            nursery.cancel_scope.cancel()


async def test_the_retention_lock_is_given_back(
    cluster: Cluster, settings: ConnectionSettings
) -> None:
    """Stopped in the middle of a cycle that a transaction of somebody else's holds up."""
    environment = postgres_environment(settings) | {"RETENTION_INTERVAL": "20"} | BRIEF
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        with psycopg.connect(
            host=settings.host, port=settings.port, user="postgres", dbname=settings.database
        ) as other:
            other.execute("LOCK TABLE queen.queues")
            while not cluster.count_advisory_locks(settings.database):
                await trio.sleep(0.01)
            await exits_in_time(broker)
        while cluster.count_advisory_locks(settings.database):
            await trio.sleep(0.01)
