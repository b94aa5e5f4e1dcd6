"""POST /api/v1/transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from queen_trio.errors import ClientError
from queen_trio.model.message import PushItem, PushResult, PushStatus, check_item
from queen_trio.model.transaction import TransactionOutcome, TransactionRequest

from .ack import ack_from_wire
from .codec import decode_untrusted, json_response

if TYPE_CHECKING:
    from queen_trio.broker import Broker
    from queen_trio.model.ack import Ack, AckResult

    from .message import Request, Response


class _Operation(msgspec.Struct, rename="camel"):
    type: str
    # push
    items: list[PushItem] | None = None
    queue: str | None = None
    payload: msgspec.Raw = msgspec.Raw(b"")
    data: msgspec.Raw = msgspec.Raw(b"")
    partition: str | None = None
    trace_id: str | None = None
    # both
    transaction_id: str | None = None
    # ack
    partition_id: str | None = None
    status: str | None = None
    consumer_group: str | None = None
    lease_id: str | None = None
    error: str | None = None


class _TransactionBody(msgspec.Struct, rename="camel"):
    operations: list[_Operation]
    required_leases: list[str] | None = None
    # Riders of the client that this broker can't carry, see _refuse_riders.
    kv: list[msgspec.Raw] | None = None
    timers: list[msgspec.Raw] | None = None


_decoder = msgspec.json.Decoder(_TransactionBody)


async def transaction(broker: Broker, request: Request) -> Response:
    """Push and acknowledge, all or nothing; a refusal is a 200 with `success: false`."""
    broker.maintenance.check_writable()
    body = decode_untrusted(_decoder, request.body)
    _refuse_riders(body)
    pushes: list[PushItem] = []
    acks: list[Ack] = []
    order: list[tuple[str, int]] = []  # results come back in the order of the operations
    for index, operation in enumerate(body.operations):
        where = f"operations[{index}]"
        if operation.type == "push":
            for item in _items(operation, where):
                order.append(("push", len(pushes)))
                pushes.append(item)
        elif operation.type == "ack":
            order.append(("ack", len(acks)))
            acks.append(_ack(operation, where))
        else:
            raise ClientError(f"{where}.type={operation.type!r} is neither push nor ack")
    outcome = await broker.transactions.run(
        TransactionRequest(
            pushes, acks, _leases(body.required_leases), producer_sub=request.subject
        )
    )
    return json_response(_answer(outcome, order))


def _refuse_riders(body: _TransactionBody) -> None:
    """Refuse what must not be ignored: the client's `once` and `guard` are conditions in `kv`."""
    for rider, present in (("kv", body.kv), ("timers", body.timers)):
        if present:
            raise ClientError(
                f"{rider} in a transaction is not supported", code=f"{rider}_unsupported"
            )


def _items(operation: _Operation, where: str) -> list[PushItem]:
    if operation.items is not None:
        items = operation.items
    elif operation.queue is not None:
        items = [
            PushItem(
                operation.queue,
                operation.payload if len(operation.payload) else operation.data,
                operation.partition,
                operation.transaction_id,
                operation.trace_id,
            )
        ]
    else:
        raise ClientError(f"{where}: a push needs items, or queue and payload")
    for index, item in enumerate(items):
        try:
            check_item(item, index)
        except ClientError as error:
            raise ClientError(f"{where}.{error}") from None
    return items


def _ack(operation: _Operation, where: str) -> Ack:
    if operation.transaction_id is None or operation.partition_id is None:
        missing = "transactionId" if operation.transaction_id is None else "partitionId"
        raise ClientError(f"{where}: object missing required field `{missing}`")
    try:
        return ack_from_wire(
            [operation.transaction_id],
            operation.partition_id,
            operation.status,
            operation.consumer_group,
            operation.lease_id,
            operation.error,
        )
    except ClientError as error:
        raise ClientError(f"{where}.{error}") from None


def _leases(leases: list[str] | None) -> list[str]:
    for index, lease in enumerate(leases or ()):
        if "\0" in lease:
            raise ClientError(f"requiredLeases[{index}] must not contain U+0000")
    return sorted(set(leases or ()) - {""})


def _answer(outcome: TransactionOutcome, order: list[tuple[str, int]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"transactionId": str(uuid4()), "success": outcome.refusal is None}
    if outcome.refusal is not None:
        return answer | {"reason": outcome.refusal.value, "error": outcome.error, "results": []}
    return answer | {
        "results": [
            _push_result(index, outcome.pushes[n])
            if kind == "push"
            else _ack_result(index, outcome.acks[n])
            for index, (kind, n) in enumerate(order)
        ]
    }


def _push_result(index: int, result: PushResult) -> dict[str, Any]:
    answer = {
        "index": index,
        "type": "push",
        "success": True,
        "transactionId": result.transaction_id,
        "messageId": result.message_id,
        "queueName": result.queueName,
    }
    return answer | ({"duplicate": True} if result.status is PushStatus.DUPLICATE else {})


def _ack_result(index: int, result: AckResult) -> dict[str, Any]:
    return {
        "index": index,
        "type": "ack",
        "success": result.success,
        "transactionId": result.transactionId,
        "error": result.error,
        "dlq": result.dlq,
    }


ROUTES = {"/api/v1/transaction": {"POST": transaction}}
