"""The client in a program of its own, on asyncio's own loop, ended by SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.client.hosting import hosted
from tests.client.releases import directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from tests.brokers import LiveBroker

WORKER = Path(__file__).with_name("worker.py")
STOP_SECONDS = 20.0


@pytest.fixture
def worker(release: str, shared_broker: LiveBroker, name: str) -> Iterator[subprocess.Popen[str]]:
    """The program, which moves messages from a queue to another."""
    with subprocess.Popen(
        [sys.executable, str(WORKER), shared_broker.url, f"{name}-in", f"{name}-out"],
        env=os.environ | {"PYTHONPATH": str(directory(release))},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


@hosted
async def test_sigterm_flushes_and_ends(
    client: ModuleType, worker: subprocess.Popen[str], shared_broker: LiveBroker, name: str
) -> None:
    assert worker.stdout is not None
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(f"{name}-in").push([{"data": n} for n in range(3)])
        for _ in range(3):
            assert await asyncio.to_thread(worker.stdout.readline) == "handled\n"
        # All of it is in the program's buffer still.
        assert await queen.queue(f"{name}-out").wait(False).pop() == []
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, STOP_SECONDS) == 0
        messages = await queen.queue(f"{name}-out").batch(10).wait(False).pop()
    assert [message["data"] for message in messages] == [0, 2, 4]


@hosted
async def test_a_hosted_client_leaves_the_signals_to_pytest(
    client: ModuleType, shared_broker: LiveBroker
) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    async with client.Queen(shared_broker.url):
        assert [signal.getsignal(number) for number in numbers] == before
    assert [signal.getsignal(number) for number in numbers] == before
