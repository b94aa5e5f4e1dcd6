"""The schema apply: once, in order, alone, and never half (spec 1, "Schema apply"; spec 8.23)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from queen_trio.errors import DatabaseUnavailable, SchemaError
from queen_trio.store import migrate
from queen_trio.store.advisory import AdvisoryLock
from queen_trio.store.connection import connect
from queen_trio.store.migrate import apply_schema, check_schema, read_schema
from queen_trio.store.settings import ConnectionSettings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster import Cluster

# What makes two schemas the same: every column, index, constraint, table option and function.
FINGERPRINT = """
SELECT 'column', c.table_name, c.column_name, c.ordinal_position::text, c.data_type, c.is_nullable,
       c.column_default
  FROM information_schema.columns c WHERE c.table_schema = 'queen'
UNION ALL
SELECT 'index', i.tablename, i.indexname, NULL, i.indexdef, NULL, NULL
  FROM pg_indexes i WHERE i.schemaname = 'queen'
UNION ALL
SELECT 'constraint', r.conrelid::regclass::text, r.conname, NULL, pg_get_constraintdef(r.oid),
       NULL, NULL
  FROM pg_constraint r JOIN pg_namespace n ON n.oid = r.connamespace WHERE n.nspname = 'queen'
UNION ALL
SELECT 'table', k.relname, k.reloptions::text, k.relkind::text, a.attname, a.attstorage::text, NULL
  FROM pg_class k JOIN pg_namespace n ON n.oid = k.relnamespace
  LEFT JOIN pg_attribute a ON a.attrelid = k.oid AND a.attnum > 0 AND k.relkind = 'r'
 WHERE n.nspname = 'queen'
UNION ALL
SELECT 'function', p.proname, pg_get_functiondef(p.oid), NULL, NULL, NULL, NULL
  FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'queen'
ORDER BY 1, 2, 3, 4, 5
"""

A_FUNCTION = "CREATE OR REPLACE FUNCTION queen.test_v1() RETURNS int LANGUAGE sql AS 'SELECT {}'"


@pytest.fixture
def empty(cluster: Cluster, empty_database: str) -> ConnectionSettings:
    """How to reach a database without the schema."""
    return cluster.settings(empty_database)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of sql/ to change, which is what this broker brings along from now on."""
    for path in migrate.SQL_DIRECTORY.rglob("*.sql"):
        copy = tmp_path / path.relative_to(migrate.SQL_DIRECTORY)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    monkeypatch.setattr(migrate, "read_schema", partial(read_schema, tmp_path))
    return tmp_path


def add_migration(shipped: Path, sql: str) -> int:
    """Ship one more migration; returns its version."""
    version = read_schema(shipped).version + 1
    (shipped / "migrations" / f"{version:04}_test.sql").write_text(sql)
    return version


async def query(settings: ConnectionSettings, sql: str) -> list[tuple[object, ...]]:
    connection = await connect(settings)
    try:
        return await (await connection.execute(sql)).fetchall()
    finally:
        connection.close_nowait()


