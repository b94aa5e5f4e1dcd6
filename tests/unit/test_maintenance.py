"""The switches of one broker: what is newest wins, and who waits for pops is let go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from queen_trio.broker.maintenance import Maintenance, Switch
from queen_trio.errors import ClientError
from queen_trio.store.system import SystemStore

if TYPE_CHECKING:
    from queen_trio.store.pool import Pool


class SlowStore(SystemStore):
    """The real one, whose answers can be held up."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.asked = trio.Event()
        self.gate = trio.Event()
        self.gate.set()

    async def switches(self) -> dict[str, bool]:
        found = await super().switches()
        self.asked.set()
        await self.gate.wait()
        return found


@pytest.fixture
def store(pool: Pool) -> SlowStore:
    return SlowStore(pool)


async def test_brokers_read_what_one_wrote(store: SlowStore) -> None:
    one, other = Maintenance(store), Maintenance(store)
    await other.refresh()
    assert (other.push, other.pop) == (False, False)
    await one.store(Switch.PUSH, enabled=True)
    await one.store(Switch.POP, enabled=True)
    await other.refresh()
    assert (other.push, other.pop) == (True, True)
    await one.store(Switch.POP, enabled=False)
    await other.refresh()
    assert (other.push, other.pop) == (True, False)


async def test_an_old_answer_does_not_undo_a_switch(store: SlowStore) -> None:
    """A hint that comes while the database is being read is newer than what it says."""
    maintenance = Maintenance(store)
    store.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(maintenance.refresh)
        await store.asked.wait()
        await maintenance.store(Switch.PUSH, enabled=True)
        maintenance.set(Switch.PUSH, enabled=True)
        store.gate.set()
    assert maintenance.push
    await maintenance.refresh()
    assert maintenance.push


async def test_what_cannot_be_buffered_is_refused(store: SlowStore) -> None:
    maintenance = Maintenance(store)
    maintenance.check_writable()
    maintenance.set(Switch.PUSH, enabled=True)
    with pytest.raises(ClientError) as refusal:
        maintenance.check_writable()
    assert (refusal.value.status, refusal.value.code) == (503, "maintenance")


async def test_pops_wait_until_it_ends(store: SlowStore) -> None:
    maintenance = Maintenance(store)
    await maintenance.wait_pops_open()
    maintenance.set(Switch.POP, enabled=True)
    maintenance.set(Switch.POP, enabled=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(maintenance.wait_pops_open)
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        maintenance.set(Switch.POP, enabled=False)
    await maintenance.wait_pops_open()
