"""Admission at the pool: which statements take part, and that the slot comes first."""

from __future__ import annotations

import importlib
import pkgutil
import re
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from attrs import evolve

from queen_trio import store
from queen_trio.broker.arbiter import Arbiter
from queen_trio.config import FlowConfig
from queen_trio.errors import DatabaseUnavailable
from queen_trio.model.admission import Lane
from queen_trio.store.advisory import AdvisoryLock, try_advisory_lock
from queen_trio.store.connection import Statement
from queen_trio.store.pool import open_pool

if TYPE_CHECKING:
    from queen_trio.store.pool import Pool
    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster

# Steps of jobs, which hold a slot for their whole cycle (`try_advisory_lock`).
UNDER_A_LOCK = {"trim", "purge", "drop_idle", "record_lag", "purge_stats", "purge_traces"}
SLOW = Statement("slow", "SELECT pg_sleep($1)", Lane.PUSH)
FUNCTION = re.compile(r"\bqueen\.(\w+_v\d+)\(")


def statements() -> dict[str, Statement]:
    found = {}
    for module in pkgutil.iter_modules(store.__path__, "queen_trio.store."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Statement):
                found[value.name] = value
    return found


async def test_every_statement_that_writes_has_a_lane(pool: Pool) -> None:
    async with pool.acquire() as conn:
        rows = await conn.fetch(
            Statement(
                "volatile",
                "SELECT p.proname::text FROM pg_proc p WHERE p.provolatile = 'v'"
                " AND p.pronamespace = 'queen'::regnamespace",
            )
        )
    writing = {name for (name,) in rows}
    assert {"push_v1", "pop_v1", "ack_v1"} <= writing
    without = set()
    for name, statement in statements().items():
        writes = not writing.isdisjoint(FUNCTION.findall(statement.sql)) or bool(
            re.search(r"\b(INSERT|UPDATE|DELETE)\b", statement.sql)
        )
        if writes and statement.lane is None:
            without.add(name)
        assert writes or statement.lane is None, f"{name} only reads"
    assert without == UNDER_A_LOCK


def arbiter_of(pool: Pool, budget: int) -> Arbiter:
    pool.admission = arbiter = Arbiter(
        FlowConfig(admission_min=budget, admission_max=budget), lambda: pool.limit
    )
    return arbiter


async def test_who_waits_for_a_slot_has_no_connection(pool: Pool) -> None:
    arbiter = arbiter_of(pool, 1)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery, arbiter.slot(Lane.ACK):
            for _ in range(5):
                nursery.start_soon(pool.fetch, SLOW, 0)
            await trio.testing.wait_all_tasks_blocked()
            assert arbiter.statistics().lanes[Lane.PUSH].waiting == 5
            assert (pool.statistics().in_use, pool.statistics().waiting) == (0, 0)
    lane = arbiter.statistics().lanes[Lane.PUSH]
    assert (lane.inflight, lane.waiting, lane.admitted_total, lane.waited_total) == (0, 0, 5, 5)


async def test_slot_and_connection_share_one_deadline(settings: ConnectionSettings) -> None:
    async with open_pool(settings, 1) as pool:
        arbiter = arbiter_of(pool, 1)
        started = trio.current_time()
        async with pool.acquire(), arbiter.slot(Lane.ACK):
            with pytest.raises(DatabaseUnavailable, match="no admission slot"):
                await pool.fetch(SLOW, 0, deadline_seconds=0.1)
        async with pool.acquire():
            with pytest.raises(DatabaseUnavailable, match="no connection within"):
                await pool.fetch(SLOW, 0, deadline_seconds=0.1)
        assert trio.current_time() - started < 5
        assert arbiter.statistics().lanes[Lane.PUSH].inflight == 0


async def test_a_statement_that_fails_or_is_cancelled_gives_its_slot_back(pool: Pool) -> None:
    arbiter = arbiter_of(pool, 8)
    with trio.move_on_after(0) as cancelled:
        await pool.fetch(SLOW, 60)  # not sent any more
    assert cancelled.cancelled_caught
    with trio.move_on_after(0.05):
        await pool.fetch(SLOW, 0.1)  # sent, and waited for (`late shield`)
    with pytest.raises(Exception, match="invalid input syntax"):
        await pool.fetch(Statement("bad", "SELECT ($1::text)::int", Lane.ACK), "x")
    lanes = arbiter.statistics().lanes
    assert (lanes[Lane.PUSH].inflight, lanes[Lane.ACK].inflight) == (0, 0)
    assert (lanes[Lane.PUSH].admitted_total, lanes[Lane.ACK].admitted_total) == (2, 1)


async def test_the_impatient_do_not_wait_behind_those_who_wait_for_a_server_that_is_away(
    own_cluster: Cluster,
) -> None:
    own_cluster.stop()
    async with open_pool(own_cluster.settings(), 4) as pool:
        arbiter_of(pool, 1)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(pool.fetch, SLOW, 0, deadline_seconds=60))
                await trio.testing.wait_all_tasks_blocked()
                for _ in range(3):
                    with pytest.raises(DatabaseUnavailable, match="can't be reached"):
                        await pool.fetch(SLOW, 0, deadline_seconds=60, impatient=True)
                nursery.cancel_scope.cancel()


async def test_a_job_holds_one_slot_for_its_cycle(pool: Pool) -> None:
    arbiter = arbiter_of(pool, 8)
    async with try_advisory_lock(pool, AdvisoryLock.RETENTION) as conn:
        assert conn is not None
        assert arbiter.statistics().lanes[Lane.MAINT].inflight == 1
        async with try_advisory_lock(pool, AdvisoryLock.RETENTION) as second:
            assert second is None
    assert arbiter.statistics().lanes[Lane.MAINT].inflight == 0


async def test_the_band_follows_what_the_server_admits(
    settings: ConnectionSettings, cluster: Cluster
) -> None:
    role = f"few_{settings.database}"
    cluster.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 3")
    try:
        async with open_pool(evolve(settings, user=role), 60) as pool:
            arbiter = Arbiter(FlowConfig(), lambda: pool.limit)
            pool.admission = arbiter
            assert (arbiter.statistics().lo, arbiter.statistics().hi) == (29, 44)
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    for _ in range(8):
                        nursery.start_soon(pool.fetch, SLOW, 0.05)
            arbiter.tick()
            assert pool.limit < 24
            assert (arbiter.statistics().lo, arbiter.statistics().hi) == (8, 8)
    finally:
        cluster.execute(f"DROP ROLE {role}")
