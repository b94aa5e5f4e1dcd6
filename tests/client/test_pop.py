"""The client pops: sizes, long polls, several partitions, discovery, at most once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from tests.client.consumption import wait_parked
from tests.client.hosting import hosted
from tests.client.releases import AUTOPILOT_RELEASES, CURRENT

if TYPE_CHECKING:
    from types import ModuleType

    from tests.brokers import LiveBroker

with_autopilot = pytest.mark.parametrize("release", AUTOPILOT_RELEASES, indirect=True)
before_autopilot = pytest.mark.parametrize("release", ["0.15.0", "1.0.6"], indirect=True)
current_only = pytest.mark.parametrize("release", [CURRENT], indirect=True)


@hosted
async def test_an_empty_queue(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        assert await queen.queue(name).wait(False).pop() == []
        assert await queen.queue(name).timeout_millis(1).pop() == []


@hosted
async def test_a_push_ends_a_long_poll(client: ModuleType, broker: LiveBroker, name: str) -> None:
    async with client.Queen(broker.url) as queen:
        poll = asyncio.create_task(queen.queue(name).pop())
        await wait_parked(queen)
        assert not poll.done()
        await queen.queue(name).push({"data": "awaited"})
        (message,) = await poll
    assert message["data"] == "awaited"


@hosted
async def test_the_batch_bounds_one_pop(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(5)])
        for expected in ([0, 1], [2, 3], [4]):
            messages = await queen.queue(name).batch(2).wait(False).pop()
            assert [message["data"] for message in messages] == expected
            await queen.ack(messages)


@before_autopilot
@hosted
async def test_an_unset_batch_is_one(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(5)])
        (message,) = await queen.queue(name).wait(False).pop()
    assert message["data"] == 0


@with_autopilot
@hosted
async def test_autopilot_leaves_the_batch_to_the_broker(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(5)])
        result = await queen.queue(name).wait(False).pop_result()
    assert [message["data"] for message in result.messages] == list(range(5))
    # The broker accepts the parameter and has no opinion of its own to report (yet).
    assert result.autopilot is None


@with_autopilot
@hosted
async def test_autopilot_off(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(5)])
        (message,) = await queen.queue(name).autopilot(False).wait(False).pop()
    assert message["data"] == 0


@hosted
async def test_one_pop_of_several_partitions(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        for partition in "abcd":
            items = [{"data": f"{partition}{n}"} for n in range(2)]
            await queen.queue(name).partition(partition).push(items)
        messages = await queen.queue(name).batch(100).partitions(3).wait(False).pop()
        assert len({message["partitionId"] for message in messages}) == 3
        # One lease for the whole pop: the client renews and acknowledges it as one.
        assert len({message["leaseId"] for message in messages}) == 1
        for partition in {message["partition"] for message in messages}:
            data = [item["data"] for item in messages if item["partition"] == partition]
            assert data == [f"{partition}0", f"{partition}1"]
        rest = await queen.queue(name).batch(100).partitions(3).wait(False).pop()
        assert len({message["partition"] for message in messages + rest}) == 4
        answer = await queen.ack(messages + rest)
        assert answer["success"] is True
        assert all(result["success"] for result in answer["results"])
        assert await queen.queue(name).batch(100).partitions(9).wait(False).pop() == []


@hosted
async def test_without_partitions_one_is_claimed(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        for partition in "abc":
            await queen.queue(name).partition(partition).push([{"data": 1}, {"data": 2}])
        messages = await queen.queue(name).batch(100).wait(False).pop()
    assert len(messages) == 2
    assert len({message["partition"] for message in messages}) == 1


@hosted
async def test_pop_of_one_named_partition(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).partition("a").push({"data": "a"})
        await queen.queue(name).partition("b").push({"data": "b"})
        (message,) = await queen.queue(name).partition("b").batch(10).wait(False).pop()
    assert message["data"] == "b"


@hosted
async def test_discovery_by_namespace_and_task(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    namespace = f"space-{name}"
    async with client.Queen(shared_broker.url) as queen:
        for task in ("mail", "bill"):
            await queen.queue(f"{name}-{task}").namespace(namespace).task(task).create()
            await queen.queue(f"{name}-{task}").push({"data": task})
        (bill,) = await queen.queue().namespace(namespace).task("bill").batch(9).wait(False).pop()
        assert bill["data"] == "bill"
        assert (await queen.ack(bill))["success"] is True
        (mail,) = await queen.queue().namespace(namespace).batch(9).wait(False).pop()
        assert mail["data"] == "mail"


@hosted
async def test_a_push_ends_a_discovering_poll(
    client: ModuleType, broker: LiveBroker, name: str
) -> None:
    async with client.Queen(broker.url) as queen:
        await queen.queue(name).namespace("space").create()
        poll = asyncio.create_task(queen.queue().namespace("space").batch(9).pop())
        await wait_parked(queen)
        await queen.queue(name).push({"data": "found"})
        (message,) = await poll
    assert message["data"] == "found"


@current_only
@hosted
async def test_commit_on_delivery(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": 1}, {"data": 2}])
        first = await queen.queue(name).batch(1).commit_on_delivery().wait(False).pop()
        second = await queen.queue(name).batch(1).commit_on_delivery().wait(False).pop()
        assert [message["data"] for message in first + second] == [1, 2]
        assert await queen.queue(name).wait(False).pop() == []


@current_only
@hosted
async def test_conflation_is_refused_aloud(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        with pytest.raises(Exception, match="conflation is not supported"):
            await queen.queue(name).group("g").conflation().wait(False).pop()


@pytest.mark.parametrize("option", ["delayed_processing", "window_buffer"])
@current_only
@hosted
async def test_messages_held_back(
    client: ModuleType, shared_broker: LiveBroker, name: str, option: str
) -> None:
    """A poll that begins before a message is due ends when it is, not before."""
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).config({option: 1}).create()
        await queen.queue(name).push([{"data": n} for n in range(3)])
        messages = await queen.queue(name).batch(9).pop()
    assert [message["data"] for message in messages] == [0, 1, 2]
    age = datetime.now(UTC) - datetime.fromisoformat(messages[0]["createdAt"])
    assert age >= timedelta(seconds=1)


@current_only
@hosted
async def test_a_framed_pop_reads_our_json(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url, framed_pop=True) as queen:
        await queen.queue(name).push({"data": 1})
        (message,) = await queen.queue(name).batch(1).wait(False).pop()
    assert message["data"] == 1
