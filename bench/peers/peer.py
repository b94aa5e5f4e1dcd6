"""What a system under test must offer to be measured."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.load import Load

Kept = TypeVar("Kept")

# A consumer that finds nothing so often, with a pause, takes the queue for empty: what another one
# has locked shows up neither as there nor as gone.
EMPTY_TAKES = 3
EMPTY_PAUSE_SECONDS = 0.02


class Producer(Protocol):
    """One connection that sends."""

    async def push(self, numbers: Sequence[int]) -> None:
        """Send one message, or a batch of them; return once the server has confirmed all."""


class Consumer(Protocol):
    """One connection that receives."""

    async def take(self, limit: int) -> list[int]:
        """Fetch up to `limit`, decode and acknowledge them; return their numbers."""


class Clock(Protocol):
    """Where a drain notes what happened."""

    async def start(self) -> None:
        """Say that all is connected, and wait for the word."""

    def keep(self, connections: Kept) -> Kept:
        """Leave these open until the process ends."""

    def expired(self) -> bool: ...

    def left(self) -> float:
        """Seconds until the time is up."""

    def call(self, begun: float, numbers: Sequence[int]) -> None:
        """A batch that was asked for at `begun` is acknowledged."""

    def receive(self, number: int) -> None:
        """One message arrived, at a consumer that has no batches."""


class Peer:
    """One system, for one load. All methods run in a client process."""

    def __init__(self, load: Load) -> None:
        self.load = load

    async def prepare(self) -> str:
        """Leave an empty queue of the load's name, and tell the versions of what is used."""
        raise NotImplementedError

    async def producers(self, count: int) -> Sequence[Producer]:
        """Open so many producers."""
        raise NotImplementedError

    async def consumers(self, count: int) -> Sequence[Consumer]:
        """Open so many consumers."""
        raise NotImplementedError

    async def drain(self, clock: Clock) -> None:
        """Run the load's consumers until the queue is empty or the time is up.

        Libraries that bring workers of their own run these instead.
        """
        consumers = clock.keep(await self.consumers(self.load.connections))
        await clock.start()

        async def loop(consumer: Consumer) -> None:
            empty = 0
            while empty < EMPTY_TAKES and not clock.expired():
                begun = time.perf_counter()
                if numbers := await consumer.take(self.load.batch):
                    clock.call(begun, numbers)
                    empty = 0
                else:
                    empty += 1
                    await asyncio.sleep(EMPTY_PAUSE_SECONDS)

        await asyncio.gather(*map(loop, consumers))

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        """Wait for messages until cancelled; report them as they arrive, then acknowledge them."""
        raise NotImplementedError
