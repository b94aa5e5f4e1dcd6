"""The broker's process under chaos: `queen-trio serve`, and a socket that says what to break in it.

`python -m tests.chaos.broker PATH` listens on that Unix socket. A line of JSON asks for one thing:

    {"break": "mesh" | "jobs" | "http" | "job …", "step": n}   end it by an error at an await
    {"clock": seconds}                                         move the wall clock

The answer, `true`, comes when it is done. Closing the connection takes a request back.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from queen_trio import daemon, supervision
from queen_trio.cli import main
from queen_trio.http import server
from queen_trio.jobs import runner
from queen_trio.mesh import MeshNode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from datetime import tzinfo

    from queen_trio.jobs.runner import Job

LINE_BYTES = 1000
# A part that ran so long was healthy: it is started again at once, and not after half a minute as
# one that has crashed every few seconds is, or most of a long run would do without it.
HEALTHY_SECONDS = 2.0


class Broken(Exception):
    """What a part ends with when it is told to: no error that queen-trio knows."""


class Part:
    """Async functions, and all tasks that they start, which can be broken off from outside."""

    def __init__(self) -> None:
        self._running: dict[trio.lowlevel.Task, trio.CancelScope] = {}

    async def run(self, function: Callable[..., Awaitable[Any]], *args: Any, **more: Any) -> None:
        """Run it; raises `Broken` where `wait_broken` ended it."""
        task = trio.lowlevel.current_task()
        with trio.CancelScope() as scope:
            self._running[task] = scope
            try:
                await function(*args, **more)
            finally:
                del self._running[task]
        if scope.cancel_called:
            raise Broken

    async def wait_broken(self, step: int) -> None:
        """Block until its tasks have waited `step` times; then that await is its last."""
        countdown = _Countdown(self._break, step)
        trio.lowlevel.add_instrument(countdown)
        try:
            await countdown.done.wait()
        finally:
            with suppress(KeyError):  # Trio has removed one that raised
                trio.lowlevel.remove_instrument(countdown)

    def _break(self, task: trio.lowlevel.Task) -> Callable[[], None] | None:
        for ancestor in _line(task):
            if scope := self._running.get(ancestor):
                return scope.cancel
        return None


class _Countdown(trio.abc.Instrument):
    """Calls what `find` gives for the task that waits for the `steps`th time."""

    def __init__(
        self, find: Callable[[trio.lowlevel.Task], Callable[[], None] | None], steps: int
    ) -> None:
        self._find = find
        self._left = steps
        self.done = trio.Event()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._left and (breaks := self._find(task)):
            self._left -= 1
            if not self._left:
                breaks()
                self.done.set()


def _line(task: trio.lowlevel.Task | None) -> Iterator[trio.lowlevel.Task]:
    """A task, the one whose nursery it is in, and so on."""
    while task is not None:
        yield task
        task = None if task.parent_nursery is None else task.parent_nursery.parent_task


class Clock:
    """The wall clock that queen-trio's modules see, ahead by so many seconds."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def install(self) -> None:
        """Stand between queen-trio, as far as it is loaded, and the clock; Trio's is another."""
        real, real_ns, clock = time.time, time.time_ns, self

        class Shifted(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + timedelta(seconds=clock.ahead)

        time.time = lambda: real() + self.ahead
        time.time_ns = lambda: real_ns() + int(self.ahead * 1e9)
        for name, module in list(sys.modules.items()):
            if name.startswith("queen_trio") and getattr(module, "datetime", None) is datetime:
                vars(module)["datetime"] = Shifted


class Sabotage:
    """Every part of a broker, and its clock, to be broken by name."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = defaultdict(Part)
        self.clock = Clock()

    def install(self) -> None:
        """Stand between the daemon and its parts; does nothing to them until asked."""
        serve_mesh, serve_jobs = MeshNode.serve, runner.serve_jobs
        wrapped: set[str] = set()

        async def mesh(node: MeshNode, *args: Any, **more: Any) -> None:
            await self.parts["mesh"].run(serve_mesh, node, *args, **more)

        async def jobs(jobs: Sequence[Job]) -> None:
            for job in jobs:
                name = f"job {job.name}"
                if name not in wrapped:
                    wrapped.add(name)
                    job.run = partial(self.parts[name].run, job.run)
            await self.parts["jobs"].run(serve_jobs, jobs)

        MeshNode.serve = mesh  # type: ignore[method-assign,assignment]
        daemon.serve_jobs = jobs  # type: ignore[attr-defined]
        server.serve = partial(self.parts["http"].run, server.serve)
        supervision.HEALTHY_SECONDS = HEALTHY_SECONDS  # type: ignore[misc]
        self.clock.install()

    async def obey(self, stream: trio.SocketStream) -> None:
        """Do what one connection asks for."""
        async with stream:
            line = b""
            while not line.endswith(b"\n"):
                if not (data := await stream.receive_some(LINE_BYTES)):
                    return
                line += data
            request = json.loads(line)
            if "clock" in request:
                self.clock.ahead = request["clock"]
            else:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_wait_closed, stream, nursery.cancel_scope)
                    await self.parts[request["break"]].wait_broken(request["step"])
                    nursery.cancel_scope.cancel()
            with suppress(trio.BrokenResourceError):
                await stream.send_all(b"true\n")


async def _wait_closed(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    with suppress(trio.BrokenResourceError):
        await stream.receive_some(1)
    scope.cancel()


async def _run(path: str, run: Callable[..., Awaitable[int]], *args: Any, **more: Any) -> int:
    sabotage = Sabotage()
    sabotage.install()
    with suppress(FileNotFoundError):  # a predecessor's, which was killed
        os.unlink(path)
    sock = trio.socket.socket(trio.socket.AF_UNIX)
    await sock.bind(path)
    sock.listen()
    async with trio.open_nursery() as nursery:
        listeners = [trio.SocketListener(sock)]
        nursery.start_soon(trio.serve_listeners, sabotage.obey, listeners)
        code = await run(*args, **more)
        nursery.cancel_scope.cancel()
    return code


if __name__ == "__main__":
    daemon.run = partial(_run, sys.argv[1], daemon.run)
    main(["serve"])
