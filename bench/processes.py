"""Starting and stopping the servers of a run, each by its pid."""

from __future__ import annotations

import socket
import subprocess
from contextlib import ExitStack, asynccontextmanager
from signal import SIGTERM
from typing import TYPE_CHECKING, Any, Final

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

HOST: Final = "127.0.0.1"
START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 20.0
POLL_SECONDS: Final = 0.05
LOG_TAIL: Final = 4000


def free_ports(count: int) -> list[int]:
    """Loopback ports that were free a moment ago, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


async def is_listening(port: int) -> bool:
    """Whether something accepts connections on a loopback port."""
    try:
        stream = await trio.open_tcp_stream(HOST, port)
    except OSError:
        return False
    await stream.aclose()
    return True


@asynccontextmanager
async def open_process(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    stop: Sequence[str] = (),
    stop_signal: int = SIGTERM,
    **options: Any,
) -> AsyncIterator[trio.Process]:
    """Run a server with its output in the file `log`; leaving stops it.

    It is asked by `stop_signal`, or by the command `stop`, and killed after `STOP_SECONDS`.
    """
    with log.open("ab") as output:
        process = await trio.lowlevel.open_process(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for us
            **options,
        )
    try:
        yield process
    finally:
        with trio.move_on_after(STOP_SECONDS, shield=True):
            if stop and process.poll() is None:
                await trio.run_process(stop, env=environment, capture_stdout=True, check=False)
            elif process.poll() is None:
                process.send_signal(stop_signal)
            await process.wait()
        if process.returncode is None:
            process.kill()


async def wait_listening(process: trio.Process, port: int, log: Path) -> None:
    """Wait until the server accepts connections; raises RuntimeError, with its log, if it fails."""
    with trio.move_on_after(START_SECONDS):
        while process.poll() is None:
            if await is_listening(port):
                return
            await trio.sleep(POLL_SECONDS)
    tail = (await trio.Path(log).read_text(errors="replace"))[-LOG_TAIL:]
    raise RuntimeError(f"{log.parent.name} didn't start:\n{tail}")
