"""The mesh of replicas (spec 3)."""

# ruff: noqa: RUF009 - `setting` declares a field
from __future__ import annotations

import socket
from pathlib import Path  # noqa: TC003 - cattrs resolves the annotations

import attrs

from .parsers import PORTS, Boolean, FilePath, Integer, Peer, PeerList, Text, Word
from .variables import HOUR_MS, Values, optional, setting


def _hostname(_: Values) -> str:
    return socket.gethostname()


def _mesh_bind_addr(values: Values) -> str:
    return values.get("QUEEN_BIND_ADDR", "0.0.0.0")  # noqa: S104 - a broker serves its network


@attrs.frozen(kw_only=True)
class SyncConfig:
    """The mesh of replicas (spec 3)."""

    server_id: str = setting(
        "QUEEN_SERVER_ID",
        Text(),
        "Name of this broker, distinct on every replica.",
        default="the host name",
        derive=_hostname,
    )
    enabled: bool = setting(
        "QUEEN_SYNC_ENABLED",
        Boolean(),
        "Run the mesh, where there is at least one peer.",
        default="true",
    )
    peers: tuple[Peer, ...] = setting(
        "QUEEN_MESH_PEERS",
        PeerList(),
        "The replicas; naming this one too is harmless. A port left out is `QUEEN_MESH_PORT`.",
        default="",
        alias="QUEEN_UDP_PEERS",
    )
    mesh_port: int = setting(
        "QUEEN_MESH_PORT",
        PORTS,
        "TCP port of the mesh; open it to the other brokers only.",
        default="6633",
        alias="QUEEN_UDP_NOTIFY_PORT",
    )
    mesh_bind_addr: str = setting(
        "QUEEN_MESH_BIND_ADDR",
        Word(),
        "Address that the mesh listens on.",
        default="= `QUEEN_BIND_ADDR`",
        derive=_mesh_bind_addr,
    )
    secret: str | None = optional(
        "QUEEN_SYNC_SECRET",
        Text(),
        "HMAC secret of the mesh, the same on every replica; unset accepts anyone.",
        secret=True,
    )
    heartbeat_ms: int = setting(
        "QUEEN_SYNC_HEARTBEAT_MS",
        Integer(10, HOUR_MS),
        "Interval of the heartbeats sent to a peer.",
        default="1000",
        unit="ms",
    )
    dead_threshold_ms: int = setting(
        "QUEEN_SYNC_DEAD_THRESHOLD_MS",
        Integer(10, HOUR_MS),
        "Silence after which a peer is reported dead.",
        default="5000",
        unit="ms",
    )
    tls_cert: Path | None = optional(
        "QUEEN_MESH_TLS_CERT", FilePath(), "Certificate of this broker for mutual TLS, PEM."
    )
    tls_key: Path | None = optional(
        "QUEEN_MESH_TLS_KEY", FilePath(), "Private key of that certificate, PEM."
    )
    tls_ca: Path | None = optional(
        "QUEEN_MESH_TLS_CA", FilePath(), "Authority that signs the peers' certificates, PEM."
    )

    @property
    def auth(self) -> str:
        """`hmac`, or `off` in open mode, as the boot lines show it (spec 5)."""
        return "hmac" if self.secret else "off"

    @property
    def starts(self) -> bool:
        """Whether there is a mesh to run at all."""
        return self.enabled and bool(self.peers)

    @property
    def replicas(self) -> int:
        """How many brokers the peer list speaks of: this one and the others.

        A uniform list names this one too; it is known by its server id, as the host name or the
        first label of it. Where that tells nothing, the count is one too high.
        """
        return 1 + len([peer for peer in self.peers if not self.is_named_by(peer)])

    def is_named_by(self, peer: Peer) -> bool:
        """Tell whether an entry of the list is seen to be this broker itself."""
        return self.server_id in (peer.host, peer.host.split(".")[0])
