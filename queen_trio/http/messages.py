"""/api/v1/messages: look at messages, and at what became of one; its dead letter by its address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from queen_trio.errors import ClientError
from queen_trio.model.inspection import Filing, MessageFilter, MessageStatus
from queen_trio.model.names import QUEUE_MODE_GROUP, check_name, check_optional_name

from .codec import decode_untrusted, encode, json_response, timestamp
from .dlq import letter_data, replayed
from .message import Response
from .parameters import message_address, moment, page
from .problems import problem

if TYPE_CHECKING:
    from uuid import UUID

    from queen_trio.broker import Broker
    from queen_trio.broker.messages import ListedMessage, MessageDetail
    from queen_trio.store.dlq import DeadLetterRow
    from queen_trio.store.messages import MessageGroupRow

    from .message import Request

DEFAULT_LIMIT: Final = 200
# The database skips them one by one, in each partition: a narrower window is the better way.
MAX_OFFSET: Final = 100_000
# An error message is read by people.
MAX_ERROR_BYTES: Final = 64 * 1024


class _ActionBody(msgspec.Struct, rename="camel"):
    consumer_group: str | None = None
    error: str | None = None


_action = msgspec.json.Decoder(_ActionBody)


async def list_messages(broker: Broker, request: Request) -> Response:
    """List messages, newest first, of the last hour unless `from` says otherwise."""
    which = MessageFilter(
        queue=check_optional_name(request.text("queue"), "queue"),
        partition=check_optional_name(request.text("partition"), "partition"),
        namespace=check_optional_name(request.text("namespace"), "namespace"),
        task=check_optional_name(request.text("task"), "task"),
        group=_group(request.text("consumerGroup")),
        status=_status(request),
        since=moment(request, "from"),
        until=moment(request, "to"),
    )
    window = page(request, limit=DEFAULT_LIMIT, max_offset=MAX_OFFSET)
    listed = await broker.messages.read_page(which, window)
    return json_response(
        {
            "messages": [_listed(message) for message in listed],
            "consumerGroup": which.group,
            "limit": window.limit,
            "offset": window.offset,
        }
    )


async def show_message(broker: Broker, request: Request) -> Response:
    """Show one message and what each group has done with it."""
    partition_id, transaction_id = message_address(request.path)
    group = _group(request.text("consumerGroup"))
    found = await broker.messages.detail(partition_id, transaction_id, group)
    if found is None:
        return _not_found("message", partition_id, transaction_id)
    return Response(200, _detail(found, partition_id))


async def retry_message(broker: Broker, request: Request) -> Response:
    """Move the newest dead letter of a message, or that of the named group, back."""
    broker.maintenance.check_writable()
    partition_id, transaction_id = message_address(request.path)
    group = check_optional_name(_body(request).consumer_group, "consumerGroup")
    moved = await broker.dead_letters.retry(partition_id, transaction_id, group)
    if moved is None:
        return _not_found("dead letter", partition_id, transaction_id)
    return replayed(moved)


async def file_message(broker: Broker, request: Request) -> Response:
    """Dead-letter a message by hand for a group that has it next or behind it."""
    partition_id, transaction_id = message_address(request.path)
    body = _body(request)
    group = _group(body.consumer_group)
    error = check_name(body.error, "error", MAX_ERROR_BYTES) if body.error else None
    match await broker.dead_letters.file(partition_id, transaction_id, group, error):
        case Filing.FILED:
            return json_response(
                {
                    "success": True,
                    "status": MessageStatus.DEAD_LETTER,
                    "partitionId": partition_id,
                    "transactionId": transaction_id,
                    "consumerGroup": group,
                }
            )
        case Filing.LEASED:
            return problem(
                409,
                f"consumerGroup {group!r} holds a lease on this message: let it ack with dlq",
                "message_leased",
            )
        case Filing.BEHIND:
            return problem(
                409,
                f"consumerGroup {group!r} has messages before this one to work on first",
                "message_not_next",
            )
        case Filing.NO_CURSOR:
            return problem(
                404,
                f"consumerGroup {group!r} has never popped from this partition",
                "consumer_not_found",
            )
        case Filing.MISSING:
            return _not_found("message", partition_id, transaction_id)


async def delete_message(broker: Broker, request: Request) -> Response:
    """Delete a message's dead letters, or that of the named group; the log only ever expires."""
    partition_id, transaction_id = message_address(request.path)
    group = check_optional_name(request.text("consumerGroup"), "consumerGroup")
    count = await broker.dead_letters.delete(partition_id, transaction_id, group)
    if not count:
        return _not_found("dead letter", partition_id, transaction_id)
    return json_response({"deleted": True, "deadLetters": count})


