"""Three brokers on one PostgreSQL behind HAProxy: restarts and deaths under load.

The services, their configuration and the balancer's are those of compose/docker-compose.ha.yml.
Between the brokers' meshes stand proxies that pass, cut, stall or drop what the brokers say to each
other; whatever they do, the same holds.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
import trio

from tests.compose.stack import running_stack
from tests.live.history import History
from tests.proxy import Mode, open_proxy
from tests.replicas import STATS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.compose.stack import Broker, Stack

SECONDS = 60
MESH_PORT = 6633
OFF = "off"
MESHES = [*Mode, OFF]
# How much load passes between two blows.
STEP = 60


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The HA file with the profile of the third broker, jobs that run often."""
    often = {"RETENTION_INTERVAL": "50", "STATS_INTERVAL_MS": "50"}
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
            await stop(broker)
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
                first, *others = brokers
                first.kill()
                await history.wait_progress(STEP)
                await start(first)
                for broker in others:
                    broker.kill()
                await history.wait_progress(STEP)
                await start(*others)
            history.check(redeliveries=True)
