"""A pool of connections, opened as they are needed and never under a request's deadline.

Theory of operation. A connection is idle, in use, or being opened; together they never pass the
limit. A request takes the idle connection used last, so that surplus ones grow old and are closed.
Without one it queues, first come first served, and the pool opens connections in its own nursery:
an attempt that outlives the request that caused it still fills the pool. Failed attempts are spaced
by a jittered, growing delay and made one at a time, whoever waits. When the server says that it is
full, the limit drops to what it admitted and grows back one by one.

A connection is handed on only if it is idle, quiet and without a bad record; otherwise it is
closed, which is synchronous, and replaced when somebody asks. So a killed backend or a restarted
server heals without anyone's help.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import psycopg
import structlog
import trio
from attrs import field, frozen, mutable

from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.grace import Grace
from queen_trio.model.admission import Lane
from queen_trio.store.connection import Statement, StatementLost, TrioConnection, connect
from queen_trio.store.sqlstate import TOO_MANY_CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from queen_trio.store.settings import ConnectionSettings

log = structlog.get_logger()

# How long a request waits for a connection: below the 30 s after which clients give up (spec 8.15).
ACQUIRE_SECONDS: Final = 15.0

# What a client waits for must end before the client gives up, also on a server that has hung; with
# the cancel that follows it stays within those 15 s (spec 8.15).
SERVING_SECONDS: Final = 12.0

# The first attempt after a failure comes quickly, since most outages are a restart of a second; a
# server that stays away is asked every five seconds.
BACKOFF_FIRST_SECONDS: Final = 0.25
BACKOFF_MAX_SECONDS: Final = 5.0

# A start-up costs the server a fork and a catalog load: more at once only make each slower.
CONCURRENT_CONNECTS: Final = 4

IDLE_SECONDS: Final = 300.0  # surplus connections outlive a burst, not the afternoon
MAINTENANCE_SECONDS: Final = 5.0  # one idle check and, below the full size, one step of regrowth
# How long who sent a statement behind another waits for its turn: several times what a call takes
# on a disk that is not troubled.
BEHIND_SECONDS: Final = 0.02
CLOSE_SECONDS: Final = 5.0  # for the users of connections at close; they normally left before


def backoff_seconds(failures: int, jitter: float) -> float:
    """Return the delay before the attempt after `failures` in a row; `jitter` is in [0, 1)."""
    ceiling = min(BACKOFF_MAX_SECONDS, BACKOFF_FIRST_SECONDS * 2.0 ** min(failures - 1, 16))
    return ceiling * (1 + jitter) / 2


@frozen
class PoolStatistics:
    """What the pool holds now, and what it did since it was opened (`*_total`)."""

    size: int
    limit: int  # below `size` while the server doesn't admit more
    idle: int
    in_use: int
    connecting: int
    waiting: int
    opened_total: int
    closed_total: int
    connect_failures_total: int
    timeouts_total: int


class FirstLasts(Exception):
    """The statement in front isn't answered yet; what was sent behind it will be undone."""


Undo = Callable[["TrioConnection", list[tuple[Any, ...]]], Awaitable[None]]
"""Takes back what a statement did, given the connection that it ran on, and its rows."""


class Admission(Protocol):
    """What lets write transactions in: broker/arbiter.py."""

    def slot(
        self, lane: Lane, deadline_seconds: float, *, impatient: bool = ...
    ) -> AbstractAsyncContextManager[float]:
        """Enter it before taking a connection; yields what is left of the time."""

    def refuse_impatient(self, reason: str) -> None:
        """Let the impatient wait no longer: the database can't be reached."""


@mutable(eq=False)
class _Waiter:
    ready: trio.Event = field(factory=trio.Event)
    connection: TrioConnection | None = None
    closed: bool = False
    # Gives up when an attempt to connect fails.
    impatient: bool = False
    refused: bool = False


@frozen
class _Idle:
    connection: TrioConnection
    since: float


