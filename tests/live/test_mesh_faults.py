"""Two brokers and a mesh that is cut, stalled, dropped or misconfigured: late, never wrong."""

from __future__ import annotations

import re
import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from tests.brokers import postgres_environment, running_broker
from tests.certificates import Authority
from tests.http.api import Api, Json, data, identity, open_api
from tests.live.test_boot import fatal_lines, launched
from tests.proxy import Mode, Proxy, open_proxy
from tests.replicas import STATS, free_ports, is_connected, mesh_environment, running_replicas

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from queen_trio.store.settings import ConnectionSettings
    from tests.brokers import LiveBroker

SECONDS = 60
POLL_SECONDS = 0.02
HOUR_MS = "3600000"


async def stats(api: Api) -> Json:
    state: Json = (await api.http.get(STATS)).json()
    return state


class Pair:
    """Two brokers; each dials the other through a proxy."""

    def __init__(self, apis: list[Api], proxies: list[Proxy], brokers: list[LiveBroker]) -> None:
        self.a, self.b = apis
        self.proxies = proxies
        self._brokers = brokers

    def switch(self, mode: Mode) -> None:
        for proxy in self.proxies:
            proxy.switch(mode)

    async def wait_connected(self) -> None:
        for broker in self._brokers:
            while not await trio.to_thread.run_sync(is_connected, broker, 1):  # noqa: ASYNC110 - another process
                await trio.sleep(POLL_SECONDS)

    async def wait_dead(self) -> None:
        """Block until neither broker has heard the other for a while."""
        for api in (self.a, self.b):
            while (await stats(api))["servers_alive"]:
                await trio.sleep(POLL_SECONDS)


@asynccontextmanager
async def open_pair(settings: ConnectionSettings, **environment: str) -> AsyncIterator[Pair]:
    ports = free_ports(2)
    async with AsyncExitStack() as stack:
        # The first broker dials the second one's port, and the other way around.
        proxies = [await stack.enter_async_context(open_proxy(port)) for port in reversed(ports)]
        peers = {number: [proxy.port] for number, proxy in enumerate(proxies)}
        running = running_replicas(settings, ports, environment, peers)
        replicas = await trio.to_thread.run_sync(running.__enter__)
        stack.callback(running.__exit__, None, None, None)
        apis = [await stack.enter_async_context(open_api(broker)) for broker in replicas.brokers]
        yield Pair(apis, proxies, list(replicas.brokers))


async def test_a_mesh_that_fails_costs_time_only(settings: ConnectionSettings) -> None:
    """Cut, stalled, every byte dropped: pushes, pops and acks go on, and then it heals."""
    with trio.fail_after(SECONDS):
        async with open_pair(settings, QUEEN_SYNC_DEAD_THRESHOLD_MS="500") as pair:
            await pair.wait_connected()
            for mode in (Mode.CUT, Mode.STALL, Mode.DROP):
                pair.switch(mode)
                await pair.wait_dead()
                await work(pair, f"while-{mode.value}")
                pair.switch(Mode.PASS)
                await pair.wait_connected()
            await work(pair, "after")
            statistics = await stats(pair.a)
            assert statistics["servers_alive"] == ["queen-1"]
            assert statistics["messages_dropped"] > 0  # hints while the link was cut


async def work(pair: Pair, queue: str) -> None:
    """What replicas do for each other, with nothing but the database between them."""
    got: list[Json] = []

    async def park() -> None:
        answer = await pair.b.pop(queue, wait="true", timeout=30_000, batch=1)
        assert answer is not None
        got.append(answer)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(park)
        await pair.b.wait_parked(1)
        started = time.monotonic()
        results = await pair.a.push(queue, 1, 2, partition="p")
        assert time.monotonic() - started < 5  # a mesh that hangs holds up no push
        assert [result["status"] for result in results] == ["queued"] * 2
    assert data(got[0]) == [1]
    assert await pair.a.pop(queue) is None  # leased over there
    [message] = got[0]["messages"]
    [result] = await pair.a.ack_batch({**identity(message), "status": "completed"})
    assert result["success"]
    assert data(await pair.a.pop(queue, autoAck="true")) == [2]


async def test_a_hint_from_outside_wakes_here(settings: ConnectionSettings) -> None:
    """A cut mesh, brokers that probe once an hour: only /internal/api/notify can wake the pop."""
    never = {"POP_WAIT_INITIAL_INTERVAL_MS": HOUR_MS, "POP_WAIT_MAX_INTERVAL_MS": HOUR_MS}
    with trio.fail_after(SECONDS):
        async with open_pair(settings, **never) as pair:
            pair.switch(Mode.CUT)
            for body in ({"queue": "q"}, {"queue": "q", "partition": "p"}):
                async with trio.open_nursery() as nursery:
                    answers: list[Json | None] = []

                    async def park(answers: list[Json | None] = answers) -> None:
                        answers.append(
                            await pair.b.pop("q", wait="true", timeout=15_000, autoAck="true")
                        )

                    nursery.start_soon(park)
                    await pair.b.wait_parked(1)
                    await pair.a.push("q", body, partition="p")
                    await pair.b.http.post("/internal/api/notify", json=body)
                assert data(answers[0]) == [body]


