"""The client acknowledges, refuses and holds on to what it popped."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tests.client.consumption import POLL_SECONDS, Message, consuming
from tests.client.hosting import hosted
from tests.client.releases import CURRENT

if TYPE_CHECKING:
    from types import ModuleType

    from queen_trio.store.settings import ConnectionSettings
    from tests.brokers import LiveBroker
    from tests.cluster import Cluster

REFUSED = "invalid or expired lease"


class Broken(Exception):
    """What a handler fails with."""


@hosted
async def test_an_acknowledged_message_is_gone(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": 1}, {"data": 2}])
        (first,) = await queen.queue(name).batch(1).wait(False).pop()
        # Leased: nobody else gets the partition meanwhile.
        assert await queen.queue(name).batch(1).wait(False).pop() == []
        answer = await queen.ack(first)
        assert answer["success"] is True
        assert answer["leaseReleased"] is True
        (second,) = await queen.queue(name).batch(1).wait(False).pop()
        assert second["data"] == 2
        # Once more: done already, which is no error.
        again = await queen.ack({**first, "leaseId": None})
        assert (again["success"], again["noop"]) == (True, True)


@hosted
async def test_a_batch_with_a_status_for_each(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(4)])
        messages = await queen.queue(name).batch(4).wait(False).pop()
        messages[2] |= {"_status": False, "_error": "not today"}
        answer = await queen.ack(messages)
        assert [result["index"] for result in answer["results"]] == [0, 1, 2, 3]
        # The third stops the cursor; it and what follows come again.
        messages = await queen.queue(name).batch(4).wait(False).pop()
        assert [message["data"] for message in messages] == [2, 3]
        assert messages[0]["deliveryAttempt"] == 2


@hosted
async def test_retry_costs_no_budget(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).config({"retry_limit": 1}).create()
        await queen.queue(name).push({"data": 1})
        for _ in range(3):
            (message,) = await queen.queue(name).batch(1).wait(False).pop()
            assert (await queen.ack(message, "retry"))["success"] is True


@hosted
async def test_a_refused_acknowledgement_says_so(
    client: ModuleType,
    release: str,
    broker: LiveBroker,
    cluster: Cluster,
    settings: ConnectionSettings,
    name: str,
) -> None:
    async with client.Queen(broker.url) as queen:
        await queen.queue(name).push([{"data": 1}, {"data": 2}])
        late = await queen.queue(name).batch(2).wait(False).pop()
        expire(cluster, settings, late[0])
        messages = await queen.queue(name).batch(2).wait(False).pop()
        assert [message["data"] for message in messages] == [1, 2]
        answer = await queen.ack(late[0])
        assert (answer["success"], answer["error"]) == (False, REFUSED)
        answer = await queen.ack(late)
        assert [result["error"] for result in answer["results"]] == [REFUSED, REFUSED]
        # The releases before 2.3 don't look at the items of a batch.
        assert answer["success"] is (release != CURRENT)
        assert (await queen.ack(messages))["success"] is True


@hosted
async def test_a_failing_handler_leads_to_the_dead_letters(
    client: ModuleType,
    release: str,
    broker: LiveBroker,
    cluster: Cluster,
    settings: ConnectionSettings,
    name: str,
) -> None:
    async def work(message: Message) -> None:
        if message["data"] == "bad":
            raise Broken("no stamp")

    async with client.Queen(broker.url) as queen:
        await queen.queue(name).config({"retry_limit": 3}).create()
        await queen.queue(name).push([{"data": data} for data in ("good", "bad", "better")])
        async with consuming(queen.queue(name).batch(1).each(), work) as seen:
            await seen.wait_messages(5)
    # Three attempts, and the queue isn't blocked by it.
    assert seen.data == ["good", "bad", "bad", "bad", "better"]
    assert [message["deliveryAttempt"] for message in seen.messages[1:4]] == [1, 2, 3]
    (letter,) = dead_letters(cluster, settings, name)
    assert letter[:2] == ('"bad"', seen.messages[1]["transactionId"])
    # 0.15.0 doesn't send the handler's error.
    assert letter[2] == (None if release == "0.15.0" else "no stamp")


@hosted
async def test_a_failing_batch_handler(
    client: ModuleType,
    broker: LiveBroker,
    cluster: Cluster,
    settings: ConnectionSettings,
    name: str,
) -> None:
    """A nack of a batch charges its first message only: that one is buried, the next is tried."""

    async def work(messages: list[Message]) -> None:
        if messages[0]["data"] < 2:
            raise Broken("no stamp")

    async with client.Queen(broker.url) as queen:
        await queen.queue(name).config({"retry_limit": 1}).create()
        await queen.queue(name).push([{"data": n} for n in range(4)])
        async with consuming(queen.queue(name).batch(10).limit(9), work) as seen:
            await seen.wait_end()
    calls = [[message["data"] for message in call] for call in seen.calls]
    assert calls == [[0, 1, 2, 3], [1, 2, 3], [2, 3]]
    assert [letter[0] for letter in dead_letters(cluster, settings, name)] == ["0", "1"]


@hosted
async def test_dlq_buries_at_once(
    client: ModuleType,
    broker: LiveBroker,
    cluster: Cluster,
    settings: ConnectionSettings,
    name: str,
) -> None:
    async with client.Queen(broker.url) as queen:
        await queen.queue(name).push({"data": 1})
        messages = await queen.queue(name).group("g").subscription_mode("all").batch(1).pop()
        answer = await queen.ack(messages[0], "dlq", {"group": "g", "error": "poison"})
    assert (answer["success"], answer["dlq"]) == (True, True)
    (letter,) = dead_letters(cluster, settings, name)
    assert letter == ("1", messages[0]["transactionId"], "poison", "g")


@hosted
async def test_renew_on_demand(
    client: ModuleType, release: str, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).config({"lease_time": 5}).create()
        for partition in "ab":
            await queen.queue(name).partition(partition).push({"data": 1})
        messages = await queen.queue(name).batch(9).partitions(2).wait(False).pop()
        lease_id = messages[0]["leaseId"]
        renewed = await queen.renew(messages[0])
        assert (renewed["leaseId"], renewed["success"]) == (lease_id, True)
        assert seconds_from_now(renewed["newExpiresAt"]) > 30
        # Both partitions hang on the one lease; from 2.3 on the client tells how many it held.
        results = await queen.renew(messages)
        assert {result["leaseId"] for result in results} == {lease_id}
        if release == CURRENT:
            assert [result["renewed"] for result in results] == [2]
        await queen.ack(messages)
        gone = await queen.renew(lease_id)
        assert gone["newExpiresAt"] is None
        # The releases before 2.3 call any answer a success.
        assert gone["success"] is (release != CURRENT)


@hosted
async def test_renewal_while_the_handler_works(
    client: ModuleType,
    broker: LiveBroker,
    cluster: Cluster,
    settings: ConnectionSettings,
    name: str,
) -> None:
    """A lease of 5 s is extended by a minute; the handler keeps the message all the while."""
    finish = asyncio.Event()

    async def work(message: Message) -> None:
        await finish.wait()

    async with client.Queen(broker.url) as queen:
        await queen.queue(name).config({"lease_time": 5}).create()
        await queen.queue(name).push({"data": 1})
        builder = queen.queue(name).batch(1).limit(1).renew_lease(True, 20)
        async with consuming(builder, work) as seen:
            await seen.wait_messages(1)
            while lease_seconds_left(cluster, settings, seen.messages[0]) < 30:
                await asyncio.sleep(POLL_SECONDS)
            assert await queen.queue(name).wait(False).pop() == []
            finish.set()
            await seen.wait_end()
        assert await queen.queue(name).wait(False).pop() == []
        assert (await queen.admin.get_queue(name))["messages"]["pending"] == 0


def expire(cluster: Cluster, settings: ConnectionSettings, message: Message) -> None:
    """End the message's lease, as time would."""
    cluster.execute(
        "UPDATE queen.log_consumers SET lease_expires_at = clock_timestamp() - interval '1 s'"
        f" WHERE worker_id = '{message['leaseId']}'",
        settings.database,
    )


def lease_seconds_left(cluster: Cluster, settings: ConnectionSettings, message: Message) -> float:
    """Return how long the message's lease still runs."""
    ((seconds,),) = cluster.execute(
        "SELECT extract(epoch FROM lease_expires_at - clock_timestamp())::float"
        f" FROM queen.log_consumers WHERE worker_id = '{message['leaseId']}'",
        settings.database,
    )
    return float(seconds)


def dead_letters(
    cluster: Cluster, settings: ConnectionSettings, queue: str
) -> list[tuple[Any, ...]]:
    """Return payload, transaction, error and group of the queue's dead letters."""
    return cluster.execute(
        "SELECT payload, transaction_id, error, consumer_group FROM queen.log_dlq"
        f" WHERE queue_name = '{queue}' ORDER BY \"offset\"",
        settings.database,
    )


def seconds_from_now(timestamp: str) -> float:
    """Return how far in the future an ISO 8601 timestamp is."""
    moment = datetime.fromisoformat(timestamp)
    return (moment - datetime.now(moment.tzinfo)).total_seconds()