class Pool:
    """See `open_pool`."""

    def __init__(self, settings: ConnectionSettings, size: int, nursery: trio.Nursery) -> None:
        self.settings = settings
        self.size = size
        self.grace = Grace(settings.grace_seconds)
        self.admission: Admission | None = None  # set once by whoever limits writes
        self._nursery = nursery
        self._limit = size
        self._idle: list[_Idle] = []
        self._in_use: set[TrioConnection] = set()
        # Those of them that two statements use: who ends first takes it out, and leaves it in use.
        self._shared: set[TrioConnection] = set()
        self._connecting = 0
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()
        self._closed = False
        self._drained = trio.Event()
        self._failures = 0  # in a row
        self._retry_at = 0.0
        self._last_error: DatabaseError | None = None
        self._opened_total = 0
        self._closed_total = 0
        self._connect_failures_total = 0
        self._timeouts_total = 0

    # -- use -------------------------------------------------------------------------------

    def acquire(self, *, deadline_seconds: float = ACQUIRE_SECONDS) -> _Lease:
        """Return `async with pool.acquire() as conn`: a connection for the block's time.

        Raises `DatabaseUnavailable` when none is free within `deadline_seconds`. psycopg's errors
        leave the block as `DatabaseError`. Entering is a point of cancellation, and a task
        cancelled there holds nothing. What is left open or running on the connection at the end
        of the block costs the connection.
        """
        return _Lease(self, deadline_seconds)

    async def fetch(
        self,
        statement: Statement,
        *params: Any,
        deadline_seconds: float = ACQUIRE_SECONDS,
        statement_seconds: float | None = None,
        impatient: bool = False,
        on_sent: Callable[[Sent], None] | None = None,
    ) -> list[tuple[Any, ...]]:
        """Run a prepared statement on any connection: `TrioConnection.fetch` with its errors.

        `deadline_seconds` bounds the wait for the connection, `statement_seconds` the statement
        (default: SERVING_SECONDS, or for maintenance its usual deadline).
        Who is `impatient` doesn't wait for a database that can't be reached. A statement with a
        lane is admitted first, within the same time (spec 4). A lost prepared statement is retried
        once, on a fresh connection (spec 8.16). `on_sent` is told what one more statement can
        follow, each time it is sent.
        """
        if impatient and not self._open and trio.current_time() < self._retry_at:
            raise self._not_reachable()
        if statement.lane is None or self.admission is None:
            return await self._fetch(
                statement, params, deadline_seconds, statement_seconds, impatient, on_sent
            )
        slot = self.admission.slot(statement.lane, deadline_seconds, impatient=impatient)
        async with slot as left:
            return await self._fetch(statement, params, left, statement_seconds, impatient, on_sent)

    async def _fetch(
        self,
        statement: Statement,
        params: tuple[Any, ...],
        deadline_seconds: float,
        statement_seconds: float | None,
        impatient: bool,
        on_sent: Callable[[Sent], None] | None,
    ) -> list[tuple[Any, ...]]:
        try:
            return await self._fetch_once(
                statement, params, deadline_seconds, statement_seconds, impatient, on_sent
            )
        except StatementLost as error:
            # What made one session forget (a pooler, a migration) befell the idle ones too.
            log.warning("prepared statement lost", statement=statement.name, error=str(error))
            self._close_idle()
            return await self._fetch_once(
                statement, params, deadline_seconds, statement_seconds, impatient, on_sent
            )

    async def _fetch_once(
        self,
        statement: Statement,
        params: tuple[Any, ...],
        deadline_seconds: float,
        statement_seconds: float | None,
        impatient: bool,
        on_sent: Callable[[Sent], None] | None,
    ) -> list[tuple[Any, ...]]:
        if statement_seconds is None and statement.lane is not Lane.MAINT:
            statement_seconds = SERVING_SECONDS
        connection = await self._take(deadline_seconds, impatient=impatient)
        try:
            return await connection.fetch(
                statement,
                *params,
                deadline_seconds=statement_seconds,
                on_sent=None if on_sent is None else partial(on_sent, Sent(self, connection)),
            )
        finally:
            self._put(connection)

    @property
    def limit(self) -> int:
        """How many connections there can be: the size, or less while the server refuses more."""
        return self._limit

    @property
    def last_error(self) -> DatabaseError | None:
        """Why the last attempt to connect failed; None once one succeeded."""
        return self._last_error

    def statistics(self) -> PoolStatistics:
        """Return the numbers of this moment."""
        return PoolStatistics(
            size=self.size,
            limit=self._limit,
            idle=len(self._idle),
            in_use=len(self._in_use),
            connecting=self._connecting,
            waiting=len(self._waiters),
            opened_total=self._opened_total,
            closed_total=self._closed_total,
            connect_failures_total=self._connect_failures_total,
            timeouts_total=self._timeouts_total,
        )

    # -- taking and putting back -----------------------------------------------------------

    async def _take(self, deadline_seconds: float, *, impatient: bool = False) -> TrioConnection:
        # A statement started in a cancelled scope would still be sent: the check is here.
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._waiters and (connection := self._take_idle_nowait()):
            return connection
        if self._closed:
            raise DatabaseUnavailable("the connection pool is closed")
        waiter = _Waiter(impatient=impatient)
        self._waiters[waiter] = None
        self._grow()
        try:
            with trio.move_on_after(deadline_seconds):
                await waiter.ready.wait()
        except BaseException:  # cancelled, maybe in the very moment a connection was handed over
            if waiter.connection is not None:
                self._put(waiter.connection)
            raise
        finally:
            self._waiters.pop(waiter, None)
        if waiter.connection is not None:
            return waiter.connection
        if waiter.closed:
            raise DatabaseUnavailable("the connection pool is closed")
        if waiter.refused:
            raise self._not_reachable()
        self._timeouts_total += 1
        raise DatabaseUnavailable(self._describe_timeout(deadline_seconds))

    def _not_reachable(self) -> DatabaseUnavailable:
        return DatabaseUnavailable(f"PostgreSQL can't be reached: {self._last_error}")

    def _describe_timeout(self, deadline_seconds: float) -> str:
        cause = f"; last attempt: {self._last_error}" if self._last_error else ""
        return (
            f"no connection within {deadline_seconds:g} s (size {self.size}, limit {self._limit}, "
            f"in use {len(self._in_use)}, waiting {len(self._waiters)}{cause})"
        )

    def _take_idle_nowait(self) -> TrioConnection | None:
        while self._idle:
            connection = self._idle.pop().connection
            if connection.is_quiet_nowait():
                self._in_use.add(connection)
                return connection
            self._close(connection)
        return None

    def _put(self, connection: TrioConnection) -> None:
        """Take a connection back; never blocks, so it is safe in a `finally` under cancellation."""
        if connection in self._shared:
            self._shared.discard(connection)
            return
        self._in_use.discard(connection)
        if self._closed or not connection.reusable:
            self._close(connection)
            self._grow()
        else:
            self._hand_out(connection)
        if self._closed and not self._in_use:
            self._drained.set()

    async def _undo(self, connection: TrioConnection, undo: Undo, seconds: float) -> None:
        """Wait for the answer that nobody wants any more, and take back what it stands for."""
        try:
            with self.grace.shield():
                await connection.wait_turn()
                with suppress(DatabaseError):  # a claim that stays then ends as its lease does
                    await undo(connection, await connection.fetch_behind(deadline_seconds=seconds))
        finally:
            self._put(connection)

    def _hand_out(self, connection: TrioConnection) -> None:
        """Give a usable connection to the first in the queue, or keep it for the next request."""
        if self._waiters:
            waiter, _ = self._waiters.popitem(last=False)
            self._in_use.add(connection)
            waiter.connection = connection
            waiter.ready.set()
        else:
            self._idle.append(_Idle(connection, since=trio.current_time()))

    def _close(self, connection: TrioConnection) -> None:
        connection.close_nowait()
        self._closed_total += 1

    def _close_idle(self) -> None:
        while self._idle:
            self._close(self._idle.pop().connection)

    # -- growing and shrinking -------------------------------------------------------------

    @property
    def _open(self) -> int:
        return len(self._idle) + len(self._in_use)

    def _grow(self) -> None:
        """Start an attempt per waiting request, within the limits; never blocks."""
        if self._closed:
            return
        attempts = min(
            len(self._waiters) - self._connecting,
            (1 if self._failures else CONCURRENT_CONNECTS) - self._connecting,
            self._limit - self._open - self._connecting,
        )
        for _ in range(attempts):
            self._connecting += 1
            self._nursery.start_soon(self._connect_one)

    async def _connect_one(self) -> None:
        failures_before = self._failures
        try:
            await trio.sleep_until(self._retry_at)
            if self._waiters:  # else they were served, or gave up, in the meantime
                self._admitted(await connect(self.settings, grace=self.grace))
        except DatabaseError as error:
            self._refused(error, failures_before)
        finally:
            self._connecting -= 1
        self._grow()

    def _admitted(self, connection: TrioConnection) -> None:
        if self._last_error is not None:
            log.info("database reachable again", failures=self._failures)
        self._failures = 0
        self._retry_at = 0.0
        self._last_error = None
        self._opened_total += 1
        if self._closed:  # the attempt and the pool ended in the same moment
            self._close(connection)
        else:
            self._hand_out(connection)

    def _refused(self, error: DatabaseError, failures_before: int) -> None:
        self._connect_failures_total += 1
        if self._last_error is None:  # once per outage
            log.warning("database connection failed", error=str(error))
        self._last_error = error
        if error.sqlstate == TOO_MANY_CONNECTIONS and self._open:
            self._limit = min(self._limit, self._open)
            log.warning("server admits no more connections", limit=self._limit, size=self.size)
            return
        for waiter in [waiter for waiter in self._waiters if waiter.impatient]:
            del self._waiters[waiter]
            waiter.refused = True
            waiter.ready.set()
        if self.admission is not None and not self._open:
            self.admission.refuse_impatient(str(self._not_reachable()))
        if self._failures > failures_before:
            return  # several attempts were under way when the outage began: they count as one
        self._failures += 1
        jitter = random.random()  # noqa: S311 - spreads replicas, guards nothing
        self._retry_at = trio.current_time() + backoff_seconds(self._failures, jitter)

    async def _maintain(self) -> None:
        """Close what is surplus or dead, and try one connection past a lowered limit."""
        while True:
            await trio.sleep(MAINTENANCE_SECONDS)
            oldest = trio.current_time() - IDLE_SECONDS
            kept = []
            for idle in self._idle:
                if idle.since > oldest and idle.connection.is_quiet_nowait():
                    kept.append(idle)
                else:
                    self._close(idle.connection)
            self._idle = kept
            self._limit = min(self.size, self._limit + 1)
            self._grow()

    def _shut_nowait(self) -> None:
        self._closed = True
        while self._waiters:
            waiter, _ = self._waiters.popitem(last=False)
            waiter.closed = True
            waiter.ready.set()
        self._close_idle()
        if not self._in_use:
            self._drained.set()

    def _close_all(self) -> None:
        while self._in_use:
            self._close(self._in_use.pop())


