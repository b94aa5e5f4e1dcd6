"""`serve --workers 2`: one port, one host, and no death that costs more than its own."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from tests.brokers import postgres_environment
from tests.http.api import open_api
from tests.http.raw import ask, connect
from tests.live.load import Producer, take_all
from tests.live.test_prometheus import scrape
from tests.workers import (
    COUNT,
    LiveWorkers,
    connect_to,
    is_running,
    prepared_workers,
    running_workers,
    wait_gone,
    wait_meshed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from queen_trio.store.settings import ConnectionSettings
    from tests.http.raw import RawConnection

SECONDS = 60
# So that only a hint wakes a parked pop.
NO_PROBES = {"POP_WAIT_INITIAL_INTERVAL_MS": "60000", "POP_WAIT_MAX_INTERVAL_MS": "60000"}
POP = "GET /api/v1/pop/queue/{}?wait=true&timeout=60000&autoAck=true"
# The budget of the pool must be shared out, and leave each worker what it needs.
POOL = {"DB_POOL_SIZE": "13", "QUEEN_ADMISSION_POOL_RESERVE": "3"}


def environment(settings: ConnectionSettings, **more: str) -> Mapping[str, str]:
    return {**postgres_environment(settings), **POOL, **more}


@pytest.fixture
def workers(settings: ConnectionSettings) -> Iterator[LiveWorkers]:
    with running_workers(environment(settings, **NO_PROBES)) as workers:
        yield workers


async def send_pop(connection: RawConnection, queue: str) -> None:
    await connection.send(POP.format(queue))


async def receive_data(connection: RawConnection) -> list[object]:
    answer = await connection.receive()
    assert answer.status == 200, answer
    return [message["data"] for message in answer.json()["messages"]]


async def push(connection: RawConnection, queue: str, payload: int) -> None:
    body = b'{"items":[{"queue":"%s","payload":%d}]}' % (queue.encode(), payload)
    await connection.send("POST /api/v1/push", body)
    answer = await connection.receive()
    assert answer.json()[0]["status"] == "queued"


async def exit_code(workers: LiveWorkers) -> int:
    return await trio.to_thread.run_sync(workers.wait)


async def test_a_push_on_one_wakes_a_pop_on_the_other(workers: LiveWorkers) -> None:
    with trio.fail_after(SECONDS):
        await wait_meshed(workers)
        async with open_api(workers) as api:
            for popping, pushing in ((0, 1), (1, 0)):
                parked = await connect_to(workers, popping)
                other = await connect_to(workers, pushing)
                await send_pop(parked, "q")
                await api.wait_parked(1)
                await push(other, "q", popping)
                assert await receive_data(parked) == [popping]
                for connection in (parked, other):
                    await connection.aclose()


async def test_metrics_of_any_worker_are_those_of_the_host(workers: LiveWorkers) -> None:
    with trio.fail_after(SECONDS):
        for index in range(COUNT):
            connection = await connect_to(workers, index)
            for number in range(index + 1):
                await push(connection, "q", number)
            await connection.aclose()
        async with open_api(workers) as api:
            found = await scrape(api)
            pushed = [found["queen_pushed_messages_total", str(index)] for index in range(COUNT)]
            assert pushed == [1, 2]
            assert [found["queen_worker_up", str(index)] for index in range(COUNT)] == [1, 1]
            # Budgets are shared out, the remainder too.
            assert [found["queen_pool_size", str(index)] for index in range(COUNT)] == [7, 6]
            metrics = await api.metrics()
            assert metrics["pool"]["size"] == 13
            assert [worker["worker"] for worker in metrics["workers"]] == [0, 1]
            buffers = await api.buffers()
            ids = [worker["bufferStats"]["serverId"] for worker in buffers["workers"]]
            assert ids == LiveWorkers.server_ids
            assert buffers["bufferHealthy"] is True

            silent = workers.pids()[1]
            connection = await connect_to(workers, 0)
            os.kill(silent, signal.SIGSTOP)
            try:
                await connection.send("GET /metrics")
                assert (await connection.receive()).json()["workersMissing"] == [1]
                await connection.send("GET /metrics/prometheus")
                text = (await connection.receive()).body.decode()
            finally:
                os.kill(silent, signal.SIGCONT)
            assert 'queen_worker_up{worker="1"} 0.0' in text
            assert 'queen_pushed_messages_total{worker="0"} 1.0' in text
            assert 'queen_pushed_messages_total{worker="1"}' not in text
            await connection.aclose()


async def test_kill_9_of_one_costs_its_own_connections_only(workers: LiveWorkers) -> None:
    producer = Producer(workers, "load")
    stopping = trio.Event()

    async def produce() -> None:
        while not stopping.is_set():
            await producer.run()  # until its connection breaks

    with trio.fail_after(SECONDS):
        first = workers.pids()
        spared = [await connect_to(workers, 1) for _ in range(10)]
        for number, connection in enumerate(spared):
            await send_pop(connection, f"spared-{number}")
        async with open_api(workers) as api:
            await api.wait_parked(len(spared))
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(produce)
                for _ in range(2):
                    await producer.wait_queued(len(producer.queued) + 200)
                    await replaced(workers, 0, signal.SIGKILL)
                await producer.wait_queued(len(producer.queued) + 200)
                stopping.set()
                producer.stop()
            stored = await take_all(api, "load")
            producer.check(stored)
            assert not producer.failed
            assert workers.restarts() == [0, 0]
            assert workers.pids()[1] == first[1]
            # They were parked all the while, and are still heard across the workers.
            await wait_meshed(workers)
            other = await connect_to(workers, 0)
            for number, connection in enumerate(spared):
                await push(other, f"spared-{number}", number)
                assert await receive_data(connection) == [number]
            for connection in (other, *spared):
                await connection.aclose()
        workers.process.send_signal(signal.SIGTERM)
        assert await exit_code(workers) == 0


def listening(workers: LiveWorkers) -> list[object]:
    return [event for event in list(workers.events) if event["event"] == "listening"]


async def replaced(workers: LiveWorkers, index: int, number: signal.Signals) -> None:
    """Send a worker this signal, and block until the one in its place serves."""
    serving = len(listening(workers))
    os.kill(workers.pids()[index], number)
    while len(listening(workers)) == serving:
        await trio.sleep(0.02)


async def test_a_rolling_restart_loses_no_request(workers: LiveWorkers) -> None:
    """New connections all the time: what a restarting worker doesn't take, the other one does."""
    stopping = False
    numbers: list[int] = []

    async def produce(task: int) -> None:
        sent = 0
        while not stopping:
            number = task * 1_000_000 + sent
            item = b'{"items":[{"queue":"q","payload":%d}]}' % number
            answer = await ask(workers, "POST /api/v1/push", item)
            assert answer.json()[0]["status"] == "queued"
            numbers.append(number)
            sent += 1

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for task in range(16):
                nursery.start_soon(produce, task)
            for index in (0, 1, 0):
                await replaced(workers, index, signal.SIGTERM)
            stopping = True
        async with open_api(workers) as api:
            assert sorted(await take_all(api, "q")) == sorted(numbers)
    assert workers.restarts() == [0, 1, 0]
    print(f"{len(numbers)} requests over three restarts")


