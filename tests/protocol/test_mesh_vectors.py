"""The golden vectors, in both directions and however they are cut."""

from __future__ import annotations

from typing import Any

import pytest

import queen_protocol as wire
from tests.protocol.wire_vectors import (
    CLASSES,
    Outcome,
    in_pieces,
    load,
    message_of,
    new_inbound,
    run,
    stream_of,
)

MESSAGES = load("messages.json")
STREAMS = load("streams.json")
BYTE_BY_BYTE_BELOW = 200_000  # bytes; the few longer streams are cut more coarsely


def by_name(vector: dict[str, Any]) -> str:
    return str(vector["name"])


@pytest.mark.parametrize("vector", MESSAGES, ids=by_name)
def test_message(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    decoder = wire.FrameDecoder()
    decoder.receive_data(data)
    frame = decoder.next_frame_untrusted()
    assert frame is not None
    message = wire.decode_untrusted(frame)
    assert message == message_of(vector["message"])
    assert decoder.next_frame_untrusted() is None
    assert wire.encode_frame(frame) == data
    if isinstance(message, wire.UnknownFrame):
        assert not vector["canonical"]
    else:
        assert (wire.encode(message) == data) == vector["canonical"]


@pytest.mark.parametrize("vector", STREAMS, ids=by_name)
def test_stream(vector: dict[str, Any]) -> None:
    data = stream_of(vector["stream"])
    events = tuple(message_of(event) for event in vector["events"])
    hello = events[0] if events else None
    reason = vector["error"] and wire.Reason(vector["error"])
    if reason is not None:
        state = wire.LinkState.CLOSED
    elif hello is not None:
        state = wire.LinkState.OPEN
    else:
        state = wire.LinkState.AWAITING_HELLO
    assert vector["handshake_failed"] == (reason is not None and hello is None)

    sizes = [len(data) + 1, 65_537]
    if len(data) < BYTE_BY_BYTE_BELOW:
        sizes += [1, 2, 3, 1000]
    for size in sizes:
        link = new_inbound(vector["secret"].encode())
        assert run(link, in_pieces(data, size)) == Outcome(events, reason, state, hello), size


@pytest.mark.parametrize("vector", load("handshake.json"), ids=by_name)
def test_mac(vector: dict[str, Any]) -> None:
    assert wire.sign_nonce(vector["secret"].encode(), vector["nonce"]) == vector["mac"]


def test_vectors_leave_nothing_out() -> None:
    assert {vector["message"]["frame"] for vector in MESSAGES if vector["canonical"]} == {
        frame_type.name for frame_type in wire.FrameType
    }
    assert set(CLASSES) == {frame_type.name for frame_type in wire.FrameType} | {"UNKNOWN"}
    not_in_a_stream = {wire.Reason.REPLAYED_NONCE, wire.Reason.LATE_HELLO}
    not_in_a_stream |= {wire.Reason.UNEXPECTED_BYTES}
    assert {vector["error"] for vector in STREAMS} == {None, *wire.Reason} - not_in_a_stream
