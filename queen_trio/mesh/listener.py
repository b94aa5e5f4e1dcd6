"""The receiving end of links: accept, demand a good HELLO, apply what comes; write nothing."""

from __future__ import annotations

import ssl
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import define, field

from queen_protocol import (
    Hello,
    HelloOrigin,
    HelloVerifier,
    InboundLink,
    LinkState,
    Message,
    Reason,
    RemoteProtocolError,
    UnknownFrame,
    hello_origin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container

log = structlog.get_logger(__name__)

# From the connection on, the TLS handshake included (spec 3).
HELLO_SECONDS: Final = 5.0
READ_BYTES: Final = 64 * 1024
# Two peers have a link each; the rest is reconnects that overlap. Each may buffer 16 MiB.
MAX_LINKS: Final = 64
# Connections without a HELLO yet. They are counted apart, and the oldest of them goes when one more
# comes: strangers who connect and say nothing can't keep a broker out, whose HELLO comes at once.
MAX_WAITING: Final = 64


class Refusal(StrEnum):
    """Why a link was closed, where it wasn't for a `Reason` of the protocol."""

    TLS = "tls"
    CROWDED_OUT = "crowded_out"
    TOO_MANY_LINKS = "too_many_links"


@define(eq=False)
class Listener:
    """All accepted links of this node."""

    verifier: HelloVerifier
    server_id: str
    sent_nonces: Container[str]
    tls: ssl.SSLContext | None
    silence_seconds: float
    """A link without a byte for so long has lost its other end."""
    apply: Callable[[str, Message | UnknownFrame], None]
    """Called with the sender's server id for each frame after HELLO; must not block or raise."""
    on_hello: Callable[[Hello, HelloOrigin], None]
    received: int = 0
    handshake_failures: int = 0
    # How often each happened; the first one of a kind is logged.
    refusals: Counter[Reason | Refusal] = field(factory=Counter)
    _open: int = 0
    # Links that wait for HELLO, the oldest first, each with the scope that ends it.
    _waiting: dict[InboundLink, trio.CancelScope] = field(factory=dict)

    async def serve_link(self, tcp: trio.SocketStream) -> None:
        """Serve one accepted connection to its end. This is the peer's boundary for errors."""
        address = _address(tcp)
        link = InboundLink(self.verifier)
        stream: trio.abc.Stream = tcp
        if self.tls is not None:
            stream = trio.SSLStream(tcp, self.tls, server_side=True)
        try:
            with trio.CancelScope() as scope:
                self._wait_for_hello(link, scope)
                await self._read_link(link, stream, scope)
            if scope.cancelled_caught:
                self._end_of_patience(link, address)
        except RemoteProtocolError as error:
            self._refuse(link, error.reason, address)
        except (trio.BrokenResourceError, OSError) as error:
            if _is_tls_failure(error):
                self._refuse(link, Refusal.TLS, address, error.__cause__)
            else:
                log.debug("mesh link broke", peer=address, error=str(error))
        except Exception:
            log.exception("mesh link failed", peer=address)
        finally:
            self._waiting.pop(link, None)
            self._open -= link.hello is not None
            await trio.aclose_forcefully(stream)

    def _wait_for_hello(self, link: InboundLink, scope: trio.CancelScope) -> None:
        if len(self._waiting) >= MAX_WAITING:
            oldest = next(iter(self._waiting))
            self._waiting.pop(oldest).cancel()
        self._waiting[link] = scope
        scope.deadline = trio.current_time() + HELLO_SECONDS

    async def _read_link(
        self, link: InboundLink, stream: trio.abc.Stream, scope: trio.CancelScope
    ) -> None:
        while data := await stream.receive_some(READ_BYTES):
            link.receive_data(bytes(data))
            while (event := link.next_event_untrusted()) is not None:
                self.received += 1
                if isinstance(event, Hello):
                    self._open_link(link, event)
                elif link.hello is not None:
                    self.apply(link.hello.server_id, event)
                if link.state is LinkState.CLOSED:
                    return
            if link.hello is not None:
                scope.deadline = trio.current_time() + self.silence_seconds
        link.close()

    def _open_link(self, link: InboundLink, hello: Hello) -> None:
        self._waiting.pop(link, None)
        self._open += 1
        if self._open > MAX_LINKS:
            link.close()
            self._count(Refusal.TOO_MANY_LINKS, hello.server_id)
            return
        origin = hello_origin(hello, server_id=self.server_id, sent_nonces=self.sent_nonces)
        self.on_hello(hello, origin)
        if origin is HelloOrigin.OURSELVES:
            link.close()  # nothing to hear there, or somebody plays our own HELLO back to us

    def _end_of_patience(self, link: InboundLink, address: str) -> None:
        if link.hello is not None:
            log.info("mesh peer fell silent", server_id=link.hello.server_id, peer=address)
        elif link in self._waiting:
            self._refuse(link, Reason.LATE_HELLO, address)
        else:
            self._refuse(link, Refusal.CROWDED_OUT, address)

    def _refuse(
        self,
        link: InboundLink,
        reason: Reason | Refusal,
        address: str,
        error: BaseException | None = None,
    ) -> None:
        self.handshake_failures += link.hello is None
        self._count(reason, address, error)

    def _count(
        self, reason: Reason | Refusal, peer: str, error: BaseException | None = None
    ) -> None:
        self.refusals[reason] += 1
        report = log.warning if self.refusals[reason] == 1 else log.debug
        detail = {} if error is None else {"error": str(error)}
        report("mesh link refused", reason=str(reason), peer=peer, **detail)


def _is_tls_failure(error: Exception) -> bool:
    """Whether TLS itself failed; a connection that merely ended is none (port probes do that)."""
    cause = error.__cause__
    # Which of the two it is for an end of the stream differs between versions of OpenSSL.
    ended = isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return isinstance(cause, ssl.SSLError) and not ended


def _address(stream: trio.SocketStream) -> str:
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return "gone"
