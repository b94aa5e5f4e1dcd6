"""A broker without the hot-list: it scans for candidates; tests of tests/http meet it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.http.api import Api, open_api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.cluster import Cluster


@pytest.fixture(scope="session")
def scanning_broker(shared_broker: LiveBroker, cluster: Cluster) -> Iterator[LiveBroker]:
    """A second broker on the shared broker's database, with QUEEN_HOTLIST=0."""
    environment = postgres_environment(cluster.settings("shared")) | {"QUEEN_HOTLIST": "0"}
    with running_broker(environment) as broker:
        yield broker


@pytest.fixture
async def api(scanning_broker: LiveBroker) -> AsyncIterator[Api]:
    """A client of that broker."""
    async with open_api(scanning_broker) as api:
        yield api
