"""POST /api/v1/ack, /api/v1/ack/batch and /api/v1/lease/:leaseId/extend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec

from queen_trio.errors import ClientError
from queen_trio.model.ack import Ack, AckStatus, ack_status
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

    The items of a batch differ in little but their transactionId, so the rest is read once.
    """
    acks: list[Ack] = []
    known: dict[tuple[str, str | None, str | None, str | None], _Common] = {}
    for index, item in enumerate(items):
        key = (item.partition_id, item.status, item.consumer_group, item.lease_id)
        try:
            common = known.get(key)
            if common is None:
                common = known[key] = _common(
                    item.partition_id, item.consumer_group or group, item.status, item.lease_id
                )
            acks.append(Ack(_no_nul(item.transaction_id, "transactionId"), *common, item.error))
        except ClientError as error:
            raise ClientError(f"{where.format(index)}{error}") from None
    return acks


def ack_from_wire(
    transaction_id: str,
    partition_id: str,
    status: str | None,
    group: str | None,
    lease_id: str | None,
    error: str | None,
) -> Ack:
    """Make an Ack of what a body said; raises `ClientError` naming the field."""
    common = _common(partition_id, group, status, lease_id)
    return Ack(_no_nul(transaction_id, "transactionId"), *common, error)


_Common = tuple[UUID | None, str, AckStatus, str | None]
"""What an Ack says between its transactionId and its error."""


def _common(
    partition_id: str, group: str | None, status: str | None, lease_id: str | None
) -> _Common:
    return (
        _uuid(partition_id),
        check_name(group or QUEUE_MODE_GROUP, "consumerGroup"),
        ack_status(status),
        lease_id and _no_nul(lease_id, "leaseId"),
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
