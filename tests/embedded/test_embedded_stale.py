"""Files that an earlier server, or someone else, left in the data directory."""

# ruff: noqa: ASYNC240 - a look at a local file may block a test

from __future__ import annotations

import os
import subprocess

import pytest

from queen_trio.embedded import EmbeddedError, find_binaries, open_embedded
from queen_trio.embedded.account import choose_account
from queen_trio.embedded.cluster import Cluster, server_command


@pytest.fixture
async def cluster(place):
    """A stopped cluster."""
    async with open_embedded(place / "data"):
        pass
    return Cluster.at(place / "data")


@pytest.fixture
def spawn(cluster):
    """Start a program as the account that PostgreSQL runs under."""
    account = choose_account(cluster.pgdata)
    children = []

    def start(*command):
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **account.popen_options(),
        )
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            child.terminate()
        child.wait()


async def test_a_stale_pid_that_is_an_unrelated_process_now(cluster, spawn, sql):
    unrelated = spawn("/bin/sleep", "1000")
    stale = (
        f"{unrelated.pid}\n{cluster.pgdata}\n1700000000\n5432\n{cluster.pgdata}\n\n 1 2\nready\n"
    )
    for name in ("postmaster.pid", ".s.PGSQL.5432.lock"):
        path = cluster.pgdata / name
        path.write_text(stale)
        choose_account(cluster.pgdata).give(path)
    async with open_embedded(cluster.data_dir) as embedded:
        assert embedded.pid != unrelated.pid
        assert sql(embedded, "select 1") == [(1,)]
    assert unrelated.poll() is None, "it was left alone"


@pytest.mark.parametrize("content", ["", "garbage\n", "99999999\n"])
async def test_a_damaged_pid_file(cluster, content, sql):
    (cluster.pgdata / "postmaster.pid").write_text(content)
    async with open_embedded(cluster.data_dir) as embedded:
        assert sql(embedded, "select 1") == [(1,)]


async def test_a_server_started_by_hand_is_left_alone(cluster, spawn, until):
    binaries = find_binaries(account=choose_account(cluster.pgdata))
    by_hand = spawn(*server_command(binaries, cluster.pgdata, cluster.pgdata, {}))
    await until(lambda: (found := cluster.read_pid_file()) and found.status == "ready")
    with pytest.raises(EmbeddedError, match=rf"no broker started \(pid {by_hand.pid}\)"):
        async with open_embedded(cluster.data_dir):
            pass
    assert by_hand.poll() is None
    assert cluster.read_pid_file().pid == by_hand.pid


async def test_leftovers_of_a_killed_initdb_are_removed(place, sql):
    leftover = place / "data" / "postgres.initialising"
    (leftover / "base").mkdir(parents=True)
    (leftover / "PG_VERSION").write_text("18\n")
    (place / "data").chmod(0o711)
    async with open_embedded(place / "data") as embedded:
        assert sql(embedded, "select 1") == [(1,)]
    assert not leftover.exists()


async def test_an_empty_directory_in_the_data_s_place_will_do(place, sql):
    (place / "data").mkdir(mode=0o711)
    (place / "data" / "postgres").mkdir()
    choose_account(place / "data" / "nothing").give(place / "data" / "postgres")
    async with open_embedded(place / "data") as embedded:
        assert sql(embedded, "select 1") == [(1,)]


async def test_something_else_in_the_data_s_place_is_left_alone(place):
    (place / "data").mkdir(mode=0o711)
    (place / "data" / "postgres").mkdir()
    choose_account(place / "data" / "nothing").give(place / "data" / "postgres")
    precious = place / "data" / "postgres" / "thesis.txt"
    precious.write_text("words")
    with pytest.raises(EmbeddedError, match="holds no PostgreSQL data"):
        async with open_embedded(place / "data"):
            pass
    assert precious.read_text() == "words"


async def test_a_failed_initdb_says_why_and_the_next_works(place, programs, sql):
    broken = place / "broken"
    broken.mkdir()
    (broken / "postgres").symlink_to(programs / "postgres")
    (broken / "initdb").write_text("#!/bin/sh\necho no room on the disk >&2\nexit 1\n")
    (broken / "initdb").chmod(0o755)
    with pytest.raises(EmbeddedError, match=r"initdb ended with status 1.*no room on the disk"):
        async with open_embedded(place / "data", binaries=broken):
            pass
    assert not os.path.lexists(place / "data" / "postgres")
    async with open_embedded(place / "data") as embedded:
        assert sql(embedded, "select 1") == [(1,)]
