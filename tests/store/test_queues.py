"""Queues: configure, delete, and what the lists count (spec 2, "Queues")."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from queen_trio.model.queue import COLUMNS, columns_from_options, options_from_row
from tests.store.calls import Part, ids

if TYPE_CHECKING:
    from tests.store.calls import Log

# Every option of spec 2 with its default; leaseTime differs for a queue that a push made.
DEFAULTS = {
    "leaseTime": 300, "retryLimit": 3, "deadLetterQueue": True, "dlqAfterMaxRetries": True,
    "delayedProcessing": 0, "windowBuffer": 0, "minPopWaitTime": 0, "retentionEnabled": False,
    "retentionSeconds": 0, "completedRetentionSeconds": 0, "maxWaitTimeSeconds": 0,
    "encryptionEnabled": False, "dedupWindowSeconds": 3600, "priority": 0, "ttl": 0, "maxSize": 0,
    "retryDelay": 0,
}  # fmt: skip
OTHERS = {
    name: not value if isinstance(value, bool) else value + 5 for name, value in DEFAULTS.items()
}


async def configure(
    log: Log,
    options: dict[str, Any] | None = None,
    *,
    replace: bool = False,
    namespace: str | None = None,
    task: str | None = None,
    name: str = "q",
) -> dict[str, int | bool]:
    """Configure with wire names, and return the effective options under them."""
    columns = json.dumps(columns_from_options(options or {}))
    row = json.loads(await log.store.configure(name, namespace, task, columns, replace))
    stored = await log.store.queue_options(name)
    assert stored is not None
    assert json.loads(stored) == row
    return options_from_row(row)


class TestConfigure:
    def test_all_options_are_tried(self) -> None:
        assert COLUMNS.keys() == DEFAULTS.keys()

    async def test_create_takes_the_defaults(self, log: Log) -> None:
        assert await configure(log) == DEFAULTS

    async def test_every_option_is_stored(self, log: Log) -> None:
        assert await configure(log, OTHERS) == OTHERS
        assert await configure(log) == OTHERS

    @pytest.mark.parametrize("option", DEFAULTS)
    async def test_merge_keeps_what_is_absent(self, log: Log, option: str) -> None:
        await configure(log, OTHERS)
        got = await configure(log, {option: DEFAULTS[option]})
        assert got == OTHERS | {option: DEFAULTS[option]}

    async def test_null_is_the_default(self, log: Log) -> None:
        assert await configure(log, dict.fromkeys(DEFAULTS)) == DEFAULTS
        await configure(log, OTHERS)
        got = await configure(log, {"leaseTime": None, "retentionEnabled": None})
        assert got == OTHERS | {"leaseTime": 300, "retentionEnabled": False}

    async def test_replace_resets_what_is_absent(self, log: Log) -> None:
        await configure(log, OTHERS)
        assert await configure(log, {"ttl": 9}, replace=True) == DEFAULTS | {"ttl": 9}

    async def test_a_pushed_queue_keeps_its_lease_time_in_a_merge(self, log: Log) -> None:
        await log.push("a")
        assert await configure(log) == DEFAULTS | {"leaseTime": 60}
        assert await configure(log, replace=True) == DEFAULTS

    async def test_namespace_and_task(self, log: Log) -> None:
        async def names() -> tuple[str, str]:
            [queue] = await log.store.list_queues()
            return queue.namespace, queue.task

        await configure(log, name="orders.created")
        assert await names() == ("orders", "created")
        await configure(log, name="orders.created", namespace="n")
        assert await names() == ("n", "created")
        await configure(log, name="orders.created", task="")
        assert await names() == ("n", "")

    async def test_unknown_columns_do_nothing(self, log: Log) -> None:
        odd = json.dumps({"id": str(uuid4()), "name": "other", "nonsense": [1], "ttl": 1})
        row = json.loads(await log.store.configure("q", None, None, odd, False))
        assert (row["name"], row["ttl"]) == ("q", 1)
        assert [queue.name for queue in await log.store.list_queues()] == ["q"]

    async def test_no_such_queue(self, log: Log) -> None:
        assert await log.store.queue_options("q") is None


class TestDelete:
    async def test_everything_goes(self, log: Log) -> None:
        for queue in ("q", "kept"):
            pushed = await log.push("a", "b", queue=queue)
            await log.pop(queue=queue, group="g", batch=2)
            await log.ack(pushed.partition_id, "a:d", group="g")
        assert await log.store.delete_queue("q") is True
        for table in (
            "queues", "log_partitions", "log_segments", "log_txns", "log_consumers", "log_dlq",
            "consumer_groups_metadata",
        ):  # fmt: skip
            assert await log.execute(f"SELECT count(*) FROM queen.{table}") == [(1,)], table

    async def test_twice(self, log: Log) -> None:
        await log.configure()
        assert await log.store.delete_queue("q") is True
        assert await log.store.delete_queue("q") is False

    async def test_a_subscription_without_a_queue_goes_too(self, log: Log) -> None:
        await log.pop(group="g", mode="new")
        assert await log.store.delete_queue("q") is False
        await log.push("a")
        assert ids(await log.pop(group="g", mode="all")) == ["a"]

    async def test_the_name_starts_anew(self, log: Log) -> None:
        await log.push("a", "b")
        await log.pop(auto_ack=True)
        await log.store.delete_queue("q")
        assert (await log.push("a")).base_offset == 0
        assert ids(await log.pop()) == ["a"]

    async def test_of_another_tenant(self, log: Log) -> None:
        await log.push("a")
        log.store.tenant = uuid4()
        assert await log.store.delete_queue("q") is False


class TestLists:
    async def counts(self, log: Log) -> tuple[int, int, int, int]:
        [queue] = await log.store.list_queues("q")
        partitions = await log.store.list_partitions("q")
        assert queue.partitions == len(partitions)
        for name in ("total", "pending", "processing"):
            assert getattr(queue, name) == sum(getattr(p, name) for p in partitions)
        return queue.partitions, queue.total, queue.pending, queue.processing

    async def test_counts(self, log: Log) -> None:
        await log.configure()
        assert await self.counts(log) == (0, 0, 0, 0)
        rows = await log.push_bundle(Part(ids="abc"), Part(ids="de", partition="other"))
        assert await self.counts(log) == (2, 5, 5, 0)
        await log.pop(batch=2, partition="p")
        assert await self.counts(log) == (2, 5, 5, 2)
        await log.ack(rows[0].partition_id, "a:c")
        assert await self.counts(log) == (2, 5, 4, 1)
        await log.expire()
        assert await self.counts(log) == (2, 5, 4, 0)
        await log.pop(group="g", auto_ack=True, partition="other")
        assert await self.counts(log) == (2, 5, 2, 0)
        await log.push("f")
        await log.retain_from(rows[0].partition_id, 3)
        assert await self.counts(log) == (2, 3, 1, 0)

    async def test_the_slowest_group_counts(self, log: Log) -> None:
        await log.push("a", "b")
        await log.pop(group="fast", auto_ack=True)
        assert (await self.counts(log))[2] == 0
        await log.pop(group="slow", auto_ack=True, batch=1)
        assert (await self.counts(log))[2] == 1

    async def test_in_order_of_names(self, log: Log) -> None:
        for name in ("b", "a", "c"):
            await log.push("a", queue="q", partition=name)
            await log.push("a", queue=name)
        assert [q.name for q in await log.store.list_queues()] == ["a", "b", "c", "q"]
        assert [p.name for p in await log.store.list_partitions("q")] == ["a", "b", "c"]

    async def test_last_write(self, log: Log) -> None:
        pushed = await log.push("a")
        [partition] = await log.store.list_partitions("q")
        assert partition.last_write_at == pushed.created_at

    async def test_unknown_names(self, log: Log) -> None:
        assert await log.store.list_queues("q") == []
        assert await log.store.list_partitions("q") == []
