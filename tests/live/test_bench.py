"""`make bench` in small: it must measure, count right, print its table and leave nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import trio

from bench import bars
from bench.load import Load, Outcome, Work
from bench.machine import Machine
from bench.measure import Clients, Sample, Site
from bench.peers import FLOOR, OFFICIAL, OURS
from bench.report import Report
from bench.results import Plan, Results
from bench.systems import SYSTEMS
from bench.turn import take_turn
from bench.workloads import Sizes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.testing import MockClock

ROOT = Path(__file__).parents[2]
TINY = (
    *("--rounds", "1", "--seconds", "0.3", "--backlog", "1000", "--samples", "20"),
    *("--polls", "30", "--partitions", "200", "--idle-seconds", "0.3"),
    *("--minutes", "0.01"),
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
    names = f"{FLOOR},{OURS},{OFFICIAL}"
    ran = bench(scratch, *TINY, "--systems", names, "--workloads", "all", "--json", str(details))
    assert ran.returncode == 0, ran.stderr
    assert not scratch.exists()

    lines = ran.stdout.splitlines()
    assert "cores" in lines[0]
    assert "fsync and synchronous_commit on" in lines[1]
    assert lines[-1].startswith("Counts and sums are right")
    rows_of = tuple(f"{name} " for name in (FLOOR, OURS, OFFICIAL))
    systems = [line.split()[0] for line in lines if line.startswith(rows_of)]
    assert systems == [FLOOR, OURS, OFFICIAL] * 4 + [OURS] * 9

    document = json.loads(details.read_text())
    rows = document["rows"]
    assert [row["workload"] for row in rows] == [
        *"aaabbbcccdddeif",
        *("gb", "gc", "d2", "wa", "wb", "wc"),
    ]
    samples = {}
    for row in rows:
        [sample] = row["samples"]
        assert sample["count"] > 0
        assert 0 < sample["p50_ms"] <= sample["p99_ms"]
        assert row["rate"] == pytest.approx(sample["count"] / sample["seconds"])
        samples[row["workload"], row["system"]] = sample
    assert samples["c", OURS]["count"] == samples["c", OFFICIAL]["count"] == 1000
    assert samples["e", OURS]["count"] == 5 * 1000
    assert samples["f", OURS]["count"] == 20
    # CPU is charged to whom it belongs: no broker takes part in the floor.
    assert samples["a", OURS]["broker_cpu"] > 0
    assert samples["a", FLOOR]["broker_cpu"] == 0
    assert samples["a", OFFICIAL]["broker_cpu"] > 0
    # Every bar is listed; those that need no other system than these have a ratio.
    assert {bar["work"] for bar in document["bars"]} == set("abcdefghi+")
    assert {bar["work"] for bar in document["bars"] if bar["ratio"] is not None} == set("bdefghi+")


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
    ran = bench(scratch, "--workloads", "a,z")
    assert ran.returncode == 2
    assert "'z'" in ran.stderr


def test_a_system_that_is_not_installed_is_left_out(scratch: Path) -> None:
    """The environment of the tests has no driver for NATS."""
    ran = bench(scratch, *TINY, "--workloads", "a", "--systems", f"nats,{FLOOR}")
    assert ran.returncode == 0, ran.stderr
    assert "left out: nats, not installed: nats" in ran.stderr
    assert FLOOR in ran.stdout


async def test_one_benchmark_measures_at_a_time(autojump_clock: MockClock, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    turns: list[float] = []

    async def measure() -> None:
        async with take_turn(lock, wait_quiet=False):
            turns.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        begun = trio.current_time()
        async with take_turn(lock, wait_quiet=False):
            nursery.start_soon(measure)
            await trio.sleep(60)
            assert not turns
    assert begun + 60 <= turns[0] < begun + 61


def test_loads_and_outcomes_cross_a_pipe() -> None:
    load = Load(peer=FLOOR, work=Work.DRAIN, address="host=/x", queue="q", groups=5)
    assert Load.loads(load.dumps()) == load
    outcome = Outcome(
        count=1, total=2, unmeasured=3, begun=0.5, last=1.5, cpu=0.1, latencies=[0.25]
    )
    assert Outcome.loads(outcome.dumps()) == outcome


def sample(
    *,
    count: int = 1000,
    machine_cpu: float = 1.0,
    p50_ms: float = 1.0,
    broker_cpu: float = 0.4,
) -> Sample:
    """A second in which so many messages took 0.9 s of CPU of ours."""
    return Sample(
        count=count, total=0, unmeasured=0, is_late=False, seconds=1.0, elapsed=1.0,
        p50_ms=p50_ms, p99_ms=2.0, client_cpu=0.3, broker_cpu=broker_cpu, postgres_cpu=0.2,
        machine_cpu=machine_cpu, broker_rss_mib=50.0, broker_pss_mib=45.0, postgres_pss_mib=80.0,
        grown_mib=0.0, idle_broker_cores=0.0, idle_postgres_cores=0.0, idle_other_cores=0.0,
    )  # fmt: skip


def results(samples: dict[tuple[str, str], list[Sample]], *, rounds: int = 1) -> Results:
    workloads = sorted({workload for workload, _ in samples})
    systems = [SYSTEMS[name] for name in SYSTEMS if name in {peer for _, peer in samples}]
    return Results(Plan(workloads, systems, Sizes(), rounds, extra=1), samples)


@pytest.mark.parametrize(("machine_cpu", "claim"), [(1.2, True), (1.3, False)])
def test_a_shared_machine_makes_no_claim(machine_cpu: float, claim: bool) -> None:
    machine = Machine("X", 2, 4.0, "Linux 6", "3.11", "18", "ext4", 100.0)
    samples = [sample(), sample(machine_cpu=machine_cpu)]
    report = Report(machine, results({("a", OURS): samples}, rounds=2), "uvloop")
    assert report.is_claim is claim
    assert ("NO CLAIM" in report.text()) is not claim


def test_disturbed_measurements_are_repeated_and_the_quietest_count() -> None:
    quiet, loud = sample(count=1), sample(count=2, machine_cpu=2.0)
    taken = results({("a", OURS): [loud]})
    assert taken.missing(SYSTEMS[OURS]) == ["a"]
    taken.samples["a", OURS].append(quiet)
    assert taken.missing(SYSTEMS[OURS]) == []
    row = taken.row("a", OURS)
    assert row is not None
    assert row.samples == [quiet]


@pytest.mark.parametrize(
    ("ours", "verdict"), [(1500, "met"), (1200, "met"), (900, "MISSED by 25%")]
)
def test_a_bar_is_met_at_its_ratio(ours: int, verdict: str) -> None:
    taken = results({("a", OURS): [sample(count=ours)], ("a", "pgmq"): [sample(count=1000)]})
    [bar, *others] = bars.bars(taken)
    assert bar.against == "pgmq"
    assert "not measured" in others[0].line()
    assert bar.ratio == ours / 1000
    assert bar.verdict() == verdict
    assert verdict in bar.line()


def test_latency_has_a_bar_from_above() -> None:
    taken = results({("d", OURS): [sample(p50_ms=1.5)], ("d", FLOOR): [sample(p50_ms=1.0)]})
    p50, p99 = [bar for bar in bars.bars(taken) if bar.ratio is not None]
    assert (p50.verdict(), p99.verdict()) == ("MISSED by 7%", "met")


def test_the_broker_is_compared_with_the_client_that_users_have() -> None:
    """Each with the CPU of its own run; the lean load's is shown beside, and is no bar."""
    quick, slow, lean = sample(broker_cpu=0.2), sample(broker_cpu=0.6), sample(count=3000)
    taken = results(
        {("a", OFFICIAL): [slow], ("b", OFFICIAL): [quick], ("c", OFFICIAL): [slow]}
        | {(work, OURS): [lean] for work in "abc"}
    )
    found = [bar for bar in bars.bars(taken) if bar.work == "h"]
    assert [(bar.against, bar.verdict()) for bar in found] == [
        ("of the official client", "shown"),
        ("of the official client", "met"),
        ("of the official client", "MISSED by 100%"),
        *[("of the lean client", "shown")] * 3,
    ]
    assert [bar.ours for bar in found] == pytest.approx([600, 200, 600] + [400 / 3] * 3)
    assert [bar.other for bar in found] == pytest.approx([300] * 3 + [100] * 3)


