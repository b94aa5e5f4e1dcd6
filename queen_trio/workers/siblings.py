"""How workers ask each other: a Unix socket each, one question and one answer a connection.

The question is a topic and the end of the stream, the answer bytes and the end of the stream. What
the bytes mean is http's business. The sockets are in a directory that only this account enters.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import define

from queen_trio.broker.siblings import Topic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = structlog.get_logger(__name__)

# A worker that is that late hangs, or starts just now; a scraper waits ten times as long.
ANSWER_SECONDS: Final = 1.0
READ_BYTES: Final = 64 * 1024
BACKLOG: Final = 64


@define(eq=False)
class SiblingSockets:
    """The sockets of all workers in `directory`; `serve` answers on this one's."""

    directory: str
    index: int
    count: int
    abandoned: bool = False
    """Whether there is no supervisor any more: then the last worker removes the directory."""

    async def serve(self, answer: Callable[[Topic], bytes]) -> None:
        """Answer the others' questions with `answer`, which must not block; until cancelled."""
        path = self._path(self.index)
        with suppress(FileNotFoundError):
            path.unlink()  # of a predecessor that was killed
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(BACKLOG)
            listener.setblocking(False)
            try:
                await trio.serve_listeners(
                    partial(self._answer, answer),
                    [trio.SocketListener(trio.socket.from_stdlib_socket(listener))],
                )
            finally:
                path.unlink(missing_ok=True)
                if self.abandoned:
                    with suppress(OSError):  # others are still there
                        os.rmdir(self.directory)

    async def ask(self, topic: Topic) -> Mapping[int, bytes | None]:
        """Return what each of the others says; None for one that doesn't answer in time."""
        answers: dict[int, bytes | None] = {}

        async def ask_one(index: int) -> None:
            answers[index] = await self._ask(index, topic)

        async with trio.open_nursery() as nursery:
            for index in range(self.count):
                if index != self.index:
                    nursery.start_soon(ask_one, index)
        return answers

    async def _ask(self, index: int, topic: Topic) -> bytes | None:
        answer = bytearray()
        try:
            with trio.fail_after(ANSWER_SECONDS):
                async with await trio.open_unix_socket(str(self._path(index))) as stream:
                    await stream.send_all(topic.encode())
                    await stream.send_eof()
                    async for data in stream:
                        answer += data
        except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
            log.info("worker doesn't tell", of=index, topic=str(topic), error=repr(error))
            return None
        return bytes(answer) or None

    async def _answer(self, answer: Callable[[Topic], bytes], stream: trio.SocketStream) -> None:
        """Serve one connection; whoever may open it is this account, so its faults are ours."""
        with trio.move_on_after(ANSWER_SECONDS), suppress(trio.BrokenResourceError):
            async with stream:
                question = bytearray()
                async for data in stream:
                    question += data
                if question.decode() in list(Topic):  # else it was cut off
                    await stream.send_all(answer(Topic(question.decode())))

    def _path(self, index: int) -> Path:
        return Path(self.directory) / f"{index}.sock"
