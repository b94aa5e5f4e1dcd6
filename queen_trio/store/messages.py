"""The queries that look at messages; what they mean is in sql/functions/085_messages.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .connection import Statement

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from queen_trio.model.inspection import MessageFilter, Page

    from .pool import Pool

_MESSAGE = Statement(
    "message",
    "SELECT queue_name, partition_name, message_offset, base_offset, created_at, blob"
    " FROM queen.message_v1($1, $2, $3)",
)
_GROUPS = Statement(
    "message_groups",
    "SELECT consumer_group, status, consumed, lease_expires_at, error, retry_count, failed_at"
    " FROM queen.message_groups_v1($1, $2, $3)",
)
_LIST = Statement(
    "list_messages",
    "SELECT queue_name, partition_name, partition_id, base_offset, created_at, offsets, statuses,"
    " blob FROM queen.list_messages_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
)


class MessageRow(NamedTuple):
    """The segment that holds one message."""

    queue_name: str
    partition_name: str
    message_offset: int
    base_offset: int
    created_at: datetime
    blob: bytes


class MessageGroupRow(NamedTuple):
    """What one group has done with a message; the last three tell of its dead letter, if any."""

    consumer_group: str
    status: str
    consumed: bool
    lease_expires_at: datetime | None
    error: str | None
    retry_count: int | None
    failed_at: datetime | None


class PageRow(NamedTuple):
    """One segment of a page; `offsets` and `statuses` are aligned, newest first."""

    queue_name: str
    partition_name: str
    partition_id: UUID
    base_offset: int
    created_at: datetime
    offsets: list[int]
    statuses: list[str]
    blob: bytes


class MessageStore:
    """Messages of one tenant; every method may raise what `Pool.fetch` raises."""

    def __init__(self, pool: Pool, tenant: UUID) -> None:
        self._pool = pool
        self._tenant = tenant

    async def find(self, partition_id: UUID, transaction_hash: bytes) -> MessageRow | None:
        """Find the newest message of a transactionId; None when the log doesn't hold it."""
        rows = await self._pool.fetch(_MESSAGE, self._tenant, partition_id, transaction_hash)
        return MessageRow(*rows[0]) if rows else None

    async def groups(self, partition_id: UUID, offset: int) -> list[MessageGroupRow]:
        """Tell what each group has done with a message, in the order of their names."""
        rows = await self._pool.fetch(_GROUPS, self._tenant, partition_id, offset)
        return [MessageGroupRow(*row) for row in rows]

    async def read_page(self, which: MessageFilter, page: Page, max_bytes: int) -> list[PageRow]:
        """Read the segments of a page of messages, newest first."""
        rows = await self._pool.fetch(
            _LIST, self._tenant, which.queue, which.partition, which.namespace, which.task,
            which.group, which.status and which.status.value, which.since, which.until,
            page.limit, page.offset, max_bytes,
        )  # fmt: skip
        return [PageRow(*row) for row in rows]
