"""A load of pushes with numbered payloads, and what may and must come out of it."""

from __future__ import annotations

import json
from itertools import count
from typing import TYPE_CHECKING

import trio

from tests.http.api import Api, data
from tests.http.raw import connect

if TYPE_CHECKING:
    from tests.brokers import LiveBroker

PARTITIONS = 4


class Producer:
    """Pushes numbers from many tasks at once, until told to stop or cut off.

    `queued` and `buffered` hold what was answered so; `unknown` what got no answer; `failed` what
    was refused.
    """

    def __init__(self, broker: LiveBroker, queue: str) -> None:
        self._broker = broker
        self._queue = queue
        self._numbers = count()
        self._stopped = False
        self.queued: set[int] = set()
        self.buffered: set[int] = set()
        self.failed: set[int] = set()
        self.unknown: set[int] = set()

    async def run(self) -> None:
        """Push over one connection, one request after another."""
        connection = await connect(self._broker)
        try:
            while not self._stopped:
                number = next(self._numbers)
                item = {
                    "queue": self._queue,
                    "payload": number,
                    "partition": str(number % PARTITIONS),
                }
                body = json.dumps({"items": [item]}).encode()
                self.unknown.add(number)
                try:
                    await connection.send("POST /api/v1/push", body)
                    answer = await connection.receive()
                except (EOFError, trio.BrokenResourceError):
                    return
                if answer.status == 201:
                    status = answer.json()[0]["status"]
                    assert status in ("queued", "buffered")
                    (self.queued if status == "queued" else self.buffered).add(number)
                else:
                    assert answer.status == 500
                    assert answer.json()["code"] == "push_failed"
                    self.failed.add(number)
                    await trio.sleep(0.05)
                self.unknown.discard(number)
        finally:
            await connection.aclose()

    def stop(self) -> None:
        self._stopped = True

    async def wait_queued(self, least: int) -> None:
        """Block until at least `least` were answered `queued`."""
        while len(self.queued) < least:  # noqa: ASYNC110 - several tasks count
            await trio.sleep(0.01)

    def check(self, stored: list[int]) -> None:
        """Assert that `stored` has all that was queued or buffered, once, and nothing never pushed.

        A commit whose answer was lost may be there: it was `failed` or got no answer.
        """
        assert len(stored) == len(set(stored))
        lost = (self.queued | self.buffered) - set(stored)
        assert not lost
        assert set(stored) <= self.queued | self.buffered | self.unknown | self.failed


async def take_all(api: Api, queue: str) -> list[int]:
    """All payloads of a queue; they are gone then."""
    stored: list[int] = []
    while answer := await api.pop(queue, autoAck=True, batch=10_000, partitions=0):
        stored += data(answer)
    return stored
