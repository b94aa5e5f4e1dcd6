"""/api/v1/traces: stored for a message, found by it and by name."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from tests.http.api import Api, Json, quote, unique

VERBATIM = '{"b": 1.0, "a":[1e2, "\\u0000"], "a": null}'


async def pushed(api: Api, queue: str, transaction_id: str = "t") -> Json:
    """Push a message; returns its address."""
    await api.push(queue, 1, transactionId=transaction_id)
    answer = (await api.http.get("/api/v1/messages", params={"queue": queue})).json()
    [message] = answer["messages"]
    return {key: message[key] for key in ("partitionId", "transactionId")}


async def trace(api: Api, message: Json, data: Any = None, **more: Any) -> str:
    body = {**message, "data": data, **more}
    response = await api.http.post("/api/v1/traces", json=body)
    assert response.status_code == 201, response.text
    answer = response.json()
    assert answer["success"] is True
    return str(answer["traceId"])


async def of_message(api: Api, message: Json, **params: Any) -> list[Json]:
    path = f"/api/v1/traces/{message['partitionId']}/{quote(message['transactionId'])}"
    response = await api.http.get(path, params=params)
    assert response.status_code == 200, response.text
    traces: list[Json] = response.json()["traces"]
    return traces


async def of_name(api: Api, name: str, **params: Any) -> Json:
    response = await api.http.get(f"/api/v1/traces/by-name/{quote(name)}", params=params)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    assert answer["traceName"] == name
    return answer


async def test_what_a_trace_tells(api: Api, queue: str) -> None:
    message = await pushed(api, queue)
    names = [unique("n"), unique("n")]
    trace_id = await trace(
        api,
        message,
        {"step": 1},
        consumerGroup="g",
        traceNames=[*names, names[0]],
        eventType="warn",
    )
    [found] = await of_message(api, message)
    assert found.pop("createdAt")
    assert found == message | {
        "id": trace_id,
        "queue": queue,
        "partition": "Default",
        "consumerGroup": "g",
        "traceNames": sorted(names),
        "eventType": "warn",
        "data": {"step": 1},
    }
    for name in names:
        answer = await of_name(api, name)
        assert [t["id"] for t in answer["traces"]] == [trace_id]
        assert answer["total"] == 1


async def test_defaults(api: Api, queue: str) -> None:
    message = await pushed(api, queue)
    await trace(api, message, traceNames=None, consumerGroup=None, eventType=None)
    [found] = await of_message(api, message)
    assert (found["consumerGroup"], found["eventType"]) == ("__QUEUE_MODE__", "info")
    assert (found["traceNames"], found["data"]) == ([], None)


async def test_data_stays_verbatim(api: Api, queue: str) -> None:
    message = await pushed(api, queue)
    body = f'{{"partitionId":"{message["partitionId"]}","transactionId":"t","data":{VERBATIM}}}'
    assert (await api.http.post("/api/v1/traces", content=body)).status_code == 201
    response = await api.http.get(f"/api/v1/traces/{message['partitionId']}/t")
    assert f'"data":{VERBATIM},' in response.text


async def test_order_and_pages(api: Api, queue: str) -> None:
    message = await pushed(api, queue)
    name = unique("n")
    for number in range(4):
        await trace(api, message, number, traceNames=[name])
    assert [t["data"] for t in await of_message(api, message)] == [0, 1, 2, 3]
    assert [t["data"] for t in await of_message(api, message, limit=2, offset=1)] == [1, 2]
    answer = await of_name(api, name, limit=2, offset=1)
    assert [t["data"] for t in answer["traces"]] == [2, 1]
    assert (answer["total"], answer["limit"], answer["offset"]) == (4, 2, 1)
    moment = answer["traces"][1]["createdAt"]
    until = await of_name(api, name, to=moment)
    assert ([t["data"] for t in until["traces"]], until["total"]) == ([0], 1)
    since = await of_name(api, name, **{"from": moment})
    assert [t["data"] for t in since["traces"]] == [3, 2, 1]


async def test_names(api: Api, queue: str) -> None:
    message = await pushed(api, queue)
    stem = unique("Order ü/")
    for names in ([f"{stem}a"], [f"{stem}a", f"{stem}b"]):
        await trace(api, message, traceNames=names)
    response = await api.http.get("/api/v1/traces/names", params={"search": stem.lower()})
    answer = response.json()
    assert [(n["traceName"], n["traceCount"]) for n in answer["traceNames"]] == [
        (f"{stem}a", 2),
        (f"{stem}b", 1),
    ]
    assert answer["traceNames"][0]["lastTraceAt"]
    params = {"search": stem, "limit": 1, "offset": 1}
    answer = (await api.http.get("/api/v1/traces/names", params=params)).json()
    assert ([n["traceName"] for n in answer["traceNames"]], answer["total"]) == ([f"{stem}b"], 2)
    answer = (await api.http.get("/api/v1/traces/names", params=params | {"offset": 9})).json()
    assert (answer["traceNames"], answer["total"]) == ([], 2)
    assert (await of_name(api, f"{stem}b"))["total"] == 1


async def test_a_name_may_look_like_an_address(api: Api, queue: str) -> None:
    message = await pushed(api, queue)
    name = str(uuid4())
    await trace(api, message, traceNames=[name])
    assert (await of_name(api, name))["total"] == 1


async def test_they_go_with_their_queue(api: Api, queue: str) -> None:
    message = await pushed(api, queue)
    name = unique("n")
    await trace(api, message, traceNames=[name])
    await api.http.delete(f"/api/v1/resources/queues/{queue}")
    assert await of_message(api, message) == []
    assert (await of_name(api, name))["total"] == 0


async def test_an_unknown_partition(api: Api) -> None:
    body = {"partitionId": str(uuid4()), "transactionId": "t", "data": 1}
    response = await api.http.post("/api/v1/traces", json=body)
    assert response.status_code == 404
    assert response.json() == {
        "error": f"no partition has the id {body['partitionId']}",
        "code": "partition_not_found",
    }


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("", "the request needs a JSON body"),
        ("{}", "Object missing required field `transactionId`"),
        ('{"transactionId":"t","partitionId":"UUID"}', "Object missing required field `data`"),
        ('{"transactionId":1,"partitionId":"UUID","data":1}', "transactionId: expected `str`"),
        ('{"transactionId":"","partitionId":"UUID","data":1}', "transactionId must not be empty"),
        ('{"transactionId":"t","partitionId":"x","data":1}', "partitionId='x' is not a UUID"),
        ('{MESSAGE,"consumerGroup":"\\u0000"}', "consumerGroup must not contain U+0000"),
        ('{MESSAGE,"eventType":"\\u0000"}', "eventType must not contain U+0000"),
        ('{MESSAGE,"eventType":7}', "eventType: expected `str | null`, got `int`"),
        ('{MESSAGE,"traceNames":"n"}', "traceNames: expected `array | null`, got `str`"),
        ('{MESSAGE,"traceNames":["a",""]}', "traceNames[1] must not be empty"),
        ('{MESSAGE,"traceNames":["\\u0000"]}', "traceNames[0] must not contain U+0000"),
        ('{MESSAGE,"traceNames":[MANY]}', "traceNames has 101 names, at most 100 are allowed"),
        ('{"transactionId":"t","partitionId":"UUID","data":"\\ud800"}', "the body is not valid"),
    ],
)
async def test_bad_bodies(api: Api, body: str, error: str) -> None:
    body = body.replace("MESSAGE", '"transactionId":"t","partitionId":"UUID","data":1')
    body = body.replace("UUID", str(uuid4())).replace("MANY", ",".join(['"n"'] * 101))
    response = await api.http.post("/api/v1/traces", content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"].startswith(error)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("x/t", "partitionId='x' is not a UUID"),
        ("UUID/%00", "transactionId must not contain U+0000"),
        ("UUID/t?limit=-1", "limit=-1 is out of range (0 to 10000)"),
        ("by-name/%00", "name must not contain U+0000"),
        ("by-name/n?offset=-1", "offset=-1 is out of range"),
        ("by-name/n?from=x", "from='x' is not an ISO-8601 timestamp"),
        ("names?limit=x", "limit='x' is not an integer"),
        ("names?search=%00", "search must not contain U+0000"),
    ],
)
async def test_bad_queries(api: Api, path: str, error: str) -> None:
    response = await api.http.get(f"/api/v1/traces/{path.replace('UUID', str(uuid4()))}")
    assert response.status_code == 400, response.text
    assert response.json()["error"].startswith(error)
