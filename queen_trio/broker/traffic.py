"""What this broker has done: counted where the database confirms it, written down by `flush`.

The counts are for status pages and analytics. They live in process until the next flush; a broker
that is killed takes up to one interval of them along.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from queen_trio.errors import DatabaseError
from queen_trio.metrics import ITEMS, SECONDS, Histogram
from queen_trio.store.queries import Store
from queen_trio.store.resources import ResourceStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from queen_trio.store.queries import AckRow, PopRow, PushRow, TransactionRow

    from .broker import Broker

# The letters of sql/functions/040_ack.sql by the counter that they belong to.
_VERDICTS: Final = {
    "c": "completed",
    "f": "failed",
    "r": "failed",
    "z": "failed",
    "d": "dead_lettered",
}


class Traffic:
    """Counters since the last `take`; the names are columns of queen.worker_metrics."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.pushed: Counter[str] = Counter()
        self.popped: Counter[str] = Counter()
        self.push_items = Histogram(ITEMS)
        self.ack_items = Histogram(ITEMS)
        self._taken: Counter[str] = Counter()
        self._cpu_seconds = time.process_time()

    def count_pushed(self, queues: Sequence[str], counts: Sequence[int]) -> None:
        """Count committed segments: their queues and how many messages each has."""
        self.counters["pushed"] += sum(counts)
        for queue, number in zip(queues, counts, strict=True):
            self.pushed[queue] += number

    def count_popped(self, rows: Sequence[PopRow]) -> None:
        """Count the messages of one pop."""
        self.counters["pop_calls"] += 1
        self.counters["empty_pops"] += not rows
        partition = None
        taken = 0
        for row in rows:
            if row.partition_id != partition:
                partition = row.partition_id
                # Retention may have passed the cursor: the claim starts with its first segment.
                taken = max(row.committed, row.base_offset - 1)
            self.counters["popped"] += row.batch_end - taken
            self.popped[row.queue_name] += row.batch_end - taken
            taken = row.batch_end

    def count_verdicts(self, verdicts: Iterable[str | None]) -> None:
        """Count what became of acknowledged messages."""
        for letters in verdicts:
            if letters:
                for letter, counter in _VERDICTS.items():
                    self.counters[counter] += letters.count(letter)

    def take(self) -> tuple[Counter[str], Counter[str], Counter[str]]:
        """Return all counts and start anew."""
        cpu = time.process_time()
        self.counters["cpu_ms"] += round((cpu - self._cpu_seconds) * 1000)
        self._cpu_seconds = cpu
        taken = self.counters, self.pushed, self.popped
        self._taken.update(self.counters)
        self.counters, self.pushed, self.popped = Counter(), Counter(), Counter()
        return taken

    def give_back(self, taken: tuple[Counter[str], Counter[str], Counter[str]]) -> None:
        """Add counts that could not be written to those since."""
        counters, pushed, popped = taken
        self._taken.subtract(counters)
        self.counters.update(counters)
        self.pushed.update(pushed)
        self.popped.update(popped)

    def totals(self) -> Counter[str]:
        """Return the counters since the boot."""
        return self._taken + self.counters


class Requests:
    """What the HTTP side has answered: how long that took, and with which status."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, Histogram] = defaultdict(partial(Histogram, SECONDS))
        self.responses: Counter[int] = Counter()

    def answered(self, operation: str, seconds: float, status: int) -> None:
        """Count one answer."""
        self.seconds[operation].observe(seconds)
        self.responses[status] += 1


class CountingStore(Store):
    """A store that counts into a `Traffic` what its data-plane calls have committed."""

    def __init__(self, store: Store, traffic: Traffic) -> None:
        super().__init__(store.pool, store.tenant)
        self._traffic = traffic

    async def push(self, *args: Any, **more: Any) -> list[PushRow]:
        self._traffic.counters["push_calls"] += 1
        try:
            rows = await super().push(*args, **more)
        except DatabaseError:
            self._traffic.counters["database_errors"] += 1
            raise
        self._traffic.push_items.observe(sum(args[2]))
        written = [row.ord - 1 for row in rows if row.base_offset is not None]
        queues, counts = args[0], args[2]
        self._traffic.count_pushed([queues[i] for i in written], [counts[i] for i in written])
        return rows

    async def pop(self, *args: Any, **more: Any) -> list[PopRow]:
        try:
            rows = await super().pop(*args, **more)
        except DatabaseError:
            self._traffic.counters["database_errors"] += 1
            raise
        self._traffic.count_popped([row for row in rows if row.verdict is None])
        return rows

    async def ack(self, *args: Any, **more: Any) -> list[AckRow]:
        self._traffic.counters["ack_calls"] += 1
        try:
            rows = await super().ack(*args, **more)
        except DatabaseError:
            self._traffic.counters["database_errors"] += 1
            raise
        self._traffic.ack_items.observe(sum(len(row.verdicts or "") for row in rows))
        self._traffic.count_verdicts(row.verdicts for row in rows)
        return rows

    async def transaction(self, *args: Any, **more: Any) -> TransactionRow:
        try:
            row = await super().transaction(*args, **more)
        except DatabaseError:
            self._traffic.counters["database_errors"] += 1
            raise
        if row.committed:
            self._traffic.counters["push_calls"] += 1
            self._traffic.counters["ack_calls"] += 1
            self._traffic.count_pushed(args[0], args[2])
            acks = msgspec.json.decode(row.acks)
            self._traffic.count_verdicts(ack["verdicts"] for ack in acks)
        return row


async def flush(broker: Broker, *, within_seconds: float | None = None) -> None:
    """Add this broker's counts to queen.worker_metrics and queen.stats; for METRICS_FLUSH_MS.

    What can't be written is kept for the next call. `within_seconds`: see
    `ResourceStore.record_traffic`. Raises `DatabaseError`.
    """
    taken = broker.traffic.take()
    counters, pushed, popped = taken
    pool = broker.store.pool.statistics()
    gauges = {
        "rss_bytes": _resident_bytes(),
        "parked_pops": broker.wakeups.statistics().parked,
        "pool_open": pool.idle + pool.in_use,
        "pool_in_use": pool.in_use,
        "pool_waiting": pool.waiting,
    }
    row = dict(counters) | gauges
    queues = sorted({*pushed, *popped})
    written = False
    try:
        await ResourceStore(broker.store).record_traffic(
            broker.config.sync.server_id,
            msgspec.json.encode(row).decode(),
            queues,
            [pushed[queue] for queue in queues],
            [popped[queue] for queue in queues],
            within_seconds=within_seconds,
        )
        written = True
    finally:
        if not written:
            broker.traffic.give_back(taken)


def _resident_bytes() -> int:
    """The memory that this process holds now; its peak where there is no procfs."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
