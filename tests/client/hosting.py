"""Runs the asyncio client inside a Trio test: trio-asyncio hosts its event loop in this thread."""

from __future__ import annotations

import asyncio
import functools
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import trio

# Before whatever else binds asyncio's functions: trio-asyncio puts its own in their place.
import trio_asyncio
from anyio._backends import _asyncio as anyio_backend

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

# No scenario waits that long for anything but a fault.
SCENARIO_SECONDS = 40.0


def hosted(scenario: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Turn an asyncio scenario into a Trio test with the same fixtures."""

    @functools.wraps(scenario)
    async def test(**fixtures: Any) -> None:
        with trio.fail_after(SCENARIO_SECONDS), _signals_kept(), _anyio_hosted():
            async with trio_asyncio.open_loop():
                await trio_asyncio.aio_as_trio(scenario)(**fixtures)

    return test


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep SIGINT and SIGTERM from the client, which takes them for itself when it is created.

    They are for pytest here: the client's handler would tear Trio apart. Its shutdown is tested in
    a program of its own (test_program.py).
    """
    install = signal.signal

    def install_others(number: int, handler: Any) -> Any:
        if number in (signal.SIGINT, signal.SIGTERM):
            return signal.getsignal(number)
        return install(number, handler)

    with mock.patch.object(signal, "signal", install_others):
        yield


@contextmanager
def _anyio_hosted() -> Iterator[None]:
    """Let anyio, below httpx, see trio-asyncio's loop.

    anyio's pytest plugin is imported before any conftest, so its backend holds asyncio's own
    functions instead of those that trio-asyncio put in their place.
    """
    names = ("current_task", "get_running_loop")
    before = {name: getattr(anyio_backend, name) for name in names}
    try:
        for name in names:
            setattr(anyio_backend, name, getattr(asyncio, name))
        yield
    finally:
        for name, function in before.items():
            setattr(anyio_backend, name, function)
