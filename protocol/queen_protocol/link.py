"""One link: which frame may come when, for the end that reads it and the end that writes it.

Theory of operation
===================

A link carries frames one way, from the node that dialled to the node that listens; a pair of nodes
has two of them. So one link has one life, and both ends keep the same book of it:

                      HELLO                      any frame but HELLO
    AWAITING_HELLO ────────────▶ OPEN ─────────▶ OPEN
          │                        │
          └── anything else ──▶ CLOSED ◀── HELLO, a broken frame, the end of the stream

TRANSITIONS is that picture as a table, and the only place where the order of frames is decided. It
doesn't know which end it serves, so neither end can be held to a rule that the other isn't. The
two classes below differ in whom they blame: what breaks the table is a RemoteProtocolError in
`InboundLink`, where the peer chose the frame, and a LocalProtocolError in `OutboundLink`, where we
did.

Some rules don't fit in the table:

1. A frame's place in the order is judged by its type alone, before its payload is looked at.
2. InboundLink goes to OPEN only if the HELLO can be decoded and verified. Until then the decoder
   takes no frame over MAX_HELLO_BYTES; then it takes up to MAX_FRAME_BYTES. The limit is changed
   between two frames, so it doesn't matter whether both arrived in one read.
3. Whatever error InboundLink raises, the link is CLOSED and what it had buffered is gone. A closed
   link ignores further bytes and repeats its error, so no driver can be led past it.

No clock here: the owner of the socket has the 5 s for HELLO and says so with `refuse_late_hello`.
"""

from __future__ import annotations

from enum import Enum, unique
from typing import TYPE_CHECKING, Final, NoReturn

from queen_protocol.errors import (
    HandshakeError,
    LocalProtocolError,
    Reason,
    RemoteProtocolError,
    SequenceError,
)
from queen_protocol.frames import MAX_FRAME_BYTES, MAX_HELLO_BYTES, FrameDecoder
from queen_protocol.handshake import sign_nonce
from queen_protocol.messages import (
    FrameType,
    Hello,
    Message,
    UnknownFrame,
    decode_untrusted,
    encode,
    frame_type,
)

if TYPE_CHECKING:
    from queen_protocol.handshake import HelloVerifier


@unique
class LinkState(Enum):
    """Where a link is in its life."""

    AWAITING_HELLO = "awaiting_hello"
    OPEN = "open"
    CLOSED = "closed"


@unique
class FrameKind(Enum):
    """All that the order of frames depends on."""

    HELLO = "hello"
    HEARTBEAT = "heartbeat"
    HINT = "hint"
    UNKNOWN = "unknown"


TRANSITIONS: Final[dict[LinkState, dict[FrameKind, LinkState | Reason]]] = {
    LinkState.AWAITING_HELLO: {
        FrameKind.HELLO: LinkState.OPEN,
        FrameKind.HEARTBEAT: Reason.NOT_HELLO,
        FrameKind.HINT: Reason.NOT_HELLO,
        FrameKind.UNKNOWN: Reason.NOT_HELLO,
    },
    LinkState.OPEN: {
        FrameKind.HELLO: Reason.SECOND_HELLO,
        FrameKind.HEARTBEAT: LinkState.OPEN,
        FrameKind.HINT: LinkState.OPEN,
        FrameKind.UNKNOWN: LinkState.OPEN,
    },
    # CLOSED has no row: nothing is read from or written to a closed link.
}


_KINDS: Final[dict[int, FrameKind]] = {
    **dict.fromkeys(FrameType, FrameKind.HINT),
    FrameType.HELLO: FrameKind.HELLO,
    FrameType.HEARTBEAT: FrameKind.HEARTBEAT,
}


def frame_kind(type_byte: int) -> FrameKind:
    """Return the kind of a frame by its type byte."""
    return _KINDS.get(type_byte, FrameKind.UNKNOWN)


