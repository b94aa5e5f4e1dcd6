"""What crosses the mesh, read off the wire by a peer that is no broker; and when nothing does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psutil
import trio

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.http.api import open_api
from tests.servers import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster
    from tests.http.api import Api

SECONDS = 20
HEARTBEAT, HELLO = 3, 4
# Types and keys that the seeds and protocol/mesh.md know.
TYPES = {1, 2, HEARTBEAT, HELLO, 5, 10, 11, 40, 41}
KEYS = {"queue", "partition", "tenant", "group", "items", "enabled", "server_id", "nonce", "mac"}
SECRET = "this-stays-in-the-database"


class Listener:
    """A peer that only reads."""

    def __init__(self) -> None:
        self.received = bytearray()

    async def serve(self, stream: trio.SocketStream) -> None:
        async for data in stream:
            self.received += data

    def frames(self) -> list[tuple[int, bytes]]:
        """Type and payload of every whole frame so far."""
        found, rest = [], bytes(self.received)
        while len(rest) > 4 and len(rest) >= 4 + (size := int.from_bytes(rest[:4], "big")):
            found.append((rest[4], rest[5 : 4 + size]))
            rest = rest[4 + size :]
        return found

    async def wait_types(self, *types: int) -> None:
        while not set(types) <= {kind for kind, _ in self.frames()}:
            await trio.sleep(0.01)


def keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    if isinstance(value, list):
        return set[str]().union(*map(keys, value))
    return set()


async def test_no_message_nor_lease_nor_option_crosses_the_mesh(
    settings: ConnectionSettings,
) -> None:
    listener = Listener()
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            [bound] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, listener.serve, [bound])
            environment = postgres_environment(settings) | {
                "QUEEN_MESH_PEERS": f"127.0.0.1:{bound.socket.getsockname()[1]}",
                "QUEEN_MESH_PORT": str(free_port()),
                "QUEEN_SYNC_SECRET": "of the mesh",
                "QUEEN_SYNC_HEARTBEAT_MS": "50",
            }
            with running_broker(environment) as broker:
                await listener.wait_types(HELLO)
                async with open_api(broker) as api:
                    private = await work(api)
                await listener.wait_types(5, 10, 11, 40, 41, HEARTBEAT)
                await trio.to_thread.run_sync(broker.stop)
            nursery.cancel_scope.cancel()
    frames = listener.frames()
    assert [kind for kind, _ in frames].count(HELLO) == 1
    found = {kind for kind, _ in frames}
    assert found & {1, 2}
    assert found <= TYPES
    assert set[str]().union(*(keys(json.loads(p)) for _, p in frames if p)) <= KEYS
    for word in private:
        assert word.encode() not in listener.received, word


async def work(api: Api) -> list[str]:
    """Do what brokers hint about; returns what none of the hints may hold."""
    await api.configure("q", options={"leaseTime": 98765, "retentionSeconds": 87654})
    await api.push("q", SECRET, SECRET, transactionId=None)
    await api.push_items({"queue": "q", "payload": SECRET, "transactionId": "txn-of-mine"})
    answer = await api.pop("q", batch=1)
    assert answer is not None
    [message] = answer["messages"]
    assert (await api.ack(message))["success"]
    for path in ("maintenance", "maintenance/pop"):
        for enabled in (True, False):
            response = await api.http.post(f"/api/v1/system/{path}", json={"enabled": enabled})
            assert response.status_code == 200, response.text
    assert (await api.http.delete("/api/v1/resources/queues/q")).status_code == 200
    return [
        *(SECRET, "txn-of-mine", "98765", "87654"),
        *(message["leaseId"], message["transactionId"], message["partitionId"]),
    ]


def listening(broker: LiveBroker) -> list[int]:
    connections = psutil.Process(broker.process.pid).net_connections("inet")
    return [c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN]


def test_a_broker_without_peers_binds_nothing_but_http(settings: ConnectionSettings) -> None:
    with running_broker(postgres_environment(settings)) as broker:
        assert listening(broker) == [broker.port]


def test_a_broker_whose_sync_is_off_binds_nothing_but_http(settings: ConnectionSettings) -> None:
    environment = {"QUEEN_MESH_PEERS": "127.0.0.1:1", "QUEEN_SYNC_ENABLED": "false"}
    with running_broker(postgres_environment(settings) | environment) as broker:
        assert listening(broker) == [broker.port]


async def test_three_brokers_that_boot_together_apply_one_schema(
    cluster: Cluster, empty_database: str, tmp_path: Path
) -> None:
    """podManagementPolicy: Parallel; each waits for the others' lock."""
    environment = postgres_environment(cluster.settings(empty_database))
    brokers = [LiveBroker(environment | {"FILE_BUFFER_DIR": str(tmp_path / n)}) for n in "abc"]
    try:
        async with trio.open_nursery() as nursery:
            for broker in brokers:
                nursery.start_soon(trio.to_thread.run_sync, broker.start)
    finally:
        for broker in brokers:
            broker.kill()
    migrated = [e for b in brokers for e in b.events if e["event"] == "schema migrated"]
    assert [e["version"] for e in migrated] == sorted({e["version"] for e in migrated})
    assert all(b.wait_event("schema ready")["version"] == len(migrated) for b in brokers)
