"""The systems that can be measured: how each is started, and what its settings are."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import asynccontextmanager
from enum import Enum
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio
from attrs import frozen

from bench.broker import open_broker, open_pair
from bench.measure import Site
from bench.peers import FLOOR, OFFICIAL, OURS
from bench.processes import HOST, free_ports, open_process, wait_listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from bench.postgres import Postgres

WORKERS: Final = 2
# Where Debian has RabbitMQ's own script, beside the wrapper on PATH that changes to its account.
RABBITMQ_BIN: Final = Path("/usr/lib/rabbitmq/bin")
_serials = count()
# Prints those of its arguments that are no modules.
_LOOK: Final = (
    "import sys; from importlib.util import find_spec; "
    "print(*[name for name in sys.argv[1:] if find_spec(name) is None])"
)


class Setup(Enum):
    """How many of it run, and how they are joined."""

    ONE = "one process"
    MESH = "two brokers joined by the mesh"
    WORKERS = f"serve --workers {WORKERS}"


@frozen
class Place:
    """Where systems run: on this PostgreSQL, with their files in this directory."""

    postgres: Postgres
    scratch: Path

    def directory(self, name: str) -> Path:
        """A path in it that isn't used yet."""
        return self.scratch / f"{name}-{next(_serials)}"


@frozen
class System:
    """One system.

    `open` starts it in a setup (only ours knows others than ONE), `modules` are what its clients
    import and `programs` what must be on the machine.
    """

    name: str
    notes: str
    open: Callable[[Place, Setup], AbstractAsyncContextManager[Site]]
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    def missing(self, python: Path) -> list[str]:
        """What has to be installed first: modules of the clients' Python, programs."""
        looked = subprocess.run(
            [python, "-c", _LOOK, *self.modules], capture_output=True, text=True, check=True
        )
        return looked.stdout.split() + [p for p in self.programs if shutil.which(p) is None]


@asynccontextmanager
async def _open_queen(name: str, place: Place, setup: Setup) -> AsyncIterator[Site]:
    postgres = place.postgres
    directory = place.directory(name)
    async with postgres.open_database(name):
        if setup is Setup.MESH:
            directory.mkdir()
            async with open_pair(postgres, name, directory) as pair:
                first, second = pair
                yield Site(
                    address=str(first.port),
                    consumer_address=str(second.port),
                    broker=(first.pid, second.pid),
                    postgres=(postgres.pid,),
                    database=name,
                )
            return
        workers = WORKERS if setup is Setup.WORKERS else 1
        async with open_broker(postgres, name, directory, workers=workers) as broker:
            yield Site(
                address=str(broker.port),
                broker=(broker.pid,),
                postgres=(postgres.pid,),
                database=name,
            )


@asynccontextmanager
async def _open_database(name: str, place: Place, _setup: Setup) -> AsyncIterator[Site]:
    """All that a library on PostgreSQL needs."""
    async with place.postgres.open_database(name) as address:
        yield Site(address=address, postgres=(place.postgres.pid,), database=name)


@asynccontextmanager
async def _open_server(
    command: Sequence[str], directory: Path, port: int, **options: Any
) -> AsyncIterator[Site]:
    """A server that is one process tree, with its log beside its data."""
    log = directory / "server.log"
    async with open_process(command, log, **options) as process:
        await wait_listening(process, port, log)
        yield Site(address=str(port), broker=(process.pid,))


@asynccontextmanager
async def _open_rabbitmq(place: Place, _setup: Setup) -> AsyncIterator[Site]:
    directory = place.directory("rabbitmq")
    directory.mkdir()
    (directory / "enabled_plugins").write_text("[].\n")
    (directory / "rabbitmq.conf").write_text("log.console = false\n")
    port, distribution, mapper = free_ports(3)
    environment = {
        **os.environ,
        "HOME": str(directory),
        "RABBITMQ_NODENAME": "bench@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": HOST,
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "ERL_EPMD_ADDRESS": HOST,
        "ERL_EPMD_PORT": str(mapper),
    }
    program = {name: str(RABBITMQ_BIN / name) for name in ("rabbitmq-server", "rabbitmqctl")}
    if not RABBITMQ_BIN.exists():
        program = {name: name for name in program}
    try:
        async with _open_server(
            [program["rabbitmq-server"]],
            directory,
            port,
            environment=environment,
            stop=[program["rabbitmqctl"], "-q", "stop"],
        ) as site:
            yield site
    finally:
        # RabbitMQ leaves its port mapper running; this one, on a port of its own, is ours.
        with trio.CancelScope(shield=True):
            await trio.run_process(
                ["epmd", "-port", str(mapper), "-kill"], capture_stdout=True, check=False
            )


