"""What this project promises of its speed, as ratios within one run, and whether a run keeps it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from attrs import frozen

from bench.peers import FLOOR, OURS
from bench.systems import WORKERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.results import Results, Row

KB: Final = 1000
# What memory may grow by from the second third of a long run to the last: an allocator's noise.
FLAT: Final = 1.05
MIB: Final = 1024 * 1024


class Want(Enum):
    """On which side of the bar we want to be."""

    AT_LEAST = "≥"
    AT_MOST = "≤"
    BELOW = "<"
    SHOWN = ""  # no bar: for the record


@frozen
class Bar:
    """One bar: our value, what it is compared with, and the ratio that is wanted.

    `other` is None where the bar is a number of its own: then the ratio is ours to `bound`.
    """

    work: str
    text: str
    ours: float
    against: str
    other: float
    want: Want
    bound: float
    form: str

    @property
    def ratio(self) -> float:
        return self.ours / self.other if self.other else float("inf")

    @property
    def is_met(self) -> bool:
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
        if self.want is Want.SHOWN:
            return "shown"
        if self.is_met:
            return "met"
        return f"MISSED by {abs(self.ratio / self.bound - 1):.0%}"

    def line(self) -> str:
        wanted = f"{self.want.value} {self.bound:.2f}" if self.want is not Want.SHOWN else "-"
        ours, other = (format(value, self.form) for value in (self.ours, self.other))
        return (
            f"{self.work:4}{self.text:34}{ours:>11}  {self.against:26}{other:>11}"
            f"{self.ratio:>8.2f}{wanted:>8}  {self.verdict()}"
        )


HEADER: Final = f"{'':4}{'':34}{'ours':>11}  {'compared with':26}{'':>11}{'ratio':>8}{'wanted':>8}"
_RATE, _MS, _MICROSECONDS, _PERCENT, _SIZE = ",.0f", ".2f", ".2f", ".2f", ".1f"


def bars(results: Results) -> Iterator[Bar]:
    """The bars for which this run has both values, in the order of the work."""
    yield from _rates(results)
    yield from _latencies(results)
    yield from _fan_out(results)
    yield from _parked(results)
    yield from _many_partitions(results)
    yield from _processors(results)
    yield from _memory(results)
    yield from _workers(results)


def _rates(results: Results) -> Iterator[Bar]:
    wanted = {
        "a": (("pgmq", 1.2), ("rabbitmq-quorum", 1.0)),
        "b": (("pgmq", 1.5),),
        "c": (("pgmq", 3.0), ("redis-always", 1.0)),
    }
    for work, peers in wanted.items():
        if (ours := results.row(work, OURS)) is None:
            continue
        for peer, bound in peers:
            if (other := results.row(work, peer)) is not None:
                yield _rate(work, "messages/s", ours, peer, other, bound)
        rows = [row for row in results.rows() if row.workload == work and row.peer != OURS]
        if work == "b" and rows:
            best = max(rows, key=lambda row: row.median("rate"))
            yield _rate(work, "messages/s", ours, f"best: {best.peer}", best, 1.0)


def _rate(work: str, text: str, ours: Row, against: str, other: Row, bound: float) -> Bar:
    values = ours.median("rate"), other.median("rate")
    return Bar(work, text, values[0], against, values[1], Want.AT_LEAST, bound, _RATE)


def _latencies(results: Results) -> Iterator[Bar]:
    wanted = (("d", "p50", 1.4), ("d", "p99", 2.0), ("d2", "p50", 1.8))
    for work, percentile, bound in wanted:
        ours, floor = results.row(work, OURS), results.row("d", FLOOR)
        if ours is not None and floor is not None:
            field = f"{percentile}_ms"
            where = " across two brokers" if work == "d2" else ""
            yield Bar(
                "d", f"{percentile} ms{where}", ours.median(field), f"{FLOOR} {percentile}",
                floor.median(field), Want.AT_MOST, bound, _MS,
            )  # fmt: skip


def _fan_out(results: Results) -> Iterator[Bar]:
    fan_out, drain = results.row("e", OURS), results.row("c", OURS)
    if fan_out is not None and drain is not None:
        yield _rate("e", "deliveries/s, 5 groups", fan_out, "ours in c", drain, 1.0)
        values = fan_out.per_message("server_cpu"), drain.per_message("server_cpu")
        yield Bar(
            "e", "µs of broker + PostgreSQL each", values[0], "ours in c", values[1],
            Want.AT_MOST, 1.0, _MICROSECONDS,
        )  # fmt: skip


def _parked(results: Results) -> Iterator[Bar]:
    row = results.row("f", OURS)
    if row is None:
        return
    polls = results.plan.sizes.polls
    cores = row.median("idle_broker_cores") * 100
    yield Bar("f", f"{polls:,} polls at rest, % of a core", cores, "bar", 10.0, Want.BELOW, 1.0,
              _PERCENT)  # fmt: skip
    each = row.median("grown_mib") * MIB / KB / polls
    yield Bar("f", "kB of RSS a poll", each, "bar", 40.0, Want.BELOW, 1.0, _SIZE)
    latency = results.row("d", OURS)
    if latency is not None:
        values = row.median("p99_ms"), latency.median("p99_ms")
        yield Bar("f", "p99 ms of a push to one of them", values[0], "ours in d, p99", values[1],
                  Want.AT_MOST, 3.0, _MS)  # fmt: skip


def _many_partitions(results: Results) -> Iterator[Bar]:
    for many, few in (("gb", "b"), ("gc", "c")):
        ours, other = results.row(many, OURS), results.row(few, OURS)
        if ours is not None and other is not None:
            text = f"{few} with {results.plan.sizes.partitions:,} partitions"
            yield _rate("g", text, ours, f"ours in {few}", other, 0.7)


def _processors(results: Results) -> Iterator[Bar]:
    for work in "abc":
        if (row := results.row(work, OURS)) is not None:
            values = row.per_message("broker_cpu"), row.per_message("client_cpu")
            want = Want.SHOWN if work == "a" else Want.BELOW
            yield Bar("h", f"µs of broker a message in {work}", values[0], "its clients", values[1],
                      want, 1.0, _MICROSECONDS)  # fmt: skip


def _memory(results: Results) -> Iterator[Bar]:
    rows = [row for work in "bc" if (row := results.row(work, OURS)) is not None]
    if rows:
        most = max(sample.broker_rss_mib for row in rows for sample in row.samples) * MIB / 1e6
        yield Bar("i", "MB of RSS after b and c, the most", most, "bar", 150.0, Want.BELOW, 1.0,
                  _SIZE)  # fmt: skip
    if (row := results.row("i", OURS)) is not None:
        text = f"MB of RSS, flat over {results.plan.sizes.minutes:g} minutes"
        late, early = (row.median(f) * MIB / 1e6 for f in ("late_rss_mib", "early_rss_mib"))
        yield Bar("i", text, late, "in the second third", early, Want.AT_MOST, FLAT, _SIZE)


def _workers(results: Results) -> Iterator[Bar]:
    for many, one in (("wa", "a"), ("wb", "b"), ("wc", "c")):
        ours, other = results.row(many, OURS), results.row(one, OURS)
        if ours is not None and other is not None:
            values = ours.median("rate"), other.median("rate")
            yield Bar("+", f"{one} with {WORKERS} workers, messages/s", values[0], "ours with 1",
                      values[1], Want.SHOWN, 1.0, _RATE)  # fmt: skip
