"""The broker that is measured: `python -m queen_trio serve`, a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import trio
from attrs import frozen

from bench.postgres import USER
from bench.processes import HOST, LOG_TAIL, free_ports, open_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from bench.postgres import Postgres

START_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.02
# From a link that is up to one that has been heard of on both sides.
MESH_SECONDS: Final = 20.0


@frozen
class RunningBroker:
    """The pid of its process (or of its workers' supervisor) and the port that it listens on."""

    pid: int
    port: int


@asynccontextmanager
async def open_broker(
    postgres: Postgres,
    database: str,
    scratch: Path,
    *,
    workers: int = 1,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[RunningBroker]:
    """Run a broker with default settings on a database; leaving stops it.

    Its spool and its log are in the new directory `scratch`. Raises RuntimeError, with the log, if
    it doesn't start.
    """
    await trio.Path(scratch).mkdir()
    ours = ("PG_", "QUEEN_", "DB_", "JWT_", "FILE_BUFFER_", "POP_WAIT_")
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "PORT": "0",
        "QUEEN_BIND_ADDR": HOST,
        "QUEEN_LOG_JSON": "true",
        "FILE_BUFFER_DIR": str(scratch / "buffers"),
        "PG_HOST": HOST,
        "PG_PORT": str(postgres.port),
        "PG_USER": USER,
        "PG_DATABASE": database,
        **(environment or {}),
    }
    command = [sys.executable, "-m", "queen_trio", "serve"]
    if workers > 1:
        command += ["--workers", str(workers)]
    log = scratch / "broker.log"
    async with open_process(command, log, environment=variables) as process:
        events = await _wait_events(process, trio.Path(log), "listening", workers)
        yield RunningBroker(process.pid, int(events[0]["port"]))


@asynccontextmanager
async def open_pair(
    postgres: Postgres, database: str, scratch: Path
) -> AsyncIterator[list[RunningBroker]]:
    """Run two brokers, joined by the mesh."""
    ports = free_ports(2)
    async with AsyncExitStack() as stack:
        brokers = []
        for number, port in enumerate(ports):
            mesh = {
                "QUEEN_SERVER_ID": f"queen-{number}",
                "QUEEN_MESH_PORT": str(port),
                "QUEEN_MESH_PEERS": f"{HOST}:{ports[1 - number]}",
            }
            opening = open_broker(postgres, database, scratch / str(number), environment=mesh)
            brokers.append(await stack.enter_async_context(opening))
        with trio.fail_after(MESH_SECONDS):
            for broker in brokers:
                while not await trio.to_thread.run_sync(_is_joined, broker.port):  # noqa: ASYNC110
                    await trio.sleep(POLL_SECONDS)  # a process has no event for us
        yield brokers


def _is_joined(port: int) -> bool:
    """Whether the broker sends to its peer and hears it."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    connection.request("GET", "/internal/api/shared-state/stats")
    with connection.getresponse() as answer:
        state = json.load(answer)
    return bool(state["servers_alive"]) and all(peer["connected"] for peer in state["peers"])


async def _wait_events(
    process: trio.Process, log: trio.Path, name: str, count: int
) -> list[dict[str, Any]]:
    """Wait until an event was logged so many times (once for each worker)."""
    with trio.move_on_after(START_SECONDS):
        while process.poll() is None:
            lines = [line for line in (await log.read_text()).splitlines() if line.endswith("}")]
            events = [json.loads(line) for line in lines if line.startswith("{")]
            if len(found := [event for event in events if event["event"] == name]) >= count:
                return found
            await trio.sleep(POLL_SECONDS)
    raise RuntimeError(f"the broker didn't start:\n{(await log.read_text())[-LOG_TAIL:]}")
