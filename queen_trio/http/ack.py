"""POST /api/v1/ack, /api/v1/ack/batch and /api/v1/lease/:leaseId/extend."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec

from queen_trio.errors import ClientError
from queen_trio.model.ack import Ack, ack_status
from queen_trio.model.names import QUEUE_MODE_GROUP, check_name

from .codec import decode_untrusted, json_response, timestamp
from .message import INT32_MAX

if TYPE_CHECKING:
    from queen_trio.broker import Broker

    from .message import Request, Response

DEFAULT_EXTEND_SECONDS: Final = 60


class _AckBody(msgspec.Struct, rename="camel"):
    transaction_id: str
    partition_id: str
    status: str | None = None
    consumer_group: str | None = None
    lease_id: str | None = None
    error: str | None = None


class _BatchBody(msgspec.Struct, rename="camel"):
    acknowledgments: list[_AckBody]
    consumer_group: str | None = None


class _ExtendBody(msgspec.Struct):
    seconds: int = DEFAULT_EXTEND_SECONDS


_single = msgspec.json.Decoder(_AckBody)
_batch = msgspec.json.Decoder(_BatchBody)
_extend = msgspec.json.Decoder(_ExtendBody)


async def ack(broker: Broker, request: Request) -> Response:
    """Acknowledge one message; the answer is an array of one, as the client reads it."""
    body = decode_untrusted(_single, request.body)
    return json_response(await broker.acks.ack(_acks([body], None, "")))


async def ack_batch(broker: Broker, request: Request) -> Response:
    """Acknowledge many messages; one result for each, in order."""
    body = decode_untrusted(_batch, request.body)
    acks = _acks(body.acknowledgments, body.consumer_group, "acknowledgments[{}].")
    return json_response(await broker.acks.ack(acks))


async def extend(broker: Broker, request: Request) -> Response:
    """Extend a lease; without a usable body by a minute (the client sends none)."""
    (lease_id,) = request.path
    try:
        seconds = decode_untrusted(_extend, request.body).seconds
    except ClientError:
        seconds = DEFAULT_EXTEND_SECONDS
    if not 0 < seconds <= INT32_MAX:
        seconds = DEFAULT_EXTEND_SECONDS
    renewed, expiry = await broker.acks.extend(_no_nul(lease_id, "leaseId"), seconds)
    expires_at = timestamp(expiry)
    return json_response(
        {
            "leaseId": lease_id,
            "success": renewed > 0,
            "renewed": renewed,
            "newExpiresAt": expires_at,
            "expiresAt": expires_at,
            "lease_expires_at": expires_at,
        }
    )


def _acks(items: list[_AckBody], group: str | None, where: str) -> list[Ack]:
    """Make the acks of one request; `where` names the item at an index in an error.

    The items of a batch differ in little but their transactionId: the rest is read once a run.
    """
    acks: list[Ack] = []
    index = 0
    for (partition_id, status, own_group, lease_id, error), run in groupby(items, _what_is_said):
        ids = [item.transaction_id for item in run]
        try:
            acks.append(
                ack_from_wire(ids, partition_id, status, own_group or group, lease_id, error)
            )
        except ClientError as refusal:
            wrong = next((n for n, name in enumerate(ids) if "\0" in name), 0)
            raise ClientError(f"{where.format(index + wrong)}{refusal}") from None
        index += len(ids)
    return acks


_what_is_said = attrgetter("partition_id", "status", "consumer_group", "lease_id", "error")


def ack_from_wire(
    transaction_ids: list[str],
    partition_id: str,
    status: str | None,
    group: str | None,
    lease_id: str | None,
    error: str | None,
) -> Ack:
    """Make an Ack of what a body said; raises `ClientError` naming the field."""
    if "\0" in "".join(transaction_ids):
        raise ClientError("transactionId must not contain U+0000")
    return Ack(
        transaction_ids,
        _uuid(partition_id),
        check_name(group or QUEUE_MODE_GROUP, "consumerGroup"),
        ack_status(status),
        lease_id and _no_nul(lease_id, "leaseId"),
        error,
    )


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _no_nul(text: str, field: str) -> str:
    if "\0" in text:
        raise ClientError(f"{field} must not contain U+0000")
    return text


ROUTES = {
    "/api/v1/ack": {"POST": ack},
    "/api/v1/ack/batch": {"POST": ack_batch},
    "/api/v1/lease/:leaseId/extend": {"POST": extend},
}
