"""The queries of traces; what they mean is in sql/functions/090_traces.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from queen_trio.model.admission import Lane

from .connection import Statement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from queen_trio.model.inspection import Page

    from .pool import Pool

# Constants make up the statements: S608 has nothing to find here.
_COLUMNS: Final = (
    "id, queue_name, partition_name, partition_id, transaction_id, consumer_group, event_type,"
    " names, data, created_at"
)
_TRACE = Statement("trace", "SELECT queen.trace_v1($1, $2, $3, $4, $5, $6, $7)", Lane.PUSH)
_OF_MESSAGE = Statement(
    "traces_of_message",
    f"SELECT {_COLUMNS} FROM queen.traces_of_message_v1($1, $2, $3, $4, $5, $6)",  # noqa: S608
)
_OF_NAME = Statement(
    "traces_of_name",
    f"SELECT {_COLUMNS} FROM queen.traces_of_name_v1($1, $2, $3, $4, $5, $6, $7)",  # noqa: S608
)
_COUNT = Statement("count_traces", "SELECT queen.count_traces_v1($1, $2, $3, $4)")
_NAMES = Statement(
    "trace_names",
    "SELECT name, traces, last_at FROM queen.trace_names_v1($1, $2, $3, $4)",
)
_COUNT_NAMES = Statement("count_trace_names", "SELECT queen.count_trace_names_v1($1, $2)")
_PURGE = Statement("purge_traces", "SELECT queen.purge_traces_v1($1, $2)")


class TraceRow(NamedTuple):
    """One trace; `data` is the verbatim JSON."""

    id: UUID
    queue_name: str
    partition_name: str
    partition_id: UUID
    transaction_id: str
    consumer_group: str
    event_type: str
    names: list[str]
    data: str
    created_at: datetime


class TraceNameRow(NamedTuple):
    """One name with how many traces it has."""

    name: str
    traces: int
    last_at: datetime


class TraceStore:
    """Traces of one tenant; every method may raise what `Pool.fetch` raises."""

    def __init__(self, pool: Pool, tenant: UUID) -> None:
        self._pool = pool
        self._tenant = tenant

    async def add(
        self,
        partition_id: UUID,
        transaction_id: str,
        group: str,
        names: Sequence[str],
        event_type: str,
        data: str,
    ) -> UUID | None:
        """Store a trace under different `names`; None when there is no such partition."""
        [(trace_id,)] = await self._pool.fetch(
            _TRACE, self._tenant, partition_id, transaction_id, group, names, event_type, data
        )
        return trace_id  # type: ignore[no-any-return]

    async def of_message(
        self, partition_id: UUID, transaction_id: str, page: Page, max_bytes: int
    ) -> list[TraceRow]:
        """Read the traces of a message, oldest first."""
        rows = await self._pool.fetch(
            _OF_MESSAGE, self._tenant, partition_id, transaction_id, page.limit, page.offset,
            max_bytes,
        )  # fmt: skip
        return [TraceRow(*row) for row in rows]

    async def of_name(
        self,
        name: str,
        since: datetime | None,
        until: datetime | None,
        page: Page,
        max_bytes: int,
    ) -> tuple[list[TraceRow], int]:
        """Read the traces of a name created in [since, until), newest first; and their count."""
        rows = await self._pool.fetch(
            _OF_NAME, self._tenant, name, since, until, page.limit, page.offset, max_bytes
        )
        [(total,)] = await self._pool.fetch(_COUNT, self._tenant, name, since, until)
        return [TraceRow(*row) for row in rows], int(total)

    async def names(self, search: str | None, page: Page) -> tuple[list[TraceNameRow], int]:
        """List names, the one used last first; those that contain `search`; and their count."""
        rows = await self._pool.fetch(_NAMES, self._tenant, search, page.limit, page.offset)
        [(total,)] = await self._pool.fetch(_COUNT_NAMES, self._tenant, search)
        return [TraceNameRow(*row) for row in rows], int(total)

    async def purge(self, before: datetime, most: int) -> int:
        """Delete up to `most` traces older than `before`, oldest first; returns how many."""
        [(count,)] = await self._pool.fetch(_PURGE, before, most)
        return int(count)