async def test_sigterm_answers_everybody_and_leaves_nothing(workers: LiveWorkers) -> None:
    with trio.fail_after(SECONDS):
        parked = [await connect(workers) for _ in range(50)]
        for connection in parked:
            await send_pop(connection, "q")
        async with open_api(workers) as api:
            await api.wait_parked(len(parked))
        started = time.monotonic()
        # As an init system does that tells all processes of a service: no drain is cut short.
        for pid in (workers.process.pid, *workers.pids()):
            os.kill(pid, signal.SIGTERM)
        for connection in parked:
            assert (await connection.receive()).status == 204
            await connection.aclose()
        assert await exit_code(workers) == 0
        assert time.monotonic() - started < 5
        assert workers.living() == []
        assert not workers.restarts()


async def test_a_worker_that_hangs_is_not_waited_for(settings: ConnectionSettings) -> None:
    with running_workers(environment(settings, QUEEN_SHUTDOWN_TIMEOUT_MS="500")) as workers:
        with trio.fail_after(SECONDS):
            os.kill(workers.pids()[1], signal.SIGSTOP)
            started = time.monotonic()
            workers.process.send_signal(signal.SIGTERM)
            assert await exit_code(workers) == 0
            assert time.monotonic() - started < 5
            assert workers.living() == []


async def test_a_second_signal_ends_all_at_once(settings: ConnectionSettings) -> None:
    with running_workers(environment(settings, QUEEN_DRAIN_PARKED="wait")) as workers:
        with trio.fail_after(SECONDS):
            parked = [await connect_to(workers, index) for index in range(COUNT)]
            async with open_api(workers) as api:
                for connection in parked:
                    await send_pop(connection, "q")
                await api.wait_parked(COUNT)
            workers.process.send_signal(signal.SIGTERM)
            await trio.to_thread.run_sync(workers.wait_event, "stopping")
            started = time.monotonic()
            workers.process.send_signal(signal.SIGINT)
            assert await exit_code(workers) == 130  # known when nobody writes to the log any more
            await wait_gone(workers)
            assert time.monotonic() - started < 3
            assert workers.sockets() == []
            for connection in parked:
                await connection.aclose()


