"""The supervisor: what the workers share, their starts, restarts and stops.

    run
    ├── signals            first one stops all, second one exits at once
    └── PostgreSQL         embedded, or reached through PG_*
        └── schema         applied or checked, once for all
            └── port       bound once; every worker inherits the listening sockets
                └── workers        each is started again when it ends, on its own

A stop is the cancellation of all that: the sockets close, the workers drain, PostgreSQL stops last.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import define, field

from queen_trio import boot
from queen_trio.backoff import Backoff
from queen_trio.config import worker_environments
from queen_trio.errors import EXIT_MISCONFIGURED, EXIT_SECOND_SIGNAL, ConfigError, QueenError
from queen_trio.grace import Grace
from queen_trio.http import server as http_server
from queen_trio.http.listeners import bind_listeners
from queen_trio.supervision import BACKOFF_MAX_SECONDS, HEALTHY_SECONDS

from .process import WorkerProcess, open_worker
from .worker import Place

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from queen_trio.config import Config
    from queen_trio.store.settings import ConnectionSettings

log = structlog.get_logger(__name__)

# A worker bounds its own drain; so much later it is killed.
LATE_SECONDS: Final = 1.0
# What the embedded PostgreSQL, which stops last, has when the workers took all their time.
POSTGRES_SECONDS: Final = 3.0
# The bound of a path of a Unix socket is about 100 bytes, hence not in the spool.
SOCKETS_PREFIX: Final = "queen-workers-"


async def run(config: Config, count: int) -> int:
    """Run `count` workers until SIGTERM or SIGINT and return the process's exit code.

    Raises `QueenError` (possibly in a group) when the boot of one of them fails, `ConfigError`
    where the configuration is at fault.
    """
    boot.raise_file_limit()
    http_server.tls_files(config.server)  # an unusable file is said before anything starts
    data_dir = boot.embedded_data_dir(config)
    spool = boot.spool_directory(config, data_dir)
    environments = worker_environments(config, count, spool)
    boot.warn_of_stranded_spools(spool, count)
    if not config.sync.enabled:
        log.warning("QUEEN_SYNC_ENABLED is false: workers don't wake each other's parked pops")
    host = _Host(config, environments)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as root:
            root.start_soon(host.stop_at_signal, signals)
            with host.scope:
                async with boot.open_postgres(config, data_dir, host.grace) as settings:
                    await boot.prepare_schema(config, settings)
                    await host.serve(settings)
            root.cancel_scope.cancel()
    log.info("stopped")
    return 0


@define(eq=False)
class _Host:
    """All workers of this host."""

    config: Config
    environments: Sequence[Mapping[str, str]]
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    grace: Grace = field(factory=Grace)
    _running: dict[int, WorkerProcess] = field(factory=dict)
    _sockets: str | None = None
    _stop_seconds: float = field(init=False)
    _waited_for: set[int] = field(init=False)
    """Workers that have never served: when one of them fails, the boot has failed."""

    def __attrs_post_init__(self) -> None:
        self._stop_seconds = self.config.server.shutdown_timeout_ms / 1000 + LATE_SECONDS
        self._waited_for = set(range(len(self.environments)))

    async def stop_at_signal(self, signals: AsyncIterator[int]) -> None:
        """Stop at the first signal; at the second kill the workers and exit the process."""
        async for number in signals:
            name = signal.Signals(number).name
            if self.scope.cancel_called:
                log.warning("second signal, exiting at once", signal=name)
                for worker in self._running.values():
                    worker.process.kill()
                if self._sockets is not None:
                    shutil.rmtree(self._sockets, ignore_errors=True)
                os._exit(EXIT_SECOND_SIGNAL)
            log.info("stopping", signal=name)
            self.grace.limit(trio.current_time() + self._stop_seconds + POSTGRES_SECONDS)
            self.scope.cancel()

    async def serve(self, settings: ConnectionSettings) -> None:
        """Keep all workers running until cancelled; then they are drained, all at once."""
        reachable = _postgres_environment(settings) if self.config.postgres.embedded else {}
        count = len(self.environments)
        with _sockets_directory() as directory:
            self._sockets = directory
            listeners = await bind_listeners(self.config.server.bind_addr, self.config.server.port)
            inherited = tuple(listener.fileno() for listener in listeners)
            async with trio.open_nursery() as nursery:
                for index, environment in enumerate(self.environments):
                    place = Place(index, count, inherited, directory)
                    nursery.start_soon(self._keep_running, place, {**environment, **reachable})
                try:
                    await trio.sleep_forever()
                finally:
                    # At once: the last worker that drains takes what is in the backlog.
                    for listener in listeners:
                        listener.close()

    async def _keep_running(self, place: Place, environment: Mapping[str, str]) -> None:
        """Run a worker again and again; raises when it fails before it has ever served."""
        backoff = Backoff(BACKOFF_MAX_SECONDS, HEALTHY_SECONDS)
        while True:
            started = trio.current_time()
            try:
                ending, asked_for = await self._run(place, environment)
            except OSError as error:  # no process, no memory: maybe later
                ending, asked_for = f"no start: {error}", False
            pause = 0.0 if asked_for else backoff.seconds_after(trio.current_time() - started)
            report = log.info if asked_for else log.error
            report(
                "worker ended, starting it again",
                of=place.index,
                ending=ending,
                in_seconds=round(pause, 3),
            )
            await trio.sleep(pause)

    async def _run(self, place: Place, environment: Mapping[str, str]) -> tuple[str, bool]:
        """Run a worker to its end; say how it ended, and whether it was asked to, by SIGTERM."""
        try:
            async with open_worker(place, environment, self._stop_seconds) as worker:
                log.info("worker started", of=place.index, pid=worker.process.pid)
                self._running[place.index] = worker
                status = await worker.wait(lambda: self._on_serving(place.index))
        finally:
            self._running.pop(place.index, None)
        if status < 0:
            return f"signal {-status}", False
        if status > 0 and place.index in self._waited_for:
            self._fail(place.index, status)
        return f"exit {status}", status == 0 and worker.served

    def _on_serving(self, index: int) -> None:
        if index in self._waited_for:
            self._waited_for.remove(index)
            if not self._waited_for:
                log.info("workers ready", count=len(self.environments))

    def _fail(self, index: int, status: int) -> None:
        what = f"worker {index} ended with exit code {status} at its boot: its last lines say why"
        if status == EXIT_MISCONFIGURED:
            raise ConfigError([what])
        raise QueenError(what)


@contextmanager
def _sockets_directory() -> Iterator[str]:
    """A directory for the sockets by which workers ask each other, which nobody else enters."""
    try:
        directory = tempfile.TemporaryDirectory(prefix=SOCKETS_PREFIX, ignore_cleanup_errors=True)
    except OSError as error:
        raise QueenError(f"no directory for the workers' sockets (TMPDIR): {error}") from error
    with directory as path:
        yield path


def _postgres_environment(settings: ConnectionSettings) -> dict[str, str]:
    """How workers reach the server that this process has started."""
    return {
        "PG_HOST": settings.host,
        "PG_PORT": str(settings.port),
        "PG_USER": settings.user,
        "PG_DATABASE": settings.database,
    }
