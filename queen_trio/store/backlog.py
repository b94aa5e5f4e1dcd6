"""What is waiting in the whole installation; see sql/functions/160_backlog.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from .connection import Statement

if TYPE_CHECKING:
    from .queries import Store

_LATEST_LAG: Final = Statement(
    "latest_lag",
    "SELECT queue_name, consumer_group, lag, time_lag_seconds, age_ms, pairs"
    " FROM queen.latest_lag_v1($1, $2)",
)
_MOST_DEAD_LETTERS: Final = Statement(
    "most_dead_letters",
    "SELECT queue_name, dead_letters, queues FROM queen.most_dead_letters_v1($1, $2)",
)


class GroupLag(NamedTuple):
    """What a group owes in a queue, in a sample of that age with so many pairs."""

    queue: str
    group: str
    messages: int
    seconds: float
    age_ms: int
    pairs: int


class DeadLetters(NamedTuple):
    """A queue's dead letters; `queues` counts all that have any."""

    queue: str
    messages: int
    queues: int


class BacklogStore:
    """Reads the backlog of one tenant; every method may raise what `Pool.fetch` raises."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def latest_lag(self, most: int) -> list[GroupLag]:
        """The groups furthest behind, of the newest sample; reads no log."""
        rows = await self._store.pool.fetch(_LATEST_LAG, self._store.tenant, most)
        return [GroupLag(*row) for row in rows]

    async def most_dead_letters(self, most: int) -> list[DeadLetters]:
        """The queues with most dead letters; reads an index from end to end."""
        rows = await self._store.pool.fetch(_MOST_DEAD_LETTERS, self._store.tenant, most)
        return [DeadLetters(*row) for row in rows]
