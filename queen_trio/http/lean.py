"""The lean server: ASGI over clear-text HTTP/1.1 on Trio, httptools and raw sockets.

Theory of operation. A connection is one task: it receives, feeds the parser, calls the application
inline for every request the parser completed, in order, and receives again. Bodies are collected
whole before the application is called, so a request costs no task, no nursery, no cancel scope and
no channel. What would need a scope is kept outside instead:

- times: a connection notes its `deadline`; one sweep for all of them wakes those that are late
  (`trio.lowlevel.notify_closing` makes the pending wait raise ClosedResourceError);
- hang-ups: one `HangupWatcher` for all parked requests (disconnect.py);
- drain: idle connections are woken the same way, the others see `drain` when they answer.

What a client may send is decided in `_Parser`, without I/O: llhttp is strict on framing, the checks
it leaves to us are in `on_headers_complete`. What the application may send is in `_Exchange`.
"""

from __future__ import annotations

import contextlib
import email.utils
import enum
import errno
import http
import json
import math
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
import structlog
import trio

from queen_trio.http.disconnect import EXTENSION, HangupWatcher, Unwatch, is_hung_up_nowait
from queen_trio.http.limits import BodyBudget
from queen_trio.http.listeners import BACKLOG

if TYPE_CHECKING:
    from queen_trio.http.limits import HttpLimits

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = structlog.get_logger()

RECEIVE_BYTES = 64 * 1024
"""One `recv`: a push of 100 small items in one go; also bounds the requests pipelined at once."""

ACCEPTS_PER_WAKE_UP = 64
"""One accept per scheduler pass starves new connections under load (p99 of 2 s, measured)."""

JOIN_BYTES = 256 * 1024
"""Up to here head and body leave in one send; above, copying costs more than a second send."""

DRAIN_HEAD_SECONDS = 1.0
"""At shutdown, a connection that hasn't delivered a whole head yet gets so long."""

ACCEPT_PAUSE_SECONDS = 0.1
"""Out of file descriptors or memory: let some connections end first."""

KNOWN_HEADS = 512
"""Heads whose meaning a server remembers; when there are more it starts anew."""

KNOWN_HEAD_BYTES = 2 * 1024
"""Longer ones are parsed each time."""

_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_LISTENER_BROKEN = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP}

_HEAD_END = b"\r\n\r\n"

_RESET = struct.pack("ii", 1, 0)

_ASGI = {"version": "3.0", "spec_version": "2.4"}

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}

_CHECKED_HEADERS = {b"host", b"content-length", b"transfer-encoding", b"expect"}


