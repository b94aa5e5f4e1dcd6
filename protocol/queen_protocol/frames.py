"""Frames: cutting a byte stream at its length prefixes, and nothing more.

    u32 big-endian length | u8 type | payload          (length = 1 + len(payload))

Theory of operation
===================

The decoder owns one buffer. `receive_data` appends whatever the socket gave, `next_frame_untrusted`
takes one whole frame from the front or says that it needs more. A length prefix is a claim by a
stranger: it is compared with the limit and then only with what has arrived; no memory is ever
reserved because of it. So the buffer holds at most one unfinished frame and one read.

A frame that can't be followed stays at the front of the buffer: the decoder repeats its error
instead of finding a "next" frame in the rubble.

The limit is looked at when a frame is taken, not when its bytes arrive. That makes the outcome
independent of how the stream was cut, even though a link raises the limit between two frames.
"""

from __future__ import annotations

import struct
from typing import Final

import attrs

from queen_protocol.errors import FramingError, LocalProtocolError, Reason

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
"""Largest length (type + payload, in bytes) that is accepted (spec 3, "Framing")."""

MAX_HELLO_BYTES: Final = 4 * 1024
"""The same before HELLO, when the peer may be anybody (spec 8.28)."""

_PREFIX: Final = struct.Struct(">I")

PREFIX_BYTES: Final = _PREFIX.size
"""Size of the length prefix, in bytes; the length doesn't count it."""


@attrs.frozen
class Frame:
    """One frame as it came: the type may be unknown, the payload is not looked at."""

    type: int
    payload: bytes


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of one frame; LocalProtocolError if no length and type byte can say it."""
    if not 0 <= frame.type <= 255:
        raise LocalProtocolError(f"a frame's type is a byte, not {frame.type}")
    length = 1 + len(frame.payload)
    if length > MAX_FRAME_BYTES:
        raise LocalProtocolError(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}")
    return b"%b%c%b" % (_PREFIX.pack(length), frame.type, frame.payload)


class FrameDecoder:
    """Cuts a byte stream into frames.

    Take every frame (until None) before feeding the next read: this keeps the buffer within one
    unfinished frame and one read.
    """

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def receive_data(self, data: bytes) -> None:
        """Append what was read.

        LocalProtocolError if the buffer is so full that a frame or an error must be waiting in it:
        then the owner of the socket reads without taking frames, and memory would have no bound.
        """
        if len(self._buffer) >= PREFIX_BYTES + MAX_FRAME_BYTES:
            raise LocalProtocolError("take the frames that have arrived before reading more")
        self._buffer += data

    def next_frame_untrusted(self) -> Frame | None:
        """Return the next whole frame, or None if more bytes are needed.

        FramingError for a length of zero or above the limit, as soon as the prefix is there; again
        on every later call.
        """
        if len(self._buffer) < PREFIX_BYTES:
            return None
        (length,) = _PREFIX.unpack_from(self._buffer)
        if length == 0:
            raise FramingError(Reason.BAD_LENGTH, "a frame of length zero has no type")
        if length > MAX_FRAME_BYTES:
            raise FramingError(
                Reason.TOO_LARGE, f"length {length} is larger than {MAX_FRAME_BYTES}"
            )
        if length > self.limit:
            raise FramingError(
                Reason.HELLO_TOO_LARGE, f"length {length} is larger than {self.limit} before HELLO"
            )
        end = PREFIX_BYTES + length
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            frame = Frame(type=view[PREFIX_BYTES], payload=bytes(view[PREFIX_BYTES + 1 : end]))
        del self._buffer[:end]
        return frame
