"""The client with a token, of the right and of the wrong role."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.client.hosting import hosted
from tests.issuer import SECRET, token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from tests.cluster import Cluster


@pytest.fixture(scope="module")
def guarded(cluster: Cluster, template: str) -> Iterator[LiveBroker]:
    """A broker that asks for tokens."""
    cluster.execute(f"CREATE DATABASE tokens TEMPLATE {template} STRATEGY FILE_COPY")
    environment = postgres_environment(cluster.settings("tokens"))
    with running_broker({**environment, "JWT_ENABLED": "true", "JWT_SECRET": SECRET}) as broker:
        yield broker


@hosted
async def test_a_token_opens_what_its_role_may(
    client: ModuleType, guarded: LiveBroker, name: str
) -> None:
    producer, consumer = (token(sub=role, role=role) for role in ("write-only", "read-write"))
    async with (
        client.Queen(url=guarded.url, bearer_token=producer) as pushes,
        client.Queen(url=guarded.url, bearer_token=consumer) as pops,
    ):
        await pushes.queue(name).push([{"data": {"n": 1}}])
        with pytest.raises(Exception, match="this needs the role admin or read-write"):
            await pushes.queue(name).create()
        [message] = await pops.queue(name).batch(1).wait(False).pop()
        assert message["data"] == {"n": 1}
        assert message["producerSub"] == "write-only"
        assert (await pops.ack(message))["success"]


@hosted
async def test_without_a_token_nothing_opens(
    client: ModuleType, guarded: LiveBroker, name: str
) -> None:
    async with client.Queen(url=guarded.url) as queen:
        with pytest.raises(Exception, match="this needs a bearer token"):
            await queen.queue(name).push([{"data": 1}])
