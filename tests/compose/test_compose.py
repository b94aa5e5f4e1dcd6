"""The compose files, run as they are shipped; stack.py says what stands in for an engine."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.compose.stack import read_compose, running_stack
from tests.http.api import data, open_api
from tests.servers import ROOT

HA = "docker-compose.ha.yml"
SECONDS = 60
CHECKS = [
    "ok: 2 brokers and the balancer are healthy",
    "ok: the mesh is up in all 2 directions",
    "ok: auth=hmac on every broker",
    "ok: a push on one broker wakes a pop on another",
    "ok: a lease is good on every broker",
    "ok: the balancer serves clients and denies /internal/",
]


def test_the_runner_is_satisfied_with_two_brokers_and_then_three() -> None:
    with running_stack(HA) as stack:
        done = stack.run("runner")
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == len(CHECKS)
        assert all(line.startswith(check) for line, check in zip(lines, CHECKS, strict=True))
        assert set(stack.brokers) == {"queen-a", "queen-b"}
        for broker in stack.brokers.values():
            mesh = broker.wait_event("mesh")
            assert (mesh["peers"], mesh["auth"], mesh["port"]) == (3, "hmac", 6633)
            assert broker.wait_event("config: sync")["auth"] == "hmac"
            # What isn't there yet, and what the runner tried.
            doubts = {e["event"] for e in broker.events if e["level"] in ("warning", "error")}
            assert doubts <= {"mesh peer unreachable", "mesh link refused"}
        # HAProxy began without the third one's name, and finds it.
        stack.start("queen-c")
        for name in ("queen-a", "queen-b"):
            assert stack.brokers[name].stop() == 0
        wait_served(stack.url("balancer"))


def wait_served(url: str) -> None:
    """Block until a health check comes through."""
    until = time.monotonic() + SECONDS
    while httpx.get(f"{url}/health").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_runner_sees_an_open_mesh() -> None:
    with running_stack(HA, environment={"QUEEN_SYNC_SECRET": ""}) as stack:
        done = stack.run("runner")
        assert done.returncode == 1
        assert "took a HELLO with a wrong MAC" in done.stderr


def test_the_runner_sees_that_there_is_no_mesh() -> None:
    with running_stack(HA, environment={"QUEEN_SYNC_ENABLED": "false"}) as stack:
        stack.services["runner"]["environment"]["READY_SECONDS"] = "1"
        done = stack.run("runner")
        assert done.returncode == 1
        assert "still waiting for: a link http://queen-a:" in done.stderr


async def test_one_broker_and_its_postgres() -> None:
    with running_stack("docker-compose.yml") as stack:
        async with open_api(stack.brokers["queen"]) as api:
            await api.push("q", 1)
            assert data(await api.pop("q")) == [1]
        assert stack.brokers["queen"].stop() == 0


@pytest.mark.parametrize("file", [HA, "docker-compose.yml"])
def test_what_every_broker_of_a_file_needs(file: str) -> None:
    document = read_compose(ROOT / "compose" / file, {})
    services = document["services"]
    brokers = {n: s for n, s in services.items() if s.get("command") == ["/app/bin/queen"]}
    assert brokers
    [connections] = [
        int(a.removeprefix("max_connections="))
        for a in services["postgres"]["command"]
        if a.startswith("max_connections=")
    ]
    assert connections >= 200  # spec 8.22
    assert sum(int(b["environment"]["DB_POOL_SIZE"]) for b in brokers.values()) <= connections - 3
    for name, broker in brokers.items():
        assert broker["environment"]["QUEEN_SERVER_ID"] == name
        assert broker["stop_grace_period"] == "60s"
        assert broker["read_only"] is True
        assert broker["depends_on"] == {"postgres": {"condition": "service_healthy"}}
        assert all("6633" not in str(port) for port in broker.get("ports", []))
    spools = [volume for broker in brokers.values() for volume in broker["volumes"]]
    assert len(set(spools)) == len(brokers)
    assert {b["environment"]["FILE_BUFFER_DIR"] for b in brokers.values()} == {
        "/var/lib/queen/buffers"
    }
