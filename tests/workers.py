"""`queen-trio serve --workers N` for tests: the supervisor's process, and its workers by index."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psutil
import trio

from tests.brokers import LiveBroker
from tests.http.raw import RawConnection, connect
from tests.replicas import STATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COUNT = 2
READY_SECONDS = 30.0


class LiveWorkers(LiveBroker):
    """A supervisor and its workers; `start` returns when all of them serve."""

    command = (sys.executable, "-m", "queen_trio", "serve", "--workers", str(COUNT))
    server_ids: ClassVar = [f"host-{index}" for index in range(COUNT)]

    def wait_serving(self) -> None:
        super().wait_serving()
        self.wait_event("workers ready", READY_SECONDS)

    def pids(self) -> list[int]:
        """The process of each worker that was started last."""
        found: dict[int, int] = {}
        with self._changed:
            for event in self.events:
                if event["event"] == "worker started":
                    found[event["of"]] = event["pid"]
        return [found[index] for index in range(COUNT)]

    def restarts(self) -> list[int]:
        """Which workers were started again, in the order of their ends."""
        with self._changed:
            return [e["of"] for e in self.events if e["event"].startswith("worker ended")]

    def sockets(self) -> list[Path]:
        """The directories of the sockets by which workers ask each other."""
        return list(Path(self._environment["TMPDIR"]).glob("queen-workers-*"))

    def living(self) -> list[int]:
        """What still runs of the workers ever started."""
        with self._changed:
            pids = [event["pid"] for event in self.events if event["event"] == "worker started"]
        return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def connect_to(broker: LiveBroker, index: int) -> RawConnection:
    """A connection that this worker has accepted."""
    while True:
        connection = await connect(broker)
        await connection.send("GET /status")
        if (await connection.receive()).json()["serverId"] == LiveWorkers.server_ids[index]:
            return connection
        await connection.aclose()


async def wait_meshed(broker: LiveBroker) -> None:
    """Block until each worker's hints reach the other."""
    for index in range(COUNT):
        connection = await connect_to(broker, index)
        while True:
            await connection.send(f"GET {STATS}")
            state = (await connection.receive()).json()
            if all(peer["connected"] for peer in state["peers"]):
                break
            await trio.sleep(0.02)
        await connection.aclose()


def mesh_port() -> int:
    """A port that was free a moment ago, as were those after it for the other workers."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = 0
            for index in range(COUNT):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", first + index if index else 0))
                first = first or int(probe.getsockname()[1])
            return first


@contextmanager
def prepared_workers(environment: Mapping[str, str]) -> Iterator[LiveWorkers]:
    """Workers that the block starts; ended with it."""
    with tempfile.TemporaryDirectory(prefix="queen-spool-") as spool:
        workers = LiveWorkers(
            {
                "FILE_BUFFER_DIR": spool,
                "TMPDIR": spool,
                "QUEEN_SERVER_ID": "host",
                "QUEEN_MESH_PORT": str(mesh_port()),
                "QUEEN_SHUTDOWN_TIMEOUT_MS": "10000",
                **environment,
            }
        )
        try:
            yield workers
        finally:
            workers.end()  # the workers follow, which closes the log


@contextmanager
def running_workers(environment: Mapping[str, str]) -> Iterator[LiveWorkers]:
    """Run workers for the block's time."""
    with prepared_workers(environment) as workers:
        workers.start()
        yield workers


async def wait_gone(workers: LiveWorkers) -> None:
    """Block until no worker runs any more."""
    while workers.living():
        await trio.sleep(0.02)
