"""Queues: configure, delete, list."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from .encryption import EncryptionKeyMissing
from .outage import ride_out

if TYPE_CHECKING:
    from queen_trio.store.queries import PartitionRow, QueueRow, Store

    from .encryption import Encryption
    from .hints import Hints


class QueueService:
    """Changes and shows queues; every method waits out a short outage of the database."""

    def __init__(self, store: Store, hints: Hints, encryption: Encryption) -> None:
        self._store = store
        self._hints = hints
        self._encryption = encryption

    async def configure(
        self,
        name: str,
        namespace: str | None,
        task: str | None,
        columns: dict[str, int | bool | None],
        *,
        replace: bool,
    ) -> dict[str, Any]:
        """Create or change a queue and return its row; parked pops look again.

        Raises `EncryptionKeyMissing` for a queue that is to be encrypted by nobody.
        """
        if columns.get("encryption_enabled") and not self._encryption.has_key:
            raise EncryptionKeyMissing(name)
        options = msgspec.json.encode(columns).decode()
        row: dict[str, Any] = msgspec.json.decode(
            await ride_out(partial(self._store.configure, name, namespace, task, options, replace))
        )
        self._encryption.note(name, enabled=row["encryption_enabled"])
        self._hints.queue_changed(name)
        return row

    async def delete(self, name: str) -> bool:
        """Delete a queue and all that hangs on it; False when there was none."""
        deleted = await ride_out(partial(self._store.delete_queue, name))
        self._encryption.forget(name)
        self._hints.queue_deleted(name)
        return deleted

    async def list_all(self) -> list[QueueRow]:
        """All queues with their counts."""
        return await ride_out(self._store.list_queues)

    async def find(self, name: str) -> QueueRow | None:
        """One queue with its counts; None when there is none."""
        rows = await ride_out(partial(self._store.list_queues, name))
        return rows[0] if rows else None

    async def detail(self, name: str) -> tuple[QueueRow, dict[str, Any], list[PartitionRow]] | None:
        """One queue with its row and its partitions; None when there is none."""
        rows = await ride_out(partial(self._store.list_queues, name))
        options = await ride_out(partial(self._store.queue_options, name))
        if not rows or options is None:
            return None
        partitions = await ride_out(partial(self._store.list_partitions, name))
        return rows[0], msgspec.json.decode(options), partitions
