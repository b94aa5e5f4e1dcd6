"""Our broker as its users load it: by the official Python client, on httpx, with its defaults.

What queen.py leaves out for the load's sake is here: the client's builders, its JSON, its pool.
Each connection has a client of its own: one client keeps ten connections at most, so sixteen in one
process, as many as fill a backlog, would be opened again and again.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from queen import Queen

from bench.load import PAD, walk
from bench.peers.messages import MessageConsumer
from bench.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.load import Load


class ClientConnection(MessageConsumer):
    """Push, pop and ack by one client, with one request at a time."""

    def __init__(self, client: Queen, load: Load, index: int) -> None:
        self._client = client
        self._queue = load.queue
        self._partitions = walk(load, index)

    async def push(self, numbers: Sequence[int]) -> None:
        """Push messages into the next partition; return once the broker has confirmed them."""
        messages: list[dict[str, Any]] = [{"data": {"i": number, "pad": PAD}} for number in numbers]
        queue = self._client.queue(self._queue).partition(f"p{next(self._partitions)}")
        answer = await queue.push(messages)
        # The client raises for a message that failed, but not for a duplicate.
        if [item["status"] for item in answer] != ["queued"] * len(messages):
            raise RuntimeError(f"not all of {len(messages)} messages were stored: {answer[:3]!r}")

    async def receive(self, limit: int, timeout_ms: int) -> list[dict[str, Any]]:
        """Pop up to `limit` messages, waiting for the first; none after the time-out.

        The client returns none for a pop that failed, too, but prints that, and whatever is printed
        before this process's report fails the workload.
        """
        queue = self._client.queue(self._queue).batch(limit).timeout_millis(timeout_ms)
        return await queue.pop()

    async def acknowledge(self, messages: list[dict[str, Any]]) -> None:
        """Acknowledge what `receive` returned; raises RuntimeError if one is refused."""
        answer = await self._client.ack(messages)
        # It reports refused ones as no success of the whole.
        if not answer["success"] or len(answer["results"]) != len(messages):
            raise RuntimeError(f"not all of {len(messages)} were acknowledged: {answer!r:.300}")


class QueenClient(Peer):
    """The official client's batch calls: a push of a list, a pop, an ack of its messages."""

    async def prepare(self) -> str:
        # Its queues come with the first push.
        return f"queen-mq {metadata.version('queen-mq')}, httpx {metadata.version('httpx')}"

    async def producers(self, count: int) -> Sequence[ClientConnection]:
        connections = []
        for index in range(count):
            client = Queen(f"http://127.0.0.1:{self.load.address}")
            await client.admin.health()  # connects
            connections.append(ClientConnection(client, self.load, index))
        return connections

    consumers = producers

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        [consumer] = await self.consumers(1)
        await consumer.listen(received)
