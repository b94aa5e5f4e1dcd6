"""The bench of the HTTP suite: an ASGI application, both servers on loopback, a raw client."""

from __future__ import annotations

import contextlib
import enum
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import trio

from queen_trio.http.disconnect import cancel_on_disconnect
from queen_trio.http.limits import HttpLimits
from queen_trio.http.listeners import bind_listeners
from queen_trio.http.server import TlsFiles, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from queen_trio.config.server import HttpServer

PATIENCE_SECONDS = 20
"""No step of a test takes so long unless it hangs."""

LIMITS = HttpLimits(
    max_body=200_000,
    max_head=4096,
    max_headers=30,
    max_target=1000,
    linger_seconds=0.2,
    sweep_seconds=0.05,
)
"""Small sizes, so that tests reach them; times that no test reaches by accident."""


class Target(enum.Enum):
    """The paths of the application under test."""

    ECHO = "/echo"
    EMPTY = "/empty"
    UNCHANGED = "/unchanged"
    STREAM = "/stream"
    BIG = "/big"
    PARK = "/park"
    RECEIVE = "/receive"
    BOOM = "/boom"
    BOOM_LATE = "/boom-late"
    GROUP = "/group"
    SILENT = "/silent"
    INJECT = "/inject"
    SHORT = "/short"
    CLOSE = "/close"
    STUBBORN = "/stubborn"
    TWO_STARTS = "/two-starts"
    NO_START = "/no-start"
    TWO_ENDS = "/two-ends"
    UNKNOWN = "/unknown"


@attrs.define(eq=False)
class Application:
    """Answers according to the path, and remembers what reached it."""

    release: trio.Event = attrs.field(factory=trio.Event)
    seen: Counter[str] = attrs.field(factory=Counter)
    parked: int = 0
    freed: int = 0
    """Parked requests that ended because their client went."""
    ended: Counter[str] = attrs.field(factory=Counter)
    failed_writes: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        self.seen[scope["path"]] += 1
        message = await receive()
        assert message["type"] == "http.request"
        assert message.get("more_body") is False
        try:
            target = Target(scope["path"])
        except ValueError:
            target = Target.ECHO
        try:
            await self._answer(target, message["body"], scope, receive, send)
        finally:
            self.ended[scope["path"]] += 1

    async def _answer(
        self, target: Target, body: bytes, scope: Any, receive: Any, send: Any
    ) -> None:
        match target:
            case Target.ECHO:
                await _send(send, 200, json.dumps(_describe(scope, body)).encode())
            case Target.EMPTY:
                await _send(send, 204, b"", (b"content-length", b"0"))
            case Target.UNCHANGED:
                await _send(send, 304, b"", (b"etag", b'"1"'))
            case Target.STREAM:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for piece in (b"one,", b"", b"two,", b"three"):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body"})
            case Target.BIG:
                try:
                    await _send(send, 200, bytes(int(scope["query_string"])))
                except OSError:
                    self.failed_writes += 1
                    raise
            case Target.PARK:
                await self._park(scope, receive, send)
            case Target.RECEIVE:
                self.parked += 1
                assert (await receive())["type"] == "http.disconnect"
                self.parked -= 1
                self.freed += 1
            case Target.CLOSE:
                await _send(send, 200, b"bye", (b"connection", b"close"))
            case _:
                await _misbehave(target, send)

    async def _park(self, scope: Any, receive: Any, send: Any) -> None:
        self.parked += 1
        async with cancel_on_disconnect(scope, receive) as presence:
            await self.release.wait()
        self.parked -= 1
        if presence.gone:
            self.freed += 1
            return
        await _send(send, 204, b"")


async def _misbehave(target: Target, send: Any) -> None:
    start = {"type": "http.response.start", "status": 200, "headers": []}
    match target:
        case Target.BOOM:
            raise ZeroDivisionError("boom")
        case Target.GROUP:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_misbehave, Target.BOOM, send)
                nursery.start_soon(trio.sleep_forever)
        case Target.BOOM_LATE:
            await send({**start, "headers": [(b"content-length", b"10")]})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise ZeroDivisionError("boom late")
        case Target.STUBBORN:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_fail_when_cancelled)
                await trio.sleep_forever()
        case Target.TWO_STARTS:
            await send(start)
            await send(start)
        case Target.NO_START:
            await send({"type": "http.response.body"})
        case Target.TWO_ENDS:
            await _send(send, 200, b"once")
            await send({"type": "http.response.body"})
        case Target.UNKNOWN:
            await send({"type": "http.response.surprise"})
        case Target.INJECT:
            await _send(send, 200, b"", (b"x", b"1\r\nset-cookie: evil"))
        case Target.SHORT:
            await send({**start, "headers": [(b"content-length", b"10")]})
            await send({"type": "http.response.body", "body": b"half"})
        case Target.SILENT:
            pass


