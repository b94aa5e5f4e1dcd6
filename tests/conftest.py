"""Fixtures for all tests. PostgreSQL: one server for the session, one database per test."""

from __future__ import annotations

import itertools
import resource
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from queen_trio.store.migrate import apply_schema
from queen_trio.store.pool import Pool, open_pool
from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.cluster import Cluster, running_cluster
from tests.http.api import unique

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from queen_trio.store.settings import ConnectionSettings

# Tests park hundreds of polls; an ordinary user's soft limit is often 1024.
_, _most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (_most_files, _most_files))

TEMPLATE = "queen_template"

# Copying the template's files (10 ms, and 6 to drop) is cheaper than logging its pages (15 ms).
STRATEGY = "FILE_COPY"

_numbers = itertools.count(1)


async def prepare_template(settings: ConnectionSettings) -> None:
    """Apply the schema to the template database, once per session."""
    await apply_schema(settings)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The session's server. A test that stops or kills a server runs its own: `own_cluster`."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A server of the test's own (about 1.5 s), to stop, start and kill."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def template(cluster: Cluster) -> str:
    """The name of the database that holds the schema and nothing else."""
    cluster.execute(f"CREATE DATABASE {TEMPLATE}")
    trio.run(prepare_template, cluster.settings(TEMPLATE))
    cluster.execute(f"ALTER DATABASE {TEMPLATE} ALLOW_CONNECTIONS false")
    return TEMPLATE


def _fresh_database(cluster: Cluster, template: str) -> Iterator[str]:
    name = f"test_{next(_numbers)}"
    cluster.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY {STRATEGY}")
    yield name
    cluster.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database(cluster: Cluster, template: str) -> Iterator[str]:
    """The name of a fresh database with the schema."""
    yield from _fresh_database(cluster, template)


@pytest.fixture
def empty_database(cluster: Cluster) -> Iterator[str]:
    """The name of a fresh database without the schema."""
    yield from _fresh_database(cluster, "template0")


@pytest.fixture
def settings(cluster: Cluster, database: str) -> ConnectionSettings:
    """How to reach `database`."""
    return cluster.settings(database)


@pytest.fixture
async def pool(settings: ConnectionSettings) -> AsyncIterator[Pool]:
    """A pool of up to 10 connections to `database`."""
    async with open_pool(settings, 10) as pool:
        yield pool


@pytest.fixture
def broker(settings: ConnectionSettings) -> Iterator[LiveBroker]:
    """A broker process of the test's own (about 0.7 s), on a database of its own."""
    with running_broker(postgres_environment(settings)) as broker:
        yield broker


@pytest.fixture(scope="session")
def shared_broker(cluster: Cluster, template: str) -> Iterator[LiveBroker]:
    """One broker for the session, for tests that keep to queues with names of their own."""
    name = "shared"
    cluster.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY {STRATEGY}")
    with running_broker(postgres_environment(cluster.settings(name))) as broker:
        yield broker


@pytest.fixture
def queue() -> str:
    """The name of a queue that nobody else uses."""
    return unique()


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory with a short path that every account can pass through.

    (pytest's own are closed to the account that PostgreSQL runs under when we are root.)
    """
    path = Path(tempfile.mkdtemp(prefix="qt-", dir="/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)
