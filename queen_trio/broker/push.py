"""Push: store messages, sharing commits with every other request of the moment (spec 1, 2)."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.store.queries import VERIFIED_EVERYWHERE, PushRow, Store

from .dedup import Verified
from .encryption import EncryptionKeyMissing
from .lanes import Lanes
from .originals import original_ids
from .segment import Draft, Drafted, Key, Segment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from queen_trio.model.ids import Uuid7
    from queen_trio.model.message import PushItem, PushResult
    from queen_trio.store.pool import Sent

    from .buffer import PushBuffer
    from .dedup import DedupStatistics
    from .encryption import Encryption
    from .history import History
    from .maintenance import Maintenance

log = structlog.get_logger(__name__)

# Bundles in flight at most: one as a rule, the others overtake it where it lasts (lanes.py).
PUSH_LANES: Final = 3
# What one call may carry; bounds how long it holds its partition locks.
BUNDLE_MAX_SEGMENTS: Final = 128
BUNDLE_MAX_BYTES: Final = 16 * 1024 * 1024
# Ids that were made here occur nowhere.
_GENERATED: Final = Verified(VERIFIED_EVERYWHERE, None, None)

_encode = msgspec.json.encode


class PushService:
    """Accepts pushes and flushes them in bundles; run it with `open_push_service`.

    Per partition one segment is in flight at most, so that order of arrival is order of offsets;
    what arrives meanwhile accumulates behind it.
    """

    def __init__(
        self,
        store: Store,
        ids: Uuid7,
        history: History,
        encryption: Encryption,
        maintenance: Maintenance,
        buffer: PushBuffer,
        on_sent: Callable[[Sequence[Key], Sent], None],
        on_commit: Callable[[Sequence[Key]], None],
    ) -> None:
        """`on_commit` is told which partitions have new messages, after each commit.

        `on_sent` is told which may soon have some, when a bundle is on its way.
        """
        self._store = store
        self._ids = ids
        self._history = history
        self._encryption = encryption
        self._maintenance = maintenance
        self._buffer = buffer
        self._away = False  # the last commit failed for the database's sake
        self._on_sent = on_sent
        self._on_commit = on_commit
        self._ready: deque[Segment] = deque()
        # Open segments of each partition that has any, oldest first. The oldest of a partition is
        # in `_ready` or in flight; the others wait behind it.
        self._lines: dict[Key, deque[Segment]] = {}
        self._lanes = Lanes(PUSH_LANES, self._take_bundle, self._flush)

    async def push(
        self, items: Sequence[PushItem], *, producer_sub: str | None = None
    ) -> list[PushResult]:
        """Store valid `items` and return one result for each, in order.

        The items of one (queue, partition) commit together, or go to the spool together while the
        database is away or in maintenance. Once this has started they will be stored even if the
        caller is cancelled: then nobody waits for the answer.
        """
        if not items:
            return []
        drafted = Drafted.from_items(items, self._ids, producer_sub)
        for key, draft in drafted.drafts.items():
            self._submit(key, draft)
        await drafted.pending.done.wait()
        return drafted.finish()

    def dedup_statistics(self) -> DedupStatistics:
        """Return what the dedup filter holds."""
        return self._history.statistics()

    def close(self) -> None:
        """Let `serve` end when everything accepted has been flushed."""
        self._lanes.close()

    async def serve(self) -> None:
        """Flush until `close`."""
        await self._lanes.serve()

    # -- accumulating --------------------------------------------------------------------------

    def _submit(self, key: Key, draft: Draft) -> None:
        line = self._lines.get(key)
        if line is None:
            segment = Segment(key, draft)
            self._lines[key] = deque((segment,))
            self._ready.append(segment)
            self._lanes.wake()
        elif not line[-1].add_nowait(draft):
            line.append(Segment(key, draft))

    def _take_bundle(self) -> list[Segment] | None:
        if not self._ready:
            return None
        bundle: list[Segment] = []
        size = 0
        while (
            self._ready
            and len(bundle) < BUNDLE_MAX_SEGMENTS
            and (not bundle or size + self._ready[0].size <= BUNDLE_MAX_BYTES)
        ):
            segment = self._ready.popleft()
            segment.sealed = True
            size += segment.size
            bundle.append(segment)
        if self._ready:
            self._lanes.wake()
        return bundle

    def _release(self, bundle: Sequence[Segment]) -> None:
        """The next segment of each partition may go."""
        for segment in bundle:
            line = self._lines[segment.key]
            line.popleft()
            if line:
                self._ready.append(line[0])
            else:
                del self._lines[segment.key]
        if self._ready:
            self._lanes.wake()

    # -- flushing ------------------------------------------------------------------------------

    async def _flush(self, bundle: list[Segment]) -> None:
        try:
            await self._commit(bundle)
        finally:
            _fail(bundle, "the broker is stopping")  # whatever a cancellation left unanswered
            self._release(bundle)

    async def _commit(self, bundle: list[Segment]) -> None:
        """Commit the segments, stripping duplicates until the rest is clean."""
        if self._maintenance.push:
            await self._buffer.take(bundle, "the queue is in maintenance")
            return
        todo = bundle
        while todo:
            try:
                rows = await self._encryption.agree(
                    [segment.key[0] for segment in todo], partial(self._send, todo)
                )
                todo = await self._sort_out(todo, rows)
            except DatabaseUnavailable as error:
                if not self._away:  # once per outage
                    log.warning("pushes go to the spool", error=str(error))
                self._away = True
                await self._buffer.take(_undecided(todo), "the database is unavailable")
                return
            except (DatabaseError, EncryptionKeyMissing) as error:
                todo = _undecided(todo)
                if len(todo) == 1:
                    log.warning("push refused", queue=todo[0].key[0], error=str(error))
                    _fail(todo, f"refused: {error}")
                    return
                # One bad segment must not fail its neighbours (spec 8.9).
                for segment in todo:
                    await self._commit([segment])
                return

    async def _send(self, todo: list[Segment]) -> list[PushRow]:
        counts: list[int] = []
        raw_bytes: list[int] = []
        hashes: list[bytes] = []
        blobs: list[bytes] = []
        sealed: list[bool] = []
        verified: list[Verified] = []
        for segment in todo:
            records = [record for draft in segment.drafts for record in draft.records]
            encoded = self._encryption.encode(segment.key[0], records)
            counts.append(len(records))
            raw_bytes.append(encoded.size)
            blobs.append(encoded.blob)
            sealed.append(encoded.sealed)
            if encoded.sealed:  # 7 µs a message: let others run between segments
                await trio.lowlevel.checkpoint()
            hashes.append(b"".join(segment.hashes()))
            verified.append(
                self._history.verify(segment.key, segment.hashes())
                if segment.supplied
                else _GENERATED
            )
        supplied = any(segment.supplied for segment in todo)
        return await self._store.push(
            [segment.key[0] for segment in todo],
            [segment.key[1] for segment in todo],
            counts,
            raw_bytes,
            hashes,
            blobs,
            [known.upto for known in verified],
            [known.partition_id for known in verified] if supplied else None,
            [known.since for known in verified] if supplied else None,
            sealed if any(sealed) else None,
            on_sent=partial(self._on_sent, [segment.key for segment in todo]),
        )

    async def _sort_out(self, todo: list[Segment], rows: list[PushRow]) -> list[Segment]:
        """Settle what was committed and return what has to be sent again without duplicates."""
        committed: list[tuple[Segment, PushRow]] = []
        dirty: list[tuple[Segment, PushRow]] = []
        for row in rows:
            segment = todo[row.ord - 1]
            if row.base_offset is None:
                dirty.append((segment, row))
                continue
            committed.append((segment, row))
            for draft in segment.drafts:
                draft.settle()
        if committed:
            if self._away:
                log.info("pushes are committed again")
            self._away = False
            self._on_commit([segment.key for segment, _ in committed])
            for segment, row in committed:
                await self._history.learn(
                    segment.key, row, segment.hashes(), supplied=bool(segment.supplied)
                )
        for segment, row in dirty:
            segment.drop_duplicates(
                await original_ids(
                    self._store, row.partition_id, row.duplicate_at or [], row.duplicate_of or []
                )
            )
        return [segment for segment, _ in dirty if segment.drafts]


def _undecided(todo: Sequence[Segment]) -> list[Segment]:
    """The segments that had not been committed when the attempt failed."""
    return [segment for segment in todo if any(not draft.settled for draft in segment.drafts)]


def _fail(todo: Sequence[Segment], error: str) -> None:
    for segment in todo:
        for draft in segment.drafts:
            if not draft.settled:
                draft.fail(error)


@asynccontextmanager
async def open_push_service(
    store: Store,
    ids: Uuid7,
    history: History,
    encryption: Encryption,
    maintenance: Maintenance,
    buffer: PushBuffer,
    on_sent: Callable[[Sequence[Key], Sent], None],
    on_commit: Callable[[Sequence[Key]], None],
) -> AsyncIterator[PushService]:
    """Run a PushService; leaving flushes what was accepted."""
    service = PushService(store, ids, history, encryption, maintenance, buffer, on_sent, on_commit)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.serve)  # noqa: ASYNC113 - until it runs, work queues up
        try:
            yield service
        finally:
            service.close()
