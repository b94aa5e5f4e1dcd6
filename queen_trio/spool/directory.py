"""The spool's directory: its lock, its files, what is set aside in `failed/`.

    lock                              held by the broker that uses the directory
    0000000000000007.spool            records; the highest number is being written
    failed/0000000000000005-17.spool  a record that PostgreSQL refuses (17: its place in file 5)
    failed/0000000000000005-17.error  why, as JSON
    failed/….damaged                  bytes that are no record any more

Everything here blocks on the disk, and one call at a time is allowed: see writer.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
from attrs import define, field, frozen

from queen_trio.errors import QueenError

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
    """One file of records; `taken` have been replayed or set aside, the counts are of the rest."""

    path: Path
    records: int = 0
    messages: int = 0
    bytes: int = 0
    taken: int = 0


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
    quarantined: int = 0
    quarantined_bytes: int = 0

    @property
    def failed(self) -> Path:
        """Where records are set aside."""
        return self.path / "failed"

    @property
    def has_pending(self) -> bool:
        return bool(self._files) or self._current is not None

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
            self.failed.mkdir(mode=0o700, exist_ok=True)
            with suppress(OSError):  # not ours, then, and not made just now
                _sync_directory(self.path.parent)
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
        aside = list(self.failed.iterdir())
        numbers += [_number(path) for path in aside]
        self._next_number = max(numbers) + 1
        kept = [path for path in aside if path.suffix in (".spool", ".damaged")]
        self.quarantined = len(kept)
        self.quarantined_bytes = sum(path.stat().st_size for path in kept)

    # -- writing -------------------------------------------------------------------------------

    def append(self, data: bytes, records: int, messages: int) -> None:
        """Write encoded records and return once they are on the disk; all of them or none.

        Raises OSError; then what was written of them is cut off again.
        """
        file = self._current or self._start()
        try:
            _write(self._descriptor, data)
            os.fsync(self._descriptor)
        except OSError:
            # After a failed fsync nobody knows what is on the disk: this file gets nothing more.
            with suppress(OSError):
                os.ftruncate(self._descriptor, file.bytes)
                os.fsync(self._descriptor)
            self.roll()
            raise
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
            _sync_directory(self.path)
        except OSError:
            self.roll()
            raise
        return self._current

    # -- replaying -----------------------------------------------------------------------------

    def peek(self, most: int, most_bytes: int) -> list[SpoolRecord]:
        """Return the oldest records, `most` or `most_bytes` of one file, one at least; [] for none.

        They stay until `advance` or `quarantine`.
        """
        while not self._head:
            if not self._files:
                self.roll()
            if not self._files:
                return []
            self._read(self._files[0])
            if not self._head:
                self._remove_oldest()
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
            self._remove_oldest()
        return taken

    def quarantine(self, error: str, attempts: int) -> Path:
        """Set the oldest record aside in `failed/`, with its error beside it; returns where."""
        file = self._files[0]
        record = self._head[0]
        path = self._set_aside(
            f"{file.path.stem}-{file.taken}",
            ".spool",
            encode(record),
            {
                "error": error,
                "attempts": attempts,
                "queue": record.queue,
                "partition": record.partition,
                "messages": len(record.messages),
            },
        )
        self.advance(1)
        return path

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
        name = f"{file.path.stem}-at-{found.offset}"
        report = {"error": "the bytes have changed on the disk", "offset": found.offset}
        path = self._set_aside(name, ".damaged", found.data, report)
        log.error("spool: damaged record set aside", file=str(file.path), kept=str(path))

    def _set_aside(self, name: str, suffix: str, data: bytes, report: dict[str, Any]) -> Path:
        path = self.failed / f"{name}{suffix}"
        known = path.exists()  # set aside before a crash that kept its file
        report["quarantinedAt"] = datetime.now(UTC).isoformat()
        _write_file(path.with_suffix(".error"), msgspec.json.encode(report))
        _write_file(path, data)
        _sync_directory(self.failed)
        if not known:
            self.quarantined += 1
            self.quarantined_bytes += len(data)
        return path

    def _remove_oldest(self) -> None:
        self._files[0].path.unlink(missing_ok=True)
        self._files.popleft()

    # -- for operators -------------------------------------------------------------------------

    def list_pending(self) -> list[PendingFile]:
        """The files that wait to be replayed, oldest first."""
        return [PendingFile(f.path, f.records, f.messages, f.bytes) for f in self._files]

    def list_set_aside(self) -> list[Path]:
        """What is in `failed/`: records, and damaged bytes."""
        return sorted(p for p in self.failed.iterdir() if p.suffix in (".spool", ".damaged"))

    def requeue(self, path: Path) -> Path:
        """Move a quarantined record back, behind everything that waits; returns its new file."""
        target = self.path / f"{self._next_number:016}.spool"
        self._next_number += 1
        path.rename(target)
        path.with_suffix(".error").unlink(missing_ok=True)
        _sync_directory(self.path)
        _sync_directory(self.failed)
        self._files.append(_measure(target))
        self.quarantined -= 1
        self.quarantined_bytes -= self._files[-1].bytes
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


def _write_file(path: Path, data: bytes) -> None:
    """Write a whole file, on the disk before its name is: after a crash it is there or it isn't."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    new.rename(path)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
