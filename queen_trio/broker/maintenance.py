"""Maintenance: pushes go to the spool, or pops get nothing, on every broker (spec 2, spec 8.14).

A switch is written to the database first, then set here and told to the others; who didn't hear it
reads it at the next reconciliation.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio

from queen_trio.errors import ClientError

from .outage import ride_out

if TYPE_CHECKING:
    from queen_trio.store.system import SystemStore

log = structlog.get_logger(__name__)


class Switch(Enum):
    """A mode by its key in queen.system_state."""

    PUSH = "maintenance"
    POP = "pop_maintenance"


class Maintenance:
    """What is switched on, as far as this broker knows; it starts with nothing."""

    def __init__(self, store: SystemStore) -> None:
        self._store = store
        self._on: set[Switch] = set()
        self._changes = 0
        self._pops_open = trio.Event()
        self._pops_open.set()

    @property
    def push(self) -> bool:
        """Whether pushes go to the spool, which is not replayed meanwhile."""
        return Switch.PUSH in self._on

    @property
    def pop(self) -> bool:
        """Whether pops get nothing."""
        return Switch.POP in self._on

    def check_writable(self) -> None:
        """Raise a ClientError (503) during push maintenance: this can't wait in the spool."""
        if self.push:
            raise ClientError("the queue is in maintenance", status=503, code="maintenance")

    async def wait_pops_open(self) -> None:
        """Return as soon as pops may have something."""
        await self._pops_open.wait()

    async def store(self, switch: Switch, *, enabled: bool) -> None:
        """Write a switch down; rides out a short outage, then raises `DatabaseUnavailable`."""
        await ride_out(partial(self._store.set_switch, switch.value, enabled=enabled))

    def set(self, switch: Switch, *, enabled: bool) -> None:
        """Follow a switch from now on."""
        self._changes += 1
        if enabled == (switch in self._on):
            return
        log.warning("maintenance", mode=switch.value, enabled=enabled)
        if enabled:
            self._on.add(switch)
        else:
            self._on.discard(switch)
        if switch is Switch.POP:
            if enabled:
                self._pops_open = trio.Event()
            else:
                self._pops_open.set()

    async def refresh(self) -> None:
        """Read all switches; raises `DatabaseError`. What is set meanwhile is newer and wins."""
        changes = self._changes
        found = await self._store.switches()
        if changes == self._changes:
            for switch in Switch:
                self.set(switch, enabled=found.get(switch.value, False))
