"""The workloads: what each one does to a system, and how its count is checked."""

from __future__ import annotations

import http.client
import json
import statistics
from typing import TYPE_CHECKING, Any, Final

import attrs
import psycopg
import trio

from bench.load import Load, Work
from bench.measure import Clients, Sample, Site, WrongCount
from bench.peers import FLOOR, OFFICIAL, OURS
from bench.processes import HOST
from bench.systems import Setup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from bench.postgres import Postgres

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
# A slow system gets a smaller backlog, and may leave some of it.
FILL_SECONDS: Final = 15.0
DRAIN_SECONDS: Final = 18.0
CHURN_SECONDS: Final = 120.0


@attrs.frozen(kw_only=True)
class Sizes:
    """How much: lengths in seconds (`minutes`: of i), messages, samples, polls, partitions."""

    seconds: float = 3.0
    backlog: int = 40_000
    samples: int = 150
    polls: int = 2_000
    partitions: int = 20_000
    idle_seconds: float = 5.0
    minutes: float = 1.0


@attrs.frozen
class Trial:
    """One try of a workload: what is measured, how much, on a queue of its own."""

    peer: str
    site: Site
    postgres: Postgres
    clients: Clients
    queue: str
    sizes: Sizes
    tell: Callable[[str], None] = print

    def load(self, work: Work, **options: Any) -> Load:
        """A load for this trial's system."""
        return Load(
            peer=self.peer,
            work=work,
            address=self.site.address,
            consumer_address=self.site.consumer_address,
            queue=self.queue,
            **options,
        )

    async def reset(self) -> str:
        """Leave an empty queue and nothing to flush of earlier work; returns versions."""
        versions = await self.clients.prepare(self.load(Work.PREPARE))
        if self.site.database is not None:
            await self.postgres.run("postgres", "CHECKPOINT")
        return versions

    async def analyze(self) -> None:
        """As autovacuum would within a minute; a table planned as empty is slow for everyone."""
        if self.site.database is not None:
            await self.postgres.run(self.site.database, "ANALYZE")

    async def stored(self) -> int | None:
        """How many messages the system says that it holds in this queue; None: we don't ask it."""
        if self.peer in (OURS, OFFICIAL):
            return await trio.to_thread.run_sync(_stored_in_broker, self.site.address, self.queue)
        if self.peer == FLOOR:
            return await trio.to_thread.run_sync(_stored_in_table, self.site.address)
        return None


def _stored_in_table(address: str) -> int:
    with psycopg.connect(address) as connection:
        row = connection.execute("SELECT count(*) FROM floor").fetchone()
        return int(row[0]) if row else 0


def _stored_in_broker(address: str, queue: str) -> int:
    broker = http.client.HTTPConnection(HOST, int(address), timeout=60)
    broker.request("GET", f"/api/v1/resources/queues/{queue}")
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
    sample = await trial.clients.run(
        trial.site, [attrs.evolve(load, first=n * NUMBERS_APART) for n in range(PROCESSES)]
    )
    after = await trial.stored()
    if before is not None and after is not None:
        _expect("messages stored", after - before, sample.count + sample.unmeasured)
    return sample


