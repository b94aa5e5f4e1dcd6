"""/api/v1/consumer-groups…: lag, subscriptions, seek, delete (spec 2, "Consumer groups")."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import pytest
import trio

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.http.api import Api, Json, data, open_api, quote, unique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from queen_trio.store.settings import ConnectionSettings

GROUPS = "/api/v1/consumer-groups"


@pytest.fixture
def group() -> str:
    return unique("g/ü")


@pytest.fixture
def broker_that_never_probes(settings: ConnectionSettings) -> Iterator[LiveBroker]:
    """A broker whose parked pops look again only when something wakes them."""
    hour = {"POP_WAIT_INITIAL_INTERVAL_MS": "3600000", "POP_WAIT_MAX_INTERVAL_MS": "3600000"}
    with running_broker(postgres_environment(settings) | hour) as broker:
        yield broker


def path(group: str, *rest: str) -> str:
    return "/".join((GROUPS, quote(group), *map(quote, rest)))


async def listed(api: Api, group: str, *, lagging: int | None = None) -> list[Json]:
    """The entries of one group in the list, by queue."""
    url = GROUPS if lagging is None else f"{GROUPS}/lagging?minLagSeconds={lagging}"
    response = await api.http.get(url)
    assert response.status_code == 200, response.text
    return [entry for entry in response.json() if entry["name"] == group]


async def seek(api: Api, group: str, queue: str, *partition: str, **body: Any) -> Json:
    where = ("queues", queue, *(("partitions", *partition) if partition else ()), "seek")
    response = await api.http.post(path(group, *where), json=body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


class TestLag:
    async def test_of_a_group_that_works(self, api: Api, queue: str, group: str) -> None:
        before = datetime.now(UTC)
        await api.push(queue, 1, 2, 3, partition="a")
        await api.push(queue, 4, partition="b")
        answer = await api.pop(queue, "a", consumerGroup=group, subscriptionMode="all", batch=2)
        assert answer is not None
        [entry] = await listed(api, group)
        assert entry["queueName"] == queue
        assert entry["topics"] == [queue]
        # b has no cursor yet; it counts from the subscription, which is everything.
        assert (entry["totalLag"], entry["partitionsWithLag"], entry["members"]) == (4, 2, 1)
        assert (entry["state"], entry["subscriptionMode"]) == ("Stable", "all")
        assert entry["subscriptionTimestamp"] is None
        assert 0 < entry["maxTimeLag"] < 60
        assert datetime.fromisoformat(entry["oldestPendingAt"]) > before - timedelta(seconds=5)
        await api.ack_batch(
            *(m | {"status": "ok"} for m in answer["messages"]), consumerGroup=group
        )
        [entry] = await listed(api, group)
        assert (entry["totalLag"], entry["members"], entry["totalConsumed"]) == (2, 0, 2)

    async def test_without_cursor_counts_from_the_subscription(
        self, api: Api, queue: str, group: str
    ) -> None:
        await api.push(queue, "old", "older")
        assert await api.pop(queue, consumerGroup=group, subscriptionMode="new") is None
        [entry] = await listed(api, group)
        assert (entry["totalLag"], entry["maxTimeLag"], entry["state"]) == (0, 0, "Stable")
        await api.push(queue, "new")
        [entry] = await listed(api, group)
        assert (entry["totalLag"], entry["partitionsWithLag"]) == (1, 1)
        assert data(await api.pop(queue, consumerGroup=group)) == ["new"]

    async def test_a_group_that_subscribed_first_misses_nothing(
        self, api: Api, queue: str, group: str
    ) -> None:
        assert await api.pop(queue, consumerGroup=group) is None
        [entry] = await listed(api, group)
        assert (entry["queueName"], entry["partitionCount"], entry["totalLag"]) == (queue, 0, 0)
        assert entry["subscriptionMode"] == "new"
        subscribed = datetime.fromisoformat(entry["subscriptionTimestamp"])
        await api.push(queue, 1, 2, partition="a")
        await api.push(queue, 3, partition="b")
        [entry] = await listed(api, group)
        assert (entry["totalLag"], entry["partitionsWithLag"]) == (3, 2)
        assert datetime.fromisoformat(entry["subscriptionTimestamp"]) == subscribed
        answer = await api.pop(queue, consumerGroup=group, partitions=0)
        assert sorted(data(answer)) == [1, 2, 3]

    async def test_a_subscription_outlives_the_broker(self, broker: LiveBroker) -> None:
        async with open_api(broker) as api:
            assert await api.pop("q", consumerGroup="g", subscriptionMode="new") is None
            [before] = await listed(api, "g")
        broker.kill()
        broker.restart()
        async with open_api(broker) as api:
            await api.push("q", 1)
            assert await listed(api, "g") == [
                before
                | {"partitionCount": 1, "totalLag": 1, "partitionsWithLag": 1}
                | dict.fromkeys(("maxTimeLag", "oldestPendingAt"), ANY)
            ]
            assert data(await api.pop("q", consumerGroup="g", subscriptionMode="new")) == [1]

    async def test_of_a_discovery_subscription(self, api: Api, group: str) -> None:
        namespace = unique("ns")
        queue = f"{namespace}.task"
        assert await api.discover(namespace=namespace, consumerGroup=group) is None
        [entry] = await listed(api, group)
        assert entry["queueName"] == ""
        await api.push(queue, 1)
        [entry] = await listed(api, group)
        assert (entry["queueName"], entry["totalLag"]) == (queue, 1)
        assert data(await api.discover(namespace=namespace, consumerGroup=group)) == [1]

    async def test_queue_mode_is_a_group_where_it_works(self, api: Api, queue: str) -> None:
        async def entries() -> list[Json]:
            return [
                entry
                for entry in await listed(api, "__QUEUE_MODE__")
                if entry["queueName"] == queue
            ]

        await api.push(queue, 1, 2)
        assert await entries() == []
        await api.pop(queue, batch=1, autoAck="true")
        [entry] = await entries()
        assert (entry["totalLag"], entry["subscriptionMode"]) == (1, "all")

    async def test_lagging(self, api: Api, queue: str, group: str) -> None:
        await api.push(queue, 1)
        await api.pop(queue, consumerGroup=group, subscriptionMode="all", batch=1)
        assert await listed(api, group, lagging=3600) == []
        assert len(await listed(api, group, lagging=0)) == 1
        assert (await api.http.get(f"{GROUPS}/lagging")).status_code == 200

    async def test_detail(self, api: Api, queue: str, group: str) -> None:
        await api.push(queue, 1, 2, 3, partition="a")
        await api.push(queue, 4, partition="b")
        answer = await api.pop(queue, "a", consumerGroup=group, subscriptionMode="all", batch=2)
        assert answer is not None
        detail = (await api.http.get(path(group))).json()
        assert (detail["name"], detail["topics"], detail["totalLag"]) == (group, [queue], 4)
        [entry] = detail["queues"]
        a, b = entry["partitions"]
        assert (a["partition"], a["offsetLag"], a["processing"], a["started"]) == ("a", 3, 2, True)
        assert (a["leaseActive"], a["leaseId"]) == (True, answer["leaseId"])
        assert (a["committedOffset"], a["lastOffset"], a["deliveries"]) == (-1, 2, 1)
        assert (b["partition"], b["offsetLag"], b["started"], b["leaseId"]) == ("b", 1, False, None)


class TestSubscription:
    async def test_moves_where_cursors_will_start(self, api: Api, queue: str, group: str) -> None:
        await api.push(queue, "old")
        assert await api.pop(queue, consumerGroup=group) is None
        response = await api.http.post(
            path(group, "subscription"), json={"subscriptionTimestamp": "2020-01-01T00:00:00Z"}
        )
        assert (response.status_code, response.json()["updated"]) == (200, 1)
        [entry] = await listed(api, group)
        assert entry["subscriptionTimestamp"] == "2020-01-01T00:00:00.000000Z"
        assert entry["totalLag"] == 1
        assert data(await api.pop(queue, consumerGroup=group)) == ["old"]

    async def test_takes_any_year(self, api: Api, queue: str, group: str) -> None:
        await api.pop(queue, consumerGroup=group)
        for point in ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"):
            response = await api.http.post(
                path(group, "subscription"), json={"subscriptionTimestamp": point}
            )
            assert response.status_code == 200, response.text
            [entry] = await listed(api, group)
            stored = entry["subscriptionTimestamp"]
            assert datetime.fromisoformat(stored) == datetime.fromisoformat(point)


class TestSeek:
    async def test_to_the_end_and_back(self, api: Api, queue: str, group: str) -> None:
        pop = partial(api.pop, queue, consumerGroup=group, subscriptionMode="all", partitions=0)
        await api.push(queue, 1, 2, partition="a")
        await api.push(queue, 3, partition="b")
        answer = await pop(batch=1)
        assert answer is not None
        sought = await seek(api, group, queue, toEnd=True)
        assert (sought["success"], sought["partitionsUpdated"]) == (True, 2)
        assert await pop() is None
        assert (await listed(api, group))[0]["totalLag"] == 0
        # The lease has ended with it.
        assert await api.ack(answer["messages"][0], "failed") == {
            "index": 0, "transactionId": answer["messages"][0]["transactionId"], "success": False,
            "error": f"already committed: {answer['messages'][0]['transactionId']}",
            "leaseReleased": False, "dlq": False, "noop": False,
        }  # fmt: skip
        # No options, as the client sends them: no body.
        response = await api.http.post(path(group, "queues", queue, "seek"))
        assert (response.status_code, response.json()["partitionsUpdated"]) == (200, 2)
        assert sorted(data(await pop())) == [1, 2, 3]

    async def test_to_a_moment(self, api: Api, queue: str, group: str) -> None:
        await api.push(queue, 1)
        await api.push(queue, 2)
        pop = partial(api.pop, queue, consumerGroup=group, subscriptionMode="all", autoAck="true")
        answer = await pop()
        assert answer is not None
        await seek(api, group, queue, timestamp=answer["messages"][1]["createdAt"])
        assert data(await pop()) == [2]
        await seek(api, group, queue, timestamp="2020-01-01")
        assert data(await pop()) == [1, 2]
        await seek(api, group, queue, timestamp="2100-01-01")
        assert await pop() is None

    async def test_of_one_partition(self, api: Api, group: str) -> None:
        queue, partition = unique("q/ü"), "p/1"
        await api.push(queue, 1, partition=partition)
        await api.push(queue, 2, partition="other")
        pop = partial(api.pop, queue, consumerGroup=group, subscriptionMode="all", partitions=0)
        await pop(autoAck="true")
        sought = await seek(api, group, queue, partition)
        assert (sought["partition"], sought["partitionsUpdated"]) == (partition, 1)
        assert data(await pop()) == [1]

    async def test_gives_retries_back(self, api: Api, queue: str, group: str) -> None:
        await api.configure(queue, options={"retryLimit": 2})
        await api.push(queue, 1)
        pop = partial(api.pop, queue, consumerGroup=group, subscriptionMode="all")
        for _ in range(2):
            answer = await pop()
            assert answer is not None
            assert (await api.ack(answer["messages"][0], "failed"))["dlq"] is False
            await seek(api, group, queue)
        answer = await pop()
        assert answer is not None
        assert answer["messages"][0]["deliveryAttempt"] == 1

    async def test_of_queue_mode(self, api: Api, queue: str) -> None:
        await api.push(queue, 1, 2)
        await seek(api, "__QUEUE_MODE__", queue, toEnd=True)
        assert await api.pop(queue) is None

    @pytest.mark.parametrize("how", ["seek", "partition", "delete", "subscription"])
    async def test_wakes_a_parked_pop(self, broker_that_never_probes: LiveBroker, how: str) -> None:
        async with open_api(broker_that_never_probes) as api:
            await api.push("q", 1, partition="p")
            await api.pop("q", consumerGroup="g", subscriptionMode="all", autoAck="true")
            if how == "subscription":
                await api.http.delete(path("g"))
                await api.pop("q", consumerGroup="g", subscriptionMode="new")
            got: list[Any] = []

            async def park() -> None:
                got.append(await api.pop("q", consumerGroup="g", wait="true", timeout=30_000))

            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(park)
                    await api.wait_parked(1)
                    if how == "seek":
                        await seek(api, "g", "q")
                    elif how == "partition":
                        await seek(api, "g", "q", "p")
                    elif how == "delete":
                        await api.http.delete(path("g"), params={"deleteMetadata": "false"})
                    else:
                        await api.http.post(
                            path("g", "subscription"), json={"subscriptionTimestamp": "2020-01-01"}
                        )
            assert data(got[0]) == [1]


class TestDelete:
    @pytest.fixture(params=[True, False], ids=["everywhere", "in one queue"])
    def url(self, request: pytest.FixtureRequest, group: str, queue: str) -> str:
        return path(group) if request.param else path(group, "queues", queue)

    async def test_forgets_all(self, api: Api, queue: str, group: str, url: str) -> None:
        await api.push(queue, 1, 2)
        await api.pop(queue, consumerGroup=group, subscriptionMode="all", batch=1, autoAck="true")
        answer = (await api.http.delete(url)).json()
        assert (answer["success"], answer["deleted"]) == (True, True)
        assert (answer["deletedPartitions"], answer["deletedSubscriptions"]) == (1, 1)
        assert await listed(api, group) == []
        assert (await api.http.get(path(group))).status_code == 404
        again = (await api.http.delete(url)).json()
        assert (again["success"], again["deleted"]) == (True, False)
        # A new life, with a subscription of its own.
        assert await api.pop(queue, consumerGroup=group, subscriptionMode="new") is None

    async def test_can_keep_the_subscription(
        self, api: Api, queue: str, group: str, url: str
    ) -> None:
        await api.push(queue, 1, 2)
        pop = partial(api.pop, queue, consumerGroup=group, autoAck="true")
        await pop(subscriptionMode="all")
        await api.http.delete(url, params={"deleteMetadata": "false"})
        [entry] = await listed(api, group)
        assert (entry["totalLag"], entry["subscriptionMode"]) == (2, "all")
        assert data(await pop(subscriptionMode="new")) == [1, 2]

    async def test_in_one_queue_leaves_the_others(self, api: Api, group: str) -> None:
        names = [unique(), unique()]
        for name in names:
            await api.push(name, 1)
            await api.pop(name, consumerGroup=group, subscriptionMode="all", autoAck="true")
        await api.http.delete(path(group, "queues", names[0]), params={"deleteMetadata": "True"})
        assert [entry["queueName"] for entry in await listed(api, group)] == [names[1]]


@pytest.mark.parametrize(
    ("method", "rest", "body", "status", "error"),
    [
        ("GET", "nobody", None, 404, "Consumer group not found"),
        ("POST", "nobody/subscription", {"subscriptionTimestamp": "2020-01-01"}, 404, "not found"),
        ("POST", "nobody/subscription", None, 400, "needs a JSON body"),
        ("POST", "nobody/subscription", {}, 400, "subscriptionTimestamp"),
        ("POST", "nobody/subscription", {"subscriptionTimestamp": 7}, 400, "subscriptionTimestamp"),
        ("POST", "nobody/subscription", {"subscriptionTimestamp": "x"}, 400, "not an ISO-8601"),
        ("POST", "nobody/queues/nothing/seek", {"toEnd": True}, 404, "not found"),
        ("POST", "__QUEUE_MODE__/queues/nothing/seek", {"toEnd": True}, 404, "not found"),
        ("POST", "nobody/queues/{queue}/seek", {"toEnd": True}, 404, "group not found"),
        ("POST", "known/queues/{queue}/partitions/none/seek", None, 404, "Partition"),
        ("POST", "known/queues/{queue}/seek", {"timestamp": "yesterday"}, 400, "timestamp="),
        ("POST", "known/queues/{queue}/seek", {"toEnd": 1}, 400, "toEnd"),
        ("POST", "known/queues/{queue}/seek", {"toEnd": True, "timestamp": "2020-01-01"}, 400,
         "not both"),
        ("POST", "known/queues/{queue}/seek", [], 400, "xpected `object`"),
        ("GET", "lagging?minLagSeconds=soon", None, 400, "minLagSeconds"),
        ("GET", "lagging?minLagSeconds=-1", None, 400, "minLagSeconds"),
        ("DELETE", "known?deleteMetadata=perhaps", None, 400, "deleteMetadata"),
        ("GET", "x" * 513, None, 400, "consumerGroup"),
        ("DELETE", "a%00b", None, 400, "consumerGroup"),
        ("PUT", "known", None, 405, "not allowed"),
    ],
)  # fmt: skip
async def test_bad_input(
    api: Api, queue: str, method: str, rest: str, body: Any, status: int, error: str
) -> None:
    await api.push(queue, 1)
    await api.pop(queue, consumerGroup="known")
    more = {} if body is None else {"json": body}
    response = await api.http.request(method, f"{GROUPS}/{rest.format(queue=queue)}", **more)
    assert response.status_code == status, response.text
    assert error in response.json()["error"]
