"""`make bench` in small: it must measure, count right, print its table and leave nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import trio

from bench.load import Load, Outcome, Side, Work
from bench.machine import Machine
from bench.measure import Sample
from bench.report import Report, Row
from bench.workloads import Sizes

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TINY = (
    *("--rounds", "1", "--seconds", "0.3", "--backlog", "1000", "--samples", "20"),
    *("--polls", "30", "--partitions", "200", "--idle-seconds", "0.3"),
)


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place that PostgreSQL's own account can reach, as it can't pytest's."""
    return Path(f"/var/tmp/queen-bench-test-{tmp_path_factory.getbasetemp().name}")


def bench(scratch: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", "--scratch", str(scratch), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_every_workload_is_measured_and_has_its_rows(scratch: Path, tmp_path: Path) -> None:
    details = tmp_path / "details.json"
    ran = bench(scratch, *TINY, "--workloads", "abcdefgh", "--json", str(details))
    assert ran.returncode == 0, ran.stderr
    assert not scratch.exists()

    lines = ran.stdout.splitlines()
    assert "cores" in lines[0]
    assert "fsync and synchronous_commit on" in lines[1]
    assert lines[-1].startswith("Counts and sums are right")
    sides = [line.split()[0] for line in lines if line.startswith(("postgres ", "queen "))]
    assert sides == ["postgres", "queen"] * 4 + ["queen"] * 4

    rows = json.loads(details.read_text())["rows"]
    assert [row["workload"] for row in rows] == list("aabbccddefgh")
    samples = {}
    for row in rows:
        [sample] = row["samples"]
        assert sample["count"] > 0
        assert 0 < sample["p50_ms"] <= sample["p99_ms"]
        assert row["rate"] == pytest.approx(sample["count"] / sample["seconds"])
        samples[row["workload"], row["side"]] = sample
    assert samples["c", "queen"]["count"] == 1000
    assert samples["e", "queen"]["count"] == 5 * 1000
    assert samples["f", "queen"]["count"] == 20
    # CPU is charged to whom it belongs: the broker takes no part in the floor.
    assert samples["a", "queen"]["broker_cpu"] > samples["a", "postgres"]["broker_cpu"]
    assert rows[1]["ratio"] == pytest.approx(rows[1]["rate"] / rows[0]["rate"])


async def test_a_signal_stops_what_was_started(scratch: Path) -> None:
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "bench", "--scratch", str(scratch), "--seconds", "60"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with trio.fail_after(60):
        # A client process runs: everything has been started.
        while not any("bench.client" in command for _, command in _descendants(process.pid)):
            await trio.sleep(0.05)
        started = [child for child, _ in _descendants(process.pid)]
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 130
        while any(child.is_running() for child in started):
            await trio.sleep(0.05)
    assert not await trio.Path(scratch).exists()


def _descendants(pid: int) -> Iterator[tuple[psutil.Process, str]]:
    for child in psutil.Process(pid).children(recursive=True):
        try:
            yield child, " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue


def test_an_unknown_workload_is_refused(scratch: Path) -> None:
    ran = bench(scratch, "--workloads", "az")
    assert ran.returncode == 2
    assert "'az'" in ran.stderr


def test_loads_and_outcomes_cross_a_pipe() -> None:
    load = Load(side=Side.FLOOR, work=Work.DRAIN, address="host=/x", queue="q", groups=5)
    assert Load.loads(load.dumps()) == load
    outcome = Outcome(
        count=1, total=2, unmeasured=3, begun=0.5, last=1.5, cpu=0.1, latencies=[0.25]
    )
    assert Outcome.loads(outcome.dumps()) == outcome


def sample(*, machine_cpu: float) -> Sample:
    """A second in which 1,000 messages took 0.9 s of CPU of ours."""
    return Sample(
        count=1000, total=0, unmeasured=0, seconds=1.0, elapsed=1.0, p50_ms=1.0, p99_ms=2.0,
        client_cpu=0.3, broker_cpu=0.4, postgres_cpu=0.2, machine_cpu=machine_cpu,
        broker_rss_mib=50.0, broker_pss_mib=45.0, postgres_pss_mib=80.0, grown_mib=0.0,
        idle_broker_cores=0.0, idle_postgres_cores=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(("machine_cpu", "claim"), [(1.2, True), (1.3, False)])
def test_a_shared_machine_makes_no_claim(machine_cpu: float, claim: bool) -> None:
    machine = Machine("X", 2, 4.0, "Linux 6", "3.11", "18", "ext4", 100.0)
    samples = [sample(machine_cpu=1.0), sample(machine_cpu=machine_cpu)]
    report = Report(machine, Sizes(), 2, [Row("a", Side.BROKER, samples)])
    assert report.is_claim is claim
    assert ("NO CLAIM" in report.text()) is not claim
