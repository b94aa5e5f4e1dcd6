"""/api/v1/resources/{overview,namespaces,tasks,partitions}, depth, clear, /api/v1/status/queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from queen_trio.model.names import check_name, check_optional_name
from queen_trio.model.queue import options_from_row

from .codec import json_response, timestamp
from .groups import summary as group_summary
from .problems import problem
from .queues import partition_summary, queue_summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from queen_trio.broker import Broker
    from queen_trio.store.queries import QueueRow
    from queen_trio.store.resources import FoundPartition

    from .message import Request, Response

# A page of partitions; a queue may have tens of thousands.
DEFAULT_LIMIT: Final = 1000
MAX_LIMIT: Final = 100_000


async def overview(broker: Broker, request: Request) -> Response:
    """Sum up all queues."""
    queues = await broker.queues.list_all()
    row = await broker.resources.overview()
    return json_response(
        {
            "queues": len(queues),
            "partitions": sum(queue.partitions for queue in queues),
            "namespaces": len({queue.namespace for queue in queues if queue.namespace}),
            "tasks": len({queue.task for queue in queues if queue.task}),
            "consumerGroups": row.consumer_groups,
            "messages": _totals(queues) | {"deadLetter": row.dead_letters},
            "databaseBytes": row.database_bytes,
        }
    )


async def namespaces(broker: Broker, request: Request) -> Response:
    """List namespaces; queues without one are not in any."""
    queues = await broker.queues.list_all()
    return json_response({"namespaces": _by("namespace", queues)})


async def tasks(broker: Broker, request: Request) -> Response:
    """List tasks; queues without one are not in any."""
    return json_response({"tasks": _by("task", await broker.queues.list_all())})


async def partitions(broker: Broker, request: Request) -> Response:
    """List partitions of all queues, or of `queue`, a page at a time."""
    queue = check_optional_name(request.text("queue"), "queue")
    limit, offset = _page(request, DEFAULT_LIMIT)
    rows = await broker.resources.find_partitions(queue, limit, offset)
    return json_response({"partitions": [_found(row) for row in rows]})


async def depth(broker: Broker, request: Request) -> Response:
    """Show the backlog of a queue by partition: of one group, or of the one furthest behind.

    `ready` is what is neither committed nor leased. The client's later releases call the parameter
    `group`, and read conflation's fields, which here say that there is none.
    """
    queue = check_name(request.path[0], "queue")
    group = check_optional_name(request.text("consumerGroup") or request.text("group"), "group")
    rows = await broker.resources.depth(queue, group)
    if not rows and await broker.queues.find(queue) is None:
        return _unknown_queue()
    pending = sum(row.pending for row in rows)
    processing = sum(row.processing for row in rows)
    return json_response(
        {
            "queue": queue,
            "group": group,
            "pending": pending,
            "processing": processing,
            "ready": max(pending - processing, 0),
            "partitionsPending": sum(row.pending > 0 for row in rows),
            "conflation": False,
            "effectivePending": pending,
            "partitions": [
                {
                    "partition": row.partition,
                    "pending": row.pending,
                    "processing": row.processing,
                }
                for row in rows
            ],
        }
    )


async def clear(broker: Broker, request: Request) -> Response:
    """Remove all messages of a queue, or of one `partition` of it."""
    queue = check_name(request.path[0], "queue")
    partition = check_optional_name(request.text("partition"), "partition")
    if await broker.queues.find(queue) is None:
        return _unknown_queue()
    cleared = await broker.resources.clear(queue, partition)
    return json_response({"success": True, "cleared": True, "queue": queue, "count": cleared})


async def status_queues(broker: Broker, request: Request) -> Response:
    """List queues with their counts, dead letters included, a page at a time."""
    limit, offset = _page(request, MAX_LIMIT)
    queues = await broker.queues.list_all()
    letters = await broker.resources.dead_letters()
    return json_response(
        {
            "queues": [
                _status(queue, letters.get(queue.name, 0))
                for queue in queues[offset : offset + limit]
            ],
            "total": len(queues),
        }
    )


async def status_queue(broker: Broker, request: Request) -> Response:
    """Show one queue with its options, partitions and consumer groups."""
    name = check_name(request.path[0], "queue")
    found = await broker.queues.detail(name)
    if found is None:
        return _unknown_queue()
    queue, row, parts = found
    letters = await broker.resources.dead_letters(name)
    groups = await broker.groups.groups_of(name)
    status = _status(queue, letters.get(name, 0))
    return json_response(
        status
        | {
            "options": options_from_row(row),
            "partitionCount": len(parts),
            "partitions": [partition_summary(part) for part in parts],
            "totals": status["messages"],
            "consumerGroups": [group_summary(group) for group in groups],
        }
    )


def _status(queue: QueueRow, dead_letters: int) -> dict[str, Any]:
    shown = queue_summary(queue)
    shown["messages"] = {
        **shown["messages"],
        "completed": queue.total - queue.pending,
        "deadLetter": dead_letters,
    }
    return shown


def _totals(queues: Sequence[QueueRow]) -> dict[str, int]:
    return {
        "total": sum(queue.total for queue in queues),
        "pending": sum(queue.pending for queue in queues),
        "processing": sum(queue.processing for queue in queues),
    }


def _by(field: str, queues: Sequence[QueueRow]) -> list[dict[str, Any]]:
    members: dict[str, list[QueueRow]] = {}
    for queue in queues:
        name = getattr(queue, field)
        if name:
            members.setdefault(name, []).append(queue)
    return [
        {
            "name": name,
            field: name,
            "queues": len(rows),
            "partitions": sum(queue.partitions for queue in rows),
            "messages": _totals(rows),
        }
        for name, rows in sorted(members.items())
    ]


def _found(row: FoundPartition) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "queue": row.queue,
        "namespace": row.namespace,
        "task": row.task,
        "createdAt": timestamp(row.created_at),
        "lastActivity": timestamp(row.last_write_at),
        "stats": {
            "total": row.last_offset - row.log_start + 1,
            "pending": row.pending,
            "processing": row.processing,
            "lastOffset": row.last_offset,
            "logStart": row.log_start,
        },
    }


def _page(request: Request, default: int) -> tuple[int, int]:
    limit = request.integer("limit", least=0, most=MAX_LIMIT)
    offset = request.integer("offset", least=0)
    return default if limit is None else limit, offset or 0


def _unknown_queue() -> Response:
    return problem(404, "Queue not found", "queue_not_found")


ROUTES = {
    "/api/v1/resources/overview": {"GET": overview},
    "/api/v1/resources/namespaces": {"GET": namespaces},
    "/api/v1/resources/tasks": {"GET": tasks},
    "/api/v1/resources/partitions": {"GET": partitions},
    "/api/v1/resources/queues/:queue/depth": {"GET": depth},
    "/api/v1/queues/:queue/clear": {"DELETE": clear},
    "/api/v1/status/queues": {"GET": status_queues},
    "/api/v1/status/queues/:queue": {"GET": status_queue},
}
