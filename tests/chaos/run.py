"""One run of chaos: faults of a seed under load, then peace, then the checker's verdict."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from tests.chaos.checker import check
from tests.chaos.faults import strike
from tests.chaos.history import History
from tests.chaos.load import Load, open_clients
from tests.chaos.places import GROUPS, PLACES
from tests.chaos.rig import open_rig
from tests.replicas import STATS, says_connected

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx

    from tests.chaos.rig import Rig
    from tests.http.api import Json

BROKERS = 2
# How long it may take until all is delivered once nothing is broken any more.
DRAIN_SECONDS = 60.0
POLL_SECONDS = 0.1
# One fault may show in every message after it.
SHOWN = 30


@frozen
class Report:
    """What happened, and what must not have."""

    seed: int
    minutes: float
    brokers: int
    history: History
    restarts: int
    drain_seconds: float
    wrong: Sequence[str]

    def __str__(self) -> str:
        pushes = Counter(push.status.value for push in self.history.pushes)
        claims, acks = self.history.claims, self.history.acks
        outcomes = Counter(attempt.outcome.value for attempt in self.history.transactions)
        blows = Counter(blow.kind.value for blow in self.history.blows)
        lines = [
            f"seed {self.seed}, {self.minutes:g} minutes of faults, {self.brokers} brokers",
            f"  pushed items     {len(self.history.pushes)} {_listed(pushes)}",
            f"  deliveries       {sum(len(claim.transaction_ids) for claim in claims)}"
            f" in {len(claims)} claims, {sum(claim.attempt > 1 for claim in claims)} of them again",
            f"  acks             {len(acks)}, {sum(ack.answered is None for ack in acks)}"
            f" without an answer",
            f"  transactions     {len(self.history.transactions)} {_listed(outcomes)}",
            f"  seeks            {len(self.history.seeks)}, dead letters moved"
            f" {len(self.history.moves)}",
            f"  faults           {len(self.history.blows)} {_listed(blows)}",
            f"  broker restarts  {self.restarts}",
            f"  drained after    {self.drain_seconds:.1f} s",
            f"  violations       {len(self.wrong)}",
            *(f"    {text}" for text in self.wrong[:SHOWN]),
        ]
        if self.wrong:
            lines.append(f"again: {self.command}")
        return "\n".join(lines)

    @property
    def command(self) -> str:
        """What repeats the run's schedule."""
        return f"make chaos SEED={self.seed} MINUTES={self.minutes:g} BROKERS={self.brokers}"


def _listed(counts: Counter[str]) -> str:
    return "(" + ", ".join(f"{count} {name}" for name, count in counts.most_common()) + ")"


async def run(seed: int, minutes: float, brokers: int = BROKERS) -> Report:
    """Break things for so many minutes and report."""
    history = History(frozenset(GROUPS))
    wrong: list[str] = []
    async with (
        open_rig(brokers) as rig,
        open_clients([broker.url for broker in rig.brokers]) as clients,
    ):
        async with trio.open_nursery() as nursery:
            load = Load(history, seed, clients)
            await load.prepare()
            nursery.start_soon(load.run)
            await strike(rig, history, seed, trio.current_time() + minutes * 60)
            load.calm()
            began = trio.current_time()
            with trio.move_on_after(DRAIN_SECONDS) as scope:
                await _wait_drained(rig, load, clients)
            drain_seconds = trio.current_time() - began
            if scope.cancelled_caught:
                wrong.append(f"not drained {DRAIN_SECONDS:g} s after the last fault")
            load.finish()
        for number in range(brokers):
            rig.look(number)
        pushed = {push.transaction_id for push in history.pushes}
        log = await trio.to_thread.run_sync(rig.read_log, pushed)
        letters = await trio.to_thread.run_sync(rig.read_letters)
    wrong += rig.complaints
    wrong += [str(violation) for violation in check(history, log, letters)]
    return Report(seed, minutes, brokers, history, rig.starts, drain_seconds, wrong)


async def _wait_drained(rig: Rig, load: Load, clients: Sequence[httpx.AsyncClient]) -> None:
    """Block until nothing is on its way, in a spool, or not acked, and the meshes are whole."""
    while load.producing:
        await trio.sleep(POLL_SECONDS)
    for client in clients:
        while (await client.get("/api/v1/status/buffers")).json()["bufferedMessages"]:
            await trio.sleep(POLL_SECONDS)
        while not _is_connected((await client.get(STATS)).json(), len(clients) - 1):
            await trio.sleep(POLL_SECONDS)
    cursors = len(PLACES) * len(GROUPS)
    while (
        await trio.to_thread.run_sync(rig.count_cursors) < cursors
        or await trio.to_thread.run_sync(rig.count_open) > 0
    ):
        await trio.sleep(POLL_SECONDS)


def _is_connected(mesh: Json, others: int) -> bool:
    """Whether a broker is connected both ways with so many others; one alone has no mesh."""
    return not others or says_connected(mesh, others)


def main() -> int:
    """Run one seed for `--minutes`, print its report, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--brokers", type=int, default=3)
    chosen = parser.parse_args()
    report = trio.run(run, chosen.seed, chosen.minutes, chosen.brokers)
    print(report)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
