"""Frames: limits from the prefix alone, memory, and any cut of any stream."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import queen_protocol as wire
from tests.protocol.wire_vectors import in_pieces, raw_frame

MIB = 1024 * 1024


def decode(chunks: list[bytes], limit: int = wire.MAX_FRAME_BYTES) -> tuple[list[wire.Frame], str]:
    """All frames of a stream, and the reason it ended with ('' if it merely ended)."""
    decoder = wire.FrameDecoder(limit)
    frames = []
    try:
        for chunk in chunks:
            decoder.receive_data(chunk)
            while (frame := decoder.next_frame_untrusted()) is not None:
                frames.append(frame)
    except wire.FramingError as error:
        return frames, str(error.reason)
    return frames, ""


frames_strategy = st.builds(wire.Frame, st.integers(0, 255), st.binary(max_size=50))


@given(frames_strategy)
def test_encoding_is_prefix_type_payload(frame: wire.Frame) -> None:
    assert wire.encode_frame(frame) == raw_frame(frame.type, frame.payload)


@given(st.data(), st.lists(frames_strategy, max_size=8))
def test_any_cut_gives_the_frames_back(data: st.DataObject, frames: list[wire.Frame]) -> None:
    stream = b"".join(map(wire.encode_frame, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert decode(chunks) == (frames, "")
    assert decode(list(in_pieces(stream, 1))) == (frames, "")


@given(st.binary(max_size=200), st.integers(1, 20), st.sampled_from([16, wire.MAX_FRAME_BYTES]))
def test_any_bytes_whole_as_byte_by_byte(stream: bytes, size: int, limit: int) -> None:
    whole = decode([stream], limit)
    assert decode(list(in_pieces(stream, 1)), limit) == whole
    assert decode(list(in_pieces(stream, size)), limit) == whole


@pytest.mark.parametrize(
    ("length", "limit", "reason"),
    [
        (0, wire.MAX_FRAME_BYTES, wire.Reason.BAD_LENGTH),
        (0, wire.MAX_HELLO_BYTES, wire.Reason.BAD_LENGTH),
        (wire.MAX_FRAME_BYTES + 1, wire.MAX_FRAME_BYTES, wire.Reason.TOO_LARGE),
        (2**32 - 1, wire.MAX_FRAME_BYTES, wire.Reason.TOO_LARGE),
        (2**32 - 1, wire.MAX_HELLO_BYTES, wire.Reason.TOO_LARGE),
        (wire.MAX_HELLO_BYTES + 1, wire.MAX_HELLO_BYTES, wire.Reason.HELLO_TOO_LARGE),
        (wire.MAX_FRAME_BYTES, wire.MAX_HELLO_BYTES, wire.Reason.HELLO_TOO_LARGE),
    ],
)
def test_length_is_refused_from_the_prefix_alone(
    length: int, limit: int, reason: wire.Reason
) -> None:
    decoder = wire.FrameDecoder(limit)
    prefix = struct.pack(">I", length)
    decoder.receive_data(prefix[:3])
    assert decoder.next_frame_untrusted() is None
    decoder.receive_data(prefix[3:])
    for _ in range(2):  # and again: there is no next frame after a broken one
        with pytest.raises(wire.FramingError) as caught:
            decoder.next_frame_untrusted()
        assert caught.value.reason is reason
        decoder.receive_data(raw_frame(3))


@pytest.mark.parametrize("limit", [wire.MAX_HELLO_BYTES, wire.MAX_FRAME_BYTES])
def test_length_at_the_limit_is_accepted(limit: int) -> None:
    payload = bytes(limit - 1)
    stream = raw_frame(9, payload) + raw_frame(3)
    frames = [wire.Frame(9, payload), wire.Frame(3, b"")]
    assert decode([stream], limit) == (frames, "")
    assert decode(list(in_pieces(stream, 4093)), limit) == (frames, "")


def test_the_limit_counts_when_a_frame_is_taken() -> None:
    decoder = wire.FrameDecoder(limit=10)
    decoder.receive_data(raw_frame(1) + raw_frame(2, bytes(10)))
    assert decoder.next_frame_untrusted() == wire.Frame(1, b"")
    decoder.limit = 11
    assert decoder.next_frame_untrusted() == wire.Frame(2, bytes(10))


@pytest.mark.parametrize(
    ("length", "reason"),
    [(2**32 - 1, "too_large"), (wire.MAX_FRAME_BYTES, ""), (4 * MIB, "")],
)
def test_a_prefix_allocates_nothing(length: int, reason: str) -> None:
    prefix = struct.pack(">I", length)
    tracemalloc.start()
    try:
        assert decode([prefix, b"x" * 100]) == ([], reason)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024


def test_memory_is_bounded_by_what_arrived_and_given_back() -> None:
    frame = wire.encode_frame(wire.Frame(9, bytes(wire.MAX_FRAME_BYTES - 1)))
    chunks = list(in_pieces(frame, 64 * 1024))
    del frame
    tracemalloc.start()
    try:
        decoder = wire.FrameDecoder()
        for _ in range(2):
            for chunk in chunks:
                decoder.receive_data(chunk)
                taken = decoder.next_frame_untrusted()
            assert taken is not None
            del taken
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * wire.MAX_FRAME_BYTES  # the buffer, with its growth, and the payload
    assert left < 256 * 1024


def test_reading_without_taking_frames_is_our_own_bug() -> None:
    decoder = wire.FrameDecoder()
    for _ in range(16):
        decoder.receive_data(bytes(MIB))
    decoder.receive_data(bytes(wire.PREFIX_BYTES))
    with pytest.raises(wire.LocalProtocolError):
        decoder.receive_data(b"x")


def test_a_full_buffer_holds_a_whole_frame() -> None:
    payload = bytes(wire.MAX_FRAME_BYTES - 1)
    decoder = wire.FrameDecoder()
    decoder.receive_data(raw_frame(9, payload)[:-1])
    decoder.receive_data(b"\0" + raw_frame(3))
    with pytest.raises(wire.LocalProtocolError):
        decoder.receive_data(b"")
    assert decoder.next_frame_untrusted() == wire.Frame(9, payload)
    decoder.receive_data(b"")
    assert decoder.next_frame_untrusted() == wire.Frame(3, b"")


@pytest.mark.parametrize(
    "frame",
    [
        wire.Frame(256, b""),
        wire.Frame(-1, b""),
        wire.Frame(9, bytes(wire.MAX_FRAME_BYTES)),
    ],
    ids=["type 256", "type -1", "too large"],
)
def test_no_frame_that_a_peer_would_refuse(frame: wire.Frame) -> None:
    with pytest.raises(wire.LocalProtocolError):
        wire.encode_frame(frame)
