"""The workloads: what each one does to a side, and how its count is checked."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any, Final

import attrs
import psycopg
import trio

from bench import floor
from bench.connection import HOST
from bench.load import Load, Side, Work
from bench.measure import Sample, Site, WrongCount, run_clients
from bench.postgres import BROKER_DATABASE, FLOOR_DATABASE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

PRODUCERS: Final = 16
CONSUMERS: Final = 8
BATCH: Final = 100
PARTITIONS: Final = 64
GROUPS: Final = 5
# Client processes, so that one Python process is not the limit.
PROCESSES: Final = 2
# Apart by more than one process sends in a run.
NUMBERS_APART: Final = 10**9
NOT_FOUND: Final = 404
# Creating a queue is a commit of its own; on a busy machine 64 at once take a second.
QUEUE_SECONDS: Final = 0.02


@attrs.frozen(kw_only=True)
class Sizes:
    """How much of it: lengths in seconds, messages, samples, parked polls, partitions."""

    seconds: float = 3.0
    backlog: int = 40_000
    samples: int = 150
    polls: int = 2_000
    partitions: int = 20_000
    idle_seconds: float = 5.0


@attrs.frozen
class Trial:
    """One try of a workload: who is measured, how much, on a queue of its own."""

    site: Site
    side: Side
    queue: str
    sizes: Sizes

    def load(self, work: Work, **options: Any) -> Load:
        """A load for this trial's side."""
        broker = self.side is Side.BROKER
        address = str(self.site.broker.port) if broker else self.site.postgres.dsn(FLOOR_DATABASE)
        return Load(side=self.side, work=work, address=address, queue=self.queue, **options)

    @property
    def database(self) -> str:
        return BROKER_DATABASE if self.side is Side.BROKER else FLOOR_DATABASE

    async def reset(self, *more: str) -> None:
        """Leave nothing to flush that an earlier workload wrote, and an empty table."""
        if self.side is Side.FLOOR:
            await self.site.postgres.run(FLOOR_DATABASE, *floor.RESET, *more)
        await self.site.postgres.run("postgres", "CHECKPOINT")

    async def stored(self) -> int:
        """How many messages the side says that it has got in this queue (none: it isn't there)."""
        return await trio.to_thread.run_sync(_stored, self.load(Work.PUSH))


def _stored(load: Load) -> int:
    if load.side is Side.FLOOR:
        with psycopg.connect(load.address) as connection:
            row = connection.execute("SELECT count(*) FROM floor").fetchone()
            return int(row[0]) if row else 0
    broker = http.client.HTTPConnection(HOST, int(load.address), timeout=60)
    broker.request("GET", f"/api/v1/resources/queues/{load.queue}")
    with broker.getresponse() as answer:
        if answer.status == NOT_FOUND:
            return 0
        return int(json.load(answer)["totals"]["total"])


def _expect(what: str, got: int, wanted: int) -> None:
    if got != wanted:
        raise WrongCount(f"{what}: {got:,} instead of {wanted:,}")


async def _push(trial: Trial, batch: int, partitions: int, warmup: int) -> Sample:
    load = trial.load(
        Work.PUSH,
        connections=PRODUCERS // PROCESSES,
        batch=batch,
        partitions=partitions,
        seconds=trial.sizes.seconds,
        warmup=warmup,
    )
    before = await trial.stored()
    sample = await run_clients(
        trial.site, [attrs.evolve(load, first=n * NUMBERS_APART) for n in range(PROCESSES)]
    )
    _expect("messages stored", await trial.stored() - before, sample.count + sample.unmeasured)
    return sample


