"""Running client processes against one system, and what that took from whom."""

from __future__ import annotations

import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio
from attrs import frozen

from bench.accounting import Usage, pss_mib, rss_mib, usage
from bench.load import Load, Outcome
from bench.turn import take_turn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

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


@frozen(kw_only=True)
class Site:
    """One system that runs: where its clients go, and the roots of its process trees.

    `database` is the one it uses in the run's PostgreSQL, if it does.
    """

    address: str
    consumer_address: str = ""
    broker: tuple[int, ...] = ()
    postgres: tuple[int, ...] = ()
    database: str | None = None

    def used(self) -> Usage:
        """The CPU seconds used up to now."""
        return usage(self.broker, self.postgres)


@frozen(kw_only=True)
class Sample:
    """One measurement. CPU is in seconds, memory in MiB, `idle_*` in cores while nothing is sent.

    `seconds` reach from the first process's start to the last confirmation, `elapsed` until the
    processes had reported; `grown_mib` is what the broker's RSS grew by until all was ready.
    `is_late` means that time ended the work. A server that isn't PostgreSQL counts as `broker`.
    """

    count: int
    total: int
    unmeasured: int
    is_late: bool
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
    idle_other_cores: float
    early_rss_mib: float = 0.0  # of many measurements in a row: the broker's in the second third
    late_rss_mib: float = 0.0  # and in the last

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    @property
    def other_cores(self) -> float:
        """Cores that were busy with something else than this measurement."""
        return _others(self.machine_cpu, self.client_cpu + self.server_cpu, self.elapsed)

    @property
    def server_cpu(self) -> float:
        return self.broker_cpu + self.postgres_cpu

    @property
    def is_disturbed(self) -> bool:
        return max(self.other_cores, self.idle_other_cores) > SHARED_CORES


@frozen
class Clients:
    """How client processes are run: by which Python, and whose turn it is.

    `lock` is a file that benchmarks on this machine lock while they measure; None: no other does.
    """

    python: Path
    lock: Path | None = None

    async def prepare(self, load: Load) -> str:
        """Run a PREPARE load; returns the versions that it tells of."""
        with trio.fail_after(PATIENCE_SECONDS):
            async with _open_clients(self.python, [load]) as [client]:
                await client.ready()
                await client.go()
                return (await client.outcome()).version

    async def run(
        self,
        site: Site,
        loads: Sequence[Load],
        *,
        idle_seconds: float = 0.0,
        allow_none: bool = False,
        is_measured: bool = True,
    ) -> Sample:
        """Run a client process for each load, all at once, and measure from GO to the last report.

        With `idle_seconds` they are left alone for that long, once they are connected and quiet.
        What only prepares (`is_measured` false) doesn't wait for the machine to fall quiet.
        Raises RuntimeError for a client that fails, or where not one message goes through unless
        `allow_none`, and `trio.TooSlowError` for a client that hangs.
        """
        allowed = max(load.seconds for load in loads) + idle_seconds + PATIENCE_SECONDS
        # Not once they are connected: who waits for a turn for long, is hung up on by a server.
        async with take_turn(self.lock, wait_quiet=is_measured):
            with trio.fail_after(allowed):
                memory = rss_mib(site.broker)
                async with _open_clients(self.python, loads) as clients:
                    for client in clients:
                        await client.ready()
                    if idle_seconds:
                        await _wait_settled(site)
                    grown = rss_mib(site.broker) - memory
                    sample = await _measure(site, clients, idle_seconds, grown)
        if not sample.count and not allow_none:
            raise RuntimeError("not one message went through")
        return sample


async def _measure(
    site: Site, clients: Sequence[_Client], idle_seconds: float, grown_mib: float
) -> Sample:
    resting = site.used()
    await trio.sleep(idle_seconds)
    begun = site.used()
    idle = begun.since(resting)
    for client in clients:
        await client.go()
    outcomes = [await client.outcome() for client in clients]
    used = site.used().since(begun)
    latencies = sorted(value for outcome in outcomes for value in outcome.latencies)
    return Sample(
        count=sum(outcome.count for outcome in outcomes),
        total=sum(outcome.total for outcome in outcomes),
        unmeasured=sum(outcome.unmeasured for outcome in outcomes),
        is_late=any(outcome.is_late for outcome in outcomes),
        seconds=max(o.last for o in outcomes) - min(o.begun for o in outcomes),
        elapsed=used.at,
        p50_ms=_percentile(latencies, 0.50),
        p99_ms=_percentile(latencies, 0.99),
        client_cpu=sum(outcome.cpu for outcome in outcomes),
        broker_cpu=used.broker,
        postgres_cpu=used.postgres,
        machine_cpu=used.machine,
        broker_rss_mib=rss_mib(site.broker),
        broker_pss_mib=pss_mib(site.broker),
        postgres_pss_mib=pss_mib(site.postgres),
        grown_mib=grown_mib,
        idle_broker_cores=idle.broker / idle.at if idle_seconds else 0.0,
        idle_postgres_cores=idle.postgres / idle.at if idle_seconds else 0.0,
        idle_other_cores=(
            _others(idle.machine, idle.broker + idle.postgres, idle.at) if idle_seconds else 0.0
        ),
    )


def _others(machine_cpu: float, ours_cpu: float, seconds: float) -> float:
    """Cores that were busy with something else than the system and its clients."""
    return max(0.0, machine_cpu - ours_cpu) / seconds


async def _wait_settled(site: Site) -> None:
    """Wait until what the clients set off is done (or time has shown that it never is)."""
    with trio.move_on_after(SETTLE_MAX_SECONDS):
        while True:
            begun = site.used()
            await trio.sleep(SETTLE_WINDOW_SECONDS)
            used = site.used().since(begun)
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

    async def ready(self) -> None:
        """Wait until it is connected."""
        if await self.line() != "READY":
            raise RuntimeError("a client didn't get ready")

    async def go(self) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send_all(b"GO\n")

    async def outcome(self) -> Outcome:
        """Wait for its report. Whatever else a driver prints is a failure that it hides."""
        line = await self.line()
        if not line.startswith("{"):
            raise RuntimeError(f"a client printed {line!r}")
        return Outcome.loads(line)

    async def leave(self) -> None:
        """Let it end, after it has reported."""
        assert self.process.stdin is not None
        await self.process.stdin.aclose()
        await self.process.wait()


@asynccontextmanager
async def _open_clients(python: Path, loads: Sequence[Load]) -> AsyncIterator[list[_Client]]:
    clients: list[_Client] = []
    try:
        for load in loads:
            process = await trio.lowlevel.open_process(
                [str(python), "-m", "bench.client", load.dumps()],
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
