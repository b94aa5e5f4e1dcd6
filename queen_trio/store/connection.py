"""One PostgreSQL connection on Trio: the only file that knows psycopg and Trio together.

psycopg's protocol is generators that yield "wait for this socket"; this file drives them with
Trio. Everything psycopg builds on `wait` (cursors, transactions, pipelines, COPY, LISTEN) works
unchanged. tests/store/test_connection_contract.py holds what we rely on: psycopg moves these hooks
in minor releases.

**Cancellation is a late shield.** A statement that was sent will usually commit whatever the client
does, and forgetting the answer would turn a committed push into an unknown one. So when the task is
cancelled while the server works, the statement is finished under a shield bounded by GRACE, its
result is returned, and the *next* checkpoint raises Cancelled. A server that stays mute past GRACE
costs the connection.

**One statement may follow another.** With `on_sent`, `fetch` tells that its statement is on its
way; until it is answered `send_behind_nowait` sends one more, which the server takes up at once, in
a transaction of its own, instead of a round trip later. The answers come in that order.
"""

from __future__ import annotations

import itertools
import select
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
import trio
from attrs import field, frozen
from psycopg import generators, pq
from psycopg.adapt import Transformer
from psycopg.conninfo import make_conninfo
from psycopg.errors import OperationalError, QueryCanceled, _WaitTimeout, error_from_result
from psycopg.waiting import Ready, Wait

