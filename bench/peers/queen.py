"""Our broker, over HTTP/1.1 keep-alive connections: an asyncio protocol and bytes.

The load must cost little beside what it measures, as it does for peers whose drivers are written in
C, so there is no client library in between (queen_client.py has it). What it leaves out is
generality, not work: every answer is checked, every payload decoded, every message acknowledged and
that confirmed.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final, cast

from bench.load import payload, walk
from bench.peers.messages import MessageConsumer
from bench.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.load import Load

HOST: Final = "127.0.0.1"
_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length: "


class Http(asyncio.Protocol):
    """One connection, one request at a time."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._reply: asyncio.Future[bytes] | None = None
        self._parts: list[bytes] = []
        self._missing = 0  # bytes of the answer that began in `_parts`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has no such base

    def data_received(self, data: bytes) -> None:
        if self._parts:
            self._parts.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = b"".join(self._parts)
            self._parts.clear()
        head = data.find(_HEAD_END)
        if head < 0:
            self._missing, self._parts = 1, [data]
            return
        body, length = head + len(_HEAD_END), 0
        field = data.find(_LENGTH, 0, head)
        if field >= 0:
            length = int(data[field + len(_LENGTH) : data.find(b"\r", field)])
        if len(data) < body + length:
            self._missing, self._parts = body + length - len(data), [data]
            return
        assert self._reply is not None
        if data[9:12] < b"300":  # HTTP/1.1 200
            self._reply.set_result(data[body:])
        else:
            self._reply.set_exception(RuntimeError(f"the broker answered {data[:400]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(exc or ConnectionError("closed by the broker"))

    def get(self, path: str) -> asyncio.Future[bytes]:
        """The body of the answer; raises RuntimeError for an error status."""
        return self._send(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n")

    def post(self, path: str, body: str) -> asyncio.Future[bytes]:
        """The same, with a JSON body (in ASCII)."""
        return self._send(
            f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )

    def _send(self, request: str) -> asyncio.Future[bytes]:
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request.encode("ascii"))
        return self._reply


class BrokerConnection(MessageConsumer):
    """Push, pop and ack over one HTTP connection."""

    def __init__(self, http: Http, load: Load, index: int) -> None:
        self._http = http
        self._queue = load.queue
        self._partitions = walk(load, index)
        self._pop = f"/api/v1/pop/queue/{self._queue}?autoAck=false&wait=true"
        self._group = f"g{index % load.groups}" if load.groups else None
        if self._group is not None:
            self._pop += f"&consumerGroup={self._group}&subscriptionMode=all"

    async def push(self, numbers: Sequence[int]) -> None:
        """Push messages into the next partition; return once the broker has confirmed them."""
        item = f'{{"queue":"{self._queue}","partition":"p{next(self._partitions)}","payload":'
        items = f"}},{item}".join([payload(number) for number in numbers])
        await self._push(f'{{"items":[{item}{items}}}]}}', len(numbers))

    async def push_each(self, partitions: Sequence[int]) -> None:
        """Push one message into each of these partitions."""
        items = ",".join(
            f'{{"queue":"{self._queue}","partition":"p{number}","payload":{number}}}'
            for number in partitions
        )
        await self._push(f'{{"items":[{items}]}}', len(partitions))

    async def _push(self, body: str, count: int) -> None:
        answer = await self._http.post("/api/v1/push", body)
        if answer.count(b'"queued"') != count:
            raise RuntimeError(f"not all of {count} messages were stored: {answer[:300]!r}")

    async def receive(self, limit: int, timeout_ms: int) -> list[dict[str, Any]]:
        """Pop up to `limit` messages, waiting for the first; none after the time-out."""
        answer = await self._http.get(f"{self._pop}&batch={limit}&timeout={timeout_ms}")
        messages: list[dict[str, Any]] = json.loads(answer)["messages"] if answer else []
        return messages

    async def acknowledge(self, messages: list[dict[str, Any]]) -> None:
        """Acknowledge what `receive` returned; raises RuntimeError if one is refused."""
        acks = ",".join(
            [
                f'{{"transactionId":"{message["transactionId"]}","partitionId":"'
                f'{message["partitionId"]}","leaseId":"{message["leaseId"]}","status":"completed"}}'
                for message in messages
            ]
        )
        group = "null" if self._group is None else f'"{self._group}"'
        body = f'{{"acknowledgments":[{acks}],"consumerGroup":{group}}}'
        answer = await self._http.post("/api/v1/ack/batch", body)
        if answer.count(b'"success":true') != len(messages):
            raise RuntimeError(f"not all of {len(messages)} were acknowledged: {answer[:300]!r}")

    async def drop(self, limit: int, partitions: int) -> int:
        """Take messages of many partitions without a lease; return how many they were."""
        path = f"/api/v1/pop/queue/{self._queue}?autoAck=true&batch={limit}&partitions={partitions}"
        answer = await self._http.get(path)
        return len(json.loads(answer)["messages"]) if answer else 0

    async def configure(self) -> None:
        """Create the queue."""
        await self._http.post("/api/v1/configure", json.dumps({"queue": self._queue}))


async def connect_http(address: str) -> Http:
    """Open a connection to the broker on this port."""
    _, http = await asyncio.get_running_loop().create_connection(Http, HOST, int(address))
    return http


class Queen(Peer):
    """Partitions, leases, acknowledgements of whole batches."""

    async def prepare(self) -> str:
        return "HTTP/1.1 by bench/peers/queen.py"  # its queues come with the first push

    async def producers(self, count: int) -> Sequence[BrokerConnection]:
        return await self._connect(self.load.address, count)

    async def consumers(self, count: int) -> Sequence[BrokerConnection]:
        return await self._connect(self.load.consumer_address or self.load.address, count)

    async def _connect(self, address: str, count: int) -> list[BrokerConnection]:
        return [
            BrokerConnection(await connect_http(address), self.load, index)
            for index in range(count)
        ]

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        [consumer] = await self.consumers(1)
        await consumer.listen(received)
