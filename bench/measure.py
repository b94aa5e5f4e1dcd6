"""Running client processes against one side, and what that took from whom."""

from __future__ import annotations

import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio
from attrs import frozen

from bench.accounting import pss_mib, rss_mib, usage
from bench.load import Load, Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bench.broker import RunningBroker
    from bench.postgres import Postgres

# On top of a load's own seconds: connecting, warming up, a busy machine.
PATIENCE_SECONDS: Final = 60.0
KILL_SECONDS: Final = 2.0
# Kernel threads alone use up to 0.2 cores here; more means that somebody else works too.
SHARED_CORES: Final = 0.35


# Parking thousands of polls keeps a broker busy for seconds after the last request was sent.
SETTLED_CORES: Final = 0.25
SETTLE_WINDOW_SECONDS: Final = 0.5
SETTLE_MAX_SECONDS: Final = 30.0


class WrongCount(Exception):
    """What was stored or consumed is not what was sent: the numbers mean nothing."""


@frozen
class Site:
    """What is being measured: a broker on a PostgreSQL."""

    postgres: Postgres
    broker: RunningBroker


@frozen(kw_only=True)
class Sample:
    """One measurement. CPU is in seconds, memory in MiB, `idle_*` in cores while nothing is sent.

    `seconds` reach from the first process's start to the last confirmation, `elapsed` until the
    processes had reported; `grown_mib` is what the broker's PSS grew by until all was ready.
    """

    count: int
    total: int
    unmeasured: int
    seconds: float
    elapsed: float
    p50_ms: float | None
    p99_ms: float | None
    client_cpu: float
    broker_cpu: float
    postgres_cpu: float
    machine_cpu: float
    broker_rss_mib: float
    broker_pss_mib: float
    postgres_pss_mib: float
    grown_mib: float
    idle_broker_cores: float
    idle_postgres_cores: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    @property
    def other_cores(self) -> float:
        """Cores that were busy with something else than this measurement."""
        ours = self.client_cpu + self.broker_cpu + self.postgres_cpu
        return max(0.0, self.machine_cpu - ours) / self.elapsed

    @property
    def is_disturbed(self) -> bool:
        return self.other_cores > SHARED_CORES


async def run_clients(site: Site, loads: Sequence[Load], *, idle_seconds: float = 0.0) -> Sample:
    """Run one client process for each load, all at once, and measure from GO to the last report.

    With `idle_seconds` they are left alone for that long, once they are connected and quiet. Raises
    RuntimeError for a client that fails, `trio.TooSlowError` for one that hangs.
    """
    allowed = max(load.seconds for load in loads) + idle_seconds + PATIENCE_SECONDS
    memory = pss_mib(site.broker.pid)
    with trio.fail_after(allowed):
        async with _open_clients(loads) as clients:
            for client in clients:
                if await client.line() != "READY":
                    raise RuntimeError("a client didn't get ready")
            if idle_seconds:
                await _wait_settled(site)
            grown = pss_mib(site.broker.pid) - memory
            resting = usage(site.broker.pid, site.postgres.pid)
            await trio.sleep(idle_seconds)
            begun = usage(site.broker.pid, site.postgres.pid)
            idle = begun.since(resting)
            for client in clients:
                await client.go()
            outcomes = [Outcome.loads(await client.line()) for client in clients]
            used = usage(site.broker.pid, site.postgres.pid).since(begun)
            broker_rss = rss_mib(site.broker.pid)
            broker_pss = pss_mib(site.broker.pid)
            postgres_pss = pss_mib(site.postgres.pid)
    latencies = sorted(value for outcome in outcomes for value in outcome.latencies)
    return Sample(
        count=sum(outcome.count for outcome in outcomes),
        total=sum(outcome.total for outcome in outcomes),
        unmeasured=sum(outcome.unmeasured for outcome in outcomes),
        seconds=max(o.last for o in outcomes) - min(o.begun for o in outcomes),
        elapsed=used.at,
        p50_ms=_percentile(latencies, 0.50),
        p99_ms=_percentile(latencies, 0.99),
        client_cpu=sum(outcome.cpu for outcome in outcomes),
        broker_cpu=used.broker,
        postgres_cpu=used.postgres,
        machine_cpu=used.machine,
        broker_rss_mib=broker_rss,
        broker_pss_mib=broker_pss,
        postgres_pss_mib=postgres_pss,
        grown_mib=grown,
        idle_broker_cores=idle.broker / idle.at if idle_seconds else 0.0,
        idle_postgres_cores=idle.postgres / idle.at if idle_seconds else 0.0,
    )


async def _wait_settled(site: Site) -> None:
    """Wait until what the clients set off is done (or time has shown that it never is)."""
    with trio.move_on_after(SETTLE_MAX_SECONDS):
        while True:
            begun = usage(site.broker.pid, site.postgres.pid)
            await trio.sleep(SETTLE_WINDOW_SECONDS)
            used = usage(site.broker.pid, site.postgres.pid).since(begun)
            if used.broker + used.postgres < SETTLED_CORES * used.at:
                return


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value in ms below which `share` of the sorted seconds lie."""
    if not ordered:
        return None
    return 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class _Client:
    """A client process and its pipes."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._read = b""

    async def line(self) -> str:
        """Wait for its next line."""
        assert self.process.stdout is not None
        while b"\n" not in self._read:
            chunk = await self.process.stdout.receive_some()
            if not chunk:
                raise RuntimeError(f"client {self.process.pid} ended early; see its error above")
            self._read += bytes(chunk)
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    async def go(self) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send_all(b"GO\n")

    async def leave(self) -> None:
        """Let it end, after it has reported."""
        assert self.process.stdin is not None
        await self.process.stdin.aclose()
        await self.process.wait()


@asynccontextmanager
async def _open_clients(loads: Sequence[Load]) -> AsyncIterator[list[_Client]]:
    clients: list[_Client] = []
    try:
        for load in loads:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "bench.client", load.dumps()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for us
            )
            clients.append(_Client(process))
        yield clients
        for client in clients:
            await client.leave()
    finally:
        for client in clients:
            client.process.kill()  # does nothing to one that has ended
        with trio.move_on_after(KILL_SECONDS, shield=True):
            for client in clients:
                await client.process.wait()
