"""The files of the private PostgreSQL: where they lie, what stale ones mean, what a log says."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from queen_trio.embedded.errors import EmbeddedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from queen_trio.embedded.account import Account
    from queen_trio.embedded.binaries import Binaries

# No other server listens in the socket's directory, so the number is free to be the usual one.
PORT: Final = 5432

# A socket's path has room for 107 bytes on Linux and 103 on macOS.
LONGEST_SOCKET_PATH: Final = 100

# A log above this size at a start is set aside (one generation is kept), in bytes.
LOG_LIMIT: Final = 16 * 2**20
LOG_TAIL: Final = 2000

# As in production: what was acknowledged is on the disk. The rest fits a broker's pool of 32, its
# retention and migration connections, and an operator's psql.
SETTINGS: Final[Mapping[str, str]] = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_connections": "64",
    "shared_buffers": "128MB",
    "cluster_name": "queen-trio",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_destination": "stderr",
    "logging_collector": "off",
    "log_line_prefix": "%m [%p] ",
}

# What makes the server private and findable: not for the caller to change.
RESERVED_SETTINGS: Final = frozenset(
    {"data_directory", "external_pid_file", "listen_addresses", "port", "unix_socket_directories"}
)


@attrs.frozen
class PidFile:
    """What the running server says of itself in postmaster.pid."""

    pid: int
    status: str  # line 8: "starting", "ready", "stopping"


@attrs.frozen
class Cluster:
    """The layout of a data directory."""

    data_dir: Path

    @classmethod
    def at(cls, data_dir: Path) -> Cluster:
        """The layout below `data_dir`, which may be relative: the server works elsewhere.

        Raises `EmbeddedError` for a name with a line break, with which postmaster.pid is unreadable
        even to PostgreSQL.
        """
        if "\n" in str(data_dir):
            raise EmbeddedError(f"{str(data_dir)!r}, the data directory, has a line break")
        return cls(data_dir.absolute())

    @property
    def pgdata(self) -> Path:
        return self.data_dir / "postgres"

    @property
    def new_pgdata(self) -> Path:
        """Where initdb works until it is done: the cluster appears whole or not at all."""
        return self.data_dir / "postgres.initialising"

    @property
    def daemon_lock(self) -> Path:
        return self.data_dir / "daemon.lock"

    @property
    def pg_lock(self) -> Path:
        return self.data_dir / "pg.lock"

    @property
    def log_path(self) -> Path:
        return self.data_dir / "postgres.log"

    def make(self, *, as_root: bool) -> None:
        """Make the data directory; as root, one that an unprivileged account can pass through.

        Only what is made here gets its mode: a directory of the operator's is never opened up.
        """
        missing = [d for d in (*reversed(self.data_dir.parents), self.data_dir) if not d.exists()]
        for directory in missing:
            directory.mkdir()
            directory.chmod(0o711 if as_root else 0o700)

    def major(self) -> int | None:
        """The release that made the data, or None where there are none.

        Raises `EmbeddedError` where something else is in the data's place.
        """
        if not os.path.lexists(self.pgdata):
            return None
        try:
            return int((self.pgdata / "PG_VERSION").read_text())
        except FileNotFoundError:
            if self.pgdata.is_dir() and not any(self.pgdata.iterdir()):
                return None
            raise EmbeddedError(f"{self.pgdata} holds no PostgreSQL data: move it away") from None
        except ValueError:
            raise EmbeddedError(f"{self.pgdata}/PG_VERSION is damaged") from None

    def prepare_new(self, account: Account) -> None:
        """An empty directory for initdb, free of what a killed one left."""
        if self.new_pgdata.exists():
            shutil.rmtree(self.new_pgdata)
        self.new_pgdata.mkdir(mode=0o700)
        account.give(self.new_pgdata)

    def adopt_new(self) -> None:
        """Give the finished cluster its name, for good (initdb has synced what is in it)."""
        self.new_pgdata.rename(self.pgdata)
        directory = os.open(self.data_dir, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def read_pid_file(self) -> PidFile | None:
        """What postmaster.pid says, or None where it is absent or half-written."""
        try:
            lines = (self.pgdata / "postmaster.pid").read_text(errors="replace").split("\n")
            return PidFile(pid=int(lines[0]), status=lines[7].strip() if len(lines) > 7 else "")
        except (OSError, ValueError, IndexError):
            return None

    def remove_stale_files(self) -> None:
        """Remove what a crashed server left; the caller holds `pg.lock`, so none of ours lives.

        Left in place, a pid that now belongs to an unrelated process would block the start. Raises
        `EmbeddedError` if a server that someone else started runs on the data.
        """
        stale = self.read_pid_file()
        if stale is not None and _serves(stale.pid, self.pgdata):
            raise EmbeddedError(
                f"a PostgreSQL that no broker started (pid {stale.pid}) runs on {self.pgdata}: "
                "stop it first"
            )
        for name in ("postmaster.pid", f".s.PGSQL.{PORT}", f".s.PGSQL.{PORT}.lock"):
            (self.pgdata / name).unlink(missing_ok=True)

    def make_socket_directory(self, account: Account) -> Path | None:
        """A short directory for the socket, or None where the data directory itself will do.

        It won't where the path is too long for a socket, or has a comma, at which libpq splits.
        """
        path = os.fsencode(self.pgdata / f".s.PGSQL.{PORT}")
        if len(path) <= LONGEST_SOCKET_PATH and b"," not in path:
            return None
        # Not where TMPDIR points, which may be as long, or closed to the account.
        directory = Path(tempfile.mkdtemp(prefix="queen-trio-", dir="/tmp"))
        account.give(directory)
        return directory

    def remake_socket_directory(self, directory: Path, account: Account) -> None:
        """Make the same directory anew after its server died; raises OSError if it was usurped."""
        with contextlib.suppress(FileNotFoundError):
            if directory.lstat().st_uid != account.uid:
                raise FileExistsError(f"{directory} isn't ours")
            shutil.rmtree(directory)
        directory.mkdir(mode=0o700)
        account.give(directory)

    def open_log(self) -> int:
        """A descriptor that appends to PostgreSQL's log."""
        with contextlib.suppress(FileNotFoundError):
            if self.log_path.stat().st_size > LOG_LIMIT:
                self.log_path.replace(self.log_path.with_name("postgres.log.1"))
        return os.open(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def log_tail(self, start: int) -> str:
        """The end of what was logged after the offset `start`."""
        try:
            with self.log_path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(start, end - LOG_TAIL))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""


