"""Faults drawn from a seed, and how each is done to a rig.

Three lanes of them run beside each other: one against PostgreSQL and the way to it, one against
brokers, their mesh and their disk, one inside brokers. So a broker may die, start or drain while
its database is away, and a part of it crash while it does.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import httpx
import psycopg
import trio
from attrs import frozen

from tests.chaos.history import Blow, Kind
from tests.live.stalling import stalled
from tests.proxy import Mode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.history import History
    from tests.chaos.rig import Rig

LANES = (
    (
        Kind.POSTGRES_KILL,
        Kind.POSTGRES_RESTART,
        Kind.POSTGRES_FREEZE,
        Kind.BACKENDS_TERMINATED,
        Kind.DATABASE_CUT,
    ),
    (
        Kind.BROKER_KILL,
        Kind.BROKER_STOP,
        Kind.HTTP_CRASH,
        Kind.MESH_CUT,
        Kind.MESH_STALL,
        Kind.MAINTENANCE,
        Kind.DISK_FULL,
    ),
    (Kind.MESH_CRASH, Kind.JOBS_CRASH, Kind.JOB_CRASH, Kind.CLOCK_JUMP),
)
# Jobs that wait for something in every iteration, or often enough.
JOBS = ("retention", "metrics", "lag", "backlog", "dead letters", "reconcile", "spool drain")
# At which of its awaits something crashes, at most: about as many as it has in a second.
STEPS = {Kind.HTTP_CRASH: 300, Kind.MESH_CRASH: 40, Kind.JOBS_CRASH: 60, Kind.JOB_CRASH: 6}
# Both ways. ids are ahead of PostgreSQL's clock by as much, and 5 minutes are what replay allows.
JUMP_SECONDS = (1.0, 240.0)
# What a file may have on a full disk: from nothing at all to a few records.
FILE_BYTES = 8192
# Quiet times between faults of one lane, and how long a fault lasts.
PAUSE_SECONDS = (0.3, 2.5)
FAULT_SECONDS = (0.1, 1.2)
# What is under way when a stalled link is cut: statements that ran and whose results got lost.
STALL_SECONDS = 0.05
RETRY_SECONDS = 0.05


@frozen
class Fault:
    """One of the schedule: after `pause`, for `seconds`.

    The rest says what exactly, where it means something: at which await, how far, how much.
    """

    kind: Kind
    target: int
    pause: float
    seconds: float
    job: str
    step: int
    jump: float
    room: int


def draw(seed: int, lane: int, brokers: int) -> Iterator[Fault]:
    """The endless schedule of a lane: every kind of it once, in a random order, and again."""
    random = Random(f"{seed}-lane-{lane}")
    while True:
        for kind in random.sample(LANES[lane], len(LANES[lane])):
            yield Fault(
                kind,
                random.randrange(brokers),
                random.uniform(*PAUSE_SECONDS),
                random.uniform(*FAULT_SECONDS),
                random.choice(JOBS),
                random.randint(1, STEPS.get(kind, 1)),
                random.choice((-1, 1)) * random.uniform(*JUMP_SECONDS),
                random.randrange(FILE_BYTES),
            )


async def strike(rig: Rig, history: History, seed: int, until: float) -> None:
    """Run all lanes until that time; then everything has been put back."""
    async with trio.open_nursery() as nursery:
        for lane in range(len(LANES)):
            nursery.start_soon(_strike_lane, rig, history, seed, lane, until)


async def _strike_lane(rig: Rig, history: History, seed: int, lane: int, until: float) -> None:
    for fault in draw(seed, lane, len(rig.brokers)):
        await trio.sleep(fault.pause)
        if trio.current_time() >= until:
            return
        began = trio.current_time()
        if await _do(rig, fault):
            history.blows.append(Blow(fault.kind, fault.target, began, trio.current_time()))


async def _do(rig: Rig, fault: Fault) -> bool:
    """Do it and put everything back; returns whether it came to it."""
    match fault.kind:
        case Kind.HTTP_CRASH:
            if not await rig.crash(fault.target, fault.step):
                return False
            await trio.sleep(fault.seconds)
            await rig.start(fault.target)
        case Kind.MESH_CRASH | Kind.JOBS_CRASH | Kind.JOB_CRASH:
            part = {Kind.MESH_CRASH: "mesh", Kind.JOBS_CRASH: "jobs"}.get(fault.kind)
            request = {"break": part or f"job {fault.job}", "step": fault.step}
            return await rig.sabotage(fault.target, **request)
        case Kind.CLOCK_JUMP:
            jumped = await rig.sabotage(fault.target, clock=fault.jump)
            await trio.sleep(fault.seconds)
            await rig.sabotage(fault.target, clock=0.0)
            return jumped
        case _:
            await _do_outside(rig, fault)
    return True


async def _do_outside(rig: Rig, fault: Fault) -> None:
    cluster = rig.cluster
    match fault.kind:
        case Kind.BROKER_KILL:
            await rig.kill(fault.target)
            await trio.sleep(fault.seconds)
            await rig.start(fault.target)
        case Kind.BROKER_STOP:
            await rig.stop(fault.target)
            await trio.sleep(fault.seconds)
            await rig.start(fault.target)
        case Kind.MESH_CUT | Kind.MESH_STALL:
            mode = Mode.CUT if fault.kind is Kind.MESH_CUT else Mode.STALL
            rig.meshes[fault.target].switch(mode)
            await trio.sleep(fault.seconds)
            rig.meshes[fault.target].switch(Mode.PASS)
        case Kind.MAINTENANCE:
            await _maintain(rig, fault.target, True)
            await trio.sleep(fault.seconds)
            await _maintain(rig, fault.target, False)
        case Kind.DISK_FULL:
            # Maintenance fills it.
            with rig.filled_disk(fault.target, fault.room):
                await _maintain(rig, fault.target, True)
                await trio.sleep(fault.seconds)
            await _maintain(rig, fault.target, False)
        case Kind.POSTGRES_KILL:
            await trio.to_thread.run_sync(cluster.kill)
            await trio.sleep(fault.seconds)
            await trio.to_thread.run_sync(cluster.start)
        case Kind.POSTGRES_RESTART:
            await trio.to_thread.run_sync(cluster.stop)
            await trio.sleep(fault.seconds)
            await trio.to_thread.run_sync(cluster.start)
        case Kind.POSTGRES_FREEZE:
            with stalled(cluster):
                await trio.sleep(fault.seconds)
        case Kind.BACKENDS_TERMINATED:
            with suppress(psycopg.OperationalError):
                await trio.to_thread.run_sync(
                    cluster.execute,
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name LIKE 'queen-trio/%' AND random() < 0.5",
                )
        case Kind.DATABASE_CUT:
            link = rig.databases[fault.target]
            link.switch(Mode.STALL)
            await trio.sleep(STALL_SECONDS)
            link.switch(Mode.CUT)
            await trio.sleep(fault.seconds)
            link.switch(Mode.PASS)


async def _maintain(rig: Rig, target: int, enabled: bool) -> None:
    """Switch push maintenance through a broker, however long it takes to be answered."""
    path = "/api/v1/system/maintenance"
    async with httpx.AsyncClient(base_url=rig.brokers[target].url, timeout=30) as http:
        while True:
            with suppress(httpx.TransportError):
                if (await http.post(path, json={"enabled": enabled})).status_code == 200:
                    return
            await trio.sleep(RETRY_SECONDS)
