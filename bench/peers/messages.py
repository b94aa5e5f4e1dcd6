"""What our two ways to load the broker share: a consumer of messages with leases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# How long a drain's pop waits for more, and the one that measures latency.
TAKE_MS: Final = 300
LISTEN_MS: Final = 5000


class MessageConsumer:
    """Pops batches and acknowledges them, as `receive` and `acknowledge` do it."""

    async def receive(self, limit: int, timeout_ms: int) -> list[dict[str, Any]]:
        """Pop up to `limit` messages, waiting for the first; none after the time-out."""
        raise NotImplementedError

    async def acknowledge(self, messages: list[dict[str, Any]]) -> None:
        """Acknowledge what `receive` returned; raises RuntimeError if one is refused."""
        raise NotImplementedError

    async def take(self, limit: int) -> list[int]:
        """Pop and acknowledge up to `limit` messages; return their numbers, none at the end."""
        messages = await self.receive(limit, TAKE_MS)
        if messages:
            await self.acknowledge(messages)
        return [message["data"]["i"] for message in messages]

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        """What `Peer.listen` does, by this consumer."""
        while True:
            if messages := await self.receive(100, LISTEN_MS):
                received([message["data"]["i"] for message in messages])
                await self.acknowledge(messages)
