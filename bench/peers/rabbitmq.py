"""RabbitMQ: a durable queue, persistent messages, publisher confirms; pika on asyncio.

AMQP knows no batch: 100 messages are 100 publishes on one channel, and then the wait for all their
confirms. A consumer has a prefetch of 200 and acknowledges 100 at a time.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import pika
from pika.adapters.asyncio_connection import AsyncioConnection

from bench.load import number, payload
from bench.peers.peer import Clock, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HOST: Final = "127.0.0.1"
PREFETCH: Final = 200
PERSISTENT: Final = pika.BasicProperties(delivery_mode=2, content_type="application/json")
# Nothing arrived for so long: what is held back of the acknowledgements goes; the queue is empty.
FLUSH_SECONDS: Final = 0.1
EMPTY_SECONDS: Final = 0.5
LOOK_SECONDS: Final = 0.05


class Channel:
    """One connection with one channel; confirms become futures."""

    def __init__(self, connection: Any, channel: Any, queue: str) -> None:
        self.connection = connection
        self.channel = channel
        self._queue = queue
        self._tag = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def enable_confirms(self) -> None:
        """Have the server confirm what is published."""
        selected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.channel.confirm_delivery(self._confirmed, selected.set_result)
        await selected

    async def push(self, numbers: Sequence[int]) -> None:
        await asyncio.gather(*[self._publish(payload(number).encode()) for number in numbers])

    def _publish(self, body: bytes) -> asyncio.Future[None]:
        self._tag += 1
        confirmed = self._waiting[self._tag] = asyncio.get_running_loop().create_future()
        self.channel.basic_publish("", self._queue, body, PERSISTENT)
        return confirmed

    def _confirmed(self, frame: Any) -> None:
        method = frame.method
        last = method.delivery_tag
        for tag in [t for t in self._waiting if t <= last] if method.multiple else [last]:
            future = self._waiting.pop(tag)
            if method.NAME == "Basic.Ack":
                future.set_result(None)
            else:
                future.set_exception(RuntimeError("the server refused a message"))


async def connect(port: int, queue: str) -> Channel:
    """Open a connection and a channel."""
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[Any] = loop.create_future()
    connection = AsyncioConnection(
        pika.ConnectionParameters(HOST, port, heartbeat=0),
        on_open_callback=opened.set_result,
        on_open_error_callback=lambda _, error: opened.set_exception(error),
    )
    await opened
    opened = loop.create_future()
    connection.channel(on_open_callback=opened.set_result)
    return Channel(connection, await opened, queue)


class RabbitMQ(Peer):
    """One queue."""

    queue_type = ""

    async def prepare(self) -> str:
        channel = await connect(int(self.load.address), self.load.queue)
        declared: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        channel.channel.queue_declare(
            self.load.queue,
            durable=True,
            arguments={"x-queue-type": self.queue_type},
            callback=declared.set_result,
        )
        await declared
        server = channel.connection.server_properties["version"]
        return f"RabbitMQ {server}, pika {pika.__version__}"

    async def producers(self, count: int) -> Sequence[Channel]:
        channels = [await self._open() for _ in range(count)]
        for channel in channels:
            await channel.enable_confirms()
        return channels

    async def _open(self) -> Channel:
        return await connect(int(self.load.address), self.load.queue)

    async def drain(self, clock: Clock) -> None:
        channels = clock.keep([await self._open() for _ in range(self.load.connections)])
        await clock.start()
        arrived = time.perf_counter()
        unacknowledged: dict[Any, tuple[int, int]] = {}  # channel: how many, and the last's tag

        def deliver(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            nonlocal arrived
            arrived = time.perf_counter()
            clock.receive(number(body))
            count, tag = unacknowledged.get(channel, (0, 0))[0] + 1, method.delivery_tag
            if count == self.load.batch:
                channel.basic_ack(tag, multiple=True)
                count = 0
            unacknowledged[channel] = (count, tag)

        for each in channels:
            each.channel.basic_qos(prefetch_count=PREFETCH)
            each.channel.basic_consume(self.load.queue, deliver)
        while not clock.expired() and time.perf_counter() - arrived < EMPTY_SECONDS:
            await asyncio.sleep(LOOK_SECONDS)
            if time.perf_counter() - arrived > FLUSH_SECONDS:
                for channel, (count, tag) in unacknowledged.items():
                    if count:
                        channel.basic_ack(tag, multiple=True)
                unacknowledged.clear()

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        consumer = await self._open()

        def deliver(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            received([number(body)])
            channel.basic_ack(method.delivery_tag)

        consumer.channel.basic_qos(prefetch_count=PREFETCH)
        consumer.channel.basic_consume(self.load.queue, deliver)
        await asyncio.Event().wait()


class Quorum(RabbitMQ):
    """A quorum queue on one node, which syncs before it confirms."""

    queue_type = "quorum"


class Classic(RabbitMQ):
    """A classic queue."""

    queue_type = "classic"
