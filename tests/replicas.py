"""Several brokers on one database, with a mesh between them or without one."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import httpx
from attrs import frozen

from tests.brokers import LiveBroker, postgres_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from queen_trio.store.settings import ConnectionSettings
    from tests.http.api import Json

CONNECT_SECONDS = 20.0
POOL_SIZE = 6
STATS = "/internal/api/shared-state/stats"


@frozen
class Replicas:
    """Brokers `queen-0`, `queen-1`, … and the ports that their meshes listen on."""

    brokers: Sequence[LiveBroker]
    mesh_ports: Sequence[int]

    def wait_connected(self) -> None:
        """Block until each broker sends to all others and hears them."""
        until = time.monotonic() + CONNECT_SECONDS
        while not all(is_connected(broker, len(self.brokers) - 1) for broker in self.brokers):
            assert time.monotonic() < until, [httpx.get(b.url + STATS).json() for b in self.brokers]
            time.sleep(0.02)


def is_connected(broker: LiveBroker, others: int) -> bool:
    """Whether the broker is connected both ways with so many others."""
    return says_connected(httpx.get(broker.url + STATS).json(), others)


def says_connected(state: Json, others: int) -> bool:
    """The same, of what a broker answered to `STATS`."""
    up = sum(peer["connected"] for peer in state["peers"])
    return bool(up == others == len(state["servers_alive"]))


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def mesh_environment(number: int, port: int, peers: Sequence[int]) -> dict[str, str]:
    """The variables of one replica; `peers` are ports of 127.0.0.1."""
    return {
        "QUEEN_SERVER_ID": f"queen-{number}",
        "QUEEN_MESH_PORT": str(port),
        "QUEEN_MESH_PEERS": ",".join(f"127.0.0.1:{peer}" for peer in peers),
        "QUEEN_SYNC_SECRET": "of the mesh",
        "QUEEN_SYNC_HEARTBEAT_MS": "100",
        "DB_POOL_SIZE": str(POOL_SIZE),
    }


@contextmanager
def running_replicas(
    settings: ConnectionSettings,
    ports: Sequence[int],
    environment: Mapping[str, str],
    peers: Mapping[int, Sequence[int]] | None = None,
) -> Iterator[Replicas]:
    """Run a broker for each mesh port, started at once; all are peers unless told otherwise."""
    with ExitStack() as stack:
        brokers = []
        for number, port in enumerate(ports):
            others = [other for other in ports if other != port] if peers is None else peers[number]
            spool = stack.enter_context(TemporaryDirectory(prefix="queen-spool-"))
            broker = LiveBroker(
                {
                    **postgres_environment(settings),
                    **mesh_environment(number, port, others),
                    "FILE_BUFFER_DIR": spool,
                    **environment,
                }
            )
            broker.launch()
            stack.callback(broker.end)
            brokers.append(broker)
        with ThreadPoolExecutor(len(brokers)) as threads:
            list(threads.map(LiveBroker.wait_serving, brokers))
        yield Replicas(brokers, ports)
