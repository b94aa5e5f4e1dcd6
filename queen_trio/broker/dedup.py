"""What this broker has seen of each partition's transactionIds, to narrow the dedup probe.

Dedup is decided in SQL, under the partition's lock; without help it compares every push with the
partition's whole window. This filter lets most pushes skip that: "none of these ids occurs at or
below offset V". It may err only towards asking too much, never too little, so Bloom filters serve:
a false hit costs a wider probe. Other brokers' pushes lie above V until their hashes are read.

Theory of operation. A partition's knowledge is a chain of chunks, each a Bloom filter over a range
of offsets, oldest first; together they hold *every* hash of the messages created after `since` and
at or below `upto`. A hit in a chunk narrows V to the offset below that chunk: the retry of a recent
push is probed in the newest chunk only. Memory is bounded over all partitions: past the budget the
oldest chunk goes, and its partition's `since` moves up; where a queue's window reaches back beyond
`since`, SQL ignores V (p_verified_since).
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from attrs import define, field, frozen
from rbloom import Bloom

from queen_trio.store.queries import NOTHING_VERIFIED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from queen_trio.store.queries import HistoryRow

    from .segment import Key

HASH_BYTES: Final = 16
# 3.6 bytes a message at one false hit in a million: 32 MiB hold nine million messages.
BUDGET_BYTES: Final = 32 * 1024 * 1024
FALSE_HITS: Final = 1e-6
# Chunks grow with their partition: a small one costs 3.7 kB, a busy one has few to look through.
FIRST_CHUNK_MESSAGES: Final = 1_024
LAST_CHUNK_MESSAGES: Final = 262_144
CHUNK_GROWTH: Final = 4
# Below it a whole probe costs less than reading the history would.
WORTHWHILE_MESSAGES: Final = 256
# When others have pushed this much since `upto`, reading it beats probing it with every push.
CATCH_UP_MESSAGES: Final = 1_024

BEGINNING_OF_TIME: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Verified(NamedTuple):
    """Arguments of push_v1: no hash occurs at or below `upto` of that partition, since then."""

    upto: int
    partition_id: UUID | None
    since: datetime | None


UNKNOWN: Final = Verified(NOTHING_VERIFIED, None, None)


@define(eq=False)
class _Chunk:
    """The hashes of offsets above `below`, up to the next chunk's `below`."""

    known: _Known
    below: int
    capacity: int
    bloom: Bloom
    count: int = 0
    newest: datetime = BEGINNING_OF_TIME

    @property
    def bytes(self) -> int:
        return self.bloom.size_in_bits // 8


@define(eq=False)
class _Known:
    """One partition's chain of chunks."""

    key: Key
    partition_id: UUID
    since: datetime
    upto: int
    chunks: deque[_Chunk] = field(factory=deque)


@frozen
class DedupStatistics:
    """Partitions known, and the memory that it takes."""

    partitions: int
    bytes: int


class DedupFilter:
    """The chains of all partitions within one memory budget; no I/O, no clock."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._known: dict[Key, _Known] = {}
        self._chunks: deque[_Chunk] = deque()  # of all partitions, in the order of their making

    def verify(self, key: Key, hashes: Sequence[bytes]) -> Verified:
        """Say below which offset none of these hashes occurs."""
        known = self._known.get(key)
        if known is None:
            return UNKNOWN
        upto = known.upto
        for chunk in known.chunks:
            if any(map(chunk.bloom.__contains__, hashes)):
                upto = chunk.below
                break
        return Verified(upto, known.partition_id, known.since)

    def learn(
        self,
        key: Key,
        partition_id: UUID,
        base_offset: int,
        created_at: datetime,
        hashes: Sequence[bytes],
        *,
        supplied: bool,
    ) -> int | None:
        """Take in a segment that was just committed; `supplied`: clients chose some of its ids.

        Returns the offset after which the partition's history should be read and given to `load`;
        None when there is no need.
        """
        known = self._known.get(key)
        if known is not None and known.partition_id != partition_id:
            self.forget(key)  # deleted and made anew
            known = None
        if known is None:
            worthwhile = supplied and base_offset >= WORTHWHILE_MESSAGES
            return NOTHING_VERIFIED if worthwhile else None
        if base_offset == known.upto + 1:
            self._add(known, base_offset, created_at, hashes)
            return None
        behind = base_offset + len(hashes) - 1 - known.upto
        return known.upto if behind >= CATCH_UP_MESSAGES else None

    def load(
        self, key: Key, partition_id: UUID, after: int, rows: Sequence[HistoryRow]
    ) -> int | None:
        """Take in history rows, which follow each other from the offset `after`.

        Returns where to read on; None at the end of the history, or when what is known has changed
        while they were read, so that they don't follow it any more.
        """
        known = self._known.get(key)
        reached = NOTHING_VERIFIED if known is None else known.upto
        if not rows or reached != after:
            return None
        if known is not None and known.partition_id != partition_id:
            return None
        if known is None:
            known = _Known(key, partition_id, rows[0].covered_since, rows[0].base_offset - 1)
            self._known[key] = known
        for row in rows:
            self._add(known, row.base_offset, row.created_at, cut(row.hashes))
            if key not in self._known:
                return None  # too large for the budget by itself
        return known.upto

    def forget(self, key: Key) -> None:
        """Drop what is known of a partition."""
        known = self._known.pop(key, None)
        if known is not None:
            known.upto = NOTHING_VERIFIED
            known.chunks.clear()
            self._chunks = deque(chunk for chunk in self._chunks if chunk.known is not known)
            self._bytes = sum(chunk.bytes for chunk in self._chunks)

    def statistics(self) -> DedupStatistics:
        return DedupStatistics(len(self._known), self._bytes)

    def _add(
        self, known: _Known, base_offset: int, created_at: datetime, hashes: Sequence[bytes]
    ) -> None:
        chunk = known.chunks[-1] if known.chunks else None
        if chunk is None or chunk.count + len(hashes) > chunk.capacity:
            capacity = FIRST_CHUNK_MESSAGES if chunk is None else chunk.capacity * CHUNK_GROWTH
            capacity = max(min(capacity, LAST_CHUNK_MESSAGES), len(hashes))
            chunk = _Chunk(known, base_offset - 1, capacity, Bloom(capacity, FALSE_HITS))
            known.chunks.append(chunk)
            self._chunks.append(chunk)
            self._bytes += chunk.bytes
        chunk.bloom.update(hashes)
        chunk.count += len(hashes)
        chunk.newest = created_at
        known.upto = base_offset + len(hashes) - 1
        while self._bytes > self._budget_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        chunk = self._chunks.popleft()
        self._bytes -= chunk.bytes
        known = chunk.known
        known.chunks.popleft()
        known.since = chunk.newest
        if not known.chunks:
            del self._known[known.key]


def cut(hashes: bytes) -> list[bytes]:
    """Cut a sidecar row into its hashes."""
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