async def test_nothing_outlives_a_killed_supervisor(place: Path) -> None:
    """With an embedded PostgreSQL: neither workers nor server; and the next start finds all."""
    embedded = {
        "QUEEN_DATA_DIR": str(place / "queen"),
        "FILE_BUFFER_DIR": "",
        "DB_POOL_SIZE": "10",
        # The workers would be lost with them.
        "PG_USER": "ignored",
    }
    with running_workers(embedded) as workers, trio.fail_after(SECONDS):
        async with open_api(workers) as api:
            await api.push("q", *range(10))
            assert len(workers.sockets()) == 1
        await trio.to_thread.run_sync(workers.kill)  # returns when nobody writes to the log
        await wait_gone(workers)
        assert workers.sockets() == []
        await trio.to_thread.run_sync(workers.restart)
        async with open_api(workers) as api:
            assert sorted(await take_all(api, "q")) == list(range(10))
            buffers = await api.buffers()
            assert [worker["bufferStats"]["directory"] for worker in buffers["workers"]] == [
                str(place / "queen" / "buffers" / str(index)) for index in range(COUNT)
            ]
        server = workers.wait_event("embedded postgres: ready")["pid"]
        assert is_running(server)
        workers.process.send_signal(signal.SIGTERM)
        assert await exit_code(workers) == 0
        assert workers.living() == []
        assert not is_running(server)
        assert workers.sockets() == []


async def test_a_crash_loop_of_one_leaves_the_other_serving(
    settings: ConnectionSettings, tmp_path: Path
) -> None:
    """Somebody takes its spool as soon as it is dead, and has it for a while."""
    lock = tmp_path / "1" / "lock"
    spools = environment(settings, FILE_BUFFER_DIR=str(tmp_path))
    with running_workers(spools) as workers, lock.open() as thief, trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, fcntl.flock, thief, fcntl.LOCK_EX)
            while not is_waited_for(lock):
                await trio.sleep(0.01)
            os.kill(workers.pids()[1], signal.SIGKILL)
        while len(workers.restarts()) < 2:
            await trio.sleep(0.02)
        connection = await connect_to(workers, 0)
        await push(connection, "q", 1)
        await connection.aclose()
        fcntl.flock(thief, fcntl.LOCK_UN)
        await (await connect_to(workers, 1)).aclose()
        assert set(workers.restarts()) == {1}


def is_waited_for(path: Path) -> bool:
    """Whether somebody waits for the lock of this file."""
    inode = f":{path.stat().st_ino} "
    return any(
        "->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()
    )


async def test_a_boot_that_fails_in_one_ends_all(
    settings: ConnectionSettings, tmp_path: Path
) -> None:
    (tmp_path / "1").mkdir()
    with (tmp_path / "1" / "lock").open("w") as thief:
        fcntl.flock(thief, fcntl.LOCK_EX)
        with prepared_workers(environment(settings, FILE_BUFFER_DIR=str(tmp_path))) as workers:
            with trio.fail_after(SECONDS):
                await trio.to_thread.run_sync(workers.launch)
                assert await exit_code(workers) == 1
                assert workers.living() == []
    assert any("worker 1 ended with exit code 1 at its boot" in line for line in workers.stderr)


async def test_a_pool_that_is_too_small_to_share(settings: ConnectionSettings) -> None:
    small = environment(settings, DB_POOL_SIZE="7", QUEEN_ADMISSION_MIN="1")
    with prepared_workers(small) as workers, trio.fail_after(SECONDS):
        await trio.to_thread.run_sync(workers.launch)
        assert await exit_code(workers) == 2
        assert workers.living() == []
    for part in ('DB_POOL_SIZE=\\"7\\"', 'QUEEN_ADMISSION_MIN=\\"1\\"'):
        assert any(f"FATAL: {part} is too small for 2 workers" in line for line in workers.stderr)


async def test_a_port_that_is_taken(settings: ConnectionSettings) -> None:
    [taken] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = str(taken.socket.getsockname()[1])
    with prepared_workers(environment(settings, PORT=port)) as workers, trio.fail_after(SECONDS):
        await trio.to_thread.run_sync(workers.launch)
        assert await exit_code(workers) == 1
        assert workers.living() == []
    assert any(f"can't listen on 127.0.0.1:{port}" in line for line in workers.stderr)
    await taken.aclose()


async def test_hypercorn_shares_the_socket_too(settings: ConnectionSettings) -> None:
    with running_workers(environment(settings, QUEEN_HTTP_SERVER="hypercorn")) as workers:
        with trio.fail_after(SECONDS):
            for index in range(COUNT):
                connection = await connect_to(workers, index)
                await push(connection, "q", index)
                await connection.aclose()
            os.kill(workers.pids()[0], signal.SIGTERM)
            while len(listening(workers)) < COUNT + 1:
                await trio.sleep(0.02)
            await (await connect_to(workers, 0)).aclose()
            workers.process.send_signal(signal.SIGTERM)
            assert await exit_code(workers) == 0
