"""The account PostgreSQL runs under: ours or, as root, an unprivileged one (it refuses root)."""

from __future__ import annotations

import errno
import hashlib
import os
import pwd
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import attrs
import structlog

from queen_trio.embedded.errors import EmbeddedError

log = structlog.get_logger(__name__)

# The first that exists is used: one is PostgreSQL's own, the other is on every system.
UNPRIVILEGED_ACCOUNTS: Final = ("postgres", "nobody")

# Where data goes when we are root and the wanted place can't be reached by an unprivileged account.
SYSTEM_DATA_ROOT: Final = Path("/var/lib/queen-trio")

# All that PostgreSQL's programs see of an environment: nothing of ours (PG*, LC_*, LD_*) may steer
# them. PATH is for the shell that supervises them.
CHILD_ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LC_ALL": "C",
    "TZ": "UTC",
}

# A look-up that takes longer (a dead network file system) is a fault to report, in seconds.
PROBE_TIMEOUT: Final = 30.0

# Prints the first of its arguments that isn't a directory one can enter.
_FIRST_CLOSED: Final = 'for d in "$@"; do [ -x "$d/." ] || { printf %s "$d"; exit 1; }; done'


@attrs.frozen
class Account:
    """Who runs PostgreSQL; `switch` is true where we are root and the child must change to it."""

    name: str
    uid: int
    gid: int
    switch: bool

    def popen_options(self) -> dict[str, Any]:
        """The keywords with which a child runs under this account, with a clean environment."""
        options: dict[str, Any] = {"env": CHILD_ENVIRONMENT, "cwd": "/", "umask": 0o077}
        if self.switch:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": [self.gid]}
        return options

    def give(self, path: Path) -> None:
        """Hand a file or directory that we made over to the account."""
        if self.switch:
            os.chown(path, self.uid, self.gid)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a quick program as the account and return how it ended and what it printed.

        Raises `EmbeddedError` where we may not change to the account or the program hangs, OSError
        where the account can't execute it.
        """
        try:
            return subprocess.run(  # noqa: S603 - programs found by us, no shell
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PROBE_TIMEOUT,
                check=False,
                **self.popen_options(),
            )
        except PermissionError as error:
            if error.errno != errno.EPERM:  # EACCES is about the program
                raise
            raise EmbeddedError(
                "PostgreSQL refuses to run as root, and this root may not change to the account "
                f"{self.name} (a container without the capability SETUID?): start the broker as "
                "an ordinary user, or set PG_HOST to an existing server"
            ) from error
        except subprocess.SubprocessError as error:
            raise EmbeddedError(f"running {command[0]} as {self.name}: {error}") from error

    def first_closed(self, directory: Path) -> Path | None:
        """The topmost directory on the way to (and including) `directory` that the account can't
        enter, or None; what doesn't exist yet is not looked at.
        """
        if not self.switch:
            return None
        way = [d for d in (*reversed(directory.parents), directory) if d.exists()]
        found = self.run("/bin/sh", "-c", _FIRST_CLOSED, "sh", *way)
        return Path(found.stdout) if found.returncode else None


def choose_account(pgdata: Path) -> Account:
    """Who shall run PostgreSQL on `pgdata`, which need not exist yet.

    Existing data belongs to the account that made it, and PostgreSQL accepts no other: the choice
    must not change when, say, a package adds a `postgres` account later. Raises `EmbeddedError`.
    """
    owner = pgdata.stat().st_uid if pgdata.exists() else None
    uid = os.geteuid()
    if uid != 0:
        return _own_account(uid, owner, pgdata)
    if owner == 0:
        raise EmbeddedError(
            f"{pgdata} belongs to root, and PostgreSQL refuses to run as root: "
            f"chown -R postgres {pgdata}, or set QUEEN_DATA_DIR to another directory"
        )
    if owner is not None:
        gid = pgdata.stat().st_gid
        return Account(name=_name_of(owner) or f"uid {owner}", uid=owner, gid=gid, switch=True)
    for name in UNPRIVILEGED_ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name=name, uid=entry.pw_uid, gid=entry.pw_gid, switch=True)
    raise EmbeddedError(
        "PostgreSQL refuses to run as root, and there is no account to run it under instead "
        f"(looked for {', '.join(UNPRIVILEGED_ACCOUNTS)}): add one, start the broker as an "
        "ordinary user, or set PG_HOST to an existing server"
    )


def _own_account(uid: int, owner: int | None, pgdata: Path) -> Account:
    name = _name_of(uid)
    if owner is None and name is None:
        raise EmbeddedError(
            f"uid {uid} has no entry in the passwd database, and PostgreSQL's initdb needs one: "
            "add one, make the data directory once under an account that has one, "
            "or set PG_HOST to an existing server"
        )
    if owner not in (None, uid):
        raise EmbeddedError(
            f"{pgdata} belongs to uid {owner}, and we are uid {uid}: start the broker as its "
            "owner, or set QUEEN_DATA_DIR to another directory"
        )
    return Account(name=name or f"uid {uid}", uid=uid, gid=os.getegid(), switch=False)


def _name_of(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def default_data_dir(preferred: Path) -> Path:
    """The directory to use where the operator named none: `preferred`, if that can work.

    As root in a place closed to unprivileged accounts (a clone under /root), PostgreSQL couldn't
    reach it, so that data goes to a directory below /var/lib/queen-trio whose name depends on
    nothing but `preferred`. Says so in the log. Creates nothing; raises `EmbeddedError`.
    """
    preferred = preferred.absolute()
    closed = None
    if os.geteuid() == 0:
        account = choose_account(preferred / "postgres")
        closed = account.first_closed(preferred)
    if closed is None:
        log.info("embedded postgres: data directory", path=str(preferred))
        return preferred
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", preferred.parent.name).strip("-.") or "data"
    digest = hashlib.blake2s(os.fsencode(preferred), digest_size=4).hexdigest()
    chosen = SYSTEM_DATA_ROOT / f"{label}-{digest}"
    log.info(
        "embedded postgres: data directory",
        path=str(chosen),
        instead_of=str(preferred),
        reason=f"as root, PostgreSQL runs as {account.name}, who can't enter {closed}",
        change_with="QUEEN_DATA_DIR",
    )
    return chosen
