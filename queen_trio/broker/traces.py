"""Traces: what consumers note down about the messages that they work on."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .outage import ride_out

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from queen_trio.model.inspection import Page
    from queen_trio.store.traces import TraceNameRow, TraceRow, TraceStore


class TraceService:
    """Stores and finds traces; every method waits out a short outage of the database."""

    def __init__(self, store: TraceStore, max_bytes: int) -> None:
        """`max_bytes` bounds an answer, as it does a pop's (spec 8.11)."""
        self._store = store
        self._max_bytes = max_bytes

    async def add(
        self,
        partition_id: UUID,
        transaction_id: str,
        group: str,
        names: Sequence[str],
        event_type: str,
        data: str,
    ) -> UUID | None:
        """Store a trace (twice, if the commit of an attempt was left unknown) and return its id.

        None when there is no such partition.
        """
        distinct = list(dict.fromkeys(names))
        return await ride_out(
            partial(
                self._store.add, partition_id, transaction_id, group, distinct, event_type, data
            )
        )

    async def of_message(
        self, partition_id: UUID, transaction_id: str, page: Page
    ) -> list[TraceRow]:
        """Read the traces of a message, oldest first; may end early where it would grow large."""
        return await ride_out(
            partial(self._store.of_message, partition_id, transaction_id, page, self._max_bytes)
        )

    async def of_name(
        self, name: str, since: datetime | None, until: datetime | None, page: Page
    ) -> tuple[list[TraceRow], int]:
        """Read the traces of a name created in [since, until), newest first; and their count."""
        return await ride_out(
            partial(self._store.of_name, name, since, until, page, self._max_bytes)
        )

    async def names(self, search: str | None, page: Page) -> tuple[list[TraceNameRow], int]:
        """List names, the one used last first; those that contain `search`; and their count."""
        return await ride_out(partial(self._store.names, search, page))
