"""Producers and consumers that note down what they saw, over plain HTTP, on whichever broker."""

from __future__ import annotations

import itertools
from collections import defaultdict
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import httpx
import trio
from attrs import define, field

from tests.chaos.history import Ack, Claim, Extension, History, Place, Push, Said, Status, Verb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.http.api import Json

QUEUE_MODE = "__QUEUE_MODE__"
GROUPS = (QUEUE_MODE, "alpha", "beta")
QUEUES = ("orders", "mails")
PARTITIONS = ("p0", "p1", "p2")
PLACES = [Place(queue, partition) for queue in QUEUES for partition in PARTITIONS]

PRODUCERS = 3
CONSUMERS = 2  # per group
BATCHES = (1, 1, 1, 2, 5, 10)  # items of a push
REPEATS = 0.05  # how often an item is an old one, pushed again
LEASES = (2, 3)  # seconds
# A pop's beginning is the earliest moment of its claim: long polls would tell little about leases.
POP_MS = 500
# More than the 15 s that a broker waits for its database.
ANSWER_SECONDS = 25.0
RETRY_SECONDS = 0.05
PAUSE_SECONDS = 0.01
# What lets a consumer's next deed differ from the last one's.
DEEDS = {"all": 70, "two steps": 8, "retry": 5, "failed": 5, "dlq": 2, "forget": 5, "extend": 5}


