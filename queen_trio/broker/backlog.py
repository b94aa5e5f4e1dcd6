"""The backlog that metrics show: kept in memory by two jobs, so that a scrape asks no database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from queen_trio.store.backlog import BacklogStore, DeadLetters, GroupLag

# Bounds a scrape, which holds up the event loop (6 µs a series); what is most is looked for most.
MOST_SERIES: Final = 200


@frozen
class BacklogStatistics:
    """As of the last reads; `age_seconds` is that of the lags, None before there is a sample."""

    lags: Sequence[GroupLag]
    lags_omitted: int
    age_seconds: float | None
    dead_letters: Sequence[DeadLetters]
    dead_letters_omitted: int


class Backlog:
    """Remembers the last sample; `read_lags` and `read_dead_letters` are iterations of jobs."""

    def __init__(self, store: BacklogStore) -> None:
        self._store = store
        self._lags: list[GroupLag] = []
        self._dead_letters: list[DeadLetters] = []
        self._read_at = 0.0

    async def read_lags(self) -> None:
        """Read what the reconciler has sampled, on whichever broker; raises `DatabaseError`."""
        self._lags = await self._store.latest_lag(MOST_SERIES)
        self._read_at = trio.current_time()

    async def read_dead_letters(self) -> None:
        """Count dead letters; raises `DatabaseError`."""
        self._dead_letters = await self._store.most_dead_letters(MOST_SERIES)

    def statistics(self) -> BacklogStatistics:
        """Return what was read last."""
        lags, letters = self._lags, self._dead_letters
        age = None
        if lags:
            age = lags[0].age_ms / 1000 + trio.current_time() - self._read_at
        return BacklogStatistics(
            lags,
            lags[0].pairs - len(lags) if lags else 0,
            age,
            letters,
            letters[0].queues - len(letters) if letters else 0,
        )
