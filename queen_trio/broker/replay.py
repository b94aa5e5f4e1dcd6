"""The replay of spooled pushes: each lands once, whatever became of its first commit (spec 8.17).

A spooled message has its id since its push. An earlier attempt that was committed is found by its
transactionId's hash, back to the time in that id, and recognised by the id itself. A message that
retention has removed since can't be: then it is delivered once more rather than lost.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from attrs import define, field

from queen_trio.model.encryption import Undecipherable
from queen_trio.model.ids import created_at
from queen_trio.model.message import hash_of

from .dedup import BEGINNING_OF_TIME, Verified
from .originals import original_ids
from .push import BUNDLE_MAX_SEGMENTS
from .segment import SEGMENT_MAX_BYTES, SEGMENT_MAX_MESSAGES, Key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from queen_trio.spool import SpoolRecord
    from queen_trio.store.queries import Store
    from queen_trio.store.replay import ReplayRow, ReplayStore

    from .encryption import Encryption
    from .history import History
    from .traffic import Traffic

# How far the clocks of brokers and PostgreSQL may be apart. The look-up costs as much as that of a
# deduplication window of this length, the default one.
CLOCK_SKEW: Final = timedelta(hours=1)
_FOREVER: Final = datetime.max.replace(tzinfo=UTC)


class _Identified(msgspec.Struct):
    id: str
    transactionId: str


_decode = msgspec.json.Decoder(_Identified).decode


@define(eq=False)
class _Replayed:
    """Messages for one partition, aligned with their hashes and ids."""

    key: Key
    since: datetime = _FOREVER
    records: list[bytes] = field(factory=list)
    hashes: list[bytes] = field(factory=list)
    ids: list[str] = field(factory=list)
    size: int = 0
    examined: Verified | None = None  # what all was compared with by id

    def add_nowait(self, messages: Sequence[bytes]) -> bool:
        """Take the messages of one record in, or say no: full, or a transactionId is here."""
        size = sum(map(len, messages))
        try:
            known = [_decode(message) for message in messages]
            since = min(created_at(message.id) for message in known) - CLOCK_SKEW
        except ValueError:
            raise Undecipherable("the spooled record is damaged") from None
        hashes = [hash_of(message.transactionId) for message in known]
        if self.records and (
            len(self.records) + len(messages) > SEGMENT_MAX_MESSAGES
            or self.size + size > SEGMENT_MAX_BYTES
            or not set(hashes).isdisjoint(self.hashes)
        ):
            return False
        self.records += messages
        self.hashes += hashes
        self.ids += [message.id for message in known]
        self.size += size
        self.since = min(self.since, since)
        return True

    def drop(self, positions: set[int]) -> None:
        """Take out the messages at these positions, which are in the log."""
        kept = [k for k in range(len(self.records)) if k not in positions]
        self.records = [self.records[k] for k in kept]
        self.hashes = [self.hashes[k] for k in kept]
        self.ids = [self.ids[k] for k in kept]


class ReplayService:
    """Commits spooled records; not fused with pushes, which are others'."""

    def __init__(
        self,
        store: Store,
        replays: ReplayStore,
        history: History,
        encryption: Encryption,
        traffic: Traffic,
        on_commit: Callable[[Sequence[Key]], None],
    ) -> None:
        self._store = store
        self._replays = replays
        self._history = history
        self._encryption = encryption
        self._traffic = traffic
        self._on_commit = on_commit

    async def replay(self, records: Sequence[SpoolRecord]) -> int:
        """Commit as many of the first records as go together; returns how many, at least one.

        Raises `DatabaseError`, `EncryptionKeyMissing` and `Undecipherable`; what was committed by
        then is recognised the next time.
        """
        todo, count = self._gather(records)
        while todo:
            rows = await self._encryption.agree(
                [segment.key[0] for segment in todo], partial(self._send, todo)
            )
            todo = await self._sort_out(todo, rows)
        return count

    def _gather(self, records: Sequence[SpoolRecord]) -> tuple[list[_Replayed], int]:
        segments: dict[Key, _Replayed] = {}
        for count, record in enumerate(records):
            key = (record.queue, record.partition)
            if len(segments) == BUNDLE_MAX_SEGMENTS and key not in segments:
                return list(segments.values()), count
            segment = segments.setdefault(key, _Replayed(key))
            if not segment.add_nowait(self._encryption.open_from_disk(record.messages)):
                return list(segments.values()), count
        return list(segments.values()), len(records)

    async def _send(self, todo: list[_Replayed]) -> list[ReplayRow]:
        encoded = [self._encryption.encode(segment.key[0], segment.records) for segment in todo]
        verified = [
            segment.examined or self._history.verify(segment.key, segment.hashes)
            for segment in todo
        ]
        return await self._replays.replay(
            [segment.key[0] for segment in todo],
            [segment.key[1] for segment in todo],
            [len(segment.records) for segment in todo],
            [one.size for one in encoded],
            [b"".join(segment.hashes) for segment in todo],
            [one.blob for one in encoded],
            [segment.since for segment in todo],
            [known.upto for known in verified],
            [known.partition_id for known in verified],
            [known.since for known in verified],
            [one.sealed for one in encoded],
        )

    async def _sort_out(self, todo: list[_Replayed], rows: list[ReplayRow]) -> list[_Replayed]:
        """Tell of what was committed; return what has to be sent again without what is there."""
        committed = [(todo[row.ord - 1], row) for row in rows if row.base_offset is not None]
        if committed:
            self._traffic.count_pushed(
                [segment.key[0] for segment, _ in committed],
                [len(segment.records) for segment, _ in committed],
            )
            self._on_commit([segment.key for segment, _ in committed])
        for segment, row in committed:
            await self._history.learn(segment.key, row, segment.hashes, supplied=True)
        again: list[_Replayed] = []
        for row in rows:
            if row.base_offset is None:
                segment = todo[row.ord - 1]
                segment.drop(await self._known(segment, row))
                assert row.examined is not None  # noqa: S101 - it was not committed
                segment.examined = Verified(row.examined, row.partition_id, BEGINNING_OF_TIME)
                again.append(segment)
        return [segment for segment in again if segment.records]

    async def _known(self, segment: _Replayed, row: ReplayRow) -> set[int]:
        """Positions of the messages that are in the log, or repeat one inside the window."""
        positions, offsets = row.found_at or [], row.found_of or []
        ids = await original_ids(self._store, row.partition_id, range(len(offsets)), offsets)
        return {
            position
            for k, (position, inside) in enumerate(
                zip(positions, row.found_inside or [], strict=True)
            )
            if inside or ids[k] == segment.ids[position]
        }
