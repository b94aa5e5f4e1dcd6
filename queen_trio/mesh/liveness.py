"""Which brokers were heard lately: for the log and the statistics, nothing routes on it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import structlog
import trio
from attrs import define, field

log = structlog.get_logger(__name__)

# Server ids come from the wire: a stranger in open mode must not fill the memory with them.
MAX_SERVERS: Final = 256
# A broker that hasn't been heard for so long was taken away, or came back under another name.
FORGET_SECONDS: Final = 3600.0
CHECK_LEAST_SECONDS: Final = 0.1


@define(eq=False)
class Liveness:
    """Server ids with the time of their last frame; dead after `dead_seconds` of silence."""

    dead_seconds: float
    # The one that was silent longest stands first.
    _heard: OrderedDict[str, float] = field(factory=OrderedDict)
    _told_alive: set[str] = field(factory=set)

    def hear(self, server_id: str) -> None:
        """Note a frame of this server."""
        self._heard[server_id] = trio.current_time()
        self._heard.move_to_end(server_id)
        if server_id not in self._told_alive:
            self._told_alive.add(server_id)
            log.info("mesh peer alive", server_id=server_id)
        if len(self._heard) > MAX_SERVERS:
            self._forget_first()

    def alive(self) -> list[str]:
        return self._by_state(alive=True)

    def dead(self) -> list[str]:
        return self._by_state(alive=False)

    async def serve(self) -> None:
        """Log who died, and forget who is gone, until cancelled."""
        while True:
            await trio.sleep(max(self.dead_seconds / 4, CHECK_LEAST_SECONDS))
            for server_id in self.dead():
                if server_id in self._told_alive:
                    self._told_alive.discard(server_id)
                    log.warning("mesh peer dead", server_id=server_id)
            while self._heard and self._silence(next(iter(self._heard))) > FORGET_SECONDS:
                self._forget_first()

    def _by_state(self, *, alive: bool) -> list[str]:
        return sorted(
            server_id
            for server_id in self._heard
            if (self._silence(server_id) < self.dead_seconds) is alive
        )

    def _silence(self, server_id: str) -> float:
        return trio.current_time() - self._heard[server_id]

    def _forget_first(self) -> None:
        server_id, _ = self._heard.popitem(last=False)
        self._told_alive.discard(server_id)