async def _fail_when_cancelled() -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise ZeroDivisionError("cancelled")


async def _send(send: Any, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


def _describe(scope: Any, body: bytes) -> dict[str, Any]:
    return {
        "method": scope["method"],
        "path": scope["path"],
        "raw_path": scope["raw_path"].decode(),
        "query_string": scope["query_string"].decode(),
        "http_version": scope["http_version"],
        "scheme": scope["scheme"],
        "headers": [
            [name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]
        ],
        "client": scope["client"],
        "server": scope["server"],
        "body": body.decode("latin-1"),
    }


@attrs.define
class Answer:
    """One response as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """A connection that sends exactly what it is told and reads answers one by one."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._buffer = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def send_bytewise(self, data: bytes) -> None:
        for i in range(len(data)):
            await self.stream.send_all(data[i : i + 1])
            await trio.lowlevel.checkpoint()

    async def answer(self, *, to_head: bool = False) -> Answer:
        """Read one response; raises EOFError if the server closed before its end."""
        lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines[1:] if line]
        headers = {name.lower(): value for name, value in pairs}
        assert len(headers) == len(pairs), f"a header twice: {pairs}"
        answer = Answer(int(lines[0].split()[1]), headers)
        if to_head or answer.status < 200 or answer.status in (204, 304):
            return answer
        if "content-length" in headers:
            answer.body = await self._exactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while size := int((await self._until(b"\r\n"))[:-2], 16):
                answer.body += (await self._exactly(size + 2))[:-2]
            assert await self._until(b"\r\n") == b"\r\n"
        else:
            answer.body = await self.rest()
        return answer

    async def ask(self, data: bytes) -> Answer:
        await self.send(data)
        return await self.answer()

    async def rest(self) -> bytes:
        """Read until the server closes; a reset counts as the end."""
        with contextlib.suppress(trio.BrokenResourceError):
            while await self._more():
                pass
        rest, self._buffer = self._buffer, b""
        return rest

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            if not await self._more():
                raise EOFError(f"closed after {self._buffer!r}")
        end = self._buffer.index(mark) + len(mark)
        taken, self._buffer = self._buffer[:end], self._buffer[end:]
        return taken

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not await self._more():
                raise EOFError(f"closed after {len(self._buffer)} of {size} bytes")
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    async def _more(self) -> bool:
        data = await self.stream.receive_some(65536)
        self._buffer += data
        return bool(data)


@attrs.define(eq=False)
class Bench:
    """A running server and what a test does to it."""

    app: Application
    address: tuple[str, int]
    drain: trio.Event
    stopped: trio.Event

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with await self.connect() as stream:
            yield Client(stream)

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream(*self.address[:2])

    async def ask(self, data: bytes) -> Answer:
        async with self.client() as client:
            return await client.ask(data)


@contextlib.asynccontextmanager
async def running(
    server: HttpServer,
    *,
    limits: HttpLimits = LIMITS,
    tls: TlsFiles | None = None,
    drain_seconds: float = 10,
) -> AsyncIterator[Bench]:
    """Run `server` on a free port of 127.0.0.1 until the block ends or drains it."""
    with trio.fail_after(PATIENCE_SECONDS):
        app = Application()
        drain, stopped = trio.Event(), trio.Event()
        listeners = await bind_listeners("127.0.0.1", 0)

        async def run(task_status: trio.TaskStatus[Any]) -> None:
            await serve(
                app,
                listeners,
                limits,
                server=server,
                tls=tls,
                drain=drain,
                drain_seconds=drain_seconds,
                task_status=task_status,
            )
            stopped.set()

        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(run)
            yield Bench(app, address, drain, stopped)
            nursery.cancel_scope.cancel()


async def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until `condition` holds; the bench's deadline bounds it."""
    while not condition():  # noqa: ASYNC110 - nobody sets an event for what the kernel does
        await trio.sleep(0.005)


def request(
    target: str = Target.ECHO.value, *lines: str, method: str = "GET", body: bytes = b""
) -> bytes:
    """A request with Host, the given header lines, and a content-length if there is a body."""
    head = [f"{method} {target} HTTP/1.1", "Host: test", *lines]
    if body:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body
