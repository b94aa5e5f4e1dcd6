"""/streams/v1: queries, state and cycles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest

from queen_trio.model.streams import MAX_KEY_BYTES, key_prefix, ripe_at, state_key
from tests.http.api import Api, Json, data, unique

if TYPE_CHECKING:
    import httpx

GROUP = "streams.test"
SEPARATOR = "\u001f"


class Query:
    """A registered query on a queue with one partition of `count` messages, as a test drives it."""

    def __init__(self, api: Api, queue: str, query_id: str) -> None:
        self.api = api
        self.queue = queue
        self.id = query_id
        self.partition_id = ""

    async def pop(self, batch: int = 200) -> list[Json]:
        """The next batch of the source."""
        answer = await self.api.pop(
            self.queue, consumerGroup=GROUP, subscriptionMode="all", batch=batch, partitions=4
        )
        messages: list[Json] = [] if answer is None else answer["messages"]
        if messages:
            self.partition_id = messages[0]["partitionId"]
        return messages

    async def cycle(self, **more: Any) -> Json:
        """The answer to a cycle."""
        body = {"query_id": self.id, "partition_id": self.partition_id, "consumer_group": GROUP}
        response = await self.api.http.post("/streams/v1/cycle", json=body | more)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def upsert(self, **values: Any) -> None:
        answer = await self.cycle(state_ops=[op(key, value) for key, value in values.items()])
        assert answer["success"] is True, answer

    async def state(self, **narrow: Any) -> dict[str, Any]:
        body = {"query_id": self.id, "partition_id": self.partition_id, **narrow}
        response = await self.api.http.post("/streams/v1/state/get", json=body)
        answer = response.json()
        assert answer["success"] is True, answer
        return {row["key"]: row["value"] for row in answer["rows"]}


def op(key: Any, value: Any) -> Json:
    return {"type": "upsert", "key": key, "value": value}


def ack(messages: list[Json], count: int | None = None) -> Json:
    """The ack of the first `count` of the messages, or of all."""
    count = len(messages) if count is None else count
    last = messages[count - 1]
    return {
        "transactionId": last["transactionId"],
        "leaseId": last["leaseId"],
        "status": "completed",
        "count": count,
    }


async def register(api: Api, name: str, **more: Any) -> httpx.Response:
    body = {"name": name, "source_queue": "s", "config_hash": "h", "reset": False} | more
    response: httpx.Response = await api.http.post("/streams/v1/queries", json=body)
    return response


@pytest.fixture
async def query(api: Api, queue: str) -> Query:
    """A query, and ten messages in its source."""
    response = await register(api, unique("query"), source_queue=queue)
    await api.push(queue, *range(10))
    return Query(api, queue, response.json()["query_id"])


@pytest.fixture
async def popped(query: Query) -> list[Json]:
    """The ten messages, leased."""
    return await query.pop()


# -- queries -----------------------------------------------------------------------------------


async def test_a_query_is_registered_once(api: Api) -> None:
    name = unique()
    first = (await register(api, name, sink_queue="sink")).json()
    assert UUID(first["query_id"])
    assert first == {
        "success": True,
        "query_id": first["query_id"],
        "name": name,
        "fresh": True,
        "reset": False,
    }
    assert (await register(api, name)).json() == first | {"fresh": False}


async def test_other_operators_need_a_reset(query: Query, popped: list[Json]) -> None:
    await query.upsert(a=1)
    name = unique()
    first = (await register(query.api, name)).json()
    other = Query(query.api, query.queue, first["query_id"])
    other.partition_id = query.partition_id
    await other.upsert(a=2)

    refused = await register(query.api, name, config_hash="another")
    assert refused.status_code == 409
    assert refused.json()["error"] == "config_hash mismatch"
    assert await other.state() == {"a": 2}

    reset = (await register(query.api, name, config_hash="another", reset=True)).json()
    assert (reset["query_id"], reset["fresh"], reset["reset"]) == (other.id, False, True)
    assert await other.state() == {}
    assert await query.state() == {"a": 1}, "the state of another query"
    assert (await register(query.api, name, config_hash="another")).status_code == 200
    assert (await register(query.api, name)).status_code == 409


async def test_a_source_that_is_no_queue(api: Api) -> None:
    assert (await register(api, unique(), source_queue="")).json()["success"] is True


# -- state -------------------------------------------------------------------------------------


async def test_state_is_verbatim(query: Query, popped: list[Json]) -> None:
    value = '{"n": 12345678901234567890.10, "e":1e400,\t"s":"\\u00e9\\/"}'
    key = '"\\u0000 \\u001f\\u00e9\\/"'
    await query.api.http.post(
        "/streams/v1/cycle",
        content=(
            f'{{"query_id":"{query.id}","partition_id":"{query.partition_id}","consumer_group":"g",'
            f'"state_ops":[{{"type":"upsert","key":{key},"value":{value}}}]}}'
        ),
    )
    body = {"query_id": query.id, "partition_id": query.partition_id, "keys": ["\0 \u001fé/"]}
    response = await query.api.http.post("/streams/v1/state/get", json=body)
    assert f'"value":{value}' in response.text
    assert json.loads(response.text.replace("1e400", "1"))["rows"][0]["key"] == "\0 \u001fé/"


async def test_keys_of_any_kind(query: Query, popped: list[Json]) -> None:
    keys = ["1", 1, 1.5, None, True, ["a"], {"k": 1}, ""]
    await query.cycle(state_ops=[op(key, index) for index, key in enumerate(keys)])
    body = {"query_id": query.id, "partition_id": query.partition_id}
    for index, key in enumerate(keys):
        narrow = body | {"keys": [key]}
        response = await query.api.http.post("/streams/v1/state/get", json=narrow)
        assert response.json()["rows"] == [{"key": key, "value": index}]


async def test_changes_of_state(query: Query, popped: list[Json]) -> None:
    await query.upsert(a=1, b=2, c=3)
    await query.cycle(
        state_ops=[
            {"type": "delete", "key": "a"},
            {"type": "delete", "key": "unknown"},
            op("b", None),
            op("c", 4),
            op("c", 5),
            {"type": "delete", "key": "d"},
            op("d", 6),
        ]
    )
    assert await query.state() == {"b": None, "c": 5, "d": 6}
    assert await query.state(keys=["d", "b", "x", "d"]) == {"b": None, "d": 6}


async def test_state_by_prefix(query: Query, popped: list[Json]) -> None:
    names = ["a", f"a{SEPARATOR}1", f"a{SEPARATOR}2", "a\U0010ffff", 'a"', "aä", "b", "ä", "%"]
    await query.cycle(state_ops=[op(name, 0) for name in names] + [op(7, 0)])
    for prefix in ("a", f"a{SEPARATOR}", "aä", 'a"', "ä", "%", "c", "a\U0010ffff"):
        found = await query.state(key_prefix=prefix)
        assert sorted(found) == sorted(name for name in names if name.startswith(prefix))
    assert len(await query.state(key_prefix="")) == len(names) + 1
    assert set(await query.state(keys=["a", "b"], key_prefix="b")) == {"b"}


async def test_state_that_is_ripe(query: Query, popped: list[Json]) -> None:
    values = {
        "a1": {"acc": 1, "windowEnd": 100},
        "a2": {"windowEnd": 100.5},
        "b1": {"windowEnd": -1},
        "never": {"windowEnd": "0"},
        "none": None,
        "list": [{"windowEnd": 1}],
        "true": {"windowEnd": True},
    }
    await query.upsert(**values)
    assert set(await query.state(ripe_at_or_before=100)) == {"a1", "b1"}
    assert set(await query.state(ripe_at_or_before=101, key_prefix="a")) == {"a1", "a2"}
    assert set(await query.state(ripe_at_or_before=101, keys=["a2", "none"])) == {"a2"}
    assert set(await query.state(ripe_at_or_before=-2)) == set()
    await query.upsert(a1={"windowEnd": 200}, b1=None)
    assert set(await query.state(ripe_at_or_before=100.5)) == {"a2"}


async def test_partitions_and_queries_don_t_share_state(
    api: Api, query: Query, popped: list[Json]
) -> None:
    await query.upsert(a=1)
    first = query.partition_id
    await api.push(query.queue, 1, partition="other")
    await query.pop()
    assert query.partition_id != first
    assert await query.state() == {}
    stranger = (await register(api, unique())).json()["query_id"]
    query.id, query.partition_id = stranger, first
    assert await query.state() == {}


# -- cycles ------------------------------------------------------------------------------------


async def test_a_cycle_commits_all_three(query: Query, popped: list[Json]) -> None:
    sink = unique("sink")
    answer = await query.cycle(
        state_ops=[op("a", 1)],
        push_items=[
            {"queue": sink, "partition": "p", "payload": {"v": 1}},
            {"queue": sink, "partition": "p", "payload": {"v": 2}},
            {"queue": sink, "payload": None},
        ],
        ack=ack(popped),
        release_lease=True,
    )
    assert answer["success"] is True
    assert answer["lease_released"] is True
    assert [result["status"] for result in answer["push_results"]] == ["queued"] * 3
    assert await query.state() == {"a": 1}
    assert data(await query.api.pop(sink, "p")) == [{"v": 1}, {"v": 2}]
    assert data(await query.api.pop(sink, "Default")) == [None]
    assert await query.pop() == []
    await query.api.push(query.queue, 10)
    assert [message["data"] for message in await query.pop()] == [10]


async def test_release_commits_to_the_end_of_the_batch(query: Query) -> None:
    popped = await query.pop(batch=4)
    answer = await query.cycle(ack=ack(popped, 2), release_lease=True)
    assert answer["lease_released"] is True
    assert [message["data"] for message in await query.pop()] == [4, 5, 6, 7, 8, 9]


async def test_without_release_the_cursor_advances_by_count(
    query: Query, popped: list[Json]
) -> None:
    for done, count in ((0, 3), (3, 2)):
        answer = await query.cycle(ack=ack(popped[done:], count), release_lease=False)
        assert (answer["success"], answer["lease_released"]) == (True, False)
    assert await query.pop() == [], "the lease stays"
    # As when the lease expires, but now.
    result = await query.api.ack(popped[5], "retry")
    assert result["success"] is True
    assert [message["data"] for message in await query.pop()] == [5, 6, 7, 8, 9]


async def test_a_repeated_cycle_under_the_same_lease_counts_once(
    query: Query, popped: list[Json]
) -> None:
    """The client repeats a request whose answer was lost: it must not skip what comes next."""
    sink = unique("sink")
    cycle = {
        "ack": ack(popped, 2),
        "release_lease": False,
        "push_items": [{"queue": sink, "payload": n} for n in range(2)],
        "state_ops": [op("a", 1)],
    }
    for _ in range(3):
        assert (await query.cycle(**cycle))["success"] is True
    assert data(await query.api.pop(sink)) == [0, 1]
    assert (await query.api.ack(popped[2], "retry"))["success"] is True
    assert [message["data"] for message in await query.pop()] == [2, 3, 4, 5, 6, 7, 8, 9]


async def test_count_up_to_the_end_of_the_batch_ends_the_lease(
    query: Query, popped: list[Json]
) -> None:
    assert (await query.cycle(ack=ack(popped), release_lease=False))["lease_released"] is True
    await query.api.push(query.queue, 10)
    assert [message["data"] for message in await query.pop()] == [10]


async def test_a_cycle_without_ack_leaves_the_source_alone(
    query: Query, popped: list[Json]
) -> None:
    sink = unique("sink")
    answer = await query.cycle(ack=None, push_items=[{"queue": sink, "payload": 1}])
    assert (answer["success"], answer["lease_released"]) == (True, False)
    assert data(await query.api.pop(sink)) == [1]
    assert (await query.cycle(ack=ack(popped)))["success"] is True


async def test_a_cycle_into_its_own_source(query: Query, popped: list[Json]) -> None:
    items = [{"queue": query.queue, "partition": popped[0]["partition"], "payload": "again"}]
    answer = await query.cycle(ack=ack(popped), push_items=items, state_ops=[op("a", 1)])
    assert answer["success"] is True
    assert [message["data"] for message in await query.pop()] == ["again"]


REFUSALS: dict[str, tuple[Json, str]] = {
    "lease": ({"leaseId": "another"}, "invalid or expired lease"),
    "count": ({"count": 11}, "ack.count is more than the leased batch has left"),
}


@pytest.mark.parametrize("what", REFUSALS)
async def test_a_refused_cycle_leaves_no_trace(query: Query, popped: list[Json], what: str) -> None:
    wrong, error = REFUSALS[what]
    sink = unique("sink")
    await query.upsert(a=1)
    answer = await query.cycle(
        ack=ack(popped) | wrong,
        release_lease=False,
        state_ops=[op("a", 2), op("b", 2)],
        push_items=[{"queue": sink, "payload": 1}],
    )
    assert answer == {"success": False, "error": error}
    assert await query.state() == {"a": 1}
    assert await query.api.pop(sink) is None
    assert (await query.cycle(ack=ack(popped)))["success"] is True


async def test_a_cycle_counts_once(query: Query, popped: list[Json]) -> None:
    assert (await query.cycle(ack=ack(popped)))["success"] is True
    again = await query.cycle(ack=ack(popped), state_ops=[op("a", 1)])
    assert again == {"success": False, "error": "invalid or expired lease"}
    assert await query.state() == {}


async def test_a_duplicate_refuses_the_cycle(query: Query, popped: list[Json]) -> None:
    sink = unique("sink")
    items = [{"queue": sink, "payload": 1, "transactionId": "t"}]
    assert (await query.cycle(push_items=items))["success"] is True
    answer = await query.cycle(push_items=items, ack=ack(popped), state_ops=[op("a", 1)])
    assert answer["success"] is False
    assert "transactionId" in answer["error"]
    assert await query.state() == {}


async def test_unknown_ids_are_logical_failures(query: Query, popped: list[Json]) -> None:
    known = query.partition_id
    query.partition_id = str(uuid4())
    answer = await query.cycle(state_ops=[op("a", 1)])
    assert answer == {"success": False, "error": "unknown partition_id"}
    query.id, query.partition_id = str(uuid4()), known
    answer = await query.cycle(state_ops=[op("a", 1)])
    assert answer == {"success": False, "error": "unknown query_id"}
    body = {"query_id": query.id, "partition_id": known, "keys": []}
    response = await query.api.http.post("/streams/v1/state/get", json=body)
    assert response.status_code == 200
    assert response.json() == {"success": False, "error": "unknown query_id"}


async def test_state_goes_with_its_partition(query: Query, popped: list[Json]) -> None:
    await query.upsert(a=1)
    await query.api.http.delete(f"/api/v1/resources/queues/{query.queue}")
    assert await query.state() == {}


# -- bad input ---------------------------------------------------------------------------------

IDS = {"query_id": str(UUID(int=1)), "partition_id": str(UUID(int=2))}
CYCLE = IDS | {"consumer_group": "g"}
ACK = {"transactionId": "t", "leaseId": "l", "status": "completed", "count": 1}

BAD = [
    ("queries", {"name": "", "config_hash": "h"}, "name"),
    ("queries", {"name": "n"}, "config_hash"),
    ("queries", {"name": "n" * 513, "config_hash": "h"}, "name"),
    ("queries", {"name": "n", "config_hash": "h", "source_queue": "a\0"}, "source_queue"),
    ("queries", {"name": "n", "config_hash": "h", "reset": 1}, "reset"),
    ("state/get", {}, "query_id"),
    ("state/get", IDS | {"query_id": "x"}, "query_id"),
    ("state/get", IDS | {"partition_id": "unknown"}, "partition_id"),
    ("state/get", IDS | {"keys": "a"}, "keys"),
    ("state/get", IDS | {"keys": ["", "a" * MAX_KEY_BYTES]}, "keys[1]"),
    ("state/get", IDS | {"key_prefix": 1}, "key_prefix"),
    ("state/get", IDS | {"ripe_at_or_before": "now"}, "ripe_at_or_before"),
    ("cycle", IDS, "consumer_group"),
    ("cycle", CYCLE | {"consumer_group": ""}, "consumer_group"),
    ("cycle", CYCLE | {"state_ops": [{"type": "merge", "key": "a"}]}, "state_ops[0].type"),
    ("cycle", CYCLE | {"state_ops": [{"type": "delete"}]}, "state_ops[0]"),
    ("cycle", CYCLE | {"state_ops": [{"type": "upsert", "key": "a"}]}, "state_ops[0]"),
    ("cycle", CYCLE | {"state_ops": [op("a" * 3000, 1)]}, "state_ops[0].key"),
    ("cycle", CYCLE | {"push_items": [{"queue": "q"}]}, "push_items[0]"),
    ("cycle", CYCLE | {"push_items": [{"queue": "", "payload": 1}]}, "push_items[0].queue"),
    ("cycle", CYCLE | {"ack": {"transactionId": "t"}}, "ack"),
    ("cycle", CYCLE | {"ack": ACK | {"leaseId": ""}}, "ack.leaseId"),
    ("cycle", CYCLE | {"ack": ACK | {"transactionId": ""}}, "ack.transactionId"),
    ("cycle", CYCLE | {"ack": ACK | {"status": "failed"}}, "ack.status"),
    ("cycle", CYCLE | {"ack": ACK | {"count": 0}, "release_lease": False}, "ack.count"),
    ("cycle", CYCLE | {"ack": ACK | {"count": None}, "release_lease": False}, "ack.count"),
    ("cycle", CYCLE | {"ack": ACK | {"count": 2**31}, "release_lease": False}, "ack.count"),
    ("cycle", CYCLE | {"release_lease": None}, "release_lease"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "names"), BAD)
async def test_bad_input_names_the_field(api: Api, route: str, body: Json, names: str) -> None:
    response = await api.http.post(f"/streams/v1/{route}", json=body)
    assert response.status_code == 400, response.text
    assert names in response.json()["error"]


# -- rules without a broker --------------------------------------------------------------------


def test_a_string_has_one_stored_form() -> None:
    assert state_key(rb'"\u00e9\/\u001F"', "k") == state_key('"é/\\u001f"'.encode(), "k")
    assert state_key(b"1.0", "k") == b"1.0"
    for text, prefix in (("é\x1fa", "é\x1f"), ('a"b', 'a"'), ("\0", ""), ("a\\b", "a\\")):
        assert state_key(json.dumps(text).encode(), "k").startswith(key_prefix(prefix))


@pytest.mark.parametrize(
    ("value", "end"),
    [
        (b'{"windowEnd":5}', 5.0),
        (b'{"windowEnd":1e400}', None),
        (b'{"windowEnd":1' + b"0" * 400 + b"}", None),
        (b'{"windowEnd":null}', None),
        (b"{}", None),
        (b'"windowEnd"', None),
    ],
)
def test_when_a_value_is_ripe(value: bytes, end: float | None) -> None:
    assert ripe_at(value) == end


async def test_a_lease_that_a_cycle_has_ended_holds_nothing_back(
    api: Api, queue: str, query: Query, popped: list[Json]
) -> None:
    """Another partition stays leased; a pop that looks at one candidate finds the free one."""
    assert popped
    await api.push(queue, "first", partition="other")
    messages = await query.pop()
    answer = await query.cycle(ack=ack(messages), release_lease=True)
    assert answer["lease_released"] is True
    await api.push(queue, "second", partition="other")
    assert data(await api.pop(queue, consumerGroup=GROUP, partitions=1)) == ["second"]
