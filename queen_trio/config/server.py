"""The HTTP listener, who may call it, encryption at rest, and the log."""

# ruff: noqa: RUF009 - `setting` declares a field
from __future__ import annotations

from enum import Enum
from pathlib import Path  # noqa: TC003 - cattrs resolves the annotations

import attrs

from queen_trio.log import LogLevel

from .parsers import Boolean, Choice, FilePath, HexKey, Integer, Text, Word
from .variables import DAY_MS, GIB, HOUR_MS, Values, optional, setting


class HttpServer(Enum):
    """Which server drives the ASGI app."""

    LEAN = "lean"
    HYPERCORN = "hypercorn"


class DrainParked(Enum):
    """What becomes of parked pops at shutdown (spec 8.20)."""

    ANSWER = "answer"
    WAIT = "wait"


class JwtAlgorithm(Enum):
    """How tokens are signed; HS… with a shared secret, the others with a key pair."""

    HS256 = "HS256"
    HS384 = "HS384"
    HS512 = "HS512"
    RS256 = "RS256"
    RS384 = "RS384"
    RS512 = "RS512"
    ES256 = "ES256"
    ES384 = "ES384"
    ES512 = "ES512"
    EDDSA = "EdDSA"

    @property
    def secret_bytes(self) -> int | None:
        """How long its shared secret has to be (RFC 7518, 3.2); None for a key pair."""
        return int(self.value[2:]) // 8 if self.value.startswith("HS") else None


def _jwt_algorithm(values: Values) -> str:
    keys = {"JWT_PUBLIC_KEY", "JWT_JWKS_URL"}
    return "RS256" if keys & set(values) and "JWT_SECRET" not in values else "HS256"


@attrs.frozen(kw_only=True)
class ServerConfig:
    """The HTTP listener and the life of the process."""

    port: int = setting(
        "PORT", Integer(0, 65535), "TCP port of the HTTP API; 0 takes any free one.", default="6632"
    )
    bind_addr: str = setting(
        "QUEEN_BIND_ADDR",
        Word(),
        "Address that the HTTP API listens on.",
        default="0.0.0.0",  # noqa: S104 - a broker serves its network
    )
    http_server: HttpServer = setting(
        "QUEEN_HTTP_SERVER",
        Choice(HttpServer),
        "`lean` is the fast one, for clear-text HTTP/1.1; `hypercorn` adds TLS and HTTP/2.",
        default="lean",
    )
    tls_cert: Path | None = optional(
        "QUEEN_TLS_CERT",
        FilePath(),
        "Certificate chain of the HTTP API, PEM; needs `QUEEN_HTTP_SERVER=hypercorn`.",
    )
    tls_key: Path | None = optional(
        "QUEEN_TLS_KEY",
        FilePath(),
        "Private key of that certificate, PEM; needs `QUEEN_HTTP_SERVER=hypercorn`.",
    )
    max_body_bytes: int = setting(
        "QUEEN_MAX_BODY_BYTES",
        Integer(1024, 2 * GIB),
        "Largest request body; a larger one is answered 413.",
        default="67108864",
        unit="bytes",
    )
    header_timeout_ms: int = setting(
        "QUEEN_HTTP_HEADER_TIMEOUT_MS",
        Integer(100, HOUR_MS),
        "How long a client may take to send the head of a request.",
        default="10000",
        unit="ms",
    )
    keep_alive_ms: int = setting(
        "QUEEN_HTTP_KEEP_ALIVE_MS",
        Integer(100, DAY_MS),
        "How long an idle connection stays open; longer than the load balancer's own limit.",
        default="75000",
        unit="ms",
    )
    shutdown_timeout_ms: int = setting(
        "QUEEN_SHUTDOWN_TIMEOUT_MS",
        Integer(100, HOUR_MS),
        "Bound of the whole drain after SIGTERM; keep it below the orchestrator's grace period.",
        default="50000",
        unit="ms",
    )
    drain_parked: DrainParked = setting(
        "QUEEN_DRAIN_PARKED",
        Choice(DrainParked),
        "Parked pops at shutdown: `answer` sends their 204 at once, `wait` keeps them to their"
        " own timeout.",
        default="answer",
    )


@attrs.frozen(kw_only=True)
class AuthConfig:
    """Who may call the HTTP API."""

    enabled: bool = setting(
        "JWT_ENABLED", Boolean(), "Demand a token on every route but the public.", default="false"
    )
    algorithm: JwtAlgorithm = setting(
        "JWT_ALGORITHM",
        Choice(JwtAlgorithm),
        "Signature of the tokens; no other is accepted.",
        default="HS256 (with a public key or JWKS: RS256)",
        derive=_jwt_algorithm,
    )
    secret: str | None = optional(
        "JWT_SECRET", Text(), "Shared secret, for HS256, HS384 and HS512.", secret=True
    )
    public_key: str | None = optional(
        "JWT_PUBLIC_KEY", Text(), "Public key that verifies the tokens, PEM.", secret=True
    )
    jwks_url: str | None = optional(
        "JWT_JWKS_URL", Word(), "Where the issuer publishes its public keys."
    )


@attrs.frozen(kw_only=True)
class SecurityConfig:
    """Encryption at rest."""

    encryption_key: bytes | None = optional(
        "QUEEN_ENCRYPTION_KEY",
        HexKey(32),
        "AES-256-GCM key of the payloads of queues with `encryptionEnabled`.",
        secret=True,
    )


@attrs.frozen(kw_only=True)
class LoggingConfig:
    """What is written to stderr, and how."""

    level: LogLevel = setting(
        "LOG_LEVEL",
        Choice(LogLevel, {"warn": LogLevel.WARNING}),
        "Least severe events to write.",
        default="info",
    )
    json: bool = setting(
        "QUEEN_LOG_JSON", Boolean(), "Write JSON lines instead of text.", default="false"
    )
    rates_ms: int = setting(
        "QUEEN_LOG_RATES_MS",
        Integer(0, DAY_MS),
        "Interval of the line with the rates of push, pop and ack; 0 is never.",
        default="10000",
        unit="ms",
    )