@define(eq=False)
class Load:
    """The clients; `run` it in a nursery, `calm`, wait, and `finish`."""

    history: History
    seed: int
    clients: Sequence[httpx.AsyncClient]
    producing: int = 0
    """How many producers are at work."""
    _calm: bool = False
    _finished: bool = False
    _requests: itertools.count[int] = field(factory=itertools.count)

    async def run(self) -> None:
        """Produce until `calm`, consume until `finish`."""
        async with trio.open_nursery() as nursery:
            for group in GROUPS:
                for number in range(CONSUMERS):
                    nursery.start_soon(self._consume, group, self._random(f"{group}-{number}"))
            self.producing = PRODUCERS
            for number in range(PRODUCERS):
                nursery.start_soon(self._produce, f"t{number}", self._random(f"producer-{number}"))

    def calm(self) -> None:
        """Push no more than what is on its way, and ack whatever comes, much at a time."""
        self._calm = True

    def finish(self) -> None:
        """End after the requests that are on their way: httpx doesn't like to be cancelled."""
        self._calm = self._finished = True

    def _random(self, name: str) -> Random:
        return Random(f"{self.seed}-{name}")

    # -- producers ---------------------------------------------------------------------------------

    async def _produce(self, name: str, random: Random) -> None:
        numbers = itertools.count()
        done: list[tuple[Place, str]] = []
        while not self._calm:
            items = [
                (random.choice(PLACES), f"{name}-{next(numbers)}")
                for _ in range(random.choice(BATCHES))
            ]
            if done and random.random() < REPEATS:
                items.append(random.choice(done))
            await self._push(items, random)
            done += items
            await trio.sleep(PAUSE_SECONDS)
        self.producing -= 1

    async def _push(self, items: list[tuple[Place, str]], random: Random) -> None:
        """Push until each item is queued, duplicate or buffered."""
        while items and not self._finished:
            broker = random.randrange(len(self.clients))
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
                response = await self.clients[broker].post("/api/v1/push", json=body)
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
            request = next(self._requests)
            left = []
            for index, (place, transaction_id) in enumerate(items):
                result = {"status": "unknown"} if results is None else results[index]
                status = Status(result["status"])
                self.history.pushes.append(
                    Push(request, index, broker, place, transaction_id, sent, answered, status,
                         result.get("message_id"))
                )  # fmt: skip
                if status in (Status.FAILED, Status.UNKNOWN):
                    left.append((place, transaction_id))
            items = left
            if items:
                await trio.sleep(RETRY_SECONDS)

    # -- consumers ---------------------------------------------------------------------------------

    async def _consume(self, group: str, random: Random) -> None:
        while not self._finished:
            queue = random.choice(QUEUES)
            lease_seconds = random.choice(LEASES)
            params: Json = {
                "wait": "true",
                "timeout": POP_MS,
                "batch": 500 if self._calm else random.choice((1, 5, 20)),
                "partitions": 0 if self._calm else random.choice((1, 1, 3)),
                "leaseSeconds": lease_seconds,
            }
            if group != QUEUE_MODE:
                params |= {"consumerGroup": group, "subscriptionMode": "all"}
            client = random.choice(self.clients)
            sent = trio.current_time()
            try:
                response = await client.get(f"/api/v1/pop/queue/{queue}", params=params)
            except httpx.TransportError:
                await trio.sleep(RETRY_SECONDS)
                continue
            if response.status_code == 204:
                continue
            if response.status_code != 200:
                assert response.status_code in (500, 503), response.text
                await trio.sleep(RETRY_SECONDS)
                continue
            received = trio.current_time()
            parts: dict[str, list[Json]] = defaultdict(list)
            for message in response.json()["messages"]:
                parts[message["partition"]].append(message)
            claims = [
                (
                    Claim(
                        group,
                        Place(queue, partition),
                        messages[0]["leaseId"],
                        sent,
                        received,
                        lease_seconds,
                        messages[0]["deliveryAttempt"],
                        tuple(message["transactionId"] for message in messages),
                        tuple(message["id"] for message in messages),
                    ),
                    messages[0]["partitionId"],
                )
                for partition, messages in parts.items()
            ]
            self.history.claims += [claim for claim, _ in claims]
            for claim, partition_id in claims:
                await self._settle(claim, partition_id, random)

    async def _settle(self, claim: Claim, partition_id: str, random: Random) -> None:
        ids = claim.transaction_ids
        [deed] = random.choices(list(DEEDS), list(DEEDS.values()))
        at = random.randrange(len(ids))
        if self._calm or deed == "all":
            await self._ack(claim, partition_id, ids, Verb.COMPLETED, random)
        elif deed == "two steps":
            await self._ack(claim, partition_id, ids[: at + 1], Verb.COMPLETED, random)
            await trio.sleep(random.uniform(0, 0.5))
            await self._ack(claim, partition_id, ids[at + 1 :], Verb.COMPLETED, random)
        elif deed == "extend":
            await self._extend(claim, random)
            await trio.sleep(random.uniform(0, claim.lease_seconds))
            await self._ack(claim, partition_id, ids, Verb.COMPLETED, random)
        elif deed != "forget":
            await self._ack(claim, partition_id, ids[: at + 1], Verb(deed), random)

    async def _ack(
        self,
        claim: Claim,
        partition_id: str,
        ids: Sequence[str],
        last: Verb,
        random: Random,
    ) -> None:
        """Say `completed` of all but the last, and of that one `last`, until somebody answers."""
        if not ids:
            return
        verbs = [Verb.COMPLETED] * (len(ids) - 1) + [last]
        body: Json = {
            "acknowledgments": [
                {
                    "transactionId": transaction_id,
                    "partitionId": partition_id,
                    "leaseId": claim.lease,
                    "status": verb.value,
                    "consumerGroup": claim.group,
                }
                for transaction_id, verb in zip(ids, verbs, strict=True)
            ]
        }
        for _ in range(5):
            sent, results = await self._post(random, "/api/v1/ack/batch", body)
            answered = None if results is None else trio.current_time()
            said = [
                Said(t, verb, None if results is None else results[n]["success"])
                for n, (t, verb) in enumerate(zip(ids, verbs, strict=True))
            ]
            self.history.acks.append(
                Ack(claim.group, claim.place, claim.lease, sent, answered, tuple(said))
            )
            if results is not None:
                return
            await trio.sleep(RETRY_SECONDS)

    async def _extend(self, claim: Claim, random: Random) -> None:
        seconds = claim.lease_seconds
        path = f"/api/v1/lease/{claim.lease}/extend"
        sent, answer = await self._post(random, path, {"seconds": seconds})
        # Success may mean that only other partitions' leases were renewed, had this one run out.
        in_time = trio.current_time() < claim.sent + claim.lease_seconds
        if answer is not None and answer["success"] and in_time:
            self.history.extensions.append(Extension(claim.lease, sent, seconds))

    async def _post(self, random: Random, path: str, body: Json) -> tuple[float, Any]:
        """When it was sent, and the answer of a 200, or None: nobody knows what came of it."""
        while True:
            sent = trio.current_time()
            try:
                response = await random.choice(self.clients).post(path, json=body)
            except httpx.ConnectError:  # nobody has seen it
                await trio.sleep(RETRY_SECONDS)
                continue
            except httpx.TransportError:
                return sent, None
            if response.status_code == 200:
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
