"""Replays what fuzzers found once, and what they start from; and a few fresh inputs each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from fuzz.__main__ import SEEDS, TARGETS, load

CASES = [(name, seed.name) for name in TARGETS for seed in sorted((SEEDS / name).iterdir())]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_seed(name: str, seed: str) -> None:
    load(name).check((SEEDS / name / seed).read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_generated(name: str) -> None:
    target = load(name)

    def check(data: bytes) -> None:
        target.check(data)

    settings(max_examples=50, deadline=None)(given(target.INPUTS)(check))()
