"""GET /api/v1/messages: pages of the newest, and one in detail."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest

from tests.http.api import Api, Json, unique


async def listed(api: Api, **params: Any) -> list[Json]:
    response = await api.http.get("/api/v1/messages", params=params)
    assert response.status_code == 200, response.text
    messages: list[Json] = response.json()["messages"]
    return messages


async def shown(api: Api, message: Json, **params: Any) -> Json:
    path = f"/api/v1/messages/{message['partitionId']}/{quote(message['transactionId'], safe='')}"
    response = await api.http.get(path, params=params)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


async def test_what_a_message_tells(api: Api, queue: str) -> None:
    trace_id = str(uuid4())
    [pushed] = await api.push(queue, {"x": [1.0]}, transactionId="t", traceId=trace_id)
    [message] = await listed(api, queue=queue)
    assert datetime.now(UTC) - datetime.fromisoformat(message.pop("createdAt")) < timedelta(hours=1)
    partition_id = message.pop("partitionId")
    known = {
        "id": pushed["message_id"],
        "transactionId": "t",
        "traceId": trace_id,
        "data": {"x": [1.0]},
        "producerSub": None,
        "queue": queue,
        "partition": "Default",
        "offset": 0,
        "status": "pending",
    }
    assert message == known
    detail = await shown(api, known | {"partitionId": partition_id})
    assert detail.pop("createdAt")
    assert detail == known | {"partitionId": partition_id, "consumerGroups": []}


async def test_statuses(api: Api, queue: str) -> None:
    await api.push(queue, *range(5))
    answer = await api.pop(queue, batch=2)
    assert answer is not None
    first, second = answer["messages"]
    await api.ack(first)
    await api.ack(second, "dlq")
    await api.pop(queue, batch=1)
    got = [(message["data"], message["status"]) for message in await listed(api, queue=queue)]
    assert got == [
        (4, "pending"),
        (3, "pending"),
        (2, "processing"),
        (1, "dead_letter"),
        (0, "completed"),
    ]
    for status in ("pending", "processing", "completed", "dead_letter"):
        some = await listed(api, queue=queue, status=status)
        assert [(m["data"], m["status"]) for m in some] == [g for g in got if g[1] == status]
    others = await listed(api, queue=queue, consumerGroup="g")
    assert {message["status"] for message in others} == {"pending"}


async def test_the_groups_of_one_message(api: Api, queue: str) -> None:
    await api.push(queue, 1, 2)
    await api.pop(queue, autoAck="true")
    claim = await api.pop(queue, consumerGroup="g", subscriptionMode="all")
    assert claim is not None
    first, second = claim["messages"]
    await api.ack(first)
    dead = await api.pop(queue, consumerGroup="h", subscriptionMode="all")
    assert dead is not None
    await api.ack(dead["messages"][0], "dlq", error="why not")

    detail = await shown(api, first)
    assert detail["status"] == "completed"
    groups = {group["name"]: group for group in detail["consumerGroups"]}
    assert list(groups) == ["__QUEUE_MODE__", "g", "h"]
    assert all(group["name"] == group["group"] for group in groups.values())
    assert [group["consumed"] for group in groups.values()] == [True, True, True]
    assert [g["status"] for g in groups.values()] == ["completed", "completed", "dead_letter"]
    assert groups["h"]["errorMessage"] == "why not"
    assert groups["h"]["failedAt"]

    detail = await shown(api, second, consumerGroup="g")
    assert detail["status"] == "processing"
    groups = {group["name"]: group for group in detail["consumerGroups"]}
    assert [group["consumed"] for group in groups.values()] == [True, False, False]
    expires = datetime.fromisoformat(groups["g"]["leaseExpiresAt"])
    assert timedelta(0) < expires - datetime.now(UTC) < timedelta(minutes=2)
    assert groups["h"]["leaseExpiresAt"] is None


async def test_where_and_when(api: Api) -> None:
    namespace = unique("n")
    for queue, partition in (("a", "x"), ("b", "x"), ("b", "y")):
        await api.push(f"{namespace}.{queue}", queue + partition, partition=partition)

    async def got(**params: Any) -> list[Any]:
        return [m["data"] for m in await listed(api, namespace=namespace, **params)]

    assert await got() == ["by", "bx", "ax"]
    assert await got(queue=f"{namespace}.b") == ["by", "bx"]
    assert await got(partition="x") == ["bx", "ax"]
    assert await got(task="a") == ["ax"]
    assert await got(limit=1, offset=1) == ["bx"]
    assert await got(limit=0) == []
    assert await got(offset=3) == []
    moment = (await listed(api, namespace=namespace))[1]["createdAt"]
    assert await got(**{"from": moment}) == ["by", "bx"]
    assert await got(to=moment) == ["ax"]
    assert await got(**{"from": "2020-01-01", "to": "2020-01-02T00:00:00Z"}) == []


async def test_a_dead_letter_outlives_its_message(api: Api, queue: str, cluster: Any) -> None:
    await api.push(queue, {"x": 1})
    claim = await api.pop(queue)
    assert claim is not None
    [message] = claim["messages"]
    await api.ack(message, "dlq", error="late")
    cluster.execute(
        f"DELETE FROM queen.log_segments WHERE partition_id = '{message['partitionId']}'", "shared"
    )
    assert await listed(api, queue=queue) == []
    detail = await shown(api, message)
    assert (detail["id"], detail["data"], detail["status"]) == (
        message["id"],
        {"x": 1},
        "dead_letter",
    )
    assert detail["consumerGroups"][0]["errorMessage"] == "late"


async def test_odd_transaction_ids(api: Api, queue: str) -> None:
    for transaction_id in ("a b", "ü", "a/b", "%2F", "?", "#", "\U0001f600", "x" * 2048, "."):
        await api.push(queue, transaction_id, transactionId=transaction_id)
    for message in await listed(api, queue=queue):
        if message["transactionId"] != ".":  # a path that clients resolve
            assert (await shown(api, message))["data"] == message["transactionId"]


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("status=done", "status='done' is none of pending, processing, completed, dead_letter"),
        ("limit=-1", "limit=-1 is out of range (0 to 10000)"),
        ("limit=10001", "limit=10001 is out of range"),
        ("offset=-5", "offset=-5 is out of range (0 to 100000)"),
        ("from=x", "from='x' is not an ISO-8601 timestamp"),
        ("to=%00", "to='\\x00' is not an ISO-8601 timestamp"),
        ("queue=%00", "queue must not contain U+0000"),
        ("partition=%00", "partition must not contain U+0000"),
        ("namespace=%00", "namespace must not contain U+0000"),
        ("task=%00", "task must not contain U+0000"),
        ("consumerGroup=%00", "consumerGroup must not contain U+0000"),
    ],
)
async def test_bad_parameters(api: Api, query: str, error: str) -> None:
    response = await api.http.get(f"/api/v1/messages?{query}")
    assert response.status_code == 400, response.text
    assert response.json()["error"].startswith(error)


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("x/t", 400, "partitionId='x' is not a UUID"),
        ("UUID/%00", 400, "transactionId must not contain U+0000"),
        ("UUID/" + "x" * 2049, 400, "transactionId is longer than 2048 bytes"),
        ("UUID/%ff", 400, "the path segment"),
        ("UUID/t", 404, "no message of transactionId 't' in partition "),
        ("UUID/%C3%A9", 404, "no message of transactionId 'é' in partition "),
    ],
)
async def test_bad_addresses(api: Api, path: str, status: int, error: str) -> None:
    response = await api.http.get(f"/api/v1/messages/{path.replace('UUID', str(uuid4()))}")
    assert response.status_code == status, response.text
    assert response.json()["error"].startswith(error)
