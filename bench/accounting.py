"""Who used the processors and the memory: process trees and the whole machine, from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from attrs import frozen

TICK: Final = os.sysconf("SC_CLK_TCK")
KIB_PER_MIB: Final = 1024


def _stat(pid: int) -> tuple[int, int]:
    """A process's parent, and its ticks of CPU with those of children it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), sum(map(int, fields[11:15]))


def _tree(root: int) -> dict[int, int]:
    """The ticks of a process and of all its living descendants, by pid."""
    stats: dict[int, tuple[int, int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stats[int(entry)] = _stat(int(entry))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    found: dict[int, int] = {}
    frontier = [root] if root in stats else []
    while frontier:
        pid = frontier.pop()
        found[pid] = stats[pid][1]
        frontier += [child for child, (parent, _) in stats.items() if parent == pid]
    return found


def cpu_seconds(root: int) -> float:
    """CPU time of a process tree, ended children included."""
    return sum(_tree(root).values()) / TICK


def busy_seconds() -> float:
    """CPU time of the whole machine since its boot, waiting for disks not included."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _idle, _iowait, *interrupts_and_steal = map(
            int, file.readline().split()[1:9]
        )
    return (user + nice + system + sum(interrupts_and_steal)) / TICK


def pss_mib(root: int) -> float:
    """Memory of a process tree, in MiB; what processes share is counted once (Pss)."""
    return sum(_rollup(pid, "Pss:") for pid in _tree(root)) / KIB_PER_MIB


def rss_mib(pid: int) -> float:
    """Resident memory of one process, in MiB."""
    return _rollup(pid, "Rss:") / KIB_PER_MIB


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


def usage(broker_pid: int, postgres_pid: int) -> Usage:
    """What has been used up to now."""
    return Usage(
        time.monotonic(), cpu_seconds(broker_pid), cpu_seconds(postgres_pid), busy_seconds()
    )
