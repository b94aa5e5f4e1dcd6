"""The sending end of a link: dial a peer, say HELLO, send hints, heartbeat; again and again."""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import define, field

from queen_protocol import Heartbeat, OutboundLink, RemoteProtocolError, encode
from queen_trio.backoff import Backoff

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from .peer import Peer

log = structlog.get_logger(__name__)

BACKOFF_MAX_SECONDS: Final = 5.0
CONNECT_SECONDS: Final = 5.0
# A link that lasted so long, the attempt to open it included, was accepted; one that refuses our
# HELLO ends at once, and must not be dialled four times a second.
HEALTHY_SECONDS: Final = 15.0
# A peer that takes nothing for so long is as good as down (spec 8.28): where its buffers are full
# our write blocks, where its host is gone only the kernel knows that nothing is acknowledged.
WRITE_SECONDS: Final = 5.0
# Frames that are queued together leave together.
WRITE_BYTES: Final = 64 * 1024
NONCE_BYTES: Final = 16

_HEARTBEAT: Final = encode(Heartbeat())
_UNREACHABLE: Final = "mesh peer unreachable"
_CLOSED: Final = "mesh peer closed the link"


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
    # What the last link ended with: in a row of equal ends only the first is worth a line.
    _last_end: str | None = field(default=None, init=False)

    async def serve(self) -> None:
        """Dial until cancelled, or until the peer turns out to be ourselves.

        The name is resolved for every attempt: a peer that moved is found without further ado.
        """
        backoff = Backoff(BACKOFF_MAX_SECONDS, HEALTHY_SECONDS)
        while not self.peer.is_self:
            started = trio.current_time()
            end, reason = await self._run_link_to_its_end()
            lasted = trio.current_time() - started
            if lasted >= HEALTHY_SECONDS:
                self._last_end = None
            report = log.debug if end == self._last_end else log.warning
            report(end, peer=self.peer.name, reason=reason)
            self._last_end = end
            await trio.sleep(backoff.seconds_after(lasted))

    async def _run_link_to_its_end(self) -> tuple[str, str]:
        """Return the event that ended the link, and why. This is the peer's boundary for errors."""
        try:
            return await self._run_link()
        except (OSError, UnicodeError, trio.TooSlowError, trio.BrokenResourceError) as error:
            # UnicodeError: a name that can't be asked of any resolver.
            return _UNREACHABLE, _describe(error)
        except RemoteProtocolError as error:
            return "mesh peer broke the protocol", error.reason
        except Exception as error:
            log.exception("mesh dialer failed", peer=self.peer.name)
            return "mesh link failed", _describe(error)

    async def _run_link(self) -> tuple[str, str]:
        with trio.fail_after(CONNECT_SECONDS):
            tcp = await trio.open_tcp_stream(self.peer.host, self.peer.port)
        stream: trio.abc.Stream = tcp
        try:
            _bound_silence(tcp)
            self.peer.resolved_ip = tcp.socket.getpeername()[0]
            if self.tls is not None:
                stream = trio.SSLStream(tcp, self.tls, server_hostname=self.peer.host)
            link = self._new_link()
            await _write(stream, link.say_hello())
            self.peer.sent += 1
            self.peer.discard_nowait()
            self.peer.connected = True
            # Each refused HELLO has such a moment too.
            report = log.debug if self._last_end == _CLOSED else log.info
            report("mesh peer connected", peer=self.peer.name, address=self.peer.resolved_ip)
            return await self._use(stream, link)
        finally:
            self.peer.connected = False
            await trio.aclose_forcefully(stream)

    def _new_link(self) -> OutboundLink:
        nonce = secrets.token_hex(NONCE_BYTES)
        self.on_nonce(nonce)
        return OutboundLink(server_id=self.server_id, secret=self.secret, nonce=nonce)

    async def _use(self, stream: trio.abc.Stream, link: OutboundLink) -> tuple[str, str]:
        """Send until either direction breaks. A listener never writes: to read is to see the end.

        RemoteProtocolError if it does write.
        """
        ends: list[tuple[str, str]] = []
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                try:
                    await self._send(stream)
                except (trio.BrokenResourceError, trio.TooSlowError) as error:
                    ends.append(("mesh link broke", _describe(error)))
                    nursery.cancel_scope.cancel()

            nursery.start_soon(send)
            read = b""
            try:
                read = bytes(await stream.receive_some(1024))
                ends.append((_CLOSED, "end of stream"))
            except trio.BrokenResourceError as error:
                # Also how TLS 1.3 refuses our certificate, after our side of it is done.
                ends.append((_CLOSED, _describe(error)))
            nursery.cancel_scope.cancel()
        link.receive_data_untrusted(read)
        return ends[0]

    async def _send(self, stream: trio.abc.Stream) -> None:
        write_nowait = _nowait_writer(stream)
        while True:
            frames: list[bytes] = []
            with trio.move_on_after(self.heartbeat_seconds):
                frames = await self.peer.wait_frames(WRITE_BYTES, write_nowait)
            # What was queued in the moment when the time was over goes first: half a frame, maybe.
            frames = frames or self.peer.take_nowait(WRITE_BYTES) or [_HEARTBEAT]
            try:
                await _write(stream, b"".join(frames))
            except BaseException:  # cancelled too: then the peer has closed the link
                self.peer.dropped += len(frames)
                raise
            self.peer.sent += len(frames)


def _nowait_writer(stream: trio.abc.Stream) -> Callable[[bytes], bytes] | None:
    """Make what writes bytes and returns those that the kernel didn't take; None with TLS."""
    if not isinstance(stream, trio.SocketStream):
        return None
    descriptor = stream.socket.fileno()

    def write_nowait(frame: bytes) -> bytes:
        try:
            return frame[os.write(descriptor, frame) :]
        except OSError:  # full; or broken, which whoever writes the queue will notice
            return frame

    return write_nowait


async def _write(stream: trio.abc.Stream, data: bytes) -> None:
    with trio.fail_after(WRITE_SECONDS):
        await stream.send_all(data)


def _bound_silence(tcp: trio.SocketStream) -> None:
    """Have the kernel give up on bytes that nobody acknowledges; by itself it takes 15 minutes."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(WRITE_SECONDS * 1000)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _describe(error: Exception) -> str:
    """What happened: Trio's own errors often carry it in their cause only."""
    return str(error) or str(error.__cause__ or "") or type(error).__name__
