"""The statements of the hot and cold paths, and the rows they give back.

Each statement calls one function of sql/functions; what a function means is written there. Rows are
named tuples in the function's column order: nothing is copied between the driver and the use-case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

import trio

from queen_trio.errors import DatabaseError
from queen_trio.model.admission import Lane

from .connection import Statement
from .pool import SERVING_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from .connection import TrioConnection
    from .elapsed import Elapsed
    from .pool import Pool, Sent

DEFAULT_TENANT: Final = UUID("00000000-0000-0000-0000-000000000001")
# "None of these ids occurs in any partition": ids that this broker has just generated.
VERIFIED_EVERYWHERE: Final = 2**63 - 1
NOTHING_VERIFIED: Final = -1

_PUSH = Statement(
    "push",
    "SELECT ord, partition_id, base_offset, created_at, duplicate_at, duplicate_of"
    " FROM queen.push_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
    lane=Lane.PUSH,
)
_SEGMENTS_AT = Statement(
    "segments_at",
    "SELECT message_offset, base_offset, created_at, blob FROM queen.segments_at_v1($1, $2)",
)
_HISTORY = Statement(
    "history",
    "SELECT base_offset, end_offset, created_at, hashes, covered_since"
    " FROM queen.history_v1($1, $2, $3)",
)
_POP = Statement(
    "pop",
    "SELECT partition_id, partition_name, queue_name, committed, batch_end, delivery_attempt,"
    " base_offset, created_at, blob, verdict, until_ms"
    " FROM queen.pop_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)",
    lane=Lane.POP,
)
_CANDIDATES = Statement(
    "candidates",
    "SELECT partition_name FROM queen.candidates_v1($1, $2, $3, $4, $5, $6, $7)",
    lane=Lane.POP,  # it may store a subscription
)
_CHANGES = Statement(
    "changes", "SELECT queue_name, partition_name FROM queen.changes_v1($1, $2, $3)"
)
_PROBE = Statement(
    "probe", "SELECT ord, available, due_ms FROM queen.probe_v1($1, $2, $3, $4, $5, $6, $7)"
)
_ACK = Statement(
    "ack",
    "SELECT ord, verdicts, lease_released, needs_payload, queue_name, partition_name,"
    " has_more"
    " FROM queen.ack_v1($1, $2, $3, $4, $5, $6, $7::text::jsonb) ORDER BY ord",
    lane=Lane.ACK,
)
_TRANSACTION = Statement(
    "transaction",
    "SELECT committed, pushes::text, acks::text, lost_lease FROM queen.transaction_v1("
    "$1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13::text::jsonb, $14, $15)",
    lane=Lane.PUSH,
)
_EXTEND = Statement("extend", "SELECT renewed, expires_at FROM queen.extend_v1($1, $2)", Lane.ACK)
_RELEASE = Statement("release", "SELECT queen.release_v1($1)", Lane.ACK)
_CONFIGURE = Statement(
    "configure",
    "SELECT to_jsonb(q)::text FROM queen.configure_v1($1, $2, $3, $4, $5::text::jsonb, $6) q",
    lane=Lane.MAINT,
)
_DELETE_QUEUE = Statement("delete_queue", "SELECT queen.delete_queue_v1($1, $2)", Lane.MAINT)
_LIST_QUEUES = Statement(
    "list_queues",
    "SELECT id, name, namespace, task, created_at, partitions, total, pending, processing"
    " FROM queen.list_queues_v1($1, $2)",
)
_LIST_PARTITIONS = Statement(
    "list_partitions",
    "SELECT id, name, created_at, last_offset, log_start, total, pending, processing, last_write_at"
    " FROM queen.list_partitions_v1($1, $2)",
)
_QUEUE_OPTIONS = Statement(
    "queue_options",
    "SELECT to_jsonb(q)::text FROM queen.queues q WHERE q.tenant_id = $1 AND q.name = $2",
)
_PING = Statement("ping", "SELECT current_setting('server_version')")


class PushRow(NamedTuple):
    """One segment of a bundle: committed at `base_offset`, or with duplicates and not written."""

    ord: int
    partition_id: UUID
    base_offset: int | None
    created_at: datetime | None
    duplicate_at: list[int] | None
    duplicate_of: list[int] | None


class OriginalRow(NamedTuple):
    """The segment that holds one offset."""

    message_offset: int
    base_offset: int
    created_at: datetime
    blob: bytes


class HistoryRow(NamedTuple):
    """One sidecar row: 16 bytes a message; the dedup window started at `covered_since`."""

    base_offset: int
    end_offset: int
    created_at: datetime
    hashes: bytes
    covered_since: datetime


class PopRow(NamedTuple):
    """One segment of a claim; the claim of its partition ends at its last row's `batch_end`."""

    partition_id: UUID
    partition_name: str
    queue_name: str
    committed: int
    batch_end: int
    delivery_attempt: int
    base_offset: int
    created_at: datetime
    blob: bytes
    # Set in the rows that are no segments but verdicts on candidates; see 030_pop.sql.
    verdict: str | None = None
    until_ms: int | None = None


