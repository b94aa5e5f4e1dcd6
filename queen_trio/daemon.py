"""The daemon: what starts in which order, what a signal does, what stops in which order.

    run
    ├── watchdog           aborts a process whose loop hangs
    ├── signals            first one drains, second one exits at once
    └── PostgreSQL         embedded, or reached through PG_*, by sessions of our own
        └── spool          this broker's own directory, locked
            └── schema         applied or checked, before anything serves
                └── pool
                    └── broker     push and ack lanes, wakeups
                        ├── jobs       supervised
                        ├── keys       supervised: what verifies tokens, where an issuer has it
                        ├── mesh       supervised; only where there are peers
                        └── http       its death drains the rest and ends the process

Everything is a context or a nursery, so that stopping is leaving: http first (parked pops are
answered, requests finish), then mesh and jobs, then what was accepted or counted is flushed, then
pool, spool and PostgreSQL close. A deadline (QUEEN_SHUTDOWN_TIMEOUT_MS) bounds it all, what shields
itself included (grace.py): past it a disk that hangs is left behind and PostgreSQL is killed.
"""

from __future__ import annotations

import os
import signal
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from queen_trio import boot
from queen_trio.broker import Broker, open_broker, traffic
from queen_trio.broker.outage import ride_out
from queen_trio.config import Config, DrainParked
from queen_trio.errors import EXIT_SECOND_SIGNAL, DatabaseError, DatabaseUnavailable
from queen_trio.grace import Grace
from queen_trio.http import host
from queen_trio.http import server as http_server
from queen_trio.http.app import App
from queen_trio.http.limits import HttpLimits
from queen_trio.http.listeners import bind_listeners
from queen_trio.jobs.history import PURGE_SECONDS, History
from queen_trio.jobs.rates import Rates
from queen_trio.jobs.retention import Retention
from queen_trio.jobs.runner import Job, serve_jobs
from queen_trio.mesh import MeshNode
from queen_trio.spool import open_spool
from queen_trio.store.pool import open_pool
from queen_trio.store.queries import DEFAULT_TENANT, Store
from queen_trio.store.resources import ResourceStore
from queen_trio.store.traces import TraceStore
from queen_trio.supervision import run_vital, supervise
from queen_trio.watchdog import serve_watchdog

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from queen_trio.http.guard import Guard
    from queen_trio.workers.worker import Worker

log = structlog.get_logger(__name__)

WATCHDOG_SECONDS: Final = 30.0  # spec 8.24; longer than any pause that the loop is known to make
# What the steps after http keep of the shutdown time: flush, pool, PostgreSQL.
AFTER_HTTP_SECONDS: Final = 5.0
# The last counts are worth a moment of that, no more.
LAST_COUNTS_SECONDS: Final = 1.0


async def run(config: Config, worker: Worker | None = None) -> int:
    """Run a broker until SIGTERM or SIGINT and return the process's exit code.

    As a `worker` it serves on the sockets that it inherits, and stops with its supervisor, too.
    Raises `QueenError` (possibly in a group) when the boot fails or http dies.
    """
    boot.raise_file_limit()
    http_server.tls_files(config.server)  # an unusable file is said before anything starts
    guard = _guard(config)
    mesh = MeshNode(config.sync, str(DEFAULT_TENANT)) if config.sync.starts else None
    stop = _Stop(config.server.shutdown_timeout_ms / 1000)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as root:
            await root.start(serve_watchdog, WATCHDOG_SECONDS)
            root.start_soon(stop.watch, signals)
            if worker is not None:
                root.start_soon(stop.watch_supervisor, worker)
            with stop.scope:
                await _serve(config, stop, guard, mesh, worker)
            root.cancel_scope.cancel()
    log.info("stopped", in_time=trio.current_time() < stop.scope.deadline)
    if stop.failure is not None:
        raise stop.failure
    return 0


class _Stop:
    """The wish to stop: cancels the boot, drains what serves, bounds how long that takes."""

    def __init__(self, timeout_seconds: float) -> None:
        self.requested = trio.Event()
        self.scope = trio.CancelScope()
        self.serving = False
        self.failure: Exception | None = None
        """Why we stop, if nobody asked for it."""
        self.grace = Grace()
        """Of the spool and the embedded PostgreSQL: no shield may outlast the deadline."""
        self.pool_grace: Grace | None = None
        """The same for statements (spec 8.20)."""
        self._timeout_seconds = timeout_seconds

    async def watch(self, signals: AsyncIterator[int]) -> None:
        """Request a stop at the first signal, exit the process at the second."""
        signalled = False
        async for number in signals:
            name = signal.Signals(number).name
            if signalled:
                log.warning("second signal, exiting at once", signal=name)
                os._exit(EXIT_SECOND_SIGNAL)
            signalled = True
            log.info("stopping", signal=name)
            self._request()

    async def watch_supervisor(self, worker: Worker) -> None:
        """Request a stop when the supervisor wants it, or is dead."""
        await worker.wait_released()
        log.info("stopping", reason="the supervisor stops")
        self._request()

    def fail(self, error: Exception) -> None:
        """Request a stop because a part died that the others are nothing without."""
        self.failure = error
        self._request()

    def _request(self) -> None:
        if self.requested.is_set():
            return
        self.requested.set()
        self.scope.deadline = trio.current_time() + self._timeout_seconds
        self.grace.limit(self.scope.deadline)
        if self.pool_grace is not None:
            self.pool_grace.limit(self.scope.deadline)
        if not self.serving:
            self.scope.cancel()