async def _drain(trial: Trial, partitions: int, groups: int = 0) -> Sample:
    backlog = trial.sizes.backlog // BATCH * BATCH
    fill = trial.load(
        Work.PUSH, connections=PRODUCERS, batch=BATCH, partitions=partitions, count=backlog
    )
    filled = (await run_clients(trial.site, [fill])).count
    # As autovacuum would within a minute; a table planned as empty is slow for both sides.
    await trial.site.postgres.run(trial.database, "ANALYZE")
    consumers = GROUPS if groups else CONSUMERS // PROCESSES
    load = trial.load(Work.DRAIN, connections=consumers, batch=BATCH, groups=groups)
    sample = await run_clients(trial.site, [load] * PROCESSES)
    times = max(groups, 1)
    _expect("messages consumed", sample.count, filled * times)
    # Numbers 0 to n-1, each once (for each group).
    _expect("sum of the numbers consumed", sample.total, filled * (filled - 1) // 2 * times)
    return sample


async def push_single(trial: Trial) -> Sample:
    await trial.reset()
    return await _push(trial, 1, PARTITIONS, warmup=30)


async def push_batches(trial: Trial) -> Sample:
    await trial.reset()
    return await _push(trial, BATCH, PARTITIONS, warmup=3)


async def drain(trial: Trial) -> Sample:
    await trial.reset()
    return await _drain(trial, PARTITIONS)


async def latency(trial: Trial) -> Sample:
    await trial.reset(*floor.NOTIFY)
    sample = await run_clients(
        trial.site, [trial.load(Work.LATENCY, count=trial.sizes.samples, partitions=PARTITIONS)]
    )
    sent = sample.count
    _expect("sum of the numbers received", sample.total, sent * (sent - 1) // 2)
    return sample


async def fan_out(trial: Trial) -> Sample:
    await trial.reset()
    return await _drain(trial, PARTITIONS, groups=GROUPS)


async def parked(trial: Trial) -> Sample:
    await trial.reset()
    woken = min(trial.sizes.samples, trial.sizes.polls)
    sample = await run_clients(
        trial.site,
        [
            trial.load(
                Work.PARK,
                connections=trial.sizes.polls,
                count=woken,
                partitions=1,
                seconds=trial.sizes.polls * QUEUE_SECONDS,
            )
        ],
        idle_seconds=trial.sizes.idle_seconds,
    )
    _expect("polls woken", sample.count, woken)
    return sample


async def _make_partitions(trial: Trial) -> None:
    await trial.reset()
    made = trial.sizes.partitions
    create = trial.load(Work.CREATE, connections=4, count=made, partitions=made)
    _expect("partitions made", (await run_clients(trial.site, [create])).count, made)
    await trial.site.postgres.run(trial.database, "ANALYZE", "CHECKPOINT")


async def push_many_partitions(trial: Trial) -> Sample:
    await _make_partitions(trial)
    return await _push(trial, BATCH, trial.sizes.partitions, warmup=3)


async def drain_many_partitions(trial: Trial) -> Sample:
    await _make_partitions(trial)
    return await _drain(trial, trial.sizes.partitions)


@attrs.frozen
class Workload:
    """One row of the table; `sides` are those that can do it."""

    title: str
    run: Callable[[Trial], Awaitable[Sample]]
    sides: tuple[Side, ...] = (Side.BROKER,)


_BOTH: Final = (Side.FLOOR, Side.BROKER)

WORKLOADS: Final[Mapping[str, Workload]] = {
    "a": Workload("push, 1 a request, 16 connections, 64 partitions", push_single, _BOTH),
    "b": Workload("push, 100 a request, 16 connections, 64 partitions", push_batches, _BOTH),
    "c": Workload("drain: pop 100 + ack, 8 consumers", drain, _BOTH),
    "d": Workload("end to end, one message every 20 ms, one waiting consumer", latency, _BOTH),
    "e": Workload("5 groups drain one backlog at once, 10 consumers", fan_out),
    "f": Workload("parked long polls, one a queue; a push into some", parked),
    "g": Workload("as b, with many partitions", push_many_partitions),
    "h": Workload("as c, with many partitions", drain_many_partitions),
}


async def rounds(
    site: Site, letters: str, sizes: Sizes, count: int
) -> AsyncIterator[tuple[str, Side, Sample]]:
    """Measure each workload on each of its sides, `count` times; the sides take turns."""
    for number in range(count):
        for letter in letters:
            for side in WORKLOADS[letter].sides:
                trial = Trial(site, side, f"bench_{letter}{number}", sizes)
                yield letter, side, await WORKLOADS[letter].run(trial)
