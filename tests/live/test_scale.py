"""Five thousand parked pops on one broker: what they cost, and that each gets its message."""

from __future__ import annotations

import resource
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import trio

from tests.brokers import postgres_environment, running_broker
from tests.http.api import Api, open_api
from tests.http.raw import RawConnection, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from queen_trio.store.settings import ConnectionSettings

POPS = 5_000
QUEUES = 10
IDLE_SECONDS = 3.0
# Enough for the broker's sockets, and for our ends of them.
FILES = POPS + 1_000


@contextmanager
def raised_file_limit() -> Iterator[None]:
    """Our limit is the broker's too: it inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        assert hard == resource.RLIM_INFINITY or hard >= FILES, f"the hard limit is {hard}"
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_five_thousand_parked_pops(
    settings: ConnectionSettings, record_property: Callable[[str, object], None]
) -> None:
    with raised_file_limit(), running_broker(postgres_environment(settings)) as broker:
        process = psutil.Process(broker.process.pid)
        memory_before = process.memory_info().rss
        async with open_api(broker) as api:
            with trio.fail_after(60):
                connections = [await connect(broker) for _ in range(POPS)]
                await park(connections)
                await api.wait_parked(POPS)
            memory = (process.memory_info().rss - memory_before) / POPS
            cpu = await measure_idle(process)
            statistics = await api.metrics()
            assert statistics["wakeups"] == {"parked": POPS, "asking": 0, "lines": QUEUES}
            assert statistics["pool"]["in_use"] == 0
            got: list[int] = []
            started = time.monotonic()
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for connection in connections:
                        nursery.start_soon(receive, connection, got)
                    await push_one_for_each(api)
            took = time.monotonic() - started
            assert sorted(got) == list(range(POPS))
            with trio.fail_after(10):
                await api.wait_parked(0)
    report = (
        f"{POPS} parked pops: {cpu:.1%} of a core while idle, {memory / 1024:.1f} KiB each; "
        f"all served in {took:.1f} s"
    )
    record_property("parked", report)
    print(report)


async def park(connections: list[RawConnection]) -> None:
    for n, connection in enumerate(connections):
        await connection.send(f"GET /api/v1/pop/queue/q{n % QUEUES}?wait=true&timeout=600000")


async def measure_idle(process: psutil.Process) -> float:
    """The share of a core that the process uses over a few seconds."""

    def cpu_seconds() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    # The probes have backed off to one a second by now, or nearly.
    await trio.sleep(2)
    before, started = cpu_seconds(), time.monotonic()
    await trio.sleep(IDLE_SECONDS)
    return (cpu_seconds() - before) / (time.monotonic() - started)


async def push_one_for_each(api: Api) -> None:
    """A partition for each pop, so that a lease keeps nobody from his own."""
    for first in range(0, POPS, 500):
        await api.push_items(
            *(
                {"queue": f"q{n % QUEUES}", "partition": str(n), "payload": n}
                for n in range(first, first + 500)
            )
        )


async def receive(connection: RawConnection, got: list[int]) -> None:
    answer = await connection.receive()
    assert answer.status == 200, answer
    messages = answer.json()["messages"]
    got.extend(message["data"] for message in messages)
    await connection.aclose()
