"""The client's consumer groups: where a group starts, and that groups don't disturb each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.client.consumption import consuming
from tests.client.hosting import hosted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from tests.cluster import Cluster


@pytest.fixture(scope="module")
def broker_from_all(cluster: Cluster, template: str) -> Iterator[LiveBroker]:
    """A broker whose groups start at the beginning unless they say otherwise."""
    database = "from_all"
    cluster.execute(f"CREATE DATABASE {database} TEMPLATE {template} STRATEGY FILE_COPY")
    environment = postgres_environment(cluster.settings(database))
    with running_broker(environment | {"DEFAULT_SUBSCRIPTION_MODE": "all"}) as broker:
        yield broker


async def pop(builder: Any) -> list[Any]:
    """Pop what is there and return the payloads."""
    return [message["data"] for message in await builder.batch(100).wait(False).pop()]


@hosted
async def test_each_group_gets_everything(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(5)])
        for group in ("mail", "bill"):
            builder = queen.queue(name).group(group).subscription_mode("all").batch(2).limit(5)
            async with consuming(builder) as seen:
                await seen.wait_end()
            assert seen.data == list(range(5))
            assert {message["consumerGroup"] for message in seen.messages} == {group}
        # Queue mode has a cursor of its own, which starts at the beginning.
        assert await pop(queen.queue(name)) == list(range(5))


@pytest.mark.parametrize("mode", ["all", "from_beginning"])
@hosted
async def test_mode_all(
    client: ModuleType, shared_broker: LiveBroker, name: str, mode: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push({"data": "old"})
        assert await pop(queen.queue(name).group("g").subscription_mode(mode)) == ["old"]


@pytest.mark.parametrize("mode", ["new", "new-only"])
@hosted
async def test_mode_new(
    client: ModuleType, broker_from_all: LiveBroker, name: str, mode: str
) -> None:
    async with client.Queen(broker_from_all.url) as queen:
        await queen.queue(name).push({"data": "old"})
        assert await pop(queen.queue(name).group("g").subscription_mode(mode)) == []
        await queen.queue(name).push({"data": "new"})
        assert await pop(queen.queue(name).group("g").subscription_mode(mode)) == ["new"]


@hosted
async def test_the_brokers_default_is_new(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push({"data": "old"})
        assert await pop(queen.queue(name).group("g")) == []
        # In a partition born later, too.
        await queen.queue(name).partition("p").push({"data": "new"})
        assert await pop(queen.queue(name).group("g").partitions(9)) == ["new"]


@hosted
async def test_a_broker_whose_default_is_all(
    client: ModuleType, broker_from_all: LiveBroker, name: str
) -> None:
    async with client.Queen(broker_from_all.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(3)])
        assert await pop(queen.queue(name).group("popping")) == [0, 1, 2]
        builder = queen.queue(name).group("consuming").batch(10).limit(3)
        async with consuming(builder) as seen:
            await seen.wait_end()
        assert seen.data == [0, 1, 2]


@hosted
async def test_subscription_from_now_and_from_a_moment(
    client: ModuleType, broker_from_all: LiveBroker, name: str
) -> None:
    async with client.Queen(broker_from_all.url) as queen:
        await queen.queue(name).push({"data": "first"})
        assert await pop(queen.queue(name).group("now").subscription_from("now")) == []
        await queen.queue(name).push({"data": "second"})
        (_, second) = await queen.queue(name).group("reader").batch(9).wait(False).pop()
        since = queen.queue(name).group("since").subscription_from(second["createdAt"])
        assert await pop(since) == ["second"]
        assert await pop(queen.queue(name).group("now").subscription_from("now")) == ["second"]


@hosted
async def test_a_nack_of_one_group_is_nothing_to_another(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push({"data": 1})
        builders = [
            queen.queue(name).group(group).subscription_mode("all").batch(1).wait(False)
            for group in ("good", "bad")
        ]
        (good,), (bad,) = [await builder.pop() for builder in builders]
        assert (await queen.ack(bad, False, {"group": "bad"}))["success"] is True
        assert (await queen.ack(good, True, {"group": "good"}))["success"] is True
        assert await builders[0].pop() == []
        (again,) = await builders[1].pop()
        assert again["deliveryAttempt"] == 2
