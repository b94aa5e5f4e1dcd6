"""The first suite of the HTTP API again, through PgBouncer in session mode (issue 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from queen_trio.jobs.retention import Retention
from queen_trio.store.pool import open_pool

# Collected here, they run with the broker of this folder's conftest.
from tests.http.test_api_ack import *  # noqa: F403
from tests.http.test_api_pop import *  # noqa: F403
from tests.http.test_api_push import *  # noqa: F403
from tests.http.test_api_queues import *  # noqa: F403

if TYPE_CHECKING:
    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster


def test_the_broker_goes_through_the_pooler(pooled_broker: object, cluster: Cluster) -> None:
    """Or the tests above would show nothing: the shared broker uses a Unix socket."""
    addresses = cluster.execute(
        "SELECT DISTINCT host(client_addr) FROM pg_stat_activity"
        " WHERE datname = 'shared' AND application_name LIKE 'queen-trio/%'"
    )
    assert ("127.0.0.1",) in addresses


async def test_session_locks_hold_through_it(pooled_settings: ConnectionSettings) -> None:
    with trio.fail_after(10):
        async with open_pool(pooled_settings, 4) as pool:
            retention = Retention(pool, 30)
            await retention.run()
            assert retention.statistics.cycles == 1
