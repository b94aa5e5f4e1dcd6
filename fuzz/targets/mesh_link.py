"""No frame before a verified HELLO has an effect, whatever comes and however it is cut.

The first byte chooses: a link that asks for a proof, or one that is open and has heard a HELLO.
After the first error a link says nothing but that error.
"""

from __future__ import annotations

from hypothesis import strategies as st

from queen_protocol import (
    Hello,
    HelloVerifier,
    InboundLink,
    NonceMemory,
    RemoteProtocolError,
    encode,
    sign_nonce,
)
from queen_protocol.link import LinkState

from . import mesh_frames

SECRET = b"of the mesh"
HELLO = Hello("stranger", "00", sign_nonce(SECRET, "00"))
GOOD = encode(HELLO)

INPUTS = st.tuples(
    st.sampled_from([b"\0", b"\1"]), st.sampled_from([b"", GOOD]), mesh_frames.INPUTS
).map(b"".join)


def check(data: bytes) -> None:
    greeted = data[:1] > b"\x7f" or data[:1] == b"\1"
    stream = data[1:]
    if greeted:
        assert events_of([GOOD])[0] == HELLO
        stream = GOOD + stream
    whole = events_of([stream])
    assert whole == events_of([stream[n : n + 1] for n in range(len(stream))])
    events = whole[:-1]
    assert not events or isinstance(events[0], Hello)
    assert not any(isinstance(event, Hello) for event in events[1:])


def events_of(pieces: list[bytes]) -> list[object]:
    """The events, and how it ends: a reason, or None."""
    link = InboundLink(HelloVerifier(SECRET, NonceMemory(10)))
    events: list[object] = []
    for piece in pieces:
        link.receive_data(piece)
        try:
            while event := link.next_event_untrusted():
                assert link.hello is not None
                events.append(event)
        except RemoteProtocolError as error:
            assert link.state is LinkState.CLOSED
            assert_repeats(link, error)
            return [*events, str(error.reason)]
    return [*events, None]


def assert_repeats(link: InboundLink, error: RemoteProtocolError) -> None:
    link.receive_data(GOOD)
    try:
        link.next_event_untrusted()
    except RemoteProtocolError as again:
        assert again.reason is error.reason
    else:
        raise AssertionError("a closed link went on")