class Sent:
    """A statement on its way to the server: until it is answered, one more can follow it.

    That costs neither a connection nor a slot of admission: the same backend runs both, one after
    the other, each in a transaction of its own. So what a push commits can be claimed without
    waiting for its answer here.
    """

    __slots__ = ("_connection", "_pool")

    def __init__(self, pool: Pool, connection: TrioConnection) -> None:
        self._pool = pool
        self._connection = connection

    async def fetch(
        self,
        statement: Statement,
        *params: Any,
        undo: Undo,
        statement_seconds: float = SERVING_SECONDS,
    ) -> list[tuple[Any, ...]]:
        """Run `statement` next, or as `Pool.fetch` does where it is too late for that.

        When the first one isn't answered within BEHIND_SECONDS this raises `FirstLasts`. What was
        sent will run all the same; then, and when cancelled before, the pool waits for its answer
        and lets `undo` take back what it did. A lost prepared statement is not retried.
        """
        pool, connection = self._pool, self._connection
        if not connection.takes_one_more(statement):
            return await pool.fetch(statement, *params, statement_seconds=statement_seconds)
        await trio.lowlevel.checkpoint_if_cancelled()
        connection.send_behind_nowait(statement, *params)
        pool._shared.add(connection)
        its_turn = False
        try:
            with trio.move_on_after(BEHIND_SECONDS) as patience:
                await connection.wait_turn()
            if patience.cancelled_caught:
                # After a stall of the loop its answer is there, and its task runs right now.
                await trio.lowlevel.checkpoint()
            its_turn = connection.first_is_answered
        finally:
            if not its_turn:
                pool._nursery.start_soon(pool._undo, connection, undo, statement_seconds)
        if not its_turn:
            raise FirstLasts
        try:
            return await connection.fetch_behind(deadline_seconds=statement_seconds)
        finally:
            pool._put(connection)


