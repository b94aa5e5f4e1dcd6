"""The client consumes: in the background, one by one or in batches, alone or with others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.client.consumption import POLL_SECONDS, Message, consuming, wait_parked
from tests.client.hosting import hosted
from tests.client.releases import AUTOPILOT_RELEASES

if TYPE_CHECKING:
    from types import ModuleType

    from tests.brokers import LiveBroker


async def wait_all_done(queen: Any, queue: str) -> None:
    """Wait until nothing is pending or leased: all was handled and acknowledged."""
    while True:
        counts = (await queen.admin.get_queue(queue))["messages"]
        if counts["pending"] == counts["processing"] == 0:
            return
        await asyncio.sleep(POLL_SECONDS)


@hosted
async def test_each_message_by_itself(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(10)])
        builder = queen.queue(name).batch(4).each().limit(10)
        async with consuming(builder) as seen:
            await seen.wait_end()
        assert all(isinstance(call, dict) for call in seen.calls)
        assert seen.data == list(range(10))
        await wait_all_done(queen, name)


@hosted
async def test_batches(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(10)])
        async with consuming(queen.queue(name).batch(4).limit(10)) as seen:
            await seen.wait_end()
        assert [len(call) for call in seen.calls] == [4, 4, 2]
        assert seen.data == list(range(10))
        await wait_all_done(queen, name)


@hosted
async def test_a_batch_of_one(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(3)])
        async with consuming(queen.queue(name).batch(1).limit(3)) as seen:
            await seen.wait_end()
        assert [call["data"] for call in seen.calls] == [0, 1, 2]
        await wait_all_done(queen, name)


@pytest.mark.parametrize("release", AUTOPILOT_RELEASES, indirect=True)
@hosted
async def test_autopilot_sizes_the_batches(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(5)])
        async with consuming(queen.queue(name).limit(5)) as seen:
            await seen.wait_end()
        assert [len(call) for call in seen.calls] == [5]
        await queen.queue(name).push([{"data": n} for n in range(2)])
        async with consuming(queen.queue(name).autopilot(False).limit(2)) as seen:
            await seen.wait_end()
        # Asked for one by one; the handler gets a list still, for the caller didn't say batch(1).
        assert [[message["data"] for message in call] for call in seen.calls] == [[0], [1]]
        await wait_all_done(queen, name)


@hosted
async def test_a_parked_consumer_gets_what_is_pushed_later(
    client: ModuleType, broker: LiveBroker, name: str
) -> None:
    async with client.Queen(broker.url) as queen:
        async with consuming(queen.queue(name).batch(1)) as seen:
            for n in range(3):
                await wait_parked(queen)
                await queen.queue(name).push({"data": n})
                await seen.wait_messages(n + 1)
            assert seen.data == [0, 1, 2]
            await wait_parked(queen)
        # The consumer was cancelled in its poll: the broker lets go of it.
        await wait_parked(queen, 0)


@hosted
async def test_an_idle_consumer_ends(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push({"data": 1})
        builder = queen.queue(name).batch(1).timeout_millis(50).idle_millis(150)
        async with consuming(builder) as seen:
            await seen.wait_end()
    assert seen.data == [1]


@hosted
async def test_a_signal_ends_a_consumer(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    stop = asyncio.Event()
    async with client.Queen(shared_broker.url) as queen:
        builder = queen.queue(name).batch(1).timeout_millis(50)
        async with consuming(builder, signal=stop) as seen:
            stop.set()
            await seen.wait_end()


@hosted
async def test_callbacks_acknowledge_by_hand(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    answers: list[dict[str, Any]] = []

    async def handler(message: dict[str, Any]) -> str:
        return f"done {message['data']}"

    async with client.Queen(shared_broker.url) as queen:

        async def on_success(message: dict[str, Any], result: str) -> None:
            answers.append({**await queen.ack(message), "result": result})

        await queen.queue(name).push({"data": 1})
        builder = queen.queue(name).batch(1).limit(1)
        await builder.consume(handler).on_success(on_success)
        await wait_all_done(queen, name)
    assert [(answer["success"], answer["result"]) for answer in answers] == [(True, "done 1")]


@hosted
async def test_discovering_consumer(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        for n in range(3):
            await queen.queue(f"{name}-{n}").namespace(name).task("t").create()
        async with consuming(queen.queue().namespace(name).task("t").batch(1)) as seen:
            for n in range(3):
                await queen.queue(f"{name}-{n}").push({"data": n})
            await seen.wait_messages(3)
    assert sorted(seen.data) == [0, 1, 2]


@hosted
async def test_several_consumers_share_the_partitions(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    """Two clients with two workers each: every message once, each partition in its order."""
    partitions = [f"p{n}" for n in range(8)]
    numbers = range(25)
    handled: dict[str, list[int]] = {partition: [] for partition in partitions}

    async def work(messages: list[Message]) -> None:
        for message in messages:
            handled[message["partition"]].append(message["data"])

    async with AsyncExitStack() as stack:
        queens = [await stack.enter_async_context(client.Queen(shared_broker.url)) for _ in "ab"]
        consumptions = [
            await stack.enter_async_context(
                consuming(queen.queue(name).concurrency(2).batch(10).partitions(2), work)
            )
            for queen in queens
        ]
        for n in numbers:
            for partition in partitions:
                await queens[0].queue(name).partition(partition).push({"data": n})
        await wait_all_done(queens[0], name)
    assert handled == {partition: list(numbers) for partition in partitions}
    assert all(seen.messages for seen in consumptions)  # both took part
