"""The client pushes: one message, many, again, buffered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx
import pytest

from tests.client.hosting import hosted
from tests.client.releases import CURRENT

if TYPE_CHECKING:
    from types import ModuleType

    from tests.brokers import LiveBroker

# Longer than any scenario: what is sent then was sent by something else than the buffer's timer.
NEVER_MILLIS = 600_000


async def pop_all(queen: Any, queue: str, count: int) -> list[Any]:
    """Pop until `count` payloads came, waiting for them."""
    data: list[Any] = []
    while len(data) < count:
        messages = await queen.queue(queue).batch(100).partitions(10).pop()
        data += [message["data"] for message in messages]
        assert (await queen.ack(messages))["success"] is True
    assert await queen.queue(queue).batch(100).wait(False).pop() == []
    return data


@hosted
async def test_one_message(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        (result,) = await queen.queue(name).push({"data": {"order": 1}})
        assert result["status"] == "queued"
        (message,) = await queen.queue(name).batch(1).wait(False).pop()
    assert message["data"] == {"order": 1}
    assert message["transactionId"] == result["transaction_id"]
    assert message["id"] == result["message_id"]
    assert message["partition"] == "Default"


@hosted
async def test_any_json_comes_back_as_it_was(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    payloads: list[Any] = [
        None,
        False,
        0,
        1.5,
        "",
        'ünïcode \u2028 \\ " 🜚',
        [],
        {},
        {"a": [{"b": None}]},
    ]
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": payload} for payload in payloads])
        messages = await queen.queue(name).batch(100).wait(False).pop()
    assert [message["data"] for message in messages] == payloads


@hosted
async def test_many_messages_keep_their_order(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        results = await queen.queue(name).push([{"data": n} for n in range(500)])
        assert [result["index"] for result in results] == list(range(500))
        assert {result["status"] for result in results} == {"queued"}
        messages = await queen.queue(name).batch(500).wait(False).pop()
    assert [message["data"] for message in messages] == list(range(500))


@hosted
async def test_names_that_need_quoting(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    queue, partition = f"{name} mit Leerzeichen", "zür:ich é"
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(queue).partition(partition).push({"data": 1})
        builder = queen.queue(queue).partition(partition).group("grüße & co")
        (message,) = await builder.subscription_mode("all").wait(False).pop()
    assert message["partition"] == partition
    assert message["consumerGroup"] == "grüße & co"


@hosted
async def test_own_transaction_id_and_its_duplicate(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    stored: list[Any] = []
    refused: list[Any] = []

    async def on_success(items: list[Any]) -> None:
        stored.extend(items)

    async def on_duplicate(items: list[Any], error: Exception) -> None:
        refused.extend(items)

    async with client.Queen(shared_broker.url) as queen:
        (first,) = await queen.queue(name).push({"transactionId": "order-1", "data": 1})
        again = [{"transactionId": "order-1", "data": 1}, {"transactionId": "order-2", "data": 2}]
        push = queen.queue(name).push(again).on_success(on_success).on_duplicate(on_duplicate)
        results = await push
        assert [result["status"] for result in results] == ["duplicate", "queued"]
        assert results[0]["message_id"] == first["message_id"]
        assert [item["transactionId"] for item in stored] == ["order-2"]
        assert [item["transactionId"] for item in refused] == ["order-1"]
        messages = await queen.queue(name).batch(10).wait(False).pop()
    assert [message["transactionId"] for message in messages] == ["order-1", "order-2"]


@hosted
async def test_trace_id(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    trace_id = str(uuid4())
    items = [{"data": 1, "traceId": trace_id}, {"data": 2, "traceId": "none"}, {"data": 3}]
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push(items)
        messages = await queen.queue(name).batch(10).wait(False).pop()
    assert [message["traceId"] for message in messages] == [trace_id, None, None]


@hosted
async def test_a_full_buffer_sends_itself(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    buffer = {"message_count": 10, "time_millis": NEVER_MILLIS}
    async with client.Queen(shared_broker.url) as queen:
        for n in range(10):
            await queen.queue(name).buffer(buffer).push({"data": n})
        assert await pop_all(queen, name, 10) == list(range(10))


@hosted
async def test_a_buffer_sends_itself_after_its_time(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    buffer = {"message_count": 1000, "time_millis": 50}
    async with client.Queen(shared_broker.url) as queen:
        for n in range(3):
            await queen.queue(name).buffer(buffer).push({"data": n})
        assert await pop_all(queen, name, 3) == [0, 1, 2]


@hosted
async def test_buffers_are_flushed_on_demand(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    buffer = {"message_count": 1000, "time_millis": NEVER_MILLIS}
    async with client.Queen(shared_broker.url) as queen:
        for partition in "ab":
            items = [{"data": f"{partition}{n}"} for n in range(3)]
            result = await queen.queue(name).partition(partition).buffer(buffer).push(items)
            assert result["buffered"] is True
        await queen.queue(name).partition("a").flush_buffer()
        assert await pop_all(queen, name, 3) == ["a0", "a1", "a2"]
        await queen.flush_all_buffers()
        assert await pop_all(queen, name, 3) == ["b0", "b1", "b2"]


@hosted
async def test_close_flushes_the_buffers(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    buffer = {"message_count": 1000, "time_millis": NEVER_MILLIS}
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).buffer(buffer).push([{"data": n} for n in range(5)])
    async with client.Queen(shared_broker.url) as queen:
        assert await pop_all(queen, name, 5) == list(range(5))


@pytest.mark.parametrize("release", [CURRENT], indirect=True)
@pytest.mark.parametrize("push_compression", [False, True])
@hosted
async def test_the_binary_push_body_is_refused(
    client: ModuleType, shared_broker: LiveBroker, name: str, push_compression: bool
) -> None:
    options = {"binary_push": True, "push_compression": push_compression}
    async with client.Queen(shared_broker.url, **options) as queen:
        with pytest.raises(httpx.HTTPStatusError, match="the body is not valid"):
            await queen.queue(name).push({"data": 1})
        assert await queen.queue(name).wait(False).pop() == []
