"""Golden vectors and the few builders that all protocol tests share."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import queen_protocol as wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SECRET = b"s3cret"
NONCE = "00112233445566778899aabbccddeeff"

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors"

CLASSES = {
    "MESSAGE_AVAILABLE": wire.MessageAvailable,
    "MESSAGE_AVAILABLE_BATCH": wire.MessageAvailableBatch,
    "HEARTBEAT": wire.Heartbeat,
    "HELLO": wire.Hello,
    "HOTLIST_DIRTY_BATCH": wire.HotlistDirtyBatch,
    "QUEUE_CONFIG_SET": wire.QueueConfigSet,
    "QUEUE_CONFIG_DELETE": wire.QueueConfigDelete,
    "MAINTENANCE_MODE_SET": wire.MaintenanceModeSet,
    "POP_MAINTENANCE_MODE_SET": wire.PopMaintenanceModeSet,
    "UNKNOWN": wire.UnknownFrame,
}

ONE_OF_EACH: dict[wire.FrameType, Any] = {
    wire.FrameType.MESSAGE_AVAILABLE: wire.MessageAvailable("q", "p"),
    wire.FrameType.MESSAGE_AVAILABLE_BATCH: wire.MessageAvailableBatch(
        (wire.MessageAvailable("q", "p", "t"),)
    ),
    wire.FrameType.HEARTBEAT: wire.Heartbeat(),
    wire.FrameType.HELLO: wire.Hello("queen-a", NONCE, wire.sign_nonce(SECRET, NONCE)),
    wire.FrameType.HOTLIST_DIRTY_BATCH: wire.HotlistDirtyBatch(
        (wire.HotlistMark("q", "p", group="g"),)
    ),
    wire.FrameType.QUEUE_CONFIG_SET: wire.QueueConfigSet("q"),
    wire.FrameType.QUEUE_CONFIG_DELETE: wire.QueueConfigDelete("q", "t"),
    wire.FrameType.MAINTENANCE_MODE_SET: wire.MaintenanceModeSet(True),
    wire.FrameType.POP_MAINTENANCE_MODE_SET: wire.PopMaintenanceModeSet(False),
}


def load(name: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((VECTORS / name).read_text())
    return vectors


def message_of(document: dict[str, Any]) -> Any:
    """Build the message that a vector writes down."""
    fields = {key: value for key, value in document.items() if key != "frame"}
    cls = CLASSES[document["frame"]]
    if "items" in fields:
        item = wire.HotlistMark if cls is wire.HotlistDirtyBatch else wire.MessageAvailable
        fields["items"] = tuple(item(**one) for one in fields["items"])
    return cls(**fields)


def stream_of(parts: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(bytes.fromhex(part["hex"]) * part.get("times", 1) for part in parts)


def raw_frame(frame_type: int, payload: bytes = b"") -> bytes:
    """Frame bytes without the code under test."""
    return struct.pack(">IB", 1 + len(payload), frame_type) + payload


def new_listener(secret: bytes = SECRET, capacity: int = 100) -> wire.HelloVerifier:
    return wire.HelloVerifier(secret, wire.NonceMemory(capacity))


def new_inbound(secret: bytes = SECRET) -> wire.InboundLink:
    return wire.InboundLink(new_listener(secret))


@attrs.frozen
class Outcome:
    """All that may come out of an inbound link."""

    events: tuple[Any, ...]
    reason: wire.Reason | None
    state: wire.LinkState
    hello: wire.Hello | None


def run(link: wire.InboundLink, chunks: Iterable[bytes]) -> Outcome:
    """Drive a link as a listener would, and stop at the first error."""
    events: list[Any] = []
    reason = None
    try:
        for chunk in chunks:
            link.receive_data(chunk)
            while (event := link.next_event_untrusted()) is not None:
                events.append(event)
    except wire.RemoteProtocolError as error:
        reason = error.reason
    return Outcome(tuple(events), reason, link.state, link.hello)


def in_pieces(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
