"""Encryption at rest over HTTP: brokers with a key, with another one, and with none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from attrs import frozen

from queen_trio.store import segments
from tests.brokers import postgres_environment, running_broker
from tests.http.api import Api, Json, data, open_api, unique

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.brokers import LiveBroker
    from tests.cluster import Cluster

DATABASE = "encryption"
SECRET = "a secret that nobody may find"
VARIABLE = "QUEEN_ENCRYPTION_KEY"
OTHER_KEY = "the key is another one, or the payload was changed"
NO_KEY = "the payload is encrypted, and this broker has no key"


@frozen
class Brokers:
    """Three brokers on one database."""

    keyed: LiveBroker
    other: LiveBroker
    keyless: LiveBroker


@pytest.fixture(scope="module")
def brokers(cluster: Cluster, template: str) -> Iterator[Brokers]:
    cluster.execute(f"CREATE DATABASE {DATABASE} TEMPLATE {template}")
    environment = postgres_environment(cluster.settings(DATABASE))
    with (
        running_broker(environment | {VARIABLE: "01" * 32}) as keyed,
        running_broker(environment | {VARIABLE: "02" * 32}) as other,
        running_broker(environment) as keyless,
    ):
        yield Brokers(keyed, other, keyless)


@pytest.fixture
async def keyed(brokers: Brokers) -> AsyncIterator[Api]:
    async with open_api(brokers.keyed) as api:
        yield api


@pytest.fixture
async def other(brokers: Brokers) -> AsyncIterator[Api]:
    async with open_api(brokers.other) as api:
        yield api


@pytest.fixture
async def keyless(brokers: Brokers) -> AsyncIterator[Api]:
    async with open_api(brokers.keyless) as api:
        yield api


@pytest.fixture
async def queue(keyed: Api) -> str:
    """The name of an encrypted queue."""
    name = unique("secrets")
    answer = await keyed.configure(name, options={"encryptionEnabled": True, "retryLimit": 1})
    assert answer["options"]["encryptionEnabled"] is True
    return name


class Database:
    """What stands in the tables."""

    def __init__(self, cluster: Cluster) -> None:
        self._settings = cluster.settings(DATABASE)

    def rows(self, sql: str, *params: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(
            **self._settings.conninfo(),  # type: ignore[arg-type]
            cursor_factory=psycopg.RawCursor,
        ) as connection:
            cursor = connection.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def stored(self, queue: str) -> list[Json]:
        """The records of a queue, in offset order."""
        return [
            json.loads(record)
            for (blob,) in self.rows(
                "SELECT s.blob FROM queen.log_segments s"
                " JOIN queen.log_partitions p ON p.id = s.partition_id"
                " JOIN queen.queues q ON q.id = p.queue_id"
                " WHERE q.name = $1 ORDER BY s.base_offset",
                queue,
            )
            for record in segments.split(segments.decode(blob))
        ]

    def replace(self, queue: str, records: list[Json]) -> None:
        """Put other records into the only segment of a queue."""
        blob, _ = segments.encode([json.dumps(r, separators=(",", ":")).encode() for r in records])
        self.rows(
            "UPDATE queen.log_segments SET blob = $2 WHERE partition_id IN"
            " (SELECT p.id FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id"
            "   WHERE q.name = $1)",
            queue,
            blob,
        )


@pytest.fixture
def database(cluster: Cluster, brokers: Brokers) -> Database:
    return Database(cluster)


def sealed(records: list[Json]) -> list[bool]:
    return ["sealed" in record for record in records]


async def undecipherable(api: Api) -> int:
    return int((await api.metrics())["encryption"]["undecipherable"])


async def test_stored_encrypted_and_popped_verbatim(
    keyed: Api, queue: str, database: Database
) -> None:
    payload = f'{{"n": 1e400, "s":"{SECRET}"}}'
    items = ",".join(f'{{"queue":"{queue}","payload":{value}}}' for value in (payload, "null"))
    body = f'{{"items":[{items}]}}'
    response = await keyed.http.post("/api/v1/push", content=body)
    assert response.status_code == 201
    for record in database.stored(queue):
        assert set(record["data"]) == {"encrypted", "iv", "authTag"}
        assert SECRET not in json.dumps(record)
    popped = await keyed.pop_raw(queue)
    assert f'"data":{payload},' in popped.text
    assert '"data":null' in popped.text
    assert "sealed" not in popped.text


async def test_some_messages_of_a_segment(keyed: Api, queue: str) -> None:
    await keyed.push(queue, *range(5))
    answers = [await keyed.pop(queue, batch=2, autoAck=True) for _ in range(3)]
    assert [data(answer) for answer in answers] == [[0, 1], [2, 3], [4]]


async def test_a_duplicate_is_found_as_ever(keyed: Api, queue: str) -> None:
    [first] = await keyed.push(queue, 1, transactionId="t")
    [second] = await keyed.push(queue, 2, transactionId="t")
    assert (second["status"], second["message_id"]) == ("duplicate", first["message_id"])


async def test_what_looks_like_an_envelope_is_only_a_payload(keyed: Api) -> None:
    queue = unique()
    payloads = [{"encrypted": "", "iv": "", "authTag": ""}, {"sealed": 1}, "sealed:{}"]
    await keyed.push(queue, *payloads)
    assert data(await keyed.pop(queue)) == payloads


@pytest.mark.parametrize("mode", ["merge", "replace"])
async def test_configure_without_a_key_names_the_variable(keyless: Api, mode: str) -> None:
    response = await keyless.http.post(
        "/api/v1/configure",
        json={"queue": unique(), "mode": mode, "options": {"encryptionEnabled": True}},
    )
    assert response.status_code == 400
    assert VARIABLE in response.json()["error"]
    assert response.json()["code"] == "encryption_key_missing"


async def test_a_push_without_a_key_stores_nothing_in_the_clear(
    keyless: Api, queue: str, database: Database
) -> None:
    plain = unique()
    secret, public = await keyless.push_items(
        {"queue": queue, "payload": SECRET}, {"queue": plain, "payload": 1}
    )
    assert (secret["status"], public["status"]) == ("failed", "queued")
    assert VARIABLE in secret["error"]
    response = await keyless.http.post(
        "/api/v1/push", json={"items": [{"queue": queue, "payload": SECRET}]}
    )
    assert response.status_code == 500
    assert VARIABLE in response.json()["error"]
    assert database.stored(queue) == []


async def test_a_transaction_is_encrypted_or_refused(
    keyed: Api, keyless: Api, queue: str, database: Database
) -> None:
    body = {"operations": [{"type": "push", "items": [{"queue": queue, "payload": SECRET}]}]}
    refused = await keyless.http.post("/api/v1/transaction", json=body)
    assert refused.status_code == 400
    assert VARIABLE in refused.json()["error"]
    done = await keyed.http.post("/api/v1/transaction", json=body)
    assert done.json()["success"] is True
    assert sealed(database.stored(queue)) == [True]
    assert data(await keyed.pop(queue)) == [SECRET]


async def test_stale_memory_of_a_queue_never_stores_plaintext(
    keyed: Api, other: Api, database: Database
) -> None:
    """The broker that pushes isn't the one that changes the option, and nobody tells it."""
    queue = unique("toggled")
    await keyed.push(queue, 1)
    await other.configure(queue, options={"encryptionEnabled": True})
    await keyed.push(queue, 2)
    await other.configure(queue, options={"encryptionEnabled": False})
    await keyed.push_items(*({"queue": q, "payload": 3} for q in (queue, unique(), unique())))
    assert sealed(database.stored(queue)) == [False, True, False]
    assert data(await keyed.pop(queue)) == [1, 2, 3]


