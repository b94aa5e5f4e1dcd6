"""/api/v1/dlq: list dead letters, move one back, purge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from queen_trio.errors import ClientError
from queen_trio.model.inspection import DeadLetterFilter
from queen_trio.model.names import check_optional_name

from .codec import json_response, timestamp
from .parameters import moment, page, uuid
from .problems import problem

if TYPE_CHECKING:
    from queen_trio.broker import Broker
    from queen_trio.model.inspection import Replay
    from queen_trio.store.dlq import DeadLetterRow

    from .message import Request, Response

DEFAULT_LIMIT: Final = 100


async def list_dead_letters(broker: Broker, request: Request) -> Response:
    """List dead letters, newest first; `total` counts all that match."""
    window = page(request, limit=DEFAULT_LIMIT)
    rows, total = await broker.dead_letters.read_page(_filter(request), window)
    return json_response(
        {
            "messages": [_dead_letter(row) for row in rows],
            "total": total,
            "limit": window.limit,
            "offset": window.offset,
        }
    )


async def replay(broker: Broker, request: Request) -> Response:
    """Move one dead letter back into its queue."""
    broker.maintenance.check_writable()
    (row_id,) = request.path
    moved = await broker.dead_letters.replay(uuid(row_id, "id"))
    if moved is None:
        return problem(404, f"no dead letter has the id {row_id}", "dead_letter_not_found")
    return replayed(moved)


async def purge(broker: Broker, request: Request) -> Response:
    """Delete the dead letters of a queue, or those of them that match."""
    which = _filter(request)
    if which.queue is None:
        raise ClientError("deleting dead letters needs queue")
    return json_response({"queue": which.queue, "deleted": await broker.dead_letters.purge(which)})


def replayed(moved: Replay) -> Response:
    """Answer with the message that a dead letter has become; `status` is moved or duplicate."""
    return json_response(
        {
            "success": True,
            "status": moved.verdict,
            "queue": moved.queue,
            "partition": moved.partition,
            "partitionId": moved.partition_id,
            "offset": moved.offset,
            "messageId": moved.message_id,
            "transactionId": moved.transaction_id,
        }
    )


def letter_data(row: DeadLetterRow) -> dict[str, Any]:
    """The payload, verbatim; `decryptionError` is there only where it can't be shown."""
    data: dict[str, Any] = {"data": msgspec.Raw(row.payload.encode())}
    return (
        data if row.decryption_error is None else data | {"decryptionError": row.decryption_error}
    )


def _filter(request: Request) -> DeadLetterFilter:
    return DeadLetterFilter(
        queue=check_optional_name(request.text("queue"), "queue"),
        group=check_optional_name(request.text("consumerGroup"), "consumerGroup"),
        partition=check_optional_name(request.text("partition"), "partition"),
        since=moment(request, "from"),
        until=moment(request, "to"),
    )


def _dead_letter(row: DeadLetterRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "queue": row.queue_name,
        "partition": row.partition_name,
        "partitionId": row.partition_id,
        "consumerGroup": row.consumer_group,
        "offset": row.offset,
        "messageId": row.message_id,
        "transactionId": row.transaction_id,
        "traceId": row.trace_id,
        "producerSub": row.producer_sub,
        **letter_data(row),
        "errorMessage": row.error,
        "retryCount": row.retry_count,
        "createdAt": timestamp(row.created_at),
        "failedAt": timestamp(row.failed_at),
    }


ROUTES = {
    "/api/v1/dlq": {"GET": list_dead_letters, "DELETE": purge},
    "/api/v1/dlq/:id/replay": {"POST": replay},
}
