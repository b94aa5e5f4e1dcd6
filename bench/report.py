"""The medians of a run, as tables for people or JSON for programs."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Final

import attrs

from bench import bars
from bench.bars import Want
from bench.peers import OURS
from bench.postgres import SETTINGS
from bench.results import Results, Row, as_json
from bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.machine import Machine

_LEGEND: Final = """\
Medians of {rounds} rounds. ms: per request in a and b, per pop + ack of a batch in c and e, send to
receipt in d and f; - where a library hides it. CPU of the clients, the broker and PostgreSQL, in µs
a message. MiB: Pss of broker and PostgreSQL after the run. ratio: our rate to
the system's (d: our p50 to its, where less is better)."""
_HEADER: Final = (
    f"{'':17}{'msg/s':>9} {'(range)':<18}{'p50 ms':>8}{'p99 ms':>9}"
    f"{'client':>9}{'broker':>9}{'postgres':>9}{'MiB':>10}{'other cores':>12}{'ratio':>7}"
)


@attrs.frozen
class Report:
    """All that a run found out."""

    machine: Machine
    results: Results
    loop: str

    @property
    def is_claim(self) -> bool:
        """Whether nobody else used the machine: otherwise the numbers are no basis for a claim."""
        return not any(row.is_disturbed for row in self.results.rows())

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from self.machine.lines()
        settings = ", ".join(f"{name} {value}" for name, value in SETTINGS.items())
        yield f"PostgreSQL's settings: {settings}; defaults otherwise. One for all that need one."
        yield f"All over TCP on the loopback interface. Clients: asyncio on {self.loop}."
        for system in self.results.plan.systems:
            if version := self.results.versions.get(system.name):
                yield f"{system.name}: {version}; {system.notes}"
        yield ""
        yield _LEGEND.format(rounds=self.results.plan.rounds)
        rows = list(self.results.rows())
        for key, workload in WORKLOADS.items():
            ours = self.results.row(key, OURS)
            if found := [row for row in rows if row.workload == key]:
                yield ""
                yield f"({key}) {workload.title}"
                yield _HEADER
                for row in found:
                    yield self._line(row, ours)
                    if key == "f":
                        yield self._parked(row)
        yield from self._bars()
        yield ""
        for (key, peer), reason in self.results.failures.items():
            yield f"FAILED: {key} on {peer}: {reason.splitlines()[0]}"
        yield self._claim()

    def _bars(self) -> Iterator[str]:
        found = bars.bars(self.results)
        if all(bar.ratio is None for bar in found):
            return
        yield ""
        yield "Bars: `ratio` is our value to the other; `wanted` is what it has to be."
        yield bars.HEADER
        yield from (bar.line() for bar in found)
        wanted = [bar for bar in found if bar.ratio is not None and bar.want is not Want.SHOWN]
        met = sum(bar.is_met for bar in wanted)
        yield f"{met} of the {len(wanted)} that were measured are met."

    def _claim(self) -> str:
        right = "Counts and sums are right"
        if self.results.failures:
            right = "Counts and sums are right but for what FAILED"
        if self.is_claim:
            return f"{right}; nothing else used the machine."
        worst = max(sample.other_cores for row in self.results.rows() for sample in row.samples)
        return (
            f"{right}. NO CLAIM: the machine was shared, other work used up to {worst:.2f} cores "
            "(rows marked *). Compare ratios only, or repeat when quiet."
        )

    def _line(self, row: Row, ours: Row | None) -> str:
        rates = [sample.rate for sample in row.samples]
        memory = f"{row.median('broker_pss_mib'):.0f}/{row.median('postgres_pss_mib'):.0f}"
        times = [f"{row.median(field):.2f}" for field in ("p50_ms", "p99_ms")]
        if not row.median("p50_ms"):
            times = ["-", "-"]
        ratio = self.ratio(row, ours)
        return (
            f"{row.peer:17}{statistics.median(rates):>9,.0f} "
            f"{f'({min(rates):,.0f}-{max(rates):,.0f})':<18}{times[0]:>8}{times[1]:>9}"
            f"{row.per_message('client_cpu'):>9.2f}{row.per_message('broker_cpu'):>9.2f}"
            f"{row.per_message('postgres_cpu'):>9.2f}{memory:>10}"
            f"{row.median('other_cores'):>11.2f}{'*' if row.is_disturbed else ' '}"
            f"{'' if ratio is None else f'{ratio:.2f}':>7}"
            f"{'  not emptied' if row.is_late else ''}"
        )

    def _parked(self, row: Row) -> str:
        polls = self.results.plan.sizes.polls
        return (
            f"{'':17}{polls:,} polls: {row.median('grown_mib') * 1024 / polls:.1f} KiB of RSS each "
            f"in the broker; left alone, it uses {row.median('idle_broker_cores'):.3f} cores, "
            f"PostgreSQL {row.median('idle_postgres_cores'):.3f}"
        )

    @staticmethod
    def ratio(row: Row, ours: Row | None) -> float | None:
        """Our rate to that of another system in the same run; in d our p50 to its."""
        if ours is None or row.peer == OURS:
            return None
        field = "p50_ms" if row.workload == "d" else "rate"
        return ours.median(field) / row.median(field)

    def json(self) -> str:
        """Everything, each sample included."""
        found = [
            {**attrs.asdict(bar), "want": bar.want.name, "ratio": bar.ratio, "met": bar.is_met}
            for bar in bars.bars(self.results)
        ]
        whole = {
            "machine": attrs.asdict(self.machine),
            "settings": SETTINGS,
            "versions": self.results.versions,
            "sizes": attrs.asdict(self.results.plan.sizes),
            "rounds": self.results.plan.rounds,
            "claim": self.is_claim,
            "bars": found,
            "failures": {" on ".join(key): why for key, why in self.results.failures.items()},
            "rows": as_json(self.results),
        }
        return json.dumps(whole, indent=1)
