"""Three brokers on one database: what one does the others know at once, or without a mesh later.

Each test runs twice. With the mesh the brokers probe for messages and read switches only once an
hour, so whoever learns something got a hint. Without it they look as usual, and the same things
happen.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.http.api import POLL_SECONDS, Api, Json, data, identity, open_api, unique
from tests.replicas import free_ports, running_replicas

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.cluster import Cluster
    from tests.replicas import Replicas

SECONDS = 60
# Well before the hot-list is seeded from the database again, which would find the message too.
PARKED_SECONDS = 15
HOUR_MS = "3600000"
NEVER_LOOK = {
    "POP_WAIT_INITIAL_INTERVAL_MS": HOUR_MS,
    "POP_WAIT_MAX_INTERVAL_MS": HOUR_MS,
    "QUEEN_CACHE_REFRESH_INTERVAL_MS": HOUR_MS,
}
WITHOUT = {"QUEEN_SYNC_ENABLED": "false", "QUEEN_CACHE_REFRESH_INTERVAL_MS": "500"}
WAKES = 40


@pytest.fixture(scope="module", params=["mesh", "without"])
def replicas(request: pytest.FixtureRequest, cluster: Cluster, template: str) -> Iterator[Replicas]:
    meshed = request.param == "mesh"
    name = f"replicas_{request.param}"
    cluster.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
    environment = NEVER_LOOK if meshed else WITHOUT
    with running_replicas(cluster.settings(name), free_ports(3), environment) as replicas:
        if meshed:
            replicas.wait_connected()
        yield replicas
    cluster.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def apis(replicas: Replicas) -> AsyncIterator[list[Api]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_api(broker)) for broker in replicas.brokers]


@pytest.fixture
def queue() -> str:
    return unique("mesh")


class Parked:
    """A pop that waits on a broker; its answer is there at the end of the block."""

    def __init__(self, api: Api, queue: str, **params: Any) -> None:
        self._api, self._queue, self._params = api, queue, params
        self.answer: Json | None = None
        self.answered_at = 0.0
        self._nursery_manager = trio.open_nursery()

    async def __aenter__(self) -> Parked:
        nursery = await self._nursery_manager.__aenter__()
        nursery.cancel_scope.deadline = trio.current_time() + SECONDS
        nursery.start_soon(self._pop)
        await self._api.wait_parked(1)
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._nursery_manager.__aexit__(*error)

    async def _pop(self) -> None:
        self.answer = await self._api.pop(
            self._queue, wait="true", timeout=PARKED_SECONDS * 1000, **self._params
        )
        self.answered_at = time.monotonic()


async def test_a_push_wakes_a_pop_elsewhere(
    apis: list[Api],
    queue: str,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    a, b, _ = apis
    meshed = "mesh" in request.node.callspec.id.split("-")
    took = []
    for n in range(WAKES if meshed else 3):
        async with Parked(b, queue, autoAck="true") as parked:
            sent_at = time.monotonic()
            await a.push(queue, n)
        assert data(parked.answer) == [n]
        took.append((parked.answered_at - sent_at) * 1000)
    report = (
        f"push on A to the answer of a pop on B, {'mesh' if meshed else 'probes'}: "
        f"p50 {statistics.median(took):.1f} ms, most {max(took):.1f} ms"
    )
    record_property("wake", report)
    print(report)


async def test_an_ack_on_a_third_broker(apis: list[Api], queue: str) -> None:
    """A leases, B waits for its turn, C acks what A gave out: B gets the next."""
    a, b, c = apis
    await a.push(queue, 1, 2, partition="p")
    leased = await a.pop(queue, batch=1)
    assert data(leased) == [1]
    assert leased is not None
    async with Parked(b, queue, batch=1) as parked:
        assert (await c.ack(leased["messages"][0]))["success"]
    assert data(parked.answer) == [2]


async def test_a_nack_on_a_third_broker(apis: list[Api], queue: str) -> None:
    a, b, c = apis
    await a.push(queue, 1)
    leased = await a.pop(queue)
    assert leased is not None
    async with Parked(b, queue) as parked:
        assert (await c.ack(leased["messages"][0], "retry"))["success"]
    assert data(parked.answer) == [1]
    assert parked.answer is not None
    assert parked.answer["messages"][0]["leaseId"] != leased["messages"][0]["leaseId"]


async def test_a_transaction_on_a_third_broker(apis: list[Api], queue: str) -> None:
    """Its ack and its push are one commit, and wake alike."""
    a, b, c = apis
    await a.push(queue, 1)
    leased = await a.pop(queue)
    assert leased is not None
    onwards = unique("onwards")
    async with Parked(b, onwards) as parked:
        operations = [
            {"type": "ack", **identity(leased["messages"][0]), "status": "completed"},
            {"type": "push", "items": [{"queue": onwards, "payload": 2}]},
        ]
        response = await c.http.post("/api/v1/transaction", json={"operations": operations})
        assert response.json()["success"], response.text
    assert data(parked.answer) == [2]


async def test_options_count_everywhere_at_once(apis: list[Api], queue: str) -> None:
    a, b, _ = apis
    await a.configure(queue, options={"delayedProcessing": 3600})
    await a.push(queue, 1)
    async with Parked(b, queue) as parked:
        await a.configure(queue, options={"delayedProcessing": 0})
    assert data(parked.answer) == [1]


async def test_a_deleted_queue_is_gone_everywhere(apis: list[Api], queue: str) -> None:
    """And one of the same name is another queue, for those too that have waited all the time."""
    a, b, c = apis
    await a.push(queue, "old", "old too")
    assert data(await b.pop(queue, batch=1)) == ["old"]
    async with Parked(b, queue) as parked:
        response = await c.http.delete(f"/api/v1/resources/queues/{queue}")
        assert response.status_code == 200, response.text
        for api in apis:
            assert (await api.http.get(f"/api/v1/resources/queues/{queue}")).status_code == 404
        await a.push(queue, "new")
    assert data(parked.answer) == ["new"]


async def test_a_seek_wakes_elsewhere(apis: list[Api], queue: str) -> None:
    a, b, _ = apis
    await a.push(queue, 1, 2)
    group = {"consumerGroup": "g", "subscriptionMode": "all"}
    assert data(await b.pop(queue, autoAck="true", batch=10, **group)) == [1, 2]
    async with Parked(b, queue, batch=10, **group) as parked:
        path = f"/api/v1/consumer-groups/g/queues/{queue}/seek"
        response = await a.http.post(path, json={"timestamp": "2020-01-01T00:00:00Z"})
        assert response.status_code == 200, response.text
    assert data(parked.answer) == [1, 2]


async def test_a_deleted_group_starts_anew_elsewhere(apis: list[Api], queue: str) -> None:
    a, b, _ = apis
    await a.push(queue, 1, 2)
    group = {"consumerGroup": "g", "subscriptionMode": "all"}
    assert data(await b.pop(queue, autoAck="true", batch=10, **group)) == [1, 2]
    async with Parked(b, queue, batch=10, **group) as parked:
        response = await a.http.delete(f"/api/v1/consumer-groups/g/queues/{queue}")
        assert response.status_code == 200, response.text
    assert data(parked.answer) == [1, 2]


async def test_maintenance_is_everywhere(apis: list[Api], queue: str) -> None:
    """Switched on by A it holds pops back on B; switched off by C it lets them go."""
    a, b, c = apis
    with trio.fail_after(SECONDS):
        await switch_pop_maintenance(a, apis, enabled=True)
        await a.push(queue, 1)
        assert await b.pop(queue) is None
        async with Parked(b, queue) as parked:
            await switch_pop_maintenance(c, apis, enabled=False)
    assert data(parked.answer) == [1]


async def switch_pop_maintenance(api: Api, apis: list[Api], *, enabled: bool) -> None:
    """Switch it on one broker, and block until all have it."""
    path = "/api/v1/system/maintenance/pop"
    response = await api.http.post(path, json={"enabled": enabled})
    assert response.status_code == 200, response.text
    for other in apis:
        while (await other.http.get(path)).json()["popMaintenanceMode"] is not enabled:
            await trio.sleep(POLL_SECONDS)


async def test_duplicates_are_exact_across_brokers(apis: list[Api], queue: str) -> None:
    """The database decides, under the lock of the partition's row; the mesh has no part in it."""
    results: dict[str, list[Json]] = {f"tx-{n}": [] for n in range(30)}

    async def push(api: Api, transaction: str) -> None:
        [result] = await api.push(queue, transaction, partition="p", transactionId=transaction)
        results[transaction].append(result)

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for transaction in results:
                for api in apis * 2:
                    nursery.start_soon(push, api, transaction)
    for told in results.values():
        statuses = sorted(result["status"] for result in told)
        assert statuses == ["duplicate"] * 5 + ["queued"]
        assert len({result["message_id"] for result in told}) == 1
    stored = data(await apis[0].pop(queue, batch=100, autoAck="true"))
    assert sorted(stored) == sorted(results)


