"""The directory `failed/`: what can't be replayed, kept for an operator with the reason beside it.

    0000000000000005-17.spool  a record that PostgreSQL refuses (17: its place in file 5)
    0000000000000005-17.error  why, as JSON
    ….damaged                  bytes that are no record any more

Everything here blocks on the disk.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import define, frozen

if TYPE_CHECKING:
    from pathlib import Path

_KEPT = (".spool", ".damaged")


@frozen
class SetAside:
    """Bytes to keep, under a name that is the same after a crash, and the reason."""

    name: str
    data: bytes
    report: dict[str, Any]


@define(eq=False)
class Quarantine:
    """What is set aside; the counts are of `open` and of what was done since."""

    path: Path
    records: int = 0
    bytes: int = 0

    def open(self) -> list[Path]:
        """Make the directory, count what it keeps and return all that is in it; raises OSError."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        found = list(self.path.iterdir())
        kept = [path for path in found if path.suffix in _KEPT]
        self.records = len(kept)
        self.bytes = sum(path.stat().st_size for path in kept)
        return found

    def add(self, aside: SetAside) -> Path:
        """Keep it, on the disk before this returns; raises OSError, and may then be repeated."""
        path = self.path / aside.name
        known = path.exists()  # set aside before a crash that kept its file
        report = aside.report | {"quarantinedAt": datetime.now(UTC).isoformat()}
        _write_file(path.with_suffix(".error"), msgspec.json.encode(report))
        _write_file(path, aside.data)
        sync_directory(self.path)
        if not known:
            self.records += 1
            self.bytes += len(aside.data)
        return path

    def move_out(self, path: Path, target: Path) -> None:
        """Take a record out again, to `target`."""
        path.rename(target)
        path.with_suffix(".error").unlink(missing_ok=True)
        sync_directory(target.parent)
        sync_directory(self.path)
        self.records -= 1
        self.bytes -= target.stat().st_size

    def list_all(self) -> list[Path]:
        """What is kept: records, and damaged bytes."""
        return sorted(path for path in self.path.iterdir() if path.suffix in _KEPT)


def sync_directory(path: Path) -> None:
    """Return once the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_file(path: Path, data: bytes) -> None:
    """Write a whole file, on the disk before its name is: after a crash it is there or it isn't."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    new.rename(path)
