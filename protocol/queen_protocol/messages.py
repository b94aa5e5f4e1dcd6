"""Messages: what a frame says, one frozen class per type, and their JSON.

Theory of operation
===================

A message checks itself when it is made. Made by us from something the wire can't carry, it raises
LocalProtocolError; made from a peer's payload, the same check is reported as PayloadError. So the
rules of a field are written once, and whatever can be decoded can be encoded again.

The JSON is a stranger's. Python's parser is exact but trusting, so it is kept from the inputs that
make it slow, deep or dependent on the interpreter's settings:

- bytes are decoded as strict UTF-8 first (`json.loads` would guess UTF-16 and UTF-32);
- nesting is measured before parsing, without recursion, and bounded by MAX_DEPTH;
- numbers are not converted (no field of the wire is one), so a literal of a million digits costs
  nothing and hits no limit; NaN and Infinity are refused, because they aren't JSON;
- of two fields with one name the last counts (what `json` does, and most others);
- strings that no queue, group or server can be named are refused: lone surrogates, which aren't
  UTF-8, and NUL, which PostgreSQL can't store, would otherwise fail in a statement far from here.

An optional field that is null is absent. An unknown field is ignored whatever it holds, as long as
the payload as a whole is JSON.
"""

from __future__ import annotations

import json
import re
from enum import IntEnum, unique
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import attrs

