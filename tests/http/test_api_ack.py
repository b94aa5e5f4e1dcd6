"""POST /api/v1/ack, /ack/batch and /lease/:id/extend: per-item results, retries, dead letters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from tests.http.api import Api, Json, data, identity

if TYPE_CHECKING:
    from tests.cluster import Cluster

DONE = {"success": True, "error": None, "leaseReleased": True, "dlq": False, "noop": False}


async def claim(api: Api, queue: str, **params: Any) -> list[Json]:
    answer = await api.pop(queue, **params)
    assert answer is not None
    messages: list[Json] = answer["messages"]
    return messages


def dead_letters(cluster: Cluster, queue: str) -> list[Any]:
    return cluster.execute(
        "SELECT transaction_id, payload, error, consumer_group FROM queen.log_dlq "
        f"WHERE queue_name = '{queue}' ORDER BY 1",
        "shared",
    )


async def test_a_completed_message_is_gone(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    [message] = await claim(api, queue)
    result = await api.ack(message)
    assert result == {"index": 0, "transactionId": message["transactionId"], **DONE}
    assert await api.pop(queue) is None


@pytest.mark.parametrize("status", ["completed", "success", "acked", "ok", None])
async def test_words_that_complete(api: Api, queue: str, status: str | None) -> None:
    await api.push(queue, 1)
    [message] = await claim(api, queue)
    body = identity(message) | ({} if status is None else {"status": status})
    response = await api.http.post("/api/v1/ack", json=body)
    assert response.json()[0]["success"] is True
    assert await api.pop(queue) is None


async def test_a_commit_short_of_the_batch_keeps_the_lease(api: Api, queue: str) -> None:
    await api.push(queue, 1, 2, 3)
    first, second, third = await claim(api, queue)
    assert (await api.ack(second))["leaseReleased"] is False
    assert await api.pop(queue) is None
    # At or below the cursor: done already.
    again = await api.ack(first)
    assert (again["success"], again["noop"]) == (True, True)
    late = await api.ack(first, "failed")
    assert late["success"] is False
    assert late["error"].startswith("already committed: ")
    assert (await api.ack(third))["leaseReleased"] is True


async def test_a_batch_has_one_result_for_each(api: Api, queue: str) -> None:
    await api.push(queue, 1, 2, partition="a")
    await api.push(queue, 3, partition="b")
    messages = await claim(api, queue, partitions=0)
    stranger = identity(messages[0])
    results = await api.ack_batch(
        *(identity(m) for m in messages),
        stranger | {"transactionId": "never pushed"},
        stranger | {"partitionId": "no uuid"},
        stranger | {"partitionId": str(uuid4())},
        stranger | {"consumerGroup": "never popped"},
    )
    assert [r["success"] for r in results] == [True] * 3 + [False] * 4
    assert [r["transactionId"] for r in results[:3]] == [m["transactionId"] for m in messages]
    errors = [r["error"] for r in results[3:]]
    assert errors[0].startswith("unresolvable: ")
    assert errors[1].startswith("unresolvable: ")
    assert errors[2] == errors[3] == "consumer not found"
    assert await api.pop(queue, partitions=0) is None


async def test_the_group_of_the_batch_counts_where_an_item_has_none(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    [message] = await claim(api, queue, consumerGroup="g", subscriptionMode="all")
    item = identity(message) | {"consumerGroup": None}
    [result] = await api.ack_batch(item, consumerGroup="g")
    assert result["success"] is True


async def test_an_empty_batch(api: Api) -> None:
    assert await api.ack_batch() == []


async def test_a_foreign_lease_moves_nothing(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    [message] = await claim(api, queue)
    result = await api.ack(message | {"leaseId": str(uuid4())})
    assert (result["success"], result["error"]) == (False, "invalid or expired lease")
    assert (await api.ack(message))["success"] is True


async def test_without_a_lease_the_check_is_skipped(api: Api, queue: str) -> None:
    for lease in (None, ""):
        await api.push(queue, 1)
        [message] = await claim(api, queue)
        assert (await api.ack(message | {"leaseId": lease}))["success"] is True


async def test_an_expired_lease_can_not_ack(api: Api, queue: str, cluster: Cluster) -> None:
    await api.push(queue, 1)
    [message] = await claim(api, queue)
    cluster.execute(
        "UPDATE queen.log_consumers SET lease_expires_at = now() - interval '1 s' "
        f"WHERE worker_id = '{message['leaseId']}'",
        "shared",
    )
    assert (await api.ack(message))["error"] == "invalid or expired lease"
    [again] = await claim(api, queue)
    assert (await api.ack(again))["success"] is True


async def test_a_retry_is_free(api: Api, queue: str) -> None:
    await api.configure(queue, options={"retryLimit": 1})
    await api.push(queue, 1)
    for _ in range(4):
        [message] = await claim(api, queue)
        result = await api.ack(message, "retry")
        assert (result["success"], result["leaseReleased"], result["dlq"]) == (True, True, False)
    assert len(await claim(api, queue)) == 1


@pytest.mark.parametrize("word", ["failed", "nonsense"])
async def test_failures_end_in_the_dead_letters(
    api: Api, queue: str, cluster: Cluster, word: str
) -> None:
    await api.push(queue, {"a": 1}, transactionId="bad")
    await api.push(queue, "next", transactionId="good")
    outcomes = []
    for _ in range(6):
        messages = await claim(api, queue)
        if messages[0]["transactionId"] != "bad":
            break
        outcomes.append((await api.ack(messages[0], word, error="no\0way"))["dlq"])
    assert outcomes[-1] is True
    assert not any(outcomes[:-1])
    assert messages[0]["data"] == "next"
    assert dead_letters(cluster, queue) == [("bad", '{"a":1}', "no\ufffdway", "__QUEUE_MODE__")]


async def test_the_dead_letter_keeps_its_payload_verbatim(
    api: Api, queue: str, cluster: Cluster
) -> None:
    payload = b'{"a":1.0000000000000000000001,"a":"\\u0000"}'
    await api.http.post(
        "/api/v1/push",
        content=b'{"items":[{"queue":"%b","payload":%b,"transactionId":"t"}]}'
        % (queue.encode(), payload),
    )
    [message] = await claim(api, queue)
    result = await api.ack(message, "dlq", error="because")
    assert (result["success"], result["dlq"], result["leaseReleased"]) == (True, True, True)
    assert dead_letters(cluster, queue) == [("t", payload.decode(), "because", "__QUEUE_MODE__")]
    assert await api.pop(queue) is None


async def test_without_dead_letters_an_exhausted_message_is_dropped(
    api: Api, queue: str, cluster: Cluster
) -> None:
    await api.configure(
        queue,
        options={"retryLimit": 0, "deadLetterQueue": False, "dlqAfterMaxRetries": False},
    )
    await api.push(queue, 1)
    for _ in range(3):
        answer = await api.pop(queue)
        if answer is None:
            break
        result = await api.ack(answer["messages"][0], "failed")
        assert result["dlq"] is False
    assert await api.pop(queue) is None
    assert dead_letters(cluster, queue) == []


async def test_the_lowest_failure_clamps_a_batch(api: Api, queue: str) -> None:
    await api.push(queue, *range(5))
    messages = await claim(api, queue)
    results = await api.ack_batch(
        *(identity(m) | {"status": "failed" if m["data"] == 2 else "completed"} for m in messages)
    )
    assert [r["success"] for r in results[:3]] == [True, True, True]
    assert {r["leaseReleased"] for r in results} == {True}
    assert data(await api.pop(queue)) == [2, 3, 4]


async def test_many_acks_in_one_request(api: Api, queue: str) -> None:
    """More partitions than one database call takes."""
    await api.push_items(*({"queue": queue, "payload": n, "partition": str(n)} for n in range(300)))
    messages = await claim(api, queue, partitions=0, batch=1000)
    assert len(messages) == 300
    results = await api.ack_batch(*(identity(m) for m in messages))
    assert all(r["success"] and r["leaseReleased"] for r in results)


# -- leases ------------------------------------------------------------------------------------


async def extend(api: Api, lease: str, **request: Any) -> Json:
    response = await api.http.post(f"/api/v1/lease/{lease}/extend", **request)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


@pytest.mark.parametrize(
    ("request_", "seconds"),
    [
        ({"json": {"seconds": 900}}, 900),
        ({"content": b"", "headers": {"content-length": "0"}}, 60),
        ({}, 60),
        ({"content": b"nonsense"}, 60),
        ({"json": {"seconds": "90"}}, 60),
        ({"json": {"seconds": -5}}, 60),
        ({"json": {"seconds": 10**30}}, 60),
        ({"json": []}, 60),
    ],
)
async def test_extend(api: Api, queue: str, request_: dict[str, Any], seconds: int) -> None:
    await api.push(queue, 1)
    [message] = await claim(api, queue, leaseSeconds=5)
    answer = await extend(api, message["leaseId"], **request_)
    assert (answer["success"], answer["renewed"]) == (True, 1)
    assert answer["leaseId"] == message["leaseId"]
    expiry = answer["newExpiresAt"]
    assert answer["expiresAt"] == answer["lease_expires_at"] == expiry
    left = (datetime.fromisoformat(expiry) - datetime.now(UTC)).total_seconds()
    assert seconds - 30 < left <= seconds + 1


async def test_extend_never_shortens(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    [message] = await claim(api, queue, leaseSeconds=3600)
    answer = await extend(api, message["leaseId"], json={"seconds": 1})
    left = datetime.fromisoformat(answer["expiresAt"]) - datetime.now(UTC)
    assert left.total_seconds() > 3000


async def test_extend_never_revives(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    [message] = await claim(api, queue)
    await api.ack(message)
    for lease in (message["leaseId"], str(uuid4()), "no such lease", "%F0%9F%90%87"):
        answer = await extend(api, lease)
        assert (answer["success"], answer["renewed"]) == (False, 0)
        assert answer["newExpiresAt"] is answer["expiresAt"] is answer["lease_expires_at"] is None
