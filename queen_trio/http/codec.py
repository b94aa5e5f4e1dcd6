"""JSON in and out: strict decoding with errors that name the field, encoding at C speed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec

from queen_trio.errors import ClientError
from queen_trio.model.names import shorten

from .message import Response

T = TypeVar("T")

encode: Final = msgspec.json.encode


def decode_untrusted(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a request body; raises `ClientError` naming the field and what is wrong with it.

    The whole body must be UTF-8: payloads are stored as raw slices of it, and broken bytes would
    come out in every later pop (spec 8.10). Lone surrogates and raw control characters are refused
    by the decoder.
    """
    if not body:
        raise ClientError("the request needs a JSON body")
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise ClientError(f"the body is not valid UTF-8 at byte {error.start}") from None
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ClientError(_describe(str(error))) from None
    except msgspec.DecodeError as error:
        raise ClientError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ClientError("the body is nested too deeply") from None


def _describe(message: str) -> str:
    """Put the path first: "items[3].queue: expected `str`, got `int`"."""
    what, _, where = message.rpartition(" - at `$")
    if not what:
        return message
    where = where.rstrip("`").lstrip(".")
    return f"{where}: {what[0].lower()}{what[1:]}" if where else what


def json_response(value: Any, status: int = 200) -> Response:
    """Answer with `value` as JSON."""
    return Response(status, encode(value))


def timestamp(moment: datetime | None) -> str | None:
    """ISO-8601 in UTC with microseconds: sorts as text, and JavaScript's Date reads it."""
    if moment is None:
        return None
    # Not strftime: its years before 1000 have fewer than four digits.
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def parse_timestamp(text: str, field: str) -> datetime:
    """Read ISO-8601, UTC where it names no offset; raises `ClientError` naming `field`."""
    try:
        # A "+" that nobody quoted arrives as a space.
        moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ClientError(f"{field}={shorten(text)!r} is not an ISO-8601 timestamp") from None
