"""POST /api/v1/configure and /api/v1/resources/queues…."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.http.api import Api, Json, data, quote, unique

DEFAULTS = {
    "leaseTime": 300,
    "retryLimit": 3,
    "deadLetterQueue": True,
    "dlqAfterMaxRetries": True,
    "delayedProcessing": 0,
    "windowBuffer": 0,
    "minPopWaitTime": 0,
    "retentionEnabled": False,
    "retentionSeconds": 0,
    "completedRetentionSeconds": 0,
    "maxWaitTimeSeconds": 0,
    "encryptionEnabled": False,
    "dedupWindowSeconds": 3600,
    "priority": 0,
    "ttl": 0,
    "maxSize": 0,
    "retryDelay": 0,
}


async def show(api: Api, queue: str) -> Json | None:
    response = await api.http.get(f"/api/v1/resources/queues/{quote(queue)}")
    if response.status_code == 404:
        assert response.json()["error"] == "Queue not found"
        return None
    answer: Json = response.json()
    return answer


async def test_configure_answers_with_the_effective_row(api: Api, queue: str) -> None:
    answer = await api.configure(queue, namespace="n", task="t", options={"leaseTime": 7})
    assert answer.pop("queueId")
    assert answer == {
        "configured": True,
        "queue": queue,
        "namespace": "n",
        "task": "t",
        "options": DEFAULTS | {"leaseTime": 7},
    }


async def test_merge_keeps_what_is_absent_and_null_is_the_default(api: Api, queue: str) -> None:
    await api.configure(queue, options={"leaseTime": 7, "retryLimit": 9, "retentionEnabled": True})
    answer = await api.configure(queue, options={"retryLimit": None, "priority": 5})
    assert answer["options"] == DEFAULTS | {
        "leaseTime": 7,
        "priority": 5,
        "retentionEnabled": True,
    }


async def test_replace_resets_what_is_absent(api: Api, queue: str) -> None:
    await api.configure(queue, options={"leaseTime": 7, "retryLimit": 9})
    answer = await api.configure(queue, mode="replace", options={"retryLimit": 1})
    assert answer["options"] == DEFAULTS | {"retryLimit": 1}


async def test_options_at_the_top_level(api: Api, queue: str) -> None:
    answer = await api.configure(queue, leaseTime=7, retryLimit=1, options={"retryLimit": 2})
    assert (answer["options"]["leaseTime"], answer["options"]["retryLimit"]) == (7, 2)


async def test_null_and_unknown_are_fine(api: Api, queue: str) -> None:
    answer = await api.configure(
        queue, namespace=None, task=None, options={"nonsense": {"x": 1}}, whatever=1
    )
    assert answer["options"] == DEFAULTS
    assert (await api.configure(queue, options=None))["options"] == DEFAULTS


async def test_a_pushed_queue_leases_for_a_minute(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    detail = await show(api, queue)
    assert detail is not None
    assert detail["options"] == DEFAULTS | {"leaseTime": 60}
    # A merge that doesn't speak of it leaves it there.
    assert (await api.configure(queue))["options"]["leaseTime"] == 60


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("leaseTime", 0),
        ("leaseTime", -1),
        ("leaseTime", "60"),
        ("leaseTime", 1.5),
        ("leaseTime", True),
        ("retryLimit", -1),
        ("retryLimit", 2**31),
        ("retryLimit", 10**40),
        ("retryLimit", [1]),
        ("deadLetterQueue", 1),
        ("deadLetterQueue", "true"),
        ("retentionEnabled", {}),
    ],
)
async def test_a_bad_option_is_named_and_nothing_written(
    api: Api, queue: str, option: str, value: object
) -> None:
    for body in ({"options": {"priority": 1, option: value}}, {"priority": 1, option: value}):
        response = await api.http.post("/api/v1/configure", json={"queue": queue, **body})
        assert response.status_code == 400, response.text
        assert response.json()["error"].startswith(f"{option}=")
    assert await show(api, queue) is None


async def test_list_and_detail_count(api: Api, queue: str) -> None:
    await api.push(queue, 1, 2, 3, partition="a")
    await api.push(queue, 4, partition="b")
    await api.pop(queue, "a", batch=2)
    detail = await show(api, queue)
    assert detail is not None
    counts = {"total": 4, "pending": 4, "processing": 2}
    assert detail["totals"] == detail["messages"]
    assert detail["totals"]["total"] == counts["total"]
    assert detail["totals"]["processing"] == counts["processing"]
    partitions = {p["name"]: p for p in detail["partitions"]}
    assert set(partitions) == {"a", "b"}
    assert partitions["a"]["stats"]["processing"] == 2
    assert datetime.fromisoformat(partitions["a"]["lastActivity"])
    listed = (await api.http.get("/api/v1/resources/queues")).json()["queues"]
    [entry] = [q for q in listed if q["name"] == queue]
    assert entry["partitions"] == 2
    assert entry["messages"] == detail["messages"]
    assert entry["id"] == detail["id"]
    assert datetime.fromisoformat(entry["createdAt"])


async def test_delete(api: Api) -> None:
    queue = unique("a/b ü")
    await api.push(queue, 1, transactionId="t")
    await api.pop(queue)
    response = await api.http.delete(f"/api/v1/resources/queues/{quote(queue)}")
    assert (response.status_code, response.json()) == (200, {"deleted": True, "queue": queue})
    assert await show(api, queue) is None
    again = await api.http.delete(f"/api/v1/resources/queues/{quote(queue)}")
    assert (again.status_code, again.json()) == (200, {"deleted": False, "queue": queue})
    # It was all: the same transaction is new in the queue that comes after.
    [result] = await api.push(queue, 2, transactionId="t")
    assert result["status"] == "queued"
    assert data(await api.pop(queue)) == [2]
