"""What a broker asks of the server before it serves: sessions of its own, and room for its pool.

Advisory locks, prepared statements and SETs live in one session. A pooler that lends sessions out
for a transaction or a statement breaks all three, and silently, so it is looked for at boot
(spec 8.23). Session pooling passes: there a connection keeps its backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from queen_trio.errors import PoolingError

from .advisory import AdvisoryLock
from .connection import connect

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import LiteralString

    from .connection import TrioConnection
    from .settings import ConnectionSettings

# A busy pooler may by chance give one connection the same backend again; hardly so often.
ROUNDS: Final = 3

# Shared, so that neither replicas that boot together, nor what a pooler kept of it, disturb it.
_LOCK: Final = "SELECT pg_advisory_lock_shared(%s)::text"
_UNLOCK: Final = "SELECT pg_advisory_unlock_shared(%s)"
_BACKEND: Final = "SELECT pg_backend_pid()"
# What reserved_connections (PostgreSQL 16 and later) keeps is for roles that were granted it.
_CAPACITY: Final = """
    SELECT current_setting('max_connections')::bigint
         - current_setting('superuser_reserved_connections')::bigint
         - coalesce(current_setting('reserved_connections', true), '0')::bigint
"""


async def check_sessions(settings: ConnectionSettings) -> None:
    """Return if a connection is a session of its own; raises `PoolingError` where it isn't.

    Two connections: one takes a session lock, then the other runs a statement and a transaction.
    The first must keep its backend, and its lock, all the while. Raises `DatabaseUnavailable` when
    the server can't be reached; cancellation leaves no connection open.
    """
    lock = [AdvisoryLock.PREFLIGHT.value]
    async with await connect(settings) as locker, await connect(settings) as other:
        for _ in range(ROUNDS):
            await _ask(locker, _LOCK, lock)
            backend = await _ask(locker, _BACKEND)
            # Statement pooling has no transactions: without one first.
            if await _ask(other, _BACKEND) == backend:
                raise _refusal(f"two connections have the backend {backend}")
            async with other.transaction():
                if await _ask(other, _BACKEND) == backend:
                    raise _refusal(f"two connections have the backend {backend}")
                now = await _ask(locker, _BACKEND)
                if now != backend:
                    raise _refusal(f"one connection had the backend {backend}, then {now}")
            if not await _ask(locker, _UNLOCK, lock):
                raise _refusal("a connection lost its session lock")


async def read_capacity(settings: ConnectionSettings) -> int:
    """Return how many connections the server has for ordinary roles, all clients together.

    Raises what `connect` and `execute` raise.
    """
    async with await connect(settings) as conn:
        return int(await _ask(conn, _CAPACITY))


async def _ask(conn: TrioConnection, query: LiteralString, params: Sequence[int] = ()) -> Any:
    """The one value of the one row; not prepared, since a shared session would lose that too."""
    cursor = await conn.execute(query, params)
    row = await cursor.fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM always has a row
    return row[0]


def _refusal(evidence: str) -> PoolingError:
    return PoolingError(
        "a pooler in transaction or statement mode stands between this broker and PostgreSQL"
        f" ({evidence}): session locks and prepared statements get lost there."
        " Lead PG_HOST and PG_PORT to PostgreSQL itself, or set pool_mode = session"
    )
