"""The receiving end of links: accept, demand a good HELLO, apply what comes; write nothing."""

from __future__ import annotations

from collections import Counter
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
    RemoteProtocolError,
    UnknownFrame,
    hello_origin,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Container

log = structlog.get_logger(__name__)

HELLO_SECONDS: Final = 5.0
READ_BYTES: Final = 64 * 1024
# Two peers have a link each; the rest is reconnects that overlap, and strangers.
MAX_LINKS: Final = 64
# Heartbeats come every second: a link that is silent for so long has lost its other end.
SILENCE_SECONDS: Final = 60.0


@define(eq=False)
class Listener:
    """All accepted links of this node."""

    verifier: HelloVerifier
    server_id: str
    sent_nonces: Container[str]
    tls: ssl.SSLContext | None
    apply: Callable[[str, Message | UnknownFrame], None]
    """Called with the sender's server id for each frame after HELLO; must not block or raise."""
    on_hello: Callable[[Hello, HelloOrigin], None]
    links: int = 0
    received: int = 0
    handshake_failures: int = 0
    # What went wrong how often, by reason: each is logged once.
    refusals: Counter[str] = field(factory=Counter)

    async def serve_link(self, stream: trio.SocketStream) -> None:
        """Serve one accepted connection to its end. This is the peer's boundary for errors."""
        address = _address(stream)
        if self.links >= MAX_LINKS:
            self._refuse("too_many_links", address)
            await trio.aclose_forcefully(stream)
            return
        self.links += 1
        link = InboundLink(self.verifier)
        secured: trio.abc.Stream = stream
        if self.tls is not None:
            secured = trio.SSLStream(stream, self.tls, server_side=True)
        try:
            await self._read_link(link, secured)
        except RemoteProtocolError as error:
            self.handshake_failures += link.hello is None
            self._refuse(error.reason, address)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            if self.tls is not None and link.hello is None:
                self.handshake_failures += 1
                self._refuse("tls", address)
            log.debug("mesh link broke", peer=address, error=str(error))
        except Exception:
            log.exception("mesh link failed", peer=address)
        finally:
            self.links -= 1
            await trio.aclose_forcefully(secured)

    async def _read_link(self, link: InboundLink, stream: trio.abc.Stream) -> None:
        with trio.move_on_after(HELLO_SECONDS) as patience:
            while True:
                data = await stream.receive_some(READ_BYTES)
                if not data:
                    link.close()
                    return
                link.receive_data(bytes(data))
                while (event := link.next_event_untrusted()) is not None:
                    self._take(link, event)
                if link.state is LinkState.OPEN:
                    patience.deadline = trio.current_time() + SILENCE_SECONDS
        if link.hello is None:
            link.refuse_late_hello()
        log.info("mesh peer fell silent", server_id=link.hello.server_id)

    def _take(self, link: InboundLink, event: Message | UnknownFrame) -> None:
        self.received += 1
        if isinstance(event, Hello):
            origin = hello_origin(event, server_id=self.server_id, sent_nonces=self.sent_nonces)
            self.on_hello(event, origin)
        elif link.hello is not None:
            self.apply(link.hello.server_id, event)

    def _refuse(self, reason: str, address: str) -> None:
        self.refusals[reason] += 1
        report = log.warning if self.refusals[reason] == 1 else log.debug
        report("mesh link refused", reason=str(reason), peer=address)


def _address(stream: trio.SocketStream) -> str:
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return "gone"
