"""What a client's streaming engine asks for: state of a query, and cycles (spec 7, "Streams")."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import msgspec
from attrs import field, frozen

from queen_trio.errors import ClientError

from .names import shorten

if TYPE_CHECKING:
    from uuid import UUID

    from .message import PushItem, PushResult

# Of the key as JSON text. It is in an index, whose entries PostgreSQL bounds at 2,704 bytes.
MAX_KEY_BYTES: Final = 2048

_encode = msgspec.json.encode
_decode_string = msgspec.json.Decoder(str).decode


class _Window(msgspec.Struct):
    windowEnd: Any = None


_decode_window = msgspec.json.Decoder(_Window).decode


@frozen(kw_only=True)
class StateQuery:
    """Which state: of the `keys`, with the `prefix`, ripe at `ripe_at`; None doesn't narrow."""

    query_id: UUID
    partition_id: UUID
    keys: list[bytes] | None = None
    prefix: bytes | None = None
    ripe_at: float | None = None


@frozen
class StateChange:
    """A new value for a key, verbatim JSON; None deletes it."""

    value: str | None = None
    ripe_at: float | None = None


@frozen
class SourceCommit:
    """The messages of a lease that a cycle has worked on.

    `count` None commits the whole leased batch; a number advances the cursor by so many and keeps
    the lease.
    """

    lease_id: str
    transaction_id: str
    count: int | None = None


@frozen(kw_only=True)
class Cycle:
    """What a query has made of some messages of one partition: commit all of it or nothing."""

    query_id: UUID
    partition_id: UUID
    group: str
    changes: dict[bytes, StateChange] = field(factory=dict)
    pushes: list[PushItem] = field(factory=list)
    commit: SourceCommit | None = None
    producer_sub: str | None = None


@frozen
class CycleOutcome:
    """The results of the pushes in their order; after a refusal there are none."""

    pushes: list[PushResult] = field(factory=list)
    lease_released: bool = False
    refusal: str | None = None


def state_key(raw: bytes, where: str) -> bytes:
    """Return a key, any JSON value, in the form that it is stored in: one form for each string.

    Raises `ClientError` naming `where`.
    """
    key = _encode(_decode_string(raw)) if raw.startswith(b'"') else raw
    if len(key) > MAX_KEY_BYTES:
        text = shorten(key.decode())
        raise ClientError(f"{where} is longer than {MAX_KEY_BYTES} bytes: {text}")
    return key


def key_prefix(prefix: str) -> bytes:
    """Return what the stored form of every string that starts with `prefix` starts with."""
    return _encode(prefix)[:-1]


def ripe_at(value: bytes) -> float | None:
    """Return the number in a value's `windowEnd`; None for a value that is something else."""
    try:
        end = _decode_window(value).windowEnd
        if isinstance(end, bool) or not isinstance(end, int | float):
            return None
        return float(end) if isfinite(end) else None
    except (msgspec.DecodeError, OverflowError):
        return None
