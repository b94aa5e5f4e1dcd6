"""One of PostgreSQL's programs, running under a small shell that ends it when the broker is gone.

The shell reads a pipe whose other end only the broker has. However the broker goes, kill -9
included, the kernel closes that end, and the shell stops the program. (A parent-death signal
wouldn't do: it fires when the *thread* that spawned the child ends, and Trio's come and go.)
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Final

import attrs
import structlog
import trio

from queen_trio.embedded import locks
from queen_trio.embedded.errors import EmbeddedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trio.abc import SendStream

    from queen_trio.embedded.account import Account
    from queen_trio.grace import Grace

log = structlog.get_logger(__name__)

# A fast shutdown takes 0.1 s plus a checkpoint of at most shared_buffers; less at the end of the
# broker's own shutdown. After it comes SIGKILL, and crash recovery at the next start. In seconds.
STOP_DEADLINE: Final = 10.0

# What a process may still take to vanish after SIGKILL (its I/O in flight), in seconds; at the end
# of the broker's own shutdown the shorter time, on top of that.
KILL_DEADLINE: Final = 5.0
KILL_DEADLINE_LEAST: Final = 1.0

# Arguments: how to stop, a directory to remove at the end (or nothing), the program and its own.
# `kill 0` is the process group, which is a session of its own: this shell and what it started.
# The program gets no copy of the pipe; an asynchronous list would read /dev/null, hence fd 3.
_SCRIPT: Final = """
how=$1 scratch=$2
shift 2
exec 3<&0 </dev/null
"$@" 3<&- &
child=$!
{
    while read -r _; do :; done
    if [ "$how" = interrupt ]; then kill -INT "$child"; else kill -KILL 0; fi
} <&3 3<&- &
reader=$!
exec 3<&-
wait "$child"
code=$?
kill -KILL "$reader" 2>/dev/null
wait "$reader" 2>/dev/null
[ -z "$scratch" ] || rmdir "$scratch" 2>/dev/null
exit "$code"
"""


class StopBy(enum.Enum):
    """What end of file on the pipe does to the program."""

    INTERRUPT = "interrupt"  # PostgreSQL's fast shutdown
    KILL = "kill"  # for a program whose half-done work is thrown away


@attrs.define
class Supervised:
    """A running program; `process` is its shell, which exits with the program's status."""

    process: trio.Process
    pipe: SendStream
    lock_path: Path
    grace: Grace

    async def stop(self) -> None:
        """End the program and everything it started; bounded, and complete even if cancelled."""
        began = trio.current_time()
        with self.grace.shield(STOP_DEADLINE) as patience:
            await self._close_and_wait()
        if patience.cancelled_caught:
            after = round(trio.current_time() - began, 1)
            log.warning("embedded postgres: didn't stop in time, killing it", after=after)
            if self.process.returncode is None:  # else the group's number may be someone else's
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            kill_holders(self.lock_path)
            least = trio.current_time() + KILL_DEADLINE_LEAST
            deadline = max(self.grace.deadline(KILL_DEADLINE), least)
            with trio.CancelScope(shield=True, deadline=deadline) as patience:
                await self._close_and_wait()
            if patience.cancelled_caught:
                log.error("embedded postgres: still running after SIGKILL", pid=self.process.pid)

    async def _close_and_wait(self) -> None:
        await self.pipe.aclose()
        await self.process.wait()
        await locks.wait_unlocked(self.lock_path)


async def start_supervised(
    command: Sequence[str | Path],
    *,
    account: Account,
    stop_by: StopBy,
    lock: int,
    lock_path: Path,
    output: int,
    grace: Grace,
    scratch: Path | None = None,
) -> Supervised:
    """Start `command` as `account`; it inherits the descriptor `lock`, which stays the caller's.

    `output` gets what it prints, `grace` limits the time it gets to stop. `scratch` is an empty
    directory of the account's that the shell removes after the program, even if there is no broker
    any more to do so. Its session is its own, so that Ctrl-C reaches the broker alone. Raises
    `EmbeddedError`. If cancelled, nothing was started or it is about to stop: the lock tells when
    it is gone.
    """
    try:
        process = await trio.lowlevel.open_process(
            ["/bin/sh", "-c", _SCRIPT, "sh", stop_by.value, scratch or "", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(lock,),
            start_new_session=True,
            **account.popen_options(),
        )
    except OSError as error:
        raise EmbeddedError(f"can't start {command[0]} as {account.name}: {error}") from error
    if process.stdin is None:
        raise AssertionError("asked for a pipe")
    return Supervised(process=process, pipe=process.stdin, lock_path=lock_path, grace=grace)


def kill_holders(lock_path: Path) -> None:
    """SIGKILL what has the lock's file open: PostgreSQL's processes and their shell.

    (It is of no use to others. Each of PostgreSQL's children leads a session of its own, so that
    the group's kill alone may leave a stuck one.)
    """
    for pid in locks.holders(lock_path) or ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