class TestApply:
    async def test_a_fresh_database(self, empty: ConnectionSettings) -> None:
        version = await apply_schema(empty)
        assert version == read_schema().version
        rows = await query(empty, "SELECT version FROM queen.schema_version ORDER BY 1")
        assert rows == [(number,) for number in range(1, version + 1)]
        assert await query(empty, "SELECT checksum FROM queen.schema_functions") == [
            (read_schema().checksum,)
        ]

    async def test_again_changes_nothing(self, empty: ConnectionSettings) -> None:
        await apply_schema(empty)
        marks = "SELECT version, applied_at, xmin FROM queen.schema_version ORDER BY 1"
        functions = "SELECT proname, xmin FROM pg_proc ORDER BY oid"
        before = await query(empty, marks), await query(empty, functions)
        assert await apply_schema(empty) == read_schema().version
        assert (await query(empty, marks), await query(empty, functions)) == before

    async def test_fresh_equals_replayed(
        self, cluster: Cluster, database: str, empty: ConnectionSettings, shipped: Path
    ) -> None:
        """Boot after boot, one migration more each time, gives the schema of one boot."""
        add_migration(shipped, "ALTER TABLE queen.queues ADD COLUMN extra integer")
        files = sorted((shipped / "migrations").iterdir())
        functions = sorted((shipped / "functions").iterdir())
        texts = {path: path.read_text() for path in [*files, *functions]}
        for path in [*files, *functions]:
            path.unlink()
        for number, path in enumerate(files, start=1):
            path.write_text(texts[path])
            assert await apply_schema(empty) == number
        for path in functions:
            path.write_text(texts[path])
        await apply_schema(empty)
        replayed = await query(empty, FINGERPRINT)
        # The other way: the schema of all but the last at once, then the last.
        settings = cluster.settings(database)
        await apply_schema(settings)
        assert await query(settings, FINGERPRINT) == replayed
        assert len(replayed) > 100

    async def test_data_survives_a_migration(
        self, settings: ConnectionSettings, shipped: Path
    ) -> None:
        await query(settings, "SELECT queen.ensure_queues_v1(gen_random_uuid(), '{q}')")
        version = add_migration(shipped, "ALTER TABLE queen.queues ADD COLUMN extra integer")
        assert await apply_schema(settings) == version
        assert await query(settings, "SELECT name, extra FROM queen.queues") == [("q", None)]

    async def test_changed_functions_are_applied_again(
        self, settings: ConnectionSettings, shipped: Path
    ) -> None:
        path = shipped / "functions" / "900_test.sql"
        body = (
            "CREATE OR REPLACE FUNCTION queen.test_v1() RETURNS integer LANGUAGE sql AS 'SELECT {}'"
        )
        for answer in (1, 2):
            path.write_text(body.format(answer))
            await apply_schema(settings)
            assert await query(settings, "SELECT queen.test_v1()") == [(answer,)]

    async def test_one_replica_after_another(
        self, empty: ConnectionSettings, shipped: Path
    ) -> None:
        add_migration(shipped, "CREATE TABLE queen.once (n integer)")
        add_migration(shipped, "INSERT INTO queen.once VALUES (1)")
        versions: list[int] = []

        async def boot() -> None:
            versions.append(await apply_schema(empty))

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(boot)
        assert versions == [read_schema(shipped).version] * 4
        assert await query(empty, "SELECT n FROM queen.once") == [(1,)]

    async def test_it_waits_for_the_lock(self, empty: ConnectionSettings) -> None:
        holder = await connect(empty)
        await holder.execute("SELECT pg_advisory_lock(%s)", [AdvisoryLock.SCHEMA.value])
        done = trio.Event()

        async def boot() -> None:
            await apply_schema(empty)
            done.set()

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(boot)
                # It has tried and been refused once its session is idle after the first look.
                while not await query(
                    empty,
                    "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%pg_try_advisory_lock%'"
                    " AND state = 'idle' AND datname = current_database()",
                ):
                    await trio.sleep(0.01)
                assert not done.is_set()
                assert await query(empty, "SELECT to_regclass('queen.queues')") == [(None,)]
                holder.close_nowait()
                await done.wait()

    async def test_the_lock_is_given_back(self, empty: ConnectionSettings) -> None:
        await apply_schema(empty)
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        assert await query(empty, held) == [(0,)]

    async def test_a_newer_schema_is_left_alone(
        self, settings: ConnectionSettings, shipped: Path
    ) -> None:
        """A rolling update: the new broker was here, the old one starts again."""
        version = add_migration(shipped, "ALTER TABLE queen.queues ADD COLUMN extra integer")
        path = shipped / "functions" / "900_test.sql"
        path.write_text(A_FUNCTION.format(1))
        await apply_schema(settings)
        before = await query(settings, FINGERPRINT)
        (shipped / "migrations" / f"{version:04}_test.sql").unlink()
        path.unlink()
        assert await apply_schema(settings) == version
        assert await check_schema(settings) == version
        assert await query(settings, FINGERPRINT) == before


