"""The systems under test as their clients see them: one module each, imported by clients only.

A module connects as a user of that system would, by its own driver. It must not start servers (that
is `bench.systems`) nor measure (that is `bench.client`), and imports nothing of another peer's.
Read next: peer.py (what each must offer), queen.py and queen_client.py (ours), pg_raw.py (floor).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bench.load import Load
    from bench.peers.peer import Peer

OURS: Final = "queen-trio"
# The same broker, loaded by the client that its users have.
OFFICIAL: Final = "queen-trio-client"
FLOOR: Final = "pg-raw"

# Names, so that a client imports only the driver that it needs.
_CLASSES: Final = {
    OURS: ("queen", "Queen"),
    OFFICIAL: ("queen_client", "QueenClient"),
    FLOOR: ("pg_raw", "PgRaw"),
    "pgmq": ("pgmq", "Pgmq"),
    "pgmq-notify": ("pgmq", "PgmqNotify"),
    "procrastinate": ("procrastinate", "Procrastinate"),
    "pgqueuer": ("pgqueuer", "PgQueuer"),
    "rabbitmq-quorum": ("rabbitmq", "Quorum"),
    "rabbitmq-classic": ("rabbitmq", "Classic"),
    "nats": ("nats", "Nats"),
    "redis-everysec": ("redis", "Redis"),
    "redis-always": ("redis", "Redis"),
}


def open_peer(load: Load) -> Peer:
    """The peer that the load is for; raises ImportError where its driver isn't installed."""
    module, name = _CLASSES[load.peer]
    peer: Peer = getattr(importlib.import_module(f"bench.peers.{module}"), name)(load)
    return peer
