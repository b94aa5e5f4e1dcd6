"""Listening sockets, as both HTTP servers want them."""

from __future__ import annotations

import contextlib
import socket

import trio

from queen_trio.errors import QueenError

BACKLOG = 4096
"""Connections the kernel holds for us: a reconnecting fleet arrives at once (see somaxconn)."""

USER_TIMEOUT_MS = 30_000
"""Unacknowledged data or a closed window for so long ends a connection. Accepted sockets inherit
it; it is what frees hypercorn's shielded writes from a client that stops reading."""

_EVERY_ADDRESS = ("", "*")


async def bind_listeners(
    bind_addr: str,
    port: int,
    *,
    backlog: int = BACKLOG,
    user_timeout_ms: int = USER_TIMEOUT_MS,
) -> list[socket.socket]:
    """Return non-blocking listening sockets, one per address that `bind_addr` means.

    A name, an IPv4 or an IPv6 address; "" and "*" mean every IPv4 and IPv6 address. With port 0
    all of them share the port that the first one got. Raises `QueenError` with the address;
    nothing stays open then. The caller owns the sockets until it hands them to a server.
    """
    try:
        return await _bind(bind_addr, port, backlog, user_timeout_ms)
    except OSError as error:
        raise QueenError(f"can't listen on {bind_addr}:{port}: {error.strerror}") from error


async def _bind(
    bind_addr: str, port: int, backlog: int, user_timeout_ms: int
) -> list[socket.socket]:
    host = None if bind_addr in _EVERY_ADDRESS else bind_addr.strip("[]")
    found = await trio.socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    with contextlib.ExitStack() as opened:
        listeners: list[socket.socket] = []
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                listener = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                # Python knows IPv6 but this kernel doesn't: serve the others.
                if host is None and family == socket.AF_INET6:
                    continue
                raise
            opened.callback(listener.close)
            _configure(listener, user_timeout_ms)
            if port == 0 and listeners:
                address = (address[0], listeners[0].getsockname()[1], *address[2:])
            listener.bind(address)
            listener.listen(backlog)
            listeners.append(listener)
        opened.pop_all()
    return listeners


def _configure(listener: socket.socket, user_timeout_ms: int) -> None:
    listener.setblocking(False)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Answers are written whole: Nagle could only delay them.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout_ms)
    if listener.family == socket.AF_INET6:
        # The IPv4 side, if wanted, has a socket of its own.
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
