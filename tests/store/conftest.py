"""Fixtures of the store's tests: the functions of sql/ over a pool, or without a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.store.calls import Direct, Log, Pooled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from queen_trio.store.pool import Pool
    from queen_trio.store.settings import ConnectionSettings


@pytest.fixture
async def log(pool: Pool) -> Log:
    """The functions of sql/, each call on any connection and in a transaction of its own."""
    return Log(Pooled(pool))


@pytest.fixture
def direct(settings: ConnectionSettings) -> Iterator[Direct]:
    """One psycopg connection for tests that bring no loop."""
    direct = Direct(settings)
    yield direct
    direct.connection.close()
