"""A small client of a live broker for tests: httpx with the shapes of spec 2, and raw requests."""

from __future__ import annotations

import itertools
import os
import urllib.parse
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.brokers import LiveBroker

Json = dict[str, Any]

# No answer takes so long that this hides a hang from `trio.fail_after`.
TIMEOUT_SECONDS = 60.0
POLL_SECONDS = 0.02

_numbers = itertools.count(1)


def unique(stem: str = "q") -> str:
    """A name that no other test uses on a shared broker."""
    return f"{stem}-{os.getpid()}-{next(_numbers)}"


class Api:
    """Calls of one broker; each method asserts the status that spec 2 promises."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def push_items(self, *items: Json) -> list[Json]:
        response = await self.http.post("/api/v1/push", json={"items": list(items)})
        assert response.status_code == 201, response.text
        results: list[Json] = response.json()
        return results

    async def push(self, queue: str, *payloads: Any, **more: Any) -> list[Json]:
        """Push payloads into one queue; `more` goes into every item."""
        return await self.push_items(
            *({"queue": queue, "payload": payload, **more} for payload in payloads)
        )

    async def pop_raw(self, queue: str, partition: str | None = None, **params: Any) -> Any:
        """The httpx response of a pop, whatever it is."""
        path = f"/api/v1/pop/queue/{quote(queue)}"
        if partition is not None:
            path += f"/partition/{quote(partition)}"
        return await self.http.get(path, params=params)

    async def pop(self, queue: str, partition: str | None = None, **params: Any) -> Json | None:
        """The answer of a pop; None for 204, which has neither a body nor a length."""
        return taken(await self.pop_raw(queue, partition, **params))

    async def discover(self, **params: Any) -> Json | None:
        return taken(await self.http.get("/api/v1/pop", params=params))

    async def ack(self, message: Json, status: str = "completed", **more: Any) -> Json:
        """Ack one message as it was popped; returns its result."""
        body = {**identity(message), "status": status, **more}
        response = await self.http.post("/api/v1/ack", json=body)
        assert response.status_code == 200, response.text
        [result] = response.json()
        assert isinstance(result, dict)
        return result

    async def ack_batch(self, *acks: Json, **more: Any) -> list[Json]:
        response = await self.http.post(
            "/api/v1/ack/batch", json={"acknowledgments": list(acks), **more}
        )
        assert response.status_code == 200, response.text
        results: list[Json] = response.json()
        assert [result["index"] for result in results] == list(range(len(acks)))
        return results

    async def configure(self, queue: str, **body: Any) -> Json:
        response = await self.http.post("/api/v1/configure", json={"queue": queue, **body})
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    async def metrics(self) -> Json:
        metrics: Json = (await self.http.get("/metrics")).json()
        return metrics

    async def buffers(self) -> Json:
        buffers: Json = (await self.http.get("/api/v1/status/buffers")).json()
        return buffers

    async def wait_parked(self, count: int) -> None:
        """Block until exactly `count` pops are parked on the broker, all after a vain look."""
        while True:
            wakeups = (await self.metrics())["wakeups"]
            if (wakeups["parked"], wakeups["asking"]) == (count, 0):
                return
            await trio.sleep(POLL_SECONDS)  # another process


def quote(segment: str) -> str:
    """Percent-encode a name for a path, its slashes too."""
    return urllib.parse.quote(segment, safe="")


def taken(response: httpx.Response) -> Json | None:
    if response.status_code == 204:
        assert response.content == b""
        assert "content-length" not in response.headers
        assert "content-type" not in response.headers
        return None
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    assert answer["success"] is True
    return answer


def identity(message: Json) -> Json:
    """What an ack repeats of a popped message."""
    return {key: message[key] for key in ("transactionId", "partitionId", "leaseId")} | {
        "consumerGroup": message["consumerGroup"]
    }


def data(answer: Json | None) -> list[Any]:
    """The payloads of a pop's answer; [] for none."""
    return [] if answer is None else [message["data"] for message in answer["messages"]]


@asynccontextmanager
async def open_api(broker: LiveBroker) -> AsyncIterator[Api]:
    """Connections to a broker for the block's time."""
    async with httpx.AsyncClient(
        base_url=broker.url,
        timeout=TIMEOUT_SECONDS,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    ) as http:
        yield Api(http)