def _body(request: Request) -> _ActionBody:
    """The body, or none: the client drops an empty one. The query may name the group too."""
    body = decode_untrusted(_action, request.body) if request.body else _ActionBody()
    body.consumer_group = body.consumer_group or request.text("consumerGroup")
    return body


def _group(name: str | None) -> str:
    return check_name(name or QUEUE_MODE_GROUP, "consumerGroup")


def _status(request: Request) -> MessageStatus | None:
    word = request.text("status")
    if word is None:
        return None
    try:
        return MessageStatus(word)
    except ValueError:
        words = ", ".join(status.value for status in MessageStatus)
        raise ClientError(f"status={word!r} is none of {words}") from None


def _not_found(what: str, partition_id: UUID, transaction_id: str) -> Response:
    return problem(
        404,
        f"no {what} of transactionId {transaction_id!r} in partition {partition_id}",
        f"{what.replace(' ', '_')}_not_found",
    )


def _listed(message: ListedMessage) -> msgspec.Raw:
    """Put what the log doesn't say of a message behind what it does; nothing is parsed."""
    return _extended(
        message.record,
        {
            "queue": message.queue,
            "partition": message.partition,
            "partitionId": message.partition_id,
            "offset": message.offset,
            "createdAt": timestamp(message.created_at),
            "status": message.status,
        },
    )


def _detail(found: MessageDetail, partition_id: UUID) -> bytes:
    record = found.record
    if record is None:
        assert found.letter is not None  # noqa: S101 - one of the two is there
        record = _record_of(found.letter)
    return bytes(
        _extended(
            record,
            {
                "queue": found.queue,
                "partition": found.partition,
                "partitionId": partition_id,
                "offset": found.offset,
                "createdAt": timestamp(found.created_at),
                "status": found.status,
                "consumerGroups": [_consumer_group(row) for row in found.groups],
            },
        )
    )


def _record_of(letter: DeadLetterRow) -> bytes:
    """A dead letter in the form that its message had in the log."""
    return encode(
        {
            "id": letter.message_id,
            "transactionId": letter.transaction_id,
            "traceId": letter.trace_id,
            **letter_data(letter),
            "producerSub": letter.producer_sub,
        }
    )


def _extended(record: bytes, more: dict[str, Any]) -> msgspec.Raw:
    """Join two objects, the first as bytes and not empty, into one."""
    return msgspec.Raw(record[:-1] + b"," + encode(more)[1:])


def _consumer_group(row: MessageGroupRow) -> dict[str, Any]:
    return {
        "name": row.consumer_group,
        "group": row.consumer_group,
        "status": row.status,
        "consumed": row.consumed,
        "leaseExpiresAt": timestamp(row.lease_expires_at),
        "errorMessage": row.error,
        "retryCount": row.retry_count,
        "failedAt": timestamp(row.failed_at),
    }


ROUTES = {
    "/api/v1/messages": {"GET": list_messages},
    "/api/v1/messages/:partitionId/:transactionId": {
        "GET": show_message,
        "DELETE": delete_message,
    },
    "/api/v1/messages/:partitionId/:transactionId/retry": {"POST": retry_message},
    "/api/v1/messages/:partitionId/:transactionId/dlq": {"POST": file_message},
}