class ProbeRow(NamedTuple):
    """For the pop at a 1-based position: partitions to claim, and ms until there is one more."""

    ord: int
    available: int
    due_ms: int | None


AckArguments = tuple[list[UUID], list[str], list[str], list[bytes], list[str], str]
"""Partitions, groups, leases, hashes, statuses (aligned, one element a target), letters (JSON)."""


class AckRow(NamedTuple):
    """What became of one target; `verdicts` has one letter an item, see sql/functions/040_ack."""

    ord: int
    verdicts: str | None
    lease_released: bool
    needs_payload: int | None
    queue_name: str | None
    partition_name: str | None
    has_more: bool


class TransactionRow(NamedTuple):
    """What became of a transaction; `pushes` and `acks` are JSON arrays of push and ack rows."""

    committed: bool
    pushes: str
    acks: str
    lost_lease: str | None


class QueueRow(NamedTuple):
    id: UUID
    name: str
    namespace: str
    task: str
    created_at: datetime
    partitions: int
    total: int
    pending: int
    processing: int


class PartitionRow(NamedTuple):
    id: UUID
    name: str
    created_at: datetime
    last_offset: int
    log_start: int
    total: int
    pending: int
    processing: int
    last_write_at: datetime | None


class Store:
    """The queries of one tenant over a pool; every method may raise what `Pool.fetch` raises."""

    def __init__(self, pool: Pool, tenant: UUID = DEFAULT_TENANT) -> None:
        self.pool = pool
        self.tenant = tenant

    async def push(
        self,
        queues: Sequence[str],
        partitions: Sequence[str],
        counts: Sequence[int],
        raw_bytes: Sequence[int],
        hashes: Sequence[bytes],
        blobs: Sequence[bytes],
        verified: Sequence[int],
        verified_in: Sequence[UUID | None] | None,
        verified_since: Sequence[datetime | None] | None,
        sealed: Sequence[bool] | None = None,
        on_sent: Callable[[Sent], None] | None = None,
    ) -> list[PushRow]:
        """Commit a bundle; arguments are aligned, one element a segment (different partitions).

        `verified_in` and `verified_since` may be None where `verified` is for all everywhere.
        `sealed` says whose payloads are encrypted, None of none. Raises `DatabaseError` with the
        sqlstate `ENCRYPTION_DIFFERS` where that isn't what the queue wants. Doesn't wait for a
        database that is away: pushes have the spool. `on_sent` may let a `pop` follow.
        """
        rows = await self.pool.fetch(
            _PUSH, self.tenant, queues, partitions, counts, raw_bytes, hashes, blobs, verified,
            verified_in, verified_since, sealed, impatient=True, on_sent=on_sent,
        )  # fmt: skip
        return [PushRow(*row) for row in rows]

    async def segments_at(self, partition_id: UUID, offsets: Sequence[int]) -> list[OriginalRow]:
        """Read the segments that hold these offsets; what retention removed has no row."""
        rows = await self.pool.fetch(_SEGMENTS_AT, partition_id, offsets)
        return [OriginalRow(*row) for row in rows]

    async def history(self, partition_id: UUID, after: int, most: int) -> list[HistoryRow]:
        """Read about `most` transactionId hashes above `after`; -1 starts with the dedup window."""
        rows = await self.pool.fetch(_HISTORY, partition_id, after, most)
        return [HistoryRow(*row) for row in rows]

    async def pop(
        self,
        queue: str | None,
        partition: str | None,
        namespace: str,
        task: str,
        group: str,
        batch: int,
        partitions: int | None,
        lease_seconds: int | None,
        auto_ack: bool,
        lease_id: str,
        mode: str,
        since: datetime | None,
        waited: Elapsed,
        max_bytes: int,
        candidates: Sequence[str] | None = None,
        patience_seconds: float = SERVING_SECONDS,
        behind: Sent | None = None,
        on_given_back: Callable[[Sequence[PopRow]], None] | None = None,
    ) -> list[PopRow]:
        """Claim messages, from these partitions where `candidates` names some.

        Without candidates no rows mean that there is nothing to take now. `patience_seconds` may
        shorten the statement's deadline: a claim that comes too late is only a lease. `behind` is a
        push that may bring what is asked for: see `Sent.fetch`. A claim that comes when nobody
        waits for it any more is given back, and `on_given_back` told; not one with `auto_ack`.
        """
        arguments = (
            self.tenant, queue, partition, namespace, task, group, batch, partitions, lease_seconds,
            auto_ack, lease_id, mode, since, waited, max_bytes, candidates,
        )  # fmt: skip
        if behind is None:
            rows = await self.pool.fetch(_POP, *arguments, statement_seconds=patience_seconds)
        else:

            async def give_back(connection: TrioConnection, rows: list[tuple[Any, ...]]) -> None:
                claimed = [row for row in map(PopRow._make, rows) if row.verdict is None]
                if claimed:
                    await connection.fetch(_RELEASE, lease_id, deadline_seconds=SERVING_SECONDS)
                    if on_given_back is not None:
                        on_given_back(claimed)

            rows = await behind.fetch(
                _POP, *arguments, undo=give_back, statement_seconds=patience_seconds
            )
        return [PopRow(*row) for row in rows]

    async def candidates(
        self,
        queue: str,
        group: str,
        mode: str,
        since: datetime | None,
        waited: Elapsed,
        most: int,
        patience_seconds: float | None = None,
    ) -> list[str]:
        """Partitions that may have something for a group; one more than `most` tells of more."""
        rows = await self.pool.fetch(
            _CANDIDATES, self.tenant, queue, group, mode, since, waited, most,
            statement_seconds=patience_seconds,
        )  # fmt: skip
        return [name for (name,) in rows]

    async def changes(self, seconds: float, most: int) -> list[tuple[str, str | None]]:
        """What others did lately: (queue, partition) written, (queue, None) cursors moved."""
        rows = await self.pool.fetch(_CHANGES, self.tenant, seconds, most)
        return [(queue, partition) for queue, partition in rows]

    async def probe(
        self,
        queues: Sequence[str | None],
        partitions: Sequence[str | None],
        namespaces: Sequence[str],
        tasks: Sequence[str],
        groups: Sequence[str],
        limits: Sequence[int],
    ) -> list[ProbeRow]:
        """Say what each parked pop could get; pops that have nothing in sight have no row."""
        rows = await self.pool.fetch(
            _PROBE, self.tenant, queues, partitions, namespaces, tasks, groups, limits
        )
        return [ProbeRow(*row) for row in rows]

    async def ack(
        self,
        partition_ids: Sequence[UUID],
        groups: Sequence[str],
        leases: Sequence[str],
        hashes: Sequence[bytes],
        statuses: Sequence[str],
        letters: str,
        whole: Sequence[int] | None = None,
    ) -> list[AckRow]:
        """Apply targets in one transaction, one row each; `letters` is a JSON array.

        Where `whole` has a number, the target completes all of its lease's batch, so many messages:
        its hashes and statuses are not looked at. A row without anything says that it doesn't.
        """
        rows = await self.pool.fetch(
            _ACK, partition_ids, groups, leases, whole, hashes, statuses, letters
        )
        answers = [AckRow(*row) for row in rows]
        if whole is not None:
            for index, (row, count) in enumerate(zip(answers, whole, strict=True)):
                if count and row.verdicts is not None:
                    answers[index] = row._replace(verdicts="c" * count)
        return answers

    async def transaction(
        self,
        queues: Sequence[str],
        partitions: Sequence[str],
        counts: Sequence[int],
        raw_bytes: Sequence[int],
        hashes: Sequence[bytes],
        blobs: Sequence[bytes],
        acks: AckArguments,
        required_leases: Sequence[str],
        sealed: Sequence[bool] | None = None,
    ) -> TransactionRow:
        """Push a bundle and apply targets, all or nothing; `sealed` as for `push`."""
        [row] = await self.pool.fetch(
            _TRANSACTION, self.tenant, queues, partitions, counts, raw_bytes, hashes, blobs, *acks,
            required_leases, sealed,
        )  # fmt: skip
        return TransactionRow(*row)

    async def extend(self, lease_id: str, seconds: int) -> tuple[int, datetime | None]:
        """Extend a lease; returns how many rows were live, and the earliest new expiry."""
        [(renewed, expires_at)] = await self.pool.fetch(_EXTEND, lease_id, seconds)
        return renewed, expires_at

    async def release(self, lease_id: str) -> int:
        """Give an undelivered claim back; returns how many partitions it held."""
        [(count,)] = await self.pool.fetch(_RELEASE, lease_id)
        return int(count)

    async def configure(
        self, name: str, namespace: str | None, task: str | None, options: str, replace: bool
    ) -> str:
        """Create or change a queue; `options` and the returned row are JSON objects by column."""
        [(row,)] = await self.pool.fetch(
            _CONFIGURE, self.tenant, name, namespace, task, options, replace
        )
        return str(row)

    async def delete_queue(self, name: str) -> bool:
        """Delete a queue and all that hangs on it; False when there was none."""
        [(deleted,)] = await self.pool.fetch(_DELETE_QUEUE, self.tenant, name)
        return bool(deleted)

    async def list_queues(self, name: str | None = None) -> list[QueueRow]:
        """List all queues, or the one of that name, with their counts."""
        return [QueueRow(*row) for row in await self.pool.fetch(_LIST_QUEUES, self.tenant, name)]

    async def list_partitions(self, queue: str) -> list[PartitionRow]:
        """List the partitions of one queue with their counts."""
        rows = await self.pool.fetch(_LIST_PARTITIONS, self.tenant, queue)
        return [PartitionRow(*row) for row in rows]

    async def queue_options(self, name: str) -> str | None:
        """Read a queue's row as a JSON object by column; None when there is none."""
        rows = await self.pool.fetch(_QUEUE_OPTIONS, self.tenant, name)
        return str(rows[0][0]) if rows else None

    async def ping(self, connection_seconds: float, query_seconds: float) -> str:
        """Run a real query on a pooled connection and return the server's version.

        Raises `DatabaseUnavailable` when either takes longer than it may. A connection that stays
        mute is closed: a probe can't wait for the late shield, and leaves nothing half done.
        """
        rows: list[tuple[Any, ...]] = []
        failure: DatabaseError | None = None
        async with (
            self.pool.acquire(deadline_seconds=connection_seconds) as connection,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_close_after, query_seconds, connection)
            try:
                rows = await connection.fetch(_PING)
            except DatabaseError as error:  # carried past the nursery, which would wrap it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return str(rows[0][0])


async def _close_after(seconds: float, connection: TrioConnection) -> None:
    await trio.sleep(seconds)
    connection.close_nowait()
