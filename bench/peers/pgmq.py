"""pgmq: its SQL functions, called through psycopg. The package of that name brings the SQL."""

from __future__ import annotations

from importlib import metadata, resources
from typing import TYPE_CHECKING, Final

from bench.load import payload
from bench.peers import postgres
from bench.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg

_READ: Final = "SELECT msg_id, message FROM pgmq.read(%s::text, 30, %s)"
# Waits up to 5 s, and looks every 100 ms, which is its default.
_POLL: Final = "SELECT msg_id, message FROM pgmq.read_with_poll(%s::text, 30, %s, 5, 100)"


class PgmqConnection:
    """One connection to PostgreSQL, for one queue."""

    def __init__(self, connection: psycopg.AsyncConnection, queue: str) -> None:
        self._connection = connection
        self._queue = queue

    async def push(self, numbers: Sequence[int]) -> None:
        if len(numbers) == 1:
            await self._connection.execute(
                "SELECT pgmq.send(%s::text, %s::jsonb)", (self._queue, payload(numbers[0]))
            )
        else:
            await self._connection.execute(
                "SELECT pgmq.send_batch(%s::text, %s::jsonb[])",
                (self._queue, [payload(number) for number in numbers]),
            )

    async def take(self, limit: int) -> list[int]:
        return await self.read(_READ, limit)

    async def read(
        self, query: str, limit: int, received: Callable[[Sequence[int]], None] | None = None
    ) -> list[int]:
        """Read by this query, report, and delete what was read."""
        cursor = await self._connection.execute(query.encode(), (self._queue, limit))
        rows = await cursor.fetchall()
        numbers = [message["i"] for _, message in rows]
        if rows:
            if received is not None:
                received(numbers)
            await self._connection.execute(
                "SELECT pgmq.delete(%s::text, %s::bigint[])",
                (self._queue, [row[0] for row in rows]),
            )
        return numbers


class Pgmq(Peer):
    """send, send_batch, read with a visibility timeout of 30 s, delete; latency by polling."""

    notifies = False

    async def prepare(self) -> str:
        files = resources.files("pgmq") / "sql"
        async with await postgres.connect(self.load.address) as connection:
            cursor = await connection.execute("SELECT to_regnamespace('pgmq')")
            row = await cursor.fetchone()
            if row is None or row[0] is None:
                await connection.execute((files / "pgmq.sql").read_bytes())
            await connection.execute("SELECT pgmq.create(%s)", (self.load.queue,))
            if self.notifies:
                await connection.execute(
                    "SELECT pgmq.enable_notify_insert(%s, 0)", (self.load.queue,)
                )
        version = (files / "VERSION").read_text().strip()
        return f"pgmq {version} (package {metadata.version('pgmq')}), {postgres.driver()}"

    async def producers(self, count: int) -> Sequence[PgmqConnection]:
        return [
            PgmqConnection(await postgres.connect(self.load.address), self.load.queue)
            for _ in range(count)
        ]

    consumers = producers

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        [consumer] = await self.consumers(1)
        while True:
            await consumer.read(_POLL, 100, received)


class PgmqNotify(Pgmq):
    """The same with pgmq's trigger on every insert, unthrottled, and a consumer that listens."""

    notifies = True

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        listener = await postgres.connect(self.load.address)
        await listener.execute(f'LISTEN "pgmq.q_{self.load.queue}.INSERT"'.encode())
        [consumer] = await self.consumers(1)
        async for _ in listener.notifies():
            while await consumer.read(_READ, 100, received):
                pass
