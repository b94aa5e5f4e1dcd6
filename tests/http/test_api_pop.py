"""GET /api/v1/pop… without waiting: every parameter of spec 2."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.http.api import Api, data, unique

if TYPE_CHECKING:
    from tests.cluster import Cluster


async def test_the_answer_has_the_shape_of_the_spec(api: Api, queue: str) -> None:
    [pushed] = await api.push(queue, {"n": 1}, partition="p", transactionId="t")
    answer = await api.pop(queue)
    assert answer is not None
    [message] = answer.pop("messages")
    assert answer == {
        "success": True,
        "queue": queue,
        "partition": "p",
        "partitionId": message["partitionId"],
        "leaseId": message["leaseId"],
        "consumerGroup": "__QUEUE_MODE__",
        "partitionsClaimed": 1,
    }
    created = datetime.fromisoformat(message.pop("createdAt"))
    assert abs(datetime.now(UTC) - created) < timedelta(seconds=60)
    assert message.pop("partitionId")
    assert message.pop("leaseId")
    assert message == {
        "id": pushed["message_id"],
        "transactionId": "t",
        "traceId": None,
        "data": {"n": 1},
        "producerSub": None,
        "partition": "p",
        "consumerGroup": "__QUEUE_MODE__",
        "deliveryAttempt": 1,
    }


async def test_nothing_there_is_a_204(api: Api, queue: str) -> None:
    assert await api.pop(queue) is None
    assert await api.pop(queue, "p") is None
    assert await api.discover(namespace=queue) is None
    await api.push(queue, 1)
    assert await api.pop(queue, "elsewhere") is None


async def test_one_live_lease_per_partition_and_group(api: Api, queue: str) -> None:
    await api.push(queue, 1, 2, 3)
    assert data(await api.pop(queue, batch=1)) == [1]
    assert await api.pop(queue) is None
    assert data(await api.pop(queue, consumerGroup="g", subscriptionMode="all")) == [1, 2, 3]


async def test_batch_is_the_budget_of_the_call(api: Api, queue: str) -> None:
    for partition in "abc":
        await api.push(queue, 1, 2, 3, partition=partition)
    answer = await api.pop(queue, batch=5, partitions=3)
    assert answer is not None
    assert len(answer["messages"]) == 5
    assert answer["partitionsClaimed"] == 2
    assert answer["partition"] == answer["messages"][0]["partition"]


async def test_batch_defaults_to_200(api: Api, queue: str) -> None:
    await api.push(queue, *range(250))
    assert data(await api.pop(queue)) == list(range(200))


@pytest.mark.parametrize(("partitions", "claimed"), [(None, 1), (2, 2), (0, 4), (-1, 4), (9, 4)])
async def test_partitions(api: Api, queue: str, partitions: int | None, claimed: int) -> None:
    for partition in "abcd":
        await api.push(queue, partition, partition=partition)
    params: dict[str, Any] = {} if partitions is None else {"partitions": partitions}
    answer = await api.pop(queue, **params)
    assert answer is not None
    assert answer["partitionsClaimed"] == claimed
    assert len({m["partitionId"] for m in answer["messages"]}) == claimed
    assert {m["leaseId"] for m in answer["messages"]} == {answer["leaseId"]}


async def test_auto_ack_commits_at_delivery(api: Api, queue: str) -> None:
    await api.push(queue, 1, 2)
    answer = await api.pop(queue, batch=1, autoAck="true")
    assert answer is not None
    assert answer["leaseId"] == ""
    assert answer["messages"][0]["leaseId"] == ""
    assert data(answer) == [1]
    assert data(await api.pop(queue, autoAck="True")) == [2]
    assert await api.pop(queue) is None


async def test_an_expired_lease_is_redelivered_and_costs_no_budget(
    api: Api, queue: str, cluster: Cluster
) -> None:
    await api.configure(queue, options={"retryLimit": 1})
    await api.push(queue, 1)
    for attempt in range(1, 5):
        answer = await api.pop(queue)
        assert answer is not None
        assert answer["messages"][0]["deliveryAttempt"] == attempt
        expire_lease(cluster, answer["leaseId"])


def expire_lease(cluster: Cluster, lease_id: str) -> None:
    cluster.execute(
        "UPDATE queen.log_consumers SET lease_expires_at = clock_timestamp() - interval '1 s' "
        f"WHERE worker_id = '{lease_id}'",
        "shared",
    )


def lease_seconds(cluster: Cluster, lease_id: str) -> int:
    [(seconds,)] = cluster.execute(
        "SELECT extract(epoch FROM lease_expires_at - lease_acquired_at)::int "
        f"FROM queen.log_consumers WHERE worker_id = '{lease_id}'",
        "shared",
    )
    return int(seconds)


@pytest.mark.parametrize(
    ("asked", "configured", "granted"),
    [(None, False, 60), (None, True, 300), (7, True, 7), (0, False, 60), (-5, False, 60)],
)
async def test_lease_seconds(
    api: Api, queue: str, cluster: Cluster, asked: int | None, configured: bool, granted: int
) -> None:
    if configured:
        await api.configure(queue)
    await api.push(queue, 1)
    params: dict[str, Any] = {} if asked is None else {"leaseSeconds": asked}
    answer = await api.pop(queue, **params)
    assert answer is not None
    assert lease_seconds(cluster, answer["leaseId"]) == granted


async def test_groups_are_independent(api: Api, queue: str) -> None:
    await api.push(queue, 1, 2)
    for group in ("a", "b"):
        answer = await api.pop(queue, consumerGroup=group, subscriptionMode="all")
        assert data(answer) == [1, 2]
        assert answer is not None
        assert answer["consumerGroup"] == answer["messages"][0]["consumerGroup"] == group
    assert data(await api.pop(queue)) == [1, 2]


async def test_a_new_group_starts_now_by_default(api: Api, queue: str) -> None:
    await api.push(queue, "old")
    assert await api.pop(queue, consumerGroup="g") is None
    await api.push(queue, "new")
    await api.push(queue, "born later", partition="p2")
    assert sorted(data(await api.pop(queue, consumerGroup="g", partitions=0))) == [
        "born later",
        "new",
    ]


@pytest.mark.parametrize("mode", ["new", "new-only"])
async def test_subscription_mode_new(api: Api, queue: str, mode: str) -> None:
    await api.push(queue, "old")
    assert await api.pop(queue, consumerGroup="g", subscriptionMode=mode) is None
    await api.push(queue, "new")
    # A stored registration wins over what a later pop asks for.
    assert data(await api.pop(queue, consumerGroup="g", subscriptionMode="all")) == ["new"]


@pytest.mark.parametrize("mode", ["all", "from_beginning"])
async def test_subscription_mode_all(api: Api, queue: str, mode: str) -> None:
    await api.push(queue, "old")
    assert data(await api.pop(queue, consumerGroup="g", subscriptionMode=mode)) == ["old"]


async def test_queue_mode_starts_at_the_beginning_always(api: Api, queue: str) -> None:
    await api.push(queue, "old")
    assert data(await api.pop(queue, subscriptionMode="new")) == ["old"]


async def test_subscription_from_a_moment(api: Api, queue: str) -> None:
    await api.push(queue, "old", partition="p")
    answer = await api.pop(queue)
    assert answer is not None
    created = datetime.fromisoformat(answer["messages"][0]["createdAt"])
    after = created + timedelta(microseconds=1)
    for group, moment, expected in (
        ("at", created.isoformat(), ["old"]),
        ("zulu", answer["messages"][0]["createdAt"], ["old"]),
        ("after", after.isoformat(), []),
        ("now", "now", []),
        ("date", "2001-01-01", ["old"]),
        ("future", "2099-01-01T00:00:00Z", []),
    ):
        got = await api.pop(queue, consumerGroup=group, subscriptionFrom=moment)
        assert data(got) == expected, group


async def test_a_plus_that_arrives_as_a_space_is_a_plus(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    response = await api.http.get(
        f"/api/v1/pop/queue/{queue}?consumerGroup=g&subscriptionFrom=2001-01-01T00:00:00+00:00"
    )
    assert response.status_code == 200


async def test_now_wins_over_mode_all(api: Api, queue: str) -> None:
    await api.push(queue, "old")
    answer = await api.pop(queue, consumerGroup="g", subscriptionMode="all", subscriptionFrom="now")
    assert answer is None


async def test_discovery_by_namespace_and_task(api: Api) -> None:
    ns, task = unique("ns"), unique("task")
    one, two, three = unique(), unique(), unique()
    await api.configure(one, namespace=ns, task=task)
    await api.configure(two, namespace=ns, task="other")
    await api.configure(three, namespace="other", task=task)
    for queue in (one, two, three):
        await api.push(queue, queue)

    async def found(**params: str) -> set[str]:
        answer = await api.discover(
            consumerGroup=unique("g"), subscriptionMode="all", partitions=0, **params
        )
        assert answer is not None
        assert answer["queue"] == ""
        assert {m["queue"] for m in answer["messages"]} == set(data(answer))
        return set(data(answer))

    assert await found(namespace=ns) == {one, two}
    assert await found(task=task) == {one, three}
    assert await found(namespace=ns, task=task) == {one}


async def test_discovery_by_the_dots_of_a_name(api: Api) -> None:
    ns = unique("ns")
    await api.push(f"{ns}.created.eu", 1)
    assert data(await api.discover(namespace=ns, task="created.eu")) == [1]


async def test_discovery_needs_something_to_look_for(api: Api) -> None:
    for params in ({}, {"namespace": ""}, {"namespace": "", "task": ""}):
        response = await api.http.get("/api/v1/pop", params=params)
        assert response.status_code == 400
        assert response.json() == {"error": "a pop without a queue needs namespace or task"}


async def test_a_name_is_decoded_per_segment(api: Api) -> None:
    for name in (unique("a/b"), unique("a b"), unique("grüße🐇"), unique("100%"), unique("a+b")):
        await api.push(name, name, partition="x/y z")
        assert data(await api.pop(name, "x/y z", autoAck=True)) == [name]
        assert (await api.pop_raw(name)).status_code == 204


async def test_delayed_processing_and_window_buffer_hold_messages(api: Api) -> None:
    for option in ("delayedProcessing", "windowBuffer"):
        queue = unique()
        await api.configure(queue, options={option: 3600})
        await api.push(queue, 1)
        assert await api.pop(queue) is None
        await api.configure(queue, options={option: None})
        assert data(await api.pop(queue)) == [1]


async def test_conflation_is_refused_and_autopilot_ignored(api: Api, queue: str) -> None:
    response = await api.pop_raw(queue, conflation="true")
    assert response.status_code == 400
    assert response.json()["code"] == "conflation_unsupported"
    await api.push(queue, 1)
    assert data(await api.pop(queue, autopilot="true", conflation="false")) == [1]