class _Lease:
    """One use of one connection; a class because a generator costs twice as much on each call."""

    __slots__ = ("_connection", "_deadline_seconds", "_pool")

    def __init__(self, pool: Pool, deadline_seconds: float) -> None:
        self._pool = pool
        self._deadline_seconds = deadline_seconds
        self._connection: TrioConnection | None = None

    async def __aenter__(self) -> TrioConnection:
        self._connection = await self._pool._take(self._deadline_seconds)
        return self._connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connection = self._connection
        assert connection is not None  # noqa: S101 - entered before
        try:
            if isinstance(error, psycopg.Error):
                raise connection.translate(error, "statement") from error
        finally:
            self._pool._put(connection)


@asynccontextmanager
async def open_pool(settings: ConnectionSettings, size: int) -> AsyncIterator[Pool]:
    """Run a pool of at most `size` connections for the block's time; opens none by itself.

    At the end requests still waiting fail, connections in use get `CLOSE_SECONDS` (less when the
    grace is limited further) and are then closed under their users.
    """
    async with trio.open_nursery() as nursery:
        pool = Pool(settings, size, nursery)
        nursery.start_soon(pool._maintain)
        try:
            yield pool
        finally:
            pool._shut_nowait()
            with trio.CancelScope(shield=True, deadline=pool.grace.deadline(CLOSE_SECONDS)):
                await pool._drained.wait()
            pool._close_all()
            nursery.cancel_scope.cancel()
