"""Leases: one at a time, expiry, extension, release, and what an attempt counts (spec 2)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from tests.store.calls import Part, ids

if TYPE_CHECKING:
    from uuid import UUID

    from tests.store.calls import Log


@pytest.fixture
async def partition(log: Log) -> UUID:
    """q/p with the messages a, b, c."""
    return (await log.push("a", "b", "c")).partition_id


class TestExpiry:
    async def test_a_live_lease_keeps_others_out(self, log: Log, partition: UUID) -> None:
        assert ids(await log.pop(batch=1)) == ["a"]
        assert await log.pop(lease_id="other") == []
        assert await log.pop(lease_id="other", auto_ack=True) == []

    async def test_expiry_redelivers_and_counts_the_delivery(
        self, log: Log, partition: UUID
    ) -> None:
        for attempt in (1, 2, 3, 4, 5):
            got = await log.pop(lease_id=f"l{attempt}")
            assert [(m.id, m.attempt) for m in got] == [(name, attempt) for name in "abc"]
            await log.expire(f"l{attempt}")

    async def test_it_never_costs_retry_budget(self, log: Log, partition: UUID) -> None:
        for _ in range(5):
            await log.pop()
            await log.expire()
        await log.pop()
        assert (await log.ack(partition, "a:f")).verdicts == "f"
        cursor = await log.cursor(partition)
        assert cursor is not None
        assert cursor["attempt_count"] == 1

    async def test_another_batch_size_after_expiry(self, log: Log, partition: UUID) -> None:
        assert ids(await log.pop(batch=3)) == ["a", "b", "c"]
        await log.expire()
        assert ids(await log.pop(batch=1)) == ["a"]
        assert (await log.ack(partition, "b:c")).verdicts == "u"

    async def test_a_completed_batch_starts_attempts_anew(self, log: Log, partition: UUID) -> None:
        await log.pop(batch=1)
        await log.expire()
        assert [m.attempt for m in await log.pop(batch=1)] == [2]
        await log.ack(partition, "a:c")
        assert [m.attempt for m in await log.pop(batch=1)] == [1]

    async def test_auto_ack_takes_over_what_expired(self, log: Log, partition: UUID) -> None:
        await log.pop()
        await log.expire()
        got = await log.pop(auto_ack=True, lease_id="")
        assert [(m.id, m.attempt) for m in got] == [("a", 2), ("b", 2), ("c", 2)]
        assert (await log.ack(partition, "a:c")).verdicts == "n"


class TestRelease:
    async def test_it_gives_the_batch_back_at_no_cost(self, log: Log, partition: UUID) -> None:
        await log.pop()
        assert await log.store.release("lease") == 1
        assert [(m.id, m.attempt) for m in await log.pop()] == [("a", 1), ("b", 1), ("c", 1)]

    async def test_an_expired_claim_before_it_still_counts(self, log: Log, partition: UUID) -> None:
        await log.pop()
        await log.expire()
        await log.pop()
        await log.store.release("lease")
        assert {m.attempt for m in await log.pop()} == {2}

    async def test_all_partitions_of_the_lease(self, log: Log) -> None:
        await log.push_bundle(*(Part(ids=["a"], partition=str(p)) for p in range(3)))
        await log.pop(partitions=2)
        await log.pop(lease_id="other")
        assert await log.store.release("lease") == 2
        assert len(await log.pop(partitions=None)) == 2

    @pytest.mark.parametrize("lease", ["other", ""])
    async def test_only_its_own(self, log: Log, partition: UUID, lease: str) -> None:
        await log.pop()
        assert await log.store.release(lease) == 0
        assert await log.pop() == []

    async def test_a_lost_lease_releases_nothing(self, log: Log, partition: UUID) -> None:
        await log.pop()
        await log.expire()
        await log.pop(lease_id="other")
        assert await log.store.release("lease") == 0
        assert await log.pop() == []

    async def test_after_auto_ack_nothing_comes_back(self, log: Log, partition: UUID) -> None:
        await log.pop(auto_ack=True, lease_id="")
        assert await log.store.release("") == 0
        assert await log.pop() == []


class TestExtend:
    async def test_it_lengthens(self, log: Log, partition: UUID) -> None:
        await log.pop(lease_seconds=10)
        renewed, expires = await log.store.extend("lease", 100)
        assert renewed == 1
        assert expires is not None
        assert abs(expires - datetime.now(UTC) - timedelta(seconds=100)) < timedelta(seconds=5)

    @pytest.mark.parametrize("seconds", [1, 0, -50])
    async def test_it_never_shortens(self, log: Log, partition: UUID, seconds: int) -> None:
        await log.pop(lease_seconds=50)
        before = await log.cursor(partition)
        renewed, expires = await log.store.extend("lease", seconds)
        assert before is not None
        assert (renewed, expires) == (1, datetime.fromisoformat(before["lease_expires_at"]))

    async def test_it_never_revives(self, log: Log, partition: UUID) -> None:
        await log.pop()
        await log.expire()
        assert await log.store.extend("lease", 60) == (0, None)
        assert ids(await log.pop(lease_id="other")) == ["a", "b", "c"]

    @pytest.mark.parametrize("lease", ["other", ""])
    async def test_an_unknown_lease(self, log: Log, partition: UUID, lease: str) -> None:
        await log.pop()
        assert await log.store.extend(lease, 60) == (0, None)

    async def test_a_finished_lease(self, log: Log, partition: UUID) -> None:
        await log.pop()
        await log.ack(partition, "c:c")
        assert await log.store.extend("lease", 60) == (0, None)

    async def test_the_earliest_of_several_is_told(self, log: Log) -> None:
        await log.configure("b.x", lease_time=1000)
        await log.push("a", queue="a.x")
        await log.push("b", queue="b.x")
        await log.pop(queue=None, task="x", partitions=None)
        renewed, expires = await log.store.extend("lease", 500)
        assert renewed == 2
        assert expires is not None
        assert expires - datetime.now(UTC) < timedelta(seconds=501)

    async def test_only_what_is_still_live(self, log: Log) -> None:
        await log.push_bundle(*(Part(ids=["a"], partition=str(p)) for p in range(3)))
        got = await log.pop(partitions=None)
        await log.ack(got[0].partition_id, "a:c")
        assert (await log.store.extend("lease", 100))[0] == 2
