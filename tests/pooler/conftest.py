"""A broker with PgBouncer in session mode before its PostgreSQL; tests of tests/http meet it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.http.api import Api, open_api
from tests.servers import running_pgbouncer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster


@pytest.fixture(scope="session")
def pooled_settings(shared_broker: LiveBroker, cluster: Cluster) -> Iterator[ConnectionSettings]:
    """How to reach the shared broker's database through PgBouncer in session mode."""
    with running_pgbouncer(cluster.settings("shared", tcp=True), "session") as settings:
        yield settings


@pytest.fixture(scope="session")
def pooled_broker(pooled_settings: ConnectionSettings) -> Iterator[LiveBroker]:
    """A second broker on that database, through the pooler."""
    with running_broker(postgres_environment(pooled_settings)) as broker:
        yield broker


@pytest.fixture
async def api(pooled_broker: LiveBroker) -> AsyncIterator[Api]:
    """A client of that broker."""
    async with open_api(pooled_broker) as api:
        yield api
