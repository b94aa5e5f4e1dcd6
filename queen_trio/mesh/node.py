"""This broker in the mesh: one listener, a dialer per peer, the hints, liveness and statistics."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import structlog
import trio

from queen_protocol import Hello, HelloOrigin, HelloVerifier, Message, NonceMemory, UnknownFrame
from queen_trio.model.mesh import MeshStatistics

from . import hints as frames
from .dialer import Dialer
from .hints import MeshHints
from .listener import Listener
from .liveness import Liveness
from .peer import Peer
from .tls import load_tls

if TYPE_CHECKING:
    from queen_trio.broker.hints import Hints
    from queen_trio.config import SyncConfig

log = structlog.get_logger(__name__)

# Nonces that the listener remembers; two peers that reconnect every 250 ms fill it in two hours.
NONCES: Final = 65_536
# Our own nonces, to know a HELLO that we sent to ourselves.
OWN_NONCES: Final = 1_024
# A link is given up after so many heartbeats that didn't come, but not sooner than in a minute.
SILENT_HEARTBEATS: Final = 3
SILENCE_LEAST_SECONDS: Final = 60.0


class MeshNode:
    """Built once; `serve` may crash and be run again, its counters go on."""

    def __init__(self, config: SyncConfig, tenant: str) -> None:
        """Raises `ConfigError` when the TLS files can't be used."""
        self._config = config
        self._tenant = tenant
        self._secret = (config.secret or "").encode()
        self._heartbeat_seconds = config.heartbeat_ms / 1000
        self._tls = load_tls(config)
        self._local: Hints | None = None
        self._own_nonces: OrderedDict[str, Peer] = OrderedDict()
        self._scopes: dict[Peer, trio.CancelScope] = {}
        self._warned_of_twin = False
        self._liveness = Liveness(config.dead_threshold_ms / 1000)
        self._listener = Listener(
            HelloVerifier(self._secret, NonceMemory(NONCES)),
            config.server_id,
            self._own_nonces,
            None if self._tls is None else self._tls.listener,
            max(SILENCE_LEAST_SECONDS, SILENT_HEARTBEATS * self._heartbeat_seconds),
            self._apply,
            self._on_hello,
        )
        self.listening = False
        self.port = config.mesh_port
        self.peers = [Peer(peer.host, peer.port) for peer in config.peers]
        self.hints = MeshHints(self.peers, tenant)

    async def serve(
        self, local: Hints, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the mesh until cancelled; frames that arrive act on `local`.

        A port that is taken is a warning, and the broker goes on with its local waker only: then
        this returns, and nobody is dialled (spec 8.26).
        """
        self._local = local
        try:
            listeners = await trio.open_tcp_listeners(self.port, host=self._config.mesh_bind_addr)
        except OSError as error:
            log.warning(
                "TCP mesh bind failed",
                address=self._config.mesh_bind_addr,
                port=self.port,
                error=str(error),
            )
            task_status.started()
            return
        self.port = listeners[0].socket.getsockname()[1]
        self.listening = True
        log.info(
            "mesh",
            port=self.port,
            peers=len(self.peers),
            auth=self._config.auth,
            tls="mutual" if self._tls else "off",
        )
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.hints.serve)
                nursery.start_soon(self._liveness.serve)
                for peer in self.peers:
                    nursery.start_soon(self._dial, peer)
                await trio.serve_listeners(self._listener.serve_link, listeners)
        finally:
            self.listening = False

    def statistics(self) -> MeshStatistics:
        """A snapshot; liveness is for people only, nothing routes on it."""
        return MeshStatistics(
            server_id=self._config.server_id,
            port=self.port,
            listening=self.listening,
            peers=[peer.statistics() for peer in self.peers],
            servers_alive=self._liveness.alive(),
            servers_dead=self._liveness.dead(),
            messages_sent=sum(peer.sent for peer in self.peers),
            messages_received=self._listener.received,
            messages_dropped=sum(peer.dropped for peer in self.peers),
            handshake_failures=self._listener.handshake_failures,
            links_refused={str(why): n for why, n in self._listener.refusals.items()},
        )

    async def _dial(self, peer: Peer) -> None:
        with trio.CancelScope() as self._scopes[peer]:
            await Dialer(
                peer,
                self._config.server_id,
                self._secret,
                self._heartbeat_seconds,
                None if self._tls is None else self._tls.dialer,
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
            log.info("mesh peer is this broker itself", peer=peer.name)
            self._scopes[peer].cancel()
        elif origin is HelloOrigin.DUPLICATE_ID:
            report = log.debug if self._warned_of_twin else log.warning
            report("another broker has this QUEEN_SERVER_ID", server_id=hello.server_id)
            self._warned_of_twin = True
        else:
            self._liveness.hear(hello.server_id)

    def _apply(self, server_id: str, message: Message | UnknownFrame) -> None:
        if server_id != self._config.server_id:
            self._liveness.hear(server_id)
        if self._local is not None:
            frames.apply(message, self._local, self._tenant)
