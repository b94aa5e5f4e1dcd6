"""A PostgreSQL that is there and says nothing: a machine that swaps, or a dead disk."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster import Cluster


@contextmanager
def stalled(cluster: Cluster) -> Iterator[None]:
    """Stop the server and its backends (SIGSTOP) for the block's time; the kernel still accepts."""
    postmaster = psutil.Process(cluster.postmaster_pid)
    postmaster.suspend()  # first: it would start new ones
    processes = [postmaster, *postmaster.children(recursive=True)]
    try:
        for process in processes[1:]:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in reversed(processes):
            with suppress(psutil.NoSuchProcess):
                process.resume()
