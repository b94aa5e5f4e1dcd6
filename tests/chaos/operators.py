"""Operators: one puts groups back, one moves dead letters back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import httpx
import trio

from tests.chaos.history import Letter, Place, Push, Seek, Status
from tests.chaos.places import GROUPS, ONCE, PLACES, QUEUES

if TYPE_CHECKING:
    from random import Random

    from tests.chaos.load import Load
    from tests.http.api import Json

SEEK_PAUSE_SECONDS = (0.5, 3.0)
LETTER_PAUSE_SECONDS = 0.5
MOVED = 0.3  # of the dead letters that are listed
RETRY_SECONDS = 0.05


class Landmark(NamedTuple):
    """A message that a group got, and so everything before it; to seek its time skips nothing."""

    group: str
    place: Place
    transaction_id: str
    created_at: str


async def seek(load: Load, random: Random) -> None:
    """Put groups back until the load is calmed, each time until that is answered."""
    while not load.calmed:
        await trio.sleep(random.uniform(*SEEK_PAUSE_SECONDS))
        target = None
        body: Json | None = None
        if random.random() < 0.7 and load.landmarks:
            landmark = random.choice(load.landmarks)
            group, places, target = landmark.group, [landmark.place], landmark.transaction_id
            body = {"timestamp": landmark.created_at}
        elif random.random() < 0.7:
            group, places = random.choice(GROUPS), [random.choice(PLACES)]
        else:
            group, queue = random.choice(GROUPS), random.choice((*QUEUES, ONCE))
            places = [place for place in PLACES if place.queue == queue]
        path = f"/api/v1/consumer-groups/{group}/queues/{places[0].queue}"
        if len(places) == 1:
            path += f"/partitions/{places[0].partition}"
        while not load.finished:
            sent, answer = await load.post(random, f"{path}/seek", body)
            if answer is not None and "success" not in answer:
                break  # a group that has seen nothing of a queue can't be put back there
            answered = None if answer is None else trio.current_time()
            load.history.seeks.append(Seek(group, tuple(places), sent, answered, target))
            if answer is not None:
                break
            await trio.sleep(RETRY_SECONDS)


async def move_letters(load: Load, random: Random) -> None:
    """Move some dead letters back, until the load is calmed."""
    while not load.calmed:
        await trio.sleep(LETTER_PAUSE_SECONDS)
        try:
            response = await random.choice(load.clients).get("/api/v1/dlq", params={"limit": 5})
        except httpx.TransportError:
            continue
        if response.status_code != 200:
            assert response.status_code in (500, 503), response.text
            continue
        for letter in response.json()["messages"]:
            if random.random() < MOVED:
                await _move(load, letter, random)


async def _move(load: Load, letter: Json, random: Random) -> None:
    place = Place(letter["queue"], letter["partition"])
    load.history.moves[letter["id"]] = Letter(
        letter["consumerGroup"], place, letter["transactionId"]
    )
    sent, answer = await load.post(random, f"/api/v1/dlq/{letter['id']}/replay")
    # Only what it says it moved is certain; what is said of a letter that is gone tells of others.
    moved = answer is not None and answer.get("status") == "moved"
    load.history.pushes.append(
        Push(
            next(load.numbers),
            0,
            -1,
            place,
            f"dlq:{letter['id']}",
            sent,
            trio.current_time() if moved else None,
            Status.QUEUED if moved else Status.UNKNOWN,
            answer["messageId"] if moved else None,
        )
    )
