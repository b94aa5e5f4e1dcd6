"""POST /api/v1/configure and /api/v1/resources/queues…."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from queen_trio.model.names import check_name, check_optional_name
from queen_trio.model.queue import COLUMNS, columns_from_options, options_from_row

from .codec import decode_untrusted, json_response, timestamp
from .problems import problem

if TYPE_CHECKING:
    from queen_trio.broker import Broker
    from queen_trio.store.queries import PartitionRow, QueueRow

    from .message import Request, Response


class _ConfigureBody(msgspec.Struct):
    queue: str
    namespace: str | None = None
    task: str | None = None
    options: dict[str, Any] | None = None
    mode: Literal["merge", "replace"] = "merge"


_configure = msgspec.json.Decoder(_ConfigureBody)
_object = msgspec.json.Decoder(dict[str, Any])


async def configure(broker: Broker, request: Request) -> Response:
    """Create or change a queue; options may also stand at the top level."""
    body = decode_untrusted(_configure, request.body)
    name = check_name(body.queue, "queue")
    # An empty namespace or task means none, as the client's defaults do.
    namespace = body.namespace and check_optional_name(body.namespace, "namespace")
    task = body.task and check_optional_name(body.task, "task")
    top = decode_untrusted(_object, request.body)
    options = {key: value for key, value in top.items() if key in COLUMNS} | (body.options or {})
    row = await broker.queues.configure(
        name, namespace, task, columns_from_options(options), replace=body.mode == "replace"
    )
    return json_response(
        {
            "configured": True,
            "queueId": row["id"],
            "queue": row["name"],
            "namespace": row["namespace"],
            "task": row["task"],
            "options": options_from_row(row),
        }
    )


async def list_queues(broker: Broker, request: Request) -> Response:
    """List all queues with their counts."""
    return json_response({"queues": [queue_summary(row) for row in await broker.queues.list_all()]})


async def show_queue(broker: Broker, request: Request) -> Response:
    """Show one queue: options, partitions, totals."""
    (name,) = request.path
    found = await broker.queues.detail(_name(name))
    if found is None:
        return problem(404, "Queue not found", "queue_not_found")
    queue, row, partitions = found
    return json_response(
        queue_summary(queue)
        | {
            "options": options_from_row(row),
            "partitions": [partition_summary(part) for part in partitions],
            "totals": counts(queue),
        }
    )


async def delete_queue(broker: Broker, request: Request) -> Response:
    """Delete a queue; one that doesn't exist is not an error, `deleted` tells."""
    (name,) = request.path
    return json_response({"deleted": await broker.queues.delete(_name(name)), "queue": name})


def _name(name: str) -> str:
    return check_name(name, "queue")


def counts(row: QueueRow | PartitionRow) -> dict[str, int]:
    return {"total": row.total, "pending": row.pending, "processing": row.processing}


def queue_summary(row: QueueRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "namespace": row.namespace,
        "task": row.task,
        "createdAt": timestamp(row.created_at),
        "partitions": row.partitions,
        "messages": counts(row),
    }


def partition_summary(row: PartitionRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "createdAt": timestamp(row.created_at),
        "lastActivity": timestamp(row.last_write_at),
        "stats": counts(row) | {"lastOffset": row.last_offset, "logStart": row.log_start},
    }


ROUTES = {
    "/api/v1/configure": {"POST": configure},
    "/api/v1/resources/queues": {"GET": list_queues},
    "/api/v1/resources/queues/:queue": {"GET": show_queue, "DELETE": delete_queue},
}
