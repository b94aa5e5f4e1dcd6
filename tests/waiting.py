"""Waiting for what no Event tells of: what a server or another process did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable


async def wait_until(condition: Callable[[], bool]) -> None:
    """Block until the condition holds; fails after 10 s."""
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - no Event tells
            await trio.sleep(0.005)
