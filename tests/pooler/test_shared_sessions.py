"""A pooler that lends one session to many is refused at boot, with the reason (spec 8.23)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from queen_trio.errors import PoolingError
from queen_trio.store.preflight import check_sessions, read_capacity
from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.servers import running_pgbouncer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster


@pytest.fixture
def database_settings(cluster: Cluster, empty_database: str) -> ConnectionSettings:
    return cluster.settings(empty_database, tcp=True)


async def test_sessions_of_our_own_pass(database_settings: ConnectionSettings) -> None:
    await check_sessions(database_settings)
    with running_pgbouncer(database_settings, "session") as pooled:
        await check_sessions(pooled)


@pytest.mark.parametrize("mode", ["transaction", "statement"])
@pytest.mark.parametrize("options", [{}, {"default_pool_size": 1}, {"server_round_robin": 1}])
async def test_shared_sessions_are_refused(
    database_settings: ConnectionSettings, mode: str, options: Mapping[str, object]
) -> None:
    with (
        running_pgbouncer(database_settings, mode, **options) as pooled,
        pytest.raises(PoolingError, match="pooler in transaction or statement mode"),
    ):
        await check_sessions(pooled)


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_a_broker_says_why_it_refuses(
    cluster: Cluster, database_settings: ConnectionSettings, mode: str
) -> None:
    with running_pgbouncer(database_settings, mode) as pooled:
        broker = LiveBroker(postgres_environment(pooled))
        broker.launch()
        try:
            assert broker.wait() == 1
        finally:
            broker.process.kill()
    [fatal] = [line for line in broker.stderr if "FATAL" in line]
    assert "pool_mode = session" in fatal
    assert "Traceback" not in "".join(broker.stderr)
    schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'queen'"
    assert cluster.execute(schemas, database_settings.database) == [(0,)]


async def test_capacity_leaves_out_what_is_reserved(database_settings: ConnectionSettings) -> None:
    assert await read_capacity(database_settings) == 197  # max_connections 200, 3 for superusers


@pytest.mark.parametrize(
    ("peers", "pool_size", "warned"),
    [("queen-a,queen-b,queen-c", 65, False), ("queen-b,queen-c", 66, True), ("", 198, True)],
)
def test_the_boot_warns_where_the_pools_do_not_fit(
    settings: ConnectionSettings, peers: str, pool_size: int, warned: bool
) -> None:
    environment = postgres_environment(settings) | {
        "DB_POOL_SIZE": str(pool_size),
        "QUEEN_SERVER_ID": "queen-a",
        "QUEEN_MESH_PEERS": peers,
        "QUEEN_SYNC_ENABLED": "false",
    }
    with running_broker(environment) as broker:
        said = [e for e in broker.events if e["event"].startswith("DB_POOL_SIZE")]
    assert [(e["wanted"], e["admitted"]) for e in said] == [(198, 197)] * warned
