"""Applying the schema: numbered migrations, then the functions, under one cluster-wide lock.

`sql/migrations/NNNN_name.sql` run once each, in order, each in a transaction of its own with its
row in `queen.schema_version`. `sql/functions/*.sql` are CREATE OR REPLACE and run again whenever
their text has changed. A broker older than the schema applies nothing: functions carry `_vN` and
stay, so it keeps running through a rolling update (spec 1, "Schema apply"; spec 8.23).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import frozen

from queen_trio.errors import DatabaseError, DatabaseUnavailable, SchemaError

from .advisory import AdvisoryLock, try_lock, unlock
from .connection import connect

if TYPE_CHECKING:
    from .connection import TrioConnection
    from .settings import ConnectionSettings

log = structlog.get_logger(__name__)

SQL_DIRECTORY: Final = Path(__file__).parent.parent / "_sql"
# The lock is polled, so that no statement deadline and no pooler time-out sees a long wait.
LOCK_POLL_SECONDS: Final = 0.1
_FUNCTION = re.compile(r"CREATE OR REPLACE FUNCTION queen\.(\w+)")


@frozen
class Migration:
    """One file of sql/migrations."""

    version: int
    name: str
    sql: str


@frozen
class Schema:
    """What this broker brings along: its migrations, and its functions with their checksum."""

    bootstrap_sql: str
    migrations: tuple[Migration, ...]
    functions_sql: str

    @property
    def version(self) -> int:
        return self.migrations[-1].version

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.functions_sql.encode()).hexdigest()

    @property
    def function_names(self) -> list[str]:
        return sorted(set(_FUNCTION.findall(self.functions_sql)))


def read_schema(directory: Path = SQL_DIRECTORY) -> Schema:
    """Read the SQL files that ship with this broker."""
    migrations = tuple(
        Migration(int(path.name[:4]), path.stem[5:], path.read_text())
        for path in sorted(directory.glob("migrations/*.sql"))
    )
    functions = "\n".join(path.read_text() for path in sorted(directory.glob("functions/*.sql")))
    return Schema((directory / "bootstrap.sql").read_text(), migrations, functions)


async def apply_schema(settings: ConnectionSettings) -> int:
    """Bring the database to this broker's schema and return its version; idempotent.

    Raises `SchemaError` when a statement fails, `DatabaseUnavailable` when the server can't be
    reached (the caller retries that). Cancellation leaves whole migrations or none.
    """
    schema = read_schema()
    # No statement deadline: a migration may take long, and it is not a client that waits.
    conn = await connect(settings.without_statement_timeout())
    try:
        await _lock(conn)
        try:
            return await _apply(conn, schema)
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            raise SchemaError(f"schema apply failed: {error}") from error
        finally:
            await unlock(conn, AdvisoryLock.SCHEMA)  # noqa: ASYNC102 - it shields itself
    finally:
        conn.close_nowait()


async def check_schema(settings: ConnectionSettings) -> int:
    """Say whether a schema applied by someone else serves this broker (QUEEN_APPLY_SCHEMA=0).

    Returns its version; raises `SchemaError` naming what is missing.
    """
    schema = read_schema()
    conn = await connect(settings)
    try:
        found = await _current(conn)
        if found is None:
            raise SchemaError(
                "QUEEN_APPLY_SCHEMA is off and the database has no queen schema: "
                "start one broker with it on, or apply the files of sql/"
            )
        if found[0] < schema.version:
            raise SchemaError(
                f"QUEEN_APPLY_SCHEMA is off and the schema is at version {found[0]}, "
                f"this broker needs {schema.version}"
            )
        cursor = await conn.execute(
            "SELECT p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace "
            "WHERE n.nspname = 'queen'"
        )
        missing = set(schema.function_names) - {name for (name,) in await cursor.fetchall()}
        if missing:
            raise SchemaError(
                f"the schema lacks functions of this broker: {', '.join(sorted(missing))}"
            )
        return found[0]
    finally:
        conn.close_nowait()


async def _lock(conn: TrioConnection) -> None:
    waiting = False
    while not await try_lock(conn, AdvisoryLock.SCHEMA):
        if not waiting:
            waiting = True
            log.info("schema lock held by another replica, waiting")
        await trio.sleep(LOCK_POLL_SECONDS)


async def _current(conn: TrioConnection) -> tuple[int, str] | None:
    """Version and functions checksum found in the database; None without a schema."""
    cursor = await conn.execute("SELECT to_regclass('queen.schema_version') IS NOT NULL")
    if await cursor.fetchone() != (True,):
        return None
    cursor = await conn.execute(
        "SELECT coalesce(max(version), 0), "
        "coalesce((SELECT checksum FROM queen.schema_functions), '') "
        "FROM queen.schema_version"
    )
    row = await cursor.fetchone()
    assert row is not None  # noqa: S101 - an aggregate always has a row
    return row[0], row[1]


async def _apply(conn: TrioConnection, schema: Schema) -> int:
    found = await _current(conn)
    if found is None:
        async with conn.transaction():
            await conn.execute(schema.bootstrap_sql)
        found = (0, "")
    version, checksum = found
    if version > schema.version:
        log.info("schema is newer than this broker, left as it is", version=version)
        return version
    for migration in schema.migrations:
        if migration.version > version:
            async with conn.transaction():
                await conn.execute(migration.sql)
                await conn.execute(
                    "INSERT INTO queen.schema_version (version, name) VALUES (%s, %s)",
                    [migration.version, migration.name],
                )
            log.info("schema migrated", version=migration.version, name=migration.name)
    if checksum != schema.checksum:
        async with conn.transaction():
            await conn.execute(schema.functions_sql)
            await conn.execute(
                "INSERT INTO queen.schema_functions (checksum) VALUES (%s) "
                "ON CONFLICT (single) DO UPDATE SET checksum = excluded.checksum",
                [schema.checksum],
            )
    return schema.version
