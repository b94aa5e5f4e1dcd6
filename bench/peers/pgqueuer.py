"""pgqueuer: its enqueue, and its QueueManagers to consume, over asyncpg, its main driver."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import asyncpg
from pgqueuer import PgQueuer as Manager
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.adapters.persistence.queries import Queries
from pgqueuer.domain.types import QueueExecutionMode
from psycopg.conninfo import conninfo_to_dict

from bench.load import number, payload
from bench.peers.peer import Clock, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ENTRY_POINT: Final = "bench"
DEQUEUE: Final = timedelta(seconds=1)


class PgQueuerProducer:
    """One connection that enqueues."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    async def push(self, numbers: Sequence[int]) -> None:
        bodies = [payload(number).encode() for number in numbers]
        if len(bodies) == 1:
            await self._queries.enqueue(ENTRY_POINT, bodies[0])
        else:
            count = len(bodies)
            await self._queries.enqueue([ENTRY_POINT] * count, bodies, [0] * count)


class PgQueuer(Peer):
    """One job type; a QueueManager a consumer, batches of 100; 'durable', its default."""

    async def prepare(self) -> str:
        connection = await self._connect()
        if await connection.fetchval("SELECT to_regclass('pgqueuer')") is None:
            await Queries(AsyncpgDriver(connection)).install()
        await connection.execute("TRUNCATE pgqueuer, pgqueuer_log, pgqueuer_statistics")
        return f"pgqueuer {metadata.version('pgqueuer')}, asyncpg {asyncpg.__version__}"

    async def _connect(self) -> Any:
        parts = {key: quote(str(value)) for key, value in self._parameters().items()}
        return await asyncpg.connect("postgresql://{user}@{host}:{port}/{dbname}".format(**parts))

    def _parameters(self) -> dict[str, Any]:
        return dict(conninfo_to_dict(self.load.address))

    async def producers(self, count: int) -> Sequence[PgQueuerProducer]:
        return [
            PgQueuerProducer(Queries(AsyncpgDriver(await self._connect()))) for _ in range(count)
        ]

    async def drain(self, clock: Clock) -> None:
        managers = clock.keep(
            [await self._manager(clock.receive) for _ in range(self.load.connections)]
        )
        await clock.start()
        tasks = [
            asyncio.create_task(
                manager.qm.run(
                    batch_size=self.load.batch,
                    mode=QueueExecutionMode.drain,
                    dequeue_timeout=DEQUEUE,
                )
            )
            for manager in managers
        ]
        await asyncio.wait(tasks, timeout=clock.left())
        for manager in managers:
            manager.shutdown.set()
        await asyncio.gather(*tasks)

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        manager = await self._manager(lambda one: received([one]))
        await manager.qm.run(batch_size=10)

    async def _manager(self, receive: Callable[[int], None]) -> Any:
        manager = Manager.from_asyncpg_connection(await self._connect())

        @manager.entrypoint(ENTRY_POINT)
        async def bench(job: Any) -> None:
            receive(number(job.payload))

        return manager
