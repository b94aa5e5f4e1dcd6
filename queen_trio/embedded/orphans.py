"""Wait for, and if need be end, what an earlier broker's PostgreSQL left running."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Final

import structlog
import trio

from queen_trio.embedded import locks
from queen_trio.embedded.progress import Progress
from queen_trio.embedded.supervisor import kill_holders

if TYPE_CHECKING:
    from queen_trio.embedded.cluster import Cluster

log = structlog.get_logger(__name__)

# An orphan mostly is stopping already, told by its supervising shell. One whose shell was killed
# too is asked, and after a large checkpoint's worth of patience killed, which costs it no
# committed data. In seconds.
ASK_AFTER: Final = 1.0
KILL_AFTER: Final = 60.0


async def acquire_pg_lock(cluster: Cluster) -> int:
    """Lock out every PostgreSQL but the one to start next; the caller closes the descriptor.

    The caller holds the daemon lock, so whoever has this one is an orphan. Waits until it is gone.
    """
    waiting = Progress("embedded postgres: waiting for an earlier server to end")
    asked = killed = False
    while (descriptor := locks.lock_nowait(cluster.pg_lock)) is None:
        if waiting.elapsed() > ASK_AFTER and not asked:
            asked = True
            _ask_to_stop(cluster)
        if waiting.elapsed() > KILL_AFTER and not killed:
            killed = True
            log.warning("embedded postgres: killing an earlier server", after=KILL_AFTER)
            kill_holders(cluster.pg_lock)
        if waiting.due():
            waiting.report()
        await trio.sleep(locks.POLL_INTERVAL)
    return descriptor


def _ask_to_stop(cluster: Cluster) -> None:
    """Send the fast shutdown to the server of the pid file, if it is one that holds the lock."""
    pid_file = cluster.read_pid_file()
    holders = locks.holders(cluster.pg_lock)
    if pid_file is None or (holders is not None and pid_file.pid not in holders):
        return
    log.warning("embedded postgres: stopping an earlier server", pid=pid_file.pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid_file.pid, signal.SIGINT)
