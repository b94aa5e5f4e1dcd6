"""The queries of dead letters; what they mean is in sql/functions/080_dlq.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from queen_trio.model.admission import Lane

from .connection import Statement

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from queen_trio.model.inspection import DeadLetterFilter, Page

    from .pool import Pool

# Constants make up the statements: S608 has nothing to find here.
_COLUMNS: Final = (
    'id, queue_name, partition_name, partition_id, consumer_group, "offset", message_id,'
    " transaction_id, trace_id, producer_sub, payload, error, retry_count, created_at, failed_at"
)
_COUNT = Statement("count_dlq", "SELECT queen.count_dlq_v1($1, $2, $3, $4, $5, $6)")
_LIST = Statement(
    "list_dlq",
    f"SELECT {_COLUMNS} FROM queen.list_dlq_v1($1, $2, $3, $4, $5, $6, $7, $8, $9)",  # noqa: S608
)
_READ = Statement(
    "read_dlq",
    f"SELECT {_COLUMNS} FROM queen.log_dlq WHERE id = $2 AND tenant_id = $1",  # noqa: S608
)
_OF_MESSAGE = Statement(
    "dlq_of_message",
    f"SELECT {_COLUMNS} FROM queen.dlq_of_message_v1($1, $2, $3, $4)",  # noqa: S608
)
_REPLAY = Statement(
    "replay_dlq",
    "SELECT verdict, partition_id, message_offset"
    " FROM queen.replay_dlq_v1($1, $2, $3, $4, $5, $6, $7, $8)",
    lane=Lane.PUSH,
)
_FILE = Statement(
    "file_dlq", "SELECT queen.file_dlq_v1($1, $2, $3, $4, $5::text::jsonb)", Lane.MAINT
)
_DELETE = Statement("delete_dlq", "SELECT queen.delete_dlq_v1($1, $2, $3, $4)", Lane.MAINT)
_PURGE = Statement("purge_dlq", "SELECT queen.purge_dlq_v1($1, $2, $3, $4, $5, $6, $7)", Lane.MAINT)


class DeadLetterRow(NamedTuple):
    """One dead letter; `created_at` tells when it was pushed.

    `payload` is the verbatim JSON, or an envelope until `Encryption.open_letter` has opened it;
    where that failed it is null and `decryption_error` says why.
    """

    id: UUID
    queue_name: str
    partition_name: str
    partition_id: UUID
    consumer_group: str
    offset: int
    message_id: str
    transaction_id: str
    trace_id: str | None
    producer_sub: str | None
    payload: str
    error: str | None
    retry_count: int
    created_at: datetime | None
    failed_at: datetime
    decryption_error: str | None = None


class ReplayRow(NamedTuple):
    """What became of a replay; the last two are None when there was nothing to move."""

    verdict: str
    partition_id: UUID | None
    message_offset: int | None


class DeadLetterStore:
    """Dead letters of one tenant; every method may raise what `Pool.fetch` raises."""

    def __init__(self, pool: Pool, tenant: UUID) -> None:
        self._pool = pool
        self._tenant = tenant

    async def count(self, which: DeadLetterFilter) -> int:
        """Count those that match."""
        [(count,)] = await self._pool.fetch(_COUNT, *self._matching(which))
        return int(count)

    async def read_page(
        self, which: DeadLetterFilter, page: Page, max_bytes: int
    ) -> list[DeadLetterRow]:
        """Read a page of those that match, newest first; at most `max_bytes`, but one at least."""
        rows = await self._pool.fetch(
            _LIST, *self._matching(which), page.limit, page.offset, max_bytes
        )
        return [DeadLetterRow(*row) for row in rows]

    async def read(self, row_id: UUID) -> DeadLetterRow | None:
        """Read one by its own id."""
        rows = await self._pool.fetch(_READ, self._tenant, row_id)
        return DeadLetterRow(*rows[0]) if rows else None

    async def of_message(
        self, partition_id: UUID, transaction_id: str, group: str | None
    ) -> list[DeadLetterRow]:
        """Read those of one message, newest first; `group` None: of all groups."""
        rows = await self._pool.fetch(
            _OF_MESSAGE, self._tenant, partition_id, transaction_id, group
        )
        return [DeadLetterRow(*row) for row in rows]

    async def replay(
        self,
        row_id: UUID,
        queue: str,
        partition: str,
        transaction_hash: bytes,
        raw_bytes: int,
        blob: bytes,
        sealed: bool = False,
    ) -> ReplayRow:
        """Move one back into its partition, as the only message of a segment."""
        [row] = await self._pool.fetch(
            _REPLAY, self._tenant, row_id, queue, partition, transaction_hash, raw_bytes, blob,
            sealed,
        )  # fmt: skip
        return ReplayRow(*row)

    async def file(self, partition_id: UUID, group: str, offset: int, letter: str) -> str:
        """Dead-letter a message by hand; `letter` (JSON) is what was read from its segment."""
        [(verdict,)] = await self._pool.fetch(
            _FILE, self._tenant, partition_id, group, offset, letter
        )
        return str(verdict)

    async def delete(self, partition_id: UUID, transaction_id: str, group: str | None) -> int:
        """Delete those of one message; returns how many there were."""
        [(count,)] = await self._pool.fetch(
            _DELETE, self._tenant, partition_id, transaction_id, group
        )
        return int(count)

    async def purge(self, which: DeadLetterFilter, limit: int) -> int:
        """Delete up to `limit` of those that match, oldest first; returns how many it deleted."""
        [(count,)] = await self._pool.fetch(_PURGE, *self._matching(which), limit)
        return int(count)

    def _matching(self, which: DeadLetterFilter) -> tuple[object, ...]:
        return (
            self._tenant, which.queue, which.group, which.partition, which.since, which.until,
        )  # fmt: skip