class InboundLink:
    """The listener's end of an accepted connection: bytes in, events out, never a byte back.

    Feed each read to `receive_data`, then take events until None. The first event is always the
    verified Hello; then any message but Hello, or an UnknownFrame (a sign of life, nothing else).

    Every RemoteProtocolError closes the link; it is a failed handshake if `hello` is None then.
    """

    def __init__(self, verifier: HelloVerifier) -> None:
        self._verifier = verifier
        self._decoder = FrameDecoder(limit=MAX_HELLO_BYTES)
        self._error: RemoteProtocolError | None = None
        self.state = LinkState.AWAITING_HELLO
        self.hello: Hello | None = None

    def receive_data(self, data: bytes) -> None:
        """Take what was read; LocalProtocolError if events are never taken (FrameDecoder)."""
        if self.state is not LinkState.CLOSED:
            self._decoder.receive_data(data)

    def next_event_untrusted(self) -> Message | UnknownFrame | None:
        """Return the next event, or None if there is none before more bytes come.

        RemoteProtocolError if the peer broke the protocol, again on every later call; None for
        good once the link was closed without one.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        try:
            return self._take_event_untrusted()
        except RemoteProtocolError as error:
            # A twin: the traceback of the one that is raised holds the offending frame alive.
            self._error = type(error)(error.reason, error.detail)
            self.close()
            raise

    def refuse_late_hello(self) -> NoReturn:
        """Close the link because HELLO didn't come in time: raises HandshakeError (LATE_HELLO).

        LocalProtocolError unless HELLO is being waited for.
        """
        if self.state is not LinkState.AWAITING_HELLO:
            raise LocalProtocolError(f"HELLO isn't awaited: the link is {self.state.value}")
        self._error = HandshakeError(Reason.LATE_HELLO, "HELLO didn't come in time")
        self.close()
        raise self._error

    def close(self) -> None:
        """Note the end of the stream, or our own decision; an unfinished frame is dropped."""
        self.state = LinkState.CLOSED
        self._decoder = FrameDecoder()

    def _take_event_untrusted(self) -> Message | UnknownFrame | None:
        frame = self._decoder.next_frame_untrusted()
        if frame is None:
            return None
        after = TRANSITIONS[self.state][frame_kind(frame.type)]
        if isinstance(after, Reason):
            raise SequenceError(after, f"type {frame.type} while {self.state.value}")
        event = decode_untrusted(frame)
        if isinstance(event, Hello):
            self._verifier.verify_untrusted(event)
            self._decoder.limit = MAX_FRAME_BYTES
            self.hello = event
        self.state = after
        return event


class OutboundLink:
    """The dialer's end: messages in, bytes to send out; HELLO is the first of them."""

    def __init__(self, *, server_id: str, secret: bytes, nonce: str) -> None:
        """Prepare the HELLO; `nonce` is random hex that was never used before."""
        self.hello = Hello(server_id=server_id, nonce=nonce, mac=sign_nonce(secret, nonce))
        self.state = LinkState.AWAITING_HELLO

    def say_hello(self) -> bytes:
        """Return the bytes that open the link; once only."""
        return self.send(self.hello)

    def send(self, message: Message) -> bytes:
        """Return the message's bytes; LocalProtocolError if it may not be sent now, or at all."""
        if self.state is LinkState.CLOSED:
            raise LocalProtocolError("the link is closed")
        after = TRANSITIONS[self.state][frame_kind(frame_type(message))]
        if isinstance(after, Reason):
            raise LocalProtocolError(f"{after}: {type(message).__name__} while {self.state.value}")
        data = encode(message)
        self.state = after
        return data

    def receive_data_untrusted(self, data: bytes) -> None:
        """Refuse what was read: a listener never writes. SequenceError, unless `data` is empty."""
        if data:
            self.close()
            raise SequenceError(Reason.UNEXPECTED_BYTES, "a listener doesn't write on this link")

    def close(self) -> None:
        """Note that the connection is gone; nothing more can be sent."""
        self.state = LinkState.CLOSED
