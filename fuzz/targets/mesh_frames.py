"""Any bytes, cut anywhere, are frames or one FramingError, whole as byte by byte, and nothing else.

A frame's payload is a message or a PayloadError; a message can be encoded, and reads the same then.
"""

from __future__ import annotations

from hypothesis import strategies as st

from queen_protocol import FrameDecoder, FramingError, PayloadError, UnknownFrame, encode
from queen_protocol.frames import Frame, encode_frame
from queen_protocol.messages import decode_untrusted

PAYLOADS = [b"", b'{"queue":"q","partition":"p"}', b'{"items":[{"queue":"q","partition":"p"}]}',
            b'{"enabled":true}', b'{"server_id":"a","nonce":"00","mac":"00"}']  # fmt: skip

INPUTS = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.builds(
            lambda type_byte, payload: encode_frame(Frame(type_byte, payload)),
            st.integers(0, 50),
            st.one_of(st.sampled_from(PAYLOADS), st.binary(max_size=40)),
        ),
    ),
    max_size=5,
).map(b"".join)


def check(data: bytes) -> None:
    whole = frames_of([data])
    assert whole == frames_of([data[n : n + 1] for n in range(len(data))])
    frames = whole[:-1]
    assert data.startswith(b"".join(encode_frame(frame) for frame in frames))
    for frame in frames:
        try:
            message = decode_untrusted(frame)
        except PayloadError:
            continue
        if not isinstance(message, UnknownFrame):
            [again] = frames_of([encode(message)])[:-1]
            assert decode_untrusted(again) == message


def frames_of(pieces: list[bytes]) -> list[Frame | str | None]:
    """The frames, and how it ends: a reason, or None."""
    decoder = FrameDecoder()
    frames: list[Frame | str | None] = []
    for piece in pieces:
        decoder.receive_data(piece)
        try:
            while frame := decoder.next_frame_untrusted():
                frames.append(frame)
        except FramingError as error:
            return [*frames, str(error.reason)]
    return [*frames, None]
