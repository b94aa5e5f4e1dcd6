"""One client process: does the load given on its command line and prints the outcome.

It prints READY once it is connected (and warm), starts its clock at a line on standard input, and
stays connected until that closes: PostgreSQL's backends take their CPU times with them when they
end. asyncio, not Trio: the load has to be cheap, and drivers have to run as they come.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from bench.load import Load, Outcome, Work
from bench.peers import open_peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.peers.peer import Producer

try:
    from uvloop import run
except ImportError:  # the loop of the standard library does as well, at twice the price
    from asyncio import run

Kept = TypeVar("Kept")

# A parked poll outlives the measurement.
PARK_MS = 120_000
WARM_SAMPLES = 25
# How long the last message of a latency run may be on its way.
ARRIVAL_SECONDS = 10.0
# What a consumer needs to subscribe.
SUBSCRIBE_SECONDS = 1.0
CREATE_BATCH = 100
CONFIGURE_AT_ONCE = 64


class Tally:
    """Clock and counters of this process."""

    def __init__(self, seconds: float) -> None:
        self.count = self.total = self.unmeasured = 0
        self.latencies: list[float] = []
        self.is_late = False
        self._seconds = seconds
        self._started = False
        self._kept: list[object] = []

    def keep(self, connections: Kept) -> Kept:
        """Leave these open until the process ends: closing them would cost and hide something."""
        self._kept.append(connections)
        return connections

    async def start(self) -> None:
        """Say that all is ready, and wait for the word."""
        print("READY", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        self._started = True
        self.begun = self.last = time.perf_counter()
        self._cpu = time.process_time()

    def expired(self) -> bool:
        """Whether the time is up; noted, because it means that something was left."""
        self.is_late = self.is_late or self.left() <= 0
        return self.is_late

    def left(self) -> float:
        return self.begun + self._seconds - time.perf_counter()

    def call(self, begun: float, numbers: Sequence[int]) -> None:
        """One call that began then, with these messages, has been confirmed."""
        self.last = time.perf_counter()
        self.latencies.append(self.last - begun)
        self.count += len(numbers)
        self.total += sum(numbers)

    def receive(self, number: int) -> None:
        """One message arrived, at a consumer that has no batches."""
        self.last = time.perf_counter()
        self.count += 1
        self.total += number

    def outcome(self, version: str) -> Outcome:
        if not self._started:
            self.begun = self.last = self._cpu = 0.0
        return Outcome(
            count=self.count,
            total=self.total,
            unmeasured=self.unmeasured,
            begun=self.begun,
            last=self.last,
            cpu=time.process_time() - self._cpu,
            latencies=self.latencies,
            is_late=self.is_late,
            version=version,
        )


async def prepare(load: Load, tally: Tally) -> str:
    """Leave an empty queue."""
    version = await open_peer(load).prepare()
    await tally.start()
    return version


async def push(load: Load, tally: Tally) -> None:
    """Each connection pushes one batch after another."""
    producers = tally.keep(await open_peer(load).producers(load.connections))
    next_number = load.first

    def batch() -> range:
        nonlocal next_number
        next_number += load.batch
        return range(next_number - load.batch, next_number)

    async def loop(producer: Producer) -> None:
        until = tally.begun + load.seconds
        while (begun := time.perf_counter()) < until and next_number < load.first + load.count:
            numbers = batch()
            await producer.push(numbers)
            tally.call(begun, numbers)

    for _ in range(load.warmup):
        await asyncio.gather(*[producer.push(batch()) for producer in producers])
    tally.unmeasured = next_number - load.first
    await tally.start()
    await asyncio.gather(*map(loop, producers))


async def drain(load: Load, tally: Tally) -> None:
    """Each connection takes one batch after another, until there is nothing left."""
    await open_peer(load).drain(tally)
    if tally.left() <= 0:
        tally.is_late = True


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
            tally.receive(number)
        if tally.count >= samples:
            done.set()

    peer = open_peer(load)
    [producer] = tally.keep(await peer.producers(1))
    listening = tally.keep(asyncio.ensure_future(peer.listen(received)))
    await asyncio.sleep(SUBSCRIBE_SECONDS)
    await tally.start()
    for number in range(samples):
        pause = tally.begun + number * load.pace - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        if listening.done():
            listening.result()  # raises what ended it
        sent[number] = time.perf_counter()
        await producer.push([number])
    await asyncio.wait_for(done.wait(), ARRIVAL_SECONDS)
    tally.last = time.perf_counter()


async def park(load: Load, tally: Tally) -> None:
    """`connections` long polls, each on a queue of its own; then a push into some, at random."""
    from bench.peers.queen import BrokerConnection, connect_http

    loads = [attrs.evolve(load, queue=f"{load.queue}_{i}") for i in range(load.connections)]

    async def configure(chosen: Sequence[Load]) -> None:
        http = tally.keep(await connect_http(load.address))
        for each in chosen:
            await BrokerConnection(http, each, 0).configure()

    await asyncio.gather(
        *[configure(loads[n::CONFIGURE_AT_ONCE]) for n in range(CONFIGURE_AT_ONCE)]
    )
    arrived: dict[int, float] = {}

    async def wait(poll: BrokerConnection, index: int) -> None:
        for message in await poll.receive(1, PARK_MS):
            arrived[index] = time.perf_counter()
            tally.receive(message["data"]["i"])

    waiting: list[asyncio.Task[None]] = tally.keep([])
    for index, each in enumerate(loads):  # one sends its request while the next connects
        poll = tally.keep(BrokerConnection(await connect_http(load.address), each, 0))
        waiting.append(asyncio.create_task(wait(poll, index)))
    await asyncio.sleep(0)
    await tally.start()
    http = tally.keep(await connect_http(load.address))
    woken = random.Random(7).sample(range(len(loads)), load.count)
    for turn, index in enumerate(woken):
        await asyncio.sleep(max(0, tally.begun + turn * load.pace - time.perf_counter()))
        begun = time.perf_counter()
        await BrokerConnection(http, loads[index], 0).push([index])
        await asyncio.wait_for(waiting[index], ARRIVAL_SECONDS)
        tally.latencies.append(arrived[index] - begun)
    tally.last = time.perf_counter()
    if any(task.done() for index, task in enumerate(waiting) if index not in woken):
        raise RuntimeError("a poll that nothing was pushed for has ended")


async def create(load: Load, tally: Tally) -> None:
    """Make `count` partitions by pushing one message into each, and empty them again."""
    from bench.peers.queen import Queen

    connections = tally.keep(await Queen(load).producers(load.connections))
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
    Work.PREPARE: prepare,
    Work.PUSH: push,
    Work.DRAIN: drain,
    Work.LATENCY: latency,
    Work.PARK: park,
    Work.CREATE: create,
}


async def main(load: Load) -> None:
    tally = Tally(load.seconds)
    version = await WORK[load.work](load, tally)
    print(tally.outcome(version or "").dumps(), flush=True)
    sys.stdin.readline()
    os._exit(0)  # no goodbyes: they would cost the servers CPU that nobody accounts for


if __name__ == "__main__":
    run(main(Load.loads(sys.argv[1])))
