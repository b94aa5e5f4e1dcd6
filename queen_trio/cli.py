"""The command line: argv to configuration to `trio.run` to exit code.

Exit codes: 0 after a clean stop, 1 when the boot or the broker failed, 2 when the configuration or
the command line asks for something impossible; then nothing was started.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import structlog
import trio

from queen_trio.config import boot_lines, load, reference_page, table
from queen_trio.errors import ConfigError, QueenError
from queen_trio.log import configure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from queen_trio.config import Config

EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2

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
def serve() -> None:
    """Run the broker until SIGTERM or SIGINT.

    Without PG_HOST it starts a PostgreSQL of its own, in QUEEN_DATA_DIR (./queen-data).
    """
    config = _load()
    configure(level=config.logging.level, json=config.logging.json)
    for event, values in boot_lines(config):
        log.info(event, **values)
    for warning in config.warnings:
        log.warning(warning)

    from queen_trio import daemon  # here, so that `config` and `--help` don't load a broker

    sys.exit(exit_code(daemon.run, config))


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
    try:
        return trio.run(run, config)
    except* QueenError as group:
        for error in _leaves(group):
            log.critical(f"FATAL: {error}")
    return EXIT_FAILED


def _leaves(group: BaseExceptionGroup[QueenError]) -> Iterator[QueenError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
