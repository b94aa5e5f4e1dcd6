"""The client's admin calls for consumer groups, resources and analytics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.client.hosting import hosted
from tests.client.releases import CURRENT, RELEASES

if TYPE_CHECKING:
    from types import ModuleType

    from tests.brokers import LiveBroker

OLDER_RELEASES = [release for release in RELEASES if release != CURRENT]


@hosted
async def test_groups(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        group = f"g of {name}"
        builder = queen.queue(name).group(group).subscription_mode("all").batch(9).wait(False)
        await queen.queue(name).push([{"data": n} for n in range(3)])
        assert len(await builder.pop()) == 3
        [listed] = [g for g in await queen.admin.list_consumer_groups() if g["name"] == group]
        assert (listed["queueName"], listed["totalLag"]) == (name, 3)
        assert (await queen.admin.get_consumer_group(group))["members"] == 1
        assert listed["name"] in [g["name"] for g in await queen.admin.get_lagging_consumers(0)]
        # No options: the client sends no body.
        assert (await queen.admin.seek_consumer_group(group, name))["success"] is True
        assert len(await builder.pop()) == 3
        await queen.admin.seek_consumer_group(group, name, {"toEnd": True})
        assert await builder.pop() == []
        await queen.admin.delete_consumer_group_for_queue(group, name, delete_metadata=False)
        assert len(await builder.pop()) == 3
        moved = await queen.update_consumer_group_timestamp(group, "2020-01-01T00:00:00Z")
        assert moved["success"] is True
        assert (await queen.delete_consumer_group(group))["success"] is True
        assert group not in [g["name"] for g in await queen.admin.list_consumer_groups()]


@hosted
async def test_resources(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(3)])
        admin = queen.admin
        assert (await admin.get_overview())["queues"] >= 1
        assert isinstance((await admin.get_namespaces())["namespaces"], list)
        assert isinstance((await admin.get_tasks())["tasks"], list)
        [partition] = (await admin.get_partitions(queue=name))["partitions"]
        for detail in (await admin.get_queue(name), await admin.get_queue_detail(name)):
            assert detail["options"]["retryLimit"] == 3
            assert detail["totals"]["total"] == 3
            assert detail["partitions"][0]["id"] == partition["id"]
            assert detail["partitions"][0]["stats"]["total"] == 3
        assert name in [q["name"] for q in (await admin.get_queue_stats())["queues"]]
        assert (await admin.refresh_consumer_stats())["success"] is True
        assert (await admin.get_analytics(queue=name))["totals"]["pushed"] == 3
        assert "timeSeries" in await admin.get_system_metrics()
        assert "timeSeries" in await admin.get_worker_metrics()


# The current release has no such calls any more.
@pytest.mark.parametrize("release", OLDER_RELEASES, indirect=True)
@hosted
async def test_maintenance(client: ModuleType, broker: LiveBroker, name: str) -> None:
    async with client.Queen(broker.url) as queen:
        admin = queen.admin
        answer = await admin.set_maintenance_mode(True)
        assert (answer["maintenanceMode"], answer["bufferHealthy"]) == (True, True)
        assert answer["bufferedMessages"] == 0
        assert answer["message"]
        [pushed] = await queen.queue(name).push({"data": 1})
        assert pushed["status"] == "buffered"
        state = await admin.get_maintenance_mode()
        assert (state["maintenanceMode"], state["popMaintenanceMode"]) == (True, False)
        assert (state["bufferedMessages"], state["bufferHealthy"]) == (1, True)
        assert state["bufferStats"]["pendingMessages"] == 1
        await admin.set_pop_maintenance_mode(True)
        assert (await admin.get_pop_maintenance_mode())["popMaintenanceMode"] is True
        assert (await admin.set_maintenance_mode(False))["maintenanceMode"] is False
        assert await queen.queue(name).wait(False).pop() == []
        await admin.set_pop_maintenance_mode(False)
        [message] = await queen.queue(name).wait(True).pop()
        assert message["data"] == 1
