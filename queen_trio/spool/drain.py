"""The replay: oldest record first, in order, and what to do with one that is refused for good."""

from __future__ import annotations

from traceback import format_exception_only
from typing import TYPE_CHECKING, Final

import structlog
import trio

from queen_trio.errors import DatabaseUnavailable, QueenError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from .records import SpoolRecord
    from .writer import Spool

log = structlog.get_logger(__name__)

# How often a record is refused for good before it is set aside (spec 4).
ATTEMPTS: Final = 5
# Between attempts while the database is away: twice as long each time, up to the second.
BACKOFF_FIRST_SECONDS: Final = 0.05
BACKOFF_MAX_SECONDS: Final = 1.0


class Drain:
    """Replays one spool; `run` is an iteration of a job."""

    def __init__(
        self,
        spool: Spool,
        replay: Callable[[Sequence[SpoolRecord]], Awaitable[int]],
        is_paused: Callable[[], bool],
        max_batch: int,
    ) -> None:
        """`replay` commits records in their order and returns how many of the first ones it has.

        It raises `DatabaseUnavailable` for what may succeed later, another `QueenError` for what
        won't; then none of them is committed, or none that it won't recognise. Whatever else it
        raises is a fault of ours, and may be one that this record alone brings out.
        """
        self._spool = spool
        self._replay = replay
        self._is_paused = is_paused
        self._max_batch = max_batch
        self._refusals = 0  # of the oldest record, in a row
        self._replayed = 0  # messages, since the spool was empty
        self._backoff = 0.0
        self._not_before = 0.0

    async def run(self) -> None:
        """Replay until the spool is empty, paused, or the database can't.

        Raises OSError, and what `replay` shouldn't have raised: who runs jobs logs it, and waits
        longer and longer before the next of the attempts.
        """
        if trio.current_time() < self._not_before:
            return
        alone = 0  # so many records of a batch that was refused go one at a time
        while not self._is_paused():
            records = await self._spool.peek(1 if alone else self._max_batch)
            if not records:
                if self._replayed:
                    log.info("spool: all replayed", messages=self._replayed)
                self._replayed = 0
                return
            try:
                committed = await self._replay(records)
            except DatabaseUnavailable as error:
                self._back_off(error)
                return
            except Exception as error:  # an iteration's boundary: no record may block the others
                if len(records) > 1:
                    alone = len(records)  # one of them; its neighbours go on
                    continue
                await self._refused(records[0], error)
                if self._refusals:
                    if isinstance(error, QueenError):
                        return
                    raise
                committed = 1
            else:
                self._replayed += sum(len(record.messages) for record in records[:committed])
                await self._spool.advance(committed)
                self._refusals = 0
            self._backoff = 0.0
            alone = max(alone - committed, 0)

    def _back_off(self, error: DatabaseUnavailable) -> None:
        log.debug("spool: replay waits for the database", error=str(error))
        self._backoff = min(max(self._backoff * 2, BACKOFF_FIRST_SECONDS), BACKOFF_MAX_SECONDS)
        self._not_before = trio.current_time() + self._backoff

    async def _refused(self, record: SpoolRecord, error: Exception) -> None:
        """Note it; the last time, set the record aside and begin to count anew."""
        self._refusals += 1
        if self._refusals < ATTEMPTS:
            return
        reason = str(error) if isinstance(error, QueenError) else _last_line(error)
        path = await self._spool.quarantine(reason, self._refusals)
        self._refusals = 0
        log.error(
            "spool: record quarantined",
            queue=record.queue,
            partition=record.partition,
            messages=len(record.messages),
            file=str(path),
            error=reason,
        )


def _last_line(error: Exception) -> str:
    """What a traceback ends with."""
    return format_exception_only(error)[-1].strip()
