"""kill -9 of a broker, and of PostgreSQL under it: what was `queued` stays, the rest is honest."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import psutil
import trio

from tests.brokers import postgres_environment, running_broker
from tests.http.api import Api, Json, data, identity, open_api
from tests.live.load import Producer, take_all

if TYPE_CHECKING:
    from tests.brokers import LiveBroker
    from tests.cluster import Cluster

SECONDS = 60


async def test_kill_9_loses_nothing_that_was_queued(broker: LiveBroker) -> None:
    producer = Producer(broker, "q")
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(producer.run)
            await producer.wait_queued(1_000)
            await trio.to_thread.run_sync(broker.kill)
        await trio.to_thread.run_sync(broker.restart)
        async with open_api(broker) as api:
            stored = await take_all(api, "q")
    producer.check(stored)


async def test_a_lease_outlives_its_broker(broker: LiveBroker) -> None:
    """Another process, or the same one after a crash, can ack what this one gave out."""
    async with open_api(broker) as api:
        await api.push("q", 1, 2)
        answer = await api.pop("q")
        assert answer is not None
    await trio.to_thread.run_sync(broker.kill)
    await trio.to_thread.run_sync(broker.restart)
    async with open_api(broker) as api:
        assert await api.pop("q") is None
        results = await api.ack_batch(*(identity(m) for m in answer["messages"]))
        assert [r["success"] for r in results] == [True, True]


async def test_postgres_restarts_under_load(own_cluster: Cluster) -> None:
    """Pushes tell the truth, parked pops stay parked, acks ride it out, /health says so."""
    environment = postgres_environment(own_cluster.settings("postgres"))
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            await api.push("acked", *range(50), partition="p")
            leased = await api.pop("acked", leaseSeconds=300)
            assert leased is not None
            await restart_under_load(own_cluster, broker, api, leased["messages"])


async def restart_under_load(
    own_cluster: Cluster, broker: LiveBroker, api: Api, leased: list[Json]
) -> None:
    producer = Producer(broker, "q")
    woken: list[Json | None] = []
    acked: list[Json] = []
    healths: list[int] = []

    async def park() -> None:
        woken.append(await api.pop("parked", wait="true", timeout=50_000))

    async def ack() -> None:
        for message in leased:
            acked.append(await api.ack(message))
            await trio.sleep(0.02)

    async def watch_health() -> None:
        while True:
            healths.append((await api.http.get("/health")).status_code)
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(producer.run)
        for _ in range(5):
            nursery.start_soon(park)
        nursery.start_soon(watch_health)
        await api.wait_parked(5)
        await producer.wait_queued(300)
        nursery.start_soon(ack)
        while not acked:
            await trio.sleep(0.01)
        await trio.to_thread.run_sync(own_cluster.stop)
        away = time.monotonic()
        while 503 not in healths:
            await trio.sleep(0.02)
        assert (await api.http.get("/status")).status_code == 200
        assert (await api.metrics())["wakeups"]["parked"] == 5
        assert not woken
        await trio.to_thread.run_sync(own_cluster.start)
        back = time.monotonic()
        while healths[-1] != 200:
            await trio.sleep(0.02)
        print(f"away {back - away:.1f} s, healthy again after {time.monotonic() - back:.1f} s")
        before = len(producer.queued)
        await producer.wait_queued(before + 300)
        producer.stop()
        while (await api.buffers())["bufferedMessages"]:
            await trio.sleep(0.02)
        while len(acked) < len(leased):
            await trio.sleep(0.02)
        assert not woken
        for n in range(5):
            await api.push("parked", n, partition=str(n))
        while len(woken) < 5:
            await trio.sleep(0.02)
        nursery.cancel_scope.cancel()
    assert sorted(data(answer)[0] for answer in woken) == list(range(5))
    # One may have been committed in the moment of the stop, its answer lost and its retry a noop.
    assert all(result["success"] for result in acked)
    producer.check(await take_all(api, "q"))


async def test_a_waiting_pop_times_out_in_time_while_postgres_is_away(own_cluster: Cluster) -> None:
    """And a call that can't wait for so long gets its 503 with Retry-After (spec 8.15)."""
    environment = postgres_environment(own_cluster.settings("postgres"))
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            await api.push("q", 1)
            await trio.to_thread.run_sync(own_cluster.stop)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(pop_times_out, api))
                nursery.start_soon(partial(no_patience_left, api, "GET", "/api/v1/pop/queue/q"))
                nursery.start_soon(partial(no_patience_left, api, "POST", "/api/v1/lease/x/extend"))
                [result] = await api.push("q", 2)
                assert result["status"] == "buffered"
            await trio.to_thread.run_sync(own_cluster.start)
            seen: list[int] = []
            while len(seen) < 2:
                seen += data(await api.pop("q", wait="true", timeout=20_000, autoAck="true"))
            assert seen == [1, 2]


async def pop_times_out(api: Api) -> None:
    started = trio.current_time()
    assert await api.pop("q", wait="true", timeout=1_000) is None
    assert 1.0 <= trio.current_time() - started < 5.0


async def no_patience_left(api: Api, method: str, path: str) -> None:
    started = trio.current_time()
    response = await api.http.request(method, path)
    took = trio.current_time() - started
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert response.json()["code"] == "database_unavailable"
    assert 10 < took < 20, took


async def test_health_answers_within_the_patience_of_a_probe(own_cluster: Cluster) -> None:
    """Orchestrators wait a second by default, and a time-out tells them less than a 503."""
    environment = postgres_environment(own_cluster.settings("postgres"))
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            assert (await api.http.get("/health")).status_code == 200
            await trio.to_thread.run_sync(own_cluster.stop)
            assert (await api.http.get("/health")).status_code == 503
            started = trio.current_time()
            response = await api.http.get("/health")
            assert trio.current_time() - started < 1
            assert response.status_code == 503
            assert response.json()["database"] == "disconnected"
            assert response.json()["error"] == "PostgreSQL can't be reached"
            await trio.to_thread.run_sync(own_cluster.start)
            while (await api.http.get("/health")).status_code != 200:
                await trio.sleep(0.1)


async def test_health_of_a_broker_whose_postgres_is_mute(own_cluster: Cluster) -> None:
    """Connected, and then no answer: a stopped virtual machine, a disk that hangs."""
    environment = postgres_environment(own_cluster.settings("postgres"))
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            assert (await api.http.get("/health")).status_code == 200
            postmaster = psutil.Process(own_cluster.postmaster_pid)
            server = [postmaster, *postmaster.children(recursive=True)]
            for process in server:
                process.suspend()
            try:
                started = trio.current_time()
                assert (await api.http.get("/health")).status_code == 503
                assert trio.current_time() - started < 5
            finally:
                for process in server:
                    process.resume()
            while (await api.http.get("/health")).status_code != 200:
                await trio.sleep(0.1)
