"""GET /health, /status, /api/v1/status and /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.http.api import Api


async def test_health(api: Api) -> None:
    response = await api.http.get("/health")
    assert response.status_code == 200
    body = response.json()
    assert (body["status"], body["database"]) == ("healthy", "connected")
    assert body["engine"]
    assert body["version"]


async def test_status_asks_no_database(api: Api) -> None:
    response = await api.http.get("/status")
    assert response.status_code == 200
    assert response.json()["status"] == "alive"


async def test_api_status_counts(api: Api, queue: str) -> None:
    before = (await api.http.get("/api/v1/status")).json()
    await api.push(queue, 1, 2)
    after = (await api.http.get("/api/v1/status")).json()
    assert after["queues"] == before["queues"] + 1
    assert after["partitions"] == before["partitions"] + 1
    assert after["messages"]["total"] == before["messages"]["total"] + 2


async def test_metrics_shows_pool_and_parked(api: Api) -> None:
    metrics = await api.metrics()
    assert metrics["wakeups"] == {"parked": 0, "asking": 0, "lines": metrics["wakeups"]["lines"]}
    assert 0 < metrics["pool"]["idle"] + metrics["pool"]["in_use"] <= metrics["pool"]["limit"]


@pytest.mark.parametrize("version", ["x", "1.x", "-", ""])
async def test_an_odd_accept_gets_some_metrics(api: Api, version: str) -> None:
    for kind in ("text/plain", "application/openmetrics-text"):
        response = await api.http.get(
            "/metrics/prometheus", headers={"accept": f"{kind};version={version}"}
        )
        assert response.status_code == 200
        assert "queen_info" in response.text
