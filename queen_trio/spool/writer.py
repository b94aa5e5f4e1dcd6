"""The spool as tasks see it: the disk's work in a thread, one fsync for all who wait."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import structlog
import trio
from attrs import define

from queen_trio.grace import Grace

from .directory import SpoolDirectory, SpoolInUse, SpoolStatistics
from .records import SpoolRecord, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

T = TypeVar("T")

log = structlog.get_logger(__name__)

# A predecessor that is just ending gets this long to let go of the directory.
LOCK_PATIENCE_SECONDS: Final = 1.0
LOCK_POLL_SECONDS: Final = 0.02
# A directory that couldn't be opened may hold records all the same: how often that is tried again.
REOPEN_SECONDS: Final = 5.0
# One step of the replay reads no more than this at once.
PEEK_BYTES: Final = 16 * 1024 * 1024
# What is answered unless we know better: the writer died of a fault of its own, or was given up.
_UNWRITTEN: Final = "the spool can't be written"


@define(eq=False)
class _Submission:
    """An encoded record that somebody waits for."""

    data: bytes
    messages: int
    done: bool = False
    error: str | None = _UNWRITTEN


class Spool:
    """One broker's spool; open it with `open_spool`.

    The lock serialises what touches the disk. Who gets it to write takes along whatever else has
    been submitted by then, so one fsync serves many pushes.
    """

    def __init__(self, directory: Path, max_bytes: int, grace: Grace | None = None) -> None:
        """`grace` limits how long a disk that hangs is waited for: without one, for ever."""
        self._directory = SpoolDirectory(directory)
        self._max_bytes = max_bytes
        self._grace = grace or Grace()
        self._disk = trio.Lock()
        self._submitted: list[_Submission] = []
        self._trouble: str | None = "it was never opened"
        self._reopen_at = 0.0
        self._full_at: int | None = None  # its size when it last refused a record
        self._spooled = self._replayed = self._refused = 0

    async def append(self, records: Sequence[SpoolRecord]) -> list[str | None]:
        """Return once each of these records is on the disk, or says why it isn't.

        A caller that is cancelled doesn't know; a record may be written nevertheless.
        """
        mine = [_Submission(encode(record), len(record.messages)) for record in records]
        self._submitted += mine
        async with self._disk:
            if not mine[-1].done:
                # Who is cancelled before it starts takes none: they are written by the next.
                await trio.lowlevel.checkpoint_if_cancelled()
                batch = self._submitted.copy()
                trouble: str | None = _UNWRITTEN
                try:
                    trouble = await self._grace.run_sync(partial(self._write, batch))
                finally:  # whatever happens, nobody waits for an answer or is written twice
                    del self._submitted[: len(batch)]
                    self._note(batch, trouble)
        return [submission.error for submission in mine]

    async def peek(self, most: int) -> list[SpoolRecord]:
        """Return up to `most` of the oldest records, in order; [] when there are none.

        Raises OSError. A directory that isn't open yet is looked at now and then.
        """
        if not self._directory.is_open and trio.current_time() >= self._reopen_at:
            await self._reopen()
        if not self._directory.has_work:
            return []
        return await self._on_disk(partial(self._directory.peek, most, PEEK_BYTES))

    async def advance(self, count: int) -> None:
        """Forget the oldest records, which are committed."""
        self._replayed += await self._on_disk(partial(self._directory.advance, count))
        if not self._directory.has_work:  # the last file could be removed
            self._trouble = None

    async def quarantine(self, error: str, attempts: int) -> Path:
        """Set the oldest record aside for an operator to look at; returns its file."""
        return await self._on_disk(partial(self._directory.set_aside, error, attempts))

    def statistics(self) -> SpoolStatistics:
        records, messages, size = self._directory.pending()
        aside = self._directory.quarantine.bytes
        trouble = self._trouble or self._directory.trouble
        if self._full_at is not None and size + aside >= self._full_at:
            trouble = trouble or _full(self._max_bytes)
        return SpoolStatistics(
            str(self._directory.path),
            self._max_bytes,
            trouble,
            records,
            messages,
            size,
            self._directory.quarantine.records,
            aside,
            self._spooled,
            self._replayed,
            self._refused,
        )

    async def open(self) -> None:
        """Lock the directory; raises `SpoolInUse`. A disk that refuses is logged, no more."""
        try:
            with trio.move_on_after(LOCK_PATIENCE_SECONDS):
                while True:
                    with suppress(SpoolInUse):
                        await self._on_disk(self._directory.open)
                        break
                    await trio.sleep(LOCK_POLL_SECONDS)
            await self._on_disk(self._directory.open)
        except OSError as error:
            self._trouble = str(error)
            log.warning(
                "spool not writable: while PostgreSQL is away pushes will fail",
                directory=str(self._directory.path),
                error=self._trouble,
            )
            self._reopen_at = trio.current_time() + REOPEN_SECONDS
        else:
            self._opened()

    async def _reopen(self) -> None:
        self._reopen_at = trio.current_time() + REOPEN_SECONDS
        with suppress(OSError, SpoolInUse):  # said at the boot
            await self._on_disk(self._directory.open)
            log.info("spool writable again", directory=str(self._directory.path))
            self._opened()

    def _opened(self) -> None:
        self._trouble = None
        _, messages, _ = self._directory.pending()
        aside = self._directory.quarantine.records
        if messages or aside:
            log.info("spool holds messages", pending=messages, quarantined_records=aside)

    async def close(self) -> None:
        """Let the directory go."""
        await self._on_disk(self._directory.close)

    async def _on_disk(self, call: Callable[[], T]) -> T:
        async with self._disk:
            return await self._grace.run_sync(call)

    def _write(self, batch: list[_Submission]) -> str | None:
        """Write what there is room for, in a thread; returns what is wrong with the disk."""
        fitting: list[_Submission] = []
        try:
            self._directory.open()
            room = self._max_bytes - self._directory.quarantine.bytes
            room -= self._directory.pending()[2]
            for submission in batch:
                if len(submission.data) > room:
                    submission.error = _full(self._max_bytes)
                else:
                    room -= len(submission.data)
                    fitting.append(submission)
            if fitting:
                self._directory.append(
                    b"".join([submission.data for submission in fitting]),
                    len(fitting),
                    sum(submission.messages for submission in fitting),
                )
        except (OSError, SpoolInUse) as error:
            for submission in batch:
                if submission.error is _UNWRITTEN:
                    submission.error = f"{_UNWRITTEN}: {error}"
            return str(error)
        for submission in fitting:
            submission.error = None
        return None

    def _note(self, batch: list[_Submission], trouble: str | None) -> None:
        for submission in batch:
            submission.done = True
            if submission.error is None:
                self._spooled += submission.messages
            else:
                self._refused += submission.messages
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble is None:
                log.info("spool writable again", directory=str(self._directory.path))
            else:
                log.error("spool not writable", error=trouble)
        _, _, size = self._directory.pending()
        if trouble is None and any(submission.error for submission in batch):
            if self._full_at is None:
                log.error("spool full", bytes=size, max_bytes=self._max_bytes)
            self._full_at = size + self._directory.quarantine.bytes
        else:
            self._full_at = None


def _full(max_bytes: int) -> str:
    return f"the spool is full (FILE_BUFFER_MAX_BYTES is {max_bytes})"


@asynccontextmanager
async def open_spool(
    directory: Path, max_bytes: int, grace: Grace | None = None
) -> AsyncIterator[Spool]:
    """A spool on `directory`, locked for the block's time.

    Raises `SpoolInUse` where another broker has it. A disk that can't be written to is a warning,
    and tried again with every push that needs it. One that hangs is waited for up to the limit of
    `grace`, leaving the block included.
    """
    grace = grace or Grace()
    spool = Spool(directory, max_bytes, grace)
    await spool.open()
    try:
        yield spool
    finally:
        with grace.shield(math.inf) as patience:
            await spool.close()  # noqa: ASYNC102 - the shield ends with the grace
        if patience.cancelled_caught:
            log.error("spool not closed: its disk doesn't answer", directory=str(directory))
