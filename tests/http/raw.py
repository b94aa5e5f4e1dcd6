"""Requests as bytes, for what no HTTP client would send, and for thousands of cheap connections."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import trio
from attrs import define

if TYPE_CHECKING:
    from tests.brokers import LiveBroker


@define(frozen=True)
class Answer:
    """A status, headers with lower-case names, and a body."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class RawConnection:
    """One connection to a broker; answers are read one after another."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = bytearray()

    async def send(self, request_line: str | bytes, body: bytes | None = None) -> None:
        """Send one request; no Content-Type, and without a body no Content-Length either."""
        line = request_line.encode() if isinstance(request_line, str) else request_line
        length = b"" if body is None else b"content-length: %d\r\n" % len(body)
        head = line + b" HTTP/1.1\r\nhost: broker\r\n" + length + b"\r\n"
        await self.stream.send_all(head + (body or b""))

    async def receive(self, *, without_body: bool = False) -> Answer:
        """Read one answer; EOFError when the connection ends before its end."""
        while b"\r\n\r\n" not in self._buffer:
            await self._read_more()
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer = bytearray(rest)
        first, *lines = head.decode("ascii").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        headers = {name.lower(): value for name, value in headers.items()}
        length = 0 if without_body else int(headers.get("content-length", 0))
        while len(self._buffer) < length:
            await self._read_more()
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return Answer(int(first.split()[1]), headers, body)

    async def _read_more(self) -> None:
        data = await self.stream.receive_some(65536)
        if not data:
            raise EOFError(bytes(self._buffer))
        self._buffer += data

    async def aclose(self) -> None:
        await self.stream.aclose()


async def connect(broker: LiveBroker) -> RawConnection:
    return RawConnection(await trio.open_tcp_stream("127.0.0.1", broker.port))


async def ask(
    broker: LiveBroker,
    request_line: str | bytes,
    body: bytes | None = None,
    *,
    without_body: bool = False,
) -> Answer:
    """One request on a connection of its own."""
    connection = await connect(broker)
    try:
        await connection.send(request_line, body)
        return await connection.receive(without_body=without_body)
    finally:
        await connection.aclose()
