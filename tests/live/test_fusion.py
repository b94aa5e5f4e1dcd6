"""Requests share commits, without giving up order (spec 1, "Fusion")."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import trio

from tests.http.api import data, identity, open_api
from tests.http.raw import RawConnection, connect

if TYPE_CHECKING:
    from tests.brokers import LiveBroker
    from tests.cluster import Cluster

PUSHES = 200
SECONDS = 30


def count_segments(cluster: Cluster, database: str) -> int:
    [(count,)] = cluster.execute("SELECT count(*) FROM queen.log_segments", database)
    return int(count)


def push_body(number: int, partition: str = "p") -> bytes:
    item = {"queue": "q", "payload": number, "partition": partition}
    return json.dumps({"items": [item]}).encode()


async def open_connections(broker: LiveBroker, count: int) -> list[RawConnection]:
    return [await connect(broker) for _ in range(count)]


async def test_concurrent_pushes_to_a_partition_share_segments(
    broker: LiveBroker, cluster: Cluster, database: str
) -> None:
    connections = await open_connections(broker, PUSHES)

    async def push(connection: RawConnection, number: int) -> None:
        await connection.send("POST /api/v1/push", push_body(number))
        [result] = (await connection.receive()).json()
        assert result["status"] == "queued"

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for number, connection in enumerate(connections):
                nursery.start_soon(push, connection, number)
        for connection in connections:
            await connection.aclose()
        segments = count_segments(cluster, database)
        print(f"{PUSHES} concurrent pushes made {segments} segments")
        assert segments < PUSHES / 4
        async with open_api(broker) as api:
            assert sorted(data(await api.pop("q"))) == list(range(PUSHES))


async def test_order_within_a_connection_is_order_of_offsets(
    broker: LiveBroker, cluster: Cluster, database: str
) -> None:
    """Pipelined requests, and eight connections at once that all push into one partition."""
    each = 50

    async def pipeline(connection: RawConnection, first: int) -> None:
        for number in range(first, first + each):
            await connection.send("POST /api/v1/push", push_body(number))
        for _ in range(each):
            assert (await connection.receive()).status == 201

    connections = await open_connections(broker, 8)
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for n, connection in enumerate(connections):
                nursery.start_soon(pipeline, connection, n * each)
        for connection in connections:
            await connection.aclose()
        async with open_api(broker) as api:
            stored = data(await api.pop("q", batch=1_000))
    assert sorted(stored) == list(range(8 * each))
    for n in range(8):
        mine = [number for number in stored if number // each == n]
        assert mine == sorted(mine)
    assert count_segments(cluster, database) < 8 * each


async def test_a_dense_log(broker: LiveBroker, cluster: Cluster, database: str) -> None:
    """Concurrent segments of many partitions: offsets have neither gaps nor overlaps."""
    connections = await open_connections(broker, 40)

    async def push(connection: RawConnection, n: int) -> None:
        for number in range(10):
            await connection.send("POST /api/v1/push", push_body(number, str(n % 3)))
            assert (await connection.receive()).status == 201
        await connection.aclose()

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for n, connection in enumerate(connections):
                nursery.start_soon(push, connection, n)
    holes = cluster.execute(
        "SELECT * FROM (SELECT base_offset, coalesce(lag(end_offset) OVER "
        "(PARTITION BY partition_id ORDER BY base_offset), -1) AS before "
        "FROM queen.log_segments) s WHERE base_offset <> before + 1",
        database,
    )
    assert holes == []


async def test_concurrent_acks_are_each_answered_for_themselves(broker: LiveBroker) -> None:
    """Many requests in one transaction: good ones, and ones that are refused."""
    with trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            await api.push_items(
                *({"queue": "q", "payload": n, "partition": str(n)} for n in range(60))
            )
            answer = await api.pop("q", partitions=0)
            assert answer is not None
            results = {}

            async def ack(n: int) -> None:
                message = answer["messages"][n]
                if n % 3 == 1:
                    message = message | {"leaseId": "another"}
                results[n] = await api.ack(message, "dlq" if n % 3 == 2 else "completed")

            async with trio.open_nursery() as nursery:
                for n in range(60):
                    nursery.start_soon(ack, n)
            for n, result in results.items():
                assert result["transactionId"] == answer["messages"][n]["transactionId"]
                assert result["success"] is (n % 3 != 1)
                assert result["dlq"] is (n % 3 == 2)
            rest = await api.ack_batch(
                *(identity(m) for n, m in enumerate(answer["messages"]) if n % 3 == 1)
            )
            assert all(r["success"] for r in rest)
            assert await api.pop("q", partitions=0) is None
