"""The private server over its restarts: make its cluster, start it, watch it, stop it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
import structlog
import trio

from queen_trio.embedded.cluster import PORT, Cluster, initdb_command, server_command
from queen_trio.embedded.errors import EmbeddedError
from queen_trio.embedded.orphans import acquire_pg_lock
from queen_trio.embedded.progress import Progress
from queen_trio.embedded.supervisor import StopBy, Supervised, start_supervised

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from queen_trio.embedded.account import Account
    from queen_trio.embedded.binaries import Binaries
    from queen_trio.grace import Grace

log = structlog.get_logger(__name__)

# How often we look whether the server is ready; in seconds.
READY_POLL: Final = 0.02

# A server that dies is restarted after the back-off; if it dies again this soon after its restart,
# the cause is one that no restart removes. In seconds.
RESTART_BACKOFF: Final = 1.0
RESTART_PROVEN_AFTER: Final = 60.0


@attrs.define(eq=False)
class Embedded:
    """A running private server: how to reach it, and where its files are.

    `host` is the directory of its Unix socket. Everything but `pid` stays the same over a restart.
    """

    host: str
    data_dir: Path
    log_path: Path
    pid: int
    port: int = PORT
    user: str = "postgres"
    database: str = "postgres"


@attrs.define(eq=False)
class Server:
    """The private server of one data directory, whose daemon lock the caller holds."""

    cluster: Cluster
    account: Account
    binaries: Binaries
    settings: dict[str, str]
    grace: Grace
    _running: Supervised | None = None
    _short_socket_directory: Path | None = None

    async def start(self) -> Embedded:
        """Make the cluster if there is none, start the server and wait until it is ready.

        Raises `EmbeddedError`. If cancelled, `stop` ends what was begun.
        """
        with self._faults_explained():
            if self.cluster.major() is None:
                await self._initialise()
            self._short_socket_directory = self.cluster.make_socket_directory(self.account)
            return Embedded(
                host=str(self._socket_directory()),
                data_dir=self.cluster.data_dir,
                log_path=self.cluster.log_path,
                pid=await self._run(),
            )

    async def keep_running(self, embedded: Embedded) -> None:
        """Watch the server until cancelled, and restart it once if it dies.

        Raises `EmbeddedError` if the restart fails, or the server dies again within
        `RESTART_PROVEN_AFTER` of it. Meanwhile its users see a database that is away.
        """
        restarted_at = -math.inf
        while self._running is not None:
            status = await self._running.process.wait()
            log.error(
                "embedded postgres: died",
                status=status,
                pid=embedded.pid,
                log_path=str(self.cluster.log_path),
            )
            await self._running.stop()  # what the server left behind
            if trio.current_time() - restarted_at < RESTART_PROVEN_AFTER:
                raise EmbeddedError(
                    f"PostgreSQL died (status {status}) again, soon after its restart; "
                    f"see its log {self.cluster.log_path}"
                )
            await trio.sleep(RESTART_BACKOFF)
            with self._faults_explained():
                if self._short_socket_directory is not None:
                    self.cluster.remake_socket_directory(self._short_socket_directory, self.account)
                embedded.pid = await self._run()
            restarted_at = trio.current_time()

    async def stop(self) -> None:
        """Stop what runs, if anything does; bounded, and complete even if cancelled."""
        if self._running is not None:
            log.info("embedded postgres: stopping")
            await self._running.stop()
            self._running = None
            log.info("embedded postgres: stopped")
        if self._short_socket_directory is not None:
            # Mostly the supervising shell was faster.
            shutil.rmtree(self._short_socket_directory, ignore_errors=True)

    def _socket_directory(self) -> Path:
        return self._short_socket_directory or self.cluster.pgdata

    async def _initialise(self) -> None:
        log.info(
            "embedded postgres: initialising",
            data_dir=str(self.cluster.data_dir),
            binaries=str(self.binaries.bin_dir),
            major=self.binaries.major,
            account=self.account.name,
        )
        lock = await acquire_pg_lock(self.cluster)
        try:
            await self.grace.run_sync(partial(self.cluster.prepare_new, self.account))
            command = initdb_command(self.binaries, self.cluster.new_pgdata)
            self._running, log_start = await self._supervise(command, StopBy.KILL, lock)
        finally:
            os.close(lock)
        status = await self._running.process.wait()
        await self._running.stop()
        self._running = None
        if status != 0:
            raise self._failed("initdb", status, log_start)
        self.cluster.adopt_new()

    async def _run(self) -> int:
        """Start the server and return its pid once it is ready."""
        command = server_command(
            self.binaries, self.cluster.pgdata, self._socket_directory(), self.settings
        )
        lock = await acquire_pg_lock(self.cluster)
        try:
            self.cluster.remove_stale_files()
            log.info("embedded postgres: starting", data_dir=str(self.cluster.data_dir))
            self._running, log_start = await self._supervise(command, StopBy.INTERRUPT, lock)
        finally:
            os.close(lock)
        pid = await self._wait_ready(self._running, log_start)
        log.info(
            "embedded postgres: ready",
            pid=pid,
            major=self.binaries.major,
            socket=str(self._socket_directory()),
            log_path=str(self.cluster.log_path),
        )
        return pid

    async def _supervise(
        self, command: list[str], stop_by: StopBy, lock: int
    ) -> tuple[Supervised, int]:
        """Start a program, and tell at which offset of the log its output begins."""
        output = self.cluster.open_log()
        try:
            log_start = os.fstat(output).st_size
            running = await start_supervised(
                command,
                account=self.account,
                stop_by=stop_by,
                lock=lock,
                lock_path=self.cluster.pg_lock,
                output=output,
                grace=self.grace,
                scratch=self._short_socket_directory,
            )
            return running, log_start
        finally:
            os.close(output)

    async def _wait_ready(self, running: Supervised, log_start: int) -> int:
        """Wait as long as the server lives: a recovery may take minutes, but is no fault."""
        starting = Progress("embedded postgres: still starting")
        while True:
            pid_file = self.cluster.read_pid_file()
            if pid_file is not None and pid_file.status == "ready":
                return pid_file.pid
            if running.process.returncode is not None:
                raise self._failed("PostgreSQL", running.process.returncode, log_start)
            if starting.due():
                starting.report(log_line=self.cluster.log_tail(log_start).rpartition("\n")[2])
            await trio.sleep(READY_POLL)

    def _failed(self, program: str, status: int, log_start: int) -> EmbeddedError:
        return EmbeddedError(
            f"{program} ended with status {status} instead of starting; its log "
            f"{self.cluster.log_path} says: {self.cluster.log_tail(log_start) or 'nothing'}"
        )

    @contextlib.contextmanager
    def _faults_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EmbeddedError(
                f"can't use the data directory {self.cluster.data_dir}: {error}"
            ) from error