def initdb_command(binaries: Binaries, pgdata: Path) -> list[str]:
    """The command that makes an empty cluster: UTF-8, byte order, nobody but the socket's users."""
    return [
        str(binaries.bin_dir / "initdb"),
        f"--pgdata={pgdata}",
        "--username=postgres",
        "--encoding=UTF8",
        "--locale=C",
        # The socket lies in a directory that only its owner (and root) can enter.
        "--auth-local=trust",
        "--auth-host=reject",
        "--data-checksums",
        "--no-instructions",
    ]


def server_command(
    binaries: Binaries, pgdata: Path, socket_directory: Path, settings: Mapping[str, str]
) -> list[str]:
    """The command of the server; what is set here wins over the files in the data directory.

    Raises `EmbeddedError` for a setting that isn't the caller's to change.
    """
    if forbidden := RESERVED_SETTINGS & settings.keys():
        raise EmbeddedError(f"the embedded PostgreSQL sets {', '.join(sorted(forbidden))} itself")
    quoted = str(socket_directory).replace('"', '""')
    effective = {
        **SETTINGS,
        **settings,
        "listen_addresses": "",
        "port": str(PORT),
        "unix_socket_directories": f'"{quoted}"',
        "unix_socket_permissions": "0700",
    }
    options = [f"--{name}={value}" for name, value in effective.items()]
    return [str(binaries.bin_dir / "postgres"), "-D", str(pgdata), *options]


def _serves(pid: int, pgdata: Path) -> bool:
    """Whether `pid` is a PostgreSQL server on `pgdata` (it works in its data directory)."""
    if Path("/proc/self/cwd").exists():
        try:
            return Path(f"/proc/{pid}/cwd").samefile(pgdata)
        except OSError:  # gone, or an account's that can't open our data
            return False
    ran = subprocess.run(  # noqa: S603
        ["/bin/ps", "-o", "comm=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return "postgres" in ran.stdout
