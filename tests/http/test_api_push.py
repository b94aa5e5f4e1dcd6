"""POST /api/v1/push against a real broker: results, ids, duplicates, verbatim payloads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import pytest
import trio

from tests.http.api import Api, data, unique

if TYPE_CHECKING:
    import httpx


async def push_raw(api: Api, body: bytes) -> httpx.Response:
    return await api.http.post("/api/v1/push", content=body)


async def test_results_are_in_order_and_ids_ascend(api: Api, queue: str) -> None:
    results = await api.push_items(
        {"queue": queue, "payload": 1, "transactionId": "mine"},
        {"queue": queue, "payload": 2, "partition": "p"},
        {"queue": queue, "payload": 3},
    )
    assert [r["index"] for r in results] == [0, 1, 2]
    assert {r["status"] for r in results} == {"queued"}
    assert {r["queueName"] for r in results} == {queue}
    assert results[0]["transaction_id"] == "mine"
    ids = [r["message_id"] for r in results]
    assert ids == sorted(ids)
    assert {UUID(i).version for i in ids} == {7}


async def test_no_items(api: Api) -> None:
    assert await api.push_items() == []


async def test_partition_defaults_to_default(api: Api, queue: str) -> None:
    await api.push(queue, "a", partition=None)
    answer = await api.pop(queue, "Default")
    assert data(answer) == ["a"]


async def test_a_duplicate_answers_with_the_original_id(api: Api, queue: str) -> None:
    # In one segment with others, so that the original is found by its offset.
    originals = await api.push_items(
        *({"queue": queue, "payload": n, "transactionId": f"t{n}"} for n in range(5))
    )
    again = await api.push_items(
        {"queue": queue, "payload": "new", "transactionId": "t9"},
        {"queue": queue, "payload": "other", "transactionId": "t3"},
        {"queue": queue, "payload": "other", "transactionId": "t0"},
    )
    assert [r["status"] for r in again] == ["queued", "duplicate", "duplicate"]
    assert again[1]["message_id"] == originals[3]["message_id"]
    assert again[2]["message_id"] == originals[0]["message_id"]
    assert data(await api.pop(queue)) == [0, 1, 2, 3, 4, "new"]


async def test_the_same_transaction_in_other_places_is_no_duplicate(api: Api, queue: str) -> None:
    other = unique()
    results = await api.push_items(
        {"queue": queue, "payload": 1, "transactionId": "t"},
        {"queue": queue, "payload": 2, "transactionId": "t", "partition": "p"},
        {"queue": other, "payload": 3, "transactionId": "t"},
    )
    assert [r["status"] for r in results] == ["queued"] * 3


async def test_the_first_of_a_request_wins(api: Api, queue: str) -> None:
    first, other, second = await api.push_items(
        {"queue": queue, "payload": "first", "transactionId": "t"},
        {"queue": queue, "payload": "other"},
        {"queue": queue, "payload": "second", "transactionId": "t", "partition": "Default"},
    )
    assert (first["status"], other["status"], second["status"]) == ("queued", "queued", "duplicate")
    assert second["message_id"] == first["message_id"]
    assert data(await api.pop(queue)) == ["first", "other"]


async def test_a_repeat_of_a_duplicate_has_the_original_id_too(api: Api, queue: str) -> None:
    [original] = await api.push(queue, 1, transactionId="t")
    results = await api.push(queue, 2, 3, transactionId="t")
    assert [r["status"] for r in results] == ["duplicate", "duplicate"]
    assert {r["message_id"] for r in results} == {original["message_id"]}


async def test_the_window_bounds_dedup(api: Api, queue: str) -> None:
    await api.configure(queue, options={"dedupWindowSeconds": 0})
    results = await api.push(queue, 1, transactionId="t") + await api.push(
        queue, 2, transactionId="t"
    )
    assert [r["status"] for r in results] == ["queued", "queued"]


async def test_concurrent_pushes_of_one_transaction_store_it_once(api: Api, queue: str) -> None:
    results = []

    async def push() -> None:
        results.extend(await api.push(queue, "x", transactionId="same"))

    async with trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(push)
    assert sorted(r["status"] for r in results) == ["duplicate"] * 29 + ["queued"]
    assert len({r["message_id"] for r in results}) == 1
    assert data(await api.pop(queue)) == ["x"]


async def test_a_trace_id_is_stored_if_it_is_a_uuid(api: Api, queue: str) -> None:
    trace = str(uuid4())
    await api.push_items(
        {"queue": queue, "payload": 1, "traceId": trace},
        {"queue": queue, "payload": 2, "traceId": "nonsense"},
        {"queue": queue, "payload": 3, "traceId": None},
    )
    answer = await api.pop(queue)
    assert answer is not None
    assert [m["traceId"] for m in answer["messages"]] == [trace, None, None]


async def test_producer_sub_is_not_taken_from_the_body(api: Api, queue: str) -> None:
    await api.push(queue, 1, producerSub="mallory")
    answer = await api.pop(queue)
    assert answer is not None
    assert answer["messages"][0]["producerSub"] is None


VERBATIM = [
    b"null",
    b'""',
    b"123456789012345678901234567890.10000000000000000000000001e+400",
    b"-0",
    b"1E5",
    b'{"a":1,"a":2,"b":{"a":1,"a":1}}',
    b'"\\u0000 nul \\u001e \\/ \\ud83d\\ude00"',
    '"grüße 🐇 \u2028"'.encode(),
    b"[ 1 ,\t2,\n3\r\n]",
    b'{"closes":"}\\n","ends":"}","data":{"}":"}"}}',
    b"[" * 300 + b"]" * 300,
    b'"' + b"x" * 100_000 + b'"',
]


@pytest.mark.parametrize("payload", VERBATIM, ids=lambda p: p[:24].decode(errors="replace"))
async def test_a_payload_comes_back_verbatim(api: Api, queue: str, payload: bytes) -> None:
    # A neighbour on each side: slices must not bleed.
    body = b'{"items":[%b]}' % b",".join(
        b'{"queue":"%b","payload":%b}' % (queue.encode(), p) for p in (b"1", payload, b"2")
    )
    response = await push_raw(api, body)
    assert response.status_code == 201, response.text
    answer = (await api.pop_raw(queue)).content
    assert b'"data":%b,"producerSub"' % payload in answer
    assert len(json.loads(answer)["messages"]) == 3


async def test_nul_in_a_transaction_id_is_refused(api: Api, queue: str) -> None:
    response = await push_raw(
        api, b'{"items":[{"queue":"%b","payload":1,"transactionId":"a\\u0000"}]}' % queue.encode()
    )
    assert response.status_code == 400
    assert response.json()["error"].startswith("items[0].transactionId must not contain U+0000")


async def test_a_long_transaction_id_is_kept(api: Api, queue: str) -> None:
    long = "ü" * 1024
    [result] = await api.push(queue, 1, transactionId=long)
    assert result["transaction_id"] == long
    answer = await api.pop(queue)
    assert answer is not None
    assert (await api.ack(answer["messages"][0]))["success"]


async def test_unknown_keys_are_ignored(api: Api, queue: str) -> None:
    [result] = await api.push(queue, 1, nonsense={"deep": [1]}, payload2=None)
    assert result["status"] == "queued"


async def test_many_items_in_many_partitions(api: Api, queue: str) -> None:
    """More partitions than a bundle takes, more messages than a segment: still in order."""
    count, partitions = 6_000, 300
    results = await api.push_items(
        *({"queue": queue, "payload": n, "partition": str(n % partitions)} for n in range(count))
    )
    assert {r["status"] for r in results} == {"queued"}
    seen: dict[str, list[int]] = {}
    while answer := await api.pop(queue, batch=5_000, partitions=0, autoAck=True):
        for message in answer["messages"]:
            seen.setdefault(message["partition"], []).append(message["data"])
    assert seen == {str(p): list(range(p, count, partitions)) for p in range(partitions)}