from queen_protocol.errors import LocalProtocolError, PayloadError, Reason
from queen_protocol.frames import (
    MAX_HELLO_BYTES,
    PREFIX_BYTES,
    Frame,
    encode_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NAME_CHARS: Final = 4096
"""Longest name (queue, partition, tenant, group, server), in characters; above what a PostgreSQL
index takes (2704 bytes, compressed), so that no name in use is ever refused."""

MAX_NONCE_CHARS: Final = 256
"""Longest nonce and MAC, in characters: the listener remembers nonces (spec 3, "Handshake")."""

MAX_DEPTH: Final = 32
"""Deepest nesting of objects and arrays in a payload; today's frames need 3."""


@unique
class FrameType(IntEnum):
    """The types of spec 3; a frame of any other type is skipped."""

    MESSAGE_AVAILABLE = 1
    MESSAGE_AVAILABLE_BATCH = 2
    HEARTBEAT = 3
    HELLO = 4
    HOTLIST_DIRTY_BATCH = 5
    QUEUE_CONFIG_SET = 10
    QUEUE_CONFIG_DELETE = 11
    MAINTENANCE_MODE_SET = 40
    POP_MAINTENANCE_MODE_SET = 41


# -- fields ----------------------------------------------------------------------------------------

_HEX: Final = re.compile(r"[0-9a-fA-F]+")


def _check_text(field: str, value: object, limit: int) -> None:
    if not isinstance(value, str):
        raise LocalProtocolError(f"{field} must be a string, not {type(value).__name__}")
    if len(value) > limit:
        raise LocalProtocolError(f"{field} has {len(value)} characters, more than {limit}")
    if "\0" in value:
        raise LocalProtocolError(f"{field} contains a NUL character")
    if not value.isascii() and not _encodes(value):
        raise LocalProtocolError(f"{field} contains a lone surrogate")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    _check_text(attribute.name, value, MAX_NAME_CHARS)


def _optional_name(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        _check_text(attribute.name, value, MAX_NAME_CHARS)


def _mac(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    _check_text(attribute.name, value, MAX_NONCE_CHARS)


def _nonce(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    _check_text(attribute.name, value, MAX_NONCE_CHARS)
    if not _HEX.fullmatch(value):
        raise LocalProtocolError(f"{attribute.name} must be hex digits")


def _flag(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise LocalProtocolError(
            f"{attribute.name} must be true or false, not {type(value).__name__}"
        )


def _tuple_of(cls: type[object]) -> Callable[[object, object, object], None]:
    def check(_: object, __: object, items: object) -> None:
        if not isinstance(items, tuple) or not all(isinstance(item, cls) for item in items):
            raise LocalProtocolError(f"items must be a tuple of {cls.__name__}")

    return check


# -- messages --------------------------------------------------------------------------------------
# The order of the fields is the order on the wire. A tenant of None means every tenant that has
# such a queue.


@attrs.frozen
class MessageAvailable:
    """Something was pushed: wake the parked pops of that queue."""

    queue: str = attrs.field(validator=_name)
    partition: str = attrs.field(validator=_name)
    tenant: str | None = attrs.field(default=None, validator=_optional_name)


@attrs.frozen
class MessageAvailableBatch:
    """Many MessageAvailable in one frame."""

    items: tuple[MessageAvailable, ...] = attrs.field(validator=_tuple_of(MessageAvailable))


@attrs.frozen
class Heartbeat:
    """The peer is alive; no payload."""


@attrs.frozen
class Hello:
    """The dialer's first frame: who it is, and proof that it knows the secret (handshake.py)."""

    server_id: str = attrs.field(validator=_name)
    nonce: str = attrs.field(validator=_nonce)
    mac: str = attrs.field(validator=_mac)


@attrs.frozen
class HotlistMark:
    """A partition that may have something to pop: for one group if given, else for every group."""

    queue: str = attrs.field(validator=_name)
    partition: str = attrs.field(validator=_name)
    tenant: str | None = attrs.field(default=None, validator=_optional_name)
    group: str | None = attrs.field(default=None, validator=_optional_name)


@attrs.frozen
class HotlistDirtyBatch:
    """Mark these candidates pending."""

    items: tuple[HotlistMark, ...] = attrs.field(validator=_tuple_of(HotlistMark))


@attrs.frozen
class QueueConfigSet:
    """Forget the cached configuration of that queue."""

    queue: str = attrs.field(validator=_name)
    tenant: str | None = attrs.field(default=None, validator=_optional_name)


@attrs.frozen
class QueueConfigDelete:
    """Forget the configuration of that queue and drop its rings."""

    queue: str = attrs.field(validator=_name)
    tenant: str | None = attrs.field(default=None, validator=_optional_name)


@attrs.frozen
class MaintenanceModeSet:
    """Push maintenance was switched."""

    enabled: bool = attrs.field(validator=_flag)


@attrs.frozen
class PopMaintenanceModeSet:
    """Pop maintenance was switched."""

    enabled: bool = attrs.field(validator=_flag)


@attrs.frozen
class UnknownFrame:
    """A frame of a type that this version doesn't know: no effect, but a sign of life."""

    type: int


Message: TypeAlias = (
    MessageAvailable
    | MessageAvailableBatch
    | Heartbeat
    | Hello
    | HotlistDirtyBatch
    | QueueConfigSet
    | QueueConfigDelete
    | MaintenanceModeSet
    | PopMaintenanceModeSet
)

_CLASSES: Final[dict[int, type[Any]]] = {
    FrameType.MESSAGE_AVAILABLE: MessageAvailable,
    FrameType.MESSAGE_AVAILABLE_BATCH: MessageAvailableBatch,
    FrameType.HEARTBEAT: Heartbeat,
    FrameType.HELLO: Hello,
    FrameType.HOTLIST_DIRTY_BATCH: HotlistDirtyBatch,
    FrameType.QUEUE_CONFIG_SET: QueueConfigSet,
    FrameType.QUEUE_CONFIG_DELETE: QueueConfigDelete,
    FrameType.MAINTENANCE_MODE_SET: MaintenanceModeSet,
    FrameType.POP_MAINTENANCE_MODE_SET: PopMaintenanceModeSet,
}
_TYPES: Final = {cls: FrameType(type_byte) for type_byte, cls in _CLASSES.items()}
_ITEMS: Final[dict[type[Any], type[Any]]] = {
    MessageAvailableBatch: MessageAvailable,
    HotlistDirtyBatch: HotlistMark,
}


def frame_type(message: Message) -> FrameType:
    """Return the type of the frame that carries this message."""
    return _TYPES[type(message)]


# -- encoding --------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Return the bytes of the message's frame, in the canonical form of mesh.md.

    LocalProtocolError if no peer would accept it: a frame over MAX_FRAME_BYTES (a batch to split),
    or a HELLO over MAX_HELLO_BYTES.
    """
    if isinstance(message, Heartbeat):
        payload = b""
    else:
        fields = attrs.asdict(message, filter=lambda _, value: value is not None)
        payload = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    data = encode_frame(Frame(frame_type(message), payload))
    if isinstance(message, Hello) and len(data) > PREFIX_BYTES + MAX_HELLO_BYTES:
        raise LocalProtocolError(f"HELLO is larger than {MAX_HELLO_BYTES} bytes")
    return data


# -- decoding --------------------------------------------------------------------------------------


def decode_untrusted(frame: Frame) -> Message | UnknownFrame:
    """Return what the frame says; PayloadError if its payload doesn't fit its type.

    A HEARTBEAT may carry anything, and so may a type that we don't know.
    """
    cls = _CLASSES.get(frame.type)
    if cls is None:
        return UnknownFrame(frame.type)
    if cls is Heartbeat:
        return Heartbeat()
    document = _parse_untrusted(frame.payload)
    if (item_class := _ITEMS.get(cls)) is None:
        message: Message = _build_untrusted(cls, document)
        return message
    items = document.get("items")
    if not isinstance(items, list):
        raise PayloadError(Reason.BAD_FIELD, "items must be an array")
    batch: Message = cls(tuple(_build_untrusted(item_class, item) for item in items))
    return batch


def _build_untrusted(cls: type[Any], document: object) -> Any:
    if not isinstance(document, dict):
        raise PayloadError(Reason.BAD_FIELD, "items must be objects")
    fields = {}
    for field in attrs.fields(cls):
        value = document.get(field.name)
        if value is not None:
            fields[field.name] = value
        elif field.default is attrs.NOTHING:
            raise PayloadError(Reason.BAD_FIELD, f"{field.name} is missing")
    try:
        return cls(**fields)
    except LocalProtocolError as error:
        raise PayloadError(Reason.BAD_FIELD, str(error)) from None


def _refuse_constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} isn't JSON")


def _skip_number(_: str) -> int:
    return 0


_JSON: Final = json.JSONDecoder(
    parse_int=_skip_number, parse_float=_skip_number, parse_constant=_refuse_constant
)


def _parse_untrusted(payload: bytes) -> dict[str, Any]:
    if _too_deep(payload):
        raise PayloadError(Reason.BAD_JSON, f"nested deeper than {MAX_DEPTH}, or unbalanced")
    try:
        document = _JSON.decode(payload.decode())
    except ValueError as error:  # of which UnicodeDecodeError and JSONDecodeError are kinds
        raise PayloadError(Reason.BAD_JSON, str(error)) from None
    if not isinstance(document, dict):
        raise PayloadError(Reason.BAD_JSON, "the payload isn't an object")
    return document


# A string, closed or not: with the end optional each byte is looked at once, whatever the input.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_ARRAYS_AS_OBJECTS: Final = bytes.maketrans(b"[]", b"{}")
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_BOMB: Final = b"{" * (MAX_DEPTH + 1)  # needs no peeling, which is slow on the largest frames


def _too_deep(payload: bytes) -> bool:
    # Keep only the brackets, then peel off the innermost pairs layer by layer. What isn't JSON
    # may pass or not; the parser has the last word.
    if payload.count(b"{") + payload.count(b"[") <= MAX_DEPTH:
        return False
    brackets = _STRING.sub(b"", payload).translate(_ARRAYS_AS_OBJECTS, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets or _BOMB in brackets:
            break
        brackets = brackets.replace(b"{}", b"")
    return bool(brackets)
