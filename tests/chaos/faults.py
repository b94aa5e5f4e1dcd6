"""Faults drawn from a seed, and how each is done to a rig.

Two lanes of them run beside each other, one against PostgreSQL and the way to it, one against
brokers and their mesh: a broker may die, start or drain while its database is away.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import httpx
import psutil
import psycopg
import trio
from attrs import frozen

from tests.chaos.history import Blow, Kind
from tests.proxy import Mode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    (Kind.BROKER_KILL, Kind.BROKER_STOP, Kind.MESH_CUT, Kind.MESH_STALL, Kind.MAINTENANCE),
)
# Quiet times between faults of one lane, and how long a fault lasts.
PAUSE_SECONDS = (0.3, 2.5)
FAULT_SECONDS = (0.1, 1.2)
# What is under way when a stalled link is cut: statements that ran and whose results got lost.
STALL_SECONDS = 0.05
RETRY_SECONDS = 0.05


@frozen
class Fault:
    """One of the schedule: after `pause`, for `seconds`."""

    kind: Kind
    target: int
    pause: float
    seconds: float


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
        await _do(rig, fault)
        history.blows.append(Blow(fault.kind, fault.target, began, trio.current_time()))


async def _do(rig: Rig, fault: Fault) -> None:
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
        case Kind.POSTGRES_KILL:
            await trio.to_thread.run_sync(cluster.kill)
            await trio.sleep(fault.seconds)
            await trio.to_thread.run_sync(cluster.start)
        case Kind.POSTGRES_RESTART:
            await trio.to_thread.run_sync(cluster.stop)
            await trio.sleep(fault.seconds)
            await trio.to_thread.run_sync(cluster.start)
        case Kind.POSTGRES_FREEZE:
            postmaster = psutil.Process(cluster.postmaster_pid)
            frozen_ones = [postmaster, *postmaster.children(recursive=True)]
            _each(frozen_ones, "suspend")
            await trio.sleep(fault.seconds)
            _each(frozen_ones, "resume")
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


def _each(processes: Sequence[psutil.Process], deed: str) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            getattr(process, deed)()


async def _maintain(rig: Rig, target: int, enabled: bool) -> None:
    """Switch push maintenance through a broker, however long it takes to be answered."""
    path = "/api/v1/system/maintenance"
    async with httpx.AsyncClient(base_url=rig.brokers[target].url, timeout=30) as http:
        while True:
            with suppress(httpx.TransportError):
                if (await http.post(path, json={"enabled": enabled})).status_code == 200:
                    return
            await trio.sleep(RETRY_SECONDS)
