"""Parameters that several resources share: UUIDs, moments, pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from uuid import UUID

from queen_trio.errors import ClientError
from queen_trio.model.inspection import Page
from queen_trio.model.names import MAX_TRANSACTION_ID_BYTES, check_name, shorten

from .codec import parse_timestamp
from .message import INT32_MAX

if TYPE_CHECKING:
    from datetime import datetime

    from .message import Request

# An answer is bounded in bytes as well; this bounds what the database sorts for it.
MAX_LIMIT: Final = 10_000


def uuid(text: str, field: str) -> UUID:
    """Read a UUID; raises `ClientError` naming `field`."""
    try:
        return UUID(text)
    except ValueError:
        raise ClientError(f"{field}={shorten(text)!r} is not a UUID") from None


def message_address(path: tuple[str, ...]) -> tuple[UUID, str]:
    """Read the (partitionId, transactionId) of a path."""
    partition_id, transaction_id = path
    return (
        uuid(partition_id, "partitionId"),
        check_name(transaction_id, "transactionId", MAX_TRANSACTION_ID_BYTES),
    )


def moment(request: Request, name: str) -> datetime | None:
    """Read an ISO-8601 parameter; None when it is absent or empty."""
    text = request.text(name)
    return None if text is None else parse_timestamp(text, name)


def page(request: Request, *, limit: int, max_offset: int = INT32_MAX) -> Page:
    """Read `limit` (with its default) and `offset`."""
    asked = request.integer("limit", least=0, most=MAX_LIMIT)
    return Page(
        limit=limit if asked is None else asked,
        offset=request.integer("offset", least=0, most=max_offset) or 0,
    )
