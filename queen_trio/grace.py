"""How long what is under way may still take once nobody waits for it: shields with a deadline.

A statement that was sent, a record that is half on the disk, a PostgreSQL that stops: each is left
to finish through a cancellation, for a time of its own, but never past the end of a shutdown.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

import trio
from attrs import field, mutable

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@mutable(eq=False)
class Grace:
    """How long shields may last, in seconds; a shutdown shortens all of them (spec 8.20)."""

    seconds: float = math.inf
    _until: float = math.inf
    _scopes: WeakSet[trio.CancelScope] = field(factory=WeakSet)

    def limit(self, until: float) -> None:
        """End every shield, present and future, by `until` (Trio's clock)."""
        self._until = min(self._until, until)
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, self._until)

    def deadline(self, seconds: float | None = None) -> float:
        """Return when a shield that starts now and asks for `seconds` (GRACE) must end."""
        return min(
            trio.current_time() + (self.seconds if seconds is None else seconds), self._until
        )

    def shield(self, seconds: float | None = None) -> trio.CancelScope:
        """Return a scope that shields from cancellation for `seconds`, GRACE by default."""
        scope = trio.CancelScope(shield=True, deadline=self.deadline(seconds))
        self._scopes.add(scope)
        return scope

    async def run_sync(self, call: Callable[[], T]) -> T:
        """Run what blocks in a thread, and wait for it through a cancellation, up to the limit.

        Then the thread is left to itself, whatever it hangs on: Cancelled, or TimeoutError for who
        isn't cancelled. Past the limit nothing is started any more.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        with self.shield(math.inf):
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True)
        await trio.lowlevel.checkpoint_if_cancelled()
        raise TimeoutError("no answer before the end of the shutdown")
