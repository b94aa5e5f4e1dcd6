"""The client creates, looks at and deletes queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests.client.hosting import hosted

if TYPE_CHECKING:
    from types import ModuleType

    from tests.brokers import LiveBroker


@hosted
async def test_create_sends_the_clients_defaults(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        created = await queen.queue(name).create()
    assert created["configured"] is True
    assert created["options"]["leaseTime"] == 300
    assert created["options"]["retryLimit"] == 3


@hosted
async def test_create_with_options(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    options = {"lease_time": 7, "retry_limit": 5, "priority": 4, "dedup_window_seconds": 60}
    async with client.Queen(shared_broker.url) as queen:
        builder = queen.queue(name).namespace("shop").task("mail").config(options)
        created = await builder.create()
    assert (created["queue"], created["namespace"], created["task"]) == (name, "shop", "mail")
    assert created["options"]["leaseTime"] == 7
    assert created["options"]["retryLimit"] == 5
    assert created["options"]["priority"] == 4
    assert created["options"]["dedupWindowSeconds"] == 60


@hosted
async def test_a_refused_option_reaches_the_caller(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        with pytest.raises(Exception, match="leaseTime"):
            await queen.queue(name).config({"lease_time": -1}).create()


@hosted
async def test_delete_removes_the_messages(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push({"data": "old"})
        assert (await queen.queue(name).delete())["deleted"] is True
        assert await queen.queue(name).wait(False).pop() == []
        assert (await queen.queue(name).delete())["deleted"] is False


@hosted
async def test_admin_sees_a_queue(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).partition("a").push([{"data": 1}, {"data": 2}])
        await queen.queue(name).partition("b").push({"data": 3})
        listed = (await queen.admin.list_queues())["queues"]
        (summary,) = [queue for queue in listed if queue["name"] == name]
        assert summary["partitions"] == 2
        assert summary["messages"]["total"] == 3
        detail = await queen.admin.get_queue(name)
        assert {partition["name"] for partition in detail["partitions"]} == {"a", "b"}
        assert detail["options"]["leaseTime"] == 60  # created by a push


@hosted
async def test_admin_asks_for_a_queue_that_is_not_there(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        with pytest.raises(httpx.HTTPStatusError, match="Queue not found"):
            await queen.admin.get_queue(name)


@hosted
async def test_health(client: ModuleType, shared_broker: LiveBroker) -> None:
    async with client.Queen(shared_broker.url) as queen:
        health = await queen.admin.health()
    assert (health["status"], health["database"]) == ("healthy", "connected")
