"""The two locks of a data directory, and who holds them.

`daemon.lock` is the broker's own: one broker per directory. `pg.lock` is only ever passed on:
PostgreSQL's processes inherit it, and the broker closes its own copy right after starting them. So
whoever gets it has proof that no process of an earlier PostgreSQL lives, whatever a pid file says.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

import trio

from queen_trio.embedded.errors import EmbeddedError

# Time a predecessor that is just ending gets to let go, in seconds.
DAEMON_PATIENCE: Final = 1.0
POLL_INTERVAL: Final = 0.02

_PROC: Final = Path("/proc")


def lock_nowait(path: Path) -> int | None:
    """Lock `path` and return the descriptor that holds it, or None where another holds it.

    Closing the last copy of the descriptor unlocks; no copy is inherited unless passed on.
    Raises `EmbeddedError` on a file system without locks, OSError where the file can't be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EWOULDBLOCK:
            return None
        raise EmbeddedError(
            f"the file system of {path} has no working locks ({error.strerror}), without which "
            "two brokers could ruin the data: set QUEEN_DATA_DIR to a local disk"
        ) from error
    return descriptor


async def acquire_daemon_lock(path: Path) -> int:
    """Lock the directory for this broker; the caller closes the descriptor.

    Raises `EmbeddedError` after `DAEMON_PATIENCE` where another broker uses it.
    """
    descriptor = None
    with trio.move_on_after(DAEMON_PATIENCE):
        while (descriptor := lock_nowait(path)) is None:  # noqa: ASYNC110 - files tell nobody
            await trio.sleep(POLL_INTERVAL)
    if descriptor is None:
        raise EmbeddedError(
            f"another broker (pid {_note(path) or 'unknown'}) uses the data directory "
            f"{path.parent}: stop it, or set QUEEN_DATA_DIR to another directory"
        )
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _note(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


async def wait_unlocked(path: Path) -> None:
    """Return as soon as nobody holds the lock; may be cancelled at any time."""
    while (descriptor := lock_nowait(path)) is None:  # noqa: ASYNC110 - files tell nobody
        await trio.sleep(POLL_INTERVAL)
    os.close(descriptor)


def holders(path: Path) -> list[int] | None:
    """The other processes that have `path` open, or None where the system doesn't tell (no /proc).

    Processes whose descriptors we may not see are left out.
    """
    if not (_PROC / "self" / "fd").exists():
        return None
    wanted = path.stat()
    return [
        int(entry.name)
        for entry in os.scandir(_PROC)
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _has_open(entry, wanted)
    ]


def _has_open(process: os.DirEntry[str], wanted: os.stat_result) -> bool:
    try:
        descriptors = list(os.scandir(f"{process.path}/fd"))
    except OSError:  # not ours to see, or it just ended
        return False
    for descriptor in descriptors:
        try:
            status = descriptor.stat()
        except OSError:
            continue
        if (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
