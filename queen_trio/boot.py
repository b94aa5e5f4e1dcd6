"""What must be there before a broker can serve: file descriptors, PostgreSQL, the schema."""

from __future__ import annotations

import gc
import resource
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import structlog
import trio

from queen_trio.backoff import Backoff
from queen_trio.config import Config, PostgresConfig
from queen_trio.embedded import default_data_dir, open_embedded
from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.store.migrate import apply_schema, check_schema
from queen_trio.store.preflight import check_sessions, read_capacity
from queen_trio.store.settings import ConnectionSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from queen_trio.grace import Grace

log = structlog.get_logger(__name__)

BACKOFF_MAX_SECONDS: Final = 5.0


def raise_file_limit() -> None:
    """Take as many file descriptors as we may: each parked pop is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # macOS allows less than it names
            log.warning("file limit stays", files=soft, error=str(error))


def freeze_loaded() -> None:
    """Keep what the boot has loaded out of garbage collection: no pause of 50 ms to walk it.

    It stays until the end anyway. Only what serving makes is looked at from now on.
    """
    gc.collect()
    gc.freeze()


def embedded_data_dir(config: Config) -> Path:
    """Where the embedded PostgreSQL keeps its data; creates nothing."""
    chosen = config.postgres.data_dir
    if config.postgres.embedded and chosen == PostgresConfig().data_dir:
        return default_data_dir(chosen)
    return chosen


def spool_directory(config: Config, data_dir: Path) -> Path:
    """Where this broker's spool is: beside the embedded PostgreSQL, unless told otherwise."""
    directory = config.file_buffer.directory
    if config.postgres.embedded and directory == config.postgres.data_dir / "buffers":
        return data_dir / "buffers"
    return directory


def warn_of_stranded_spools(directory: Path, workers: int) -> None:
    """Say which spools hold messages that nobody replays: the number of workers was another one.

    One broker uses `directory` itself, several workers its subdirectories 0, 1 and so on.
    """
    others = [path for path in directory.glob("*") if path.name.isdecimal()]
    if workers > 1:
        others = [directory, *(path for path in others if int(path.name) >= workers)]
    for other in sorted(others):
        if any(_size(file) for file in other.glob("*.spool")):
            log.warning(
                "buffered messages of another number of workers aren't replayed",
                directory=str(other),
                workers=workers,
            )


def _size(file: Path) -> int:
    """How many bytes a file has; 0 for one that its broker, which is just ending, has removed."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


@asynccontextmanager
async def open_postgres(
    config: Config, data_dir: Path, grace: Grace | None = None
) -> AsyncIterator[ConnectionSettings]:
    """Yield how to reach PostgreSQL: a private one while the block runs, or that of PG_*.

    `grace` bounds how long a private one may take to stop.
    """
    postgres = config.postgres
    if not postgres.embedded:
        yield ConnectionSettings(
            host=str(postgres.host),
            port=postgres.port,
            user=postgres.user,
            password=postgres.password,
            database=postgres.database,
            use_ssl=postgres.use_ssl,
            ssl_root_cert=None if postgres.ssl_root_cert is None else str(postgres.ssl_root_cert),
            ssl_reject_unauthorized=postgres.ssl_reject_unauthorized,
            statement_timeout_ms=postgres.stmt_timeout_ms,
            server_id=config.sync.server_id,
        )
        return
    async with open_embedded(data_dir, binaries=postgres.bin_dir, grace=grace) as embedded:
        yield ConnectionSettings(
            host=str(embedded.host),
            port=embedded.port,
            user=embedded.user,
            database=embedded.database,
            statement_timeout_ms=postgres.stmt_timeout_ms,
            server_id=config.sync.server_id,
        )


async def prepare_schema(config: Config, settings: ConnectionSettings) -> None:
    """Apply or check the schema, waiting for a PostgreSQL that isn't there yet (spec 8.23)."""
    prepare = apply_schema if config.postgres.apply_schema else check_schema
    # The embedded server has no pooler before it.
    sessions_checked = config.postgres.embedded
    backoff = Backoff(BACKOFF_MAX_SECONDS)
    while True:
        try:
            if not sessions_checked:
                await check_sessions(settings)
                sessions_checked = True
            version = await prepare(settings)
        except DatabaseUnavailable as error:
            pause = backoff.seconds_after()
            log.warning("postgres not reachable yet", error=str(error), again_in=round(pause, 2))
        else:
            log.info("schema ready", version=version)
            return
        await trio.sleep(pause)


async def warn_of_capacity(config: Config, settings: ConnectionSettings) -> None:
    """Say at boot that the pools of all brokers don't fit into the server (spec 8.22).

    No more than a warning: pools open lazily, and cap themselves at what the server admits.
    """
    try:
        capacity = await read_capacity(settings)
    except DatabaseError as error:
        log.warning("max_connections not checked", error=str(error))
        return
    replicas, pool_size = config.sync.replicas, config.postgres.pool_size
    if replicas * pool_size > capacity:
        log.warning(
            "DB_POOL_SIZE doesn't fit max_connections",
            replicas=replicas,
            pool_size=pool_size,
            wanted=replicas * pool_size,
            admitted=capacity,
        )
