"""Maintenance: pushes are buffered, or pops get nothing, and everybody is told the truth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.brokers import postgres_environment, running_broker
from tests.http.api import Api, Json, data, open_api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from queen_trio.store.settings import ConnectionSettings
    from tests.brokers import LiveBroker
    from tests.cluster import Cluster

SECONDS = 30
PUSH = "/api/v1/system/maintenance"
POP = "/api/v1/system/maintenance/pop"


@pytest.fixture(scope="module")
def switched_broker(cluster: Cluster, template: str) -> Iterator[LiveBroker]:
    """A broker for these tests alone: maintenance is everybody's."""
    name = "maintenance"
    cluster.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    with running_broker(postgres_environment(cluster.settings(name))) as broker:
        yield broker


@pytest.fixture
async def api(switched_broker: LiveBroker) -> AsyncIterator[Api]:
    """A client of that broker, which is left with nothing switched on and nothing buffered."""
    with trio.fail_after(SECONDS):
        async with open_api(switched_broker) as api:
            yield api
            for path in (PUSH, POP):
                await switch(api, path, enabled=False)
            await wait_drained(api)


async def switch(api: Api, path: str, *, enabled: bool) -> Json:
    response = await api.http.post(path, json={"enabled": enabled})
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


async def show(api: Api, path: str = PUSH) -> Json:
    response = await api.http.get(path)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


async def wait_drained(api: Api) -> None:
    while (await show(api))["bufferedMessages"]:
        await trio.sleep(0.02)


async def test_push_maintenance(api: Api, queue: str) -> None:
    await api.push(queue, 0)
    answer = await switch(api, PUSH, enabled=True)
    assert answer == {
        "maintenanceMode": True,
        "bufferedMessages": 0,
        "bufferHealthy": True,
        "message": answer["message"],
    }
    [first, second] = await api.push(queue, 1, 2, partition="p")
    assert {first["status"], second["status"]} == {"buffered"}
    state = await show(api)
    stats = state.pop("bufferStats")
    assert state == {
        "maintenanceMode": True,
        "popMaintenanceMode": False,
        "bufferedMessages": 2,
        "bufferHealthy": True,
    }
    assert stats["paused"] is True
    assert (stats["pendingMessages"], stats["pendingRecords"]) == (2, 1)
    assert stats["pendingBytes"] > 0
    assert data(await api.pop(queue, partitions=0, batch=10)) == [0]
    await switch(api, PUSH, enabled=False)
    answer_ = await api.pop(queue, "p", wait="true", timeout=20_000)
    assert answer_ is not None
    assert [(m["data"], m["id"]) for m in answer_["messages"]] == [
        (1, first["message_id"]),
        (2, second["message_id"]),
    ]
    await wait_drained(api)
    before = stats
    stats = (await show(api, "/api/v1/status/buffers"))["bufferStats"]
    assert stats["replayedMessages"] - before["replayedMessages"] == 2
    assert (stats["pendingBytes"], stats["paused"], stats["error"]) == (0, False, None)


async def test_a_repeated_item_shares_the_fate_of_the_first(api: Api, queue: str) -> None:
    await switch(api, PUSH, enabled=True)
    results = await api.push(queue, "first", "again", transactionId="t")
    assert [r["status"] for r in results] == ["buffered", "buffered"]
    assert len({r["message_id"] for r in results}) == 1
    await switch(api, PUSH, enabled=False)
    await wait_drained(api)
    assert data(await api.pop(queue)) == ["first"]


@pytest.mark.parametrize("path", [PUSH, POP])
@pytest.mark.parametrize("body", [{}, {"enabled": "yes"}, {"enabled": None}, [], "true"])
async def test_without_a_boolean(api: Api, path: str, body: Any) -> None:
    response = await api.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]
    assert (await show(api, path))["popMaintenanceMode"] is False


async def test_without_a_body(api: Api) -> None:
    assert (await api.http.post(PUSH)).status_code == 400


