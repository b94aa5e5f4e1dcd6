"""Admission in a live broker: the narrowest band there is, and parked pops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.http.api import open_api, unique
from tests.live.test_prometheus import scrape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster import Cluster
    from tests.http.api import Api

WORKERS = 8
MESSAGES = 25


@pytest.fixture
def narrow_broker(cluster: Cluster, database: str) -> Iterator[LiveBroker]:
    """One write transaction at once, few connections, and jobs that want both all the time."""
    with running_broker(
        postgres_environment(cluster.settings(database))
        | {
            "DB_POOL_SIZE": "4",
            "QUEEN_ADMISSION_MAX": "1",
            "RETENTION_INTERVAL": "10",
            "STATS_INTERVAL_MS": "10",
            "METRICS_FLUSH_MS": "10",
        }
    ) as broker:
        yield broker


async def test_one_slot_serves_everybody(narrow_broker: LiveBroker) -> None:
    async with open_api(narrow_broker) as api:

        async def work(name: str) -> None:
            for number in range(MESSAGES):
                await api.push(name, number)
                claim = await api.pop(name, wait="true", timeout=20_000)
                assert claim is not None
                [message] = claim["messages"]
                assert message["data"] == number
                assert (await api.ack(message))["success"]

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(WORKERS):
                    nursery.start_soon(work, unique())
        found = await scrape(api)
        assert found["queen_admission_budget"] == 1
        assert found["queen_acked_messages_total", "completed"] == WORKERS * MESSAGES
        assert found["queen_admission_waited_total", "pop"] > 0
        assert found["queen_pool_timeouts_total"] == 0
        assert found["queen_job_runs_total", "retention"] > 1
        assert found["queen_job_failures_total", "retention"] == 0


async def test_parked_pops_hold_neither_slot_nor_connection(narrow_broker: LiveBroker) -> None:
    async with open_api(narrow_broker) as api, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(_park, api, unique())
        await api.wait_parked(20)
        with trio.fail_after(10):
            name = unique()
            await api.push(name, 1)
            assert await api.pop(name) is not None
        nursery.cancel_scope.cancel()


async def _park(api: Api, queue: str) -> None:
    await api.pop(queue, wait="true", timeout=30_000)
