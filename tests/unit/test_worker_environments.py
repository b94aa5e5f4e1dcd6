"""One broker's configuration, shared out among workers: each share is one that loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from queen_trio.config import load, worker_environments
from queen_trio.errors import ConfigError

SPOOL = Path("/spool")


def environments(count: int = 2, **environ: str) -> list[dict[str, str]]:
    environ = {"QUEEN_SERVER_ID": "host", **environ}
    return worker_environments(load(environ), count, SPOOL, environ)


def values(name: str, count: int = 2, **environ: str) -> list[str | None]:
    return [environment.get(name) for environment in environments(count, **environ)]


def test_each_has_a_name_a_spool_and_a_port() -> None:
    assert values("QUEEN_SERVER_ID", 3) == ["host-0", "host-1", "host-2"]
    assert values("FILE_BUFFER_DIR", 3) == ["/spool/0", "/spool/1", "/spool/2"]
    assert values("QUEEN_MESH_PORT", 3, QUEEN_MESH_PORT="7000") == ["7000", "7001", "7002"]
    assert values("QUEEN_APPLY_SCHEMA") == ["false", "false"]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_budgets_are_divided_without_a_remainder(count: int) -> None:
    shares = values("DB_POOL_SIZE", count, PG_HOST="db", DB_POOL_SIZE="100")
    assert sum(map(int, filter(None, shares))) == 100
    assert {int(share or 0) for share in shares} <= {100 // count, 100 // count + 1}
    reserves = values("QUEEN_ADMISSION_POOL_RESERVE", count)
    assert sum(map(int, filter(None, reserves))) == 16
    assert values("QUEEN_ADMISSION_MAX") == [None, None]
    assert values("QUEEN_ADMISSION_MAX", QUEEN_ADMISSION_MAX="5") == ["3", "2"]


def test_what_cannot_be_divided_is_named_with_its_value() -> None:
    with pytest.raises(ConfigError) as refused:
        environments(3, PG_HOST="db", DB_POOL_SIZE="11", QUEEN_ADMISSION_MAX="2")
    assert refused.value.faults == [
        'DB_POOL_SIZE="11" is too small for 3 workers: each needs 4, all of them 12',
        'QUEEN_ADMISSION_MAX="2" is too small for 3 workers: each needs 1, all of them 3',
    ]


def test_a_host_of_its_own_has_a_mesh_that_nobody_else_can_enter() -> None:
    [first, second] = environments()
    assert first["QUEEN_MESH_BIND_ADDR"] == second["QUEEN_MESH_BIND_ADDR"] == "127.0.0.1"
    assert first["QUEEN_MESH_PEERS"] == "127.0.0.1:6634"
    assert second["QUEEN_MESH_PEERS"] == "127.0.0.1:6633"
    assert first["QUEEN_SYNC_SECRET"] == second["QUEEN_SYNC_SECRET"]
    assert len(first["QUEEN_SYNC_SECRET"]) >= 32
    assert environments()[0]["QUEEN_SYNC_SECRET"] != first["QUEEN_SYNC_SECRET"]
    assert values("QUEEN_SYNC_SECRET", QUEEN_SYNC_SECRET="chosen") == ["chosen", "chosen"]


def test_workers_of_other_hosts_are_peers_too() -> None:
    # A uniform list names this host as well; an entry without a port is all workers of that host.
    peers = "host.queen,other.queen,third:9000,[2001:db8::1]"
    assert values("QUEEN_MESH_PEERS", QUEEN_MESH_PEERS=peers, QUEEN_SYNC_SECRET="s") == [
        f"127.0.0.1:{sibling},other.queen:6633,other.queen:6634,third:9000,"
        "[2001:db8::1]:6633,[2001:db8::1]:6634"
        for sibling in (6634, 6633)
    ]
    assert values("QUEEN_MESH_BIND_ADDR", QUEEN_MESH_PEERS="other") == ["0.0.0.0"] * 2
    # An operator's open mesh stays open: a secret of our making would shut the others out.
    assert values("QUEEN_SYNC_SECRET", QUEEN_MESH_PEERS="other") == [None, None]


@pytest.mark.parametrize(
    ("bound", "reached"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.0.0.7", "10.0.0.7")],
)
def test_siblings_are_dialled_where_the_mesh_listens(bound: str, reached: str) -> None:
    [peers, _] = values("QUEEN_MESH_PEERS", QUEEN_MESH_PEERS="other", QUEEN_MESH_BIND_ADDR=bound)
    assert peers == f"{reached}:6634,other:6633,other:6634"


def test_aliases_count_and_do_not_come_back() -> None:
    for environment in environments(QUEEN_UDP_PEERS="other:1", QUEEN_UDP_NOTIFY_PORT="7000"):
        assert not {"QUEEN_UDP_PEERS", "QUEEN_UDP_NOTIFY_PORT"} & set(environment)
        assert environment["QUEEN_MESH_PEERS"].endswith(",other:1")
    [environment, _] = environments(PG_HOST="db", PG_DB="queen")
    assert environment["PG_DATABASE"] == "queen"


def test_what_else_is_set_is_handed_on_but_for_an_embedded_server() -> None:
    [environment, _] = environments(PG_HOST="db", PG_PASSWORD="p", LOG_LEVEL="debug", HOME="/root")
    assert environment["PG_PASSWORD"] == "p"
    assert environment["LOG_LEVEL"] == "debug"
    assert environment["HOME"] == "/root"
    [environment, _] = environments(PG_PASSWORD="p", QUEEN_DATA_DIR="/data", LOG_LEVEL="debug")
    assert not {"PG_PASSWORD", "PG_HOST", "QUEEN_DATA_DIR"} & set(environment)
    assert environment["LOG_LEVEL"] == "debug"


def test_no_doubt_arises_from_what_was_made() -> None:
    for environment in environments(PG_HOST="db"):
        assert load(environment).warnings == ()


def test_ports_that_do_not_exist_or_are_taken_twice() -> None:
    with pytest.raises(ConfigError) as refused:
        environments(QUEEN_MESH_PORT="65535")
    assert any('worker 1: QUEEN_MESH_PORT="65536"' in fault for fault in refused.value.faults)
    with pytest.raises(ConfigError, match=r'PORT="6634" is the mesh port of worker 1'):
        environments(PORT="6634")
    environments(PORT="6634", QUEEN_SYNC_ENABLED="false")
