"""A few fixed seeds of chaos; `make chaos` runs longer ones. See docs/how-to/chaos.md."""

from __future__ import annotations

import pytest
import trio

from tests.chaos.run import run

# Each starts with other faults; together they do all kinds (test_faults.py).
SEEDS = (29, 56)
MINUTES = 0.17
# For a machine that runs the rest of the suite beside it.
SECONDS = 110


@pytest.mark.parametrize("seed", SEEDS)
async def test_chaos(seed: int) -> None:
    with trio.fail_after(SECONDS):
        report = await run(seed, MINUTES)
    print(report)
    assert not report.wrong, report.command
    assert report.history.claims
    assert report.history.seeks
    assert report.history.transactions
