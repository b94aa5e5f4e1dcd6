"""What the mesh tells about itself: values for the stats routes, nothing acts on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping


@frozen
class PeerStatistics:
    """One configured peer, as its dialer sees it; `sent` and `dropped` count frames."""

    host: str
    port: int
    connected: bool
    resolved_ip: str | None
    sent: int
    dropped: int


@frozen
class MeshStatistics:
    """One broker's view of the mesh (spec 3, "Stats"); the counts are frames since the boot."""

    server_id: str
    port: int
    listening: bool
    """False before the port is bound, and for good where it was taken."""
    peers: list[PeerStatistics]
    servers_alive: list[str]
    servers_dead: list[str]
    messages_sent: int
    messages_received: int
    messages_dropped: int
    handshake_failures: int
    links_refused: Mapping[str, int]
    """How many accepted connections were closed, by reason."""
