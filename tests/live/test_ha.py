"""Three brokers on one PostgreSQL behind HAProxy: restarts and deaths under load.

The services, their configuration and the balancer's are those of compose/docker-compose.ha.yml.
Between the brokers' meshes stand proxies that pass, cut, stall or drop what the brokers say to each
other; whatever they do, the same holds.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import httpx
import psycopg
import pytest
import trio

from queen_trio.store.advisory import AdvisoryLock
from tests.compose.stack import running_stack
from tests.live.history import History
from tests.proxy import Mode, open_proxy
from tests.replicas import STATS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.compose.stack import Broker, Stack

# On a machine that is busy with other things; alone it takes a quarter of that.
SECONDS = 110
MESH_PORT = 6633
OFF = "off"
# Between two runs of a job, on each broker.
CYCLE_SECONDS = 0.05
MESHES = [*Mode, OFF]
# How much load passes between two blows.
STEP = 40


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The HA file with the profile of the third broker, jobs that run often."""
    interval = str(int(CYCLE_SECONDS * 1000))
    often = {"RETENTION_INTERVAL": interval, "STATS_INTERVAL_MS": interval}
    with running_stack("docker-compose.ha.yml", "three", environment=often) as stack:
        yield stack


async def stop(broker: Broker) -> None:
    assert await trio.to_thread.run_sync(broker.stop) == 0


async def start(*brokers: Broker) -> None:
    """Start brokers again, all at once, and wait until they serve."""
    async with trio.open_nursery() as nursery:
        for broker in brokers:
            nursery.start_soon(trio.to_thread.run_sync, broker.restart)


@asynccontextmanager
async def open_meshed(stack: Stack, mesh: Mode | str) -> AsyncIterator[list[Broker]]:
    """Start all brokers anew, and put what is between their meshes into that state."""
    brokers = list(stack.brokers.values())
    async with AsyncExitStack() as proxies_stack:
        proxies = [
            await proxies_stack.enter_async_context(open_proxy(MESH_PORT, broker.address))
            for broker in brokers
        ]
        for broker in brokers:
            broker.configure(
                QUEEN_MESH_PEERS=",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies),
                QUEEN_SYNC_ENABLED="false" if mesh == OFF else "true",
            )
        async with trio.open_nursery() as nursery:
            for broker in brokers:
                if broker.process.poll() is None:
                    nursery.start_soon(stop, broker)
        await start(*brokers)
        if isinstance(mesh, Mode):
            await wait_meshed(brokers)
            for proxy in proxies:
                proxy.switch(mesh)
        yield brokers


async def wait_meshed(brokers: list[Broker]) -> None:
    """Block until every broker hears the others."""
    async with httpx.AsyncClient() as http:
        for broker in brokers:
            while True:
                state = (await http.get(broker.url + STATS)).json()
                if len(state["servers_alive"]) == len(brokers) - 1:
                    break
                await trio.sleep(0.02)


@asynccontextmanager
async def open_history(stack: Stack, queue: str) -> AsyncIterator[History]:
    """A load through the balancer; at the end of the block everything is taken and acked."""
    history = History(stack.url("balancer"), queue)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(history.run)
        await history.wait_progress(STEP)
        yield history
        await history.wait_progress(STEP)
        history.stop_producers()
        await history.wait_consumed()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("mesh", MESHES)
async def test_restarts_and_deaths_under_load(stack: Stack, mesh: Mode | str) -> None:
    with trio.fail_after(SECONDS):
        async with open_meshed(stack, mesh) as brokers:
            async with open_history(stack, f"rolling-{mesh}") as history:
                for broker in brokers:
                    await stop(broker)
                    await start(broker)
                    await history.wait_progress(STEP)
            history.check(redeliveries=False)

            async with open_history(stack, f"killed-{mesh}") as history:
                for broker in brokers[:2]:
                    broker.kill()
                    await history.wait_progress(STEP)
                # What the dead had leased comes again; the third one serves all of it alone.
            history.check(redeliveries=True)


