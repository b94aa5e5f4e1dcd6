"""A client's keep-alive HTTP/1.1 connection to the broker: an asyncio protocol on httptools.

The load must cost little beside what it measures, so there is no client library in between.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import httptools

from bench.load import payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.load import Load

HOST = "127.0.0.1"


class Http(asyncio.Protocol):
    """One connection, one request at a time."""

    _transport: asyncio.Transport
    _reply: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        answer = self._parser.get_status_code(), b"".join(self._parts)
        self._next()
        assert self._reply is not None
        self._reply.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(exc or ConnectionError("closed by the broker"))

    def _next(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []

    async def call(self, method: str, path: str, body: str = "") -> bytes:
        """Return the body of the answer; raises RuntimeError for an error status."""
        self._reply = asyncio.get_running_loop().create_future()
        encoded = body.encode()
        self._transport.write(
            f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(encoded)}\r\n\r\n".encode()
            + encoded
        )
        status, answer = await self._reply
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {answer[:300]!r}")
        return answer


class BrokerConnection:
    """Push, pop and ack over one HTTP connection."""

    def __init__(self, http: Http, load: Load, index: int) -> None:
        self._http = http
        self._queue = load.queue
        # Each connection walks through all partitions in one random order, from a place of its own.
        self._partitions = list(range(load.partitions))
        random.Random(7).shuffle(self._partitions)
        self._lane = random.Random(load.first + index).randrange(load.partitions)
        self._pop = f"/api/v1/pop/queue/{self._queue}?autoAck=false&wait=true"
        self._group = f"g{index % load.groups}" if load.groups else None
        if self._group is not None:
            self._pop += f"&consumerGroup={self._group}&subscriptionMode=all"

    async def push(self, numbers: Sequence[int]) -> None:
        """Push messages into the next partition; return once the broker has confirmed them."""
        self._lane = (self._lane + 1) % len(self._partitions)
        partition = f"p{self._partitions[self._lane]}"
        items = ",".join(
            f'{{"queue":"{self._queue}","partition":"{partition}","payload":{payload(number)}}}'
            for number in numbers
        )
        await self._push(items, len(numbers))

    async def push_each(self, partitions: Sequence[int]) -> None:
        """Push one message into each of these partitions."""
        items = ",".join(
            f'{{"queue":"{self._queue}","partition":"p{number}","payload":{number}}}'
            for number in partitions
        )
        await self._push(items, len(partitions))

    async def _push(self, items: str, count: int) -> None:
        answer = await self._http.call("POST", "/api/v1/push", f'{{"items":[{items}]}}')
        if answer.count(b'"queued"') != count:
            raise RuntimeError(f"not all of {count} messages were stored: {answer[:300]!r}")

    async def receive(self, limit: int, timeout_ms: int) -> list[dict[str, Any]]:
        """Pop up to `limit` messages, waiting for the first; none after the time-out."""
        path = f"{self._pop}&batch={limit}&timeout={timeout_ms}"
        answer = await self._http.call("GET", path)
        messages: list[dict[str, Any]] = json.loads(answer)["messages"] if answer else []
        return messages

    async def acknowledge(self, messages: list[dict[str, Any]]) -> None:
        """Acknowledge what `receive` returned; raises RuntimeError if one is refused."""
        acks = [
            {
                "transactionId": message["transactionId"],
                "partitionId": message["partitionId"],
                "leaseId": message["leaseId"],
                "status": "completed",
            }
            for message in messages
        ]
        body = {"acknowledgments": acks, "consumerGroup": self._group}
        answer = await self._http.call("POST", "/api/v1/ack/batch", json.dumps(body))
        if answer.count(b'"success":true') != len(acks):
            raise RuntimeError(f"not all of {len(acks)} were acknowledged: {answer[:300]!r}")

    async def take(self, limit: int) -> list[int]:
        """Pop and acknowledge up to `limit` messages; return their numbers, none at the end."""
        messages = await self.receive(limit, timeout_ms=500)
        if messages:
            await self.acknowledge(messages)
        return [message["data"]["i"] for message in messages]

    async def drop(self, limit: int, partitions: int) -> int:
        """Take messages of many partitions without a lease; return how many they were."""
        path = f"/api/v1/pop/queue/{self._queue}?autoAck=true&batch={limit}&partitions={partitions}"
        answer = await self._http.call("GET", path)
        return len(json.loads(answer)["messages"]) if answer else 0

    async def configure(self) -> None:
        """Create the queue."""
        await self._http.call("POST", "/api/v1/configure", json.dumps({"queue": self._queue}))


async def connect_broker(load: Load, index: int) -> BrokerConnection:
    """Open connection number `index` of this process."""
    loop = asyncio.get_running_loop()
    _, http = await loop.create_connection(Http, HOST, int(load.address))
    return BrokerConnection(http, load, index)
