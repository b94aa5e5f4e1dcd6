"""POST /streams/v1/…: what the client's streaming engine calls (spec 7, "Streams").

Names are in snake case here, as that engine has them. What can't be done is a 200 with
`success: false` and `error`; what can't be understood is a 400.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from uuid import UUID

import msgspec

from queen_trio.errors import ClientError
from queen_trio.model.ack import AckStatus, ack_status
from queen_trio.model.message import PushItem, check_item
from queen_trio.model.names import MAX_TRANSACTION_ID_BYTES, check_name
from queen_trio.model.streams import (
    Cycle,
    SourceCommit,
    StateChange,
    StateQuery,
    key_prefix,
    ripe_at,
    state_key,
)

from .codec import decode_untrusted, json_response
from .message import INT32_MAX
from .problems import problem

if TYPE_CHECKING:
    from queen_trio.broker import Broker

    from .message import Request, Response


class _QueryBody(msgspec.Struct):
    name: str
    config_hash: str
    source_queue: str | None = None
    sink_queue: str | None = None
    reset: bool = False


class _StateBody(msgspec.Struct):
    query_id: UUID
    partition_id: UUID
    keys: list[msgspec.Raw] | None = None
    key_prefix: str | None = None
    ripe_at_or_before: float | None = None


class _StateOperation(msgspec.Struct):
    type: Literal["upsert", "delete"]
    key: msgspec.Raw
    value: msgspec.Raw = msgspec.Raw(b"")


class _Ack(msgspec.Struct):
    transactionId: str
    leaseId: str
    status: str | None = None
    count: int | None = None


class _CycleBody(msgspec.Struct):
    query_id: UUID
    partition_id: UUID
    consumer_group: str
    state_ops: list[_StateOperation] | None = None
    push_items: list[PushItem] | None = None
    ack: _Ack | None = None
    release_lease: bool = True


_query = msgspec.json.Decoder(_QueryBody)
_state = msgspec.json.Decoder(_StateBody)
_cycle = msgspec.json.Decoder(_CycleBody)


async def register_query(broker: Broker, request: Request) -> Response:
    """Create a query or find it by its name; another config_hash needs `reset`."""
    body = decode_untrusted(_query, request.body)
    name = check_name(body.name, "name")
    row = await broker.streams.register(
        name,
        _queue(body.source_queue, "source_queue"),
        _queue(body.sink_queue, "sink_queue"),
        check_name(body.config_hash, "config_hash"),
        reset=body.reset,
    )
    if not row.matches:
        return problem(409, "config_hash mismatch", "config_hash_mismatch", success=False)
    return json_response(
        {
            "success": True,
            "query_id": row.query_id,
            "name": name,
            "fresh": row.fresh,
            "reset": body.reset and not row.fresh,
        }
    )


async def get_state(broker: Broker, request: Request) -> Response:
    """Read what a query remembers of one partition; no `keys` means all."""
    body = decode_untrusted(_state, request.body)
    keys = [state_key(bytes(key), f"keys[{i}]") for i, key in enumerate(body.keys or ())]
    rows = await broker.streams.state(
        StateQuery(
            query_id=body.query_id,
            partition_id=body.partition_id,
            keys=keys or None,
            prefix=key_prefix(body.key_prefix) if body.key_prefix else None,
            ripe_at=body.ripe_at_or_before,
        )
    )
    if rows is None:
        return json_response({"success": False, "error": "unknown query_id"})
    return json_response(
        {
            "success": True,
            "rows": [
                {"key": msgspec.Raw(row.key), "value": msgspec.Raw(row.value.encode())}
                for row in rows
            ],
        }
    )


async def commit_cycle(broker: Broker, request: Request) -> Response:
    """Commit changes of state, pushes and source messages together."""
    broker.maintenance.check_writable()
    body = decode_untrusted(_cycle, request.body)
    pushes = body.push_items or []
    for index, item in enumerate(pushes):
        try:
            check_item(item, index)
        except ClientError as error:
            raise ClientError(f"push_{error}") from None
    changes = dict(_change(op, f"state_ops[{i}]") for i, op in enumerate(body.state_ops or ()))
    outcome = await broker.streams.cycle(
        Cycle(
            query_id=body.query_id,
            partition_id=body.partition_id,
            group=check_name(body.consumer_group, "consumer_group"),
            changes=changes,
            pushes=pushes,
            commit=None if body.ack is None else _commit(body.ack, release=body.release_lease),
            producer_sub=request.subject,
        )
    )
    if outcome.refusal is not None:
        return json_response({"success": False, "error": outcome.refusal})
    return json_response(
        {
            "success": True,
            "query_id": body.query_id,
            "partition_id": body.partition_id,
            "lease_released": outcome.lease_released,
            "push_results": outcome.pushes,
        }
    )


def _queue(name: str | None, field: str) -> str | None:
    """The client says "" of a source that is no queue."""
    return check_name(name, field) if name else None


def _change(operation: _StateOperation, where: str) -> tuple[bytes, StateChange]:
    """The key and what it becomes; of several changes of one key the last counts."""
    key = state_key(bytes(operation.key), f"{where}.key")
    if operation.type == "delete":
        return key, StateChange()
    value = bytes(operation.value)
    if not value:
        raise ClientError(f"{where}: object missing required field `value`")
    return key, StateChange(value.decode(), ripe_at(value))


def _commit(ack: _Ack, *, release: bool) -> SourceCommit:
    if ack_status(ack.status) is not AckStatus.COMPLETED:
        raise ClientError(f"ack.status={ack.status!r}: a cycle can only complete its messages")
    if not release and (ack.count is None or not 1 <= ack.count <= INT32_MAX):
        raise ClientError(f"ack.count={ack.count}: release_lease=false needs a number from 1 on")
    return SourceCommit(
        check_name(ack.leaseId, "ack.leaseId"),
        check_name(ack.transactionId, "ack.transactionId", MAX_TRANSACTION_ID_BYTES),
        None if release else ack.count,
    )


ROUTES = {
    "/streams/v1/queries": {"POST": register_query},
    "/streams/v1/state/get": {"POST": get_state},
    "/streams/v1/cycle": {"POST": commit_cycle},
}