@contextmanager
def locked(stack: Stack, table: str) -> Iterator[None]:
    """Hold a table for the block's time, so that a job that needs it stands still."""
    cluster = stack.cluster
    with psycopg.connect(
        host=str(cluster.directory), port=cluster.port, user="postgres", dbname="queen"
    ) as connection:
        connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")  # type: ignore[arg-type]
        yield


def holders(stack: Stack, lock: AdvisoryLock) -> list[str]:
    """The server ids of the brokers that hold or await this advisory lock."""
    rows = stack.cluster.execute(
        "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
        " WHERE l.locktype = 'advisory' AND l.objsubid = 1"
        f" AND (l.classid::bigint << 32) + l.objid::bigint = {lock.value}",
        "queen",
    )
    return [name.removeprefix("queen-trio/") for (name,) in rows]


async def wait_holder(stack: Stack, lock: AdvisoryLock) -> str:
    """Block until one broker is at work, and see that for several cycles no other one is."""
    while not (found := holders(stack, lock)):
        await trio.sleep(0.01)
    for _ in range(20):
        assert holders(stack, lock) == found
        await trio.sleep(CYCLE_SECONDS / 2)
    [holder] = found
    return holder


# What the job of a lock can't do without.
TABLES = {AdvisoryLock.RETENTION: "queen.queues", AdvisoryLock.STATS: "queen.queue_lag_metrics"}


@pytest.mark.parametrize("lock", TABLES)
async def test_one_replica_does_a_job_and_another_one_after_its_death(
    stack: Stack, lock: AdvisoryLock
) -> None:
    """All three want it all the time. The one that has it is held up at work, then killed."""
    brokers = stack.brokers
    with trio.fail_after(SECONDS):
        await start(*(broker for broker in brokers.values() if broker.process.poll() is not None))
        with locked(stack, TABLES[lock]):
            first = await wait_holder(stack, lock)
            brokers[first].kill()
        while first in holders(stack, lock):
            await trio.sleep(0.01)
        with locked(stack, TABLES[lock]):
            second = await wait_holder(stack, lock)
        assert second != first
        await start(brokers[first])


async def wait_up(stack: Stack) -> None:
    """Start what is down, and block until the balancer has somebody to ask."""
    await start(*(b for b in stack.brokers.values() if b.process.poll() is not None))
    async with httpx.AsyncClient(base_url=stack.url("balancer")) as http:
        while (await http.get("/health")).status_code != 200:
            await trio.sleep(0.05)


async def parked(stack: Stack) -> int:
    """How many pops wait on all brokers together."""
    async with httpx.AsyncClient() as http:
        answers = [await http.get(f"{broker.url}/metrics") for broker in stack.brokers.values()]
    return sum(answer.json()["wakeups"]["parked"] for answer in answers)


async def test_a_client_that_hangs_up_leaves_no_parked_pop_behind(stack: Stack) -> None:
    """The balancer tells the broker, which would lease the next message to nobody otherwise."""
    path = "/api/v1/pop/queue/left?wait=true&timeout=30000"
    with trio.fail_after(SECONDS):
        await wait_up(stack)
        async with (
            httpx.AsyncClient(base_url=stack.url("balancer"), timeout=SECONDS) as http,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(http.get, path)
            while await parked(stack) != 1:
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        while await parked(stack):
            await trio.sleep(0.02)


async def test_pushes_get_through_while_no_broker_is_healthy(stack: Stack) -> None:
    """Without PostgreSQL the balancer has nobody for pops, but every broker still takes pushes."""
    with trio.fail_after(SECONDS):
        await wait_up(stack)
        async with httpx.AsyncClient(base_url=stack.url("balancer"), timeout=SECONDS) as http:
            await trio.to_thread.run_sync(stack.cluster.stop)
            while (await http.get("/health")).status_code != 503:
                await trio.sleep(0.05)
            items = [{"queue": "away", "payload": 1, "transactionId": "once"}]
            pushed = await http.post("/api/v1/push", json={"items": items})
            assert [result["status"] for result in pushed.json()] == ["buffered"]
            await trio.to_thread.run_sync(stack.cluster.start)
            await wait_up(stack)
            popped = await http.get("/api/v1/pop/queue/away?wait=true&timeout=20000")
            assert [message["data"] for message in popped.json()["messages"]] == [1]
