"""Which account PostgreSQL runs under, and where that account's data can lie."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

import psutil
import pytest
import trio

from queen_trio.embedded import EmbeddedError, account, default_data_dir, open_embedded

# No account has it, on any system known to us.
UNKNOWN_UID = 54321


@pytest.fixture
def nobody() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


@pytest.fixture
def clone(place):
    """A directory as a clone under /root is: closed to everyone else."""
    (place / "root" / "clone").mkdir(parents=True)
    (place / "root").chmod(0o700)
    return place / "root" / "clone"


def groups_of(pid: int) -> list[int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [groups] = [line for line in lines if line.startswith("Groups:")]
    return [int(group) for group in groups.split()[1:]]


async def run_until_ready(broker) -> str:
    line = await trio.to_thread.run_sync(broker.stdout.readline)
    assert line, await trio.to_thread.run_sync(broker.stderr.read)
    return line


async def end(broker) -> None:
    broker.terminate()
    assert await trio.to_thread.run_sync(broker.wait) == 0


async def test_as_root_the_server_runs_as_an_unprivileged_account(place, as_root, sql):
    async with open_embedded(place / "data") as embedded:
        process = psutil.Process(embedded.pid)
        assert process.username() in account.UNPRIVILEGED_ACCOUNTS
        assert process.uids().real == process.uids().effective == process.uids().saved != 0
        assert groups_of(embedded.pid) == [process.gids().real], "root's groups are gone"


async def test_as_root_without_a_postgres_account_nobody_will_do(
    place, as_root, monkeypatch, nobody, sql
):
    monkeypatch.setattr(account, "UNPRIVILEGED_ACCOUNTS", ("no-such-account", "nobody"))
    async with open_embedded(place / "data") as embedded:
        assert psutil.Process(embedded.pid).uids().real == nobody.pw_uid
    # An account `postgres` that appears later doesn't own the data.
    monkeypatch.undo()
    async with open_embedded(place / "data") as embedded:
        assert psutil.Process(embedded.pid).uids().real == nobody.pw_uid
        assert sql(embedded, "select 1") == [(1,)]


async def test_as_root_without_any_such_account_it_says_so(place, as_root, monkeypatch):
    monkeypatch.setattr(account, "UNPRIVILEGED_ACCOUNTS", ("no-such-account",))
    with pytest.raises(EmbeddedError, match="looked for no-such-account"):
        async with open_embedded(place / "data"):
            pass


async def test_a_root_that_may_not_change_accounts_is_told(place, as_root, start_broker):
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, to give up a capability")
    broker = start_broker(place / "data", under=("setpriv", "--bounding-set=-setuid,-setgid"))
    assert await trio.to_thread.run_sync(broker.wait) == 1
    assert "may not change to the account" in broker.stderr.read()


async def test_data_of_root_s_are_refused(place, as_root):
    (place / "data" / "postgres").mkdir(parents=True)
    (place / "data").chmod(0o711)
    with pytest.raises(EmbeddedError, match="belongs to root"):
        async with open_embedded(place / "data"):
            pass


async def test_a_place_closed_to_the_account_is_named_and_left_closed(clone, as_root):
    with pytest.raises(EmbeddedError, match=rf"can't enter {clone.parent},.*QUEEN_DATA_DIR"):
        async with open_embedded(clone / "queen-data"):
            pass
    assert clone.parent.stat().st_mode & 0o777 == 0o700


async def test_by_default_root_in_such_a_place_gets_one_that_works(
    clone, as_root, place, monkeypatch, sql, logged
):
    monkeypatch.setattr(account, "SYSTEM_DATA_ROOT", place / "var" / "queen-trio")
    monkeypatch.chdir(clone)
    chosen = default_data_dir(Path("queen-data"))
    assert chosen.parent == place / "var" / "queen-trio"
    assert chosen.name.startswith("clone-")
    assert not chosen.exists(), "choosing makes nothing"
    [entry] = logged
    assert entry["path"] == str(chosen)
    assert entry["instead_of"] == str(clone / "queen-data")
    assert entry["change_with"] == "QUEEN_DATA_DIR"
    assert default_data_dir(clone / "queen-data") == chosen, "the next start finds the same data"
    assert default_data_dir(clone.parent / "other" / "queen-data") != chosen

    umask = os.umask(0o077)
    try:
        async with open_embedded(chosen) as embedded:
            assert sql(embedded, "select 1") == [(1,)]
    finally:
        os.umask(umask)


def test_by_default_the_preferred_place_is_kept_where_it_works(place, logged):
    assert default_data_dir(place / "new" / "queen-data") == place / "new" / "queen-data"
    assert logged[0]["path"] == str(place / "new" / "queen-data")


async def test_an_ordinary_user_starts_it_and_survives_a_kill(
    place, as_root, programs, start_broker, nobody, until, gone
):
    place.chmod(0o777)
    for _ in range(2):
        broker = start_broker(place / "data", programs, str(nobody.pw_uid))
        pid = int((await run_until_ready(broker)).split()[-1])
        assert psutil.Process(pid).uids().real == nobody.pw_uid
        broker.kill()
        await until(lambda pid=pid: gone(pid))
    assert (place / "data").stat().st_uid == nobody.pw_uid
    assert (place / "data").stat().st_mode & 0o777 == 0o700


async def test_an_ordinary_user_on_another_s_data_is_told(place, as_root, programs, start_broker):
    async with open_embedded(place / "data"):
        pass
    broker = start_broker(place / "data", programs, str(UNKNOWN_UID))
    assert await trio.to_thread.run_sync(broker.wait) == 1
    assert "can't use the data directory" in broker.stderr.read()


async def test_a_uid_without_a_name_is_told_what_is_missing(place, as_root, programs, start_broker):
    place.chmod(0o777)
    broker = start_broker(place / "data", programs, str(UNKNOWN_UID))
    assert await trio.to_thread.run_sync(broker.wait) == 1
    assert f"uid {UNKNOWN_UID} has no entry in the passwd database" in broker.stderr.read()


async def test_a_uid_without_a_name_can_run_existing_data(place, as_root, programs, start_broker):
    async with open_embedded(place / "data"):
        pass
    owner = f"{UNKNOWN_UID}:{UNKNOWN_UID}"
    await trio.run_process(["chown", "-R", owner, place / "data"])
    broker = start_broker(place / "data", programs, str(UNKNOWN_UID))
    await run_until_ready(broker)
    await end(broker)
    # Root, too, runs it as its owner.
    async with open_embedded(place / "data") as embedded:
        assert psutil.Process(embedded.pid).uids().real == UNKNOWN_UID
