"""Mesh nodes in the test's own process, and the raw ends of links that they talk to."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import trio

from queen_protocol import (
    Hello,
    HelloVerifier,
    InboundLink,
    Message,
    NonceMemory,
    UnknownFrame,
    encode,
    sign_nonce,
)
from queen_trio.config import SyncConfig
from queen_trio.config.parsers import Peer
from queen_trio.mesh import MeshNode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

SECRET = "of the mesh"
TENANT = "00000000-0000-0000-0000-000000000000"
WAIT_SECONDS = 20.0
# So long that no heartbeat comes between what a test sends.
QUIET_MS = 600_000


async def wait_until(condition: Callable[[], object]) -> None:
    """Block until the condition holds; in real time, whatever clock the test has."""
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until, "the condition never held"
        await trio.to_thread.run_sync(time.sleep, 0.001)


class Recorder:
    """Stands where a broker acts on hints, and notes them as (what, ...) in `calls`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def messages_available(self, keys: Iterable[tuple[str, str]]) -> None:
        self.calls += [("messages", *key) for key in keys]

    def claims_available(self, keys: Iterable[tuple[str, str]], group: str) -> None:
        self.calls += [("mark", *key, group) for key in keys]

    def leases_ended(self, keys: Iterable[tuple[str, str]], group: str) -> None:
        self.calls += [("mark", *key, group) for key in keys]

    def queue_changed(self, queue: str) -> None:
        self.calls.append(("changed", queue))

    def queue_deleted(self, queue: str) -> None:
        self.calls.append(("deleted", queue))

    def maintenance_set(self, enabled: bool) -> None:
        self.calls.append(("maintenance", enabled))

    def pop_maintenance_set(self, enabled: bool) -> None:
        self.calls.append(("pop maintenance", enabled))


class Node:
    """A running node and what it received."""

    def __init__(self, mesh: MeshNode, received: Recorder) -> None:
        self.mesh = mesh
        self.received = received

    @property
    def port(self) -> int:
        return self.mesh.port

    def refused(self, reason: str) -> int:
        return self.mesh.statistics().links_refused.get(reason, 0)


def sync_config(*peers: tuple[str, int], **changes: Any) -> SyncConfig:
    values: dict[str, Any] = {
        "server_id": "node",
        "peers": tuple(Peer(host, port) for host, port in peers),
        "mesh_port": 0,
        "mesh_bind_addr": "127.0.0.1",
        "secret": SECRET,
        "heartbeat_ms": QUIET_MS,
        **changes,
    }
    return SyncConfig(**values)


@asynccontextmanager
async def open_node(*peers: tuple[str, int], **changes: Any) -> AsyncIterator[Node]:
    """Run a node on a free port for the block's time; `changes` go into its configuration."""
    received = Recorder()
    mesh = MeshNode(sync_config(*peers, **changes), TENANT)
    async with trio.open_nursery() as nursery:
        await nursery.start(mesh.serve, received)
        yield Node(mesh, received)
        nursery.cancel_scope.cancel()


def hello(server_id: str = "stranger", secret: str = SECRET) -> bytes:
    """A good HELLO, with a nonce of its own."""
    nonce = secrets.token_hex(16)
    return encode(Hello(server_id, nonce, sign_nonce(secret.encode(), nonce)))


def frame(type_byte: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IB", 1 + len(payload), type_byte) + payload


async def dial(node: Node) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", node.port)


async def wait_closed(stream: trio.SocketStream) -> None:
    """Block until the node has closed the connection; it must not write before."""
    with suppress(trio.BrokenResourceError):  # closed with our bytes unread
        assert await stream.receive_some(1) == b""


def reset(stream: trio.SocketStream) -> None:
    """Close with RST, as a host does that has lost its memory."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class RawPeer:
    """Listens where a node dials. `accept` gives the connection to the test, to do its worst."""

    def __init__(self, listener: trio.SocketListener) -> None:
        self._listener = listener
        self.accepted: list[trio.SocketStream] = []
        self.port: int = listener.socket.getsockname()[1]

    async def accept(self) -> RawLink:
        stream = await self._listener.accept()
        self.accepted.append(stream)
        return RawLink(stream)


class RawLink:
    """One accepted connection, read as a listener reads it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._link = InboundLink(HelloVerifier(SECRET.encode(), NonceMemory(10)))

    async def receive(self) -> Message | UnknownFrame:
        """The next frame; EOFError at the end of the stream."""
        while (event := self._link.next_event_untrusted()) is None:
            data = await self.stream.receive_some(65536)
            if not data:
                raise EOFError
            self._link.receive_data(bytes(data))
        return event


@asynccontextmanager
async def open_peer(
    host: str = "127.0.0.1", port: int = 0, buffer_bytes: int | None = None
) -> AsyncIterator[RawPeer]:
    """Listen for the block's time; `buffer_bytes` is the most that unread bytes may take."""
    [listener] = await trio.open_tcp_listeners(port, host=host)
    if buffer_bytes is not None:
        listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    async with listener:
        peer = RawPeer(listener)
        try:
            yield peer
        finally:
            for stream in peer.accepted:
                await trio.aclose_forcefully(stream)
