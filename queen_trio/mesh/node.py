"""This broker in the mesh: one listener, a dialer per peer, the hints, liveness and statistics."""

from __future__ import annotations

import ssl
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import frozen

from queen_protocol import Hello, HelloOrigin, HelloVerifier, Message, NonceMemory, UnknownFrame

from . import hints as frames
from .dialer import Dialer
from .hints import MeshHints
from .listener import Listener
from .peer import Peer, PeerStatistics

if TYPE_CHECKING:
    from queen_trio.broker.hints import Hints
    from queen_trio.config import SyncConfig

log = structlog.get_logger(__name__)

TRANSPORT: Final = "tcp-mesh"
# Nonces that the listener remembers; two peers that reconnect every 250 ms fill it in an hour.
NONCES: Final = 65_536
# Our own nonces, to know a HELLO that we sent to ourselves.
OWN_NONCES: Final = 1_024
# Server ids come from the wire: a stranger in open mode must not fill the memory with them.
MAX_SERVERS: Final = 256


@frozen
class MeshStatistics:
    """What the stats route shows (spec 3, "Stats")."""

    server_id: str
    port: int
    peers: list[PeerStatistics]
    servers_alive: list[str]
    servers_dead: list[str]
    messages_sent: int
    messages_received: int
    messages_dropped: int
    handshake_failures: int


class MeshNode:
    """Built once; `serve` may crash and be run again, its counters go on."""

    def __init__(self, config: SyncConfig, tenant: str) -> None:
        """Raises `ssl.SSLError` or OSError when the TLS files can't be used."""
        self._config = config
        self._tenant = tenant
        self._own_nonces: OrderedDict[str, Peer] = OrderedDict()
        self._scopes: dict[Peer, trio.CancelScope] = {}
        self._seen: OrderedDict[str, float] = OrderedDict()  # server id: time of its last frame
        self.peers = [Peer(peer.host, peer.port or config.mesh_port) for peer in config.peers]
        self.hints = MeshHints(self.peers, tenant)
        self._local: Hints | None = None
        secret = (config.secret or "").encode()
        server_tls, self._client_tls = _tls_contexts(config)
        self._listener = Listener(
            HelloVerifier(secret, NonceMemory(NONCES)),
            config.server_id,
            self._own_nonces,
            server_tls,
            self._apply,
            self._on_hello,
        )
        self._secret = secret

    async def serve(self, local: Hints) -> None:
        """Run the mesh until cancelled; frames that arrive act on `local`.

        A port that is taken is a warning, and the broker goes on with its local waker only: then
        this returns, and nobody is dialled.
        """
        self._local = local
        try:
            listeners = await trio.open_tcp_listeners(
                self._config.mesh_port, host=self._config.mesh_bind_addr
            )
        except OSError as error:
            log.warning(
                "TCP mesh bind failed",
                address=self._config.mesh_bind_addr,
                port=self._config.mesh_port,
                error=str(error),
            )
            return
        log.info("mesh", port=self._config.mesh_port, peers=len(self.peers), auth=self._config.auth)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.hints.serve)
            for peer in self.peers:
                nursery.start_soon(self._dial, peer)
            await trio.serve_listeners(self._listener.serve_link, listeners)

    def statistics(self) -> MeshStatistics:
        """A snapshot; liveness is for people only, nothing routes on it."""
        now = trio.current_time()
        threshold = self._config.dead_threshold_ms / 1000
        alive = [name for name, at in self._seen.items() if now - at < threshold]
        return MeshStatistics(
            server_id=self._config.server_id,
            port=self._config.mesh_port,
            peers=[peer.statistics() for peer in self.peers],
            servers_alive=sorted(alive),
            servers_dead=sorted(set(self._seen) - set(alive)),
            messages_sent=sum(peer.sent for peer in self.peers),
            messages_received=self._listener.received,
            messages_dropped=sum(peer.dropped for peer in self.peers),
            handshake_failures=self._listener.handshake_failures,
        )

    async def _dial(self, peer: Peer) -> None:
        with trio.CancelScope() as self._scopes[peer]:
            await Dialer(
                peer,
                self._config.server_id,
                self._secret,
                self._config.heartbeat_ms / 1000,
                self._client_tls,
                lambda nonce: self._remember(nonce, peer),
            ).serve()

    def _remember(self, nonce: str, peer: Peer) -> None:
        self._own_nonces[nonce] = peer
        if len(self._own_nonces) > OWN_NONCES:
            self._own_nonces.popitem(last=False)

    def _on_hello(self, hello: Hello, origin: HelloOrigin) -> None:
        if origin is HelloOrigin.OURSELVES:
            peer = self._own_nonces[hello.nonce]
            peer.is_self = True
            log.info("mesh peer is this broker itself", peer=f"{peer.host}:{peer.port}")
            self._scopes[peer].cancel()
        elif origin is HelloOrigin.DUPLICATE_ID:
            log.warning("another broker has this QUEEN_SERVER_ID", server_id=hello.server_id)
        else:
            self._saw(hello.server_id)

    def _apply(self, server_id: str, message: Message | UnknownFrame) -> None:
        if server_id != self._config.server_id:
            self._saw(server_id)
        if self._local is not None:
            frames.apply(message, self._local, self._tenant)

    def _saw(self, server_id: str) -> None:
        self._seen[server_id] = trio.current_time()
        self._seen.move_to_end(server_id)
        if len(self._seen) > MAX_SERVERS:
            self._seen.popitem(last=False)


def _tls_contexts(config: SyncConfig) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Contexts for the listener and the dialers: both sides show a certificate of the same CA."""
    if config.tls_cert is None or config.tls_key is None or config.tls_ca is None:
        return None, None
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.tls_ca)
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=config.tls_ca)
    for context in (server, client):
        context.load_cert_chain(config.tls_cert, config.tls_key)
    return server, client
