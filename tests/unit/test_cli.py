"""The command line as an operator meets it: real processes, their streams, their exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import structlog
import trio

from queen_trio.cli import exit_code
from queen_trio.config import Config, load, reference_page
from queen_trio.errors import SchemaError
from queen_trio.log import LogLevel, configure

BARE = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def queen_trio(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command line with no environment but `environ` and what a shell needs."""
    return subprocess.run(
        [sys.executable, "-m", "queen_trio", *argv],
        env=BARE | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_version() -> None:
    assert queen_trio("--version").stdout == f"queen-trio {version('queen-trio')}\n"


def test_help_names_the_commands_and_the_exit_codes() -> None:
    done = queen_trio("-h")
    assert done.returncode == 0
    for words in ("serve", "config", "Exit codes: 0"):
        assert words in done.stdout


def test_config_prints_the_effective_values_and_warns_on_stderr() -> None:
    done = queen_trio("config", PORT="7001", QUEEN_SYNC_SECRET="hush-hush", QUEEN_PROT="1")
    assert done.returncode == 0
    assert ["PORT", "6632", "7001"] in [line.split()[:3] for line in done.stdout.splitlines()]
    assert "hush-hush" not in done.stdout + done.stderr
    assert "WARNING: unknown variable QUEEN_PROT" in done.stderr


def test_config_prints_the_reference_page() -> None:
    assert queen_trio("config", "--markdown", PORT="nonsense").stdout == reference_page()


@pytest.mark.parametrize("command", ["serve", "config"])
def test_a_faulty_configuration_ends_with_2_and_one_line_per_fault(command: str) -> None:
    done = queen_trio(command, JWT_ENABLED="maybe", PORT="0x50")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        'FATAL: PORT="0x50" is not an integer (0 to 65535)',
        'FATAL: JWT_ENABLED="maybe" is not a boolean (true/false, 1/0, yes/no, on/off)',
    ]


def test_a_value_that_only_the_boot_can_try_ends_with_2_too() -> None:
    done = queen_trio("serve", JWT_ENABLED="true", JWT_PUBLIC_KEY="no key", PG_HOST="127.0.0.1")
    assert done.returncode == 2
    assert "FATAL: JWT_PUBLIC_KEY is not a public key in PEM" in done.stderr


def test_an_unknown_command_ends_with_2() -> None:
    assert queen_trio("srve").returncode == 2


@pytest.fixture
def logged(logging_as_before: None) -> io.StringIO:
    stream = io.StringIO()
    configure(level=LogLevel.INFO, json=True, stream=stream)
    return stream


def test_the_exit_code_is_what_the_broker_returns() -> None:
    async def run(config: Config) -> int:
        await trio.lowlevel.checkpoint()
        return config.server.port

    assert exit_code(run, load({"PORT": "7"})) == 7


def test_a_failed_boot_is_1_and_a_sentence(
    logged: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen_trio.cli.log", structlog.get_logger())

    async def run(config: Config) -> int:
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            inner.start_soon(fail, "the schema is newer")
            outer.start_soon(fail, "the schema is locked")
        return 0

    async def fail(reason: str) -> None:
        raise SchemaError(reason)

    assert exit_code(run, load({})) == 1
    events = {json.loads(line)["event"] for line in logged.getvalue().splitlines()}
    assert events == {"FATAL: the schema is newer", "FATAL: the schema is locked"}


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    async def run(config: Config) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        exit_code(run, load({}))


def test_a_number_of_workers_that_makes_no_sense_ends_with_2() -> None:
    for number in ("0", "17", "two"):
        done = queen_trio("serve", "--workers", number)
        assert done.returncode == 2
        assert "--workers" in done.stderr
