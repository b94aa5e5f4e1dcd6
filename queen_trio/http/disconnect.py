"""Noticing that a client went away while its request is parked.

The lean server has one `HangupWatcher` for all connections and offers it to the application as
`scope["extensions"]["queen.disconnect"]`: no task per parked poll. `cancel_on_disconnect` uses it,
or falls back to a task in `receive()` under any other server.

A client that only shuts down its sending side and still waits for the answer counts as gone: TCP
shows the same FIN for both, HTTP/1.1 clients don't do it, and polls would stay parked for the dead.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import attrs
import trio

EXTENSION = "queen.disconnect"

POLL_SECONDS = 1.0
"""Where there is no epoll, how often the watched sockets are looked at."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Unwatch = Callable[[], None]


class DisconnectHook(Protocol):
    """What the lean server puts into the scope."""

    def watch(self, callback: Callable[[], object]) -> Unwatch:
        """Call `callback` once, synchronously, when the client hangs up; never after unwatch."""

    def is_gone_nowait(self) -> bool:
        """Whether the client has hung up by now; one system call."""


@attrs.define(eq=False)
class ClientPresence:
    """`gone` turns True when the client went away, which cancels `cancel_scope`."""

    cancel_scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    gone: bool = False

    def leave(self) -> None:
        """Note that the client went away, and cancel the work done for it."""
        self.gone = True
        self.cancel_scope.cancel()


def cancel_on_disconnect(
    scope: MutableMapping[str, Any], receive: Receive
) -> AbstractAsyncContextManager[ClientPresence]:
    """Cancel the body of the `async with` when the client goes away; look at `.gone` afterwards.

    The request body must have been received. Exceptions of the body, and cancellation from
    outside, pass unchanged.
    """
    hook: DisconnectHook | None = scope.get("extensions", {}).get(EXTENSION)
    return _until_receive(receive) if hook is None else _UntilHook(hook)


class _UntilHook:
    """The hook as a context manager; a class, as a generator would cost a parked poll 500 bytes."""

    __slots__ = ("_hook", "_presence", "_unwatch")

    def __init__(self, hook: DisconnectHook) -> None:
        self._hook = hook
        self._presence = ClientPresence()

    async def __aenter__(self) -> ClientPresence:
        self._presence.cancel_scope.__enter__()
        self._unwatch = self._hook.watch(self._presence.leave)
        return self._presence

    async def __aexit__(self, *exc_info: Any) -> bool:
        self._unwatch()
        return bool(self._presence.cancel_scope.__exit__(*exc_info))


@contextlib.asynccontextmanager
async def _until_receive(receive: Receive) -> AsyncIterator[ClientPresence]:
    presence = ClientPresence()

    async def wait_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        presence.leave()

    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_disconnect)
        with presence.cancel_scope:
            try:
                yield presence
            except Exception as exc:  # Carried past the nursery, which would wrap it.
                failure = exc
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class HangupWatcher:
    """Tells when the peers of watched sockets hang up; `serve` must run meanwhile.

    One epoll of our own inside Trio's: sockets are in it only while watched, for RDHUP only, so
    pipelined bytes wake nobody.
    """

    def __init__(self, *, use_epoll: bool = hasattr(select, "epoll")) -> None:
        self._callbacks: dict[int, list[Callable[[], object]]] = {}
        self._epoll = select.epoll() if use_epoll else None

    def watch(self, fd: int, callback: Callable[[], object]) -> Unwatch:
        """Call `callback` once when the peer of `fd` hangs up; `drop` before closing `fd`."""
        callbacks = self._callbacks.get(fd)
        if callbacks is None:
            callbacks = self._callbacks[fd] = []
            if self._epoll is not None:
                self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
        callbacks.append(callback)

        def unwatch() -> None:
            if callback in callbacks:
                callbacks.remove(callback)
                if not callbacks and self._callbacks.get(fd) is callbacks:
                    self._forget(fd)

        return unwatch

    def drop(self, fd: int) -> None:
        """Forget the watches of `fd`: its number will be another connection's."""
        if fd in self._callbacks:
            self._forget(fd)

    async def serve(self) -> None:
        """Run until cancelled."""
        try:
            if self._epoll is None:
                await self._poll()
            else:
                await self._wait_epoll(self._epoll)
        finally:
            if self._epoll is not None:
                self._epoll.close()
                self._epoll = None

    async def _wait_epoll(self, epoll: select.epoll) -> None:
        while True:
            await trio.lowlevel.wait_readable(epoll.fileno())
            for fd, _ in epoll.poll(0):
                self._report(fd)

    async def _poll(self) -> None:
        while True:
            await trio.sleep(POLL_SECONDS)
            for fd in [fd for fd in self._callbacks if is_hung_up_nowait(fd)]:
                self._report(fd)

    def _report(self, fd: int) -> None:
        callbacks = self._callbacks.get(fd)
        if callbacks is None:
            return
        self._forget(fd)
        reported = callbacks.copy()
        callbacks.clear()
        for callback in reported:
            callback()

    def _forget(self, fd: int) -> None:
        del self._callbacks[fd]
        if self._epoll is not None:
            self._epoll.unregister(fd)


def is_hung_up_nowait(fd: int) -> bool:
    """Whether the peer of the non-blocking socket `fd` has closed or reset it."""
    if hasattr(select, "POLLRDHUP"):
        poll = select.poll()
        poll.register(fd, select.POLLRDHUP)
        return bool(poll.poll(0))
    with socket.socket(fileno=fd) as peer:
        try:
            return not peer.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            peer.detach()
