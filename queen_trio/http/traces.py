"""/api/v1/traces: note something down about a message, and find it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from queen_trio.errors import ClientError
from queen_trio.model.names import (
    MAX_TRANSACTION_ID_BYTES,
    QUEUE_MODE_GROUP,
    check_name,
    check_optional_name,
)

from .codec import decode_untrusted, json_response, timestamp
from .parameters import message_address, moment, page, uuid
from .problems import problem

if TYPE_CHECKING:
    from queen_trio.broker import Broker
    from queen_trio.store.traces import TraceRow

    from .message import Request, Response

DEFAULT_LIMIT: Final = 100
DEFAULT_EVENT_TYPE: Final = "info"
# Each is a row of its own.
MAX_NAMES: Final = 100


class _TraceBody(msgspec.Struct, rename="camel"):
    transaction_id: str
    partition_id: str
    data: msgspec.Raw
    consumer_group: str | None = None
    trace_names: list[str] | None = None
    event_type: str | None = None


_trace = msgspec.json.Decoder(_TraceBody)


async def trace(broker: Broker, request: Request) -> Response:
    """Store a trace; its `data` is any JSON value."""
    body = decode_untrusted(_trace, request.body)
    names = body.trace_names or []
    if len(names) > MAX_NAMES:
        raise ClientError(f"traceNames has {len(names)} names, at most {MAX_NAMES} are allowed")
    partition_id = uuid(body.partition_id, "partitionId")
    trace_id = await broker.traces.add(
        partition_id,
        check_name(body.transaction_id, "transactionId", MAX_TRANSACTION_ID_BYTES),
        check_name(body.consumer_group or QUEUE_MODE_GROUP, "consumerGroup"),
        [check_name(name, f"traceNames[{i}]") for i, name in enumerate(names)],
        check_name(body.event_type or DEFAULT_EVENT_TYPE, "eventType"),
        bytes(body.data).decode(),
    )
    if trace_id is None:
        return problem(404, f"no partition has the id {partition_id}", "partition_not_found")
    return json_response({"success": True, "traceId": trace_id}, 201)


async def traces_of_message(broker: Broker, request: Request) -> Response:
    """List the traces of a message in the order of their arrival; [] where there are none."""
    partition_id, transaction_id = message_address(request.path)
    window = page(request, limit=DEFAULT_LIMIT)
    rows = await broker.traces.of_message(partition_id, transaction_id, window)
    return json_response(
        {
            "traces": [_trace_of(row) for row in rows],
            "limit": window.limit,
            "offset": window.offset,
        }
    )


async def traces_of_name(broker: Broker, request: Request) -> Response:
    """List the traces of a name, newest first; `total` counts all in the window."""
    (name,) = request.path
    window = page(request, limit=DEFAULT_LIMIT)
    rows, total = await broker.traces.of_name(
        check_name(name, "name"), moment(request, "from"), moment(request, "to"), window
    )
    return json_response(
        {
            "traceName": name,
            "traces": [_trace_of(row) for row in rows],
            "total": total,
            "limit": window.limit,
            "offset": window.offset,
        }
    )


async def trace_names(broker: Broker, request: Request) -> Response:
    """List the names that have traces, the one used last first; those that contain `search`."""
    window = page(request, limit=DEFAULT_LIMIT)
    search = check_optional_name(request.text("search"), "search")
    rows, total = await broker.traces.names(search, window)
    return json_response(
        {
            "traceNames": [
                {
                    "traceName": row.name,
                    "traceCount": row.traces,
                    "lastTraceAt": timestamp(row.last_at),
                }
                for row in rows
            ],
            "total": total,
            "limit": window.limit,
            "offset": window.offset,
        }
    )


def _trace_of(row: TraceRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "queue": row.queue_name,
        "partition": row.partition_name,
        "partitionId": row.partition_id,
        "transactionId": row.transaction_id,
        "consumerGroup": row.consumer_group,
        "traceNames": row.names,
        "eventType": row.event_type,
        "data": msgspec.Raw(row.data.encode()),
        "createdAt": timestamp(row.created_at),
    }


# by-name stands before the address of a message, whose form it has too.
ROUTES = {
    "/api/v1/traces": {"POST": trace},
    "/api/v1/traces/names": {"GET": trace_names},
    "/api/v1/traces/by-name/:name": {"GET": traces_of_name},
    "/api/v1/traces/:partitionId/:transactionId": {"GET": traces_of_message},
}
