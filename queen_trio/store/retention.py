"""The statements of retention, on the connection that holds its lock: see 100_retention.sql."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from .connection import Statement

if TYPE_CHECKING:
    from .connection import TrioConnection

_QUEUES: Final = Statement(
    "retention_queues", "SELECT queue_id, age_seconds FROM queen.retention_queues_v1()"
)
_CANDIDATES: Final = Statement(
    "retention_candidates",
    "SELECT oldest_live_at, partition_id, due"
    " FROM queen.retention_candidates_v1($1, $2, $3, $4, $5)",
)
_TRIM: Final = Statement("trim", "SELECT segments, messages FROM queen.trim_partition_v1($1, $2)")
_PURGE_CANDIDATES: Final = Statement(
    "purge_candidates",
    "SELECT oldest_txn_at, partition_id, due FROM queen.purge_candidates_v1($1, $2, $3)",
)
_PURGE: Final = Statement("purge", "SELECT queen.purge_sidecar_v1($1, $2)")
_DROP_IDLE: Final = Statement("drop_idle", "SELECT queen.drop_idle_partition_v1($1)")


class Place(NamedTuple):
    """Where a walk over partitions stands: the age of the last one's oldest row, and its id."""

    at: datetime
    partition_id: UUID


BEGINNING: Final = Place(datetime(1970, 1, 1, tzinfo=UTC), UUID(int=0))


async def retention_queues(conn: TrioConnection) -> list[tuple[UUID, int]]:
    """Queues with a retention rule, and the least age in seconds that it names."""
    return [(queue_id, age) for queue_id, age in await conn.fetch(_QUEUES)]


async def candidates(
    conn: TrioConnection, queue_id: UUID, age_seconds: int, after: Place, most: int
) -> list[tuple[Place, bool]]:
    """Partitions whose oldest message is that old, and whether there is something to delete."""
    rows = await conn.fetch(_CANDIDATES, queue_id, age_seconds, *after, most)
    return [(Place(at, partition_id), bool(due)) for at, partition_id, due in rows]


async def trim(conn: TrioConnection, partition_id: UUID, most: int) -> tuple[int, int]:
    """Delete up to `most` expired segments; returns how many, and how many messages."""
    [(segments, messages)] = await conn.fetch(_TRIM, partition_id, most)
    return segments, messages


async def purge_candidates(
    conn: TrioConnection, after: Place, most: int
) -> list[tuple[Place, bool]]:
    """Partitions with sidecar rows of deleted segments, and whether the oldest is old enough."""
    rows = await conn.fetch(_PURGE_CANDIDATES, *after, most)
    return [(Place(at, partition_id), due) for at, partition_id, due in rows]


async def purge(conn: TrioConnection, partition_id: UUID, most: int) -> int:
    """Delete up to `most` sidecar rows; returns how many."""
    [(count,)] = await conn.fetch(_PURGE, partition_id, most)
    return int(count)


async def drop_idle_partition(conn: TrioConnection, idle_days: int) -> UUID | None:
    """Delete one partition that is empty and idle for so long; None when there is none."""
    [(partition_id,)] = await conn.fetch(_DROP_IDLE, idle_days)
    return partition_id  # type: ignore[no-any-return]
