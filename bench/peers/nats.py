"""NATS JetStream: a stream in files with one replica, a pull consumer; nats-py.

A publish is confirmed once it is written, before any fsync: the server's interval of syncs stays at
its default of two minutes. An acknowledgement is one more publish, which nothing confirms.
"""

from __future__ import annotations

import asyncio
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import nats
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from bench.load import number, payload
from bench.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DURABLE: Final = "workers"
MAX_UNACKNOWLEDGED: Final = 10_000
TAKE_SECONDS: Final = 0.3
LISTEN_SECONDS: Final = 5.0


class NatsProducer:
    """One connection that publishes to one subject."""

    def __init__(self, stream: Any, subject: str) -> None:
        self._stream = stream
        self._subject = subject

    async def push(self, numbers: Sequence[int]) -> None:
        if len(numbers) == 1:
            await self._stream.publish(self._subject, payload(numbers[0]).encode())
        else:
            publish = self._stream.publish_async
            await asyncio.gather(
                *[await publish(self._subject, payload(number).encode()) for number in numbers]
            )


class NatsConsumer:
    """One connection that shares the durable consumer."""

    def __init__(self, subscription: Any) -> None:
        self._subscription = subscription

    async def take(self, limit: int) -> list[int]:
        messages = await self.fetch(limit, TAKE_SECONDS)
        numbers = [number(message.data) for message in messages]
        for message in messages:
            await message.ack()
        return numbers

    async def fetch(self, limit: int, seconds: float) -> list[Any]:
        """Messages that arrive within so many seconds, once there is one."""
        try:
            messages: list[Any] = await self._subscription.fetch(limit, timeout=seconds)
        except asyncio.TimeoutError:  # noqa: UP041 - nats-py raises a class of its own of it
            return []
        return messages


class Nats(Peer):
    """One stream with one subject."""

    async def prepare(self) -> str:
        client = await self._connect()
        stream = client.jetstream()
        await stream.add_stream(
            StreamConfig(
                name=self.load.queue,
                subjects=[self.load.queue],
                storage=StorageType.FILE,
                num_replicas=1,
                retention=RetentionPolicy.LIMITS,
            )
        )
        await stream.add_consumer(
            self.load.queue,
            ConsumerConfig(
                durable_name=DURABLE,
                ack_policy=AckPolicy.EXPLICIT,
                max_ack_pending=MAX_UNACKNOWLEDGED,
            ),
        )
        server = client.connected_server_version
        return (
            f"NATS {server.major}.{server.minor}.{server.patch}, "
            f"nats-py {metadata.version('nats-py')}"
        )

    async def _connect(self) -> Any:
        return await nats.connect(f"nats://127.0.0.1:{self.load.address}")

    async def producers(self, count: int) -> Sequence[NatsProducer]:
        return [
            NatsProducer((await self._connect()).jetstream(), self.load.queue) for _ in range(count)
        ]

    async def consumers(self, count: int) -> Sequence[NatsConsumer]:
        streams = [(await self._connect()).jetstream() for _ in range(count)]
        return [
            NatsConsumer(await stream.pull_subscribe_bind(durable=DURABLE, stream=self.load.queue))
            for stream in streams
        ]

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        [consumer] = await self.consumers(1)
        while True:
            for message in await consumer.fetch(1, LISTEN_SECONDS):
                received([number(message.data)])
                await message.ack()
