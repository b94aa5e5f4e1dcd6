"""The watchdog: ends a process whose Trio loop has stopped turning (spec 8.24).

The kernel accepts connections for a process that hangs, so that an orchestrator's TCP probe never
finds out. A thread counts the steps in which the loop hasn't given a sign of life. It counts steps
and doesn't read clocks: in a process that was stopped (SIGSTOP, a frozen container, a paused
machine) no steps pass. It can't see code in C that keeps the interpreter lock.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from typing import NoReturn

EXIT_HUNG: Final = 70  # EX_SOFTWARE of sysexits.h
STEPS: Final = 30  # within the limit; the loop ticks twice in each
# For the report: a full pipe behind stderr may be what the loop hangs on, and holds us up, too.
REPORT_SECONDS: Final = 5.0
STDERR: Final = 2


async def serve_watchdog(
    limit_seconds: float, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Watch this loop until cancelled; started when the watch has begun.

    When it doesn't turn for `limit_seconds`, the stacks of all threads are written to stderr and
    the process ends with `EXIT_HUNG`; with SIGALRM if stderr doesn't take them.
    """
    watch = _Watch(limit_seconds)
    thread = threading.Thread(target=watch.run, name="watchdog", daemon=True)
    thread.start()
    task_status.started()
    try:
        while True:
            watch.loop_turned = True
            await trio.sleep(watch.step_seconds / 2)
    finally:
        watch.stopped.set()


class _Watch:
    """What the loop and the thread share."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self.step_seconds = limit_seconds / STEPS
        self.loop_turned = False
        self.stopped = threading.Event()

    def run(self) -> None:
        """Count steps without a turn, in the thread."""
        silent = 0
        while not self.stopped.wait(self.step_seconds):
            silent = 0 if self.loop_turned else silent + 1
            self.loop_turned = False
            if silent >= STEPS:
                _abort(self.limit_seconds)


def _abort(limit_seconds: float) -> NoReturn:
    # No handler of ours: SIGALRM ends the process, whatever its threads wait for.
    signal.setitimer(signal.ITIMER_REAL, REPORT_SECONDS)
    # Not through the log: the loop may hang while it holds the lock of the stream.
    os.write(STDERR, b"watchdog: the event loop hangs since %g s, aborting\n" % limit_seconds)
    faulthandler.dump_traceback(STDERR, all_threads=True)
    os._exit(EXIT_HUNG)
