"""/api/v1/dlq, and dead letters by the address of their message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import trio

from tests.http.api import Api, Json, data, unique

if TYPE_CHECKING:
    import httpx

# JSON that a parser and a serialiser would not give back as it came.
VERBATIM = '{"b": 1.0, "a":[1e2, -0, "\\u00e9\\/\\u0000", 123456789012345678901234567890], "a": {}}'


async def bury(api: Api, queue: str, payload: Any = 1, group: str | None = None) -> Json:
    """Push a message and dead-letter it; returns the message as it was popped."""
    await api.push(queue, payload)
    params = {} if group is None else {"consumerGroup": group, "subscriptionMode": "all"}
    answer = await api.pop(queue, **params)
    assert answer is not None
    message: Json = answer["messages"][-1]
    result = await api.ack(message, "dlq", error="no stamp")
    assert result["dlq"] is True
    return message


async def dead_letters(api: Api, **params: Any) -> list[Json]:
    response = await api.http.get("/api/v1/dlq", params=params)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["total"] == len(answer["messages"])
    messages: list[Json] = answer["messages"]
    return messages


def address(message: Json, action: str = "") -> str:
    return f"/api/v1/messages/{message['partitionId']}/{message['transactionId']}{action}"


def refused(response: httpx.Response, status: int, code: str | None) -> str:
    assert response.status_code == status, response.text
    assert response.json().get("code") == code
    return str(response.json()["error"])


async def test_what_a_dead_letter_tells(api: Api, queue: str) -> None:
    message = await bury(api, queue, {"x": 1})
    [letter] = await dead_letters(api, queue=queue)
    assert letter.pop("id")
    assert letter.pop("createdAt") == message["createdAt"] < letter.pop("failedAt")
    assert letter == {
        "queue": queue,
        "partition": "Default",
        "partitionId": message["partitionId"],
        "consumerGroup": "__QUEUE_MODE__",
        "offset": 0,
        "messageId": message["id"],
        "transactionId": message["transactionId"],
        "traceId": None,
        "producerSub": None,
        "data": {"x": 1},
        "errorMessage": "no stamp",
        "retryCount": 0,
    }


async def test_after_the_last_retry(api: Api, queue: str) -> None:
    await api.configure(queue, options={"retryLimit": 2})
    await api.push(queue, 1)
    for _ in range(2):
        answer = await api.pop(queue)
        assert answer is not None
        await api.ack(answer["messages"][0], "failed", error="again")
    [letter] = await dead_letters(api, queue=queue)
    assert (letter["errorMessage"], letter["retryCount"]) == ("again", 2)


async def test_payloads_stay_verbatim(api: Api, queue: str) -> None:
    body = f'{{"items":[{{"queue":"{queue}","payload":{VERBATIM},"transactionId":"t"}}]}}'
    assert (await api.http.post("/api/v1/push", content=body)).status_code == 201
    answer = await api.pop(queue)
    assert answer is not None
    [message] = answer["messages"]
    await api.ack(message, "dlq")
    listed = await api.http.get("/api/v1/dlq", params={"queue": queue})
    assert f'"data":{VERBATIM},' in listed.text
    shown = await api.http.get(address(message))
    assert f'"data":{VERBATIM},' in shown.text
    await api.http.post(address(message, "/retry"))
    popped = await api.pop_raw(queue)
    assert f'"data":{VERBATIM},' in popped.text


async def test_the_list_filters_and_turns_pages(api: Api, queue: str) -> None:
    for number in range(3):
        await bury(api, queue, number)
    await bury(api, queue, 0, group="g")
    await api.push(queue, "elsewhere", partition="p")
    answer = await api.pop(queue, "p")
    assert answer is not None
    await api.ack(answer["messages"][0], "dlq")

    everything = await dead_letters(api, queue=queue)
    assert everything[0]["data"] == "elsewhere"
    assert [m["data"] for m in await dead_letters(api, queue=queue, partition="p")] == ["elsewhere"]
    [of_g] = await dead_letters(api, queue=queue, consumerGroup="g")
    assert of_g["consumerGroup"] == "g"
    moment = of_g["failedAt"]
    since = await dead_letters(api, queue=queue, **{"from": moment})
    until = await dead_letters(api, queue=queue, to=moment)
    assert since + until == everything
    assert since[-1] == of_g
    assert len(since) == 2
    # The same moment, said by a clock in another zone and with an unquoted "+".
    local = moment.replace("Z", "+00:00")
    response = await api.http.get(f"/api/v1/dlq?queue={queue}&from={local}")
    assert response.json()["messages"] == since

    answer = (await api.http.get(f"/api/v1/dlq?queue={queue}&limit=2&offset=1")).json()
    assert answer["messages"] == everything[1:3]
    assert (answer["total"], answer["limit"], answer["offset"]) == (5, 2, 1)
    assert await dead_letters(api, queue=unique()) == []


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("limit=-1", "limit=-1 is out of range (0 to 10000)"),
        ("limit=x", "limit='x' is not an integer"),
        ("offset=-1", "offset=-1 is out of range (0 to 2147483647)"),
        ("from=yesterday", "from='yesterday' is not an ISO-8601 timestamp"),
        ("to=2026-13-01", "to='2026-13-01' is not an ISO-8601 timestamp"),
        ("from=0001-01-01T00:00:00%2B14:00", "from='0001-01-01T00:00:00+14:00' is not an"),
        ("queue=a%00b", "queue must not contain U+0000: 'a\\x00b'"),
        ("consumerGroup=%00", "consumerGroup must not contain U+0000: '\\x00'"),
        ("partition=" + "x" * 513, "partition is longer than 512 bytes: 'xxx"),
        ("queue=%ff", "the query string is not valid UTF-8, or too long"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_bad_parameters(api: Api, method: str, query: str, error: str) -> None:
    if method == "DELETE" and ("limit" in query or "offset" in query):
        query += "&queue="  # ignored there; but a queue has to be named
        error = "deleting dead letters needs queue"
    response = await api.http.request(method, f"/api/v1/dlq?{query}")
    assert refused(response, 400, None).startswith(error)


async def test_replay(api: Api, queue: str) -> None:
    message = await bury(api, queue, {"x": 1})
    [letter] = await dead_letters(api, queue=queue)
    response = await api.http.post(f"/api/v1/dlq/{letter['id']}/replay")
    assert response.status_code == 200, response.text
    moved = response.json()
    popped = await api.pop(queue)
    assert popped is not None
    [again] = popped["messages"]
    assert again["data"] == {"x": 1}
    assert again["id"] != message["id"]
    assert moved == {
        "success": True,
        "status": "moved",
        "queue": queue,
        "partition": "Default",
        "partitionId": message["partitionId"],
        "offset": 1,
        "messageId": again["id"],
        "transactionId": f"dlq:{letter['id']}",
    }
    assert again["transactionId"] == moved["transactionId"]
    assert await dead_letters(api, queue=queue) == []
    gone = await api.http.post(f"/api/v1/dlq/{letter['id']}/replay")
    assert letter["id"] in refused(gone, 404, "dead_letter_not_found")


async def test_replay_keeps_trace_and_producer(api: Api, queue: str) -> None:
    trace_id = str(uuid4())
    await api.push(queue, 1, traceId=trace_id)
    answer = await api.pop(queue)
    assert answer is not None
    await api.ack(answer["messages"][0], "dlq")
    [letter] = await dead_letters(api, queue=queue)
    assert letter["traceId"] == trace_id
    await api.http.post(f"/api/v1/dlq/{letter['id']}/replay")
    answer = await api.pop(queue)
    assert answer is not None
    assert answer["messages"][0]["traceId"] == trace_id


async def test_many_replays_move_it_once(api: Api, queue: str) -> None:
    await bury(api, queue)
    [letter] = await dead_letters(api, queue=queue)
    answers: list[Any] = []

    async def replay() -> None:
        answers.append(await api.http.post(f"/api/v1/dlq/{letter['id']}/replay"))

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(replay)
    verdicts = [
        answer.json()["status"] if answer.status_code == 200 else answer.status_code
        for answer in answers
    ]
    assert verdicts.count("moved") == 1
    assert set(verdicts) <= {"moved", "duplicate", 404}
    assert len(data(await api.pop(queue))) == 1


async def test_a_replay_wakes_a_parked_pop(api: Api, queue: str) -> None:
    await bury(api, queue)
    [letter] = await dead_letters(api, queue=queue)
    answers: list[Json | None] = []

    async def wait() -> None:
        answers.append(await api.pop(queue, wait="true", timeout=20_000))

    with trio.fail_after(15):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await api.http.post(f"/api/v1/dlq/{letter['id']}/replay")
    assert data(answers[0]) == [1]


async def test_retry_by_address_moves_the_newest(api: Api, queue: str) -> None:
    message = await bury(api, queue)
    theirs = await bury(api, queue, 2, group="g")
    # Of the second message, both groups have a dead letter; the first has one of queue mode.
    answer = await api.pop(queue)
    assert answer is not None
    await api.ack(answer["messages"][0], "dlq")
    first = await api.http.post(address(theirs, "/retry"), json={"consumerGroup": "g"})
    assert first.json()["status"] == "moved"
    [newest, oldest] = await dead_letters(api, queue=queue)
    assert newest["transactionId"] == theirs["transactionId"]
    assert {newest["consumerGroup"], oldest["consumerGroup"]} == {"__QUEUE_MODE__"}
    assert (await api.http.post(address(theirs, "/retry"))).json()["status"] == "moved"
    assert (await api.http.post(address(message, "/retry"), content=b"{}")).status_code == 200
    gone = await api.http.post(address(message, "/retry"))
    assert refused(gone, 404, "dead_letter_not_found").startswith("no dead letter of transactionId")
    assert data(await api.pop(queue)) == [2, 2, 1]


async def test_delete_by_address(api: Api, queue: str) -> None:
    message = await bury(api, queue)
    answer = await api.pop(queue, consumerGroup="g", subscriptionMode="all")
    assert answer is not None
    await api.ack(answer["messages"][0], "dlq")
    response = await api.http.delete(address(message), params={"consumerGroup": "g"})
    assert response.json() == {"deleted": True, "deadLetters": 1}
    refused(
        await api.http.delete(address(message), params={"consumerGroup": "g"}),
        404,
        "dead_letter_not_found",
    )
    assert (await api.http.delete(address(message))).json() == {"deleted": True, "deadLetters": 1}
    refused(await api.http.delete(address(message)), 404, "dead_letter_not_found")
    # The message itself stays in the log.
    assert (await api.http.get(address(message))).status_code == 200


async def test_purge(api: Api, queue: str) -> None:
    other = unique()
    for name in (queue, queue, other):
        await bury(api, name)
    await bury(api, queue, 0, group="g")
    response = await api.http.delete("/api/v1/dlq", params={"queue": queue, "consumerGroup": "g"})
    assert response.json() == {"queue": queue, "deleted": 1}
    response = await api.http.delete("/api/v1/dlq", params={"queue": queue})
    assert response.json() == {"queue": queue, "deleted": 2}
    assert await dead_letters(api, queue=queue) == []
    assert len(await dead_letters(api, queue=other)) == 1
    response = await api.http.delete("/api/v1/dlq", params={"queue": queue})
    assert response.json() == {"queue": queue, "deleted": 0}
    assert refused(await api.http.delete("/api/v1/dlq"), 400, None) == (
        "deleting dead letters needs queue"
    )


class TestByHand:
    async def test_the_next_message(self, api: Api, queue: str) -> None:
        [pushed, _] = await api.push(queue, 1, 2)
        partition = (await api.http.get(f"/api/v1/resources/queues/{queue}")).json()["partitions"]
        message = {
            "partitionId": partition[0]["id"],
            "transactionId": pushed["transaction_id"],
        }
        response = await api.http.post(address(message, "/dlq"), json={"error": "poison"})
        assert response.json() == message | {
            "success": True,
            "status": "dead_letter",
            "consumerGroup": "__QUEUE_MODE__",
        }
        assert data(await api.pop(queue)) == [2]
        [letter] = await dead_letters(api, queue=queue)
        assert (letter["data"], letter["errorMessage"]) == (1, "poison")
        assert letter["messageId"] == pushed["message_id"]

    async def test_what_a_group_has_consumed(self, api: Api, queue: str) -> None:
        await api.push(queue, 1)
        answer = await api.pop(queue, consumerGroup="g", subscriptionMode="all", autoAck="true")
        assert answer is not None
        [message] = answer["messages"]
        url = address(message, "/dlq?consumerGroup=g")
        for _ in range(2):
            assert (await api.http.post(url)).status_code == 200
        [letter] = await dead_letters(api, queue=queue)
        assert (letter["consumerGroup"], letter["errorMessage"]) == ("g", None)

    async def test_refusals(self, api: Api, queue: str) -> None:
        await api.push(queue, 1, 2, 3)
        answer = await api.pop(queue, batch=1)
        assert answer is not None
        [message] = answer["messages"]
        refused(await api.http.post(address(message, "/dlq")), 409, "message_leased")
        last = (await api.http.get("/api/v1/messages", params={"queue": queue})).json()["messages"]
        refused(await api.http.post(address(last[0], "/dlq")), 409, "message_not_next")
        body = {"consumerGroup": "never"}
        refused(await api.http.post(address(message, "/dlq"), json=body), 404, "consumer_not_found")
        unknown = message | {"transactionId": "never"}
        refused(await api.http.post(address(unknown, "/dlq")), 404, "message_not_found")
        assert (await api.ack(message))["success"] is True
        assert await dead_letters(api, queue=queue) == []


@pytest.mark.parametrize(
    ("method", "path", "body", "error"),
    [
        ("POST", "/api/v1/dlq/x/replay", None, "id='x' is not a UUID"),
        ("POST", "/api/v1/dlq/%00/replay", None, "id='\\x00' is not a UUID"),
        ("POST", "/api/v1/dlq/%C3%A9/replay", None, "id='é' is not a UUID"),
        ("DELETE", "/api/v1/messages/x/t", None, "partitionId='x' is not a UUID"),
        ("POST", "/api/v1/messages/x/t/retry", None, "partitionId='x' is not a UUID"),
        ("POST", "/api/v1/messages/x/t/dlq", None, "partitionId='x' is not a UUID"),
        ("POST", "/api/v1/messages/UUID/%00/dlq", None, "transactionId must not contain U+0000"),
        ("POST", "/api/v1/messages/UUID/t/retry", "[]", "Expected `object`, got `array`"),
        ("POST", "/api/v1/messages/UUID/t/dlq", '{"error":1}', "error: expected `str | null`"),
        ("POST", "/api/v1/messages/UUID/t/dlq", '{"error":"\\u0000"}', "error must not contain"),
        (
            "POST",
            "/api/v1/messages/UUID/t/retry",
            '{"consumerGroup":"\\u0000"}',
            "consumerGroup must not contain U+0000",
        ),
    ],
)
async def test_bad_addresses(
    api: Api, method: str, path: str, body: str | None, error: str
) -> None:
    url = path.replace("UUID", str(uuid4()))
    response = await api.http.request(method, url, content=body)
    assert refused(response, 400, None).startswith(error)


async def test_odd_names_come_back(api: Api) -> None:
    queue = unique("ö/ a+b%")
    transaction_id = "t ä+%?#\U0001f600"
    await api.push(queue, 1, transactionId=transaction_id, partition="p/ü")
    answer = await api.pop(queue, consumerGroup="g ü", subscriptionMode="all")
    assert answer is not None
    [message] = answer["messages"]
    await api.ack(message, "dlq", error="é\0")
    [letter] = await dead_letters(api, queue=queue, partition="p/ü", consumerGroup="g ü")
    assert letter["transactionId"] == transaction_id
    assert letter["errorMessage"] == "é\ufffd"
    moved = await api.http.post(f"/api/v1/dlq/{letter['id']}/replay")
    assert (moved.json()["queue"], moved.json()["partition"]) == (queue, "p/ü")


async def test_any_json_value(api: Api, queue: str) -> None:
    values = [None, 0, "", [], {}, "\u2028"]
    for value in values:
        await bury(api, queue, value)
    assert [m["data"] for m in await dead_letters(api, queue=queue)][::-1] == values
