"""Brokers with JWT on: who gets in, what the others are told, whose name a message carries."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
import trio

from queen_trio.http.auth import ROUTE_ACCESS
from queen_trio.model.roles import Access, Role
from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.http.api import POLL_SECONDS, TIMEOUT_SECONDS, Api, unique
from tests.issuer import SECRET, forged, jwk, open_issuer, public_pem, token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster

REALM = 'Bearer realm="queen"'


@contextmanager
def guarded(settings: ConnectionSettings, **environment: str) -> Iterator[LiveBroker]:
    """A broker that asks for tokens."""
    with running_broker(
        {**postgres_environment(settings), "JWT_ENABLED": "true", **environment}
    ) as broker:
        yield broker


@pytest.fixture(scope="module")
def broker(cluster: Cluster, template: str) -> Iterator[LiveBroker]:
    """One with a shared secret for all of these tests."""
    cluster.execute(f"CREATE DATABASE guarded TEMPLATE {template} STRATEGY FILE_COPY")
    with guarded(cluster.settings("guarded"), JWT_SECRET=SECRET) as broker:
        yield broker


@asynccontextmanager
async def calling(broker: LiveBroker, bearer: str | None = None) -> AsyncIterator[Api]:
    headers = {} if bearer is None else {"authorization": f"Bearer {bearer}"}
    async with httpx.AsyncClient(
        base_url=broker.url, timeout=TIMEOUT_SECONDS, headers=headers
    ) as http:
        yield Api(http)


def assert_refused(response: httpx.Response, status: int, error: str, challenge: str) -> None:
    assert response.status_code == status, response.text
    code = "unauthorized" if status == 401 else "forbidden"
    assert response.json() == {"error": error, "code": code}
    assert response.headers["www-authenticate"] == challenge


async def test_public_routes_need_no_token_and_mind_no_bad_one(broker: LiveBroker) -> None:
    for bearer in (None, "nonsense"):
        async with calling(broker, bearer) as api:
            for path in ("/health", "/metrics"):
                assert (await api.http.get(path)).status_code == 200
                assert (await api.http.head(path)).status_code == 200


def sample(path: str) -> str:
    """A path of this route; what its names name doesn't exist."""
    return "/".join("x" if part.startswith(":") else part for part in path.split("/"))


async def test_every_other_route_is_closed_to_strangers(broker: LiveBroker) -> None:
    async with calling(broker) as api:
        for path, methods in ROUTE_ACCESS.items():
            for method, access in methods.items():
                if access is not Access.PUBLIC:
                    response = await api.http.request(method, sample(path))
                    assert_refused(response, 401, "this needs a bearer token", REALM)


async def test_every_route_asks_for_its_role(broker: LiveBroker) -> None:
    for role in Role:
        async with calling(broker, token(role=role.value)) as api:
            for path, methods in ROUTE_ACCESS.items():
                for method, access in methods.items():
                    if access is Access.PUBLIC or role in access.roles:
                        continue
                    names = " or ".join(sorted(needed.value for needed in access.roles))
                    assert_refused(
                        await api.http.request(method, sample(path)),
                        403,
                        f"this needs the role {names}",
                        f'{REALM}, error="insufficient_scope"',
                    )


async def test_a_token_without_a_role_may_nothing(broker: LiveBroker) -> None:
    for claims in ({}, {"role": "root"}, {"scope": "admin"}, {"roles": {"admin": True}}):
        async with calling(broker, token(sub="me", **claims)) as api:
            assert (await api.http.get("/status")).status_code == 403


async def test_each_role_does_its_work(broker: LiveBroker) -> None:
    queue = unique()
    async with calling(broker, token(role="write-only")) as api:
        await api.push(queue, 1)
    async with calling(broker, token(roles=["read-only"])) as api:
        assert (await api.http.get(f"/api/v1/resources/queues/{queue}")).status_code == 200
        assert (await api.http.head(f"/api/v1/resources/queues/{queue}")).status_code == 200
    async with calling(broker, token(role="read-write")) as api:
        answer = await api.pop(queue, wait=True)
        assert answer is not None
        assert (await api.ack(answer["messages"][0]))["success"]
    async with calling(broker, token(roles=["read-only", "admin"])) as api:
        response = await api.http.delete(f"/api/v1/resources/queues/{queue}")
        assert response.json()["deleted"] is True


async def test_a_message_carries_the_name_in_the_token_and_no_other(broker: LiveBroker) -> None:
    queue = unique()
    async with calling(broker, token(sub="Zoë", role="read-write")) as api:
        await api.push_items(
            {"queue": queue, "payload": 1, "producerSub": "mallory", "producer_sub": "mallory"}
        )
        operation = {"type": "push", "queue": queue, "payload": 2, "producerSub": "mallory"}
        response = await api.http.post("/api/v1/transaction", json={"operations": [operation]})
        assert response.json()["success"]
    async with calling(broker, token(role="admin")) as api:
        await api.push(queue, 3)
        answer = await api.pop(queue, autoAck=True)
    assert answer is not None
    assert [message["producerSub"] for message in answer["messages"]] == ["Zoë", "Zoë", None]