class TestFailure:
    async def test_a_failing_migration_leaves_nothing(
        self, settings: ConnectionSettings, shipped: Path
    ) -> None:
        before = await query(settings, FINGERPRINT)
        add_migration(shipped, "CREATE TABLE queen.half (n integer); SELECT 1/0")
        with pytest.raises(SchemaError, match=r"schema apply failed.*division by zero"):
            await apply_schema(settings)
        assert await query(settings, FINGERPRINT) == before
        assert await check_version(settings) == read_schema().version

    async def test_those_before_it_stand(self, empty: ConnectionSettings, shipped: Path) -> None:
        good = add_migration(shipped, "CREATE TABLE queen.good (n integer)")
        bad = add_migration(shipped, "nonsense")
        with pytest.raises(SchemaError, match="syntax error"):
            await apply_schema(empty)
        assert await check_version(empty) == good
        (shipped / "migrations" / f"{bad:04}_test.sql").write_text("SELECT 1")
        assert await apply_schema(empty) == bad

    async def test_failing_functions_leave_the_old_ones(
        self, settings: ConnectionSettings, shipped: Path
    ) -> None:
        before = await query(settings, FINGERPRINT)
        (shipped / "functions" / "005_test.sql").write_text(A_FUNCTION.format(1))
        (shipped / "functions" / "900_test.sql").write_text("nonsense")
        with pytest.raises(SchemaError):
            await apply_schema(settings)
        assert await query(settings, FINGERPRINT) == before

    async def test_the_lock_is_given_back(
        self, settings: ConnectionSettings, shipped: Path
    ) -> None:
        add_migration(shipped, "nonsense")
        for _ in range(2):
            with trio.fail_after(10), pytest.raises(SchemaError):
                await apply_schema(settings)

    async def test_an_account_that_may_not(self, cluster: Cluster, empty_database: str) -> None:
        cluster.execute("CREATE ROLE nobody_special LOGIN")
        try:
            settings = ConnectionSettings(
                host=str(cluster.directory), port=cluster.port, user="nobody_special",
                database=empty_database,
            )  # fmt: skip
            with pytest.raises(SchemaError, match="permission denied"):
                await apply_schema(settings)
        finally:
            cluster.execute("DROP ROLE nobody_special")

    async def test_no_server_is_another_matter(self, tmp_path: Path) -> None:
        with pytest.raises(DatabaseUnavailable):
            await apply_schema(ConnectionSettings(host=str(tmp_path)))


async def check_version(settings: ConnectionSettings) -> object:
    [(version,)] = await query(settings, "SELECT max(version) FROM queen.schema_version")
    return version


class TestCheck:
    """QUEEN_APPLY_SCHEMA=0: somebody else applies, this broker says what is missing."""

    async def test_a_matching_schema(self, settings: ConnectionSettings) -> None:
        assert await check_schema(settings) == read_schema().version

    async def test_none(self, empty: ConnectionSettings) -> None:
        with pytest.raises(SchemaError, match="the database has no queen schema: start one broker"):
            await check_schema(empty)
        assert await query(empty, "SELECT to_regnamespace('queen')") == [(None,)]

    async def test_an_older_one(self, settings: ConnectionSettings, shipped: Path) -> None:
        version = add_migration(shipped, "SELECT 1")
        complaint = f"the schema is at version {version - 1}, this broker needs {version}"
        with pytest.raises(SchemaError, match=complaint):
            await check_schema(settings)

    async def test_missing_functions(self, settings: ConnectionSettings, shipped: Path) -> None:
        path = shipped / "functions" / "900_test.sql"
        path.write_text(
            "CREATE OR REPLACE FUNCTION queen.b_v1()\nCREATE OR REPLACE FUNCTION queen.a_v2()"
        )
        with pytest.raises(SchemaError, match=r"lacks functions of this broker: a_v2, b_v1$"):
            await check_schema(settings)

    async def test_files_applied_by_hand(
        self, cluster: Cluster, empty_database: str, empty: ConnectionSettings
    ) -> None:
        """What the message for an empty database advises."""
        schema = read_schema()
        with psycopg.connect(
            host=str(cluster.directory), port=cluster.port, user="postgres", dbname=empty_database
        ) as connection:
            connection.execute(schema.bootstrap_sql)
            for migration in schema.migrations:
                connection.execute(migration.sql)
                connection.execute(
                    "INSERT INTO queen.schema_version (version, name) VALUES (%s, %s)",
                    [migration.version, migration.name],
                )
            connection.execute(schema.functions_sql)
        assert await check_schema(empty) == schema.version


class TestFiles:
    def test_versions_count_up_from_one(self) -> None:
        versions = [migration.version for migration in read_schema().migrations]
        assert versions == list(range(1, len(versions) + 1))

    def test_every_function_is_versioned_and_replaceable(self) -> None:
        schema = read_schema()
        assert all(name.rpartition("_v")[2].isdigit() for name in schema.function_names)
        assert "CREATE FUNCTION" not in schema.functions_sql
        assert len(schema.function_names) > 10

    def test_the_checksum_follows_the_text(self, shipped: Path) -> None:
        before = read_schema(shipped).checksum
        assert before == read_schema().checksum
        path = next((shipped / "functions").iterdir())
        path.write_text(path.read_text() + "\n-- changed")
        assert read_schema(shipped).checksum != before
