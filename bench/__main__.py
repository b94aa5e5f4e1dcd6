"""`python -m bench`: measure on this machine and print one table.

Exit codes: 0 when measured (on a shared machine too: the table says so), 1 when a count or a sum is
wrong, 2 for a bad command line, 130 when stopped by a signal.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import trio

from bench.broker import open_broker
from bench.machine import describe
from bench.measure import Site, WrongCount
from bench.postgres import open_postgres
from bench.report import Report, Row
from bench.workloads import WORKLOADS, Sizes, rounds
from queen_trio.log import LogLevel, configure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.load import Side
    from bench.measure import Sample

_TITLES = "\n".join(f"  {letter}  {workload.title}" for letter, workload in WORKLOADS.items())
_DEFAULTS = Sizes()

EXIT_WRONG: Final = 1
EXIT_STOPPED: Final = 130


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=f"\b\nWorkloads:\n{_TITLES}",
)
@click.option("--workloads", default="abcd", help="Which ones, by letter.")
@click.option("--rounds", "count", default=3, type=click.IntRange(1), help="Repeats of each.")
@click.option("--seconds", default=_DEFAULTS.seconds, help="Length of a, b and g.")
@click.option("--backlog", default=_DEFAULTS.backlog, help="Messages to drain in c, e and h.")
@click.option("--samples", default=_DEFAULTS.samples, help="Messages in d and f.")
@click.option("--polls", default=_DEFAULTS.polls, help="Parked polls in f.")
@click.option("--partitions", default=_DEFAULTS.partitions, help="Partitions in g and h.")
@click.option("--idle-seconds", default=_DEFAULTS.idle_seconds, help="Rest of the polls in f.")
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
    help="Where PostgreSQL's data go for the time of the run; must not exist, and must be on the "
    "disk that is to be measured.  [default: a directory in /var/tmp]",
)
def main(
    workloads: str, count: int, details: Path | None, scratch: Path | None, **sizes: Any
) -> None:
    """Measure push, drain and latency on this machine, on a PostgreSQL of its own.

    Takes about half a minute a round. Stop it with Ctrl-C: it stops what it started.
    """
    unknown = set(workloads) - set(WORKLOADS)
    if unknown or not workloads:
        raise click.UsageError(
            f"--workloads: {workloads!r} must be letters of {''.join(WORKLOADS)}"
        )
    configure(level=LogLevel.WARNING, json=False)
    _raise_file_limit()
    scratch = (scratch or Path(f"/var/tmp/queen-bench-{os.getpid()}")).absolute()
    if scratch.exists():
        raise click.UsageError(f"--scratch: {scratch} exists")
    try:
        report = trio.run(_run, workloads, count, Sizes(**sizes), scratch)
    except* WrongCount as group:
        for error in group.exceptions:
            click.echo(f"WRONG: {error}", err=True)
        sys.exit(EXIT_WRONG)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if report is None:
        sys.exit(EXIT_STOPPED)
    click.echo(report.text())
    if details is not None:
        details.write_text(report.json())


def _raise_file_limit() -> None:
    """Parked polls are a descriptor each, in the client and in the broker."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _run(letters: str, count: int, sizes: Sizes, scratch: Path) -> Report | None:
    """Measure; None if a signal came first, after what was started has been stopped."""
    report = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at_signal, signals, nursery.cancel_scope)
            report = await _measure(letters, count, sizes, scratch)
            nursery.cancel_scope.cancel()
    return report


async def _cancel_at_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        scope.cancel()


async def _measure(letters: str, count: int, sizes: Sizes, scratch: Path) -> Report:
    samples: dict[tuple[str, Side], list[Sample]] = defaultdict(list)
    async with open_postgres(scratch) as postgres:
        machine = await trio.to_thread.run_sync(describe, scratch, postgres.version)
        async with open_broker(postgres, scratch) as broker:
            async for letter, side, sample in rounds(Site(postgres, broker), letters, sizes, count):
                samples[letter, side].append(sample)
                click.echo(
                    f"{letter} {side.value:9} {sample.rate:>9,.0f}/s"
                    f" {sample.other_cores:.2f} other cores",
                    err=True,
                )
    rows = [Row(letter, side, taken) for (letter, side), taken in samples.items()]
    return Report(machine, sizes, count, rows)


if __name__ == "__main__":
    main(prog_name="python -m bench")
