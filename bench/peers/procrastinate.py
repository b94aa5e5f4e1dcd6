"""procrastinate: defer_async and batch_defer_async, and its own workers to consume.

A worker fetches one job at a time. Finished jobs stay and it listens: both are its defaults.
"""

from __future__ import annotations

import asyncio
from importlib import metadata
from typing import TYPE_CHECKING, Any

import procrastinate

from bench.load import PAD
from bench.peers import postgres
from bench.peers.peer import Clock, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ProcrastinateProducer:
    """One of the users of a pool."""

    def __init__(self, task: Any) -> None:
        self._task = task

    async def push(self, numbers: Sequence[int]) -> None:
        # It encodes the payload itself.
        jobs = [{"i": number, "pad": PAD} for number in numbers]
        if len(jobs) == 1:
            await self._task.defer_async(**jobs[0])
        else:
            await self._task.batch_defer_async(*jobs)


class Procrastinate(Peer):
    """A queue of one task; a worker of concurrency 1 a consumer."""

    async def prepare(self) -> str:
        connector = procrastinate.SyncPsycopgConnector(conninfo=self.load.address)
        async with await postgres.connect(self.load.address) as connection:
            cursor = await connection.execute("SELECT to_regclass('procrastinate_jobs')")
            row = await cursor.fetchone()
            if row is None or row[0] is None:
                with procrastinate.App(connector=connector).open() as app:
                    app.schema_manager.apply_schema()
            await connection.execute(
                "TRUNCATE procrastinate_jobs, procrastinate_events, procrastinate_workers CASCADE"
            )
        return f"procrastinate {metadata.version('procrastinate')}, {postgres.driver()}"

    async def producers(self, count: int) -> Sequence[ProcrastinateProducer]:
        app = await self._open(max(count, 2))
        return [ProcrastinateProducer(self._task(app, lambda _: None))] * count

    async def drain(self, clock: Clock) -> None:
        app = clock.keep(await self._open(self.load.connections + 1))
        self._task(app, clock.receive)
        await clock.start()
        workers = [
            asyncio.create_task(self._worker(app, wait=False)) for _ in range(self.load.connections)
        ]
        await asyncio.wait(workers, timeout=clock.left())
        for worker in workers:
            worker.cancel()  # it finishes what it has begun
        await asyncio.gather(*workers, return_exceptions=True)

    async def listen(self, received: Callable[[Sequence[int]], None]) -> None:
        app = await self._open(4)
        self._task(app, lambda one: received([one]))
        await self._worker(app, wait=True)

    async def _open(self, size: int) -> Any:
        connector = procrastinate.PsycopgConnector(
            conninfo=self.load.address, min_size=size, max_size=size
        )
        app = procrastinate.App(connector=connector)
        await app.open_async()
        return app

    def _task(self, app: Any, receive: Callable[[int], None]) -> Any:
        @app.task(queue=self.load.queue, name="bench")
        async def bench(i: int, pad: str) -> None:
            receive(i)

        return bench

    def _worker(self, app: Any, *, wait: bool) -> Any:
        return app.run_worker_async(
            queues=[self.load.queue], concurrency=1, wait=wait, install_signal_handlers=False
        )
