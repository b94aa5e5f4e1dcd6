"""The same API behind hypercorn (QUEEN_HTTP_SERVER=hypercorn): what differs is the server alone."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import trio

from tests.brokers import postgres_environment, running_broker
from tests.http.api import data, identity, open_api
from tests.http.raw import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from queen_trio.store.settings import ConnectionSettings
    from tests.brokers import LiveBroker

SECONDS = 30
LONG_MS = 30_000


@pytest.fixture
def hypercorn(settings: ConnectionSettings) -> Iterator[LiveBroker]:
    environment = postgres_environment(settings) | {"QUEEN_HTTP_SERVER": "hypercorn"}
    with running_broker(environment) as broker:
        yield broker


async def test_push_pop_ack(hypercorn: LiveBroker) -> None:
    with trio.fail_after(SECONDS):
        async with open_api(hypercorn) as api:
            results = await api.push("a/b ü", 1, 2, transactionId="t")
            assert [r["status"] for r in results] == ["queued", "duplicate"]
            answer = await api.pop("a/b ü")
            assert data(answer) == [1]
            assert answer is not None
            [acked] = await api.ack_batch(identity(answer["messages"][0]))
            assert acked["success"] is True
            assert await api.pop("a/b ü") is None
            extended = await api.http.post("/api/v1/lease/none/extend")
            assert extended.json()["renewed"] == 0


async def test_bad_input(hypercorn: LiveBroker) -> None:
    with trio.fail_after(SECONDS):
        async with open_api(hypercorn) as api:
            for method, path, body, status in (
                ("POST", "/api/v1/push", b"{", 400),
                ("POST", "/api/v1/push", b'{"items":[{"queue":"q","payload":"\xff"}]}', 400),
                ("GET", "/api/v1/push", None, 405),
                ("HEAD", "/status", None, 200),
                ("HEAD", "/api/v1/pop/queue/q", None, 405),
                ("GET", "/api/v1/nonsense", None, 404),
                ("GET", "/api/v1/pop/queue/%FF", None, 400),
            ):
                response = await api.http.request(method, path, content=body)
                assert response.status_code == status, (path, response.text)


async def test_a_push_wakes_and_a_disconnect_frees(hypercorn: LiveBroker) -> None:
    with trio.fail_after(SECONDS):
        async with open_api(hypercorn) as api:
            gone, stays = await connect(hypercorn), await connect(hypercorn)
            for connection in (gone, stays):
                await connection.send(f"GET /api/v1/pop/queue/q?wait=true&timeout={LONG_MS}")
            await api.wait_parked(2)
            await gone.aclose()
            await api.wait_parked(1)
            await api.push("q", 1)
            answer = await stays.receive()
            assert data(answer.json()) == [1]
            await stays.aclose()
            assert await api.pop("q", wait="true", timeout=100) is None


async def test_sigterm_answers_parked_pops(hypercorn: LiveBroker) -> None:
    with trio.fail_after(SECONDS):
        async with open_api(hypercorn) as api:
            parked = [await connect(hypercorn) for _ in range(20)]
            for connection in parked:
                await connection.send(f"GET /api/v1/pop/queue/q?wait=true&timeout={LONG_MS}")
            await api.wait_parked(20)
            hypercorn.process.send_signal(signal.SIGTERM)
            for connection in parked:
                assert (await connection.receive()).status == 204
                await connection.aclose()
        assert await trio.to_thread.run_sync(hypercorn.wait) == 0
