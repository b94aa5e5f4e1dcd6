"""Producers and long-polling consumers at once: everything once, in order, one lease at a time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
import trio
from attrs import define, field

from tests.http.raw import connect

if TYPE_CHECKING:
    from tests.brokers import LiveBroker

PARTITIONS = 6
CONSUMERS = 12
PRODUCERS = 6
EACH = 150
SECONDS = 60
WORK_SECONDS = 0.001


@define
class History:
    """What each (group, partition) was given, in order of its acks, and who holds a lease."""

    delivered: dict[tuple[str, str], list[Any]] = field(factory=dict)
    held: set[tuple[str, str]] = field(factory=set)
    count: int = 0

    def claim(self, group: str, messages: list[Any]) -> None:
        for partition in {message["partition"] for message in messages}:
            key = (group, partition)
            assert key not in self.held, "two live leases"
            self.held.add(key)

    def release(self, group: str, messages: list[Any]) -> None:
        """Before the ack is sent: from its commit on somebody else may hold the partition."""
        for message in messages:
            key = (group, message["partition"])
            self.delivered.setdefault(key, []).append(message["data"])
            self.held.discard(key)
            self.count += 1


async def consume(broker: LiveBroker, group: str, history: History, params: dict[str, Any]) -> None:
    connection = await connect(broker)
    query = urlencode(
        {"wait": "true", "timeout": 30_000, "consumerGroup": group, "subscriptionMode": "all"}
        | params
    )
    try:
        while True:
            await connection.send(f"GET /api/v1/pop/queue/q?{query}")
            answer = await connection.receive()
            assert answer.status == 200, answer
            messages = answer.json()["messages"]
            assert {message["deliveryAttempt"] for message in messages} == {1}
            if params.get("autoAck"):
                history.release(group, messages)
                continue
            history.claim(group, messages)
            await trio.sleep(WORK_SECONDS)
            history.release(group, messages)
            body = {
                "consumerGroup": group,
                "acknowledgments": [
                    {k: message[k] for k in ("transactionId", "partitionId", "leaseId")}
                    for message in messages
                ],
            }
            await connection.send("POST /api/v1/ack/batch", json.dumps(body).encode())
            results = (await connection.receive()).json()
            assert all(result["success"] for result in results)
            assert results[-1]["leaseReleased"]
    finally:
        with trio.CancelScope(shield=True):
            await connection.aclose()


async def produce(broker: LiveBroker, producer: int) -> None:
    connection = await connect(broker)
    for number in range(EACH):
        item = {
            "queue": "q",
            "partition": str((producer + number) % PARTITIONS),
            "payload": [producer, number],
        }
        await connection.send("POST /api/v1/push", json.dumps({"items": [item]}).encode())
        assert (await connection.receive()).json()[0]["status"] == "queued"
    await connection.aclose()


def check(history: History, group: str) -> None:
    everything = []
    for partition in range(PARTITIONS):
        delivered = history.delivered[group, str(partition)]
        everything += delivered
        for producer in range(PRODUCERS):
            mine = [number for who, number in delivered if who == producer]
            assert mine == sorted(mine)
    assert sorted(everything) == [[p, n] for p in range(PRODUCERS) for n in range(EACH)]


@pytest.mark.parametrize("params", [{"batch": 5}, {"batch": 50, "partitions": 3}], ids=str)
async def test_every_group_gets_everything_once_in_order(
    broker: LiveBroker, params: dict[str, Any]
) -> None:
    groups = ("__QUEUE_MODE__", "g")
    history = History()
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for group in groups:
                for _ in range(CONSUMERS // 2):
                    nursery.start_soon(consume, broker, group, history, params)
            for producer in range(PRODUCERS):
                nursery.start_soon(produce, broker, producer)
            while history.count < len(groups) * PRODUCERS * EACH:
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
    for group in groups:
        check(history, group)


async def test_auto_ack_gives_everything_once(broker: LiveBroker) -> None:
    history = History()
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for _ in range(CONSUMERS):
                nursery.start_soon(consume, broker, "g", history, {"autoAck": "true", "batch": 3})
            for producer in range(PRODUCERS):
                nursery.start_soon(produce, broker, producer)
            while history.count < PRODUCERS * EACH:
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
    everything = [data for key in history.delivered for data in history.delivered[key]]
    assert sorted(everything) == [[p, n] for p in range(PRODUCERS) for n in range(EACH)]