@pytest.mark.parametrize(
    ("bearer", "reason"),
    [
        (token(lives=-3600, role="admin"), "the token has expired"),
        (token(nbf=9_999_999_999, role="admin"), "the token is not valid yet"),
        (token(kid="another", role="admin"), "the token is invalid"),
        (token("HS512", role="admin"), "the token is invalid"),
        (forged({"alg": "none"}, {"role": "admin"}, None), "the token is invalid"),
        ("a.b.c", "the token is invalid"),
        ("\xff", "the token is invalid"),
    ],
    ids=["expired", "early", "stranger", "algorithm", "none", "garbage", "bytes"],
)
async def test_what_a_refused_token_is_told(broker: LiveBroker, bearer: str, reason: str) -> None:
    headers = {b"authorization": b"bearer " + bearer.encode("latin-1")}
    async with calling(broker) as api:
        response = await api.http.post("/api/v1/push", json={"items": []}, headers=headers)
    challenge = f'{REALM}, error="invalid_token", error_description="{reason}"'
    assert_refused(response, 401, reason, challenge)


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Basic cXVlZW46cXVlZW4=")],
        [("authorization", "Bearer")],
        [("authorization", token(role="admin"))],
        [("authorization", f"Bearer {token(role='admin')}")] * 2,
        [("x-authorization", f"Bearer {token(role='admin')}")],
    ],
    ids=["basic", "bare", "no-scheme", "twice", "other-header"],
)
async def test_what_is_no_bearer_token(broker: LiveBroker, headers: list[tuple[str, str]]) -> None:
    async with calling(broker) as api:
        response = await api.http.get("/status", headers=headers)
    assert_refused(response, 401, "this needs a bearer token", REALM)


async def test_no_token_reaches_the_log(broker: LiveBroker) -> None:
    good, bad = token(role="admin"), token(kid="another")
    for bearer in (good, bad):
        async with calling(broker, bearer) as api:
            await api.http.get("/status")
    log = "".join(broker.stderr)
    for secret in (good, bad, good.rpartition(".")[2], bad.rpartition(".")[2], SECRET):
        assert secret not in log


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
async def test_a_broker_with_a_public_key(settings: ConnectionSettings, algorithm: str) -> None:
    with guarded(settings, JWT_ALGORITHM=algorithm, JWT_PUBLIC_KEY=public_pem(algorithm)) as broker:
        async with calling(broker, token(algorithm, sub="me", role="admin")) as api:
            assert (await api.http.get("/status")).status_code == 200
        confused = forged({"alg": "HS256"}, {"role": "admin"}, public_pem(algorithm).encode())
        for bearer in (confused, token(algorithm, "another", role="admin"), token(role="admin")):
            async with calling(broker, bearer) as api:
                assert (await api.http.get("/status")).status_code == 401


async def test_a_broker_with_an_issuer(settings: ConnectionSettings) -> None:
    async with open_issuer() as issuer:
        issuer.status = 503
        with guarded(settings, JWT_JWKS_URL=issuer.url) as broker:
            early, late = (token("RS256", kid, role="admin") for kid in ("early", "late"))
            async with calling(broker, early) as api:
                response = await api.http.get("/status")
                assert response.status_code == 503
                assert response.json()["code"] == "keys_unavailable"
                assert response.headers["retry-after"] == "1"
                issuer.status = 200
                issuer.publish(jwk("RS256", "early"))
                await until(api, 200)
            fetches = issuer.fetches
            issuer.publish(jwk("RS256", "late"))
            async with calling(broker, late) as api:
                await until(api, 200)  # asked for, as it is unknown, not after five minutes
            assert issuer.fetches == fetches + 1
            issuer.body = b"<html>"
            async with calling(broker, token("RS256", "made-up", role="admin")) as api:
                assert (await api.http.get("/status")).status_code == 401
            async with calling(broker, late) as api:
                assert (await api.http.get("/status")).status_code == 200
            assert broker.stop() == 0


async def until(api: Api, status: int) -> None:
    """Ask for the status until it is answered so."""
    while (await api.http.get("/status")).status_code != status:
        await trio.sleep(POLL_SECONDS)


async def test_a_key_that_cannot_be_used_ends_the_boot(settings: ConnectionSettings) -> None:
    with (
        pytest.raises(AssertionError, match="FATAL: JWT_PUBLIC_KEY is not a public key in PEM"),
        guarded(settings, JWT_PUBLIC_KEY="nonsense"),
    ):
        pass


async def test_a_short_secret_gets_a_warning(settings: ConnectionSettings) -> None:
    with guarded(settings, JWT_SECRET="short") as broker:
        warnings = [event["event"] for event in broker.events if event["level"] == "warning"]
    assert "JWT_SECRET has 5 bytes, HS256 wants 32: a short one can be guessed from a token" in (
        warnings
    )


async def test_unknown_routes_tell_nothing_more(broker: LiveBroker) -> None:
    async with calling(broker) as api:
        assert (await api.http.get("/api/v1/nothing")).status_code == 404
        response = await api.http.get("/api/v1/push")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
