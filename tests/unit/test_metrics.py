"""The list of metrics by the rules of their naming, and the histogram."""

from __future__ import annotations

import re

import pytest

from queen_trio.broker.traffic import Traffic
from queen_trio.metrics import FAMILIES, ITEMS, SECONDS, Family, Histogram, Kind


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_names(family: Family) -> None:
    assert re.fullmatch(r"(queen|process)(_[a-z]+)+", family.name)
    assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
    assert not re.search(r"_(bucket|count|sum)$", family.name)
    assert family.help.endswith(".")


@pytest.mark.parametrize("bounds", [SECONDS, ITEMS])
def test_buckets_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_a_histogram_counts_up_to_and_including_each_bound() -> None:
    histogram = Histogram([0.5, 1.0, 10.0])
    for value in (0.1, 0.5, 0.6, 1.0, 10.0, 11.0, 1e9):
        histogram.observe(value)
    assert histogram.cumulative() == [("0.5", 2), ("1.0", 4), ("10.0", 5), ("+Inf", 7)]
    assert histogram.sum == pytest.approx(1e9 + 23.2)


def test_totals_go_on_whatever_becomes_of_a_flush() -> None:
    traffic = Traffic()
    traffic.count_pushed(["a", "b"], [2, 3])
    assert traffic.totals()["pushed"] == 5
    written = traffic.take()
    assert traffic.totals()["pushed"] == 5
    traffic.count_pushed(["a"], [1])
    lost = traffic.take()
    traffic.give_back(lost)
    assert traffic.totals()["pushed"] == 6
    assert traffic.counters["pushed"] == 1
    assert written[0]["pushed"] == 5