async def test_a_queue_made_anew_forgets_that_it_was_encrypted(
    keyed: Api, other: Api, queue: str, database: Database
) -> None:
    await keyed.push(queue, 1)
    await other.http.delete(f"/api/v1/resources/queues/{queue}")
    await keyed.push(queue, 2)
    assert sealed(database.stored(queue)) == [False]


async def test_what_cannot_be_opened_is_reported_and_can_be_acknowledged(
    brokers: Brokers, keyed: Api, other: Api, keyless: Api, queue: str
) -> None:
    await keyed.push(queue, SECRET, SECRET)
    for api, why in ((other, OTHER_KEY), (keyless, NO_KEY)):
        before = await undecipherable(api)
        answer = await api.pop(queue, consumerGroup=unique("g"), subscriptionMode="all")
        assert answer is not None
        assert [(m["data"], m["decryptionError"]) for m in answer["messages"]] == [(None, why)] * 2
        for message in answer["messages"]:
            assert (await api.ack(message))["success"] is True
        assert await undecipherable(api) == before + 2
    for broker in (brokers.other, brokers.keyless):
        event = broker.wait_event("payload not decipherable")
        assert event["level"] == "warning"
        lines = [line for line in broker.events if line.get("queue") == queue]
        assert len(lines) == 1, "once for each queue"


