"""The sessions of README and tutorial, run as they stand there against a live broker."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.brokers import LiveBroker

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs/tutorial/work-queue.md"
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
SERVER_VERSION = re.compile(r'"postgres":"[^"]+"')


def sections(mark: str, page: Path = README) -> list[str]:
    """The fenced blocks below a mark."""
    return re.findall(rf"<!-- {mark} -->\n```\w+\n(.*?)```", page.read_text(), re.DOTALL)


def steps(session: str) -> list[tuple[str, str]]:
    """Commands, which begin with "$ " and go on in indented lines, with what they print."""
    pairs = []
    for step in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, *rest = step.splitlines()
        while rest and rest[0].startswith("    "):
            command += "\n" + rest.pop(0)
        pairs.append((command, "\n".join(rest).strip()))
    return pairs


def mask(text: str) -> str:
    """Replace what differs from run to run; equal ids stay recognisable as equal."""
    ids = {found: f"<id {n}>" for n, found in enumerate(dict.fromkeys(UUID.findall(text)))}
    text = UUID.sub(lambda match: ids[match[0]], text)
    return SERVER_VERSION.sub('"postgres":"<version>"', TIMESTAMP.sub("<time>", text))


def test_the_curl_session_prints_what_the_readme_says(broker: LiveBroker) -> None:
    pairs = [pair for session in sections("session: curl") for pair in steps(session)]
    script = "\n".join(f"{command}\necho; echo '<next>'" for command, _ in pairs)
    output = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", script.replace("localhost:6632", broker.url)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    printed = [part.strip() for part in output.split("<next>")[:-1]]
    assert mask("\n".join(printed)) == mask("\n".join(expected for _, expected in pairs))


def test_the_client_session_prints_what_the_readme_says(broker: LiveBroker) -> None:
    (session,) = sections("session: client")
    program = session.replace("http://localhost:6632", broker.url)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == sections("output: client")[0]


def test_the_tutorial_does_what_it_says(broker: LiveBroker) -> None:
    (session,) = sections("session: tutorial", TUTORIAL)
    program = session.replace("http://localhost:6632", broker.url)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    # Customers are worked on in any order, each one's invoices in theirs.
    printed = done.stdout.splitlines()
    assert [line for line in printed if "ada" in line] == ["mailed ada 1", "mailed ada 2"]
    assert [line for line in printed if line.startswith("mailed bob")] == ["mailed bob 2"]
    assert "archived 4" in printed
    assert "dead letter {'customer': 'bob', 'number': 1} no address" in printed
