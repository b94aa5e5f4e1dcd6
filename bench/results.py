"""Measuring round after round, and what is kept of it."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from itertools import groupby
from typing import TYPE_CHECKING, Any

import attrs

from bench.peers import OFFICIAL, OURS
from bench.workloads import WORKLOADS, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bench.measure import Clients, Sample, Site
    from bench.systems import Place, Setup, System
    from bench.workloads import Sizes


@attrs.frozen
class Plan:
    """What is to be measured: `rounds` undisturbed times, with at most `extra` further tries."""

    workloads: Sequence[str]
    systems: Sequence[System]
    sizes: Sizes
    rounds: int
    extra: int = 0


@attrs.frozen
class Row:
    """One workload on one system: the least disturbed samples, one for each round."""

    workload: str
    peer: str
    samples: Sequence[Sample]

    def median(self, field: str) -> float:
        """The median of a field; 0 where a sample has none."""
        values: list[float] = [getattr(sample, field) or 0.0 for sample in self.samples]
        return float(statistics.median(values))

    def per_message(self, field: str) -> float:
        """Microseconds of CPU a message."""
        return float(
            statistics.median(
                getattr(sample, field) / sample.count * 1e6 for sample in self.samples
            )
        )

    @property
    def is_disturbed(self) -> bool:
        return any(sample.is_disturbed for sample in self.samples)

    @property
    def is_late(self) -> bool:
        return any(sample.is_late for sample in self.samples)


@attrs.define
class Results:
    """What is known so far. `failures` tell why a workload on a system has no row, or only one."""

    plan: Plan
    samples: dict[tuple[str, str], list[Sample]] = attrs.field(factory=lambda: defaultdict(list))
    versions: dict[str, str] = attrs.field(factory=dict)
    failures: dict[tuple[str, str], str] = attrs.field(factory=dict)

    def rows(self) -> Iterator[Row]:
        """Rows in the order of the workloads, then of the systems."""
        for workload in WORKLOADS:
            for system in self.plan.systems:
                row = self.row(workload, system.name)
                if row is not None:
                    yield row

    def row(self, workload: str, peer: str) -> Row | None:
        """One row, if there is a sample of it."""
        taken = self.samples.get((workload, peer))
        if not taken:
            return None
        best = sorted(taken, key=lambda sample: sample.other_cores)[: self.plan.rounds]
        return Row(workload, peer, best)

    def missing(self, system: System) -> list[str]:
        """The workloads that this system has to do again, in the order of their set-ups."""
        return [
            key
            for key, workload in WORKLOADS.items()
            if key in self.plan.workloads
            and (workload.for_all or system.name == OURS)
            and (key, system.name) not in self.failures
            and not self._is_done(key, system.name)
        ]

    def _is_done(self, workload: str, peer: str) -> bool:
        taken: Mapping[tuple[str, str], list[Sample]] = self.samples
        found = taken.get((workload, peer), ())
        if WORKLOADS[workload].once:
            return bool(found)
        return sum(not sample.is_disturbed for sample in found) >= self.plan.rounds

    @property
    def ours_failed(self) -> bool:
        return any(peer in (OURS, OFFICIAL) for _, peer in self.failures)


@attrs.frozen
class Measuring:
    """Runs a plan, and tells of each step."""

    results: Results
    place: Place
    clients: Clients
    tell: Callable[[str], None]

    async def run(self) -> None:
        """In each round measure one system after another, each started anew."""
        plan = self.results.plan
        for number in range(plan.rounds + plan.extra):
            for system in plan.systems:
                missing = self.results.missing(system)
                for setup, keys in groupby(missing, lambda key: WORKLOADS[key].setup):
                    left = deque(keys)
                    while left:
                        await self._run_some(system, setup, left, number)

    async def _run_some(self, system: System, setup: Setup, left: deque[str], number: int) -> None:
        """Take workloads off the list until it is empty, or one fails.

        A failure may have spoiled the servers, so what is left then needs new ones.
        """
        key = left.popleft()
        try:
            async with system.open(self.place, setup) as site:
                await self._measure(system, site, key, number)
                while left:
                    key = left.popleft()
                    await self._measure(system, site, key, number)
        except Exception as error:  # of one system: the others are still to come
            reason = f"{type(error).__name__}: {error}"
            self.results.failures[key, system.name] = reason
            self.tell(f"{key} {system.name} FAILED: {reason}")

    async def _measure(self, system: System, site: Site, key: str, number: int) -> None:
        trial = Trial(
            peer=system.name,
            site=site,
            postgres=self.place.postgres,
            clients=self.clients,
            queue=f"bench_{key}{number}",
            sizes=self.results.plan.sizes,
            tell=self.tell,
        )
        self.results.versions[system.name] = await trial.reset()
        sample = await WORKLOADS[key].run(trial)
        self.results.samples[key, system.name].append(sample)
        self.tell(_line(key, system.name, sample))


def _line(workload: str, peer: str, sample: Sample) -> str:
    p50, p99 = sample.p50_ms or 0.0, sample.p99_ms or 0.0
    return (
        f"{workload:2} {peer:17}{sample.rate:>10,.0f}/s  p50 {p50:.2f}  p99 {p99:.2f} ms  "
        f"{sample.other_cores:.2f} other cores{' *' if sample.is_disturbed else ''}"
    )


def as_json(results: Results) -> list[dict[str, Any]]:
    """Every row with its samples."""
    return [
        {
            "workload": row.workload,
            "title": WORKLOADS[row.workload].title,
            "system": row.peer,
            "rate": row.median("rate"),
            "disturbed": row.is_disturbed,
            "samples": [attrs.asdict(sample) for sample in row.samples],
        }
        for row in results.rows()
    ]