async def _drain(trial: Trial, partitions: int, groups: int = 0) -> Sample:
    fill = trial.load(
        Work.PUSH,
        connections=PRODUCERS,
        batch=BATCH,
        partitions=partitions,
        count=trial.sizes.backlog // BATCH * BATCH,
        seconds=FILL_SECONDS,
    )
    filled = (await trial.clients.run(trial.site, [fill], is_measured=False)).count
    await trial.analyze()
    load = trial.load(
        Work.DRAIN,
        connections=groups or CONSUMERS // PROCESSES,
        batch=BATCH,
        groups=groups,
        seconds=DRAIN_SECONDS,
    )
    sample = await trial.clients.run(trial.site, [load] * PROCESSES)
    if not sample.is_late:
        times = max(groups, 1)
        _expect("messages consumed", sample.count, filled * times)
        # Numbers 0 to n-1, each once (for each group).
        _expect("sum of the numbers consumed", sample.total, filled * (filled - 1) // 2 * times)
    return sample


async def push_single(trial: Trial) -> Sample:
    return await _push(trial, 1, PARTITIONS, warmup=30)


async def push_batches(trial: Trial) -> Sample:
    return await _push(trial, BATCH, PARTITIONS, warmup=3)


async def drain(trial: Trial) -> Sample:
    return await _drain(trial, PARTITIONS)


async def latency(trial: Trial) -> Sample:
    sample = await trial.clients.run(
        trial.site, [trial.load(Work.LATENCY, count=trial.sizes.samples, partitions=PARTITIONS)]
    )
    sent = sample.count
    _expect("sum of the numbers received", sample.total, sent * (sent - 1) // 2)
    return sample


async def fan_out(trial: Trial) -> Sample:
    return await _drain(trial, PARTITIONS, groups=GROUPS)


async def parked(trial: Trial) -> Sample:
    woken = min(trial.sizes.samples, trial.sizes.polls)
    load = trial.load(
        Work.PARK,
        connections=trial.sizes.polls,
        count=woken,
        partitions=1,
        seconds=trial.sizes.polls * QUEUE_SECONDS,
    )
    sample = await trial.clients.run(trial.site, [load], idle_seconds=trial.sizes.idle_seconds)
    _expect("polls woken", sample.count, woken)
    return sample


async def churn(trial: Trial) -> Sample:
    """Push and drain at once, again and again; returns the last, with the broker's memory."""
    backlog = trial.sizes.backlog // BATCH * BATCH
    push = trial.load(
        Work.PUSH, connections=PRODUCERS, batch=BATCH, count=backlog, seconds=CHURN_SECONDS
    )
    drain = trial.load(Work.DRAIN, connections=CONSUMERS, batch=BATCH, seconds=CHURN_SECONDS)
    until = trio.current_time() + trial.sizes.minutes * 60
    memory: list[float] = []
    while trio.current_time() < until or len(memory) < 3:
        both = await trial.clients.run(trial.site, [push, drain])
        # What the consumers had left when they caught up with the producers.
        rest = await trial.clients.run(trial.site, [drain], allow_none=True, is_measured=False)
        # Numbers 0 to n-1, each sent once and received once.
        _expect("messages sent and consumed", both.count + rest.count, 2 * backlog)
        _expect("sum of their numbers", both.total + rest.total, backlog * (backlog - 1))
        memory.append(rest.broker_rss_mib)
        trial.tell(f"i  {memory[-1]:.1f} MiB of RSS after {len(memory) * backlog:,} messages")
    third = len(memory) // 3
    return attrs.evolve(
        both,
        early_rss_mib=statistics.median(memory[third : 2 * third]),
        late_rss_mib=statistics.median(memory[2 * third :]),
    )


async def _make_partitions(trial: Trial) -> None:
    made = trial.sizes.partitions
    create = trial.load(Work.CREATE, connections=4, count=made, partitions=made)
    created = await trial.clients.run(trial.site, [create], is_measured=False)
    _expect("partitions made", created.count, made)
    await trial.analyze()
    await trial.postgres.run("postgres", "CHECKPOINT")


async def push_many_partitions(trial: Trial) -> Sample:
    await _make_partitions(trial)
    return await _push(trial, BATCH, trial.sizes.partitions, warmup=3)


async def drain_many_partitions(trial: Trial) -> Sample:
    await _make_partitions(trial)
    return await _drain(trial, trial.sizes.partitions)


@attrs.frozen
class Workload:
    """One part of the table; `once` means that one round is enough."""

    title: str
    run: Callable[[Trial], Awaitable[Sample]]
    setup: Setup = Setup.ONE
    for_all: bool = False  # for other systems than ours, too
    once: bool = False


WORKLOADS: Final[Mapping[str, Workload]] = {
    "a": Workload("push, 1 a request, 16 connections, 64 partitions", push_single, for_all=True),
    "b": Workload("push, 100 a request, 16 connections, 64 partitions", push_batches, for_all=True),
    "c": Workload("drain: pop 100 + ack, 8 consumers", drain, for_all=True),
    "d": Workload(
        "end to end, one message every 20 ms, one waiting consumer", latency, for_all=True
    ),
    "e": Workload("5 groups drain one backlog at once, 10 consumers", fan_out),
    # Before what leaves thousands of queues and partitions in the broker's memory.
    "i": Workload("push and drain at once, for minutes: memory", churn, once=True),
    "f": Workload("parked long polls, one a queue; pushes into random ones", parked),
    "gb": Workload("as b, with many partitions", push_many_partitions),
    "gc": Workload("as c, with many partitions", drain_many_partitions),
    "d2": Workload("as d, pushed to one broker, popped from another", latency, Setup.MESH),
    "wa": Workload("as a, with 2 workers", push_single, Setup.WORKERS),
    "wb": Workload("as b, with 2 workers", push_batches, Setup.WORKERS),
    "wc": Workload("as c, with 2 workers", drain, Setup.WORKERS),
}
