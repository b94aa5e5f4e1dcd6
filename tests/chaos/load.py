"""Clients that note down what they saw, over plain HTTP, on whichever broker."""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import httpx
import trio
from attrs import define, field

from tests.chaos.consumer import Consumer
from tests.chaos.operators import Landmark, move_letters, seek
from tests.chaos.places import GROUPS, ONCE
from tests.chaos.producer import produce

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.chaos.history import History
    from tests.http.api import Json

PRODUCERS = 3
CONSUMERS = 2  # per group
# More than the 15 s that a broker waits for its database.
ANSWER_SECONDS = 25.0
RETRY_SECONDS = 0.05
# To seek the latest ones, or a long run would read its whole log again and again.
LANDMARKS = 500


@define(eq=False)
class Load:
    """The clients; `prepare`, `run` it in a nursery, `calm`, wait, and `finish`."""

    history: History
    seed: int
    clients: Sequence[httpx.AsyncClient]
    producing: int = 0
    """How many clients are at work that push or seek."""
    calmed: bool = False
    finished: bool = False
    landmarks: deque[Landmark] = field(factory=partial(deque, maxlen=LANDMARKS))
    numbers: itertools.count[int] = field(factory=itertools.count)

    async def prepare(self) -> None:
        """Configure the queues."""
        body = {"queue": ONCE, "options": {"dedupWindowSeconds": 0}}
        response = await self.clients[0].post("/api/v1/configure", json=body)
        assert response.is_success, response.text

    async def run(self) -> None:
        """Produce and seek until `calm`, consume until `finish`."""
        async with trio.open_nursery() as nursery:
            for group in GROUPS:
                for number in range(CONSUMERS):
                    consumer = Consumer(self, group, self._random(f"{group}-{number}"))
                    nursery.start_soon(consumer.run)
            for number in range(PRODUCERS):
                name = f"t{number}"
                nursery.start_soon(self._until_calm, produce, self._random(name), name)
            nursery.start_soon(self._until_calm, seek, self._random("seeks"))
            nursery.start_soon(self._until_calm, move_letters, self._random("letters"))

    async def _until_calm(self, work: Any, random: Random, *more: Any) -> None:
        self.producing += 1
        await work(self, random, *more)
        self.producing -= 1

    def calm(self) -> None:
        """Push no more than what is on its way, and ack whatever comes, much at a time."""
        self.calmed = True

    def finish(self) -> None:
        """End after the requests that are on their way: httpx doesn't like to be cancelled."""
        self.calmed = self.finished = True

    def _random(self, name: str) -> Random:
        return Random(f"{self.seed}-{name}")

    async def post(self, random: Random, path: str, body: Json | None = None) -> tuple[float, Any]:
        """When it was sent, and the answer of a 200 or 404, or None: what came of it is unknown."""
        while True:
            sent = trio.current_time()
            try:
                response = await random.choice(self.clients).post(path, json=body)
            except httpx.ConnectError:  # nobody has seen it
                await trio.sleep(RETRY_SECONDS)
                continue
            except httpx.TransportError:
                return sent, None
            if response.status_code in (200, 404):
                return sent, response.json()
            assert response.status_code in (500, 503), response.text
            return sent, None


@asynccontextmanager
async def open_clients(urls: Sequence[str]) -> AsyncIterator[list[httpx.AsyncClient]]:
    """One HTTP client a broker, for the block's time."""
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    clients = [
        httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=unlimited) for url in urls
    ]
    try:
        yield clients
    finally:
        with trio.move_on_after(1, shield=True):
            for client in clients:
                await client.aclose()
