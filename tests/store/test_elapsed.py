"""Where a new group starts when its first pop had to wait for a connection (spec 8.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from queen_trio.store.elapsed import Elapsed
from queen_trio.store.pool import open_pool
from queen_trio.store.queries import Store
from tests.store.calls import ids

if TYPE_CHECKING:
    from queen_trio.store.settings import ConnectionSettings
    from tests.store.calls import Log


@pytest.mark.parametrize("seeds", [True, False], ids=["candidates", "pop"])
async def test_what_is_pushed_while_a_first_pop_waits_is_its_groups(
    settings: ConnectionSettings, log: Log, *, seeds: bool
) -> None:
    async def look(store: Store) -> None:
        waited = Elapsed(trio.current_time())
        if seeds:
            assert await store.candidates("q", "g", "new", None, waited, 10) == ["p"]
        else:
            rows = await store.pop(
                "q", None, "", "", "g", 10, 1, None, False, "lease", "new", None, waited, 1 << 20
            )
            assert rows

    with trio.fail_after(20):
        pool = open_pool(settings, 1)
        async with pool as full, trio.open_nursery() as nursery, full.acquire():
            nursery.start_soon(look, Store(full))
            await wait_all_tasks_blocked()
            await log.push("woke it")
    assert ids(await log.pop(group="other", mode="all")) == ["woke it"]


def test_it_is_never_too_short() -> None:
    async def main() -> None:
        elapsed = Elapsed(trio.current_time() - 0.0101)
        assert int(elapsed) == elapsed.__index__() >= 11

    trio.run(main)
