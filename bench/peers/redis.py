"""Redis Streams: XADD, XREADGROUP, XACK by redis-py on hiredis; entries stay after the XACK."""

from __future__ import annotations

import uuid
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import redis.asyncio

from bench.load import number, payload
from bench.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GROUP: Final = "workers"
FIELD: Final = b"p"
LISTEN_MS: Final = 5000


class RedisConnection:
    """One connection, for one stream."""

    def __init__(self, client: Any, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._name = uuid.uuid4().hex

    async def push(self, numbers: Sequence[int]) -> None:
        if len(numbers) == 1:
            await self._client.xadd(self._stream, {"p": payload(numbers[0])})
        else:
            pipeline = self._client.pipeline(transaction=False)
            for each in numbers:
                pipeline.xadd(self._stream, {"p": payload(each)})
            await pipeline.execute()

    async def take(self, limit: int) -> list[int]:
        return await self.read(limit)

    async def read(
        self,
        limit: int,
        *,
        block_ms: int | None = None,
        received: Callable[[Sequence[int]], None] | None = None,
    ) -> list[int]:
        """Read entries that no other consumer has got, report, and acknowledge them."""
        reply = await self._client.xreadgroup(
            GROUP, self._name, {self._stream: ">"}, count=limit, block=block_ms
        )
        if not reply:
            return []
        # Releases of redis-py differ: a list of streams or a mapping, with or without a list more.
        entries = next(iter(reply.items() if isinstance(reply, dict) else reply))[1]
        if isinstance(entries[0], list):
            entries = entries[0]
        numbers = [number(fields[FIELD]) for _, fields in entries]
        if received is not None:
            received(numbers)
        await self._client.xack(self._stream, GROUP, *[entry[0] for entry in entries])
        return numbers


class Redis(Peer):
    """One stream with one consumer group."""

    async def prepare(self) -> str:
        client = self._client()
        await client.flushall()
        await client.xgroup_create(self.load.queue, GROUP, id="0", mkstream=True)
        server = (await client.info("server"))["redis_version"]
        await client.aclose()
        return f"Redis {server}, redis-py {metadata.version('redis')}"

    def _client(self) -> Any:
        return redis.asyncio.Redis(port=int(self.load.address), single_connection_client=True)

    async def producers(self, count: int) -> Sequence[RedisConnection]:
        connections = []
        for _ in range(count):
            client = self._client()
            await client.ping()
            connections.append(RedisConnection(client, self.load.queue))
        return connections

    consumers = producers

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        [consumer] = await self.consumers(1)
        while True:
            await consumer.read(100, block_ms=LISTEN_MS, received=received)
