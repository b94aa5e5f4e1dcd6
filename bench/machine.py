"""What the numbers were measured on, as far as it explains them."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

SYNCS: Final = 200
PAGE_BYTES: Final = 8192


@frozen
class Machine:
    """The description of a machine; `sync_microseconds` is the median of writing 8 KiB for good."""

    processor: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    postgres: str
    filesystem: str
    sync_microseconds: float

    def lines(self) -> Iterator[str]:
        yield f"{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB, {self.kernel}"
        yield (
            f"Python {self.python}, PostgreSQL {self.postgres} (fsync and synchronous_commit on), "
            f"data on {self.filesystem}: {self.sync_microseconds:.0f} µs per 8 KiB + fdatasync"
        )


def describe(directory: Path, postgres_version: str) -> Machine:
    """Describe this machine, with the disk that `directory` is on. Blocks for some 100 ms."""
    return Machine(
        processor=_first("/proc/cpuinfo", "model name") or platform.processor() or "?",
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        postgres=postgres_version.split()[0],
        filesystem=_filesystem(directory),
        sync_microseconds=_sync_microseconds(directory),
    )


def _first(path: str, key: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _filesystem(directory: Path) -> str:
    """The type of the file system that the longest mount point above `directory` has."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(len(point), kind) for point, kind in mounts if directory.is_relative_to(point)]
    return max(above)[1] if above else "?"


def _sync_microseconds(directory: Path) -> float:
    probe = directory / "sync-probe"
    descriptor = os.open(probe, os.O_RDWR | os.O_CREAT, 0o600)
    took: list[float] = []
    try:
        for _ in range(SYNCS):
            begun = time.perf_counter()
            os.pwrite(descriptor, bytes(PAGE_BYTES), 0)
            os.fdatasync(descriptor)
            took.append(time.perf_counter() - begun)
    finally:
        os.close(descriptor)
        probe.unlink()
    return statistics.median(took) * 1e6
