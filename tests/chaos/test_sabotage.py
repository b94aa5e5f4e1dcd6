"""What is asked for inside a broker happens there."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import httpx
import pytest
import trio

from queen_trio.model.ids import created_at
from tests.brokers import postgres_environment
from tests.chaos.rig import ENVIRONMENT, ChaosBroker, Rig
from tests.http.api import open_api
from tests.live.test_prometheus import scrape
from tests.replicas import free_ports, mesh_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster
    from tests.http.api import Api

SECONDS = 40


@pytest.fixture
def rig(cluster: Cluster, settings: ConnectionSettings, tmp_path: Path) -> Iterator[Rig]:
    """One broker, with a peer that isn't there."""
    port, peer = free_ports(2)
    environment = {
        **postgres_environment(settings),
        **mesh_environment(1, port, [peer]),
        **ENVIRONMENT,
        "FILE_BUFFER_DIR": str(tmp_path / "spool"),
    }
    broker = ChaosBroker(environment, tmp_path / "control")
    broker.start()
    yield Rig(cluster, [broker], [], [])
    broker.end()


PARTS = [
    ("mesh", 7, ("queen_nursery_restarts_total", "mesh")),
    ("job retention", 3, ("queen_job_failures_total", "retention")),
    ("jobs", 20, ("queen_nursery_restarts_total", "jobs")),
]


async def test_parts_break_and_start_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with trio.fail_after(SECONDS):
        async with open_api(rig.brokers[0]) as api:
            for part, step, metric in PARTS:
                assert await rig.sabotage(0, step=step, **{"break": part})
                while (await scrape(api))[metric] != 1:
                    await trio.sleep(0.02)
    rig.look(0)
    assert rig.complaints == []
    monkeypatch.setattr("tests.chaos.rig.BREAK_SECONDS", 0.1)
    assert not await rig.sabotage(0, step=1, **{"break": "job that there is none of"})


async def test_http_breaks_and_the_process_ends(rig: Rig) -> None:
    async def ask(api: Api) -> None:
        with suppress(httpx.TransportError):
            while True:
                await api.http.get("/status")

    with trio.fail_after(SECONDS):
        async with open_api(rig.brokers[0]) as api, trio.open_nursery() as nursery:
            nursery.start_soon(ask, api)
            assert await rig.crash(0, 5)
        await rig.start(0)
    rig.look(0)
    assert rig.complaints == []


async def test_the_clock_jumps(rig: Rig) -> None:
    async def ahead() -> float:
        [result] = await api.push("q", 1)
        return (created_at(result["message_id"]) - datetime.now(UTC)).total_seconds()

    async with open_api(rig.brokers[0]) as api:
        for seconds in (-100.0, 0.0, 100.0):
            assert await rig.sabotage(0, clock=seconds)
            assert await ahead() == pytest.approx(seconds, abs=SECONDS)
        assert await rig.sabotage(0, clock=0.0)
        assert await ahead() > SECONDS, "message ids don't follow it back"


async def test_a_full_disk_is_noticed(rig: Rig) -> None:
    async with open_api(rig.brokers[0]) as api:
        await api.http.post("/api/v1/system/maintenance", json={"enabled": True})
        with rig.filled_disk(0, 10):
            response = await api.http.post(
                "/api/v1/push", json={"items": [{"queue": "q", "payload": 1}]}
            )
            assert response.status_code == 500
            assert "File too large" in response.text
        [result] = await api.push("q", 2)
        assert result["status"] == "buffered"