async def test_one_leased_batch_whatever_the_broker(apis: list[Api], queue: str) -> None:
    await apis[0].push(queue, *range(20), partition="p")
    for turn in range(4):
        answers: list[Json] = []

        async def pop(api: Api, answers: list[Json] = answers) -> None:
            if answer := await api.pop(queue, batch=5, partition="p", leaseSeconds=300):
                answers.append(answer)

        with trio.fail_after(SECONDS):
            async with trio.open_nursery() as nursery:
                for api in apis * 3:
                    nursery.start_soon(pop, api)
        [answer] = answers
        assert data(answer) == list(range(turn * 5, turn * 5 + 5))
        acks = [{**identity(message), "status": "completed"} for message in answer["messages"]]
        assert all(r["success"] for r in await apis[turn % 3].ack_batch(*acks))


async def test_order_holds_across_brokers(apis: list[Api], queue: str) -> None:
    """Pushed wherever, consumed everywhere at once, acked elsewhere: one order, each once."""
    count = 60
    got: list[int] = []

    async def consume(number: int, stop: trio.CancelScope) -> None:
        pops, acks = apis[number], apis[(number + 1) % 3]
        while True:
            answer = await pops.pop(queue, wait="true", timeout=30_000, batch=4)
            if answer is None:
                continue
            got.extend(data(answer))
            done = [{**identity(m), "status": "completed"} for m in answer["messages"]]
            assert all(result["success"] for result in await acks.ack_batch(*done))
            if len(got) >= count:
                stop.cancel()

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(consume, number, nursery.cancel_scope)
            for n in range(count):
                await apis[n % 3].push(queue, n, partition="p")
    assert got == list(range(count))
