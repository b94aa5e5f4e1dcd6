"""The client commits pushes and acknowledgements together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.client.hosting import hosted

if TYPE_CHECKING:
    from types import ModuleType

    from tests.brokers import LiveBroker


async def pop(queen: Any, queue: str) -> list[Any]:
    """Pop what is there and return the payloads."""
    return [m["data"] for m in await queen.queue(queue).batch(9).partitions(9).wait(False).pop()]


@hosted
async def test_move_a_message_on(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push({"data": 1})
        (message,) = await queen.queue(name).batch(1).wait(False).pop()
        transaction = queen.transaction().ack(message)
        transaction.queue(f"{name}-next").push([{"data": 2}, {"data": 3}])
        transaction.queue(f"{name}-log").partition("p").push({"data": 4})
        assert (await transaction.commit())["success"] is True
        assert await pop(queen, name) == []
        assert await pop(queen, f"{name}-next") == [2, 3]
        assert await pop(queen, f"{name}-log") == [4]


@hosted
async def test_acknowledgements_under_two_leases(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    """The releases before 2.3 don't say which lease is whose."""
    async with client.Queen(shared_broker.url) as queen:
        messages = []
        for partition in "ab":
            builder = queen.queue(name).partition(partition)
            await builder.push({"data": partition})
            messages += await builder.group("g").subscription_mode("all").wait(False).pop()
        transaction = queen.transaction().ack(messages, "completed", {"consumer_group": "g"})
        assert (await transaction.commit())["success"] is True
        assert await queen.queue(name).group("g").partitions(9).wait(False).pop() == []


@hosted
async def test_a_refused_part_undoes_all(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": 1}, {"data": 2}])
        (message,) = await queen.queue(name).batch(1).wait(False).pop()
        await queen.ack(message, "retry")
        transaction = queen.transaction().ack(message)
        transaction.queue(f"{name}-next").push({"data": 2})
        with pytest.raises(Exception, match="lease"):
            await transaction.commit()
        assert await pop(queen, f"{name}-next") == []
        assert await pop(queen, name) == [1, 2]


@pytest.mark.parametrize("release", ["1.0.6", "1.3.0", "2.6.0"], indirect=True)
@hosted
async def test_a_condition_is_refused_not_ignored(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    """`once` commits only if nobody claimed its key: without key/value state nobody can tell."""
    async with client.Queen(shared_broker.url) as queen:
        for transaction in (
            queen.transaction().once("orders", "order-1", ttl_seconds=60),
            queen.transaction().timer(name).key("k").payload({"data": 1}).after_ms(10).schedule(),
        ):
            transaction.queue(name).push({"data": 1})
            with pytest.raises(httpx.HTTPStatusError, match="not supported"):
                await transaction.commit()
        assert await pop(queen, name) == []
