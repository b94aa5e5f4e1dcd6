"""The sending end of a link: dial a peer, say HELLO, send hints, heartbeat; again and again."""

from __future__ import annotations

import random
import secrets
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import define

from queen_protocol import Heartbeat, OutboundLink, RemoteProtocolError, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from .peer import Peer

log = structlog.get_logger(__name__)

BACKOFF_FIRST_SECONDS: Final = 0.25
BACKOFF_MAX_SECONDS: Final = 5.0
CONNECT_SECONDS: Final = 5.0
# A link that lasted so long was accepted; one that refuses our HELLO ends at once, and must not be
# dialled four times a second.
HEALTHY_SECONDS: Final = 10.0
# A peer that takes nothing for so long is as good as down (spec 8.28).
WRITE_SECONDS: Final = 5.0
# Frames that are queued together leave together.
WRITE_BYTES: Final = 64 * 1024
NONCE_BYTES: Final = 16

_HEARTBEAT: Final = encode(Heartbeat())


@define(eq=False)
class Dialer:
    """Keeps one link to one peer up; `serve` is its life."""

    peer: Peer
    server_id: str
    secret: bytes
    heartbeat_seconds: float
    tls: ssl.SSLContext | None
    on_nonce: Callable[[str], None]
    """Told each nonce before it is sent, so that the listener knows our own HELLO."""

    async def serve(self) -> None:
        """Dial until cancelled, or until the peer turns out to be ourselves.

        The name is resolved for every attempt: a peer that moved is found without further ado. The
        first failure in a row is logged.
        """
        backoff = BACKOFF_FIRST_SECONDS
        failing = False
        while not self.peer.is_self:
            started = trio.current_time()
            try:
                await self._run_link()
            except (OSError, trio.TooSlowError, trio.BrokenResourceError, ssl.SSLError) as error:
                report = log.debug if failing else log.warning
                report("mesh peer unreachable", peer=self._name, error=_reason(error))
                failing = True
            except RemoteProtocolError as error:
                log.warning("mesh peer broke the protocol", peer=self._name, reason=error.reason)
            if trio.current_time() - started >= HEALTHY_SECONDS:
                backoff = BACKOFF_FIRST_SECONDS
                failing = False
            await trio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            backoff = min(backoff * 2, BACKOFF_MAX_SECONDS)

    @property
    def _name(self) -> str:
        return f"{self.peer.host}:{self.peer.port}"

    async def _run_link(self) -> None:
        """Connect and send until the link ends: returns at its end, raises where it broke."""
        with trio.fail_after(CONNECT_SECONDS):
            tcp = await trio.open_tcp_stream(self.peer.host, self.peer.port)
        self.peer.resolved_ip = tcp.socket.getpeername()[0]
        stream: trio.abc.Stream = tcp
        if self.tls is not None:
            stream = trio.SSLStream(tcp, self.tls, server_hostname=self.peer.host)
        try:
            nonce = secrets.token_hex(NONCE_BYTES)
            self.on_nonce(nonce)
            link = OutboundLink(server_id=self.server_id, secret=self.secret, nonce=nonce)
            await _write(stream, link.say_hello())
            self.peer.discard_nowait()
            self.peer.connected = True
            log.info("mesh peer connected", peer=self._name, address=self.peer.resolved_ip)
            read = b""
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_until_broken, stream, nursery.cancel_scope)
                with suppress(trio.BrokenResourceError):
                    # A listener never writes: this is the end of the link, or a violation.
                    read = bytes(await stream.receive_some(1024))
                nursery.cancel_scope.cancel()
            log.info("mesh peer closed the link", peer=self._name)
            link.receive_data_untrusted(read)
        finally:
            self.peer.connected = False
            await trio.aclose_forcefully(stream)

    async def _send_until_broken(self, stream: trio.abc.Stream, link: trio.CancelScope) -> None:
        try:
            while True:
                frames = [_HEARTBEAT]
                with trio.move_on_after(self.heartbeat_seconds):
                    frames = [await self.peer.wait_frame(), *self.peer.take_nowait(WRITE_BYTES)]
                await _write(stream, b"".join(frames))
                self.peer.sent += len(frames)
        except (trio.BrokenResourceError, trio.TooSlowError) as error:
            log.info("mesh link broke", peer=self._name, error=_reason(error))
            link.cancel()


async def _write(stream: trio.abc.Stream, data: bytes) -> None:
    with trio.fail_after(WRITE_SECONDS):
        await stream.send_all(data)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
