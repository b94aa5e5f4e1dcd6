"""A load of pushes, pops and acks through one URL, and a checker of what it lived to see.

Each partition has one producer, which pushes 0, 1, 2 … and repeats a number until it is answered,
so that the order of a partition is known. Groups read all of it, several consumers each. What is
checked, for every group and partition: all that was answered `queued` arrived; first deliveries are
in order; a message came again only where its lease had run out, and never after a successful ack;
no two leases lived at a time.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import httpx
import trio
from attrs import define, field

from tests.http.api import Json, identity

PARTITIONS = 3
GROUPS = ("alpha", "beta")
CONSUMERS = 2  # per group
LEASE_SECONDS = 4
# What lies between a claim and the moment that a client has read its answer, on a busy machine.
SLACK_SECONDS = 2.0
RETRY_SECONDS = 0.05
ANSWER_SECONDS = 20.0
# No broker behind the balancer, a broker or a database that is going away.
UNAVAILABLE = (500, 502, 503, 504)


@define(eq=False)
class Delivery:
    """One message of one pop; times are Trio's."""

    number: int
    lease: str
    received: float
    acked: float = float("inf")
    """When a successful ack was sent."""


@define(eq=False)
class History:
    """The load; `run` it in a nursery, then `stop_producers`, `wait_consumed` and `check`."""

    url: str
    queue: str
    queued: dict[str, list[int]] = field(factory=lambda: defaultdict(list))
    deliveries: dict[tuple[str, str], list[Delivery]] = field(factory=lambda: defaultdict(list))
    errors: int = 0
    """Answers that didn't come, or said that nobody can serve now."""
    _producing: bool = True
    _tasks: int = 0

    async def run(self) -> None:
        """Produce and consume until cancelled."""
        async with (
            httpx.AsyncClient(
                base_url=self.url,
                timeout=ANSWER_SECONDS,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            ) as http,
            trio.open_nursery() as nursery,
        ):
            for n in range(PARTITIONS):
                nursery.start_soon(self._produce, http, f"p{n}")
            for group in GROUPS:
                for _ in range(CONSUMERS):
                    nursery.start_soon(self._consume, http, group)

    def stop_producers(self) -> None:
        self._producing = False

    @property
    def count(self) -> int:
        """How many were answered `queued`."""
        return sum(map(len, self.queued.values()))

    async def wait_progress(self, more: int) -> None:
        """Block until so many more are queued, and as many delivered to each group."""
        goal = self.count + more
        while self.count < goal or any(len(self._seen(group)) < goal for group in GROUPS):
            await trio.sleep(0.02)

    async def wait_consumed(self) -> None:
        """Block until no producer is at work and every group has acked all."""
        while self._tasks or any(self._acked(group) < self.count for group in GROUPS):
            await trio.sleep(0.02)

    def check(self, *, redeliveries: bool) -> None:
        """Assert all of the above; without `redeliveries`, that nothing came twice at all."""
        for partition, numbers in self.queued.items():
            assert numbers == list(range(len(numbers)))
            for group in GROUPS:
                self._check(self.deliveries[group, partition], numbers, redeliveries)

    def _check(self, deliveries: list[Delivery], numbers: list[int], redeliveries: bool) -> None:
        first: dict[int, Delivery] = {}
        for delivery in deliveries:
            before = first.setdefault(delivery.number, delivery)
            if before is not delivery:
                assert redeliveries, f"{delivery} after {before}"
                assert delivery.received < before.acked, f"{delivery} after its ack, {before}"
        assert list(first) == numbers  # all of them, and in order
        for last, this in pairwise(deliveries):
            if this.lease != last.lease:
                over = min(last.acked, last.received + LEASE_SECONDS - SLACK_SECONDS)
                assert this.received >= over, f"{this} while {last} lived"

    def _seen(self, group: str) -> set[tuple[str, int]]:
        return {
            (partition, delivery.number)
            for (name, partition), deliveries in self.deliveries.items()
            for delivery in deliveries
            if name == group
        }

    def _acked(self, group: str) -> int:
        return len(
            {
                (partition, delivery.number)
                for (name, partition), deliveries in self.deliveries.items()
                for delivery in deliveries
                if name == group and delivery.acked < float("inf")
            }
        )

    async def _produce(self, http: httpx.AsyncClient, partition: str) -> None:
        self._tasks += 1
        while self._producing:
            number = len(self.queued[partition])
            item = {
                "queue": self.queue,
                "partition": partition,
                "payload": number,
                "transactionId": f"{partition}-{number}",
            }
            results: list[Json] = await self._ask(http, "POST", "/api/v1/push", {"items": [item]})
            # A duplicate is the answer to a repetition: the first try was committed.
            assert results[0]["status"] in ("queued", "duplicate"), results
            self.queued[partition].append(number)
            await trio.sleep(0.005)
        self._tasks -= 1

    async def _consume(self, http: httpx.AsyncClient, group: str) -> None:
        path = (
            f"/api/v1/pop/queue/{self.queue}?consumerGroup={group}&subscriptionMode=all"
            f"&leaseSeconds={LEASE_SECONDS}&wait=true&timeout=10000&batch=20"
        )
        while True:
            answer = await self._ask(http, "GET", path)
            if answer is None:
                continue
            received = trio.current_time()
            deliveries = [
                Delivery(message["data"], message["leaseId"], received)
                for message in answer["messages"]
            ]
            for message, delivery in zip(answer["messages"], deliveries, strict=True):
                self.deliveries[group, message["partition"]].append(delivery)
            acks = [{**identity(m), "status": "completed"} for m in answer["messages"]]
            sent = trio.current_time()
            body = {"acknowledgments": acks, "consumerGroup": group}
            results: list[Json] = await self._ask(http, "POST", "/api/v1/ack/batch", body)
            for result, delivery in zip(results, deliveries, strict=True):
                if result["success"]:
                    delivery.acked = sent

    async def _ask(
        self, http: httpx.AsyncClient, method: str, path: str, body: Json | None = None
    ) -> Any:
        """Ask until somebody answers; None for 204."""
        while True:
            try:
                response = await http.request(method, path, json=body)
            except httpx.TransportError:
                pass
            else:
                if response.status_code == 204:
                    return None
                if response.status_code not in UNAVAILABLE:
                    assert response.status_code in (200, 201), response.text
                    return response.json()
            self.errors += 1
            await trio.sleep(RETRY_SECONDS)
