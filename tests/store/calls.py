"""The functions of sql/ in the words of a test: push ids, pop messages, ack letters.

`Log` speaks to one `Store`. What runs the statements may be a pool, one connection that holds a
transaction open (races), or psycopg without a loop (`now`, for state machines and plans).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
from attrs import astuple, evolve, field, frozen

from queen_trio.model.message import hash_of
from queen_trio.store import retention, segments
from queen_trio.store.queries import NOTHING_VERIFIED, AckRow, Store

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from queen_trio.store.connection import Statement, TrioConnection
    from queen_trio.store.pool import Pool
    from queen_trio.store.queries import AckArguments, PopRow, PushRow
    from queen_trio.store.settings import ConnectionSettings

GROUP = "__QUEUE_MODE__"
MIB = 1024 * 1024


@frozen(kw_only=True)
class Part:
    """One segment of a bundle: messages with these transactionIds for one partition."""

    ids: Sequence[str]
    queue: str = "q"
    partition: str = "p"
    verified: int = NOTHING_VERIFIED
    verified_in: UUID | None = None
    verified_since: datetime | None = None
    payload: str = ""


@frozen(kw_only=True)
class Pop:
    """The arguments of `Store.pop`, in its order."""

    queue: str | None = "q"
    partition: str | None = None
    namespace: str = ""
    task: str = ""
    group: str = GROUP
    batch: int = 200
    partitions: int | None = 1
    lease_seconds: int | None = None
    auto_ack: bool = False
    lease_id: str = "lease"
    mode: str = "all"
    since: datetime | None = None
    waited_ms: int = 0
    max_bytes: int = 16 * MIB
    candidates: Sequence[str] | None = None


@frozen
class Delivered:
    """One message of a pop."""

    id: str
    offset: int
    partition_id: UUID = field(repr=False)
    partition: str
    queue: str
    attempt: int
    created_at: datetime = field(repr=False)


@frozen
class Target:
    """What one request says of one (partition, group): items are `(transactionId, letter)`.

    With `whole`, it says instead that all of the leased batch is completed, so many messages.
    """

    partition_id: UUID
    items: Sequence[tuple[str, str]] = ()
    group: str = GROUP
    lease: str = "lease"
    whole: int = 0


def record(transaction_id: str, payload: str = "") -> bytes:
    """A message object as it stands in a segment."""
    return json.dumps({"transactionId": transaction_id, "data": payload}).encode()


def delivered(rows: Iterable[PopRow]) -> list[Delivered]:
    """The messages of a claim, one by one."""
    messages = []
    for row in rows:
        if row.verdict is not None:
            continue
        for offset, text in enumerate(segments.split(segments.decode(row.blob)), row.base_offset):
            if row.committed < offset <= row.batch_end:
                messages.append(
                    Delivered(
                        json.loads(text)["transactionId"], offset, row.partition_id,
                        row.partition_name, row.queue_name, row.delivery_attempt, row.created_at,
                    )
                )  # fmt: skip
    return messages


def ids(messages: Iterable[Delivered]) -> list[str]:
    return [message.id for message in messages]


class OneConnection:
    """A `Pool.fetch` that always runs on the same connection, which may be in a transaction."""

    def __init__(self, connection: TrioConnection) -> None:
        self._connection = connection

    async def fetch(self, statement: Statement, *params: Any, **_: Any) -> list[tuple[Any, ...]]:
        return await self._connection.fetch(statement, *params)

    async def execute(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        return await rows_of(self._connection, sql, params)


class Direct:
    """A `Pool.fetch` over psycopg that never waits for a loop: drive it with `now`."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.connection = psycopg.connect(
            **settings.conninfo(),  # type: ignore[arg-type]
            autocommit=True,
            cursor_factory=psycopg.RawCursor,
        )

    async def fetch(self, statement: Statement, *params: Any, **_: Any) -> list[tuple[Any, ...]]:
        return self.connection.execute(statement.sql, params, prepare=True).fetchall()

    async def execute(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(sql, params)
        return cursor.fetchall() if cursor.description else []


class Pooled:
    """A pool that also runs the statements that a test makes up."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.fetch = pool.fetch

    async def execute(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        async with self._pool.acquire() as connection:
            return await rows_of(connection, sql, params)


async def rows_of(
    connection: TrioConnection, sql: str, params: Sequence[Any]
) -> list[tuple[Any, ...]]:
    cursor = psycopg.AsyncRawCursor(connection)
    await cursor.execute(sql, params)
    return await cursor.fetchall() if cursor.description else []


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine over `Direct`, which has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited for a loop")


class Log:
    """Push, pop and ack as short as a test wants to say it."""

    def __init__(self, runner: Pooled | OneConnection | Direct) -> None:
        self.store = Store(runner)  # type: ignore[arg-type]
        self.execute = runner.execute
        self.verified: int | None = None  # for all that is pushed, whatever it says itself

    async def push_bundle(self, *parts: Part) -> list[PushRow]:
        """Commit one segment for each part; the rows come back in the order of the parts."""
        encoded = [segments.encode([record(i, part.payload) for i in part.ids]) for part in parts]
        rows = await self.store.push(
            [part.queue for part in parts],
            [part.partition for part in parts],
            [len(part.ids) for part in parts],
            [size for _, size in encoded],
            [b"".join(map(hash_of, part.ids)) for part in parts],
            [blob for blob, _ in encoded],
            [part.verified if self.verified is None else self.verified for part in parts],
            [part.verified_in for part in parts],
            [part.verified_since for part in parts],
        )
        return sorted(rows)

    async def push(self, *ids: str, **part: Any) -> PushRow:
        """Push one segment to q/p, or where `part` says."""
        [row] = await self.push_bundle(Part(ids=ids, **part))
        return row

    async def pop_rows(self, **pop: Any) -> list[PopRow]:
        return await self.store.pop(*astuple(evolve(Pop(), **pop)))

    async def pop(self, **pop: Any) -> list[Delivered]:
        """Claim from q in queue mode, or what `pop` says."""
        return delivered(await self.pop_rows(**pop))

    async def ack_targets(self, *targets: Target, letters: Sequence[Any] = ()) -> list[AckRow]:
        return await self.store.ack(*ack_arguments(targets, letters))

    async def ack_whole(self, *targets: Target) -> list[AckRow]:
        """Ack targets of which some are whole batches."""
        *arrays, letters = ack_arguments(targets)
        rows = await self.execute(
            "SELECT ord, verdicts, lease_released, needs_payload, queue_name, partition_name,"
            " has_more FROM queen.ack_v1($1, $2, $3, $6, $4, $5, $7::text::jsonb) ORDER BY ord",
            *arrays, [target.whole for target in targets], letters,
        )  # fmt: skip
        return [AckRow(*row) for row in rows]

    async def ack(self, partition_id: UUID, words: str, **target: Any) -> AckRow:
        """Ack as `words` says: "a:c b:f" completes a and fails b; reads dead letters as needed."""
        items = [(name, letter) for name, _, letter in (w.rpartition(":") for w in words.split())]
        one = Target(partition_id, items, **target)
        [row] = await self.ack_targets(one)
        while row.needs_payload is not None:
            letters = [
                letter_of(item, row.needs_payload, name) for item, (name, _) in enumerate(items)
            ]
            [row] = await self.ack_targets(one, letters=letters)
        return row

    async def cursor(self, partition_id: UUID, group: str = GROUP) -> dict[str, Any] | None:
        """The cursor's row as a dictionary."""
        rows = await self.execute(
            "SELECT to_jsonb(c) FROM queen.log_consumers c"
            " WHERE partition_id = $1 AND consumer_group = $2",
            partition_id, group,
        )  # fmt: skip
        return rows[0][0] if rows else None

    async def committed(self, partition_id: UUID, group: str = GROUP) -> int:
        cursor = await self.cursor(partition_id, group)
        assert cursor is not None
        return int(cursor["committed"])

    async def expire(self, lease_id: str = "lease") -> None:
        """Let a lease end now."""
        await self.execute(
            "UPDATE queen.log_consumers SET lease_expires_at = clock_timestamp()"
            " - interval '1 second' WHERE worker_id = $1",
            lease_id,
        )

    async def age(self, seconds: float, *, queue: str = "q") -> None:
        """Make everything in a queue, its messages and its writes, older by `seconds`."""
        where = (
            "partition_id IN (SELECT p.id FROM queen.log_partitions p"
            " JOIN queen.queues u ON u.id = p.queue_id WHERE u.name = $2)"
        )
        earlier = "created_at - make_interval(secs => $1)"
        await self.execute(
            f"UPDATE queen.log_segments SET created_at = {earlier} WHERE {where}", seconds, queue
        )
        await self.execute(
            f"UPDATE queen.log_txns SET created_at = {earlier} WHERE {where}", seconds, queue
        )
        await self.execute(
            "UPDATE queen.log_partitions SET"
            " created_at = created_at - make_interval(secs => $1),"
            " last_created_at = last_created_at - make_interval(secs => $1),"
            " last_write_at = last_write_at - make_interval(secs => $1),"
            " oldest_live_at = oldest_live_at - make_interval(secs => $1),"
            " oldest_txn_at = oldest_txn_at - make_interval(secs => $1)"
            " WHERE queue_id IN (SELECT id FROM queen.queues WHERE name = $2)",
            seconds, queue,
        )  # fmt: skip

    async def retain_from(self, partition_id: UUID, offset: int) -> None:
        """Delete the segments below `offset`, a segment's base, however young they are."""
        await self.execute(
            "DELETE FROM queen.log_segments WHERE partition_id = $1 AND end_offset < $2",
            partition_id, offset,
        )  # fmt: skip
        await self.execute(
            "UPDATE queen.log_partitions SET log_start = $2 WHERE id = $1", partition_id, offset
        )

    async def trim(self, partition_id: UUID, most: int = 1_000) -> tuple[int, int]:
        """One step of retention; returns how many segments and messages it deleted."""
        return await retention.trim(self.store.pool, partition_id, most)  # type: ignore[arg-type]

    async def purge(self, partition_id: UUID, most: int = 1_000) -> int:
        """One step of the sidecar's purge; returns how many rows it deleted."""
        return await retention.purge(self.store.pool, partition_id, most)  # type: ignore[arg-type]

    async def drop_idle(self, days: int = 30) -> UUID | None:
        return await retention.drop_idle_partition(self.store.pool, days)  # type: ignore[arg-type]

    async def configure(self, queue: str = "q", **options: Any) -> dict[str, Any]:
        row = await self.store.configure(queue, None, None, json.dumps(options), False)
        return dict(json.loads(row))


def ack_arguments(targets: Sequence[Target], letters: Sequence[Any] = ()) -> AckArguments:
    """Targets as the arrays that an ack or a transaction takes."""
    return (
        [target.partition_id for target in targets],
        [target.group for target in targets],
        [target.lease for target in targets],
        [b"".join(hash_of(name) for name, _ in target.items) for target in targets],
        ["".join(letter for _, letter in target.items) for target in targets],
        json.dumps(letters),
    )


def letter_of(item: int, offset: int, name: str, *, target: int = 1) -> dict[str, Any]:
    """What a caller read from the segment for a dead letter."""
    return {
        "target": target, "item": item, "offset": offset, "transactionId": name,
        "messageId": f"id-{name}", "payload": json.dumps(name), "error": f"error-{name}",
    }  # fmt: skip
