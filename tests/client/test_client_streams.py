"""The client's streaming engine, unmodified: operators over our pops, cycles and state."""

from __future__ import annotations

import asyncio
import gc
import warnings
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.client.consumption import POLL_SECONDS
from tests.client.hosting import hosted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import ModuleType

    from tests.brokers import LiveBroker
    from tests.cluster import Cluster

# Long enough to be in a long poll, short enough to stop soon.
MAX_WAIT_MS = 100


@asynccontextmanager
async def running(stream: Any, name: str, url: str, **options: Any) -> AsyncIterator[Any]:
    """Run a stream for the block's time; a cycle that failed fails the test."""
    runner = await stream.run(
        query_id=name,
        url=url,
        subscription_mode="all",
        max_wait_millis=MAX_WAIT_MS,
        **options,
    )
    try:
        yield runner
    finally:
        await runner.stop()
    assert runner.metrics()["errorsTotal"] == 0, runner.metrics()


async def take(queen: Any, queue: str, count: int) -> list[Any]:
    """Wait for `count` messages of a queue, then look for one more; returns all payloads."""
    payloads: list[Any] = []
    while len(payloads) < count:
        popped = await queen.queue(queue).batch(100).partitions(10).wait(False).pop()
        payloads += [message["data"] for message in popped]
        if popped:
            await queen.ack(popped)
        else:
            await asyncio.sleep(POLL_SECONDS)
    popped = await queen.queue(queue).batch(100).partitions(10).wait(False).pop()
    return payloads + [message["data"] for message in popped]


async def wait_committed(queen: Any, queue: str) -> None:
    """Wait until no group has anything to do in a queue."""
    while True:
        counts = (await queen.admin.get_queue(queue))["messages"]
        if counts["pending"] == counts["processing"] == 0:
            return
        await asyncio.sleep(POLL_SECONDS)


def event_time(message: Any) -> int:
    return int(message["data"]["at"])


@hosted
async def test_each_message_goes_through_once_and_in_order(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": {"n": n}} for n in range(500)])
        stream = (
            client.Stream.from_(queen.queue(name))
            .filter(lambda message: message["data"]["n"] % 2 == 0)
            .map(lambda message: {"twice": message["data"]["n"] * 2})
            .to(queen.queue(f"{name}-out"))
        )
        async with running(stream, name, shared_broker.url, batch_size=70):
            doubled = await take(queen, f"{name}-out", 250)
            assert doubled == [{"twice": n * 2} for n in range(0, 500, 2)]
            await wait_committed(queen, name)
            await queen.queue(name).push({"data": {"n": 1000}})
            assert await take(queen, f"{name}-out", 1) == [{"twice": 2000}]
        # Another process takes over where this one has stopped.
        await queen.queue(name).push({"data": {"n": 2000}})
        async with running(stream, name, shared_broker.url):
            assert await take(queen, f"{name}-out", 1) == [{"twice": 4000}]


@hosted
async def test_windows_keep_their_state_between_cycles_and_runs(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    """Sums of ten seconds of event time; a window closes when an event behind it arrives."""
    async with client.Queen(shared_broker.url) as queen:
        stream = (
            client.Stream.from_(queen.queue(name))
            .window_tumbling(seconds=10, event_time=event_time)
            .aggregate({"count": lambda _: 1, "sum": lambda m: m["v"]})
            .to(queen.queue(f"{name}-out"))
        )

        async def push(at: int, value: int) -> None:
            await queen.queue(name).push({"data": {"at": at, "v": value}})

        for at, value in ((1_000, 1), (2_000, 2), (9_999, 3)):
            await push(at, value)
        async with running(stream, name, shared_broker.url, batch_size=1):
            await wait_committed(queen, name)
        await push(9_999, 4)
        await push(10_000, 100)
        async with running(stream, name, shared_broker.url):
            [window] = await take(queen, f"{name}-out", 1)
            assert (window["count"], window["sum"]) == (4, 10)
            await push(20_000, 0)
            [window] = await take(queen, f"{name}-out", 1)
            assert (window["count"], window["sum"]) == (1, 100)


@hosted
async def test_an_idle_window_is_flushed_when_it_is_ripe(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    """Nothing arrives any more: the engine asks for ripe state and commits without an ack."""
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": {"v": value}} for value in (1, 2, 3)])
        stream = (
            client.Stream.from_(queen.queue(name))
            .window_tumbling(seconds=0.2, idle_flush_ms=50)
            .aggregate({"sum": lambda m: m["v"]})
            .to(queen.queue(f"{name}-out"))
        )
        async with running(stream, name, shared_broker.url) as runner:
            [window] = await take(queen, f"{name}-out", 1)
            assert window["sum"] == 6
            assert runner.metrics()["flushCyclesTotal"] == 1


@hosted
async def test_a_gate_lets_a_part_of_a_batch_through(
    client: ModuleType, shared_broker: LiveBroker, cluster: Cluster, name: str
) -> None:
    """What it denies stays leased and comes again, in order, when the lease expires."""
    limits = [4]

    def gate(_: Any, context: Any) -> bool:
        allowed = context.state.get("allowed", 0)
        if allowed >= limits[0]:
            return False
        context.state["allowed"] = allowed + 1
        return True

    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": {"n": n}} for n in range(10)])
        stream = client.Stream.from_(queen.queue(name)).gate(gate).to(queen.queue(f"{name}-out"))
        async with running(stream, name, shared_broker.url):
            for upto in (4, 7, 10):
                limits[0] = upto
                _expire(cluster, f"streams.{name}")
                expected = [{"n": n} for n in range(upto)][-(4 if upto == 4 else 3) :]
                assert await take(queen, f"{name}-out", len(expected)) == expected
            await wait_committed(queen, name)


def _expire(cluster: Cluster, group: str) -> None:
    cluster.execute(
        "UPDATE queen.log_consumers SET lease_expires_at = clock_timestamp() - interval '1 second'"
        f" WHERE consumer_group = '{group}'",
        "shared",
    )


@hosted
async def test_other_operators_under_the_same_name_need_a_reset(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        source = client.Stream.from_(queen.queue(name))
        windows = source.window_tumbling(seconds=60).aggregate({"count": lambda _: 1})
        async with running(windows, name, shared_broker.url):
            pass
        other = source.window_tumbling(seconds=30).aggregate({"count": lambda _: 1})
        with pytest.raises(Exception, match="config_hash mismatch"):
            await other.run(query_id=name, url=shared_broker.url)
        with warnings.catch_warnings():
            # The engine that failed to start is the client's to close, and it doesn't.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        async with running(other, name, shared_broker.url, reset=True):
            pass
