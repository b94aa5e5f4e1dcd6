"""`python -m bench`: measure on this machine and print one table.

Exit codes: 0 when measured (on a shared machine too: the table says so), 1 when our broker failed
or a count or a sum is wrong, 2 for a bad command line, 130 when stopped by a signal.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import trio

from bench.machine import describe
from bench.measure import Clients
from bench.peers import FLOOR, OURS
from bench.postgres import open_postgres
from bench.report import Report
from bench.results import Measuring, Plan, Results
from bench.systems import SYSTEMS, Place, System
from bench.workloads import WORKLOADS, Sizes
from queen_trio.log import LogLevel, configure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from bench.machine import Machine

_TITLES = "\n".join(f"  {key:3} {workload.title}" for key, workload in WORKLOADS.items())
_DEFAULTS = Sizes()

EXIT_WRONG: Final = 1
EXIT_STOPPED: Final = 130
ALL: Final = "all"


class Names(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Names of a list, separated by commas, in the list's order; `all` is every one."""

    name = "names"

    def __init__(self, known: list[str]) -> None:
        self._known = known

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        if isinstance(value, list):
            return value
        named = self._known if value == ALL else value.split(",")
        if unknown := [name for name in named if name not in self._known]:
            self.fail(f"{unknown[0]!r} is none of {', '.join(self._known)}", param, ctx)
        return [name for name in self._known if name in named]


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=f"\b\nWorkloads:\n{_TITLES}",
)
@click.option("--workloads", default="a,b,c,d", type=Names(list(WORKLOADS)), help="Or `all`.")
@click.option(
    "--systems",
    "names",
    default=f"{FLOOR},{OURS}",
    type=Names(list(SYSTEMS)),
    help=f"`all`, or of: {', '.join(SYSTEMS)}.",
)
@click.option("--rounds", default=3, type=click.IntRange(1), help="Repeats of each.")
@click.option("--extra", default=0, type=click.IntRange(0), help="More, of what was disturbed.")
@click.option("--seconds", default=_DEFAULTS.seconds, help="Length of a and b.")
@click.option("--backlog", default=_DEFAULTS.backlog, help="Messages to drain in c, e and i.")
@click.option("--samples", default=_DEFAULTS.samples, help="Messages in d and f.")
@click.option("--polls", default=_DEFAULTS.polls, help="Parked polls in f.")
@click.option("--partitions", default=_DEFAULTS.partitions, help="Partitions in gb and gc.")
@click.option("--idle-seconds", default=_DEFAULTS.idle_seconds, help="Rest of the polls in f.")
@click.option("--minutes", default=_DEFAULTS.minutes, help="Length of i.")
@click.option(
    "--client-python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=Path(sys.executable),
    show_default="this one",
    help="Python with the drivers, for the client processes.",
)
@click.option(
    "--lock",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="BENCH_LOCK",
    default=None,
    help="File to lock while measuring, where several benchmarks take turns.",
)
@click.option(
    "--json",
    "details",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    default=None,
    help="Also write a file with every sample.",
)
@click.option(
    "--scratch",
    type=click.Path(path_type=Path, exists=False),
    default=None,
    help="Where the servers' data go for the time of the run; must not exist, and must be on the "
    "disk that is to be measured.  [default: a directory in /var/tmp]",
)
def main(
    workloads: list[str],
    names: list[str],
    rounds: int,
    extra: int,
    client_python: Path,
    lock: Path | None,
    details: Path | None,
    scratch: Path | None,
    **sizes: Any,
) -> None:
    """Measure push, drain and latency on this machine, on servers of its own.

    Takes about half a minute a round and system. Stop it with Ctrl-C: it stops what it started, and
    shows what it has got.
    """
    configure(level=LogLevel.WARNING, json=False)
    _raise_file_limit()
    scratch = (scratch or Path(f"/var/tmp/queen-bench-{os.getpid()}")).absolute()
    if scratch.exists():
        raise click.UsageError(f"--scratch: {scratch} exists")
    systems = list(_installed([SYSTEMS[name] for name in names], client_python))
    results = Results(Plan(workloads, systems, Sizes(**sizes), rounds, extra))
    scratch.mkdir(parents=True)
    try:
        machine, is_complete = trio.run(_run, results, scratch, Clients(client_python, lock))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if machine is not None and results.samples:
        report = Report(machine, results, _loop(client_python))
        click.echo(report.text())
        if details is not None:
            details.write_text(report.json())
    if not is_complete:
        sys.exit(EXIT_STOPPED)
    if results.ours_failed:
        sys.exit(EXIT_WRONG)


def _installed(systems: list[System], python: Path) -> Iterator[System]:
    """Those that can run here; says which can't, and what they lack."""
    for system in systems:
        if missing := system.missing(python):
            click.echo(f"left out: {system.name}, not installed: {', '.join(missing)}", err=True)
        else:
            yield system


def _loop(python: Path) -> str:
    """The event loop that clients of this Python have."""
    code = "import uvloop; print('uvloop', uvloop.__version__)"
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return ran.stdout.strip() or "the standard library's loop"


def _raise_file_limit() -> None:
    """Parked polls are a descriptor each, in the client and in the broker."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _run(results: Results, scratch: Path, clients: Clients) -> tuple[Machine | None, bool]:
    """Measure; returns early after a signal, when what was started has been stopped."""
    machine, is_complete = None, False
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at_signal, signals, nursery.cancel_scope)
            async with open_postgres(scratch) as postgres:
                machine = await trio.to_thread.run_sync(describe, scratch, postgres.version)
                tell = partial(click.echo, err=True)
                await Measuring(results, Place(postgres, scratch), clients, tell).run()
                is_complete = True
            nursery.cancel_scope.cancel()
    return machine, is_complete


async def _cancel_at_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        scope.cancel()


if __name__ == "__main__":
    main(prog_name="python -m bench")
