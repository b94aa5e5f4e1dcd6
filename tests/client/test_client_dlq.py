"""The client's dead letters, traces, and what its admin calls tell of messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.client.consumption import Message, consuming
from tests.client.hosting import hosted
from tests.client.releases import CURRENT

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from tests.brokers import LiveBroker


async def bury(queen: Any, name: str, data: Any = 1) -> Message:
    """Push a message and dead-letter it; returns it."""
    await queen.queue(name).push({"data": data})
    (message,) = await queen.queue(name).batch(1).wait(False).pop()
    answer = await queen.ack(message, "dlq", {"error": "poison"})
    assert answer["dlq"] is True
    return message  # type: ignore[no-any-return]


@hosted
async def test_the_dlq_query(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        for number in range(3):
            await bury(queen, name, {"n": number})
        answer = await queen.queue(name).dlq().limit(2).get()
        assert answer["total"] == 3
        assert [letter["data"]["n"] for letter in answer["messages"]] == [2, 1]
        assert "poison" in answer["messages"][0]["errorMessage"]
        assert answer["messages"][0]["retryCount"] == 0
        answer = await queen.queue(name).dlq().limit(2).offset(2).get()
        [oldest] = answer["messages"]
        assert oldest["data"] == {"n": 0}
        moment = oldest["failedAt"]
        assert (await queen.queue(name).dlq().from_(moment).get())["total"] == 3
        assert (await queen.queue(name).dlq().to(moment).get())["total"] == 0
        assert (await queen.queue(name).dlq("nobody").get())["total"] == 0
        assert (await queen.queue(name).dlq("__QUEUE_MODE__").get())["total"] == 3
        assert (await queen.queue(name).partition("p").dlq().get())["total"] == 0


@hosted
async def test_retry_and_delete(client: ModuleType, shared_broker: LiveBroker, name: str) -> None:
    async with client.Queen(shared_broker.url) as queen:
        first, second = await bury(queen, name, 1), await bury(queen, name, 2)
        # The client drops the empty body that it means to send.
        answer = await queen.admin.retry_message(first["partitionId"], first["transactionId"])
        assert answer["status"] == "moved"
        await queen.admin.delete_message(second["partitionId"], second["transactionId"])
        assert (await queen.queue(name).dlq().get())["total"] == 0
        (again,) = await queen.queue(name).batch(1).wait(False).pop()
        assert (again["data"], again["id"]) == (1, answer["messageId"])
        with pytest.raises(Exception, match="no dead letter of transactionId"):
            await queen.admin.retry_message(first["partitionId"], first["transactionId"])


@hosted
async def test_dead_lettering_by_hand(
    client: ModuleType, release: str, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": 1}, {"data": 2}])
        listed = (await queen.admin.list_messages(queue=name))["messages"]
        address = (listed[-1]["partitionId"], listed[-1]["transactionId"])
        if release == CURRENT:  # refuses before it asks
            with pytest.raises(NotImplementedError):
                await queen.admin.move_message_to_dlq(*address)
            return
        assert (await queen.admin.move_message_to_dlq(*address))["success"] is True
        (letter,) = (await queen.queue(name).dlq().get())["messages"]
        assert letter["data"] == 1
        (message,) = await queen.queue(name).batch(9).wait(False).pop()
        assert message["data"] == 2


@hosted
async def test_admin_looks_at_messages(
    client: ModuleType, shared_broker: LiveBroker, name: str
) -> None:
    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push([{"data": n} for n in range(3)])
        popped = await queen.queue(name).batch(2).wait(False).pop()
        await queen.ack(popped[0])
        listed = (await queen.admin.list_messages(queue=name, limit=10, offset=0))["messages"]
        assert [(m["data"], m["status"]) for m in listed] == [
            (2, "pending"),
            (1, "processing"),
            (0, "completed"),
        ]
        pending = await queen.admin.list_messages(queue=name, status="pending")
        assert [message["data"] for message in pending["messages"]] == [2]
        for message, consumed in zip(popped, (True, False), strict=True):
            detail = await queen.admin.get_message(message["partitionId"], message["transactionId"])
            assert detail["data"] == message["data"]
            (group,) = detail["consumerGroups"]
            assert group["name"] == group["group"] == "__QUEUE_MODE__"
            assert group["consumed"] is consumed
            assert (group["leaseExpiresAt"] is None) is consumed
        with pytest.raises(Exception, match="no message of transactionId 'nothing'"):
            await queen.admin.get_message(popped[0]["partitionId"], "nothing")


@hosted
async def test_traces(
    client: ModuleType, release: str, shared_broker: LiveBroker, name: str
) -> None:
    answers = []

    async def work(message: Message) -> None:
        names = [f"{name}-{release}-a", f"{name}-{release}-b"]
        answers.append(await message["trace"]({"data": {"step": 1}, "traceName": names}))
        answers.append(
            await message["trace"]({"data": "x", "traceName": names[0], "eventType": "warn"})
        )
        answers.append(await message["trace"]({"data": None}))

    async with client.Queen(shared_broker.url) as queen:
        await queen.queue(name).push({"data": 1})
        builder = queen.queue(name).group("g").subscription_mode("all").batch(1).limit(1).each()
        async with consuming(builder, work) as seen:
            await seen.wait_end()
        assert [answer["success"] for answer in answers] == [True, True, True]
        (message,) = seen.messages
        found = await queen.admin.get_traces_for_message(
            message["partitionId"], message["transactionId"]
        )
        assert [(t["data"], t["eventType"], t["consumerGroup"]) for t in found["traces"]] == [
            ({"step": 1}, "info", "g"),
            ("x", "warn", "g"),
            (None, "info", "g"),
        ]
        by_name = await queen.admin.get_traces_by_name(f"{name}-{release}-a", limit=1)
        assert by_name["total"] == 2
        assert [trace["data"] for trace in by_name["traces"]] == ["x"]
        names = await queen.admin.get_trace_names(search=f"{name}-{release}-")
        assert {n["traceName"]: n["traceCount"] for n in names["traceNames"]} == {
            f"{name}-{release}-a": 2,
            f"{name}-{release}-b": 1,
        }
