"""The private PostgreSQL of a run, as durable as in production."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import psycopg
import trio
from attrs import frozen

from queen_trio.embedded import open_embedded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# fsync, synchronous_commit and full_page_writes are on in every embedded server; named here because
# the numbers mean nothing without them.
SETTINGS: Final = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "1GB",
    "max_connections": "300",  # 160 of the broker, 16 of the floor, and some
}
BROKER_DATABASE: Final = "queen"
FLOOR_DATABASE: Final = "floor"


@frozen
class Postgres:
    """The running server: the pid of its process tree's root, and how to reach it."""

    pid: int
    host: str
    port: int
    version: str

    def dsn(self, database: str) -> str:
        return f"host={self.host} port={self.port} user=postgres dbname={database}"

    async def run(self, database: str, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        await trio.to_thread.run_sync(_run, self.dsn(database), statements)


def _run(dsn: str, statements: tuple[str, ...]) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def _version(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SHOW server_version").fetchone()
        return str(row[0]) if row else "?"


@asynccontextmanager
async def open_postgres(data_dir: Path) -> AsyncIterator[Postgres]:
    """Run a PostgreSQL with an empty database for each side; leaving stops it.

    `data_dir` must be on the kind of disk that is to be measured.
    """
    async with open_embedded(data_dir, settings=SETTINGS) as embedded:
        dsn = f"host={embedded.host} port={embedded.port} user=postgres dbname=postgres"
        version = await trio.to_thread.run_sync(_version, dsn)
        postgres = Postgres(embedded.pid, embedded.host, embedded.port, version)
        for database in (BROKER_DATABASE, FLOOR_DATABASE):
            await postgres.run("postgres", f"CREATE DATABASE {database}")
        yield postgres
