"""The replay of spooled records whose first attempt was committed without anybody knowing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from queen_trio.broker.encryption import Encryption
from queen_trio.broker.history import History
from queen_trio.broker.replay import CLOCK_SKEW, ReplayService
from queen_trio.broker.segment import Drafted
from queen_trio.broker.traffic import Traffic
from queen_trio.model.ids import Uuid7
from queen_trio.model.message import PushItem
from queen_trio.spool.records import SpoolRecord
from queen_trio.store.queries import Store
from queen_trio.store.replay import ReplayStore

if TYPE_CHECKING:
    from queen_trio.store.pool import Pool


@pytest.mark.parametrize("ahead", [-CLOCK_SKEW, timedelta(), CLOCK_SKEW - timedelta(minutes=1)])
async def test_without_deduplication_a_broker_s_clock_may_be_off(
    pool: Pool, ahead: timedelta
) -> None:
    store = Store(pool)
    await store.configure("q", None, None, '{"dedup_window_seconds": 0}', False)
    ids = Uuid7(lambda: int((time.time() + ahead.total_seconds()) * 1000))
    [draft] = Drafted.from_items([PushItem("q", b"1", "p", "t")], ids, None).drafts.values()
    record = SpoolRecord("q", "p", tuple(draft.records))
    for _ in range(2):
        service = ReplayService(
            store, ReplayStore(store), History(store), Encryption(store, None), Traffic(), list
        )
        assert await service.replay([record]) == 1
    async with pool.acquire() as connection:
        cursor = await connection.execute("SELECT last_offset FROM queen.log_partitions")
        assert await cursor.fetchall() == [(0,)], "stored once"
