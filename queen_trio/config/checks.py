"""What only several values together tell: contradictions, which are fatal, and doubts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .delivery import ADMISSION_FLOOR
from .server import AuthConfig, HttpServer, ServerConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .sections import Config

# The variables involved, and a sentence about them.
Contradiction = tuple[tuple[str, ...], str]


def contradictions(config: Config) -> Iterator[Contradiction]:
    """Values that are each fine alone and can't hold together."""
    yield from _http_tls(config.server)
    yield from _mesh(config)
    if config.auth.enabled:
        yield from _keys(config.auth)
    yield from _inverted(config)


def _http_tls(server: ServerConfig) -> Iterator[Contradiction]:
    tls = ("QUEEN_TLS_CERT", "QUEEN_TLS_KEY")
    if (server.tls_cert is None) != (server.tls_key is None):
        yield tls, "QUEEN_TLS_CERT and QUEEN_TLS_KEY go together: only one of them is set"
    elif server.tls_cert is not None and server.http_server is HttpServer.LEAN:
        yield (
            (*tls, "QUEEN_HTTP_SERVER"),
            "QUEEN_TLS_CERT and QUEEN_TLS_KEY need QUEEN_HTTP_SERVER=hypercorn:"
            " the lean server speaks clear text only",
        )


def _mesh(config: Config) -> Iterator[Contradiction]:
    server, sync = config.server, config.sync
    mesh_tls = ("QUEEN_MESH_TLS_CERT", "QUEEN_MESH_TLS_KEY", "QUEEN_MESH_TLS_CA")
    if 0 < [sync.tls_cert, sync.tls_key, sync.tls_ca].count(None) < len(mesh_tls):
        yield mesh_tls, f"{', '.join(mesh_tls)} go together: the TLS of the mesh is mutual"
    if sync.heartbeat_ms >= sync.dead_threshold_ms:
        yield (
            ("QUEEN_SYNC_HEARTBEAT_MS", "QUEEN_SYNC_DEAD_THRESHOLD_MS"),
            f"QUEEN_SYNC_HEARTBEAT_MS ({sync.heartbeat_ms}) must be less than"
            f" QUEEN_SYNC_DEAD_THRESHOLD_MS ({sync.dead_threshold_ms})",
        )
    http, mesh = (server.bind_addr, server.port), (sync.mesh_bind_addr, sync.mesh_port)
    if sync.starts and http == mesh:
        yield (
            (
                *("PORT", "QUEEN_MESH_PORT", "QUEEN_BIND_ADDR", "QUEEN_MESH_BIND_ADDR"),
                *("QUEEN_MESH_PEERS", "QUEEN_SYNC_ENABLED"),
            ),
            f"PORT and QUEEN_MESH_PORT are the same port, {server.port}",
        )


def _keys(auth: AuthConfig) -> Iterator[Contradiction]:
    keys = {
        "JWT_SECRET": auth.secret,
        "JWT_PUBLIC_KEY": auth.public_key,
        "JWT_JWKS_URL": auth.jwks_url,
    }
    involved = (*keys, "JWT_ENABLED", "JWT_ALGORITHM")
    given = [name for name, key in keys.items() if key is not None]
    shared = auth.algorithm.secret_bytes is not None
    if len(given) != 1:
        yield (
            involved,
            "JWT_ENABLED needs exactly one of JWT_SECRET, JWT_PUBLIC_KEY and JWT_JWKS_URL:"
            f" set is {', '.join(given) or 'none'}",
        )
    elif shared != (given == ["JWT_SECRET"]):
        yield (
            involved,
            f"JWT_ALGORITHM={auth.algorithm.value} verifies with"
            f" {'JWT_SECRET' if shared else 'JWT_PUBLIC_KEY or JWT_JWKS_URL'}, but {given[0]}"
            " is set",
        )


def _inverted(config: Config) -> Iterator[Contradiction]:
    flow, pop = config.flow, config.pop
    low, high = flow.admission_min, flow.admission_max
    if low is not None and high is not None and low > high:
        yield (
            ("QUEEN_ADMISSION_MIN", "QUEEN_ADMISSION_MAX"),
            f"QUEEN_ADMISSION_MIN ({low}) is more than QUEEN_ADMISSION_MAX ({high})",
        )
    if pop.wait_initial_ms > pop.max_ms:
        yield (
            ("POP_WAIT_INITIAL_INTERVAL_MS", "POP_WAIT_MAX_INTERVAL_MS"),
            f"POP_WAIT_INITIAL_INTERVAL_MS ({pop.wait_initial_ms}) is more than"
            f" POP_WAIT_MAX_INTERVAL_MS ({pop.max_ms})",
        )


def doubts(config: Config, names: Iterable[str]) -> Iterator[str]:
    """What is allowed, but probably not meant; `names` are the variables that were set."""
    names = sorted(names)
    if config.postgres.embedded:
        external = [name for name in names if name.startswith("PG_")]
        if external:
            yield f"{', '.join(external)} ignored: PG_HOST is unset, PostgreSQL is embedded"
    else:
        embedded = [name for name in names if name in ("QUEEN_DATA_DIR", "QUEEN_PG_BIN")]
        if embedded:
            yield f"{', '.join(embedded)} ignored: PG_HOST is set, nothing is embedded"
        if config.postgres.ssl_root_cert is not None and not config.postgres.use_ssl:
            yield "PG_SSL_ROOT_CERT ignored: PG_USE_SSL is false, PostgreSQL is reached without TLS"
    pool, reserve = config.postgres.pool_size, config.flow.pool_reserve
    if pool - reserve <= ADMISSION_FLOOR:
        band = config.admission_band
        yield (
            f"the admission band is [{band.lo},{band.hi}] and can't adapt: DB_POOL_SIZE {pool} must"
            f" exceed QUEEN_ADMISSION_POOL_RESERVE {reserve} by more than {ADMISSION_FLOOR}"
        )
    wanted, secret = config.auth.algorithm.secret_bytes, config.auth.secret
    if config.auth.enabled and wanted and secret and len(secret.encode()) < wanted:
        yield (
            f"JWT_SECRET has {len(secret.encode())} bytes, {config.auth.algorithm.value} wants"
            f" {wanted}: a short one can be guessed from a token"
        )
    if config.sync.starts and config.sync.secret is None:
        yield "the mesh is open: without QUEEN_SYNC_SECRET anyone who reaches its port is believed"
    if config.sync.enabled and config.sync.secret is not None and not config.sync.peers:
        yield "QUEEN_SYNC_SECRET is set but QUEEN_MESH_PEERS is empty: the mesh doesn't start"