from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.grace import Grace
from queen_trio.store.settings import ConnectionSettings
from queen_trio.store.sqlstate import (
    LOST_PREPARED_STATEMENT,
    READ_ONLY_TRANSACTION,
    is_transient,
    sqlstate_of_refusal,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from psycopg import AsyncTransaction, abc
    from psycopg.abc import PQGen, PQGenConn
    from psycopg.pq.abc import PGconn, PGresult

    from queen_trio.model.admission import Lane

__all__ = [
    "ConnectionSettings",
    "Statement",
    "StatementLost",
    "TrioConnection",
    "connect",
]

T = TypeVar("T")

# A cancel request is one more connection to the server, its effect one interrupt check: measured
# at 10 ms. Past this the server is overloaded or gone, and the connection is given up.
CANCEL_SECONDS: Final = 2.0

ACTIVE: Final = pq.TransactionStatus.ACTIVE
IDLE: Final = pq.TransactionStatus.IDLE
BINARY: Final = pq.Format.BINARY
_DONE: Final = frozenset({pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK})


class StatementLost(DatabaseUnavailable):
    """The session forgot a prepared statement or its plan: nothing ran, retry on a new connection.

    A pooler between us and the server, DISCARD ALL, or a migration that changed a result type.
    """


@frozen(cache_hash=True)
class Statement:
    """A hot statement, prepared once per connection; make it a module-level constant.

    Parameters are `$1`, `$2` …; the server infers their types, so cast where that is ambiguous.
    Prefer `bigint` to `integer`: psycopg cuts an oversized value for an `integer` without a word.
    Pass JSON as `text` and cast it: psycopg would encode a `json` parameter once more.
    """

    name: str
    sql: str = field(repr=False)
    lane: Lane | None = field(default=None, eq=False, repr=False)
    """Where it competes with other writes; None for what only reads."""


@frozen
class _Prepared:
    """What one connection knows about one statement: its name there and its types."""

    title: str
    name: bytes
    transformer: abc.Transformer
    parameters: int
    columns: int


class _StatementLock:
    """One statement at a time; taking it while it is free is no checkpoint.

    So the ROLLBACK of a cancelled transaction is still sent, and the connection survives. It also
    saves a trip through the scheduler per statement.
    """

    def __init__(self) -> None:
        self._lock = trio.Lock()

    async def __aenter__(self) -> None:
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()

    async def __aexit__(self, *exception: object) -> None:
        self._lock.release()


class TrioConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A psycopg connection whose waiting is Trio's; open it with `connect`, close it always.

    One statement at a time. It is in autocommit mode; `async with conn.transaction()` groups.
    """

    settings: ConnectionSettings
    grace: Grace

    def __init__(self, pgconn: PGconn, *args: Any, **kwargs: Any) -> None:
        super().__init__(pgconn, *args, **kwargs)
        self.lock = _StatementLock()  # type: ignore[assignment]
        self._poll = select.poll()
        self._poll.register(pgconn.socket, select.POLLIN)
        self._statements: dict[Statement, _Prepared] = {}
        # A name is never used twice, even if its first preparation was cut short.
        self._numbers = itertools.count()
        self._doomed = False
        # Set when the statement that one more may follow is answered; None: no such is on its way.
        self._turn: trio.Event | None = None
        self._unanswered = 0  # statements sent in pipeline mode
        self._behind: _Prepared | None = None  # the second of them

    async def _set_up_session(self, settings: ConnectionSettings, grace: Grace) -> None:
        self.settings = settings
        self.grace = Grace(0)  # nothing to acknowledge yet: a cancelled attempt ends at once
        self._autocommit = True
        # Cursors never prepare: psycopg answers some statements with DEALLOCATE ALL, which would
        # take the prepared statements of `fetch` away too.
        self.prepare_threshold = None
        try:
            await super().execute(settings.session_sql())
        except BaseException:
            self.close_nowait()
            raise
        self.grace = grace

    # -- statements ------------------------------------------------------------------------

    async def fetch(
        self,
        statement: Statement,
        *params: Any,
        deadline_seconds: float | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> list[tuple[Any, ...]]:
        """Run a prepared statement, parameters and results in binary; return all its rows.

        Raises `DatabaseUnavailable` for what may succeed later (a lost connection and a passed
        deadline included: the outcome is then unknown), `StatementLost` when it certainly didn't
        run, `DatabaseError` for the rest. A task already cancelled sends nothing; one cancelled
        later gets the rows (see "late shield" above). `deadline_seconds` shortens the deadline of
        the settings; a longer one is cut by the server's own limit. `on_sent` is called when one
        more statement may follow this one.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            async with self.lock:
                if on_sent is None:
                    return await self._finish(self._fetch_gen(statement, params), deadline_seconds)
                self._turn = turn = trio.Event()
                try:
                    return await self._finish(
                        self._fetch_first_gen(statement, params, on_sent), deadline_seconds
                    )
                finally:
                    self._turn = None
                    turn.set()
        except psycopg.Error as error:
            raise self.translate(error, statement.name) from error

    def takes_one_more(self, statement: Statement) -> bool:
        """Say whether it may be sent behind: one statement is on its way, and none behind it."""
        return (
            self._unanswered == 1
            and self._turn is not None
            and statement in self._statements
            and self.pgconn.status == pq.ConnStatus.OK
        )

    def send_behind_nowait(self, statement: Statement, *params: Any) -> None:
        """Send a statement behind the one that is on its way, where `takes_one_more` says so.

        The server runs it next, also if the first fails. Somebody has to wait for its turn and then
        fetch its answer; otherwise the connection can't be used again.
        """
        try:
            self._send(self._statements[statement], params, pipelined=True)
            self.pgconn.flush()  # what doesn't fit now is sent before the answer is read
        except psycopg.Error as error:
            raise self.translate(error, statement.name) from error
        self._behind = self._statements[statement]

    @property
    def first_is_answered(self) -> bool:
        """Whether it is the turn of what was sent behind; also when the first has failed."""
        return self._turn is None

    async def wait_turn(self) -> None:
        """Wait until `first_is_answered`."""
        if self._turn is not None:
            await self._turn.wait()

    async def fetch_behind(self, *, deadline_seconds: float | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of what was sent behind, when its turn has come.

        Errors, cancellation and deadline are those of `fetch`. A failure of the first statement
        concerns this one only if the connection was lost.
        """
        prepared, self._behind = self._behind, None
        assert prepared is not None  # noqa: S101 - it was sent
        try:
            async with self.lock:
                return await self._finish(self._answer_gen(prepared), deadline_seconds)
        except psycopg.Error as error:
            raise self.translate(error, prepared.title) from error

    async def execute(self, *args: Any, **kwargs: Any) -> psycopg.AsyncCursor[tuple[Any, ...]]:
        """Run a statement through a cursor, for cold paths: text format, never prepared.

        Errors and cancellation are those of `fetch`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            return await super().execute(*args, **kwargs)
        except psycopg.Error as error:
            raise self.translate(error, str(args[0])[:80] if args else "execute") from error

    @asynccontextmanager
    async def transaction(self, *args: Any, **kwargs: Any) -> AsyncIterator[AsyncTransaction]:
        """Group statements; the errors of BEGIN and COMMIT are those of `fetch` too."""
        try:
            async with super().transaction(*args, **kwargs) as transaction:
                yield transaction
        except psycopg.Error as error:
            raise self.translate(error, "transaction") from error

    def _fetch_gen(
        self, statement: Statement, params: Sequence[Any]
    ) -> PQGen[list[tuple[Any, ...]]]:
        prepared = yield from self._prepared_gen(statement)
        self._send(prepared, params)
        return _rows(prepared, (yield from self._result_gen()))

    def _fetch_first_gen(
        self, statement: Statement, params: Sequence[Any], on_sent: Callable[[], None]
    ) -> PQGen[list[tuple[Any, ...]]]:
        prepared = yield from self._prepared_gen(statement)
        self._send(prepared, params, pipelined=True)
        yield from generators.send(self.pgconn)
        on_sent()
        return (yield from self._answer_gen(prepared))

    def _answer_gen(self, prepared: _Prepared) -> PQGen[list[tuple[Any, ...]]]:
        """Read the answer of the oldest statement in the pipeline."""
        yield from generators.send(self.pgconn)
        results = yield from generators.fetch_many(self.pgconn)
        yield from generators.fetch_many(self.pgconn)  # the end of its transaction
        self._unanswered -= 1
        if not self._unanswered:
            self.pgconn.exit_pipeline_mode()
        return _rows(prepared, _checked(results))

    def _send(self, prepared: _Prepared, params: Sequence[Any], *, pipelined: bool = False) -> None:
        if len(params) != prepared.parameters:
            # The server would call it a protocol violation, which reads as a lost connection.
            raise TypeError(
                f"{prepared.title} takes {prepared.parameters} parameters, got {len(params)}"
            )
        transformer = prepared.transformer
        values = transformer.dump_sequence(params, ()) if params else None
        formats = transformer.formats if params else None
        if pipelined and not self._unanswered:
            self.pgconn.enter_pipeline_mode()
        self.pgconn.send_query_prepared(prepared.name, values, formats, BINARY)
        if pipelined:
            self.pgconn.pipeline_sync()
            self._unanswered += 1

    def _prepared_gen(self, statement: Statement) -> PQGen[_Prepared]:
        self._check_connection_ok()
        prepared = self._statements.get(statement)
        if prepared is None:
            prepared = yield from self._prepare_gen(statement)
            self._statements[statement] = prepared
        return prepared

    def _prepare_gen(self, statement: Statement) -> PQGen[_Prepared]:
        name = f"q{next(self._numbers)}_{statement.name}"[:63].encode()
        self.pgconn.send_prepare(name, statement.sql.encode())
        yield from self._result_gen()
        self.pgconn.send_describe_prepared(name)
        description = yield from self._result_gen()
        parameters = [description.param_type(i) for i in range(description.nparams)]
        columns = [description.ftype(i) for i in range(description.nfields)]
        transformer = Transformer(self)
        transformer.set_dumper_types(parameters, BINARY)
        transformer.set_loader_types(columns, BINARY)
        return _Prepared(statement.name, name, transformer, len(parameters), len(columns))

    def _result_gen(self) -> PQGen[PGresult]:
        return _checked((yield from generators.execute(self.pgconn)))

    def translate(self, error: psycopg.Error, what: str) -> DatabaseError:
        """Turn psycopg's error into ours, and doom the connection where the error says so."""
        message = f"{what}: {error}".rstrip()
        sqlstate = error.sqlstate
        if sqlstate == LOST_PREPARED_STATEMENT or _is_stale_plan(error):
            self._doomed = True
            return StatementLost(message, sqlstate=sqlstate)
        if sqlstate == READ_ONLY_TRANSACTION:
            self._doomed = True
        # Without a SQLSTATE it is transient only if the connection failed: a value that psycopg
        # couldn't convert fails the same way for ever.
        if sqlstate is None and not isinstance(error, OperationalError):
            return DatabaseError(message)
        kind = DatabaseUnavailable if is_transient(sqlstate) else DatabaseError
        return kind(message, sqlstate=sqlstate)

    # -- psycopg's hooks -------------------------------------------------------------------

    async def wait(
        self,
        gen: PQGen[T],
        interval: float = 0.0,
        timeout: float | None = None,  # noqa: ASYNC109 - psycopg's signature
    ) -> T:
        """Drive one of psycopg's generators; every statement, and each step of a COPY, comes here.

        With `timeout` (seconds; only `notifies` passes it) raises psycopg's wait time-out;
        without, the statement deadline holds.
        """
        if timeout is None:
            return await self._finish(gen)
        with trio.move_on_after(timeout):
            return await self._drive(gen)
        if self._poll.poll(0):  # data that came in the last moment; a time-out of 0 polls once
            try:
                gen.send(Ready.R)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
        raise _WaitTimeout("wait timeout expired")

    async def _finish(self, gen: PQGen[T], deadline_seconds: float | None = None) -> T:
        """Drive `gen` to its end, through a cancellation and up to the statement deadline."""
        seconds = self.settings.statement_seconds
        if deadline_seconds is not None:
            seconds = min(seconds, deadline_seconds)
        cancelled: trio.Cancelled | None = None
        with trio.CancelScope(deadline=trio.current_time() + seconds) as statement:
            try:
                return await self._drive(gen)
            except trio.Cancelled as error:  # noqa: ASYNC103
                if self.pgconn.transaction_status != ACTIVE:
                    raise
                # Swallowed on purpose: the late shield, see the module's docstring.
                cancelled = error
        if cancelled is None:  # waiting for notifications is no statement and has no deadline
            return await self._drive(gen, Ready.NONE)
        if statement.cancel_called:
            return await self._cancel_on_server(gen, seconds)
        # The statement's own deadline goes on: who cancelled doesn't wait longer for it.
        left = max(statement.deadline - trio.current_time(), 0.0)
        with self.grace.shield(min(left, self.grace.seconds)):
            return await self._drive(gen, Ready.NONE)
        if trio.current_time() >= statement.deadline:
            return await self._cancel_on_server(gen, seconds)
        self.close_nowait()  # mute past GRACE: the outcome is unknown, which Cancelled conveys
        raise cancelled

    async def _cancel_on_server(self, gen: PQGen[T], seconds: float) -> T:
        """Stop an overdue statement; its result counts if it finished before the cancel came."""
        with self.grace.shield(CANCEL_SECONDS):
            try:
                with suppress(OperationalError):  # whether it got through, the answer tells
                    await self.cancel_safe(timeout=CANCEL_SECONDS)
                return await self._drive(gen, Ready.NONE)
            except QueryCanceled:
                raise QueryCanceled(
                    f"cancelled on the server after the deadline of {seconds:g} s"
                ) from None
        self.close_nowait()
        raise OperationalError(
            f"no answer within {seconds:g} s, nor to a cancel: connection closed"
        )

    async def _drive(self, gen: PQGen[T], ready: int | None = None) -> T:
        """Resume `gen` each time its socket is ready.

        A generator that was left at a wait is taken up again with `Ready.NONE`: it waits again.
        """
        fileno = self.pgconn.socket
        try:
            while True:
                wait = gen.send(ready)  # type: ignore[arg-type]  # None starts it
                ready = await _wait_ready(fileno, wait)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        except (OSError, trio.ClosedResourceError) as error:
            raise OperationalError("the connection was closed") from error

    async def cancel_safe(self, *, timeout: float = CANCEL_SECONDS) -> None:  # noqa: ASYNC109
        """Ask the server to cancel the running statement; gives up silently after `timeout` s."""
        if not self._should_cancel():
            await trio.lowlevel.checkpoint()
            return
        with trio.move_on_after(timeout):
            if psycopg.capabilities.has_cancel_safe():
                await _drive_connect(self._cancel_gen())
            else:
                await trio.to_thread.run_sync(self.cancel, abandon_on_cancel=True)

    # -- state -----------------------------------------------------------------------------

    @property
    def reusable(self) -> bool:
        """True when nothing is open or running on it and no error spoke against using it again."""
        return (
            not self._doomed
            and self.pgconn.pipeline_status == pq.PipelineStatus.OFF
            and self.pgconn.transaction_status == IDLE
        )

    def is_quiet_nowait(self) -> bool:
        """Say whether an idle connection has nothing to read; it has when its backend was killed.

        A reload of the server's configuration may also speak up here: a new connection is cheap.
        """
        return self.pgconn.status == pq.ConnStatus.OK and not self._poll.poll(0)

    def close_nowait(self) -> None:
        """Close at once, without a word to the server; whoever waits on it gets an error."""
        if not self.closed:
            trio.lowlevel.notify_closing(self.pgconn.socket)
        self._statements.clear()  # they refer back to the connection
        self._closed = True
        self.pgconn.finish()

    async def __aexit__(self, *exception: object) -> None:
        """Close the connection: in autocommit mode there is nothing to commit."""
        self.close_nowait()

    async def close(self) -> None:
        """Close the connection, even when cancelled; idempotent."""
        self.close_nowait()
        await trio.lowlevel.checkpoint()


def _checked(results: list[PGresult]) -> PGresult:
    result = results[-1]
    if result.status not in _DONE:
        raise error_from_result(result, encoding="utf-8")
    return result


def _rows(prepared: _Prepared, result: PGresult) -> list[tuple[Any, ...]]:
    if not prepared.columns:
        return []
    transformer = prepared.transformer
    transformer.set_pgresult(result, set_loaders=False)
    try:
        return transformer.load_rows(0, result.ntuples, tuple)
    finally:
        transformer.set_pgresult(None, set_loaders=False)  # rows hold copies: free libpq's


async def connect(settings: ConnectionSettings, *, grace: Grace | None = None) -> TrioConnection:
    """Open a connection and set its session up; `settings.connect_timeout_seconds` bounds it all.

    Raises `DatabaseUnavailable`, with SQLSTATE 53300 when the server says that it is full. Nothing
    stays open when cancelled. `grace` is the pool's; without it the connection has its own.
    """
    where = f"connect to {settings.host}:{settings.port}/{settings.database}"
    try:
        with trio.fail_after(settings.connect_timeout_seconds):
            connection = await _connect_to_any(settings)
            await connection._set_up_session(settings, grace or Grace(settings.grace_seconds))
    except trio.TooSlowError:
        raise DatabaseUnavailable(
            f"{where}: no answer within {settings.connect_timeout_seconds:g} s"
        ) from None
    except (psycopg.Error, OSError) as error:
        raise DatabaseUnavailable(
            f"{where}: {error}", sqlstate=sqlstate_of_refusal(str(error))
        ) from error
    return connection


async def _connect_to_any(settings: ConnectionSettings) -> TrioConnection:
    """Try each address of the host in turn; raise the last one's error."""
    parameters = settings.conninfo()
    addresses: list[str | None] = [None]
    if not settings.is_unix_socket:
        # libpq would resolve the name on this thread, and stop the world while DNS is slow.
        found = await trio.socket.getaddrinfo(
            settings.host, settings.port, type=trio.socket.SOCK_STREAM
        )
        addresses = [str(entry[4][0]) for entry in found]
    last_error = OperationalError("the host has no address")
    for address in addresses:
        gen = TrioConnection._connect_gen(make_conninfo("", hostaddr=address, **parameters))
        try:
            # A share each: an address that swallows packets must not use up the others' time.
            with trio.move_on_after(settings.connect_timeout_seconds / len(addresses)):
                return await _drive_connect(gen)
            last_error = OperationalError(f"no answer from {address or settings.host}")
        except OperationalError as error:
            last_error = error
        finally:
            gen.close()
    raise last_error


async def _drive_connect(gen: PQGenConn[T]) -> T:
    """Resume a generator that names its socket at each step: libpq changes it while connecting."""
    ready = None
    try:
        while True:
            fileno, wait = gen.send(ready)  # type: ignore[arg-type]
            ready = await _wait_ready(fileno, wait)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


async def _wait_ready(fileno: int, wait: Wait) -> int:
    """Wait until the socket can do what `wait` asks for; for both, until it can do either."""
    if wait == Wait.R:
        await trio.lowlevel.wait_readable(fileno)
        return Ready.R
    if wait == Wait.W:
        await trio.lowlevel.wait_writable(fileno)
        return Ready.W
    ready: int = Ready.NONE

    async def wait_side(side: Ready) -> None:
        nonlocal ready
        waiter = trio.lowlevel.wait_readable if side is Ready.R else trio.lowlevel.wait_writable
        await waiter(fileno)
        ready |= side
        nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_side, Ready.R)
            nursery.start_soon(wait_side, Ready.W)
    except BaseExceptionGroup as group:
        # To the caller this is one wait: both sides were cancelled, or lost the socket, at once.
        raise group.exceptions[0] from None
    return ready


def _is_stale_plan(error: psycopg.Error) -> bool:
    # "cached plan must not change result type" shares its SQLSTATE with everything unsupported;
    # unlike its text, the name of the C function that raised it isn't translated.
    return error.diag.source_function == "RevalidateCachedQuery"
