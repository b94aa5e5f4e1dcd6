"""The floor: a hand-made queue in one table, with psycopg and no broker.

INSERT and commit, DELETE .. FOR UPDATE SKIP LOCKED, NOTIFY: the least that a durable queue in this
PostgreSQL can do, so the number to compare ours with. It has no partitions, groups or leases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.load import payload
from bench.peers import postgres
from bench.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg

_RESET: Final = (
    "DROP TABLE IF EXISTS floor",
    "CREATE TABLE floor (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
    " created_at timestamptz NOT NULL DEFAULT now(), payload jsonb NOT NULL)",
)
_NOTIFY: Final = (
    "CREATE OR REPLACE FUNCTION floor_wake() RETURNS trigger LANGUAGE plpgsql AS"
    " $$BEGIN PERFORM pg_notify('floor', ''); RETURN NULL; END$$",
    "CREATE TRIGGER floor_wake AFTER INSERT ON floor EXECUTE FUNCTION floor_wake()",
)


class FloorConnection:
    """One connection to PostgreSQL."""

    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self._connection = connection

    async def push(self, numbers: Sequence[int]) -> None:
        """Insert messages in one statement and commit."""
        if len(numbers) == 1:
            await self._connection.execute(
                "INSERT INTO floor (payload) VALUES (%s::jsonb)", (payload(numbers[0]),)
            )
        else:
            await self._connection.execute(
                "INSERT INTO floor (payload) SELECT unnest(%s::jsonb[])",
                ([payload(number) for number in numbers],),
            )

    async def take(self, limit: int) -> list[int]:
        """Delete and return up to `limit` messages, the oldest that nobody else deletes."""
        async with self._connection.transaction():
            cursor = await self._connection.execute(
                "DELETE FROM floor WHERE id = ANY(ARRAY("
                "SELECT id FROM floor ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED))"
                " RETURNING payload",
                (limit,),
            )
            return [row[0]["i"] for row in await cursor.fetchall()]


class PgRaw(Peer):
    """One table."""

    async def prepare(self) -> str:
        await postgres.run(self.load.address, *_RESET)
        return postgres.driver()

    async def producers(self, count: int) -> Sequence[FloorConnection]:
        return [FloorConnection(await postgres.connect(self.load.address)) for _ in range(count)]

    consumers = producers

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        await postgres.run(self.load.address, *_NOTIFY)
        listener = await postgres.connect(self.load.address)
        await listener.execute("LISTEN floor")
        [consumer] = await self.consumers(1)
        async for _ in listener.notifies():
            while numbers := await consumer.take(100):
                received(numbers)
