"""One log line with this broker's rates, at the cadence of QUEEN_LOG_RATES_MS."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import define, field

if TYPE_CHECKING:
    from queen_trio.broker import Broker

log = structlog.get_logger(__name__)

# Counters of broker.traffic, in messages.
COUNTED: Final = ("pushed", "popped", "completed", "failed", "dead_lettered")


@define(eq=False)
class Rates:
    """The job; it remembers what it has told."""

    broker: Broker
    _told: Counter[str] = field(factory=Counter)
    _told_at: float = field(factory=trio.current_time)

    async def run(self) -> None:
        """Log messages per second since the last call; a broker that did nothing stays silent."""
        await trio.lowlevel.checkpoint()
        totals, now = self.broker.traffic.totals(), trio.current_time()
        seconds = max(now - self._told_at, 0.001)
        rates = {name: round((totals[name] - self._told[name]) / seconds, 1) for name in COUNTED}
        self._told, self._told_at = totals, now
        if any(rates.values()):
            log.info("rates", **rates, parked=self.broker.wakeups.statistics().parked)
