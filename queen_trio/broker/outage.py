"""Waiting for a database that is away: what a request does that has nothing else to offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import trio

from queen_trio.errors import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

# Less than the official client's 30 s, long enough for a restart of PostgreSQL (spec 8.15).
OUTAGE_SECONDS: Final = 15.0
# Between attempts that fail at once; the pool spaces its own connection attempts.
RETRY_SECONDS: Final = 0.1


async def ride_out(
    call: Callable[[], Awaitable[T]], *, patience_seconds: float = OUTAGE_SECONDS
) -> T:
    """Repeat `call` while the database is unavailable, for `patience_seconds` at most.

    Only for calls that may run twice. Raises the last `DatabaseUnavailable` when time is up, and
    every other error at once. Cancellation ends it at any point.
    """
    until = trio.current_time() + patience_seconds
    while True:
        started = trio.current_time()
        try:
            return await call()
        except DatabaseUnavailable:
            # An attempt that takes long (a server that has hung) must fit in once more.
            took = trio.current_time() - started
            if trio.current_time() + RETRY_SECONDS + took >= until:
                raise
        await trio.sleep(RETRY_SECONDS)
