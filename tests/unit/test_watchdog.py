"""The watchdog, in processes that hang and in some that don't."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from queen_trio.watchdog import EXIT_HUNG

LIMIT_SECONDS = 0.6
START_SECONDS = 30.0

PROGRAM = """
import os, sys, time
import trio
from queen_trio import watchdog

watchdog.REPORT_SECONDS = 0.5

async def main():
    async with trio.open_nursery() as nursery:
        await nursery.start(watchdog.serve_watchdog, {limit})
        await load()
        nursery.cancel_scope.cancel()

{load}
trio.run(main)
# The thread has ended with its task: nobody watches a loop that isn't there.
time.sleep({limit} * 1.5)
print("survived")
"""


def child(load: str, **more: int) -> subprocess.Popen[str]:
    program = PROGRAM.format(limit=LIMIT_SECONDS, load=textwrap.dedent(load))
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        **({"stderr": subprocess.PIPE} | more),  # type: ignore[call-overload]
    )


@pytest.mark.parametrize(
    "hang",
    ["time.sleep(60)", "while True: pass", "os.read(os.pipe()[0], 1)"],
)
def test_a_hanging_loop_ends_the_process_with_all_stacks(hang: str) -> None:
    process = child(f"async def load():\n    hangs_here()\ndef hangs_here():\n    {hang}")
    out, err = process.communicate(timeout=START_SECONDS)
    assert process.returncode == EXIT_HUNG
    assert err.startswith(f"watchdog: the event loop hangs since {LIMIT_SECONDS} s, aborting\n")
    assert "in hangs_here" in err
    assert err.count("hread 0x") == 2  # the loop's, and the watchdog's own
    assert not out


def test_a_loop_that_is_busy_but_turns_is_left_alone() -> None:
    process = child(
        f"""
        async def load():
            until = time.monotonic() + {LIMIT_SECONDS} * 3
            while time.monotonic() < until:
                busy = time.monotonic() + {LIMIT_SECONDS} / 3
                while time.monotonic() < busy:
                    pass
                await trio.lowlevel.checkpoint()
        """
    )
    assert process.communicate(timeout=START_SECONDS) == ("survived\n", "")
    assert process.returncode == 0


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    process = child(
        """
        async def load():
            print("ready", flush=True)
            for _ in range(3):  # turns before and after
                await trio.sleep(0.1)
            assert await trio.to_thread.run_sync(sys.stdin.readline) == "go on\\n"
        """,
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(LIMIT_SECONDS * 2)
    process.send_signal(signal.SIGCONT)
    assert process.communicate("go on\n", timeout=START_SECONDS) == ("survived\n", "")
    assert process.returncode == 0


def test_a_stderr_that_takes_nothing_does_not_save_a_hanging_process() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    process = child("async def load():\n    os.write(2, b'x')", stderr=writer)
    try:
        process.communicate(timeout=START_SECONDS)
        assert process.returncode == -signal.SIGALRM
    finally:
        os.close(reader)
        os.close(writer)


def test_the_daemon_is_watched() -> None:
    program = f"""
import time, trio
from queen_trio import config, daemon

def hangs_here(*_):
    time.sleep(60)

daemon.WATCHDOG_SECONDS = {LIMIT_SECONDS}
daemon.open_spool = hangs_here
trio.run(daemon.run, config.load({{"PG_HOST": "127.0.0.1"}}))
"""
    process = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=START_SECONDS
    )
    assert process.returncode == EXIT_HUNG
    assert "in hangs_here" in process.stderr
