"""A producer: pushes again what may not have been stored, where that is safe."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import httpx
import trio

from tests.chaos.history import Push, Status
from tests.chaos.places import ONCE, PLACES

if TYPE_CHECKING:
    from random import Random

    from tests.chaos.history import Place
    from tests.chaos.load import Load

BATCHES = (1, 1, 1, 2, 5, 10)  # items of a push
REPEATS = 0.05  # how often an item is an old one, pushed again
RETRY_SECONDS = 0.05
PAUSE_SECONDS = 0.01


async def produce(load: Load, random: Random, name: str) -> None:
    """Push until the load is calmed."""
    numbers = itertools.count()
    done: list[tuple[Place, str]] = []
    while not load.calmed:
        items = [
            (random.choice(PLACES), f"{name}-{next(numbers)}")
            for _ in range(random.choice(BATCHES))
        ]
        if done and random.random() < REPEATS:
            items.append(random.choice(done))
        await _push(load, items, random)
        done += [item for item in items if _repeatable(item)]
        await trio.sleep(PAUSE_SECONDS)


def _repeatable(item: tuple[Place, str]) -> bool:
    return item[0].queue != ONCE


async def _push(load: Load, items: list[tuple[Place, str]], random: Random) -> None:
    """Push until each item is queued, duplicate or buffered, or may not be tried again."""
    while items and not load.finished:
        broker = random.randrange(len(load.clients))
        body = {
            "items": [
                {
                    "queue": place.queue,
                    "partition": place.partition,
                    "transactionId": transaction_id,
                    "payload": transaction_id,
                }
                for place, transaction_id in items
            ]
        }
        sent = trio.current_time()
        try:
            response = await load.clients[broker].post("/api/v1/push", json=body)
            answer = response.json()
        except httpx.ConnectError:  # nobody has seen it
            await trio.sleep(RETRY_SECONDS)
            continue
        except httpx.TransportError:
            results = None
        else:
            assert response.status_code in (201, 500, 503), response.text
            results = answer if response.status_code == 201 else answer.get("results")
        answered = None if results is None else trio.current_time()
        request = next(load.numbers)
        left = []
        for index, (place, transaction_id) in enumerate(items):
            result = {"status": "unknown"} if results is None else results[index]
            status = Status(result["status"])
            message_id = result.get("message_id")
            load.history.pushes.append(
                Push(
                    request, index, broker, place, transaction_id, sent, answered, status,
                    message_id,
                )
            )  # fmt: skip
            if status in (Status.FAILED, Status.UNKNOWN) and _repeatable((place, transaction_id)):
                left.append((place, transaction_id))
        items = left
        if items:
            await trio.sleep(RETRY_SECONDS)
