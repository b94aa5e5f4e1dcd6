"""A message on its way in: what a push says of it, and what the answer says back.

These are msgspec structs and not attrs classes: requests decode straight into them, with the
payload kept as the client's own bytes (spec 1, "Segment format").
"""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b
from typing import Final
from uuid import UUID

import msgspec

from queen_trio.errors import ClientError

from .names import DEFAULT_PARTITION, MAX_TRANSACTION_ID_BYTES, check_name


class PushStatus(Enum):
    """What became of one pushed item (spec 2)."""

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    BUFFERED = "buffered"
    FAILED = "failed"


class PushItem(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """One item of a push; `payload` is a slice of the request, empty when the key was missing."""

    queue: str
    payload: msgspec.Raw = msgspec.Raw(b"")
    partition: str | None = None
    transaction_id: str | None = None
    trace_id: str | None = None


class PushResult(msgspec.Struct, gc=False, omit_defaults=True):
    """The answer to one item; its field names are those of the wire."""

    index: int
    message_id: str
    transaction_id: str
    queueName: str
    status: PushStatus
    error: str | None = None


def partition_of(item: PushItem) -> str:
    """The partition that an item goes to."""
    return DEFAULT_PARTITION if item.partition is None else item.partition


def check_item(item: PushItem, index: int) -> None:
    """Raise a ClientError that names the item and the field that is missing or can't be stored."""
    try:
        check_name(item.queue, "queue")
        if item.partition is not None:
            check_name(item.partition, "partition")
        if item.transaction_id is not None:
            check_name(item.transaction_id, "transactionId", MAX_TRANSACTION_ID_BYTES)
    except ClientError as error:
        raise ClientError(f"items[{index}].{error}") from None
    if not len(item.payload):  # an absent key; null has a length of four
        raise ClientError(f"items[{index}]: object missing required field `payload`")


def hash_of(transaction_id: str) -> bytes:
    """BLAKE2b-128 of the UTF-8 transactionId: how dedup and acks know a message (spec 8.7)."""
    digest = _EMPTY.copy()
    digest.update(transaction_id.encode())
    return digest.digest()


# Copying it takes two thirds of the time that reading the parameters again does.
_EMPTY: Final = blake2b(digest_size=16)


def valid_trace_id(value: str | None) -> str | None:
    """Return a traceId that is a valid UUID, else None: others are ignored (spec 2)."""
    if value is None:
        return None
    try:
        return str(UUID(value))
    except ValueError:
        return None
