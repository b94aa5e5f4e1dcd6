"""The medians of a run, as a table for people or JSON for programs."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any, Final

import attrs

from bench.load import Side
from bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.machine import Machine
    from bench.measure import Sample
    from bench.workloads import Sizes

_LEGEND: Final = """\
Medians of {rounds} rounds. ms per request in a, b, g; per pop + ack in c, e, h; send to receipt in
d, f. CPU is in milliseconds per 1,000 messages. MiB: broker's RSS, PostgreSQL's PSS. postgres: a
hand-made queue in one table, without a broker: the floor. ratio: ours to it (d: of the p50)."""
_HEADER: Final = (
    f"{'':9}{'msg/s':>9}{'(range)':>17}{'ratio':>7}{'p50 ms':>8}{'p99 ms':>8}"
    f"{'client':>8}{'broker':>8}{'postgres':>9}{'MiB':>10}{'other cores':>12}"
)


@attrs.frozen
class Row:
    """One workload on one side, over all rounds."""

    letter: str
    side: Side
    samples: Sequence[Sample]

    def median(self, field: str) -> float:
        values: list[float] = [getattr(sample, field) or 0.0 for sample in self.samples]
        return float(statistics.median(values))

    def per_thousand(self, field: str) -> float:
        """Milliseconds of CPU per 1,000 messages."""
        return float(
            statistics.median(
                getattr(sample, field) / sample.count * 1e6 for sample in self.samples
            )
        )

    @property
    def is_disturbed(self) -> bool:
        return any(sample.is_disturbed for sample in self.samples)


@attrs.frozen
class Report:
    """All that a run found out."""

    machine: Machine
    sizes: Sizes
    rounds: int
    rows: Sequence[Row]

    @property
    def is_claim(self) -> bool:
        """Whether nobody else used the machine: otherwise the numbers are no basis for a claim."""
        return not any(row.is_disturbed for row in self.rows)

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from self.machine.lines()
        yield ""
        yield _LEGEND.format(rounds=self.rounds)
        for letter, workload in WORKLOADS.items():
            rows = [row for row in self.rows if row.letter == letter]
            if not rows:
                continue
            yield ""
            yield f"({letter}) {workload.title}"
            yield _HEADER
            for row in rows:
                yield self._line(row)
                if letter == "f":
                    yield self._parked(row)
        yield ""
        if self.is_claim:
            yield "Counts and sums are right; nothing else used the machine."
        else:
            worst = max(sample.other_cores for row in self.rows for sample in row.samples)
            yield (
                "Counts and sums are right. NO CLAIM: the machine was shared, other work used up "
                f"to {worst:.2f} cores (rows marked *). Compare ratios only, or repeat when quiet."
            )

    def _line(self, row: Row) -> str:
        rates = [sample.rate for sample in row.samples]
        memory = f"{row.median('broker_rss_mib'):.0f}/{row.median('postgres_pss_mib'):.0f}"
        ratio = self.ratio(row)
        return (
            f"{row.side.value:9}{statistics.median(rates):>9,.0f}"
            f"{f'({min(rates):,.0f}-{max(rates):,.0f})':>17}"
            f"{'' if ratio is None else f'{ratio:.2f}':>7}"
            f"{row.median('p50_ms'):>8.2f}{row.median('p99_ms'):>8.2f}"
            f"{row.per_thousand('client_cpu'):>8.1f}{row.per_thousand('broker_cpu'):>8.1f}"
            f"{row.per_thousand('postgres_cpu'):>9.1f}{memory:>10}"
            f"{row.median('other_cores'):>11.2f}{'*' if row.is_disturbed else ''}"
        )

    def _parked(self, row: Row) -> str:
        each = row.median("grown_mib") * 1024 / self.sizes.polls
        return (
            f"{'':9}{self.sizes.polls:,} polls: {each:.1f} KiB each in the broker; left alone, it "
            f"uses {row.median('idle_broker_cores'):.3f} cores, "
            f"PostgreSQL {row.median('idle_postgres_cores'):.3f}"
        )

    def ratio(self, row: Row) -> float | None:
        """How the broker compares to the floor in the same run; None where there is no floor."""
        floor = [r for r in self.rows if r.letter == row.letter and r.side is Side.FLOOR]
        if row.side is Side.FLOOR or not floor:
            return None
        field = "p50_ms" if row.letter == "d" else "rate"
        return row.median(field) / floor[0].median(field)

    def json(self) -> str:
        """Everything, each sample included."""
        rows: list[dict[str, Any]] = [
            {
                "workload": row.letter,
                "title": WORKLOADS[row.letter].title,
                "side": row.side.value,
                "rate": row.median("rate"),
                "ratio": self.ratio(row),
                "disturbed": row.is_disturbed,
                "samples": [attrs.asdict(sample) for sample in row.samples],
            }
            for row in self.rows
        ]
        head = {
            "machine": attrs.asdict(self.machine),
            "sizes": attrs.asdict(self.sizes),
            "rounds": self.rounds,
            "claim": self.is_claim,
        }
        return json.dumps({**head, "rows": rows}, indent=1)
