"""The queries of streams; what they mean is in sql/functions/110_streams.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from queen_trio.model.admission import Lane

from .connection import Statement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from queen_trio.model.streams import StateQuery

    from .pool import Pool

_REGISTER = Statement(
    "register_stream",
    "SELECT query_id, fresh, matches FROM queen.register_stream_v1($1, $2, $3, $4, $5, $6)",
    lane=Lane.MAINT,
)
_STATE = Statement(
    "stream_state", "SELECT key, value FROM queen.stream_state_v1($1, $2, $3, $4, $5, $6)"
)
_CYCLE = Statement(
    "stream_cycle",
    "SELECT refusal, lease_released, more_in_queue, more_in_partition FROM queen.stream_cycle_v1("
    "$1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20)",
    lane=Lane.PUSH,
)


class RegisteredRow(NamedTuple):
    """A query as it stands now; `matches` False: it has another config_hash."""

    query_id: UUID
    fresh: bool
    matches: bool


class StateRow(NamedTuple):
    """A key in its stored form and its value, both JSON text."""

    key: bytes
    value: str


class CycleRow(NamedTuple):
    """What became of a cycle; `refusal` None: it is committed.

    `more_in_queue`, `more_in_partition`: where a lease was released, so that there may be more now.
    """

    refusal: str | None
    lease_released: bool
    more_in_queue: str | None
    more_in_partition: str | None


StateArguments = tuple[list[bytes], list[str | None], list[float | None]]
"""Keys, values, when they are ripe (aligned, one element a key)."""

PushArguments = tuple[
    list[str], list[str], list[int], list[int], list[bytes], list[bytes], list[bool], list[int]
]
"""Queues, partitions, counts, sizes, hashes, blobs, sealed, verified, as for `Store.push`."""

CommitArguments = tuple[str | None, bytes | None, int | None, bool]
"""Lease, the last message's hash, how many messages, whether the lease is released."""


class StreamStore:
    """Streams of one tenant; every method may raise what `Pool.fetch` raises."""

    def __init__(self, pool: Pool, tenant: UUID) -> None:
        self._pool = pool
        self._tenant = tenant

    async def register(
        self, name: str, source: str | None, sink: str | None, config_hash: str, *, reset: bool
    ) -> RegisteredRow:
        """Create a query, or find it; `reset` drops its state."""
        [row] = await self._pool.fetch(
            _REGISTER, self._tenant, name, source, sink, config_hash, reset
        )
        return RegisteredRow(*row)

    async def state(self, which: StateQuery) -> list[StateRow] | None:
        """Read state in the order of its keys; None when there is no such query."""
        rows = await self._pool.fetch(
            _STATE, self._tenant, which.query_id, which.partition_id, which.keys, which.prefix,
            which.ripe_at,
        )  # fmt: skip
        if rows and rows[0][0] is None:
            return None
        return [StateRow(*row) for row in rows]

    async def cycle(
        self,
        cycle_id: UUID,
        query_id: UUID,
        partition_id: UUID,
        group: str,
        state: StateArguments,
        pushes: PushArguments,
        commit: CommitArguments,
    ) -> CycleRow:
        """Commit a cycle, once for each `cycle_id`; what doesn't happen in part."""
        arguments: Sequence[object] = (*state, *pushes, *commit)
        [row] = await self._pool.fetch(
            _CYCLE, self._tenant, cycle_id, query_id, partition_id, group, *arguments
        )
        return CycleRow(*row)
