"""The spool's directory: its lock and its files.

    lock                    held by the broker that uses the directory
    0000000000000007.spool  records; the highest number is being written
    failed/                 what can't be replayed (quarantine.py)

What is replayed or set aside is passed over even where the disk doesn't take part (it has become
read-only, or is too full for `failed/`): its file stays until it does, and is replayed again after
a restart, which recognises what it has committed.

Everything here blocks on the disk, and one call at a time is allowed: see writer.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog
from attrs import define, field, frozen

from queen_trio.errors import QueenError

from .quarantine import Quarantine, SetAside, sync_directory
from .records import (
    HEADER_BYTES,
    Damaged,
    SpoolRecord,
    Torn,
    decode_untrusted,
    encode,
    header_untrusted,
)

if TYPE_CHECKING:
    from pathlib import Path

log = structlog.get_logger(__name__)

# A file is read into memory as a whole, and is replayed again from its start after a crash.
FILE_BYTES: Final = 8 * 1024 * 1024


class SpoolInUse(QueenError):
    """Another process uses the directory."""


@frozen
class SpoolStatistics:
    """What the spool holds; `trouble` says why it can't be written to, None where it can."""

    directory: str
    max_bytes: int
    trouble: str | None = None
    pending_records: int = 0
    pending_messages: int = 0
    pending_bytes: int = 0
    quarantined: int = 0
    quarantined_bytes: int = 0
    spooled_messages: int = 0
    replayed_messages: int = 0
    refused_messages: int = 0

    @property
    def healthy(self) -> bool:
        """Whether the next push that has to be spooled can be."""
        return self.trouble is None


@frozen
class PendingFile:
    """A file of records, and how many records, messages and bytes it holds."""

    path: Path
    records: int
    messages: int
    bytes: int


@define(eq=False)
class _File:
    """One file of records; `taken` have been replayed or set aside, the counts are of the rest.

    `aside` is what has yet to get into `failed/` before the file may go.
    """

    path: Path
    records: int = 0
    messages: int = 0
    bytes: int = 0
    taken: int = 0
    aside: list[SetAside] = field(factory=list)


