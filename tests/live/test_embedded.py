"""`queen-trio serve` and nothing else: the broker brings its PostgreSQL, and takes it away."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

import psutil
import trio

from tests.brokers import running_broker
from tests.cluster import is_running
from tests.http.api import data, open_api

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 60


def servers_in(place: Path) -> list[int]:
    """The pids of what runs PostgreSQL on a data directory under `place`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(argument.startswith(str(place)) for argument in process.cmdline()):
                found.append(process.pid)
    return found


async def wait_no_server(place: Path) -> None:
    while servers_in(place):  # noqa: ASYNC110 - other processes
        await trio.sleep(0.05)


async def test_first_start_crash_and_second_start(place: Path) -> None:
    # The deepest directory is the broker's to make; the server's files are below it.
    environment = {
        "QUEEN_DATA_DIR": str(place / "queen"),
        "DB_POOL_SIZE": "5",
        "FILE_BUFFER_DIR": "",  # the default: beside the server's data
    }
    with trio.fail_after(SECONDS), running_broker(environment) as broker:
        async with open_api(broker) as api:
            await api.push("q", *range(10))
            assert data(await api.pop("q", batch=3, autoAck=True)) == [0, 1, 2]
            assert servers_in(place)
            buffers = await api.buffers()
            assert buffers["bufferStats"]["directory"] == str(place / "queen" / "buffers")
            assert buffers["bufferHealthy"] is True
        await trio.to_thread.run_sync(broker.kill)
        # At once: the server of the killed broker may still be there.
        await trio.to_thread.run_sync(broker.restart)
        async with open_api(broker) as api:
            assert data(await api.pop("q", autoAck=True)) == list(range(3, 10))
        assert await trio.to_thread.run_sync(broker.stop) == 0
        assert servers_in(place) == []
        # And a crash that nobody follows up leaves nothing running either.
        await trio.to_thread.run_sync(broker.restart)
        assert servers_in(place)
        await trio.to_thread.run_sync(broker.kill)
        await wait_no_server(place)


async def test_a_server_that_does_not_stop_is_killed_in_time(place: Path) -> None:
    """With its shell, which can't be asked to see to it either; what was stored is safe."""
    environment = {
        "QUEEN_DATA_DIR": str(place / "queen"),
        "DB_POOL_SIZE": "5",
        "FILE_BUFFER_DIR": "",
        "QUEEN_SHUTDOWN_TIMEOUT_MS": "2000",
    }
    with trio.fail_after(SECONDS), running_broker(environment) as broker:
        async with open_api(broker) as api:
            await api.push("q", 1)
        stuck = {
            process.pid: process
            for pid in servers_in(place)
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
        }
        for process in stuck.values():
            process.suspend()
        started = time.monotonic()
        broker.process.send_signal(signal.SIGTERM)
        assert await trio.to_thread.run_sync(broker.wait) == 0
        took = time.monotonic() - started
        print(f"SIGTERM to exit with a PostgreSQL that doesn't stop: {took:.2f} s")
        assert took < 5
        await wait_no_server(place)
        while any(is_running(process) for process in stuck.values()):
            await trio.sleep(0.001)  # they were killed: the kernel takes them off its list
        await trio.to_thread.run_sync(broker.restart)
        async with open_api(broker) as api:
            assert data(await api.pop("q", autoAck=True)) == [1]
        assert await trio.to_thread.run_sync(broker.stop) == 0
        assert servers_in(place) == []
