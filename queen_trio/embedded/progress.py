"""Say now and then that something without a deadline still goes on."""

from __future__ import annotations

from typing import Final

import structlog
import trio

log = structlog.get_logger(__name__)

# Often enough to reassure, seldom enough for a recovery of minutes; in seconds.
PROGRESS_INTERVAL: Final = 5.0


class Progress:
    """Logs `event` every `PROGRESS_INTERVAL` of a wait that begins with the object's making."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._began = trio.current_time()
        self._next = self._began + PROGRESS_INTERVAL

    def elapsed(self) -> float:
        """Seconds since the wait began."""
        return trio.current_time() - self._began

    def due(self) -> bool:
        """Whether `report` is to be called now."""
        return trio.current_time() >= self._next

    def report(self, **details: object) -> None:
        """Log the event, how long it has lasted, and the details."""
        self._next = trio.current_time() + PROGRESS_INTERVAL
        log.info(self._event, for_seconds=round(self.elapsed()), **details)