def test_without_the_official_client_its_bars_are_not_measured() -> None:
    taken = results({("b", OURS): [sample()]})
    verdicts = [bar.verdict() for bar in bars.bars(taken) if bar.work == "h"]
    assert verdicts == ["not measured"] * 4 + ["shown", "not measured"]


def test_our_broker_is_no_peer_of_itself() -> None:
    """By the official client neither: the fastest of the others is somebody else's."""
    taken = results(
        {
            ("b", OURS): [sample(count=3000)],
            ("b", OFFICIAL): [sample(count=2000)],
            ("b", "nats"): [sample(count=1000)],
        }
    )
    [best] = [bar for bar in bars.bars(taken) if bar.against.startswith("best")]
    assert best.against == "best: nats"
    taken.failures["b", "nats"] = "theirs"
    assert not taken.ours_failed
    taken.failures["b", OFFICIAL] = "ours"
    assert taken.ours_failed


class _Failing(BaseHTTPRequestHandler):
    """A broker that is well but for its pops."""

    def do_GET(self) -> None:
        is_pop = self.path.startswith("/api/v1/pop")
        self.send_response(HTTPStatus.BAD_REQUEST if is_pop else HTTPStatus.NO_CONTENT)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


async def test_a_pop_that_fails_is_not_taken_for_an_empty_queue() -> None:
    """The official client returns nothing for both."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Failing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        load = Load(
            peer=OFFICIAL, work=Work.DRAIN, address=str(server.server_port), queue="q", seconds=5
        )
        with pytest.raises(RuntimeError, match="Pop failed"):
            await Clients(python=Path(sys.executable)).run(Site(address=load.address), [load])
    finally:
        server.shutdown()
        server.server_close()
