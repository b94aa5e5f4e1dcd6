"""Brokers on one PostgreSQL, with a proxy in front of every link that a fault may break."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import trio
from attrs import define, evolve, field

from tests.brokers import LiveBroker, postgres_environment
from tests.chaos.history import Letter, Place
from tests.cluster import Cluster, running_cluster
from tests.proxy import Proxy, open_proxy
from tests.replicas import free_ports, mesh_environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

DATABASE = "postgres"
# A broker under load and faults drains slowly on a machine that has other things to do.
STOP_SECONDS = 70.0

# A part that never waits so often is not broken: the spool's drain with nothing to do, say.
BREAK_SECONDS = 3.0

# What a broker may log with a traceback while its database comes and goes, and parts of it break.
BROKEN = "Broken"
EXPECTED = ("queen_trio.errors.DatabaseUnavailable", BROKEN)

ENVIRONMENT = {
    # A broker that the mesh didn't reach must not stay in maintenance for a minute.
    "QUEEN_CACHE_REFRESH_INTERVAL_MS": "1000",
    "QUEEN_SYNC_DEAD_THRESHOLD_MS": "1000",
    # Jobs that nobody runs can't be broken.
    "RETENTION_INTERVAL": "200",
    "STATS_INTERVAL_MS": "400",
    "METRICS_FLUSH_MS": "600",
}


class ChaosBroker(LiveBroker):
    """A broker that can be broken from inside: see broker.py."""

    def __init__(self, environment: Mapping[str, str], control: Path) -> None:
        root = str(Path(__file__).parents[2])
        super().__init__({**environment, "PYTHONPATH": root})
        self.control = control
        self.command = (sys.executable, "-m", "tests.chaos.broker", str(control))


@define(eq=False)
class Rig:
    """What faults act on."""

    cluster: Cluster
    brokers: Sequence[ChaosBroker]
    databases: Sequence[Proxy]
    """One a broker, between it and PostgreSQL."""
    meshes: Sequence[Proxy]
    """One a broker, in front of its mesh port."""
    starts: int = 0
    """How often a broker was started again."""
    complaints: list[str] = field(factory=list)
    """What processes did that no fault excuses."""

    async def kill(self, number: int) -> None:
        """kill -9 a broker."""
        self.look(number)
        await trio.to_thread.run_sync(self.brokers[number].kill)

    async def stop(self, number: int) -> None:
        """SIGTERM a broker, which has to end with 0."""
        broker = self.brokers[number]
        self.look(number)
        broker.process.terminate()
        code = await trio.to_thread.run_sync(broker.wait, STOP_SECONDS)
        if code != 0:
            self.complaints.append(f"broker {number} ended with {code}: {_tail(broker)}")

    async def sabotage(self, number: int, **request: Any) -> bool:
        """Ask for something inside a broker; returns whether it was done, and soon enough."""
        with trio.move_on_after(BREAK_SECONDS), suppress(OSError, trio.BrokenResourceError):
            async with await trio.open_unix_socket(str(self.brokers[number].control)) as stream:
                await stream.send_all(json.dumps(request).encode() + b"\n")
                return bool(await stream.receive_some(100))
        return False

    async def crash(self, number: int, step: int) -> bool:
        """Break http, which has to end the process with 1; returns whether it was broken."""
        broker = self.brokers[number]
        self.look(number)
        done = await self.sabotage(number, step=step, **{"break": "http"})
        if not done and not await self._is_stopping(number):  # its answer may just not have come
            return False
        code = await trio.to_thread.run_sync(broker.wait, STOP_SECONDS)
        if code != 1:
            self.complaints.append(f"broker {number} ended with {code}: {_tail(broker)}")
        self._look_at_log(number, "nursery crashed, stopping")
        return True

    async def _is_stopping(self, number: int) -> bool:
        wait = self.brokers[number].wait_event
        try:
            await trio.to_thread.run_sync(wait, "nursery crashed, stopping", 1.0)
        except AssertionError:
            return False
        return True

    async def start(self, number: int) -> None:
        """Start a broker again and wait until it serves."""
        self.starts += 1
        await trio.to_thread.run_sync(self.brokers[number].restart)

    @contextmanager
    def filled_disk(self, number: int, room: int) -> Iterator[None]:
        """Let no file of a broker grow beyond so many bytes: it writes what fits, then fails."""
        process = psutil.Process(self.brokers[number].process.pid)
        soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (room, hard))
        try:
            yield
        finally:
            process.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))

    def look(self, number: int) -> None:
        """Complain of a broker that isn't running, or that logged an error it didn't expect."""
        broker = self.brokers[number]
        self._look_at_log(number)
        if (code := broker.process.poll()) is not None:
            self.complaints.append(f"broker {number} ended by itself, {code}: {_tail(broker)}")

    def _look_at_log(self, number: int, expected: str | None = None) -> None:
        for event in self.brokers[number].events:
            if "exception" in event and event["event"] != expected:
                name = raised(event["exception"])
                if name not in EXPECTED:
                    self.complaints.append(f"broker {number} logged {event['event']!r}: {name}")

    def read_log(self, transaction_ids: Iterable[str]) -> dict[Place, list[str]]:
        """The transactionIds that each partition stores, by offset.

        `?…` stands for an unknown hash, `?` for nothing.
        """
        names = {hashlib.blake2b(t.encode(), digest_size=16).digest(): t for t in transaction_ids}
        rows = self.cluster.execute(
            "SELECT q.name, p.name, t.base_offset, t.hashes FROM queen.log_txns t"
            " JOIN queen.log_partitions p ON p.id = t.partition_id"
            " JOIN queen.queues q ON q.id = p.queue_id"
            " JOIN queen.log_segments s USING (partition_id, base_offset, end_offset)"
            " ORDER BY 1, 2, 3",
            DATABASE,
        )
        log: dict[Place, list[str]] = {}
        for queue, partition, base_offset, hashes in rows:
            here = log.setdefault(Place(queue, partition), [])
            here += ["?"] * (base_offset - len(here))
            for at in range(0, len(hashes), 16):
                one = bytes(hashes[at : at + 16])
                here.append(names.get(one, f"?{one.hex()}"))
        return log

    def read_letters(self) -> dict[str, Letter]:
        """The dead letters, by id."""
        rows = self.cluster.execute(
            "SELECT id::text, consumer_group, queue_name, partition_name, transaction_id"
            " FROM queen.log_dlq",
            DATABASE,
        )
        return {name: Letter(group, Place(q, p), t) for name, group, q, p, t in rows}

    def count_open(self) -> int:
        """How many (partition, group) pairs have a cursor below the end."""
        [(count,)] = self.cluster.execute(
            "SELECT count(*) FROM queen.log_consumers c"
            " JOIN queen.log_partitions p ON p.id = c.partition_id"
            " WHERE c.committed < p.last_offset",
            DATABASE,
        )
        return int(count)

    def count_cursors(self) -> int:
        """How many (partition, group) pairs there are."""
        [(count,)] = self.cluster.execute("SELECT count(*) FROM queen.log_consumers", DATABASE)
        return int(count)


def raised(trace: str) -> str:
    """The exception that a traceback is of; its message may have lines of its own."""
    if "Exception Group Traceback" in trace:
        return "ExceptionGroup"
    _, _, last = trace.rpartition("Traceback (most recent call last):\n")
    return next(line for line in last.splitlines() if line[0] != " ").partition(":")[0]


def _tail(broker: ChaosBroker) -> str:
    return "".join(broker.stderr[-15:])


@asynccontextmanager
async def open_rig(brokers: int) -> AsyncIterator[Rig]:
    """Run it all for the block's time."""
    ports = free_ports(brokers)
    async with AsyncExitStack() as stack:
        inner = stack.enter_context(ExitStack())
        cluster = await trio.to_thread.run_sync(inner.enter_context, running_cluster())
        databases = [
            await stack.enter_async_context(open_proxy(cluster.port)) for _ in range(brokers)
        ]
        meshes = [await stack.enter_async_context(open_proxy(port)) for port in ports]
        spools = Path(inner.enter_context(tempfile.TemporaryDirectory(prefix="queen-chaos-")))
        live = []
        for number, port in enumerate(ports):
            settings = evolve(cluster.settings(DATABASE, tcp=True), port=databases[number].port)
            peers = [mesh.port for other, mesh in enumerate(meshes) if other != number]
            broker = ChaosBroker(
                {
                    **postgres_environment(settings),
                    **mesh_environment(number, port, peers),
                    "FILE_BUFFER_DIR": str(spools / str(number)),
                    **ENVIRONMENT,
                },
                spools / f"control-{number}",
            )
            broker.launch()
            stack.callback(broker.end)
            live.append(broker)
        for broker in live:
            await trio.to_thread.run_sync(broker.wait_serving)
        yield Rig(cluster, live, databases, meshes)
