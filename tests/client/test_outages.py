"""The client's consumers outlive a restart of the broker or of PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.client.consumption import Message, consuming, wait_parked
from tests.client.hosting import hosted
from tests.client.releases import AUTOPILOT_RELEASES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from tests.cluster import Cluster

# An operator's restart: longer than any retry of the client, shorter than the broker's patience.
AWAY_SECONDS = 10.0

# The client waits a second before its first retry, two before the next: too long for a test.
IMPATIENT = {"retry_delay_millis": 20}


@pytest.fixture
def broker_on_own_cluster(own_cluster: Cluster) -> Iterator[LiveBroker]:
    """A broker on a PostgreSQL that the test may stop, by TCP as in production."""
    with running_broker(postgres_environment(own_cluster.settings(tcp=True))) as broker:
        yield broker


@hosted
async def test_a_stopped_broker_comes_back(
    client: ModuleType, broker: LiveBroker, name: str
) -> None:
    async with client.Queen(broker.url, **IMPATIENT) as queen:
        async with consuming(queen.queue(name).batch(1)) as seen:
            await wait_parked(queen)
            assert await asyncio.to_thread(broker.stop) == 0
            await asyncio.to_thread(broker.restart)
            await queen.queue(name).push({"data": "after"})
            await seen.wait_messages(1)
        assert seen.data == ["after"]


@hosted
async def test_a_killed_broker_comes_back(
    client: ModuleType, broker: LiveBroker, name: str
) -> None:
    """What was handed out is still the consumer's: its lease lives in PostgreSQL."""

    async def work(message: Message) -> None:
        if message["data"] == 0:
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.restart)

    async with client.Queen(broker.url, **IMPATIENT) as queen:
        await queen.queue(name).push([{"data": n} for n in range(3)])
        async with consuming(queen.queue(name).batch(1).limit(3), work) as seen:
            await seen.wait_end()
        assert seen.data == [0, 1, 2]
        assert (await queen.admin.get_queue(name))["messages"]["pending"] == 0


@pytest.mark.parametrize("release", AUTOPILOT_RELEASES, indirect=True)
@hosted
async def test_a_push_buffer_keeps_its_messages_while_the_broker_is_away(
    client: ModuleType, broker: LiveBroker, name: str
) -> None:
    buffer = {"message_count": 5, "time_millis": 20}
    async with client.Queen(broker.url, **IMPATIENT) as queen:
        await asyncio.to_thread(broker.kill)
        await queen.queue(name).buffer(buffer).push([{"data": n} for n in range(20)])
        await asyncio.to_thread(broker.restart)
        await queen.flush_all_buffers()
        messages = await queen.queue(name).batch(100).wait(False).pop()
    assert [message["data"] for message in messages] == list(range(20))


@pytest.mark.parametrize("release", AUTOPILOT_RELEASES, indirect=True)
@hosted
async def test_postgres_restarts_under_a_parked_consumer(
    client: ModuleType, broker_on_own_cluster: LiveBroker, own_cluster: Cluster, name: str
) -> None:
    async with client.Queen(broker_on_own_cluster.url) as queen:
        async with consuming(queen.queue(name).batch(1)) as seen:
            await wait_parked(queen)
            await asyncio.to_thread(own_cluster.restart)
            await queen.queue(name).push({"data": "after"})
            await seen.wait_messages(1)
            assert not seen.task.done()
        assert seen.data == ["after"]


@pytest.mark.parametrize("release", AUTOPILOT_RELEASES, indirect=True)
@hosted
async def test_an_acknowledgement_waits_for_postgres(
    client: ModuleType, broker_on_own_cluster: LiveBroker, own_cluster: Cluster, name: str
) -> None:
    """A crash of PostgreSQL within 15 s costs the consumer neither its message nor an error."""
    async with client.Queen(broker_on_own_cluster.url, retry_attempts=1) as queen:
        await queen.queue(name).push([{"data": 1}, {"data": 2}])
        (message,) = await queen.queue(name).batch(1).pop()
        await asyncio.to_thread(own_cluster.kill)
        ack = asyncio.create_task(queen.ack(message))
        poll = asyncio.create_task(queen.queue(name).batch(1).pop())
        await asyncio.to_thread(own_cluster.start)
        assert (await ack)["success"] is True
        (message,) = await poll
        assert message["data"] == 2


@pytest.mark.parametrize("release", AUTOPILOT_RELEASES, indirect=True)
@hosted
async def test_a_consumer_at_work_outlives_ten_seconds_without_postgres(
    client: ModuleType, broker_on_own_cluster: LiveBroker, own_cluster: Cluster, name: str
) -> None:
    """It stands between a message and its ack, and its producer goes on meanwhile."""
    stopped = asyncio.Event()

    async def work(message: Message) -> None:
        if message["data"] == 0:
            await asyncio.to_thread(own_cluster.stop)
            stopped.set()

    async with client.Queen(broker_on_own_cluster.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(3)])
        async with consuming(queen.queue(name).batch(1), work) as seen:
            await stopped.wait()
            await queen.queue(name).push({"data": 3})
            await asyncio.sleep(AWAY_SECONDS)
            assert not seen.task.done()
            await asyncio.to_thread(own_cluster.start)
            await seen.wait_messages(4)
            await queen.queue(name).push({"data": 4})
            await seen.wait_messages(5)
            assert not seen.task.done()
        assert seen.data == [0, 1, 2, 3, 4]
