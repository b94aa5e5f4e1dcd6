"""A consumer that runs in the background of a scenario, and what its handler was given."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

Message = dict[str, Any]

# Between two looks at a condition that nobody announces.
POLL_SECONDS = 0.01


class Consumption:
    """The arguments of all calls of a handler, in order, and the messages in them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.messages: list[Message] = []
        self.task: asyncio.Task[None]
        self._arrived = asyncio.Event()

    @property
    def data(self) -> list[Any]:
        """The payloads, in order of their arrival."""
        return [message["data"] for message in self.messages]

    def record(self, call: Message | list[Message]) -> None:
        """Add one call of the handler."""
        self.calls.append(call)
        self.messages += call if isinstance(call, list) else [call]
        self._arrived.set()

    async def wait_messages(self, count: int) -> None:
        """Wait until at least `count` messages came; raises what ended the consumer before."""
        while len(self.messages) < count:
            self._arrived.clear()
            arrived = asyncio.ensure_future(self._arrived.wait())
            try:
                await asyncio.wait({arrived, self.task}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrived.cancel()
            if self.task.done() and len(self.messages) < count:
                self.task.result()
                raise AssertionError(f"the consumer ended after {len(self.messages)} messages")

    async def wait_end(self) -> None:
        """Wait until the consumer ends by itself; raises what it raised."""
        await self.task


@asynccontextmanager
async def consuming(
    builder: Any, work: Callable[[Any], Awaitable[None]] | None = None, **options: Any
) -> AsyncIterator[Consumption]:
    """Consume in the background while the block runs; `work` is the handler's own part."""
    seen = Consumption()

    async def handler(call: Message | list[Message]) -> None:
        seen.record(call)
        if work is not None:
            await work(call)

    async def consume() -> None:
        await builder.consume(handler, **options)

    seen.task = asyncio.create_task(consume())
    try:
        yield seen
    finally:
        seen.task.cancel()
        with suppress(asyncio.CancelledError):
            await seen.task


async def wait_parked(queen: Any, count: int = 1) -> None:
    """Wait until `count` long polls have looked and wait at the broker, which is the test's own."""
    while True:
        wakeups = (await queen.admin.metrics())["wakeups"]
        if (wakeups["parked"], wakeups["asking"]) == (count, 0):
            return
        await asyncio.sleep(POLL_SECONDS)
