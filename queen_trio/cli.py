"""The command line: argv to configuration to `trio.run` to exit code.

Exit codes: 0 after a clean stop, 1 when the boot or the broker failed, 2 when the configuration or
the command line asks for something impossible; then nothing was started. Besides, 70 and 130 end a
process at once: the watchdog, and a second signal.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import structlog
import trio
from structlog.contextvars import bind_contextvars

from queen_trio.config import boot_lines, load, reference_page, table
from queen_trio.errors import EXIT_MISCONFIGURED, ConfigError, QueenError
from queen_trio.log import LogLevel, configure
from queen_trio.spool.directory import SpoolDirectory
from queen_trio.spool.records import SpoolRecord, decode_untrusted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from queen_trio.config import Config

EXIT_FAILED = 1
MAX_WORKERS = 16  # on three hosts, each still has fewer links than the mesh admits (64)

log = structlog.get_logger()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="queen-trio", message="%(prog)s %(version)s")
def main() -> None:
    """A message queue broker over PostgreSQL.

    The configuration comes from environment variables: `queen-trio config` lists them.

    Exit codes: 0 after a clean stop, 1 when the boot or the broker failed, 2 when the
    configuration is at fault.
    """


@main.command()
@click.option(
    "--workers",
    type=click.IntRange(1, MAX_WORKERS),
    default=1,
    show_default=True,
    help="Broker processes on this port, for as many cores.",
)
@click.option("--place", hidden=True, help="Of a worker; its supervisor says it.")
def serve(workers: int, place: str | None) -> None:
    """Run the broker until SIGTERM or SIGINT.

    Without PG_HOST it starts a PostgreSQL of its own, in QUEEN_DATA_DIR (./queen-data).
    """
    config = _load()
    configure(level=config.logging.level, json=config.logging.json)
    worker = None
    if place is not None:
        from queen_trio.workers.worker import Place, Worker

        worker = Worker(Place.decode(place))
        bind_contextvars(worker=worker.place.index)
    for event, values in boot_lines(config):
        log.info(event, **values)
    for warning in config.warnings:
        log.warning(warning)

    # Here, so that `config` and `--help` don't load a broker.
    if workers > 1:
        from queen_trio.workers import supervisor

        sys.exit(exit_code(partial(supervisor.run, count=workers), config))
    from queen_trio import daemon

    sys.exit(exit_code(partial(daemon.run, worker=worker), config))


@main.command("config")
@click.option("--markdown", is_flag=True, help="Print the reference page, without your values.")
def show_config(markdown: bool) -> None:
    """List every variable: default, effective value, meaning.

    One line each, so that grep works; secrets appear by their length only. A configuration that
    `serve` would refuse is refused here too.
    """
    if markdown:
        click.echo(reference_page(), nl=False)
        return
    config = _load()
    for warning in config.warnings:
        click.echo(f"WARNING: {warning}", err=True)
    click.echo(table(config))


@main.group()
def spool() -> None:
    """Look at the disk spool, and give quarantined records another try.

    Offline: the broker of this spool must not run. FILE_BUFFER_DIR says where it is.
    """


@spool.command("ls")
def list_spool() -> None:
    """List what waits to be replayed and what was set aside."""
    with _open_spool() as directory:
        for file in directory.list_pending():
            click.echo(f"pending\t{file.path.stem}\t{file.messages} messages\t{file.bytes} bytes")
        for path in directory.list_set_aside():
            report = _report(path)
            where = f"{report.get('queue', '?')}/{report.get('partition', '?')}"
            error, _, _ = str(report.get("error", "?")).partition("\n")
            click.echo(f"failed\t{path.stem}\t{where}\t{error}")


@spool.command("show")
@click.argument("name")
def show_spooled(name: str) -> None:
    """Print the messages of a file that `ls` names, a JSON object a line.

    Payloads that are encrypted stay so.
    """
    with _open_spool() as directory:
        paths = [file.path for file in directory.list_pending()] + directory.list_set_aside()
        for record in decode_untrusted(_named(paths, name).read_bytes()):
            if not isinstance(record, SpoolRecord):
                click.echo(f"damaged at byte {record.offset}", err=True)
                continue
            click.echo(f"{record.queue}/{record.partition}:", err=True)
            for message in record.messages:
                click.echo(message)


@spool.command("replay")
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All quarantined records.")
def requeue_spooled(names: tuple[str, ...], everything: bool) -> None:
    """Put quarantined records back, for the broker to replay when it starts."""
    if everything == bool(names):
        raise click.UsageError("name quarantined records, or say --all")
    with _open_spool() as directory:
        paths = [path for path in directory.list_set_aside() if path.suffix == ".spool"]
        once = dict.fromkeys(names)
        for path in paths if everything else [_named(paths, name) for name in once]:
            directory.requeue(path)
            click.echo(f"{path.stem} will be replayed")


@contextmanager
def _open_spool() -> Iterator[SpoolDirectory]:
    """The configured spool, locked; ends the process with a sentence where it can't be had."""
    from queen_trio.boot import embedded_data_dir, spool_directory

    config = _load()
    configure(level=LogLevel.WARNING, json=False)
    directory = SpoolDirectory(spool_directory(config, embedded_data_dir(config)))
    if not directory.path.is_dir():
        click.echo(f"FATAL: there is no spool at {directory.path}", err=True)
        sys.exit(EXIT_FAILED)
    try:
        directory.open()
    except (OSError, QueenError) as error:
        click.echo(f"FATAL: {error}", err=True)
        sys.exit(EXIT_FAILED)
    try:
        yield directory
    finally:
        directory.close()


def _named(paths: list[Path], name: str) -> Path:
    for path in paths:
        if path.stem == name:
            return path
    raise click.UsageError(f"there is no {name!r}: see `queen-trio spool ls`")


def _report(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.with_suffix(".error").read_text())
    except (OSError, ValueError):
        return {}
    return report


def _load() -> Config:
    """The configuration, or the end of the process with one FATAL line per fault."""
    try:
        return load()
    except ConfigError as error:
        for fault in error.faults:
            click.echo(f"FATAL: {fault}", err=True)
        sys.exit(EXIT_MISCONFIGURED)


def exit_code(run: Callable[[Config], Awaitable[int]], config: Config) -> int:
    """Call `run` under Trio and return the process's exit code.

    The errors that queen-trio raises on purpose are logged as a sentence each, without a traceback:
    whoever raised them wrote it for the operator. Anything else is our fault and propagates.
    """
    code = EXIT_FAILED
    try:
        return trio.run(run, config)
    except* ConfigError as group:  # keys and certificates: tried out before anything starts
        _log_fatal(group)
        code = EXIT_MISCONFIGURED
    except* QueenError as group:
        _log_fatal(group)
    return code


def _log_fatal(group: BaseExceptionGroup[QueenError]) -> None:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            _log_fatal(error)
        else:
            for fault in error.faults if isinstance(error, ConfigError) else [error]:
                log.critical(f"FATAL: {fault}")