@define(eq=False)
class SpoolDirectory:
    """The files of one directory; `open` comes first, and may be repeated until it works."""

    path: Path
    _lock: int | None = None
    _files: deque[_File] = field(factory=deque)  # closed, oldest first
    _current: _File | None = None
    _descriptor: int = -1
    _next_number: int = 1
    _head: deque[SpoolRecord] = field(factory=deque)  # of the oldest file, what is left
    _finished: deque[_File] = field(factory=deque)  # to be removed
    quarantine: Quarantine = field(init=False)
    trouble: str | None = None
    """Why a finished file can't be removed."""

    def __attrs_post_init__(self) -> None:
        self.quarantine = Quarantine(self.path / "failed")

    @property
    def is_open(self) -> bool:
        """Whether the directory is ours and its files are known."""
        return self._lock is not None

    @property
    def has_work(self) -> bool:
        """Whether `peek` may find something, or something to tidy up."""
        return bool(self._files or self._finished) or self._current is not None

    def pending(self) -> tuple[int, int, int]:
        """Records, messages and bytes that wait to be replayed."""
        files = [*self._files, *([] if self._current is None else [self._current])]
        return (
            sum(file.records for file in files),
            sum(file.messages for file in files),
            sum(file.bytes for file in files),
        )

    # -- opening -------------------------------------------------------------------------------

    def open(self) -> None:
        """Make and lock the directory and find what is in it; does nothing where that is done.

        Raises `SpoolInUse` where another process has it, OSError where it can't be written to.
        """
        if self._lock is not None:
            return
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _lock(self.path / "lock")
        try:
            with suppress(OSError):  # not ours, then, and not made just now
                sync_directory(self.path.parent)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            os.fsync(lock)  # so that a full or read-only disk is found out at boot
            self._find()
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    def close(self) -> None:
        """Unlock the directory; records stay where they are."""
        self.roll()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _find(self) -> None:
        self._files.clear()
        numbers = [0]
        for path in sorted(self.path.glob("*.spool")):
            numbers.append(_number(path))
            file = _measure(path)
            if file.bytes:
                self._files.append(file)
            else:
                path.unlink()
        numbers += [_number(path) for path in self.quarantine.open()]
        self._next_number = max(numbers) + 1

    # -- writing -------------------------------------------------------------------------------

    def append(self, data: bytes, records: int, messages: int) -> None:
        """Write encoded records and return once they are on the disk; all of them or none.

        Raises OSError; then what was written of them is cut off again.
        """
        file = self._current or self._start()
        written = False
        try:
            _write(self._descriptor, data)
            os.fsync(self._descriptor)
            written = True
        finally:
            if not written:
                # After a failed fsync nobody knows what is on the disk: the file gets nothing more.
                with suppress(OSError):
                    os.ftruncate(self._descriptor, file.bytes)
                    os.fsync(self._descriptor)
                self.roll()
        file.records += records
        file.messages += messages
        file.bytes += len(data)
        if file.bytes >= FILE_BYTES:
            self.roll()

    def roll(self) -> None:
        """End the file that is being written, so that it can be replayed and removed."""
        if self._current is None:
            return
        file, self._current = self._current, None
        if file.bytes:
            self._files.append(file)
        with suppress(OSError):
            os.close(self._descriptor)  # what counts has been fsynced
            if not file.bytes:
                file.path.unlink()

    def _start(self) -> _File:
        path = self.path / f"{self._next_number:016}.spool"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._next_number += 1
        self._current = _File(path)
        try:
            sync_directory(self.path)
        except OSError:
            self.roll()
            raise
        return self._current

    # -- replaying -----------------------------------------------------------------------------

    def peek(self, most: int, most_bytes: int) -> list[SpoolRecord]:
        """Return the oldest records, `most` or `most_bytes` of one file, one at least; [] for none.

        They stay until `advance` or `set_aside`. Raises OSError.
        """
        self._tidy()
        while not self._head:
            if not self._files:
                self.roll()
            if not self._files:
                return []
            self._read(self._files[0])
            if not self._head:
                self._finish_oldest()
        found: list[SpoolRecord] = []
        size = 0
        for record in self._head:
            size += sum(map(len, record.messages))
            if found and (len(found) == most or size > most_bytes):
                break
            found.append(record)
        return found

    def advance(self, count: int) -> int:
        """Forget the oldest records, committed or set aside; returns how many messages they had.

        A file goes once all of its records have; what is found again after a crash in between is
        recognised by the replay.
        """
        file = self._files[0]
        before = file.messages
        for _ in range(count):
            record = self._head.popleft()
            file.taken += 1
            file.records -= 1
            file.messages -= len(record.messages)
        taken = before - file.messages
        if not self._head:
            self._finish_oldest()
        return taken

    def set_aside(self, error: str, attempts: int) -> Path:
        """Put the oldest record into `failed/`, with its error beside it; returns where."""
        file = self._files[0]
        record = self._head[0]
        report = {
            "error": error,
            "attempts": attempts,
            "queue": record.queue,
            "partition": record.partition,
            "messages": len(record.messages),
        }
        aside = SetAside(f"{file.path.stem}-{file.taken}.spool", encode(record), report)
        self._set_aside(file, aside)
        self.advance(1)
        return self.quarantine.path / aside.name

    def _read(self, file: _File) -> None:
        records: list[SpoolRecord] = []
        for found in decode_untrusted(file.path.read_bytes()):
            if isinstance(found, SpoolRecord):
                records.append(found)
            elif isinstance(found, Torn):
                log.warning("spool: torn record cut off", file=str(file.path), bytes=found.size)
            else:
                self._keep_damaged(file, found)
        self._head.extend(records)
        file.taken = 0
        file.records = len(records)
        file.messages = sum(len(record.messages) for record in records)

    def _keep_damaged(self, file: _File, found: Damaged) -> None:
        report = {"error": "the bytes have changed on the disk", "offset": found.offset}
        name = f"{file.path.stem}-at-{found.offset}.damaged"
        self._set_aside(file, SetAside(name, found.data, report))
        log.error("spool: damaged record set aside", file=str(file.path), kept=name)

    def _set_aside(self, file: _File, aside: SetAside) -> None:
        """Put it into `failed/` now, or before its file is removed."""
        try:
            self.quarantine.add(aside)
        except OSError:
            file.aside.append(aside)  # `_tidy` says what is wrong, if it still is by then

    def _finish_oldest(self) -> None:
        self._finished.append(self._files.popleft())
        self._tidy()

    def _tidy(self) -> None:
        """Remove what is finished, as far as the disk allows it; says so once where it doesn't."""
        while self._finished:
            file = self._finished[0]
            try:
                while file.aside:
                    self.quarantine.add(file.aside[0])
                    del file.aside[0]
                file.path.unlink(missing_ok=True)
            except OSError as error:
                if self.trouble is None:
                    log.warning("spool: files that are done with stay", error=str(error))
                self.trouble = str(error)
                return
            self._finished.popleft()
        if self.trouble is not None:
            log.info("spool: files that are done with are gone")
            self.trouble = None

    # -- for operators -------------------------------------------------------------------------

    def list_pending(self) -> list[PendingFile]:
        """The files that wait to be replayed, oldest first."""
        return [PendingFile(f.path, f.records, f.messages, f.bytes) for f in self._files]

    def list_set_aside(self) -> list[Path]:
        """What is in `failed/`: records, and damaged bytes."""
        return self.quarantine.list_all()

    def requeue(self, path: Path) -> Path:
        """Move a quarantined record back, behind everything that waits; returns its new file."""
        target = self.path / f"{self._next_number:016}.spool"
        self._next_number += 1
        self.quarantine.move_out(path, target)
        self._files.append(_measure(target))
        return target


def _lock(path: Path) -> int:
    """Lock a file and return the descriptor that holds it; raises `SpoolInUse`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise SpoolInUse(
            f"another broker (pid {holder or 'unknown'}) uses the spool {path.parent}: "
            f"stop it, or give each broker a FILE_BUFFER_DIR of its own"
        ) from None
    return descriptor


def _number(path: Path) -> int:
    digits = path.name.partition(".")[0].partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _measure(path: Path) -> _File:
    """Count what a file holds by its headers alone, as far as they are sound."""
    file = _File(path, bytes=path.stat().st_size)
    with path.open("rb") as stream:
        while (header := header_untrusted(stream.read(HEADER_BYTES))) is not None:
            if stream.seek(header.length, os.SEEK_CUR) > file.bytes:
                break
            file.records += 1
            file.messages += header.messages
    return file


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
