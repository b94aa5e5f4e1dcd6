"""Retention by live brokers: one of them does it, and another one when that one dies."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.brokers import postgres_environment, running_broker
from tests.http.api import open_api
from tests.store.calls import Log, Pooled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from queen_trio.store.pool import Pool
    from queen_trio.store.settings import ConnectionSettings
    from tests.brokers import LiveBroker
    from tests.http.api import Api

SECONDS = 20
OFTEN = {"RETENTION_INTERVAL": "20", "STATS_INTERVAL_MS": "20", "METRICS_FLUSH_MS": "20"}


@pytest.fixture
def log(pool: Pool) -> Log:
    return Log(Pooled(pool))


@pytest.fixture
def brokers(settings: ConnectionSettings) -> Iterator[list[LiveBroker]]:
    """Two brokers on one database, with jobs that run all the time."""
    with ExitStack() as stack:
        environment = postgres_environment(settings) | OFTEN
        yield [stack.enter_context(running_broker(environment)) for _ in range(2)]


async def wait_rows(log: Log, sql: str, rows: list[tuple[Any, ...]]) -> None:
    """Block until the query gives these rows."""
    with trio.fail_after(SECONDS):
        while await log.execute(sql) != rows:
            await trio.sleep(0.01)


async def wait_segments(log: Log, count: int) -> None:
    await wait_rows(log, "SELECT count(*) FROM queen.log_segments", [(count,)])


async def push_and_age(api: Api, log: Log) -> None:
    await api.push("q", 1, 2, 3)
    await wait_segments(log, 1)
    await log.age(61)


async def test_expired_messages_go_while_any_broker_lives(
    brokers: list[LiveBroker], log: Log
) -> None:
    first, second = brokers
    async with open_api(second) as api:
        await api.configure("q", options={"retentionEnabled": True, "retentionSeconds": 60})
        await push_and_age(api, log)
        await wait_segments(log, 0)
        first.kill()
        await push_and_age(api, log)
        await wait_segments(log, 0)
        assert await api.pop("q") is None
        await api.push("q", 4)
        message = await api.pop("q")
        assert message is not None
    for broker in brokers:
        assert [line for line in broker.events if line["level"] == "error"] == []


async def test_metrics_and_lag_are_written_down(brokers: list[LiveBroker], log: Log) -> None:
    async with open_api(brokers[0]) as api:
        await api.push("q", 1, 2, 3)
        await api.pop("q", batch=1, autoAck="true")
        await wait_rows(
            log, "SELECT sum(pushed)::bigint, sum(popped)::bigint FROM queen.stats", [(3, 1)]
        )
        await wait_rows(
            log,
            "SELECT consumer_group, max(lag) FROM queen.queue_lag_metrics GROUP BY 1",
            [("__QUEUE_MODE__", 2)],
        )


async def test_a_stopped_broker_holds_nothing(brokers: list[LiveBroker], log: Log) -> None:
    for broker in brokers:
        assert await trio.to_thread.run_sync(broker.stop) == 0
    await wait_rows(
        log,
        "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
        " WHERE l.locktype = 'advisory' AND d.datname = current_database()",
        [(0,)],
    )


async def test_a_broken_job_costs_only_itself(brokers: list[LiveBroker], log: Log) -> None:
    """Delivery needs no job (spec 4), and what was broken works again by itself."""
    await log.execute("ALTER FUNCTION queen.retention_queues_v1() RENAME TO broken")
    for broker in brokers:
        failed = await trio.to_thread.run_sync(broker.wait_event, "job failed", SECONDS)
        assert (failed["job"], failed["level"]) == ("retention", "error")
    async with open_api(brokers[0]) as api:
        await api.push("q", 1)
        assert await api.pop("q") is not None
    await log.execute("ALTER FUNCTION queen.broken() RENAME TO retention_queues_v1")
    for broker in brokers:
        await trio.to_thread.run_sync(broker.wait_event, "job works again", SECONDS)
        # Once a run of failures: a cycle in which the other broker held the lock ends one.
        assert {e["job"] for e in broker.events if e["event"] == "job failed"} == {"retention"}