async def test_swapped_and_damaged_payloads_leave_the_others_alone(
    keyed: Api, queue: str, database: Database
) -> None:
    await keyed.push(queue, *range(6))
    records = database.stored(queue)
    records[0]["data"], records[1]["data"] = records[1]["data"], records[0]["data"]
    records[3]["data"] = {"encrypted": 1}
    records[4]["transactionId"] = 4
    database.replace(queue, records)
    answer = await keyed.pop(queue)
    assert answer is not None
    assert data(answer) == [None, None, 2, None, None, 5]
    assert [message.get("decryptionError") for message in answer["messages"]] == [
        OTHER_KEY, OTHER_KEY, None, "the envelope is damaged", "the record is damaged", None,
    ]  # fmt: skip


async def dead_letter(api: Api, queue: str) -> Json:
    """Push a message, let it fail for good, and return it as it was popped."""
    await api.push(queue, SECRET)
    answer = await api.pop(queue)
    assert answer is not None
    [message] = answer["messages"]
    assert (await api.ack(message, "failed", error="why"))["dlq"] is True
    return dict(message)


async def listed(api: Api, queue: str) -> Json:
    response = await api.http.get("/api/v1/dlq", params={"queue": queue})
    [letter] = response.json()["messages"]
    return dict(letter)


async def test_a_dead_letter_stays_encrypted_and_moves_back(
    keyed: Api, queue: str, database: Database
) -> None:
    await dead_letter(keyed, queue)
    [(payload,)] = database.rows("SELECT payload FROM queen.log_dlq WHERE queue_name = $1", queue)
    assert SECRET not in payload
    letter = await listed(keyed, queue)
    assert letter["data"] == SECRET
    assert "decryptionError" not in letter
    moved = await keyed.http.post(f"/api/v1/dlq/{letter['id']}/replay")
    assert moved.json()["status"] == "moved"
    assert sealed(database.stored(queue)) == [True, True]
    assert data(await keyed.pop(queue)) == [SECRET]


async def test_filed_by_hand_a_dead_letter_is_encrypted_too(
    keyed: Api, queue: str, database: Database
) -> None:
    await keyed.push(queue, SECRET, transactionId="t")
    [(partition_id,)] = database.rows(
        "SELECT p.id FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id"
        " WHERE q.name = $1",
        queue,
    )
    response = await keyed.http.post(f"/api/v1/messages/{partition_id}/t/dlq")
    assert response.status_code == 200, response.text
    [(payload,)] = database.rows("SELECT payload FROM queen.log_dlq WHERE queue_name = $1", queue)
    assert SECRET not in payload
    assert (await listed(keyed, queue))["data"] == SECRET


async def test_a_dead_letter_that_cannot_be_opened(keyed: Api, other: Api, queue: str) -> None:
    await dead_letter(keyed, queue)
    letter = await listed(other, queue)
    assert (letter["data"], letter["decryptionError"]) == (None, OTHER_KEY)
    refused = await other.http.post(f"/api/v1/dlq/{letter['id']}/replay")
    assert refused.status_code == 409
    assert refused.json()["code"] == "undecipherable"
    assert (await listed(keyed, queue))["data"] == SECRET


async def test_messages_as_an_operator_sees_them(keyed: Api, keyless: Api, queue: str) -> None:
    message = await dead_letter(keyed, queue)
    path = f"/api/v1/messages/{message['partitionId']}/{message['transactionId']}"
    assert (await keyed.http.get(path)).json()["data"] == SECRET
    hidden = (await keyless.http.get(path)).json()
    assert (hidden["data"], hidden["decryptionError"]) == (None, NO_KEY)
    page = {"queue": queue}
    [shown] = (await keyed.http.get("/api/v1/messages", params=page)).json()["messages"]
    assert shown["data"] == SECRET
    [hidden] = (await keyless.http.get("/api/v1/messages", params=page)).json()["messages"]
    assert (hidden["data"], hidden["decryptionError"]) == (None, NO_KEY)
