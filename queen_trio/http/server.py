"""The choice between the two HTTP servers, and hypercorn's trio worker behind the same contract.

The only file that knows hypercorn: it brings TLS and HTTP/2, at ten times the CPU per request of
lean.py. What hypercorn leaves open is closed here, in front of the application: bodies are
collected whole and bounded in size and time, sizes of heads are bounded, failures are logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import hypercorn.config
import hypercorn.trio
import structlog
import trio

from queen_trio.config.server import HttpServer
from queen_trio.errors import ConfigError
from queen_trio.http import lean
from queen_trio.http.limits import BodyBudget
from queen_trio.http.listeners import BACKLOG

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from queen_trio.config import ServerConfig
    from queen_trio.http.lean import App, Message, Receive, Scope, Send
    from queen_trio.http.limits import HttpLimits

log = structlog.get_logger()

STALLED_WRITE_SECONDS = 10.0
"""hypercorn shields its writes from cancellation, so only the kernel can end one to a client that
stopped reading (TCP_USER_TIMEOUT). It adds to the time a drain may take."""


_LINE_BREAKS = set(b"\r\n\0")


@attrs.frozen
class TlsFiles:
    """PEM files of the certificate chain and its key."""

    cert: Path
    key: Path


def tls_files(config: ServerConfig) -> TlsFiles | None:
    """The files for TLS, tried out; raises `ConfigError` naming the variables and what is wrong."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.tls_cert, config.tls_key
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            [f"QUEEN_TLS_CERT={config.tls_cert} with QUEEN_TLS_KEY={config.tls_key}: {reason}"]
        ) from error
    return TlsFiles(config.tls_cert, config.tls_key)


