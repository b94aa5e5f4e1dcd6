"""/api/v1/resources/…, depth, clear, /api/v1/status/… and /api/v1/analytics/…."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.brokers import postgres_environment, running_broker
from tests.http.api import Api, Json, data, open_api, quote, unique

if TYPE_CHECKING:
    from queen_trio.store.settings import ConnectionSettings
    from tests.brokers import LiveBroker
    from tests.cluster import Cluster


async def get(api: Api, path: str, **params: Any) -> Json:
    response = await api.http.get(path, params=params)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


async def depth(api: Api, queue: str, **params: Any) -> Json:
    return await get(api, f"/api/v1/resources/queues/{quote(queue)}/depth", **params)


class TestOverview:
    async def test_counts_all(self, api: Api) -> None:
        async def counts() -> Json:
            return await get(api, "/api/v1/resources/overview")

        before = await counts()
        namespace, task = unique("ns"), unique("task")
        queue = f"{namespace}.{task}"
        await api.push(queue, 1, 2, partition="a")
        await api.push(queue, 3, partition="b")
        await api.pop(queue, consumerGroup=unique("g"), subscriptionMode="all")
        after = await counts()
        for field, more in (
            ("queues", 1), ("partitions", 2), ("namespaces", 1), ("tasks", 1), ("consumerGroups", 1)
        ):  # fmt: skip
            assert after[field] == before[field] + more, field
        assert after["messages"]["total"] == before["messages"]["total"] + 3
        assert after["messages"]["deadLetter"] >= 0

    async def test_namespaces_and_tasks(self, api: Api) -> None:
        namespace, task = unique("ns"), unique("task")
        await api.push(f"{namespace}.{task}", 1, 2)
        await api.push(f"{namespace}.other", 3)
        found = (await get(api, "/api/v1/resources/namespaces"))["namespaces"]
        [entry] = [entry for entry in found if entry["namespace"] == namespace]
        assert (entry["queues"], entry["partitions"], entry["messages"]["total"]) == (2, 2, 3)
        found = (await get(api, "/api/v1/resources/tasks"))["tasks"]
        [entry] = [entry for entry in found if entry["task"] == task]
        assert (entry["queues"], entry["messages"]["pending"]) == (1, 2)

    async def test_partitions(self, api: Api, queue: str) -> None:
        await api.push(queue, 1, 2, partition="a")
        await api.push(queue, 3, partition="b")
        await api.pop(queue, "a", batch=1)
        path = "/api/v1/resources/partitions"
        a, b = (await get(api, path, queue=queue))["partitions"]
        assert (a["queue"], a["name"], b["name"]) == (queue, "a", "b")
        assert a["stats"] == {
            "total": 2, "pending": 2, "processing": 1, "lastOffset": 1, "logStart": 0,
        }  # fmt: skip
        assert (await get(api, path, queue=queue, limit=1, offset=1))["partitions"] == [b]
        assert (await get(api, path, queue=queue, limit=0))["partitions"] == []
        assert a in (await get(api, path, limit=100_000))["partitions"]


class TestDepth:
    async def test_of_queue_mode_and_of_groups(self, api: Api, queue: str) -> None:
        await api.push(queue, 1, 2, 3, partition="a")
        await api.push(queue, 4, partition="b")
        # Nobody has read it: everything is owed.
        assert await depth(api, queue) == {
            "queue": queue, "group": None, "pending": 4, "processing": 0, "ready": 4,
            "partitionsPending": 2, "conflation": False, "effectivePending": 4,
            "partitions": [
                {"partition": "a", "pending": 3, "processing": 0},
                {"partition": "b", "pending": 1, "processing": 0},
            ],
        }  # fmt: skip
        answer = await api.pop(queue, "a", consumerGroup="g", subscriptionMode="all", batch=2)
        assert answer is not None
        shown = await depth(api, queue, consumerGroup="g")
        assert shown["group"] == "g"
        assert (shown["pending"], shown["processing"], shown["ready"]) == (4, 2, 2)
        assert (await depth(api, queue, group="g")) == shown
        await api.pop(queue, "b", consumerGroup="g", autoAck="true")
        await api.ack(answer["messages"][0])
        shown = await depth(api, queue, consumerGroup="g")
        assert (shown["pending"], shown["processing"], shown["partitionsPending"]) == (2, 1, 1)
        # Another group is further behind in a, none is behind in b.
        await api.pop(queue, "a", consumerGroup="late", subscriptionMode="all", batch=1)
        shown = await depth(api, queue)
        assert (shown["pending"], shown["processing"], shown["partitionsPending"]) == (3, 1, 1)

    async def test_of_a_group_without_cursors(self, api: Api, queue: str) -> None:
        await api.push(queue, "old")
        assert await api.pop(queue, consumerGroup="new") is None
        await api.push(queue, 1, 2)
        assert (await depth(api, queue, consumerGroup="new"))["pending"] == 2
        # Of a group that nobody knows it can't be said where it would start.
        assert (await depth(api, queue, consumerGroup="unknown"))["pending"] == 3

    async def test_of_an_empty_queue(self, api: Api, queue: str) -> None:
        await api.configure(queue)
        shown = await depth(api, queue)
        assert (shown["pending"], shown["partitions"]) == (0, [])


class TestClear:
    async def test_removes_messages_and_ends_leases(self, api: Api, queue: str) -> None:
        await api.push(queue, 1, 2, partition="a", transactionId="t")
        await api.push(queue, 3, partition="b")
        answer = await api.pop(queue, "a")
        assert answer is not None
        assert await api.pop(queue, consumerGroup="g", subscriptionMode="new") is None
        response = await api.http.delete(f"/api/v1/queues/{quote(queue)}/clear")
        assert (response.status_code, response.json()["count"]) == (200, 2)
        shown = await depth(api, queue)
        assert (shown["pending"], shown["processing"]) == (0, 0)
        assert await api.pop(queue, partitions=0) is None
        # An ack that comes late changes nothing, and the window still knows the transaction.
        assert (await api.ack(answer["messages"][0]))["noop"] is True
        [again] = await api.push(queue, 1, partition="a", transactionId="t")
        assert again["status"] == "duplicate"
        # What comes later is delivered, to groups without a cursor, too.
        await api.push(queue, 4, partition="a")
        assert data(await api.pop(queue)) == [4]
        assert data(await api.pop(queue, consumerGroup="g")) == [4]

    async def test_of_one_partition(self, api: Api, queue: str) -> None:
        await api.push(queue, 1, partition="a")
        await api.push(queue, 2, partition="b")
        url = f"/api/v1/queues/{quote(queue)}/clear"
        assert (await api.http.delete(url, params={"partition": "a"})).json()["count"] == 1
        assert data(await api.pop(queue, partitions=0)) == [2]
        assert (await api.http.delete(url, params={"partition": "none"})).json()["count"] == 0


class TestStatus:
    async def test_queues(self, api: Api, queue: str) -> None:
        await api.push(queue, 1, 2, 3)
        answer = await api.pop(queue, batch=2)
        assert answer is not None
        await api.ack(answer["messages"][0])
        await api.ack(answer["messages"][1], "dlq", error="broken")
        shown = await get(api, "/api/v1/status/queues")
        [entry] = [entry for entry in shown["queues"] if entry["name"] == queue]
        assert entry["messages"] == {
            "total": 3, "pending": 1, "processing": 0, "completed": 2, "deadLetter": 1,
        }  # fmt: skip
        page = await get(api, "/api/v1/status/queues", limit=1, offset=shown["total"] - 1)
        assert page["queues"] == shown["queues"][-1:]

    async def test_one_queue(self, api: Api) -> None:
        queue = unique("a/b ü")
        await api.configure(queue, options={"leaseTime": 7})
        await api.push(queue, 1, 2, partition="p")
        await api.pop(queue, consumerGroup="g", subscriptionMode="all", batch=1)
        shown = await get(api, f"/api/v1/status/queues/{quote(queue)}")
        assert (shown["name"], shown["options"]["leaseTime"]) == (queue, 7)
        assert shown["totals"]["processing"] == 1
        [partition] = shown["partitions"]
        assert (partition["name"], partition["stats"]["total"]) == ("p", 2)
        [group] = shown["consumerGroups"]
        assert (group["name"], group["totalLag"], group["members"]) == ("g", 2, 1)


class TestAnalytics:
    async def test_refresh_writes_counts_and_lag_down(self, api: Api, queue: str) -> None:
        await api.push(queue, 1, 2, 3)
        answer = await api.pop(queue, consumerGroup="g", subscriptionMode="all", batch=2)
        assert answer is not None
        response = await api.http.post("/api/v1/stats/refresh")
        assert response.status_code == 200, response.text
        assert response.json()["refreshed"] >= 1
        await api.push(queue, 4)
        await api.http.post("/api/v1/stats/refresh")
        shown = await get(api, "/api/v1/status/analytics", queue=queue)
        assert shown["totals"] == {"pushed": 4, "popped": 2}
        assert sum(point["pushed"] for point in shown["timeSeries"]) == 4
        newest = shown["lag"][-1]
        assert (newest["consumerGroup"], newest["lag"]) == ("g", 4)
        old = await get(api, "/api/v1/status/analytics", queue=queue, to="2020-01-01")
        assert (old["timeSeries"], old["lag"]) == ([], [])
        assert old["from"] == "2019-12-31T23:00:00.000000Z"
        day = await get(api, "/api/v1/status/analytics", queue=queue, interval="day")
        assert [point["pushed"] for point in day["timeSeries"]] == [4]

    async def test_by_namespace_and_task(self, api: Api) -> None:
        namespace = unique("ns")
        await api.push(f"{namespace}.one", 1)
        await api.push(f"{namespace}.two", 2, 3)
        await api.http.post("/api/v1/stats/refresh")
        path = "/api/v1/status/analytics"
        assert (await get(api, path, namespace=namespace))["totals"]["pushed"] == 3
        assert (await get(api, path, namespace=namespace, task="two"))["totals"]["pushed"] == 2

    async def test_workers(self, settings: ConnectionSettings) -> None:
        environment = postgres_environment(settings) | {"QUEEN_SERVER_ID": "me"}
        with running_broker(environment) as broker:
            async with open_api(broker) as api:
                await api.push("q", 1, 2, 3)
                await api.push("q", 1, transactionId="t")
                await api.push("q", 1, transactionId="t")
                answer = await api.pop("q", batch=3)
                assert answer is not None
                await api.ack(answer["messages"][0])
                await api.ack(answer["messages"][1], "dlq")
                answer = await api.pop("q", batch=1)
                assert answer is not None
                await api.ack(answer["messages"][0], "failed")
                # By its name, as the hot-list answers for a whole queue without a pop.
                assert await api.pop("none", "p") is None
                await api.http.post("/api/v1/stats/refresh")
                shown = await get(api, "/api/v1/analytics/worker-metrics", serverId="me")
                assert shown["workers"] == ["me"]
                total = {
                    name: sum(point[name] for point in shown["timeSeries"])
                    for name in ("pushed", "popped", "completed", "failed", "deadLettered")
                }
                assert total == {
                    "pushed": 4, "popped": 4, "completed": 1, "failed": 1, "deadLettered": 1,
                }  # fmt: skip
                assert sum(point["emptyPops"] for point in shown["timeSeries"]) == 1
                system = await get(api, "/api/v1/analytics/system-metrics")
                newest = system["timeSeries"][-1]
                assert newest["memoryBytes"] > 1_000_000
                assert newest["poolOpen"] >= 1
                assert sum(point["cpuSeconds"] for point in system["timeSeries"]) > 0
                nobody = await get(api, "/api/v1/analytics/worker-metrics", serverId="you")
                assert nobody["timeSeries"] == []

    async def test_postgres(self, api: Api) -> None:
        shown = await get(api, "/api/v1/analytics/postgres-stats")
        assert shown["databaseBytes"] > 0
        assert "log_segments" in {table["name"] for table in shown["tables"]}

    async def test_counts_that_could_not_be_written_are_kept(
        self, broker: LiveBroker, cluster: Cluster, database: str
    ) -> None:
        async with open_api(broker) as api:
            await api.push("q", 1)
            cluster.execute("ALTER TABLE queen.stats RENAME TO away", database)
            assert (await api.http.post("/api/v1/stats/refresh")).status_code == 500
            cluster.execute("ALTER TABLE queen.away RENAME TO stats", database)
            await api.push("q", 2)
            assert (await api.http.post("/api/v1/stats/refresh")).status_code == 200
            assert (await get(api, "/api/v1/status/analytics"))["totals"]["pushed"] == 2


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "resources/queues/nothing/depth", 404, "Queue not found"),
        ("GET", "status/queues/nothing", 404, "Queue not found"),
        ("DELETE", "queues/nothing/clear", 404, "Queue not found"),
        ("GET", "queues/nothing/clear", 405, "not allowed"),
        ("GET", "resources/partitions?limit=many", 400, "limit"),
        ("GET", "resources/partitions?offset=-1", 400, "offset"),
        ("GET", "resources/partitions?queue=%00", 400, "queue"),
        ("GET", "status/queues?limit=-1", 400, "limit"),
        ("GET", "status/analytics?from=x", 400, "from="),
        ("GET", "status/analytics?to=0001-01-01", 400, "to="),
        ("GET", "status/analytics?interval=week", 400, "interval"),
        ("GET", "status/analytics?interval=0", 400, "interval"),
        ("GET", "status/analytics?from=2020-01-02&to=2020-01-01", 400, "after"),
        ("GET", "status/analytics?from=2000-01-01&interval=minute", 400, "steps"),
        ("GET", "analytics/worker-metrics?from=soon", 400, "from="),
        ("GET", "analytics/system-metrics?interval=-5", 400, "interval"),
        ("POST", "resources/overview", 405, "not allowed"),
    ],
)
async def test_bad_input(api: Api, method: str, path: str, status: int, error: str) -> None:
    response = await api.http.request(method, f"/api/v1/{path}")
    assert response.status_code == status, response.text
    assert error in response.json()["error"]


async def test_a_month_by_the_hour_fits(api: Api) -> None:
    since = (datetime.now(UTC) - timedelta(days=30)).isoformat()
    await get(api, "/api/v1/status/analytics", **{"from": since, "interval": "hour"})
