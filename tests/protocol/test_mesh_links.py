"""Links: every state × every frame at both ends, two ends back to back, and any bytes at all."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import queen_protocol as wire
from queen_protocol import FrameKind, FrameType, LinkState, Reason
from tests.protocol.wire_vectors import (
    NONCE,
    ONE_OF_EACH,
    SECRET,
    Outcome,
    in_pieces,
    new_inbound,
    new_listener,
    raw_frame,
    run,
)

HELLO = ONE_OF_EACH[FrameType.HELLO]
GREETING = wire.encode(HELLO)
UNKNOWN_TYPES = sorted(set(range(256)) - set(FrameType))


def inbound_in(state: LinkState) -> wire.InboundLink:
    link = new_inbound()
    if state is LinkState.OPEN:
        assert run(link, [GREETING]).events == (HELLO,)
    elif state is LinkState.CLOSED:
        link.close()
    assert link.state is state
    return link


def outbound_in(state: LinkState) -> wire.OutboundLink:
    link = wire.OutboundLink(server_id="queen-a", secret=SECRET, nonce=NONCE)
    if state is LinkState.OPEN:
        assert link.say_hello() == GREETING
    elif state is LinkState.CLOSED:
        link.close()
    assert link.state is state
    return link


# -- the table -------------------------------------------------------------------------------------


def test_the_table_is_complete() -> None:
    assert set(wire.TRANSITIONS) == set(LinkState) - {LinkState.CLOSED}
    for row in wire.TRANSITIONS.values():
        assert set(row) == set(FrameKind)


def test_every_type_byte_has_a_kind() -> None:
    kinds = {byte: wire.frame_kind(byte) for byte in range(256)}
    assert kinds.pop(FrameType.HELLO) is FrameKind.HELLO
    assert kinds.pop(FrameType.HEARTBEAT) is FrameKind.HEARTBEAT
    for byte, kind in kinds.items():
        assert (kind is FrameKind.UNKNOWN) == (byte in UNKNOWN_TYPES)
        assert (kind is FrameKind.HINT) == (byte not in UNKNOWN_TYPES)


@pytest.mark.parametrize("frame_type", range(256))
def test_inbound_every_state_and_frame(frame_type: int) -> None:
    # Written out from spec 3 and 8.28, not read from TRANSITIONS.
    if frame_type in UNKNOWN_TYPES:
        data, event = raw_frame(frame_type, b"\xff"), wire.UnknownFrame(frame_type)
    else:
        event = ONE_OF_EACH[FrameType(frame_type)]
        data = wire.encode(event)

    awaiting = run(inbound_in(LinkState.AWAITING_HELLO), [data])
    if frame_type == FrameType.HELLO:
        assert awaiting == Outcome((HELLO,), None, LinkState.OPEN, HELLO)
    else:
        assert awaiting == Outcome((), Reason.NOT_HELLO, LinkState.CLOSED, None)

    opened = run(inbound_in(LinkState.OPEN), [data])
    if frame_type == FrameType.HELLO:
        assert opened == Outcome((), Reason.SECOND_HELLO, LinkState.CLOSED, HELLO)
    else:
        assert opened == Outcome((event,), None, LinkState.OPEN, HELLO)

    closed = run(inbound_in(LinkState.CLOSED), [data])
    assert closed == Outcome((), None, LinkState.CLOSED, None)


@pytest.mark.parametrize("frame_type", FrameType)
def test_outbound_every_state_and_message(frame_type: FrameType) -> None:
    message = ONE_OF_EACH[frame_type]
    for state in LinkState:
        link = outbound_in(state)
        may = {
            LinkState.AWAITING_HELLO: frame_type is FrameType.HELLO,
            LinkState.OPEN: frame_type is not FrameType.HELLO,
            LinkState.CLOSED: False,
        }[state]
        if may:
            assert link.send(message) == wire.encode(message)
            assert link.state is LinkState.OPEN
        else:
            with pytest.raises(wire.LocalProtocolError):
                link.send(message)
            assert link.state is state  # our mistake is not the connection's end


def test_a_message_that_cant_be_encoded_changes_nothing() -> None:
    link = wire.OutboundLink(server_id="a" * 4096, secret=SECRET, nonce=NONCE)
    with pytest.raises(wire.LocalProtocolError):
        link.say_hello()
    assert link.state is LinkState.AWAITING_HELLO


# -- both ends -------------------------------------------------------------------------------------

hints = st.sampled_from([m for t, m in ONE_OF_EACH.items() if t is not FrameType.HELLO])


@given(st.lists(hints), st.integers(1, 50), st.sampled_from([SECRET, b""]))
def test_back_to_back(messages: list[Any], size: int, secret: bytes) -> None:
    dialer = wire.OutboundLink(server_id="queen-a", secret=secret, nonce=NONCE)
    stream = dialer.say_hello() + b"".join(map(dialer.send, messages))
    outcome = run(new_inbound(secret), in_pieces(stream, size))
    assert outcome == Outcome((dialer.hello, *messages), None, LinkState.OPEN, dialer.hello)


# Streams that get somewhere: good frames, broken frames and noise.
pieces = st.one_of(
    st.just(GREETING),
    hints.map(wire.encode),
    st.builds(raw_frame, st.integers(0, 255), st.binary(max_size=20)),
    st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\x10\x01", b"\x01\0\0\x01"]),
    st.binary(max_size=10),
)
streams = st.builds(
    lambda start, rest: start + b"".join(rest),
    st.sampled_from([b"", GREETING]),
    st.lists(pieces, max_size=8),
)


@given(streams, st.sampled_from([SECRET, b""]), st.data())
def test_any_stream_however_cut(stream: bytes, secret: bytes, data: st.DataObject) -> None:
    whole = run(new_inbound(secret), [stream])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert run(new_inbound(secret), chunks) == whole
    assert run(new_inbound(secret), in_pieces(stream, 1)) == whole
    # No frame before HELLO has an effect, and HELLO comes once.
    assert [isinstance(event, wire.Hello) for event in whole.events] == [
        index == 0 for index in range(len(whole.events))
    ]
    assert whole.hello == (whole.events[0] if whole.events else None)
    assert (whole.state is LinkState.CLOSED) == (whole.reason is not None)


# -- the end ---------------------------------------------------------------------------------------


def test_a_failed_link_repeats_its_error_and_takes_nothing_more() -> None:
    link = inbound_in(LinkState.OPEN)
    link.receive_data(GREETING + wire.encode(wire.MaintenanceModeSet(True)))
    errors = []
    for _ in range(3):
        with pytest.raises(wire.SequenceError) as caught:
            link.next_event_untrusted()
        errors.append(str(caught.value))
        link.receive_data(wire.encode(wire.MaintenanceModeSet(True)))
    assert len(set(errors)) == 1
    link.close()
    with pytest.raises(wire.SequenceError):
        link.next_event_untrusted()


def test_a_failed_link_holds_no_memory() -> None:
    link = inbound_in(LinkState.OPEN)
    data = raw_frame(FrameType.QUEUE_CONFIG_SET, b"x" * 1_000_000)
    tracemalloc.start()
    try:
        link.receive_data(data * 3)
        with pytest.raises(wire.PayloadError):
            link.next_event_untrusted()
        for _ in range(100):
            link.receive_data(data)
            with pytest.raises(wire.PayloadError):
                link.next_event_untrusted()
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < 64 * 1024


def test_before_hello_memory_is_bounded_by_one_read() -> None:
    link = new_inbound()
    link.receive_data(b"\0\0\x10\0" + bytes(4096))
    with pytest.raises(wire.SequenceError):
        link.next_event_untrusted()
    link.receive_data(bytes(20_000_000))
    link.receive_data(bytes(20_000_000))  # ignored: buffering them would be a LocalProtocolError


def test_reading_without_taking_events_is_our_own_bug() -> None:
    link = new_inbound()
    link.receive_data(bytes(17_000_000))
    with pytest.raises(wire.LocalProtocolError):
        link.receive_data(b"x")


def test_a_late_hello() -> None:
    link = inbound_in(LinkState.AWAITING_HELLO)
    link.receive_data(GREETING[:-1])
    assert link.next_event_untrusted() is None
    with pytest.raises(wire.HandshakeError) as caught:
        link.refuse_late_hello()
    assert caught.value.reason is Reason.LATE_HELLO
    assert run(link, [GREETING[-1:]]) == Outcome((), Reason.LATE_HELLO, LinkState.CLOSED, None)


@pytest.mark.parametrize("state", [LinkState.OPEN, LinkState.CLOSED])
def test_no_late_hello_when_none_is_awaited(state: LinkState) -> None:
    link = inbound_in(state)
    with pytest.raises(wire.LocalProtocolError):
        link.refuse_late_hello()
    assert link.state is state


def test_a_bad_hello_opens_nothing() -> None:
    verifier = new_listener()
    bad = wire.encode(attrs.evolve(HELLO, mac="00"))
    link = wire.InboundLink(verifier)
    assert run(link, [bad, GREETING]) == Outcome((), Reason.BAD_MAC, LinkState.CLOSED, None)
    assert run(wire.InboundLink(verifier), [GREETING]).state is LinkState.OPEN


@pytest.mark.parametrize("state", LinkState)
def test_a_dialer_reads_nothing_but_the_end(state: LinkState) -> None:
    link = outbound_in(state)
    link.receive_data_untrusted(b"")
    assert link.state is state
    with pytest.raises(wire.SequenceError) as caught:
        link.receive_data_untrusted(b"x")
    assert caught.value.reason is Reason.UNEXPECTED_BYTES
    assert link.state is LinkState.CLOSED
