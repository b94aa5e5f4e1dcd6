"""Session advisory locks: one replica at a time does a background job (seeds, "Leader-gated")."""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Final

import structlog

from queen_trio.model.admission import Lane

from .connection import Statement
from .pool import ACQUIRE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .connection import TrioConnection
    from .pool import Pool

log = structlog.get_logger(__name__)

_TRY_LOCK: Final = Statement("try_lock", "SELECT pg_try_advisory_lock($1::bigint)")
_UNLOCK: Final = Statement("unlock", "SELECT pg_advisory_unlock($1::bigint)")


class AdvisoryLock(Enum):
    """The locks of queen-trio in one database; the values are arbitrary, but fixed for ever."""

    SCHEMA = 0x717565656E  # "queen" in ASCII, and those after it
    RETENTION = 0x717565656F
    STATS = 0x7175656570
    PREFLIGHT = 0x7175656571


@asynccontextmanager
async def try_advisory_lock(pool: Pool, lock: AdvisoryLock) -> AsyncIterator[TrioConnection | None]:
    """Yield a connection that holds `lock` while the block runs, or None: another session has it.

    The lock is given back on every way out, cancellation included; where the connection is lost the
    end of its session does it. A lock that turns out not to be held any more is a warning (a pooler
    recycled the session): what it guards must be correct with two holders.

    The block is a job's cycle, one short transaction after another, and counts as one of the
    maintenance lane: who holds a connection can't wait for a slot.
    """
    admission = pool.admission
    slot = nullcontext() if admission is None else admission.slot(Lane.MAINT, ACQUIRE_SECONDS)
    async with slot, pool.acquire() as conn:
        if not await try_lock(conn, lock):
            yield None
            return
        try:
            yield conn
        finally:
            await unlock(conn, lock)  # noqa: ASYNC102 - it shields itself, bounded by the grace


async def try_lock(conn: TrioConnection, lock: AdvisoryLock) -> bool:
    """Take `lock` for this session unless another one has it; whoever gets True must `unlock`."""
    [(held,)] = await _fetch_or_close(conn, _TRY_LOCK, lock)
    return bool(held)


async def unlock(conn: TrioConnection, lock: AdvisoryLock) -> None:
    """Give `lock` back, also when cancelled; a connection that can't say so is closed for it."""
    if not conn.reusable:
        conn.close_nowait()
        return
    with conn.grace.shield():
        [(was_held,)] = await _fetch_or_close(conn, _UNLOCK, lock)
        if not was_held:
            log.warning("pg_advisory_unlock reported not-held", lock=lock.name.lower())


async def _fetch_or_close(
    conn: TrioConnection, statement: Statement, lock: AdvisoryLock
) -> list[tuple[bool]]:
    """Run `statement`; when its outcome is unknown, end the session: locks outlive an error."""
    try:
        return await conn.fetch(statement, lock.value)
    except BaseException:
        conn.close_nowait()
        raise
