"""One client process: does the load given on its command line and prints the outcome.

It prints READY once it is connected (and warm), starts its clock at a line on standard input, and
stays connected until that closes: PostgreSQL's backends take their CPU times with them when they
end. asyncio, not Trio: the load has to be cheap, and psycopg has to run as it comes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from bench.connection import connect_broker
from bench.floor import connect_floor
from bench.load import Load, Outcome, Side, Work

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

# A parked poll outlives the measurement.
PARK_MS = 120_000
WARM_SAMPLES = 25
# How long the last message of a latency run may be on its way.
ARRIVAL_SECONDS = 10.0
CREATE_BATCH = 100


class Connection(Protocol):
    """What both sides can do."""

    async def push(self, numbers: Sequence[int]) -> None: ...
    async def take(self, limit: int) -> list[int]: ...


class Tally:
    """Clock and counters of this process."""

    def __init__(self) -> None:
        self.count = self.total = self.unmeasured = 0
        self.latencies: list[float] = []

    async def start(self) -> None:
        """Say that all is ready, and wait for the word."""
        print("READY", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        self.begun = self.last = time.perf_counter()
        self._cpu = time.process_time()

    def call(self, begun: float, count: int) -> None:
        """One call that began then has been confirmed."""
        self.last = time.perf_counter()
        self.latencies.append(self.last - begun)
        self.count += count

    def outcome(self) -> Outcome:
        return Outcome(
            count=self.count,
            total=self.total,
            unmeasured=self.unmeasured,
            begun=self.begun,
            last=self.last,
            cpu=time.process_time() - self._cpu,
            latencies=self.latencies,
        )


async def connect(load: Load, index: int = 0) -> Connection:
    """Open one connection to the side that the load is for."""
    if load.side is Side.FLOOR:
        return await connect_floor(load, index)
    return await connect_broker(load, index)


async def push(load: Load, tally: Tally) -> None:
    """Each connection pushes one batch after another."""
    connections = [await connect(load, index) for index in range(load.connections)]
    number = load.first

    async def call(connection: Connection) -> None:
        nonlocal number
        number += load.batch
        await connection.push(range(number - load.batch, number))

    async def loop(connection: Connection) -> None:
        until = tally.begun + load.seconds
        while (begun := time.perf_counter()) < until and number < load.first + load.count:
            await call(connection)
            tally.call(begun, load.batch)

    for _ in range(load.warmup):
        await asyncio.gather(*map(call, connections))
    tally.unmeasured = number - load.first
    await tally.start()
    await asyncio.gather(*map(loop, connections))


async def drain(load: Load, tally: Tally) -> None:
    """Each connection takes one batch after another, until there is nothing left."""
    connections = [await connect(load, index) for index in range(load.connections)]
    await tally.start()

    async def loop(connection: Connection) -> None:
        until = tally.begun + load.seconds
        while (begun := time.perf_counter()) < until:
            numbers = await connection.take(load.batch)
            if not numbers:
                return
            tally.total += sum(numbers)
            tally.call(begun, len(numbers))

    await asyncio.gather(*map(loop, connections))


async def latency(load: Load, tally: Tally) -> None:
    """One connection sends at a steady pace, one waits: from the start of a send to its receipt."""
    samples = WARM_SAMPLES + load.count
    sent: dict[int, float] = {}
    done = asyncio.Event()

    def received(numbers: Sequence[int]) -> None:
        now = time.perf_counter()
        for number in numbers:
            if number >= WARM_SAMPLES:
                tally.latencies.append(now - sent[number])
            tally.count += 1
            tally.total += number
        if tally.count >= samples:
            done.set()

    producer = await connect(load)
    consuming = asyncio.ensure_future(await _consumer(load, received))
    await tally.start()
    for number in range(samples):
        pause = tally.begun + number * load.pace - time.perf_counter()
        await asyncio.sleep(max(0, pause))
        if consuming.done():
            consuming.result()  # raises what ended it
        sent[number] = time.perf_counter()
        await producer.push([number])
    await asyncio.wait_for(done.wait(), ARRIVAL_SECONDS)
    tally.last = time.perf_counter()


async def _consumer(load: Load, received: Callable[[Sequence[int]], None]) -> Awaitable[None]:
    """The waiting side, connected; it reports at receipt and acknowledges then."""

    async def on_broker() -> None:
        connection = await connect_broker(load, 0)
        while True:
            messages = await connection.receive(100, timeout_ms=5000)
            if messages:
                received([message["data"]["i"] for message in messages])
                await connection.acknowledge(messages)

    async def on_floor() -> None:
        listener, taker = await connect_floor(load, 0), await connect_floor(load, 1)
        async for _ in listener.notifications():
            while numbers := await taker.take(100):
                received(numbers)

    return on_broker() if load.side is Side.BROKER else on_floor()


async def park(load: Load, tally: Tally) -> None:
    """`connections` long polls, each on a queue of its own; then a push into some of them."""
    loads = [attrs.evolve(load, queue=f"{load.queue}_{i}") for i in range(load.connections)]
    polls = [await connect_broker(each, 0) for each in loads]
    for begin in range(0, len(polls), 64):
        await asyncio.gather(*(poll.configure() for poll in polls[begin : begin + 64]))
    arrived: dict[int, float] = {}

    async def wait(index: int) -> None:
        for message in await polls[index].receive(1, PARK_MS):
            arrived[index] = time.perf_counter()
            tally.count += 1
            tally.total += message["data"]["i"]

    step = max(1, len(polls) // load.count)
    woken = list(range(0, len(polls), step))[: load.count]
    producers = {index: await connect_broker(loads[index], 0) for index in woken}
    waiting = [asyncio.create_task(wait(index)) for index in range(len(polls))]
    await asyncio.sleep(0)  # let every poll send its request
    await tally.start()
    for turn, index in enumerate(woken):
        await asyncio.sleep(max(0, tally.begun + turn * load.pace - time.perf_counter()))
        begun = time.perf_counter()
        await producers[index].push([index])
        await asyncio.wait_for(waiting[index], ARRIVAL_SECONDS)
        tally.latencies.append(arrived[index] - begun)
    tally.last = time.perf_counter()
    if any(task.done() for index, task in enumerate(waiting) if index not in producers):
        raise RuntimeError("a poll that nothing was pushed for has ended")


async def create(load: Load, tally: Tally) -> None:
    """Make `count` partitions by pushing one message into each, and empty them again."""
    connections = [await connect_broker(load, index) for index in range(load.connections)]
    chunks = [
        range(begin, min(begin + CREATE_BATCH, load.count))
        for begin in range(0, load.count, CREATE_BATCH)
    ]
    await tally.start()

    async def loop(index: int) -> None:
        for chunk in chunks[index :: load.connections]:
            await connections[index].push_each(chunk)

    await asyncio.gather(*map(loop, range(load.connections)))
    while dropped := await connections[0].drop(limit=1000, partitions=1000):
        tally.count += dropped
    tally.last = time.perf_counter()


WORK: dict[Work, Callable[[Load, Tally], Any]] = {
    Work.PUSH: push,
    Work.DRAIN: drain,
    Work.LATENCY: latency,
    Work.PARK: park,
    Work.CREATE: create,
}


async def main(load: Load) -> None:
    tally = Tally()
    await WORK[load.work](load, tally)
    print(tally.outcome().dumps(), flush=True)
    sys.stdin.readline()
    os._exit(0)  # no goodbyes: they would cost the servers CPU that nobody accounts for


if __name__ == "__main__":
    asyncio.run(main(Load.loads(sys.argv[1])))
