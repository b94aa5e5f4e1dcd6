"""Places, children and connections for the tests of the private PostgreSQL, all of them real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
import pytest
import structlog
import trio

from queen_trio.embedded import (
    account,
    binaries,
    orphans,
    progress,
    server,
    supervisor,
)
from queen_trio.embedded.account import choose_account
from queen_trio.embedded.binaries import find_binaries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from queen_trio.embedded import (
        Embedded,
    )

BROKER = Path(__file__).with_name("broker.py")

# Generous: two busy cores. Nothing waits this long unless it fails. In seconds.
PATIENCE = 30.0


@pytest.fixture
def programs(place: Path) -> Path:
    """PostgreSQL's programs, where every account can execute them."""
    return find_binaries(account=choose_account(place / "postgres")).bin_dir


@pytest.fixture
def endless_initdb(place: Path, programs: Path) -> Path:
    """Real programs, but for an initdb that never returns once it is done: no test is too late."""
    directory = place / "endless"
    directory.mkdir()
    (directory / "postgres").symlink_to(programs / "postgres")
    script = f'#!/bin/sh\n{programs}/initdb "$@" && while :; do sleep 0.1; done\n'
    (directory / "initdb").write_text(script)
    (directory / "initdb").chmod(0o755)
    directory.chmod(0o755)
    return directory


@pytest.fixture
def sql() -> Callable[..., list[Any]]:
    """Run one statement on an embedded server, committed, and return its rows."""

    def run(server: Embedded | str, statement: str) -> list[Any]:
        host = server if isinstance(server, str) else server.host
        with psycopg.connect(
            host=host, port=5432, user="postgres", dbname="postgres", connect_timeout=10
        ) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    return run


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the package logs from here on, whatever other tests configured."""
    entries: list[dict[str, Any]] = []

    def record(_logger: object, _method: str, entry: dict[str, Any]) -> dict[str, Any]:
        entries.append(dict(entry))
        raise structlog.DropEvent

    logger = structlog.wrap_logger(None, processors=[record])
    for module in (account, binaries, orphans, progress, server, supervisor):
        monkeypatch.setattr(module, "log", logger)
    return entries


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Any]:
    """Poll a condition and return its first true value."""

    async def poll(condition: Callable[[], object]) -> object:
        with trio.fail_after(PATIENCE):
            while not (value := condition()):  # noqa: ASYNC110 - processes tell nobody
                await trio.sleep(0.01)
            return value

    return poll


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """Whether a process has ended (one that nobody waited for counts as ended)."""

    def check(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return check


@pytest.fixture
def start_broker() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `broker.py` with the given arguments; killed at the end if it still runs."""
    children: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path, under: Sequence[str] = ()) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [*under, sys.executable, str(BROKER), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        with child:
            if child.poll() is None:
                os.kill(child.pid, signal.SIGKILL)


@pytest.fixture
def as_root() -> None:
    """For what only root meets: changing accounts."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to change accounts")
