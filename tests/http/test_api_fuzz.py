"""Whatever JSON and whatever query strings a client sends, no answer is a 5xx.

Invariant: each answer is a 2xx or 4xx, an error names itself in JSON, and the broker goes on.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http.api import quote, unique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.brokers import LiveBroker

EXAMPLES = int(os.environ.get("QUEEN_FUZZ_EXAMPLES", "100"))

ROUTES = [
    "/api/v1/push",
    "/api/v1/ack",
    "/api/v1/ack/batch",
    "/api/v1/lease/some-lease/extend",
    "/api/v1/configure",
]
KEYS = [
    "items", "queue", "partition", "payload", "transactionId", "traceId", "partitionId", "status",
    "consumerGroup", "leaseId", "error", "acknowledgments", "seconds", "namespace", "task",
    "options", "mode", "leaseTime", "retryLimit", "deadLetterQueue", "dedupWindowSeconds",
]  # fmt: skip
WORDS = ["merge", "replace", "completed", "failed", "dlq", "retry", "Default", "__QUEUE_MODE__"]

# The characters that break something somewhere: NUL, controls, quotes, surrogates as escapes.
texts = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.sampled_from([*WORDS, "", "\0", "a\0b", "\x1e", "\ud800", "x" * 3_000, "ü" * 600]),
    st.uuids().map(str),
)
numbers = st.one_of(
    st.integers(), st.integers(-(10**40), 10**40), st.floats(), st.sampled_from([0, -1, 2**31])
)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), texts), inner, max_size=5),
    ),
    max_leaves=15,
)
objects = st.dictionaries(st.sampled_from(KEYS), values, max_size=6)
pushes = st.fixed_dictionaries(
    {
        "items": st.lists(
            st.fixed_dictionaries(
                {"queue": texts, "payload": values},
                optional={"partition": texts, "transactionId": texts, "traceId": texts},
            ),
            max_size=4,
        )
    }
)
acks = st.fixed_dictionaries(
    {"transactionId": texts, "partitionId": texts},
    optional={"status": texts, "leaseId": texts, "error": texts, "consumerGroup": texts},
)
batches = st.fixed_dictionaries({"acknowledgments": st.lists(acks, max_size=4)})
configures = st.fixed_dictionaries(
    {"queue": texts}, optional={"namespace": texts, "task": texts, "options": objects}
)
json_bodies = st.one_of(values, objects, pushes, acks, batches, configures).map(
    lambda value: json.dumps(value).encode()
)
bodies = st.one_of(
    json_bodies,
    st.binary(max_size=100),
    st.tuples(json_bodies, st.integers(0, 200), st.binary(max_size=3)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
    ),
)

PARAMETERS = [
    "batch", "partitions", "autoAck", "leaseSeconds", "consumerGroup", "subscriptionMode",
    "subscriptionFrom", "namespace", "task", "wait", "conflation", "autopilot",
]  # fmt: skip
parameters = st.dictionaries(
    st.sampled_from(PARAMETERS),
    st.one_of(
        st.text(st.characters(codec="utf-8"), max_size=12),
        st.integers().map(str),
        st.integers(-2, 300).map(str),
        st.datetimes().map(str),
        st.sampled_from(["true", "false", "True", "all", "new", "now", "\0", ""]),
    ),
    max_size=6,
)
raw_queries = st.text(st.sampled_from("abc=&%+;01fF[]/?:@ "), max_size=40)


@pytest.fixture(scope="module")
def http(shared_broker: LiveBroker) -> Iterator[httpx.Client]:
    # Synchronous: hypothesis calls a plain function again and again.
    with httpx.Client(base_url=shared_broker.url, timeout=30) as client:
        yield client


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, (response.request.url, response.text)
    if response.status_code >= 400:
        assert response.json()["error"]
    elif response.status_code != 204:
        response.json()


fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("route", ROUTES)
@fuzzed
@given(body=bodies)
def test_no_body_is_a_5xx(http: httpx.Client, route: str, body: bytes) -> None:
    check(http.post(route, content=body))


@fuzzed
@given(body=pushes)
def test_what_was_pushed_comes_back(http: httpx.Client, body: dict[str, Any]) -> None:
    """Not only no 5xx: an accepted payload is read as what it was."""
    queue = unique("fuzz")
    for item in body["items"]:
        item["queue"] = queue
        item["partition"] = "p"
        item.pop("transactionId", None)
    text = json.dumps(body)
    response = http.post("/api/v1/push", content=text)
    check(response)
    if response.status_code != 201 or not body["items"]:
        return
    answer = http.get(f"/api/v1/pop/queue/{queue}?autoAck=true").json()
    got = [json.dumps(message["data"]) for message in answer["messages"]]
    assert got == [json.dumps(item["payload"]) for item in json.loads(text)["items"]]


@pytest.mark.parametrize("path", ["/api/v1/pop", "/api/v1/pop/queue/fuzz-q"])
@fuzzed
@given(query=st.one_of(parameters.map(lambda p: str(httpx.QueryParams(p))), raw_queries))
def test_no_query_is_a_5xx(http: httpx.Client, path: str, query: str) -> None:
    url = httpx.URL(http.base_url).copy_with(raw_path=f"{path}?{query}&timeout=1".encode())
    check(http.get(url))


@fuzzed
@given(queue=texts, partition=texts)
def test_no_name_in_a_path_is_a_5xx(http: httpx.Client, queue: str, partition: str) -> None:
    def encoded(name: str) -> str:
        return quote(name.encode(errors="surrogatepass").decode("latin-1"))

    for path in (
        f"/api/v1/pop/queue/{encoded(queue)}/partition/{encoded(partition)}",
        f"/api/v1/resources/queues/{encoded(queue)}",
    ):
        check(http.get(httpx.URL(http.base_url).copy_with(raw_path=path.encode())))
