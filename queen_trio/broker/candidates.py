"""The hot-list at work: seeded from PostgreSQL, kept up by hints, deadlines and what others did."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog
import trio

from queen_trio.errors import DatabaseError

from .hotlist import MAX_ENTRIES, Hotlist, HotlistStatistics, Ring, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from queen_trio.model.pop import PopRequest
    from queen_trio.store.elapsed import Elapsed
    from queen_trio.store.queries import PopRow, Store

    from .wakeups import PopKey, Wakeups

log = structlog.get_logger(__name__)

# Everything is looked at anew so often, whatever hints came (spec 4.3, "reseed").
RESEED_SECONDS: Final = 300.0
# One look at what others wrote; past it the hints and the reseed have to do.
CHANGES_MOST: Final = 5_000
# Of one line, the deferred partitions that a probe asks about.
PROBE_MOST: Final = 256
# How long a pop waits for another's look at everything; many times what one takes. While the
# database is away it comes on top of the 15 s that the pop then waits by itself (spec 8.15).
SEEDING_SECONDS: Final = 3.0


class Candidates:
    """Names partitions for pops of whole queues; absent with QUEEN_HOTLIST=0."""

    def __init__(self, store: Store, wakeups: Wakeups, poll_seconds: float) -> None:
        """`poll_seconds`: how late a change may be seen of which no hint came."""
        self._store = store
        self._wakeups = wakeups
        self._poll_seconds = poll_seconds
        self._hotlist = Hotlist()
        self._deadline_moved = trio.Event()
        self._seedings: dict[Ring, trio.Event] = {}

    async def ring_for(
        self, request: PopRequest, waited: Elapsed, patience_seconds: float
    ) -> Ring | None:
        """The ring that serves a pop, seeded if need be; None: let the database look by itself.

        Raises what `Store.candidates` raises.
        """
        if request.queue is None or request.partition is not None:
            return None
        ring = self._hotlist.ring(request.queue, request.group, trio.current_time())
        if not ring.seeded:
            # A look at everything is dear: who comes while another pop is at it waits for it.
            with trio.move_on_after(min(patience_seconds, SEEDING_SECONDS)):
                while ring in self._seedings:
                    await self._seedings[ring].wait()
        if ring.seeded:
            return ring
        if ring in self._seedings or ring.oversized:  # it lasts, or has found too many
            return None
        with self._seeding(ring):
            names = await self._store.candidates(
                request.queue,
                request.group,
                request.mode.value,
                request.since,
                waited,
                MAX_ENTRIES,
                patience_seconds,
            )
        if len(names) > MAX_ENTRIES:
            ring.oversized = True
            return None
        ring.seed(names)
        return ring if ring.seeded else None

    @contextmanager
    def _seeding(self, ring: Ring) -> Iterator[None]:
        self._seedings[ring] = trio.Event()
        ring.begin_seed()
        try:
            yield
        finally:
            self._seedings.pop(ring).set()

    def may_lead(self, key: PopKey, partition: str) -> bool:
        """Whether a parked pop may ask about this partition before its messages are committed."""
        if key.partition is not None:
            return True
        ring = self._hotlist.find(key.queue or "", key.group)
        return ring is not None and ring.seeded and ring.may_ask(partition)

    def settle(self, ring: Ring, names: Sequence[str], rows: Sequence[PopRow]) -> None:
        """Apply the verdicts of a pop on the candidates it took; one that is gone is empty."""
        now = trio.current_time()
        verdicts = {row.partition_name: row for row in rows if row.verdict is not None}
        for name in names:
            row = verdicts.get(name)
            if row is None:
                ring.settle(name, Verdict.EMPTY)
            elif row.until_ms is None:
                ring.settle(name, Verdict(row.verdict))
            else:
                # A candidate that another pop has locked comes back a moment later, too.
                verdict = Verdict.TOOK if row.verdict == Verdict.TOOK.value else Verdict.LEASED
                ring.settle(name, verdict, now + row.until_ms / 1000)
        if self._hotlist.next_deadline <= now + self._poll_seconds:
            self._deadline_moved.set()

    def requeue(self, ring: Ring, names: Sequence[str]) -> None:
        """Take back candidates of which nothing was heard: the pop failed."""
        for name in names:
            ring.settle(name, Verdict.REQUEUE)

    def pass_on(self, ring: Ring) -> None:
        """Wake one that waits: who looked while a candidate was in flight has not seen it."""
        self._wakeups.wake(ring.queue, ring.group)

    # -- news ----------------------------------------------------------------------------------

    def mark(self, queue: str, partition: str) -> None:
        """New messages; for every group."""
        self._hotlist.mark(queue, partition)

    def promote(self, queue: str, partition: str, group: str) -> None:
        """A lease of the group has ended early."""
        self._hotlist.promote(queue, partition, group)

    def release(self, queue: str, partition: str, group: str) -> None:
        """A lease of the group has ended, and left nothing.

        Whoever looked because of a push meanwhile has found the lease: somebody looks again.
        """
        ring = self._hotlist.release(queue, partition, group)
        if ring is not None:
            self.pass_on(ring)

    def unseed(self, queue: str) -> None:
        """Cursors or options of the queue have changed."""
        self._hotlist.unseed(queue)

    def drop(self, queue: str) -> None:
        """The queue is gone."""
        self._hotlist.drop(queue)

    def deferred(self, key: PopKey) -> list[str] | None:
        """The partitions that a parked pop's probe should ask about; None: the whole queue."""
        if key.queue is None or key.partition is not None:
            return None
        ring = self._hotlist.find(key.queue, key.group)
        if ring is None or not ring.seeded:
            return None
        return ring.deferred[:PROBE_MOST]

    def statistics(self) -> HotlistStatistics:
        return self._hotlist.statistics()

    # -- time ----------------------------------------------------------------------------------

    async def serve(self) -> None:
        """End deferrals on time and look for what no hint told, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_deadlines)
            nursery.start_soon(self._serve_changes)

    async def _serve_deadlines(self) -> None:
        while True:
            self._deadline_moved = trio.Event()
            # A deferral that ends before the next poll says so; later ones are seen by then.
            next_poll = trio.current_time() + self._poll_seconds
            with trio.move_on_at(min(self._hotlist.next_deadline, next_poll)):
                await self._deadline_moved.wait()
            for ring in self._hotlist.advance(trio.current_time()):
                self.pass_on(ring)
            await trio.lowlevel.checkpoint()

    async def _serve_changes(self) -> None:
        reseed_at = trio.current_time() + RESEED_SECONDS
        seen_at = trio.current_time()
        while True:
            await trio.sleep(self._poll_seconds)
            now = trio.current_time()
            if now >= reseed_at:
                reseed_at = now + RESEED_SECONDS
                self._hotlist.sweep(now)
                self._hotlist.unseed()
                self._wakeups.wake_lines()
            if self._hotlist.is_empty:
                seen_at = now
                continue
            # What a failed pop gave back: at once, pops would spin while the database is away.
            for ring in self._hotlist.with_ready():
                self.pass_on(ring)
            try:
                changes = await self._store.changes(now - seen_at, CHANGES_MOST)
            except DatabaseError as error:  # the next look reaches back as far
                log.debug("changes not read", error=str(error))
                continue
            seen_at = now
            for queue, partition in changes:
                if partition is None:
                    self._hotlist.unseed(queue)
                    self._wakeups.notify_queue(queue)
                else:
                    for ring in self._hotlist.mark(queue, partition):
                        self.pass_on(ring)
