"""`queen-trio spool`: what an operator sees of a spool whose broker doesn't run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from queen_trio.cli import main
from queen_trio.spool import SpoolRecord, open_spool
from queen_trio.spool.directory import SpoolDirectory

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture
async def directory(tmp_path: Path) -> Path:
    """A spool with a record set aside, and its file, which two others are in."""
    path = tmp_path / "spool"
    async with open_spool(path, 1 << 30) as spool:
        for n in range(3):
            await spool.append([SpoolRecord("q", f"p{n}", (b'{"n":%d}' % n,))])
        await spool.peek(1)
        await spool.quarantine("refused\nCONTEXT: at length", 5)
    return path


def run(directory: Path, *arguments: str) -> Result:
    environment = {"PG_HOST": "nowhere", "FILE_BUFFER_DIR": str(directory)}
    return CliRunner().invoke(main, ["spool", *arguments], env=environment)


async def test_ls(directory: Path) -> None:
    pending, failed = run(directory, "ls").stdout.splitlines()
    assert pending.split("\t")[:2] == ["pending", "0000000000000001"]
    # All that is in the file: how far its replay came nobody knows, nor needs to.
    assert "3 messages" in pending
    assert failed.split("\t") == ["failed", "0000000000000001-0", "q/p0", "refused"]


async def test_show(directory: Path) -> None:
    shown = run(directory, "show", "0000000000000001-0")
    assert json.loads(shown.stdout) == {"n": 0}
    assert shown.stderr == "q/p0:\n"
    everything = run(directory, "show", "0000000000000001").stdout
    assert [json.loads(line)["n"] for line in everything.splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(
    "arguments", [["0000000000000001-0"], ["0000000000000001-0"] * 2, ["--all"]]
)
async def test_replay(directory: Path, arguments: list[str]) -> None:
    assert "will be replayed" in run(directory, "replay", *arguments).stdout
    lines = run(directory, "ls").stdout.splitlines()
    assert [line.split("\t")[:2] for line in lines] == [
        ["pending", "0000000000000001"],
        ["pending", "0000000000000002"],
    ]
    assert list((directory / "failed").iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["replay"], ["replay", "--all", "x"], ["replay", "x"], ["show", "x"]]
)
async def test_what_is_not_there(directory: Path, arguments: list[str]) -> None:
    result = run(directory, *arguments)
    assert result.exit_code == 2
    assert "Error:" in result.stderr


def test_no_spool(tmp_path: Path) -> None:
    result = run(tmp_path / "none", "ls")
    assert result.exit_code == 1
    assert "there is no spool at" in result.stderr
    assert not (tmp_path / "none").exists()


async def test_a_spool_in_use(directory: Path) -> None:
    broker = SpoolDirectory(directory)
    broker.open()
    try:
        result = run(directory, "ls")
    finally:
        broker.close()
    assert result.exit_code == 1
    assert "another broker" in result.stderr
