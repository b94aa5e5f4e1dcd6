"""One worker as its supervisor sees it: a process on a leash.

The leash is a socket pair. The worker writes to it once, when it serves. When our end closes, by
our doing or by our death, kill -9 included, the worker drains and exits. So a stop needs no signal,
and a SIGTERM that an init system sends to all processes of a service isn't taken for a second one.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import define, evolve, field

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from .worker import Place

log = structlog.get_logger(__name__)

# What a process may still take to vanish after SIGKILL, in seconds.
KILL_SECONDS: Final = 5.0


@define(eq=False)
class WorkerProcess:
    """A running worker; `served` tells whether it has ever answered requests."""

    process: trio.Process
    served: bool = False
    _leash: trio.SocketStream = field(kw_only=True)

    async def wait(self, on_serving: Callable[[], None]) -> int:
        """Wait for its end and return its status, as `subprocess` does (-9 is SIGKILL).

        `on_serving` is called when it answers requests; it must not block.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, on_serving)
            status = await self.process.wait()
            nursery.cancel_scope.cancel()
        return status

    async def _listen(self, on_serving: Callable[[], None]) -> None:
        with suppress(trio.BrokenResourceError):  # it died, which `wait` sees
            if await self._leash.receive_some(1):
                self.served = True
                on_serving()


@asynccontextmanager
async def open_worker(
    place: Place, environment: Mapping[str, str], stop_seconds: float
) -> AsyncIterator[WorkerProcess]:
    """Start a worker; leaving, even by cancellation, drains it within `stop_seconds` or kills it.

    The leash is added to its `place`. It gets a session of its own, so that Ctrl-C reaches the
    supervisor alone. Raises OSError when no process can be started.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    leash = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    async with leash:
        with theirs:
            place = evolve(place, leash=theirs.fileno())
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "queen_trio", "serve", "--place", place.encode()],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(*place.listeners, place.leash),
                start_new_session=True,
            )
        try:
            yield WorkerProcess(process, leash=leash)
        finally:
            leash.socket.close()
            with trio.move_on_after(stop_seconds + KILL_SECONDS, shield=True):
                await _wait_or_kill(process, stop_seconds)


async def _wait_or_kill(process: trio.Process, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await process.wait()
    if process.returncode is None:
        log.warning("worker didn't stop in time, killing it", pid=process.pid)
        process.kill()
        await process.wait()