async def serve(
    app: App,
    listeners: list[socket.socket],
    limits: HttpLimits,
    *,
    drain: trio.Event,
    drain_seconds: float,
    task_status: trio.TaskStatus[list[Any]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` on `listeners` (listening, non-blocking; closed on return) until drained.

    Reports their addresses once it accepts. When `drain` is set: the listeners close, idle
    connections close, requests in progress are answered with `Connection: close`; returns when
    all are done, or after `drain_seconds`, cancelling the rest. Cancellation drops everything.
    """
    server = _Server(app, limits, drain)
    try:
        async with trio.open_nursery() as background:
            background.start_soon(server.sweep)
            background.start_soon(server.watcher.serve)
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as accepting:
                    for listener in listeners:
                        accepting.start_soon(server.accept, listener, connections)
                    task_status.started([listener.getsockname() for listener in listeners])
                    await drain.wait()
                    accepting.cancel_scope.cancel()
                for listener in listeners:
                    # Whoever is in the backlog believes to be connected: closing would reset them.
                    server.accept_nowait(listener, connections, BACKLOG)
                    listener.close()
                connections.cancel_scope.deadline = trio.current_time() + drain_seconds
                server.start_draining()
            if connections.cancel_scope.cancelled_caught:
                log.warning("http drain deadline passed", drain_seconds=drain_seconds)
            background.cancel_scope.cancel()
    finally:
        for listener in listeners:
            listener.close()


class _Server:
    """What all connections share."""

    def __init__(self, app: App, limits: HttpLimits, drain: trio.Event) -> None:
        self.app = app
        self.limits = limits
        self.drain = drain
        self.budget = BodyBudget.of(limits)
        self.known = _KnownHeads()
        self.watcher = HangupWatcher()
        self.connections: set[_Connection] = set()
        self._tick()

    def _tick(self) -> None:
        self.now = trio.current_time()
        self.date = b"date: %b\r\n" % email.utils.formatdate(usegmt=True).encode()

    async def sweep(self) -> None:
        """Wake the connections that are late; runs until cancelled."""
        while True:
            await trio.sleep(self.limits.sweep_seconds)
            self._tick()
            for connection in self.connections:
                if connection.deadline <= self.now:
                    connection.wake()

    def start_draining(self) -> None:
        """Wake the connections that wait for a head: they look at `drain` then."""
        self._tick()
        for connection in self.connections:
            connection.start_draining()

    async def accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        """Start a task in `nursery` for every connection; runs until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(listener)
            if not self.accept_nowait(listener, nursery, ACCEPTS_PER_WAKE_UP):
                await trio.sleep(ACCEPT_PAUSE_SECONDS)

    def accept_nowait(self, listener: socket.socket, nursery: trio.Nursery, limit: int) -> bool:
        """Take what the backlog holds, up to `limit`; False when out of resources."""
        for _ in range(limit):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                break
            except OSError as exc:
                if exc.errno in _OUT_OF_RESOURCES:
                    log.warning("http accept failed", error=str(exc))
                    return False
                if exc.errno in _LISTENER_BROKEN:
                    raise
                continue  # This one connection failed before we could take it.
            sock.setblocking(False)
            connection = _Connection(self, sock, address)
            self.connections.add(connection)
            nursery.start_soon(connection.run)
        return True


class _Connection:
    """One client: the task that serves it, and the disconnect hook its requests offer."""

    __slots__ = (
        "_client", "_extensions", "_fd", "_fresh", "_local", "_parser", "_reading", "_sock",
        "broken", "deadline", "server",
    )  # fmt: skip

    def __init__(self, server: _Server, sock: socket.socket, address: tuple[Any, ...]) -> None:
        self.server = server
        self._sock = sock
        self._fd = sock.fileno()
        self._client = address[:2]
        self._local: tuple[Any, ...] | None = None
        self._extensions = {EXTENSION: self}
        self._parser = _Parser(server.limits, server.budget, server.known)
        self._fresh = True  # No request came yet.
        self._reading = False
        self.broken = False
        """The stream can't carry another byte of an answer."""
        self.deadline = math.inf
        """When the sweep ends our wait; infinite while the application works."""

    async def run(self) -> None:
        """Serve until the client goes or misbehaves, or the server drains."""
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local = self._sock.getsockname()[:2]
            await self._serve()
        except OSError:
            pass  # The client reset the connection: its business.
        finally:
            self.server.connections.discard(self)
            self.server.watcher.drop(self._fd)
            self._parser.close()
            if self.broken:
                # Reset: a stalled client's unread megabytes must not stay in the kernel.
                with contextlib.suppress(OSError):
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._sock.close()

    async def _serve(self) -> None:
        parser = self._parser
        self._set_deadline()
        while await self._receive_request_bytes():
            if parser.completed:
                for number, request in enumerate(parser.take_completed()):
                    if number:
                        # A client that pipelines takes turns with the others.
                        await trio.lowlevel.checkpoint()
                    if isinstance(request, _Refused):
                        await self._refuse(request)
                        return
                    if not await self._answer(request):
                        return
                self._fresh = False
                self._set_deadline()
            if parser.wants_continue:
                parser.wants_continue = False
                await self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._set_deadline()

    async def _receive_request_bytes(self) -> bool:
        """Feed the parser once; False when nothing more will come."""
        parser = self._parser
        before = parser.phase
        data = await self._receive()
        if not data:
            if data is None and before is not _Phase.IDLE:
                parser.completed.append(_Refused(408, f"the {before.value} took too long"))
                return True
            return False
        parser.feed(data)
        if parser.phase is not before:
            self._set_deadline()
        elif before is _Phase.BODY:
            # Bytes earn time, at the least rate we accept, up to one silence's worth.
            limits = self.server.limits
            now = trio.current_time()
            earned = self.deadline + len(data) / limits.min_body_rate
            self.deadline = min(earned, now + limits.body_seconds)
            if self.deadline < now:
                parser.completed.append(_Refused(408, "the body took too long"))
        return True

    def _set_deadline(self) -> None:
        limits = self.server.limits
        match self._parser.phase:
            case _Phase.BODY:
                seconds = limits.body_seconds
            case _Phase.IDLE if not self._fresh:
                seconds = limits.keep_alive_seconds
            case _:
                seconds = limits.header_seconds
                if self.server.drain.is_set():
                    seconds = min(seconds, DRAIN_HEAD_SECONDS)
        self.deadline = trio.current_time() + seconds

    def start_draining(self) -> None:
        """Close if idle, soon if no whole head is there; called once, when `drain` was set."""
        if self._reading and self._parser.phase is not _Phase.BODY:
            if self._parser.phase is _Phase.IDLE and not self._fresh:
                self.wake()
            else:
                self.deadline = min(self.deadline, trio.current_time() + DRAIN_HEAD_SECONDS)

    def wake(self) -> None:
        """End the pending wait for the socket, if any."""
        trio.lowlevel.notify_closing(self._fd)

    async def _receive(self) -> bytes | None:
        """Return what came, b"" at its end, None when the deadline passed or we drain."""
        parser = self._parser
        while True:
            ending = self.server.drain.is_set() and parser.phase is _Phase.IDLE and not self._fresh
            if not ending:
                self._reading = True
                try:
                    await trio.lowlevel.wait_readable(self._fd)
                except trio.ClosedResourceError:
                    if parser.phase is not _Phase.IDLE:
                        return None
                    ending = True
                finally:
                    self._reading = False
            # Also when ending: a request that came at the same moment is served.
            try:
                return self._sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                if ending:
                    return None

    async def _answer(self, request: _Request) -> bool:
        """Let the application answer; False when the connection can't go on."""
        self.deadline = math.inf
        exchange = _Exchange(self, request)
        try:
            await self.server.app(self._scope(request), exchange.receive, exchange.send)
            if not exchange.completed and not self.broken and not self.is_gone_nowait():
                raise RuntimeError("the application returned before completing its answer")  # noqa: TRY301
        except Exception as exc:  # The request boundary (spec 8.30).
            await self._report_failure(exchange, exc)
        except BaseExceptionGroup as group:
            # An error beside a cancellation must neither end the server nor hide in it.
            errors, others = group.split(Exception)
            if errors is not None:
                await self._report_failure(exchange, errors)
            if others is not None:
                raise others from None
        finally:
            self._parser.give_back(len(request.body))
        return exchange.completed and exchange.keep_alive and not self.broken

    async def _report_failure(self, exchange: _Exchange, error: Exception) -> None:
        if self.broken and _is_only(OSError, error):
            return  # The client went while we wrote: nobody's fault.
        log.error(
            "http request failed",
            method=exchange.request.method,
            target=exchange.request.target.decode("ascii"),
            exc_info=error,
        )
        if not exchange.head_written:
            await exchange.send_error(500, "internal error")

    def _scope(self, request: _Request) -> Scope:
        target = request.target
        if not target.startswith(b"/"):
            target = _strip_authority(target)
        raw_path, _, query = target.partition(b"?")
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": request.version,
            "method": request.method,
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": request.headers,
            "client": self._client,
            "server": self._local,
            "extensions": self._extensions,
        }

    async def _refuse(self, refused: _Refused) -> None:
        body = json.dumps({"error": refused.message}).encode()
        await self.write(
            b"%b%bcontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b"
            % (_STATUS_LINES[refused.status], self.server.date, len(body), body)
        )
        self._sock.shutdown(socket.SHUT_WR)
        self.deadline = trio.current_time() + self.server.limits.linger_seconds
        with contextlib.suppress(trio.ClosedResourceError):
            while trio.current_time() < self.deadline:
                await trio.lowlevel.wait_readable(self._fd)
                with contextlib.suppress(BlockingIOError):
                    if not self._sock.recv(RECEIVE_BYTES):
                        break

    async def write(self, data: bytes) -> None:
        """Write all of `data`; OSError when the client is gone or takes nothing for too long.

        No checkpoint when the kernel takes it at once. Cancelled halfway, the connection is
        `broken`: nothing sensible can follow.
        """
        if self.broken:
            raise BrokenPipeError(errno.EPIPE, "the client is gone")
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.broken = True
            raise
        if sent < len(data):
            await self._write_slowly(memoryview(data)[sent:])

    async def _write_slowly(self, rest: memoryview) -> None:
        self.broken = True  # Until proven otherwise: whatever ends this early leaves it torn.
        while rest:
            self.deadline = trio.current_time() + self.server.limits.write_seconds
            try:
                await trio.lowlevel.wait_writable(self._fd)
            except trio.ClosedResourceError:
                raise TimeoutError(errno.ETIMEDOUT, "the client stopped reading") from None
            with contextlib.suppress(BlockingIOError):
                rest = rest[self._sock.send(rest) :]
        self.deadline = math.inf
        self.broken = False

    def watch(self, callback: Callable[[], object]) -> Unwatch:
        """See `DisconnectHook`."""
        return self.server.watcher.watch(self._fd, callback)

    def is_gone_nowait(self) -> bool:
        """See `DisconnectHook`."""
        return is_hung_up_nowait(self._fd)


class _Exchange:
    """One request and its answer: what the application gets as `receive` and `send`."""

    __slots__ = (
        "_chunked", "_connection", "_received", "_remaining", "_start", "completed",
        "head_written", "keep_alive", "request",
    )  # fmt: skip

    def __init__(self, connection: _Connection, request: _Request) -> None:
        self._connection = connection
        self.request = request
        self._received = False
        self._start: Message | None = None
        self._chunked = False
        self._remaining: int | None = None  # Of the declared content-length.
        self.head_written = False
        self.completed = False
        self.keep_alive = request.keep_alive

    async def receive(self) -> Message:
        """Return the whole body, then wait until the client goes or the answer is complete."""
        if not self._received:
            self._received = True
            return {"type": "http.request", "body": self.request.body, "more_body": False}
        if not self.completed:
            gone = trio.Event()
            unwatch = self._connection.watch(gone.set)
            try:
                await gone.wait()
            finally:
                unwatch()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Take one ASGI message; OSError when the client can't get it any more."""
        kind = message["type"]
        if kind == "http.response.start":
            if self._start is not None:
                raise RuntimeError("the answer has started already")
            self._start = message
            return
        if kind != "http.response.body":
            raise RuntimeError(f"unknown message {kind!r}")
        if self._start is None or self.completed:
            raise RuntimeError("a body before the answer's start or after its end")
        body = message.get("body", b"")
        more = message.get("more_body", False)
        head = b"" if self.head_written else self._build_head(self._start, None if more else body)
        payload = self._frame(body, more)
        if len(payload) > JOIN_BYTES:
            if head:
                self.head_written = True
                await self._connection.write(head)
        else:
            payload = head + payload
        self.head_written = True
        if payload:
            await self._connection.write(payload)
        if not more:
            self.completed = True

    async def send_error(self, status: int, message: str) -> None:
        """Answer with a JSON error instead of what the application began."""
        body = json.dumps({"error": message}).encode()
        headers = [(b"content-type", b"application/json")]
        self._start = {"status": status, "headers": headers}
        await self.send({"type": "http.response.body", "body": body})

    def _build_head(self, start: Message, whole: bytes | None) -> bytes:
        """Return the head; `whole` is the body if it is known by now."""
        status = start["status"]
        request = self.request
        keep_alive = request.keep_alive
        length: int | None = None
        lines = [_status_line(status), self._connection.server.date]
        for name, value in start.get("headers", ()):
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                keep_alive = keep_alive and b"close" not in value.lower()
            elif name != b"transfer-encoding":  # Framing is ours.
                lines.append(b"%b: %b\r\n" % (name, value))
        chunked = False
        if status < 200 or status in (204, 304):
            length = 0
        else:
            if length is None and whole is not None:
                length = len(whole)
            if length is not None:
                lines.append(b"content-length: %d\r\n" % length)
            elif request.version == "1.1":
                chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                keep_alive = False  # The end of the stream is the end of the body.
        if not keep_alive or self._connection.server.drain.is_set():
            keep_alive = False
            lines.append(b"connection: close\r\n")
        elif request.version == "1.0":
            lines.append(b"connection: keep-alive\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
            raise ValueError("a line break or NUL in a response header")
        self.keep_alive = keep_alive
        self._chunked = chunked
        self._remaining = length
        return head + b"\r\n"

    def _frame(self, body: bytes, more: bool) -> bytes:
        if self.request.method == "HEAD":
            return b""
        if self._chunked:
            framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            return framed if more else framed + b"0\r\n\r\n"
        if self._remaining is not None:
            self._remaining -= len(body)
            if self._remaining < 0 or (self._remaining and not more):
                self.keep_alive = False
                raise ValueError("the body's length isn't its content-length")
        return body


class _Phase(enum.Enum):
    """Where in its message the client is."""

    IDLE = "request"
    HEAD = "head"
    BODY = "body"


class _Request:
    """One complete request."""

    __slots__ = ("body", "headers", "keep_alive", "method", "target", "version")

    def __init__(
        self,
        method: str,
        target: bytes,
        version: str,
        headers: list[tuple[bytes, bytes]],
        keep_alive: bool,
    ) -> None:
        self.method = method
        self.target = target
        self.version = version
        self.headers = headers
        self.keep_alive = keep_alive
        self.body = b""

    def copy(self) -> _Request:
        """The same head once more, without a body."""
        return _Request(self.method, self.target, self.version, self.headers, self.keep_alive)


class _KnownHeads:
    """What parsing has made of heads: a client's requests mostly begin with the same bytes.

    Kept are only requests that came whole and alone, with a body as the head announced it: the
    same head with as many bytes behind it needs no parser.
    """

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        # Each with the request that it began, without the body, and the size of both.
        self._heads: dict[bytes, tuple[_Request, int]] = {}

    def find(self, data: bytes) -> _Request | None:
        """Return the request that `data` is, all of it; None if that has to be found out."""
        end = data.find(_HEAD_END, 0, KNOWN_HEAD_BYTES) + len(_HEAD_END)
        known, size = self._heads.get(data[:end], (None, 0))
        if known is None or len(data) != size:
            return None
        request = known.copy()
        request.body = data[end:]
        return request

    def learn(self, data: bytes, request: _Request) -> None:
        """Remember the head of the request that `data` began with."""
        found = data.find(_HEAD_END, 0, KNOWN_HEAD_BYTES)
        end = found + len(_HEAD_END)
        # The sizes differ where the body came in chunks, or something behind it.
        if found >= 0 and len(data) == end + len(request.body) and request.keep_alive:
            if len(self._heads) >= KNOWN_HEADS:
                self._heads.clear()
            self._heads[data[:end]] = request.copy(), len(data)


class _Refused(Exception):
    """What came isn't served: answered with `status` and the reason, then the connection closes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class _Parser:
    """Bytes in, requests out, in `completed`; a `_Refused` there is the last thing that comes."""

    __slots__ = (
        "_body", "_budget", "_content_length", "_expect", "_head_bytes", "_headers", "_held",
        "_hosts", "_http", "_known", "_limits", "_quiet_bytes", "_request", "_target",
        "_upgrade_body", "completed", "phase", "wants_continue",
    )  # fmt: skip

    def __init__(self, limits: HttpLimits, budget: BodyBudget, known: _KnownHeads) -> None:
        self._limits = limits
        self._budget = budget
        self._known = known
        self._held = 0  # Of the budget.
        self._http: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self.completed: list[_Request | _Refused] = []  # A deque takes 700 bytes.
        self.phase = _Phase.IDLE
        self.wants_continue = False
        """The client waits for a 100 before it sends the body."""
        self._quiet_bytes = 0  # Received without completing a head or adding to a body.
        self._upgrade_body = False
        self._request: _Request | None = None
        self._begin()

    def _begin(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._hosts = 0
        self._content_length: int | None = None
        self._expect: bytes | None = None
        self._body: bytes | bytearray = b""

    def take_completed(self) -> list[_Request | _Refused]:
        """Hand over what is completed."""
        completed, self.completed = self.completed, []
        return completed

    def give_back(self, size: int) -> None:
        """Note that a completed body of `size` bytes is answered."""
        self._held -= size
        self._budget.give_back(size)

    def close(self) -> None:
        """Give back all that is held, and break the reference cycle with the parser in C."""
        self.give_back(self._held)
        self._http = None

    def feed(self, data: bytes) -> None:
        """Take the bytes of one `recv`."""
        alone = self.phase is _Phase.IDLE and not self._quiet_bytes and not self.completed
        if alone:
            request = self._known.find(data)
            if request is not None and self._budget.take(len(request.body)):
                self._held += len(request.body)
                self.completed.append(request)
                return
        self._quiet_bytes += len(data)
        try:
            self._feed(data)
        except _Refused as refused:
            self._end(refused)
        except httptools.HttpParserError as exc:
            reason = exc.__context__
            self._end(reason if isinstance(reason, _Refused) else _refused_by_parser(exc))
        else:
            # What llhttp keeps or skips without telling us: half a header, a chunk extension.
            if self._quiet_bytes > self._limits.max_head:
                self._end(_Refused(431, "the headers are too large"))
            elif alone and len(self.completed) == 1:
                whole = self.completed[0]
                if isinstance(whole, _Request):
                    self._known.learn(data, whole)

    def _feed(self, data: bytes) -> None:
        while self._http is not None:
            try:
                self._http.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # Upgrades are ignored: go on behind the head.
                data = data[upgrade.args[0] :]
                if self._upgrade_body:
                    self._continue_with_body()
                if data:
                    continue
            return

    def _end(self, refused: _Refused) -> None:
        last = self.completed[-1] if self.completed else None
        if isinstance(last, _Request) and not last.keep_alive:
            return  # Only the bytes behind a last request were wrong: nobody reads them.
        self._http = None
        self.completed.append(refused)

    def _continue_with_body(self) -> None:
        """Read the body of a request that asked for an upgrade, which llhttp leaves to us.

        curl and Java clients offer h2c this way on a first POST. The request is the connection's
        last one: keeping track of a second parser isn't worth it.
        """
        assert self._request is not None  # noqa: S101
        self._upgrade_body = False
        self._request.keep_alive = False
        framing = (
            b"transfer-encoding: chunked"
            if self._content_length is None
            else b"content-length: %d" % self._content_length
        )
        self._http = httptools.HttpRequestParser(_BodyOnly(self))
        self._http.feed_data(b"POST / HTTP/1.1\r\nconnection: close\r\n%b\r\n\r\n" % framing)

    # Called by httptools ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.phase = _Phase.HEAD
        self._begin()

    def on_url(self, piece: bytes) -> None:
        self._target += piece
        if len(self._target) > self._limits.max_target:
            raise _Refused(414, "the request target is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._limits.max_head:
            raise _Refused(431, "the headers are too large")
        if self.phase is _Phase.BODY:
            return  # A trailer: dropped, as it must not be merged into the headers.
        name = name.lower()
        value = value.rstrip(b" \t")
        self._headers.append((name, value))
        if name in _CHECKED_HEADERS:
            self._check_header(name, value)

    def _check_header(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
        elif name == b"content-length":
            self._content_length = int(value)
            if self._content_length > self._limits.max_body:
                raise _Refused(413, f"the body is larger than {self._limits.max_body} bytes")
        elif name == b"expect":
            self._expect = value.lower()
        elif value.lower() != b"chunked":
            raise _Refused(501, "no Transfer-Encoding but chunked is supported")

    def on_headers_complete(self) -> None:
        parser = self._http
        assert parser is not None  # noqa: S101
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _Refused(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        method = parser.get_method().decode("ascii")
        if method == "CONNECT":
            raise _Refused(501, "CONNECT is not supported")
        if self._hosts != 1 and (self._hosts or version == "1.1"):
            raise _Refused(400, "exactly one Host header is required")
        if len(self._headers) > self._limits.max_headers:
            raise _Refused(431, "there are too many headers")
        chunked = False
        if self._content_length is None:
            chunked = any(name == b"transfer-encoding" for name, _ in self._headers)
            if chunked and version == "1.0":
                raise _Refused(400, "HTTP/1.0 has no Transfer-Encoding")
        has_body = chunked or bool(self._content_length)
        if self._expect is not None and version == "1.1":
            if self._expect != b"100-continue":
                raise _Refused(417, "no expectation but 100-continue is supported")
            self.wants_continue = has_body
        self._upgrade_body = has_body and parser.should_upgrade()
        keep_alive = parser.should_keep_alive()
        self._request = _Request(method, self._target, version, self._headers, keep_alive)
        self.phase = _Phase.BODY
        self._quiet_bytes = 0

    def on_body(self, piece: bytes) -> None:
        self._quiet_bytes = 0
        self.wants_continue = False
        if not self._body:
            self._body = piece
        else:
            # A list of many one-byte chunks would take 70 times the limit in memory.
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += piece
        if len(self._body) > self._limits.max_body:
            raise _Refused(413, f"the body is larger than {self._limits.max_body} bytes")
        if not self._budget.take(len(piece)):
            raise _Refused(503, "too many request bodies are underway")
        self._held += len(piece)

    def on_message_complete(self) -> None:
        if self._upgrade_body:
            return  # llhttp takes the head for the whole message.
        request = self._request
        assert request is not None  # noqa: S101
        request.body = bytes(self._body)
        self._request = None
        self._body = b""
        self.completed.append(request)
        self.phase = _Phase.IDLE
        self.wants_continue = False
        self._quiet_bytes = 0


class _BodyOnly:
    """Passes on the body of a message whose head we made up."""

    def __init__(self, parser: _Parser) -> None:
        self.on_body = parser.on_body
        self.on_message_complete = parser.on_message_complete


def _is_only(kind: type[Exception], error: Exception) -> bool:
    """Whether `error` is a `kind`, or a group of nothing else (a nursery wraps)."""
    if isinstance(error, ExceptionGroup):
        return error.split(kind)[1] is None
    return isinstance(error, kind)


def _refused_by_parser(error: httptools.HttpParserError) -> _Refused:
    reason = str(error)
    if reason in ("Invalid HTTP version", "Pause on PRI/Upgrade"):
        return _Refused(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    return _Refused(400, f"malformed request: {reason}")


def _strip_authority(target: bytes) -> bytes:
    """Return the path and query of an absolute-form target; `*` stays as it is."""
    _, scheme_end, rest = target.partition(b"://")
    if not scheme_end:
        return target
    authority_end = min(
        (i for i in (rest.find(b"/"), rest.find(b"?")) if i >= 0), default=len(rest)
    )
    path = rest[authority_end:]
    return path if path.startswith(b"/") else b"/" + path


def _status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status