async def test_what_cannot_be_buffered_is_a_503(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    await switch(api, PUSH, enabled=True)
    nowhere = "00000000-0000-0000-0000-000000000000"
    calls: list[tuple[str, Any]] = [
        (
            "/api/v1/transaction",
            {"operations": [{"type": "push", "queue": queue, "payload": 1}]},
        ),
        ("/streams/v1/cycle", {"query_id": nowhere, "partition_id": nowhere}),
        (f"/api/v1/dlq/{nowhere}/replay", {}),
        (f"/api/v1/messages/{nowhere}/t/retry", {}),
    ]
    for path, body in calls:
        response = await api.http.post(path, json=body)
        assert response.status_code == 503, path
        assert response.json()["code"] == "maintenance"
    # What adds nothing goes on.
    answer = await api.pop(queue)
    assert answer is not None
    assert (await api.ack(answer["messages"][0]))["success"] is True
    await switch(api, PUSH, enabled=False)
    assert (await api.http.post(*calls[0][:1], json=calls[0][1])).json()["success"] is True


async def test_pop_maintenance_without_waiting(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    answer = await switch(api, POP, enabled=True)
    assert answer == {"popMaintenanceMode": True, "message": answer["message"]}
    assert await show(api, POP) == {"popMaintenanceMode": True}
    assert (await show(api))["popMaintenanceMode"] is True
    assert await api.pop(queue) is None
    assert [r["status"] for r in await api.push(queue, 2)] == ["queued"]
    await switch(api, POP, enabled=False)
    assert data(await api.pop(queue, batch=10)) == [1, 2]


async def test_pop_maintenance_parks_those_who_wait(api: Api, queue: str) -> None:
    """Until it ends: an instant 204 would make clients spin (spec 8.14)."""
    await api.push(f"{queue} before", 1)
    answers: dict[str, list[int]] = {}

    async def park(name: str) -> None:
        answers[name] = data(await api.pop(f"{queue} {name}", wait="true", timeout=25_000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(park, "parked already")
        await api.wait_parked(1)
        await switch(api, POP, enabled=True)
        nursery.start_soon(park, "before")
        nursery.start_soon(park, "after")
        await api.wait_parked(3)
        await api.push(f"{queue} parked already", 2)
        await api.push(f"{queue} after", 3)
        # They have had their chance: a pop that doesn't wait comes and goes.
        assert await api.pop(f"{queue} before") is None
        assert answers == {}
        assert (await api.metrics())["wakeups"]["parked"] == 3
        await switch(api, POP, enabled=False)
    assert answers == {"parked already": [2], "before": [1], "after": [3]}


async def test_pop_maintenance_ends_with_the_time_out(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    await switch(api, POP, enabled=True)
    started = trio.current_time()
    assert await api.pop(queue, wait="true", timeout=300) is None
    assert trio.current_time() - started >= 0.3


async def test_a_stop_answers_those_whom_maintenance_parks(broker: LiveBroker) -> None:
    async def park(api: Api) -> None:
        assert await api.pop("q", wait="true", timeout=25_000) is None

    with trio.fail_after(SECONDS):
        async with open_api(broker) as api, trio.open_nursery() as nursery:
            await switch(api, POP, enabled=True)
            nursery.start_soon(park, api)
            await api.wait_parked(1)
            assert await trio.to_thread.run_sync(broker.stop) == 0


async def test_every_broker_follows(broker: LiveBroker, settings: ConnectionSettings) -> None:
    """Without a mesh: at its next reconciliation, and from its start."""
    environment = postgres_environment(settings) | {"QUEEN_CACHE_REFRESH_INTERVAL_MS": "1000"}
    with running_broker(environment) as other, trio.fail_after(SECONDS):
        async with open_api(broker) as here, open_api(other) as there:
            assert (await show(there))["maintenanceMode"] is False
            await switch(here, PUSH, enabled=True)
            await switch(here, POP, enabled=True)
            while not (await show(there))["maintenanceMode"]:
                await trio.sleep(0.02)
            assert (await show(there))["popMaintenanceMode"] is True
            assert [r["status"] for r in await there.push("q", 1)] == ["buffered"]
            state = (await there.http.get("/api/v1/system/shared-state")).json()
            assert (state["maintenance_mode"], state["pop_maintenance_mode"]) == (True, True)
        with running_broker(environment) as third:
            async with open_api(third) as api:
                assert (await show(api))["maintenanceMode"] is True