async def serve(
    app: App,
    listeners: list[socket.socket],
    limits: HttpLimits,
    *,
    server: HttpServer = HttpServer.LEAN,
    tls: TlsFiles | None = None,
    drain: trio.Event,
    drain_seconds: float,
    task_status: trio.TaskStatus[list[Any]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` until drained, with `server`, or with hypercorn where there is TLS.

    The contract is `lean.serve`'s; where hypercorn differs: it speaks HTTP/2 too; late or malformed
    heads end the connection without a JSON error; idle connections get `header_seconds`, not more;
    a 100-continue is sent before the body's size is judged; a failed write isn't reported to the
    application; a drain may take `STALLED_WRITE_SECONDS` longer. Raises OSError (ssl.SSLError is
    one) for unusable TLS files.
    """
    if server is HttpServer.LEAN and tls is None:
        await lean.serve(
            app,
            listeners,
            limits,
            drain=drain,
            drain_seconds=drain_seconds,
            task_status=task_status,
        )
    else:
        for listener in listeners:
            _bound_stalled_writes(listener, limits)
        config = _config(limits, tls, drain_seconds)
        await _serve_hypercorn(
            _Guard(app, limits, drain), listeners, config, drain, task_status.started
        )


async def _serve_hypercorn(
    guard: _Guard,
    listeners: list[socket.socket],
    config: hypercorn.config.Config,
    drain: trio.Event,
    started: Callable[[list[Any]], None],
) -> None:
    addresses = [listener.getsockname() for listener in listeners]
    binds: list[int] = []
    try:
        config.create_ssl_context()  # Before it owns descriptors: it loses them when this fails.
        binds += [os.dup(listener.fileno()) for listener in listeners]
    finally:
        # hypercorn owns the duplicates: with ours closed, the port closes when it says so.
        for listener in listeners:
            listener.close()
    config.bind = [f"fd://{fd}" for fd in binds]
    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(
                hypercorn.trio.serve,
                guard,  # type: ignore[arg-type]
                config,
                shutdown_trigger=drain.wait,
                mode="asgi",
            )
        )
        for fd in binds:
            os.set_inheritable(fd, False)  # hypercorn makes them so, for workers we don't have.
        started(addresses)


def _bound_stalled_writes(listener: socket.socket, limits: HttpLimits) -> None:
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        seconds = min(limits.write_seconds, STALLED_WRITE_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))


def _config(
    limits: HttpLimits, tls: TlsFiles | None, drain_seconds: float
) -> hypercorn.config.Config:
    config = hypercorn.config.Config()
    config.backlog = BACKLOG  # It calls listen() again.
    config.graceful_timeout = drain_seconds
    # hypercorn has one time for an idle connection and for a head underway.
    config.keep_alive_timeout = min(limits.keep_alive_seconds, limits.header_seconds)
    config.keep_alive_max_requests = 2**31  # Connections end by time, not by count.
    config.h11_max_incomplete_size = limits.max_head
    config.h2_max_header_list_size = limits.max_head
    config.ssl_handshake_timeout = limits.header_seconds
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    if tls is not None:
        config.certfile = os.fspath(tls.cert)
        config.keyfile = os.fspath(tls.key)
    return config


class _Guard:
    """Stands before the application and grants what lean.py grants, as far as ASGI lets it."""

    def __init__(self, app: App, limits: HttpLimits, drain: trio.Event) -> None:
        self._app = app
        self._limits = limits
        self._budget = BodyBudget.of(limits)
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _acknowledge_lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        else:
            exchange = _Exchange(scope, receive, send, self._drain)
            try:
                await self._answer(exchange)
            finally:
                self._budget.give_back(exchange.body_size)

    async def _answer(self, exchange: _Exchange) -> None:
        try:
            await exchange.receive_body(self._limits, self._budget)
        except _Refused as refused:
            await exchange.refuse(refused, self._limits.linger_seconds)
            return
        try:
            if not exchange.gone:
                await self._app(exchange.scope, exchange.receive, exchange.send)
            if not exchange.completed and not exchange.gone:
                raise RuntimeError("the application returned before completing its answer")  # noqa: TRY301
        except Exception as exc:  # The request boundary (spec 8.30).
            await exchange.report_failure(exc)
        except BaseExceptionGroup as group:
            errors, others = group.split(Exception)
            if errors is not None:
                await exchange.report_failure(errors)
            if others is not None:
                raise others from None


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Exchange:
    """One request and its answer, with the whole body, the length and the close of lean.py."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, drain: trio.Event) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._drain = drain
        self._body: bytes | None = None
        self.body_size = 0
        self._start: Message | None = None
        self._head_sent = False
        self.completed = False
        self.gone = False

    async def receive_body(self, limits: HttpLimits, budget: BodyBudget) -> None:
        """Collect the body for `receive`; raises _Refused when a limit is passed.

        Whatever happens, the caller gives `body_size` back to the budget in the end.
        """
        _check_head(self.scope, limits)
        too_large = _Refused(413, f"the body is larger than {limits.max_body} bytes")
        if any(
            name == b"content-length" and int(value) > limits.max_body
            for name, value in self.scope["headers"]
        ):
            raise too_large
        body = bytearray()
        deadline = trio.current_time() + limits.body_seconds
        more = True
        while more:
            with trio.move_on_at(deadline) as silence:
                message = await self._receive()
            if silence.cancelled_caught:
                raise _Refused(408, "the body took too long")
            if message["type"] == "http.disconnect":
                self.gone = True
                return
            piece = message.get("body", b"")
            body += piece
            if len(body) > limits.max_body:
                raise too_large
            if not budget.take(len(piece)):
                raise _Refused(503, "too many request bodies are underway")
            self.body_size += len(piece)
            more = message.get("more_body", False)
            earned = deadline + len(piece) / limits.min_body_rate
            deadline = min(earned, trio.current_time() + limits.body_seconds)
        self._body = bytes(body)

    async def receive(self) -> Message:
        """See `lean._Exchange.receive`."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()
        self.gone = self.gone or message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        """Pass one ASGI message on; the start together with the first piece of the body."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if not self._head_sent:
            if self._start is None:
                raise RuntimeError("a body before the answer's start")
            head = self._complete_head(self._start, message)
            self._head_sent = True
            await self._send(head)
        await self._send(message)
        self.completed = not message.get("more_body", False)

    def _complete_head(self, start: Message, first: Message) -> Message:
        headers = list(start.get("headers", ()))
        if any(set(name + value) & _LINE_BREAKS for name, value in headers):
            raise ValueError("a line break or NUL in a response header")
        if start["status"] in (204, 304):
            headers = [header for header in headers if header[0] != b"content-length"]
        elif not first.get("more_body", False) and all(h[0] != b"content-length" for h in headers):
            headers.append((b"content-length", b"%d" % len(first.get("body", b""))))
        if self._drain.is_set():
            headers += self._closing_headers()
        return {**start, "headers": headers}

    def _closing_headers(self) -> list[tuple[bytes, bytes]]:
        # HTTP/2 has no such header: GOAWAY does it.
        return [(b"connection", b"close")] if self.scope["http_version"].startswith("1") else []

    async def report_failure(self, error: Exception) -> None:
        """Log the application's error; answer 500 unless the answer had begun."""
        log.error(
            "http request failed",
            method=self.scope["method"],
            target=self.scope["raw_path"].decode("ascii"),
            exc_info=error,
        )
        if not self._head_sent:
            body = self._start_error(500, "internal error", [])
            await self.send({"type": "http.response.body", "body": body})

    async def refuse(self, refused: _Refused, linger_seconds: float) -> None:
        """Answer and close; before that, drop the input for a while (`HttpLimits`)."""
        body = self._start_error(refused.status, str(refused), self._closing_headers())
        await self.send({"type": "http.response.body", "body": body, "more_body": True})
        with trio.move_on_after(linger_seconds):
            while (await self._receive()).get("more_body", False):
                pass
        await self.send({"type": "http.response.body"})

    def _start_error(self, status: int, message: str, headers: list[tuple[bytes, bytes]]) -> bytes:
        body = json.dumps({"error": message}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *headers,
        ]
        self._start = {"type": "http.response.start", "status": status, "headers": headers}
        return body


def _check_head(scope: Scope, limits: HttpLimits) -> None:
    """Refuse what hypercorn lets through and lean.py doesn't."""
    headers = scope["headers"]
    if len(scope["raw_path"]) + len(scope["query_string"]) > limits.max_target:
        raise _Refused(414, "the request target is too long")
    if len(headers) > limits.max_headers:
        raise _Refused(431, "there are too many headers")
    # hypercorn's own limit is on incomplete heads: one that came whole passes it.
    if sum(len(name) + len(value) + 4 for name, value in headers) > limits.max_head:
        raise _Refused(431, "the headers are too large")
    if scope["method"] == "CONNECT":
        raise _Refused(501, "CONNECT is not supported")
    names = {name for name, _ in headers}
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            raise _Refused(400, "Transfer-Encoding can't be present with Content-Length")
        if scope["http_version"] == "1.0":
            raise _Refused(400, "HTTP/1.0 has no Transfer-Encoding")


async def _acknowledge_lifespan(receive: Receive, send: Send) -> None:
    """The daemon starts and stops what the application needs: only say yes."""
    with contextlib.suppress(trio.EndOfChannel):
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
