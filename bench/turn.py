"""Taking turns with other benchmarks on the machine, and waiting for it to fall quiet."""

from __future__ import annotations

import fcntl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from bench.accounting import busy_seconds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

POLL_SECONDS: Final = 0.05
# A second with less than this is quiet enough to begin; after so many seconds we begin anyway.
QUIET_CORES: Final = 0.3
PATIENCE_SECONDS: Final = 8


@asynccontextmanager
async def take_turn(lock: Path | None, *, wait_quiet: bool) -> AsyncIterator[None]:
    """Hold the lock of this file, as flock(1) does, and begin in a quiet second if asked to.

    Who takes no part in the lock can still disturb: the wait for quiet is bounded, and the CPU
    accounting tells afterwards. Without a file there is neither lock nor wait.
    """
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        while not _try_lock(file.fileno()):  # noqa: ASYNC110 - another process has it
            await trio.sleep(POLL_SECONDS)
        for _ in range(PATIENCE_SECONDS if wait_quiet else 0):
            busy = busy_seconds()
            await trio.sleep(1)
            if busy_seconds() - busy < QUIET_CORES:
                break
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
