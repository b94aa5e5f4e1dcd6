"""How to reach PostgreSQL, and how a session is set up: values, no I/O but a look for CA files."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from attrs import evolve, field, frozen

# The client cancels at its own deadline; the server's limit is the net behind it, for a client
# that vanished. The gap lets the client's cancel arrive first.
SERVER_TIMEOUT_MARGIN_MS: Final = 2_000

# What a cancelled task still waits for its statement must outlast the server's statement_timeout,
# so that only a mute server, never a slow one, costs the connection.
GRACE_MARGIN_MS: Final = 5_000

# GRACE of a session without a statement deadline (schema apply): a shield is always bounded.
UNLIMITED_STATEMENT_GRACE_SECONDS: Final = 35.0

# A vanished peer is noticed after 10 + 3 × 5 s on an idle connection, and after the same 25 s with
# data in flight (spec 8.22: it must not hold the retention lock for hours).
KEEPALIVES_IDLE_SECONDS: Final = 10
KEEPALIVES_INTERVAL_SECONDS: Final = 5
KEEPALIVES_COUNT: Final = 3
TCP_USER_TIMEOUT_MS: Final = 25_000

# We never think for long inside a transaction; a client that does has hung.
IDLE_IN_TRANSACTION_TIMEOUT_MS: Final = 60_000

# libpq's own OpenSSL doesn't know where this distribution keeps its authorities.
_SYSTEM_AUTHORITIES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)


@frozen(kw_only=True)
class ConnectionSettings:
    """Where PostgreSQL is and how to log in; `host` is a name, an address or a socket directory.

    `statement_timeout_ms` is the deadline of one statement (QUEEN_STMT_TIMEOUT_MS); 0 means none.
    """

    host: str
    port: int = 5432
    user: str = "postgres"
    password: str | None = field(default=None, repr=False)
    database: str = "postgres"
    use_ssl: bool = False
    ssl_root_cert: str | None = None
    ssl_reject_unauthorized: bool = True
    statement_timeout_ms: int = 30_000
    connect_timeout_seconds: float = 10.0
    server_id: str = "local"

    @property
    def is_unix_socket(self) -> bool:
        return self.host.startswith(("/", "@"))

    @property
    def statement_seconds(self) -> float:
        """The statement deadline in seconds, infinite when there is none."""
        return self.statement_timeout_ms / 1000 if self.statement_timeout_ms else float("inf")

    @property
    def grace_seconds(self) -> float:
        """How long a cancelled task still waits for the answer of its statement."""
        if not self.statement_timeout_ms:
            return UNLIMITED_STATEMENT_GRACE_SECONDS
        return (self.statement_timeout_ms + GRACE_MARGIN_MS) / 1000

    def without_statement_timeout(self) -> ConnectionSettings:
        """Return the same settings with no statement deadline, for migrations."""
        return evolve(self, statement_timeout_ms=0)

    def conninfo(self) -> dict[str, str | int]:
        """Return libpq's parameters, without `hostaddr`; unset ones fall to libpq's defaults."""
        parameters: dict[str, str | int] = {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "dbname": self.database,
            "application_name": f"queen-trio/{self.server_id}",
            "client_encoding": "UTF8",
            "gssencmode": "disable",  # never asked for, and a round trip where it's compiled in
        }
        if self.password is not None:
            parameters["password"] = self.password
        if not self.is_unix_socket:
            parameters |= {
                "keepalives_idle": KEEPALIVES_IDLE_SECONDS,
                "keepalives_interval": KEEPALIVES_INTERVAL_SECONDS,
                "keepalives_count": KEEPALIVES_COUNT,
                "tcp_user_timeout": TCP_USER_TIMEOUT_MS,
            } | self._tls()
        return parameters

    def _tls(self) -> dict[str, str | int]:
        if not self.use_ssl:
            return {"sslmode": "disable"}
        if self.ssl_reject_unauthorized:
            return {
                "sslmode": "verify-full",
                "sslrootcert": self.ssl_root_cert or _system_authorities(),
            }
        # `require` verifies after all when it finds ~/.postgresql/root.crt: name no such file.
        return {"sslmode": "require", "sslrootcert": "/nonexistent/accept-any-certificate"}

    def session_sql(self) -> str:
        """Return the SETs of spec 8.22 as one simple query, a single round trip.

        SETs, not start-up options: PgBouncer refuses those.
        """
        statement_timeout = (
            self.statement_timeout_ms + SERVER_TIMEOUT_MARGIN_MS if self.statement_timeout_ms else 0
        )
        values = {
            "statement_timeout": statement_timeout,
            "idle_in_transaction_session_timeout": IDLE_IN_TRANSACTION_TIMEOUT_MS,
            "jit": "off",  # compiling a plan costs up to 0.7 s, running any of ours far less
            "timezone": "'UTC'",  # a timestamptz reads back as UTC, whatever the server's zone
        }
        if not self.is_unix_socket:
            values |= {
                "tcp_keepalives_idle": KEEPALIVES_IDLE_SECONDS,
                "tcp_keepalives_interval": KEEPALIVES_INTERVAL_SECONDS,
                "tcp_keepalives_count": KEEPALIVES_COUNT,
                "tcp_user_timeout": TCP_USER_TIMEOUT_MS,
            }
        return "; ".join(f"SET {name} = {value}" for name, value in values.items())


def _system_authorities() -> str:
    candidates = (ssl.get_default_verify_paths().cafile, *_SYSTEM_AUTHORITIES)
    return next((path for path in candidates if path and Path(path).is_file()), "system")