@asynccontextmanager
async def _open_nats(place: Place, _setup: Setup) -> AsyncIterator[Site]:
    directory = place.directory("nats")
    directory.mkdir()
    [port] = free_ports(1)
    config = directory / "nats.conf"
    config.write_text(
        f'listen: "{HOST}:{port}"\njetstream {{ store_dir: "{directory}/streams" }}\n'
    )
    async with _open_server(["nats-server", "-c", str(config)], directory, port) as site:
        yield site


@asynccontextmanager
async def _open_redis(fsync: str, place: Place, _setup: Setup) -> AsyncIterator[Site]:
    directory = place.directory("redis")
    directory.mkdir()
    [port] = free_ports(1)
    command = ["redis-server", "--bind", HOST, "--port", str(port), "--dir", str(directory)]
    command += ["--appendonly", "yes", "--appendfsync", fsync, "--save", ""]
    async with _open_server(command, directory, port) as site:
        yield site


def _on_postgres(name: str, notes: str, *modules: str) -> System:
    return System(name, notes, partial(_open_database, name), modules)


SYSTEMS: Final = {
    system.name: system
    for system in (
        _on_postgres(
            FLOOR, "one table, DELETE .. SKIP LOCKED in a transaction, NOTIFY: the floor", "psycopg"
        ),
        _on_postgres(
            "pgmq",
            "send / send_batch / read(vt=30) + delete; d by read_with_poll at its default, 100 ms",
            "psycopg",
            "pgmq",
        ),
        _on_postgres(
            "pgmq-notify",
            "the same with enable_notify_insert(queue, 0) and LISTEN",
            "psycopg",
            "pgmq",
        ),
        _on_postgres(
            "procrastinate",
            "defer / batch_defer; 8 workers of concurrency 1, defaults otherwise",
            "psycopg",
            "psycopg_pool",
            "procrastinate",
        ),
        _on_postgres(
            "pgqueuer",
            "enqueue of one or of lists; 8 QueueManagers, batches of 100, 'durable' (default)",
            "psycopg",
            "asyncpg",
            "pgqueuer",
        ),
        System(
            "rabbitmq-quorum",
            "quorum queue on one node (synced before the confirm), persistent, confirms",
            _open_rabbitmq,
            ("pika",),
            ("rabbitmq-server",),
        ),
        System(
            "rabbitmq-classic",
            "durable classic queue, persistent messages, publisher confirms",
            _open_rabbitmq,
            ("pika",),
            ("rabbitmq-server",),
        ),
        System(
            "nats",
            "JetStream, files, 1 replica; NOT synced before the confirm (every 2 min, default)",
            _open_nats,
            ("nats",),
            ("nats-server",),
        ),
        System(
            "redis-everysec",
            "stream; appendfsync everysec: NOT synced before the reply",
            partial(_open_redis, "everysec"),
            ("redis", "hiredis"),
            ("redis-server",),
        ),
        System(
            "redis-always",
            "stream; appendfsync always: synced before the reply",
            partial(_open_redis, "always"),
            ("redis", "hiredis"),
            ("redis-server",),
        ),
        System(
            OURS, "default settings; acks of whole batches, confirmed", partial(_open_queen, OURS)
        ),
        System(
            OFFICIAL,
            "the same broker and calls, by the official Python client with its defaults",
            partial(_open_queen, OFFICIAL),
            ("queen",),
        ),
    )
}
