"""Lanes: a few tasks that turn whatever has accumulated into one database call after another.

This is how requests share commits (spec 1, "Fusion"). There is no linger: an idle lane takes the
first submission at once, and what arrives while the lanes are busy is taken together by the next.
One lane at a time works best: the most share a commit. But a call may wait, for a lock or a slow
disk, and those behind it must not: work that has waited for OVERTAKE_SECONDS gets another lane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

Bundle = TypeVar("Bundle")

# Several times what a call takes on a disk that is not troubled.
OVERTAKE_SECONDS: Final = 0.02


class Lanes(Generic[Bundle]):
    """`width` tasks that each loop over `take_nowait()` and `await flush(bundle)`.

    `take_nowait` returns None when nothing is ready. `flush` handles its own errors: it owes an
    answer to everyone whose work is in the bundle.
    """

    def __init__(
        self,
        width: int,
        take_nowait: Callable[[], Bundle | None],
        flush: Callable[[Bundle], Awaitable[None]],
    ) -> None:
        self._width = width
        self._flushing = 0
        self._take_nowait = take_nowait
        self._flush = flush
        self._idle = trio.lowlevel.ParkingLot()
        self._woken = False
        self._held_up = trio.Event()
        self._closing = False

    def wake(self) -> None:
        """Say that something is ready: one lane will look, soon."""
        if self._flushing:
            self._held_up.set()
        else:
            self._unpark()

    def _unpark(self) -> None:
        if not self._woken and self._idle:
            self._woken = True
            self._idle.unpark()

    def close(self) -> None:
        """Let `serve` return once everything that is ready has been flushed."""
        self._closing = True
        self._idle.unpark_all()

    async def serve(self) -> None:
        """Run the lanes until `close`, or until cancelled (then what is in flight fails)."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._overtake)
            async with trio.open_nursery() as lanes:
                for _ in range(self._width):
                    lanes.start_soon(self._run_lane)
            nursery.cancel_scope.cancel()

    async def _overtake(self) -> None:
        """Let another lane look when there was work and the first one was busy."""
        while True:
            self._held_up = trio.Event()
            await self._held_up.wait()
            await trio.sleep(OVERTAKE_SECONDS)
            self._unpark()

    async def _run_lane(self) -> None:
        while True:
            bundle = self._take_nowait()
            if bundle is None:
                if self._closing:
                    return
                await self._idle.park()
                self._woken = False
                continue
            self._flushing += 1
            try:
                await self._flush(bundle)
            finally:
                self._flushing -= 1
