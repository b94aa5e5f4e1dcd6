"""What charts and traces show: samples of lag, and the end of what is too old to be looked at."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from attrs import define

from queen_trio.store.advisory import AdvisoryLock, try_advisory_lock

if TYPE_CHECKING:
    from queen_trio.store.pool import Pool
    from queen_trio.store.resources import ResourceStore
    from queen_trio.store.traces import TraceStore

# How long samples and traces are kept: a month's charts.
KEEP: Final = timedelta(days=30)
# Finding what is too old may read an index from end to end: not with every sample.
PURGE_SECONDS: Final = 600.0
# One step: how many rows of a table one transaction deletes.
STEP_ROWS: Final = 10_000


@define(eq=False)
class History:
    """Two jobs of one replica at a time, whoever holds their lock; both may run twice at once."""

    pool: Pool
    resources: ResourceStore
    traces: TraceStore

    async def sample(self) -> None:
        """Write down what every group owes now."""
        async with try_advisory_lock(self.pool, AdvisoryLock.STATS) as held:
            if held is not None:
                await self.resources.record_lag()

    async def purge(self) -> None:
        """Delete samples and traces older than `KEEP`."""
        async with try_advisory_lock(self.pool, AdvisoryLock.STATS) as held:
            if held is None:
                return
            before = datetime.now(UTC) - KEEP
            while await self.resources.purge_stats(before, STEP_ROWS):
                pass
            while await self.traces.purge(before, STEP_ROWS) == STEP_ROWS:
                pass