async def test_the_stats_of_a_mesh(settings: ConnectionSettings) -> None:
    with trio.fail_after(SECONDS):
        async with open_pair(settings) as pair:
            await pair.wait_connected()
            state = await stats(pair.a)
            alias = (await pair.a.http.get("/internal/api/inter-instance/stats")).json()
            assert alias.keys() == state.keys()
            [peer] = state.pop("peers")
            assert peer.pop("sent") > 0
            assert peer == {
                "host": "127.0.0.1",
                "port": pair.proxies[0].port,
                "connected": True,
                "resolved_ip": "127.0.0.1",
                "dropped": 0,
            }
            assert state.pop("messages_sent") > 0
            assert state.pop("messages_received") > 0
            assert state == {
                "enabled": True,
                "server_id": "queen-0",
                "transport": "tcp-mesh",
                "port": pair.proxies[1].target,
                "listening": True,
                "servers_alive": ["queen-1"],
                "servers_dead": [],
                "messages_dropped": 0,
                "handshake_failures": 0,
                "links_refused": {},
                "maintenance_mode": False,
                "pop_maintenance_mode": False,
            }


async def test_a_secret_that_differs(settings: ConnectionSettings) -> None:
    """Both refuse each other, say so once, and serve."""
    here, there = free_ports(2)
    one = {**postgres_environment(settings), **mesh_environment(0, here, [there])}
    two = {**postgres_environment(settings), **mesh_environment(1, there, [here])}
    with (
        running_broker(one) as a,
        running_broker({**two, "QUEEN_SYNC_SECRET": "another"}) as b,
        trio.fail_after(SECONDS),
    ):
        async with open_api(a) as api_a, open_api(b) as api_b:
            for api in (api_a, api_b):
                while (await stats(api))["handshake_failures"] < 2:
                    await trio.sleep(POLL_SECONDS)
                assert (await stats(api))["links_refused"].keys() == {"bad_mac"}
            await api_a.push("q", 1)
            assert data(await api_b.pop("q")) == [1]
        for broker in (a, b):
            refused = [line for line in broker.events if line["event"] == "mesh link refused"]
            assert [line["level"] for line in refused] == ["warning"]


async def test_mutual_tls_between_brokers(settings: ConnectionSettings, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    environment = authority.issue("queen").environment()
    with trio.fail_after(SECONDS):
        async with open_pair(settings, **environment) as pair:
            await pair.wait_connected()
            assert (await stats(pair.a))["links_refused"] == {}


def test_tls_files_that_cant_be_used(settings: ConnectionSettings, tmp_path: Path) -> None:
    """One FATAL line, no traceback, and no broker that serves without TLS."""
    authority = Authority(tmp_path)
    good, other = authority.issue("queen"), authority.issue("other")
    environment = {
        **postgres_environment(settings),
        **mesh_environment(0, *free_ports(1), [1]),
        **good.environment(),
        "QUEEN_MESH_TLS_KEY": str(other.key),
    }
    with launched(environment) as broker:
        assert broker.wait() != 0
        [line] = fatal_lines(broker)
        assert f"QUEEN_MESH_TLS_KEY={other.key} can't be used" in line
        assert "Traceback" not in "".join(broker.stderr)


async def test_a_mesh_port_that_is_taken(settings: ConnectionSettings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = {**postgres_environment(settings), **mesh_environment(0, port, [1])}
        with running_broker(environment) as broker:
            line = broker.wait_event("TCP mesh bind failed")
            assert (line["level"], line["port"]) == ("warning", port)
            async with open_api(broker) as api:
                await api.push("q", 1)
                assert data(await api.pop("q")) == [1]
                state = await stats(api)
                assert (state["enabled"], state["listening"]) == (True, False)
            restarts = [line for line in broker.events if "restarting" in line["event"]]
            assert restarts == []


@pytest.mark.parametrize(("secret", "auth"), [("of the mesh", "hmac"), ("", "off")])
def test_the_line_that_operators_grep(settings: ConnectionSettings, secret: str, auth: str) -> None:
    environment = {
        **postgres_environment(settings),
        **mesh_environment(0, *free_ports(1), [1, 2]),
        "QUEEN_SYNC_SECRET": secret,
        "QUEEN_LOG_JSON": "false",
    }
    with launched(environment) as broker:
        until = time.monotonic() + SECONDS
        while not any("mesh peer unreachable" in line for line in broker.stderr):
            assert time.monotonic() < until, broker.stderr
            time.sleep(POLL_SECONDS)
        text = "".join(broker.stderr)
        assert re.search(rf"\] mesh port=\d+ peers=2 auth={auth}\b", text)
        assert re.search(rf"\] config: sync auth={auth}\b", text)
