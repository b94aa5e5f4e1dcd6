"""Limits on names: queues, partitions, consumer groups, namespaces, tasks, transactionIds."""

from __future__ import annotations

from typing import Final

from queen_trio.errors import ClientError

# Up to four names stand together in one index entry, which PostgreSQL bounds at 2,704 bytes.
MAX_NAME_BYTES: Final = 512
# Only its hash is indexed, but it is part of a URL in /api/v1/messages/:partitionId/:transactionId.
MAX_TRANSACTION_ID_BYTES: Final = 2048

QUEUE_MODE_GROUP: Final = "__QUEUE_MODE__"
DEFAULT_PARTITION: Final = "Default"


def check_name(value: str, field: str, limit: int = MAX_NAME_BYTES) -> str:
    """Return `value` if PostgreSQL can hold it as a name, else raise ClientError naming `field`."""
    if not value:
        raise ClientError(f"{field} must not be empty")
    # A character is at most 4 bytes: most names need no encoding to be known short enough.
    if len(value) * 4 > limit and len(value.encode(errors="surrogatepass")) > limit:
        raise ClientError(f"{field} is longer than {limit} bytes: {shorten(value)!r}")
    if "\0" in value:
        raise ClientError(f"{field} must not contain U+0000: {shorten(value)!r}")
    return value


def check_optional_name(value: str | None, field: str) -> str | None:
    """The same for a name that may be absent."""
    return None if value is None else check_name(value, field)


def shorten(value: str, limit: int = 80) -> str:
    """Cut a value for an error message."""
    return value if len(value) <= limit else value[:limit] + "…"
