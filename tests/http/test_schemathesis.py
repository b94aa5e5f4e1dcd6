"""Whatever the OpenAPI document allows, and much that it forbids, sent to a live broker.

Invariant: no answer is a 5xx, none has a status, header or body that the document doesn't have.
Values come from a fixed seed; every other name in them is replaced by one that exists, so that
requests also meet queues, messages, groups and dead letters.
"""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest
import requests
import schemathesis
import yaml
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.brokers import postgres_environment, running_broker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster import Cluster

DOCUMENT: Final = Path(__file__).parents[2] / "queen_trio/http/openapi.yaml"
SEED: Final = 20
# For each operation, on top of the bounds and examples that are always tried.
EXAMPLES: Final = 25
# A pop that waits is answered by then; what takes longer hangs.
WAIT_MS: Final = 20
REQUEST_SECONDS: Final = 20.0
CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

_numbers = itertools.count(1)

schema = schemathesis.openapi.from_dict(
    yaml.safe_load(DOCUMENT.read_text()), config=SchemathesisConfig(seed=SEED)
)


@pytest.fixture(scope="module")
def url(cluster: Cluster, template: str) -> Iterator[str]:
    """A broker whose pops don't wait long, with something to find in it."""
    cluster.execute(f"CREATE DATABASE schemathesis TEMPLATE {template} STRATEGY FILE_COPY")
    environment = postgres_environment(cluster.settings("schemathesis"))
    with running_broker({**environment, "DEFAULT_TIMEOUT": str(WAIT_MS)}) as broker:
        yield broker.url


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@pytest.fixture
def existing(url: str) -> dict[str, str]:
    """Names and ids of what exists, by the parameters that take them; made anew each time."""
    group = f"known-{next(_numbers)}"
    with httpx.Client(base_url=url) as http:

        def post(path: str, body: Any) -> Any:
            response = http.post(path, json=body)
            assert response.is_success, response.text
            return response.json()

        for switch in ("maintenance", "maintenance/pop"):
            post(f"/api/v1/system/{switch}", {"enabled": False})
        configured = {"queue": "known", "namespace": "known", "task": "known", "mode": "replace"}
        post("/api/v1/configure", configured)
        item = {"queue": "known", "partition": "known"}
        post("/api/v1/push", {"items": [{**item, "payload": n} for n in range(5)]})
        popped = http.get(
            "/api/v1/pop/queue/known/partition/known",
            params={"consumerGroup": group, "subscriptionMode": "all", "batch": 1},
        ).json()["messages"][0]
        message = {key: popped[key] for key in ("transactionId", "partitionId", "leaseId")}
        post("/api/v1/ack", {**message, "consumerGroup": group, "status": "dlq"})
        [letter] = http.get("/api/v1/dlq", params={"consumerGroup": group}).json()["messages"]
        post("/api/v1/traces", {**message, "traceNames": ["known"], "data": 1})
        stream = {"name": "known", "config_hash": "known", "reset": True}
        query = post("/streams/v1/queries", stream)
    return {
        **dict.fromkeys(("queue", "partition", "namespace", "task", "name"), "known"),
        **dict.fromkeys(("group", "consumerGroup", "consumer_group"), group),
        **message,
        "id": letter["id"],
        "partition_id": message["partitionId"],
        "query_id": query["query_id"],
        "config_hash": "known",
    }


def with_existing(value: Any, existing: dict[str, str]) -> Any:
    """Replace every other name in the data; which ones depends on the data alone."""
    if isinstance(value, list):
        return [with_existing(entry, existing) for entry in value]
    if not isinstance(value, dict):
        return value
    return {
        key: existing[key]
        if key in existing and zlib.crc32(repr(entry).encode()) % 2
        else with_existing(entry, existing)
        for key, entry in value.items()
    }


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_the_broker_keeps_to_the_document(
    case: schemathesis.Case,
    url: str,
    session: requests.Session,
    existing: dict[str, str],
) -> None:
    case.path_parameters = with_existing(case.path_parameters, existing)
    case.query = with_existing(case.query, existing)
    case.body = with_existing(case.body, existing)
    if "timeout" in (case.query or {}):
        case.query["timeout"] = WAIT_MS
    response = case.call(base_url=url, session=session, timeout=REQUEST_SECONDS)
    case.validate_response(response, checks=CHECKS)
