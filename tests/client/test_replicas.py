"""The client with two brokers on one database."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.client.consumption import Message, consuming
from tests.client.hosting import hosted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from queen_trio.store.settings import ConnectionSettings


@pytest.fixture
def second_broker(settings: ConnectionSettings) -> Iterator[LiveBroker]:
    """Another broker on the database of `broker`."""
    with running_broker(postgres_environment(settings)) as broker:
        yield broker


@hosted
async def test_a_lease_is_good_everywhere(
    client: ModuleType, broker: LiveBroker, second_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(broker.url) as here, client.Queen(second_broker.url) as there:
        await here.queue(name).push([{"data": 1}, {"data": 2}])
        (message,) = await there.queue(name).batch(1).wait(False).pop()
        assert (await here.renew(message))["newExpiresAt"] is not None
        assert await here.queue(name).batch(1).wait(False).pop() == []
        assert (await here.ack(message))["success"] is True
        (message,) = await here.queue(name).batch(1).wait(False).pop()
        assert message["data"] == 2


@hosted
async def test_one_of_two_dies(
    client: ModuleType, broker: LiveBroker, second_broker: LiveBroker, name: str
) -> None:
    """Whichever the client's ring prefers: it fails over, and everything arrives once."""

    async def work(message: Message) -> None:
        # No pop is under way now: one that a dying broker claimed comes back with its lease only.
        if message["data"] == 3:
            await asyncio.to_thread(broker.kill)

    async with client.Queen([broker.url, second_broker.url]) as queen:
        await queen.queue(name).push([{"data": n} for n in range(6)])
        async with consuming(queen.queue(name).batch(1).each().limit(10), work) as seen:
            await seen.wait_messages(6)
            await queen.queue(name).push([{"data": n} for n in range(6, 10)])
            await seen.wait_end()
    assert seen.data == list(range(10))
