"""Who used the processors and the memory: process trees and the whole machine, from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Collection

TICK: Final = os.sysconf("SC_CLK_TCK")
KIB_PER_MIB: Final = 1024


def _stat(pid: int) -> tuple[int, int]:
    """A process's parent, and its ticks of CPU with those of children it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), sum(map(int, fields[11:15]))


def _tree(roots: Collection[int]) -> dict[int, int]:
    """The ticks of these processes and of all their living descendants, by pid."""
    stats: dict[int, tuple[int, int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stats[int(entry)] = _stat(int(entry))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    found: dict[int, int] = {}
    frontier = [root for root in roots if root in stats]
    while frontier:
        pid = frontier.pop()
        if pid in found:
            continue
        found[pid] = stats[pid][1]
        frontier += [child for child, (parent, _) in stats.items() if parent == pid]
    return found


def cpu_seconds(roots: Collection[int]) -> float:
    """CPU time of process trees, ended children included."""
    return sum(_tree(roots).values()) / TICK


def busy_seconds() -> float:
    """CPU time of the whole machine since its boot, waiting for disks not included."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _idle, _iowait, *interrupts_and_steal = map(
            int, file.readline().split()[1:9]
        )
    return (user + nice + system + sum(interrupts_and_steal)) / TICK


def pss_mib(roots: Collection[int]) -> float:
    """Memory of process trees, in MiB; what processes share is counted once (Pss)."""
    return sum(_rollup(pid, "Pss:") for pid in _tree(roots)) / KIB_PER_MIB


def rss_mib(roots: Collection[int]) -> float:
    """Resident memory of process trees, in MiB."""
    return sum(_rollup(pid, "Rss:") for pid in _tree(roots)) / KIB_PER_MIB


def _rollup(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(field))


@frozen
class Usage:
    """CPU seconds of each party up to `at`, or between two such moments."""

    at: float
    broker: float
    postgres: float
    machine: float

    def since(self, earlier: Usage) -> Usage:
        return Usage(
            self.at - earlier.at,
            self.broker - earlier.broker,
            self.postgres - earlier.postgres,
            self.machine - earlier.machine,
        )


def usage(broker: Collection[int], postgres: Collection[int]) -> Usage:
    """What these process trees, and all there are, have used up to now."""
    return Usage(time.monotonic(), cpu_seconds(broker), cpu_seconds(postgres), busy_seconds())
