"""The switches in queen.system_state; see sql/functions/140_system.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from queen_trio.model.admission import Lane

from .connection import Statement

if TYPE_CHECKING:
    from .pool import Pool

_SWITCHES: Final = Statement("switches", "SELECT key, enabled FROM queen.switches_v1()")
_SET_SWITCH: Final = Statement("set_switch", "SELECT queen.set_switch_v1($1, $2)", Lane.MAINT)


class SystemStore:
    """What all brokers on a database share; every method may raise what `Pool.fetch` raises."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def switches(self) -> dict[str, bool]:
        """Read the switches that have ever been set."""
        return dict(await self._pool.fetch(_SWITCHES))

    async def set_switch(self, key: str, *, enabled: bool) -> None:
        """Write one."""
        await self._pool.fetch(_SET_SWITCH, key, enabled)
