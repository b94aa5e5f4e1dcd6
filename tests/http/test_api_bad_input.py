"""Bad input, each with the answer that tells the client what to change; never a 5xx."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from tests.http.api import Api, data
from tests.http.raw import ask, connect

if TYPE_CHECKING:
    from tests.brokers import LiveBroker

POSTS = ["/api/v1/push", "/api/v1/ack", "/api/v1/ack/batch", "/api/v1/configure"]
UUID = "00000000-0000-7000-8000-000000000000"

# A body for each route that fails only where PLACE stands.
BODIES = {
    "/api/v1/push": b'{"items":[{"queue":"q","payload":PLACE}]}',
    "/api/v1/ack": b'{"transactionId":"t","partitionId":"p","error":PLACE}',
    "/api/v1/ack/batch": b'{"acknowledgments":[{"transactionId":"t","partitionId":"p","x":PLACE}]}',
    "/api/v1/configure": b'{"queue":"q","options":{"leaseTime":PLACE}}',
}


@pytest.mark.parametrize("route", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"nonsense",
        b"{'items':[]}",
        b'{"items":[]}{}',
        b'{"items":[],}',
        b"[]",
        b"null",
        b"1",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xef\xbb\xbf{}",
        b"\x00",
    ],
    ids=lambda body: repr(body[:16]),
)
async def test_a_body_that_is_no_object(api: Api, route: str, body: bytes) -> None:
    response = await api.http.post(route, content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]


@pytest.mark.parametrize("route", POSTS)
@pytest.mark.parametrize(
    "value",
    [
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"\xc0\x80"',
        b'"\\ud800"',
        b'"\\udc00\\ud800"',
        b'"\\ud83dx"',
        b'"\x01"',
        b'"\n"',
        b'"\\x"',
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"+1",
        b"01",
        b"1.",
        b".5",
        b"0x1",
        b"tru",
        b"1e",
        b"[1,]",
        b"{1:2}",
        b'{"a"}',
        b"[" * 5_000 + b"]" * 5_000,
    ],
    ids=lambda value: repr(value[:16]),
)
async def test_a_value_that_is_no_json(api: Api, route: str, value: bytes) -> None:
    """In a payload and in a key that is skipped too: what is stored must come out as JSON."""
    response = await api.http.post(route, content=BODIES[route].replace(b"PLACE", value))
    assert response.status_code == 400, response.text


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{}", "Object missing required field `items`"),
        (b'{"items":{}}', "items: expected `array`, got `object`"),
        (b'{"items":[1]}', "items[0]: expected `object`, got `int`"),
        (b'{"items":[{"payload":1}]}', "items[0]: object missing required field `queue`"),
        (b'{"items":[{"queue":"q"}]}', "items[0]: object missing required field `payload`"),
        (
            b'{"items":[{"queue":"q","payload":1},{"queue":1,"payload":1}]}',
            "items[1].queue: expected `str`, got `int`",
        ),
        (b'{"items":[{"queue":null,"payload":1}]}', "items[0].queue: expected `str`, got `null`"),
        (b'{"items":[{"queue":"","payload":1}]}', "items[0].queue must not be empty"),
        (
            b'{"items":[{"queue":"q","payload":1,"partition":""}]}',
            "items[0].partition must not be empty",
        ),
        (
            b'{"items":[{"queue":"q","payload":1,"transactionId":7}]}',
            "items[0].transactionId: expected `str | null`, got `int`",
        ),
        (
            b'{"items":[{"queue":"a\\u0000b","payload":1}]}',
            "items[0].queue must not contain U+0000: 'a\\x00b'",
        ),
    ],
    ids=range(11),
)
async def test_a_push_names_the_item_and_the_field(api: Api, body: bytes, error: str) -> None:
    response = await api.http.post("/api/v1/push", content=body)
    assert response.status_code == 400
    assert response.json()["error"] == error


@pytest.mark.parametrize("field", ["queue", "partition", "transactionId"])
async def test_a_long_name_in_a_push(api: Api, field: str) -> None:
    item = {"queue": "q", "payload": 1, field: "x" * 10_000}
    response = await api.http.post("/api/v1/push", json={"items": [item]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.startswith(f"items[0].{field} is longer than ")
    assert len(error) < 300


async def test_a_bad_item_writes_nothing(api: Api, queue: str) -> None:
    good = {"queue": queue, "payload": 1}
    response = await api.http.post("/api/v1/push", json={"items": [good, {"queue": queue}]})
    assert response.status_code == 400
    assert await api.pop(queue) is None


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/api/v1/ack", {"partitionId": UUID}),
        ("/api/v1/ack", {"transactionId": "t"}),
        ("/api/v1/ack", {"transactionId": 1, "partitionId": UUID}),
        ("/api/v1/ack", {"transactionId": "t", "partitionId": UUID, "status": 1}),
        ("/api/v1/ack", {"transactionId": "t", "partitionId": UUID, "leaseId": {}}),
        ("/api/v1/ack", {"transactionId": "t\0", "partitionId": UUID}),
        ("/api/v1/ack", {"transactionId": "t", "partitionId": UUID, "leaseId": "\0"}),
        ("/api/v1/ack", {"transactionId": "t", "partitionId": UUID, "consumerGroup": "\0"}),
        ("/api/v1/ack", {"transactionId": "t", "partitionId": UUID, "consumerGroup": "g" * 600}),
        ("/api/v1/ack/batch", {}),
        ("/api/v1/ack/batch", {"acknowledgments": {}}),
        ("/api/v1/ack/batch", {"acknowledgments": [None]}),
        ("/api/v1/configure", {}),
        ("/api/v1/configure", {"queue": 1}),
        ("/api/v1/configure", {"queue": ""}),
        ("/api/v1/configure", {"queue": "q\0"}),
        ("/api/v1/configure", {"queue": "q", "options": []}),
        ("/api/v1/configure", {"queue": "q", "mode": "rename"}),
        ("/api/v1/configure", {"queue": "q", "namespace": "\0"}),
        ("/api/v1/configure", {"queue": "q", "namespace": 1}),
    ],
    ids=str,
)
async def test_wrong_types_and_missing_fields(api: Api, route: str, body: object) -> None:
    response = await api.http.post(route, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]


async def test_a_bad_uuid_is_an_error_of_its_item(api: Api) -> None:
    for bad in ("", "nonsense", UUID + "0", "ü" * 36, "x" * 10_000, "\0"):
        result = await api.ack(
            {"transactionId": "t", "partitionId": bad, "leaseId": None, "consumerGroup": None}
        )
        assert (result["success"], result["dlq"], result["noop"]) == (False, False, False)
        assert result["error"].startswith("unresolvable: ")


@pytest.mark.parametrize(
    "query",
    [
        "batch=0",
        "batch=-1",
        "batch=99999999999999999999999",
        "batch=1.5",
        "batch=one",
        "batch=%D9%A3",  # a digit, but not one of ours
        "partitions=x",
        "partitions=1e3",
        "leaseSeconds=2147483648",
        "leaseSeconds=--1",
        "timeout=-1",
        "timeout=86400001",
        "timeout=x",
        "wait=perhaps",
        "autoAck=2",
        "conflation=x",
        "subscriptionMode=sideways",
        "subscriptionFrom=yesterday",
        "subscriptionFrom=99999-01-01",
        "subscriptionFrom=0001-01-01T00:00:00%2B10:00",
        "consumerGroup=%00",
        "consumerGroup=" + "g" * 513,
        "consumerGroup=%FF",
        "x=%ED%A0%80",
        "&".join(f"p{n}=1" for n in range(101)),
    ],
    ids=lambda query: query[:32],
)
async def test_a_bad_query(shared_broker: LiveBroker, query: str) -> None:
    answer = await ask(shared_broker, f"GET /api/v1/pop/queue/q?{query}")
    assert answer.status == 400, answer
    assert answer.json()["error"]


@pytest.mark.parametrize(
    "query", ["", "&&&", "batch=", "wait=&timeout=", "unknown=1", "batch=9&batch=1"]
)
async def test_a_query_that_is_odd_but_fine(api: Api, queue: str, query: str) -> None:
    await api.push(queue, 1, 2)
    response = await api.http.get(f"/api/v1/pop/queue/{queue}?{query}")
    assert response.status_code == 200


async def test_huge_numbers_in_a_query_within_range(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    most = 2**31 - 1
    answer = await api.pop(queue, batch=most, partitions=most, leaseSeconds=most)
    assert data(answer) == [1]
    assert answer is not None
    extended = await api.http.post(
        f"/api/v1/lease/{answer['leaseId']}/extend", json={"seconds": most}
    )
    assert extended.json()["success"] is True


@pytest.mark.parametrize("date", ["0001-01-01", "9999-12-31T23:59:59.999999Z"])
async def test_the_ends_of_time(api: Api, queue: str, date: str) -> None:
    await api.push(queue, 1)
    answer = await api.pop(queue, consumerGroup="g", subscriptionFrom=date)
    assert data(answer) == ([1] if date < "2" else [])


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/", 404),
        ("/api/v1/nonsense", 404),
        ("/api/v1/push/", 404),
        ("/api/v1//push", 404),
        ("/API/v1/push", 404),
        ("/api/v1/pop/queue/a/b", 404),
        ("/api/v1/pop/queue/a/partition", 404),
        ("/api/v1/pop/queue/a/partition/b/c", 404),
        ("/api/v1/pop/queue/%00", 400),
        ("/api/v1/pop/queue/%FF", 400),
        ("/api/v1/pop/queue/%ED%A0%80", 400),
        ("/api/v1/pop/queue/", 400),
        ("/api/v1/pop/queue//partition/p", 400),
        ("/api/v1/pop/queue/q/partition/", 400),
        ("/api/v1/pop/queue/" + "x" * 513, 400),
        ("/api/v1/pop/queue/" + "x" * 10_000, 414),
        ("/api/v1/pop/queue/%zz", 204),
        ("/api/v1/pop/queue/%", 204),
        ("/api/v1/pop/queue/%2", 204),
        ("/api/v1/pop/queue/..", 204),
        ("/api/v1/pop/queue/%2F%2F", 204),
        ("/api/v1/resources/queues/%00", 400),
        ("/api/v1/resources/queues/nobody", 404),
        ("/api/v1/pop/queue/" + "%C3%BC" * 256, 204),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_paths(shared_broker: LiveBroker, target: str, status: int) -> None:
    answer = await ask(shared_broker, f"GET {target}")
    assert answer.status == status, answer
    if status != 204:
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]


@pytest.mark.parametrize(
    "line", [b"GET /api/v1/pop/queue/\xc3\xbc", b"GET /api/v1/pop/queue/\xff?x=\xff"]
)
async def test_a_target_that_is_not_ascii(shared_broker: LiveBroker, line: bytes) -> None:
    assert (await ask(shared_broker, line)).status in (400, 204)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/api/v1/push", "POST"),
        ("PUT", "/api/v1/push", "POST"),
        ("OPTIONS", "/api/v1/push", "POST"),
        ("HEAD", "/api/v1/push", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/api/v1/pop/queue/q", "GET"),
        ("HEAD", "/api/v1/pop/queue/q", "GET"),
        ("PATCH", "/api/v1/resources/queues/q", "DELETE, GET, HEAD"),
        ("GET", "/api/v1/lease/x/extend", "POST"),
    ],
)
async def test_a_wrong_method(
    shared_broker: LiveBroker, method: str, path: str, allow: str
) -> None:
    answer = await ask(shared_broker, f"{method} {path}", without_body=method == "HEAD")
    assert answer.status == 405
    assert answer.headers["allow"] == allow


async def test_head_is_get_without_the_body(shared_broker: LiveBroker) -> None:
    connection = await connect(shared_broker)
    await connection.send("HEAD /status")
    head = await connection.receive(without_body=True)
    await connection.send("GET /status")
    get = await connection.receive()
    assert head.status == 200
    assert int(head.headers["content-length"]) == len(get.body)
    await connection.aclose()


async def test_a_body_of_65_mib(shared_broker: LiveBroker) -> None:
    size = 65 * 1024 * 1024
    connection = await connect(shared_broker)
    await connection.stream.send_all(
        b"POST /api/v1/push HTTP/1.1\r\nhost: b\r\ncontent-length: %d\r\n\r\n" % size
    )
    with trio.fail_after(5):
        answer = await connection.receive()
    assert answer.status == 413
    assert answer.json()["error"]
    await connection.aclose()


async def test_a_chunked_body_of_65_mib(shared_broker: LiveBroker) -> None:
    connection = await connect(shared_broker)
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"

    async def send() -> None:
        try:
            await connection.stream.send_all(
                b"POST /api/v1/push HTTP/1.1\r\nhost: b\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            for _ in range(65):
                await connection.stream.send_all(chunk)
        except trio.BrokenResourceError:
            pass  # it stopped reading

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert (await connection.receive()).status == 413
            nursery.cancel_scope.cancel()
    await connection.aclose()


async def test_a_payload_of_many_mib_comes_back(api: Api, queue: str) -> None:
    """Larger than what a pop answers with by default: one message is always delivered."""
    payload = "x" * (20 * 1024 * 1024)
    await api.push(queue, payload, "small")
    assert data(await api.pop(queue, autoAck=True)) == [payload]
    assert data(await api.pop(queue, autoAck=True)) == ["small"]


async def test_nul_in_strings_that_are_stored(api: Api, queue: str) -> None:
    [pushed] = await api.push(queue, {"a\0": "b\0"})
    assert pushed["status"] == "queued"
    answer = await api.pop(queue)
    assert data(answer) == [{"a\0": "b\0"}]
    assert answer is not None
    result = await api.ack(answer["messages"][0], "dlq", error="a\0b")
    assert result["dlq"] is True
