"""What this project promises of its speed, as ratios within one run, and whether a run keeps it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from attrs import frozen

from bench.peers import FLOOR, OFFICIAL, OURS
from bench.systems import WORKERS

if TYPE_CHECKING:
    from bench.results import Results

MB_PER_MIB: Final = 2**20 / 1e6
KB_PER_MIB: Final = 2**20 / 1e3
# What memory may grow by from the second third of a long run to the last: an allocator's noise.
FLAT: Final = 1.05


class Want(Enum):
    """On which side of the bar we want to be."""

    AT_LEAST = "≥"
    AT_MOST = "≤"
    BELOW = "<"
    SHOWN = ""  # no bar: for the record


@frozen
class Bar:
    """Our value, what it is compared with, and the ratio that is wanted; None: not measured."""

    work: str
    text: str
    ours: float | None
    against: str
    other: float | None
    want: Want
    bound: float = 1.0

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None or not self.other else self.ours / self.other

    @property
    def is_met(self) -> bool:
        if self.ratio is None:
            return False
        match self.want:
            case Want.AT_LEAST:
                return self.ratio >= self.bound
            case Want.AT_MOST:
                return self.ratio <= self.bound
            case Want.BELOW:
                return self.ratio < self.bound
            case Want.SHOWN:
                return True

    def verdict(self) -> str:
        """Met, or by how much of the bar it was missed."""
        if self.ratio is None:
            return "not measured"
        if self.want is Want.SHOWN:
            return "shown"
        return "met" if self.is_met else f"MISSED by {abs(self.ratio / self.bound - 1):.0%}"

    def line(self) -> str:
        wanted = "-" if self.want is Want.SHOWN else f"{self.want.value} {self.bound:.2f}"
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return (
            f"{self.work:4}{self.text:38}{_number(self.ours):>11}  {self.against:22}"
            f"{_number(self.other):>11}{ratio:>8}{wanted:>8}  {self.verdict()}"
        )


HEADER: Final = f"{'':4}{'':38}{'ours':>11}  {'compared with':22}{'':>11}{'ratio':>8}{'wanted':>8}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def bars(results: Results) -> list[Bar]:
    """Every bar, in the order of the work."""

    def median(work: str, field: str, peer: str = OURS, scale: float = 1.0) -> float | None:
        row = results.row(work, peer)
        return None if row is None else row.median(field) * scale

    def rate(work: str, peer: str = OURS) -> float | None:
        return median(work, "rate", peer)

    def each(work: str, field: str, peer: str = OURS) -> float | None:
        """Microseconds of CPU a message."""
        row = results.row(work, peer)
        return None if row is None else row.per_message(field)

    at_least, at_most, below, shown = Want.AT_LEAST, Want.AT_MOST, Want.BELOW, Want.SHOWN
    best = _fastest_other(results, "b")
    sizes = results.plan.sizes
    polls, many = f"{sizes.polls:,} polls", f"{sizes.partitions:,} partitions"
    floor_p50, floor_p99 = median("d", "p50_ms", FLOOR), median("d", "p99_ms", FLOOR)
    cpu_e, cpu_c = each("e", "server_cpu"), each("c", "server_cpu")
    idle = median("f", "idle_broker_cores", scale=100)
    grown = median("f", "grown_mib", scale=KB_PER_MIB / sizes.polls)
    early, late = (median("i", f"{part}_rss_mib", scale=MB_PER_MIB) for part in ("early", "late"))
    return [
        Bar("a", "messages/s", rate("a"), "pgmq", rate("a", "pgmq"), at_least, 1.2),
        Bar("a", "", rate("a"), "rabbitmq-quorum", rate("a", "rabbitmq-quorum"), at_least),
        Bar("b", "messages/s", rate("b"), "pgmq", rate("b", "pgmq"), at_least, 1.5),
        Bar("b", "", rate("b"), f"best: {best}", rate("b", best), at_least),
        Bar("c", "messages/s", rate("c"), "pgmq", rate("c", "pgmq"), at_least, 3.0),
        Bar("c", "", rate("c"), "redis-always", rate("c", "redis-always"), at_least),
        Bar("d", "p50 ms", median("d", "p50_ms"), FLOOR, floor_p50, at_most, 1.4),
        Bar("d", "p99 ms", median("d", "p99_ms"), FLOOR, floor_p99, at_most, 2.0),
        Bar("d", "p50 ms, two brokers", median("d2", "p50_ms"), FLOOR, floor_p50, at_most, 1.8),
        Bar("e", "deliveries/s to 5 groups", rate("e"), "ours in c", rate("c"), at_least),
        Bar("e", "µs of broker + PostgreSQL each", cpu_e, "ours in c", cpu_c, at_most),
        Bar("f", f"{polls} at rest, % of a core", idle, "", 10.0, below),
        Bar("f", "kB of RSS a poll", grown, "", 40.0, below),
        Bar("f", "p99 ms of a push to one of them", median("f", "p99_ms"), "ours in d",
            median("d", "p99_ms"), at_most, 3.0),
        Bar("g", f"b with {many}", rate("gb"), "ours in b", rate("b"), at_least, 0.7),
        Bar("g", f"c with {many}", rate("gc"), "ours in c", rate("c"), at_least, 0.7),
        # Users have the official client. The lean one is there to load the broker at little cost:
        # stricter, so it is shown whatever the verdict.
        *(
            Bar("h", f"µs of broker a message in {work}", each(work, "broker_cpu", OFFICIAL),
                "of the official client", each(work, "client_cpu", OFFICIAL),
                shown if work == "a" else below)
            for work in "abc"
        ),
        *(
            Bar("h", f"the same in {work}, under the lean load", each(work, "broker_cpu"),
                "of the lean client", each(work, "client_cpu"), shown)
            for work in "abc"
        ),
        Bar("i", "MB of RSS after b and c, at most", _most_memory(results), "", 150.0, below),
        Bar("i", f"MB of RSS, flat over {sizes.minutes:g} min", late, "in the second third", early,
            at_most, FLAT),
        *(
            Bar("+", f"{work} with {WORKERS} workers, messages/s", rate(f"w{work}"), "ours with 1",
                rate(work), shown)
            for work in "abc"
        ),
    ]  # fmt: skip


def _fastest_other(results: Results, work: str) -> str:
    """The name of the system with the highest rate of all but ours."""
    ours = (OURS, OFFICIAL)
    rows = [row for row in results.rows() if row.workload == work and row.peer not in ours]
    return max(rows, key=lambda row: row.median("rate")).peer if rows else "-"


def _most_memory(results: Results) -> float | None:
    """Of all rounds, not the median: it is a limit."""
    rows = [row for work in "bc" if (row := results.row(work, OURS)) is not None]
    return max(
        (sample.broker_rss_mib * MB_PER_MIB for row in rows for sample in row.samples), default=None
    )
