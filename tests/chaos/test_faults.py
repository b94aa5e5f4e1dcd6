"""The schedule of faults: repeatable, complete, different for each seed."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.chaos.faults import LANES, draw
from tests.chaos.history import Kind
from tests.chaos.rig import EXPECTED, raised
from tests.chaos.run import BROKERS
from tests.chaos.test_chaos import SEEDS


def test_a_seed_repeats_its_faults() -> None:
    for lane in range(len(LANES)):
        one, same, other = (list(islice(draw(seed, lane, 3), 20)) for seed in (1, 1, 2))
        assert one == same
        assert one != other


def test_every_kind_comes_before_any_comes_again() -> None:
    firsts = [
        fault.kind
        for lane, kinds in enumerate(LANES)
        for fault in islice(draw(7, lane, 1), len(kinds))
    ]
    assert sorted(firsts, key=list(Kind).index) == list(Kind)


def test_the_fixed_seeds_do_all_kinds_soon() -> None:
    soon = {
        fault.kind
        for seed in SEEDS
        for lane in range(len(LANES))
        for fault in islice(draw(seed, lane, BROKERS), 4)
    }
    assert soon == set(Kind)


@pytest.mark.parametrize(
    ("trace", "name"),
    [
        ("Traceback (most recent call last):\n  File …\nKeyError: 'x'", "KeyError"),
        (
            "psycopg.OperationalError: gone\n\tThis probably means\n\nThe above exception …:\n\n"
            "Traceback (most recent call last):\n  File …\n"
            "queen_trio.errors.DatabaseUnavailable: gone\n\tThis probably means",
            EXPECTED[0],
        ),
        ("Traceback (most recent call last):\n  File …\ntrio.TooSlowError", "trio.TooSlowError"),
        ("Traceback (most recent call last):\n  File …\nOSError: no\nCONTEXT:  SQL", "OSError"),
    ],
)
def test_what_a_traceback_is_of(trace: str, name: str) -> None:
    assert raised(trace) == name


def test_a_group_is_never_expected() -> None:
    trace = (
        "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: x (1 sub-…)"
    )
    assert raised(trace) not in EXPECTED
