"""The test cluster itself: what it promises to the tests that stop and kill servers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from tests.cluster import Cluster

CHILD = """
import time
from tests.cluster import Cluster
cluster = Cluster()
cluster.start()
print(cluster.postmaster_pid, cluster.directory, flush=True)
time.sleep(600)
"""


def test_data_survives_a_restart_and_a_crash(own_cluster: Cluster) -> None:
    own_cluster.execute("CREATE TABLE t AS SELECT 1 AS a")
    own_cluster.restart()
    assert own_cluster.execute("SELECT a FROM t") == [(1,)]
    own_cluster.execute("CHECKPOINT")
    own_cluster.kill()
    own_cluster.start()
    assert own_cluster.execute("SELECT a FROM t") == [(1,)]


def test_synchronous_commit_is_on(cluster: Cluster) -> None:
    assert cluster.execute("SHOW synchronous_commit") == [("on",)]


def test_a_killed_test_run_leaves_nothing_behind() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as child:
        assert child.stdout is not None
        pid, directory = child.stdout.readline().split()
        postmaster = psutil.Process(int(pid))
        child.kill()
    postmaster.wait(10)
    deadline = time.monotonic() + 10
    while Path(directory).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