async def _serve(
    config: Config,
    stop: _Stop,
    guard: Guard | None,
    mesh: MeshNode | None,
    worker: Worker | None,
) -> None:
    async with AsyncExitStack() as stack:
        data_dir = boot.embedded_data_dir(config)
        settings = await stack.enter_async_context(boot.open_postgres(config, data_dir, stop.grace))
        spool_directory = boot.spool_directory(config, data_dir)
        spool = await stack.enter_async_context(
            open_spool(spool_directory, config.file_buffer.max_bytes, stop.grace)
        )
        if worker is None:
            boot.warn_of_stranded_spools(spool_directory, workers=1)
        await boot.prepare_schema(config, settings)
        await boot.warn_of_capacity(config, settings)
        pool = await stack.enter_async_context(open_pool(settings, config.postgres.pool_size))
        stop.pool_grace = pool.grace
        broker = await stack.enter_async_context(
            open_broker(config, Store(pool), spool, None if mesh is None else mesh.hints)
        )
        broker.mesh_statistics = None if mesh is None else mesh.statistics
        jobs = _jobs(broker)
        broker.job_statistics = lambda: [job.statistics() for job in jobs]
        await _load_maintenance(broker)
        drain = trio.Event()
        async with trio.open_nursery() as services:
            restarts = broker.restarts
            if mesh is not None:
                serve_mesh = partial(mesh.serve, broker.local_hints)
                services.start_soon(supervise, "mesh", serve_mesh, restarts)
            if worker is not None:
                broker.siblings = worker.siblings
                answer_siblings = partial(worker.siblings.serve, partial(host.answer, broker))
                services.start_soon(supervise, "siblings", answer_siblings, restarts)
            services.start_soon(supervise, "jobs", partial(serve_jobs, jobs), restarts)
            if guard is not None:
                services.start_soon(supervise, "signing keys", guard.serve, restarts)
            async with trio.open_nursery() as http:
                inherited = [] if worker is None else worker.listeners
                boot.freeze_loaded()
                run_http = partial(_run_http, config, broker, guard, inherited, drain)
                addresses = await http.start(run_vital, "http", run_http, stop.fail)
                for address in addresses:
                    log.info("listening", address=address[0], port=address[1])
                stop.serving = True
                if worker is not None:
                    await worker.report_serving()
                await stop.requested.wait()
                broker.drain(answer_parked=config.server.drain_parked is DrainParked.ANSWER)
                drain.set()
            services.cancel_scope.cancel()
        await _write_last_counts(broker)


async def _write_last_counts(broker: Broker) -> None:
    """Write down what was counted since job "metrics" ran, if the database is there."""
    try:
        await traffic.flush(broker, within_seconds=LAST_COUNTS_SECONDS)
    except DatabaseError as error:
        log.info("last counts not written", error=str(error))


def _guard(config: Config) -> Guard | None:
    """Make what asks for tokens, where it is wanted; raises `ConfigError` for an unusable key."""
    if not config.auth.enabled:
        return None
    from queen_trio.http.guard import Guard  # here: an HTTP client and JWT cost 200 ms to load

    return Guard(config.auth)


async def _run_http(
    config: Config,
    broker: Broker,
    guard: Guard | None,
    inherited: list[socket.socket],
    drain: trio.Event,
    *,
    task_status: trio.TaskStatus[list[tuple[str, int]]],
) -> None:
    limits = HttpLimits(
        max_body=config.server.max_body_bytes,
        header_seconds=config.server.header_timeout_ms / 1000,
        keep_alive_seconds=config.server.keep_alive_ms / 1000,
    )
    tls = http_server.tls_files(config.server)
    listeners = inherited or await bind_listeners(config.server.bind_addr, config.server.port)
    await http_server.serve(
        App(broker, guard),
        listeners,
        limits,
        server=config.server.http_server,
        tls=tls,
        drain=drain,
        drain_seconds=max(config.server.shutdown_timeout_ms / 1000 - AFTER_HTTP_SECONDS, 1.0),
        task_status=task_status,
    )


def _jobs(broker: Broker) -> list[Job]:
    """The background jobs, each with its cadence (spec 4)."""
    config, store = broker.config.jobs, broker.store
    retention = Retention(store.pool, config.partition_cleanup_days)
    history = History(store.pool, ResourceStore(store), TraceStore(store.pool, store.tenant))
    return [
        Job("retention", config.retention_interval_ms / 1000, retention.run),
        Job("metrics", config.metrics_flush_ms / 1000, partial(traffic.flush, broker)),
        Job("lag", config.stats_interval_ms / 1000, history.sample),
        Job("history", PURGE_SECONDS, history.purge),
        Job("backlog", config.stats_interval_ms / 1000, broker.backlog.read_lags),
        Job("dead letters", config.metrics_flush_ms / 1000, broker.backlog.read_dead_letters),
        Job("reconcile", config.cache_refresh_ms / 1000, broker.maintenance.refresh),
        Job("rates", broker.config.logging.rates_ms / 1000, Rates(broker).run),
        Job("spool drain", broker.config.file_buffer.flush_ms / 1000, broker.spool_drain.run),
    ]


async def _load_maintenance(broker: Broker) -> None:
    """Learn what is switched on before the first request; with luck, later (job "reconcile")."""
    try:
        await ride_out(broker.maintenance.refresh)
    except DatabaseUnavailable as error:
        log.warning("maintenance switches not read yet", error=str(error))
