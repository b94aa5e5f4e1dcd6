"""The broker that is measured: `python -m queen_trio serve`, a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio
from attrs import frozen

from bench.postgres import BROKER_DATABASE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.postgres import Postgres

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 20.0
POLL_SECONDS: Final = 0.02


@frozen
class RunningBroker:
    """The pid of its process and the port that it listens on."""

    pid: int
    port: int


@asynccontextmanager
async def open_broker(postgres: Postgres, scratch: Path) -> AsyncIterator[RunningBroker]:
    """Run a broker with default settings on `postgres`; leaving stops it.

    Its log goes to a file in `scratch`. Raises RuntimeError, with the log, if it doesn't start.
    """
    ours = ("PG_", "QUEEN_", "DB_", "JWT_", "FILE_BUFFER_", "POP_WAIT_")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "PORT": "0",
        "QUEEN_BIND_ADDR": "127.0.0.1",
        "QUEEN_LOG_JSON": "true",
        "FILE_BUFFER_DIR": str(scratch / "buffers"),
        "PG_HOST": postgres.host,
        "PG_PORT": str(postgres.port),
        "PG_USER": "postgres",
        "PG_DATABASE": BROKER_DATABASE,
    }
    log = scratch / "broker.log"
    with log.open("wb") as stderr:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "queen_trio", "serve"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is for us
        )
    try:
        yield RunningBroker(process.pid, await _wait_listening(process, trio.Path(log)))
    finally:
        with trio.move_on_after(STOP_SECONDS, shield=True):
            process.terminate()
            await process.wait()
        if process.returncode is None:
            process.kill()


async def _wait_listening(process: trio.Process, log: trio.Path) -> int:
    with trio.move_on_after(START_SECONDS):
        while process.poll() is None:
            for line in (await log.read_text()).splitlines():
                if line.startswith("{") and line.endswith("}"):
                    event = json.loads(line)
                    if event["event"] == "listening":
                        return int(event["port"])
            await trio.sleep(POLL_SECONDS)
    raise RuntimeError(f"the broker didn't start:\n{(await log.read_text())[-4000:]}")
