"""Streams: queries, what they remember, and their cycles, one transaction each (spec 7)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.model.message import hash_of
from queen_trio.model.streams import Cycle, CycleOutcome, SourceCommit
from queen_trio.store.queries import NOTHING_VERIFIED, VERIFIED_EVERYWHERE

from .outage import ride_out
from .segment import Drafted

if TYPE_CHECKING:
    from queen_trio.model.ids import Uuid7
    from queen_trio.model.streams import StateQuery
    from queen_trio.store.streams import (
        CommitArguments,
        CycleRow,
        RegisteredRow,
        StateRow,
        StreamStore,
    )

    from .encryption import Encryption
    from .hints import Hints


class StreamService:
    """Serves the client's streaming engine; every method waits out a short outage."""

    def __init__(
        self, store: StreamStore, ids: Uuid7, hints: Hints, encryption: Encryption
    ) -> None:
        self._store = store
        self._ids = ids
        self._hints = hints
        self._encryption = encryption

    async def register(
        self, name: str, source: str | None, sink: str | None, config_hash: str, *, reset: bool
    ) -> RegisteredRow:
        """Create a query, or find it; `reset` takes the new config_hash and drops its state."""
        return await ride_out(
            partial(self._store.register, name, source, sink, config_hash, reset=reset)
        )

    async def state(self, which: StateQuery) -> list[StateRow] | None:
        """Read state in the order of its keys; None when there is no such query."""
        return await ride_out(partial(self._store.state, which))

    async def cycle(self, cycle: Cycle) -> CycleOutcome:
        """Commit everything or nothing.

        Rides out a short outage, then raises `DatabaseUnavailable`; an attempt whose commit was
        left unknown is recognised by its id and not done twice. Raises `EncryptionKeyMissing`.
        """
        [cycle_id] = self._ids.take(1)
        drafted = Drafted.from_items(cycle.pushes, self._ids, cycle.producer_sub)
        queues = [queue for queue, _ in drafted.drafts]
        attempt = partial(self._attempt, UUID(cycle_id), cycle, drafted)
        try:
            row = await ride_out(partial(self._encryption.agree, queues, attempt))
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            return CycleOutcome(refusal=str(error))
        if row.refusal is not None:
            return CycleOutcome(refusal=row.refusal)
        self._hints.messages_available(drafted.drafts)
        if row.more_in_queue is not None and row.more_in_partition is not None:
            self._hints.claims_available([(row.more_in_queue, row.more_in_partition)], cycle.group)
        return CycleOutcome(drafted.finish(), row.lease_released)

    async def _attempt(self, cycle_id: UUID, cycle: Cycle, drafted: Drafted) -> CycleRow:
        drafts = list(drafted.drafts.items())
        encoded = [self._encryption.encode(key[0], draft.records) for key, draft in drafts]
        changes = cycle.changes.values()
        return await self._store.cycle(
            cycle_id,
            cycle.query_id,
            cycle.partition_id,
            cycle.group,
            (
                list(cycle.changes),
                [change.value for change in changes],
                [change.ripe_at for change in changes],
            ),
            (
                [key[0] for key, _ in drafts],
                [key[1] for key, _ in drafts],
                [len(draft.records) for _, draft in drafts],
                [segment.size for segment in encoded],
                [b"".join(draft.hashes) for _, draft in drafts],
                [segment.blob for segment in encoded],
                [segment.sealed for segment in encoded],
                [
                    VERIFIED_EVERYWHERE if draft.generated else NOTHING_VERIFIED
                    for _, draft in drafts
                ],
            ),
            _commit_arguments(cycle.commit),
        )


def _commit_arguments(commit: SourceCommit | None) -> CommitArguments:
    if commit is None:
        return None, None, None, False
    return commit.lease_id, hash_of(commit.transaction_id), commit.count, commit.count is None
