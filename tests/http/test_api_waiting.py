"""Long polls: who wakes them, what their end looks like, and claims whose client has gone."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from tests.http.api import Api, Json, data, identity, open_api, unique
from tests.http.raw import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.brokers import LiveBroker
    from tests.cluster import Cluster

# Every wake here comes from this broker and takes milliseconds; a missing one would be found by
# the re-probe within a second or by the timeout of the poll, and that is what must not happen.
LONG_MS = 30_000
SECONDS = 20


class Parked:
    """A pop that waits in a task; `answer` is there once `done` is set."""

    def __init__(self) -> None:
        self.answer: Json | None = None
        self.done = trio.Event()
        self.finished_at = 0.0

    async def run(self, api: Api, queue: str | None, params: dict[str, Any]) -> None:
        params = {"wait": "true", "timeout": LONG_MS, **params}
        if queue is None:
            self.answer = await api.discover(**params)
        else:
            self.answer = await api.pop(queue, **params)
        self.finished_at = trio.current_time()
        self.done.set()


@asynccontextmanager
async def parked(api: Api, *pops: tuple[str | None, dict[str, Any]]) -> AsyncIterator[list[Parked]]:
    """Pops that are parked when the block begins, and cancelled at its end."""
    waiting = [Parked() for _ in pops]
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for pop, (queue, params) in zip(waiting, pops, strict=True):
                nursery.start_soon(pop.run, api, queue, params)
            await api.wait_parked(len(pops))
            yield waiting
            nursery.cancel_scope.cancel()
    await api.wait_parked(0)


async def test_a_push_wakes_a_parked_pop(
    api: Api, queue: str, record_property: Callable[[str, object], None]
) -> None:
    latencies = []
    for n in range(30):
        async with parked(api, (queue, {"autoAck": "true"})) as [pop]:
            started = trio.current_time()
            await api.push(queue, n)
            await pop.done.wait()
            latencies.append((pop.finished_at - started) * 1000)
        assert data(pop.answer) == [n]
    record_property("wake_p50_ms", round(median(latencies), 2))
    print(f"push to woken pop, p50: {median(latencies):.2f} ms")


async def test_a_timeout_is_a_204(api: Api, queue: str) -> None:
    started = trio.current_time()
    assert await api.pop(queue, wait="true", timeout=300) is None
    assert 0.3 <= trio.current_time() - started < 5
    assert await api.pop(queue, wait="true", timeout=0) is None
    assert await api.discover(namespace=queue, wait="true", timeout=50) is None
    await api.wait_parked(0)


async def test_messages_that_are_there_are_not_waited_for(api: Api, queue: str) -> None:
    await api.push(queue, 1)
    with trio.fail_after(SECONDS):
        assert data(await api.pop(queue, wait="true", timeout=LONG_MS)) == [1]


async def test_a_partition_pop_wakes_for_its_partition_only(api: Api, queue: str) -> None:
    async def pop_partition(answers: list[Json | None]) -> None:
        answers.append(await api.pop(queue, "p", wait="true", timeout=LONG_MS))

    answers: list[Json | None] = []
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pop_partition, answers)
            await api.wait_parked(1)
            await api.push(queue, "other", partition="elsewhere")
            assert not answers
            await api.push(queue, "mine", partition="p")
    assert [data(a) for a in answers] == [["mine"]]


async def test_every_group_wakes(api: Api, queue: str) -> None:
    groups: list[tuple[str | None, dict[str, Any]]] = [
        (queue, {"consumerGroup": group}) for group in ("a", "b", "c")
    ]
    async with parked(api, *groups, (queue, {})) as pops:
        await api.push(queue, "news")
        for pop in pops:
            await pop.done.wait()
    assert [data(pop.answer) for pop in pops] == [["news"]] * 4


async def test_of_a_group_one_gets_it(api: Api, queue: str) -> None:
    async with parked(api, *[(queue, {"consumerGroup": "g"})] * 3) as pops:
        await api.push(queue, "one")
        await api.wait_parked(2)
        while not (done := [pop for pop in pops if pop.done.is_set()]):
            await trio.sleep(0.001)  # the broker has answered, the client has not read it yet
        assert [data(pop.answer) for pop in done] == [["one"]]


async def test_pushes_to_many_partitions_wake_as_many(api: Api, queue: str) -> None:
    async with parked(api, *[(queue, {})] * 5) as pops:
        await api.push_items(
            *({"queue": queue, "payload": n, "partition": str(n)} for n in range(5))
        )
        for pop in pops:
            await pop.done.wait()
    assert sorted(data(pop.answer)[0] for pop in pops) == list(range(5))


async def test_one_push_serves_all_who_take_and_commit(api: Api, queue: str) -> None:
    """autoAck leaves no lease behind: each answer makes the next one possible, without a probe."""
    async with parked(api, *[(queue, {"autoAck": "true", "batch": 1})] * 20) as pops:
        started = trio.current_time()
        await api.push(queue, *range(20))
        for pop in pops:
            await pop.done.wait()
        # By re-probes alone it would take 20 × 100 ms at the very least.
        assert max(pop.finished_at for pop in pops) - started < 1.5
    assert sorted(data(pop.answer)[0] for pop in pops) == list(range(20))


async def test_discovery_wakes(api: Api) -> None:
    namespace, task = unique("ns"), unique("task")
    queue = unique()
    await api.configure(queue, namespace=namespace, task=task)
    async with parked(
        api,
        (None, {"namespace": namespace, "consumerGroup": "a"}),
        (None, {"task": task, "consumerGroup": "b"}),
        (None, {"namespace": namespace, "task": task, "consumerGroup": "c"}),
    ) as pops:
        await api.push(queue, 1)
        for pop in pops:
            await pop.done.wait()
    assert [data(pop.answer) for pop in pops] == [[1]] * 3


async def test_a_queue_born_later_wakes_discovery(api: Api) -> None:
    namespace = unique("ns")
    async with parked(api, (None, {"namespace": namespace, "consumerGroup": "g"})) as [pop]:
        await api.push(f"{namespace}.born", 1)
        await pop.done.wait()
    assert data(pop.answer) == [1]


async def test_a_queue_that_moves_into_a_namespace_wakes_discovery(api: Api, queue: str) -> None:
    namespace = unique("ns")
    await api.push(queue, 1)
    async with parked(api, (None, {"namespace": namespace})) as [pop]:
        await api.configure(queue, namespace=namespace)
        await pop.done.wait()
    assert data(pop.answer) == [1]


@pytest.mark.parametrize("status", ["failed", "retry", "dlq", "completed"])
async def test_an_ack_that_leaves_messages_wakes(api: Api, queue: str, status: str) -> None:
    await api.push(queue, 1, 2)
    answer = await api.pop(queue, batch=1)
    assert answer is not None
    async with parked(api, (queue, {})) as [pop]:
        await api.ack(answer["messages"][0], status)
        await pop.done.wait()
    assert data(pop.answer) == ([1, 2] if status in ("failed", "retry") else [2])


async def test_an_ack_of_another_group_wakes_nobody(api: Api, queue: str) -> None:
    await api.push(queue, 1, 2)
    mine = await api.pop(queue)
    other = await api.pop(queue, batch=1, consumerGroup="g", subscriptionMode="all")
    assert mine is not None
    assert other is not None
    async with parked(api, (queue, {})) as [pop]:
        await api.ack(other["messages"][0])
        assert not pop.done.is_set()
        await api.ack(mine["messages"][0], "retry")
        await pop.done.wait()
    assert data(pop.answer) == [1, 2]


async def test_an_expired_lease_is_found_by_the_probe(
    api: Api, queue: str, cluster: Cluster
) -> None:
    await api.push(queue, 1)
    assert await api.pop(queue) is not None
    async with parked(api, (queue, {})) as [pop]:
        cluster.execute(
            "UPDATE queen.log_consumers c SET lease_expires_at = now() - interval '1 s' "
            "FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id "
            f"WHERE c.partition_id = p.id AND q.name = '{queue}'",
            "shared",
        )
        await pop.done.wait()
    assert data(pop.answer) == [1]


async def test_a_push_while_a_pop_asks_is_not_missed(api: Api, queue: str) -> None:
    """Many rounds without waiting for the pop to be parked: no wake falls into a gap."""
    with trio.fail_after(SECONDS):
        for n in range(50):
            pop = Parked()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pop.run, api, queue, {"autoAck": "true"})
                await api.push(queue, n)
            assert data(pop.answer) == [n]


# -- clients that go -----------------------------------------------------------------------------


async def test_a_disconnect_frees_the_waiter(api: Api, shared_broker: LiveBroker) -> None:
    connections = [await connect(shared_broker) for _ in range(20)]
    queue = unique()
    for connection in connections:
        await connection.send(f"GET /api/v1/pop/queue/{queue}?wait=true&timeout={LONG_MS}")
    with trio.fail_after(SECONDS):
        await api.wait_parked(20)
        for connection in connections:
            await connection.aclose()
        await api.wait_parked(0)
    await api.push(queue, 1)
    assert data(await api.pop(queue)) == [1]


async def test_the_next_in_line_gets_what_a_gone_client_was_woken_for(
    api: Api, shared_broker: LiveBroker, queue: str
) -> None:
    gone = await connect(shared_broker)
    await gone.send(f"GET /api/v1/pop/queue/{queue}?wait=true&timeout={LONG_MS}")
    await api.wait_parked(1)
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            pop = Parked()
            nursery.start_soon(pop.run, api, queue, {})
            await api.wait_parked(2)
            nursery.start_soon(partial(api.push, queue, "x"))
            await gone.aclose()
    assert data(pop.answer) == ["x"]


@pytest.mark.parametrize("wait", ["true", "false"])
async def test_a_claim_whose_client_vanished_is_released_at_once(
    broker: LiveBroker, cluster: Cluster, database: str, wait: str
) -> None:
    """The pop is held up inside PostgreSQL until its client has gone."""
    async with open_api(broker) as api:
        await api.push("q", 1, 2)
        answer = await api.pop("q", batch=1)  # the cursor is there, and the statements are prepared
        assert answer is not None
        await api.ack(answer["messages"][0])
        with psycopg.connect(
            host=cluster.settings().host, port=cluster.port, user="postgres", dbname=database
        ) as blocker:
            blocker.execute("LOCK TABLE queen.log_consumers")
            gone = await connect(broker)
            await gone.send(f"GET /api/v1/pop/queue/q?wait={wait}&timeout={LONG_MS}")
            with trio.fail_after(SECONDS):
                while not cluster.execute(
                    "SELECT pid FROM pg_locks WHERE NOT granted "
                    "AND relation = 'queen.log_consumers'::regclass",
                    database,
                ):
                    await trio.sleep(0.01)
            await gone.aclose()
            blocker.rollback()
        with trio.fail_after(SECONDS):
            again = await api.pop("q", wait="true", timeout=LONG_MS)
        assert data(again) == [2]
        assert again is not None
        assert again["messages"][0]["deliveryAttempt"] == 1
        assert (await api.ack_batch(identity(again["messages"][0])))[0]["success"]


async def test_a_claim_that_is_cut_off_while_it_is_written_is_released(
    api: Api, shared_broker: LiveBroker, queue: str
) -> None:
    """An answer of many MiB to a client that takes the beginning and then goes."""
    await api.push(queue, "x" * (15 * 1024 * 1024))
    gone = await connect(shared_broker)
    await gone.send(f"GET /api/v1/pop/queue/{queue}")
    await gone.stream.receive_some(1000)
    assert await api.pop(queue) is None
    await gone.aclose()
    with trio.fail_after(SECONDS):
        again = await api.pop(queue, wait="true", timeout=LONG_MS)
    assert again is not None
    assert again["messages"][0]["deliveryAttempt"] == 1
