"""A TCP proxy between brokers, or a broker and its database, that can cut, stall or drop."""

from __future__ import annotations

from contextlib import asynccontextmanager
from enum import Enum
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

READ_BYTES = 65536


class Mode(Enum):
    """What becomes of the bytes."""

    PASS = "pass"
    CUT = "cut"
    """Connections break, new ones end at once."""
    STALL = "stall"
    """Nothing moves, nothing breaks: as behind a switch that is being restarted."""
    DROP = "drop"
    """Bytes are taken and thrown away. A stream that went on after that would have a hole: going
    back to PASS breaks the connections that lost any."""


class Proxy:
    """Passes connections to its `port` on to a target; open it with `open_proxy`."""

    def __init__(self, target: int, port: int, host: str = "127.0.0.1") -> None:
        self.target = target
        self.host = host
        self.port = port
        self.mode = Mode.PASS
        self.connections = 0
        self.passed = 0
        self.dropped = 0
        self._changed = trio.Event()
        self._scopes: dict[trio.CancelScope, bool] = {}  # whether the connection has lost bytes

    def switch(self, mode: Mode) -> None:
        """Change what becomes of the bytes, from now on."""
        self.mode = mode
        self._changed.set()
        self._changed = trio.Event()
        for scope, holed in self._scopes.items():
            if mode is Mode.CUT or (holed and mode is Mode.PASS):
                scope.cancel()

    async def serve_connection(self, client: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            self._scopes[scope] = False
            self.connections += 1
            try:
                await self._connect(client, scope)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # either end may go when it likes
            finally:
                del self._scopes[scope]
                await trio.aclose_forcefully(client)

    async def _connect(self, client: trio.SocketStream, scope: trio.CancelScope) -> None:
        if self.mode is Mode.CUT:
            return
        async with (
            await trio.open_tcp_stream(self.host, self.target) as server,
            trio.open_nursery() as nursery,
        ):
            # Both directions end together: one that half-closes is not what is tried here.
            nursery.start_soon(self._pump, client, server, scope, nursery.cancel_scope)
            nursery.start_soon(self._pump, server, client, scope, nursery.cancel_scope)

    async def _pump(
        self,
        source: trio.SocketStream,
        sink: trio.SocketStream,
        scope: trio.CancelScope,
        both: trio.CancelScope,
    ) -> None:
        try:
            while data := await source.receive_some(READ_BYTES):
                while self.mode is Mode.STALL:
                    await self._changed.wait()
                if self.mode is Mode.DROP:
                    self._scopes[scope] = True
                    self.dropped += len(data)
                else:
                    await sink.send_all(data)
                    self.passed += len(data)
        except (OSError, trio.BrokenResourceError):
            pass
        both.cancel()


@asynccontextmanager
async def open_proxy(target: int, host: str = "127.0.0.1") -> AsyncIterator[Proxy]:
    """Run a proxy on 127.0.0.1 to a port of `host` for the block's time."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    proxy = Proxy(target, listener.socket.getsockname()[1], host)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, proxy.serve_connection, [listener])
        yield proxy
        nursery.cancel_scope.cancel()
