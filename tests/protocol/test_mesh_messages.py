"""Messages: round trips, hostile JSON, and who is to blame for a bad field."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import queen_protocol as wire
from tests.protocol.wire_vectors import CLASSES, ONE_OF_EACH

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
optional = st.none() | text
hellos = st.builds(wire.Hello, text, st.text("0123456789abcdefABCDEF", min_size=1), text)
messages = st.one_of(
    st.builds(wire.MessageAvailable, text, text, optional),
    st.builds(
        wire.MessageAvailableBatch,
        st.lists(st.builds(wire.MessageAvailable, text, text, optional)).map(tuple),
    ),
    st.just(wire.Heartbeat()),
    hellos,
    st.builds(
        wire.HotlistDirtyBatch,
        st.lists(st.builds(wire.HotlistMark, text, text, optional, optional)).map(tuple),
    ),
    st.builds(wire.QueueConfigSet, text, optional),
    st.builds(wire.QueueConfigDelete, text, optional),
    st.builds(wire.MaintenanceModeSet, st.booleans()),
    st.builds(wire.PopMaintenanceModeSet, st.booleans()),
)


def decode(data: bytes) -> Any:
    decoder = wire.FrameDecoder()
    decoder.receive_data(data)
    frame = decoder.next_frame_untrusted()
    assert frame is not None
    return wire.decode_untrusted(frame)


@given(messages)
def test_round_trip(message: wire.Message) -> None:
    data = wire.encode(message)
    assert decode(data) == message
    assert data[4] == wire.frame_type(message)


def test_types_have_one_class_each() -> None:
    assert {wire.frame_type(message): type(message) for message in ONE_OF_EACH.values()} == {
        frame_type: CLASSES[frame_type.name] for frame_type in wire.FrameType
    }
    assert {int(frame_type) for frame_type in wire.FrameType} == {1, 2, 3, 4, 5, 10, 11, 40, 41}


any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
likely_json = st.dictionaries(
    st.sampled_from(["queue", "partition", "tenant", "enabled", "items", "server_id", "nonce"]),
    any_json | st.lists(st.fixed_dictionaries({"queue": text, "partition": text})),
)


@given(
    st.integers(0, 255),
    st.binary() | (any_json | likely_json).map(lambda v: json.dumps(v).encode()),
)
def test_any_payload_is_a_message_or_a_payload_error(frame_type: int, payload: bytes) -> None:
    frame = wire.Frame(frame_type, payload)
    try:
        message = wire.decode_untrusted(frame)
    except wire.PayloadError:
        return
    if isinstance(message, wire.UnknownFrame):
        assert frame_type not in set(wire.FrameType)
    else:
        # Whatever is accepted could be sent by us, and means the same again.
        assert wire.frame_type(message) == frame_type
        assert decode(wire.encode(message)) == message


@given(any_json, st.integers(0, 60))
def test_depth_is_measured_as_json_counts_it(value: Any, wrap: int) -> None:
    def depth(node: Any) -> int:
        if isinstance(node, dict):
            return 1 + max(map(depth, node.values()), default=0)
        return 1 + max(map(depth, node), default=0) if isinstance(node, list) else 0

    for _ in range(wrap):
        value = [value, "]}"]
    document = {"enabled": True, "x": value, "pad": [[]] * 40}
    frame = wire.Frame(wire.FrameType.MAINTENANCE_MODE_SET, json.dumps(document).encode())
    if depth(document) <= wire.MAX_DEPTH:
        assert wire.decode_untrusted(frame) == wire.MaintenanceModeSet(True)
    else:
        with pytest.raises(wire.PayloadError) as caught:
            wire.decode_untrusted(frame)
        assert caught.value.reason is wire.Reason.BAD_JSON


def test_the_interpreters_limits_decide_nothing() -> None:
    limit, digits = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    bomb = b'{"enabled":true,"x":%b}' % (b"[" * 2000 + b"]" * 2000)
    number = b'{"enabled":true,"x":%b}' % (b"9" * 100_000)
    try:
        for recursion_limit, max_digits in ((limit, digits), (100_000, 0)):
            sys.setrecursionlimit(recursion_limit)
            sys.set_int_max_str_digits(max_digits)
            with pytest.raises(wire.PayloadError, match="nested"):
                wire.decode_untrusted(wire.Frame(40, bomb))
            assert wire.decode_untrusted(wire.Frame(40, number)) == wire.MaintenanceModeSet(True)
    finally:
        sys.setrecursionlimit(limit)
        sys.set_int_max_str_digits(digits)


@pytest.mark.parametrize(
    "payload",
    [
        b"[" * (wire.MAX_FRAME_BYTES - 1),
        b"{" * 8_000_000 + b"}" * 8_000_000,
        b'"' * (wire.MAX_FRAME_BYTES - 1),
        b"{" * 33 + b'"' + b'\\"' * 8_000_000,
        b"{" * 33 + b'"' + b"\\" * 16_000_000,
        b'{"x":' + b"9" * 16_000_000,
        b"[{}]" * 4_000_000,
    ],
    ids=["opened", "nested", "quotes", "escaped quotes", "backslashes", "digits", "siblings"],
)
def test_the_largest_hostile_frames_cost_linear_time(payload: bytes) -> None:
    start = time.process_time()
    with pytest.raises(wire.PayloadError):
        wire.decode_untrusted(wire.Frame(40, payload))
    assert time.process_time() - start < 10  # seconds; anything quadratic would take hours


@pytest.mark.parametrize("value", [1, None, b"q", "a\0", "a\ud800", "q" * 4097, ["q"]])
def test_a_bad_name_is_our_own_bug(value: Any) -> None:
    for make in (
        lambda: wire.MessageAvailable(value, "p"),
        lambda: wire.MessageAvailable("q", value),
        lambda: wire.HotlistMark(value, "p"),
        lambda: wire.HotlistMark("q", value),
        lambda: wire.QueueConfigSet(value),
        lambda: wire.QueueConfigDelete(value),
        lambda: wire.Hello(value, "00", ""),
        lambda: wire.Hello("a", value, ""),
        lambda: wire.Hello("a", "00", value),
    ):
        with pytest.raises(wire.LocalProtocolError):
            make()
    if value is not None:
        for make_optional in (
            lambda: wire.MessageAvailable("q", "p", value),
            lambda: wire.HotlistMark("q", "p", value),
            lambda: wire.HotlistMark("q", "p", None, value),
            lambda: wire.QueueConfigSet("q", value),
            lambda: wire.QueueConfigDelete("q", value),
        ):
            with pytest.raises(wire.LocalProtocolError):
                make_optional()


@pytest.mark.parametrize("nonce", ["", "0x1", "00\n", " 00", "é", "０", "0" * 257])
def test_a_nonce_is_hex(nonce: str) -> None:
    with pytest.raises(wire.LocalProtocolError):
        wire.Hello("a", nonce, "")


@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_a_flag_is_a_bool(value: Any) -> None:
    with pytest.raises(wire.LocalProtocolError):
        wire.MaintenanceModeSet(value)
    with pytest.raises(wire.LocalProtocolError):
        wire.PopMaintenanceModeSet(value)


def test_a_batch_holds_items_of_its_own_kind() -> None:
    with pytest.raises(wire.LocalProtocolError):
        wire.MessageAvailableBatch((wire.HotlistMark("q", "p"),))  # type: ignore[arg-type]
    with pytest.raises(wire.LocalProtocolError):
        wire.HotlistDirtyBatch((wire.MessageAvailable("q", "p"),))  # type: ignore[arg-type]
    with pytest.raises(wire.LocalProtocolError):
        wire.MessageAvailableBatch([])  # type: ignore[arg-type]


def test_what_no_frame_holds_isnt_sent() -> None:
    with pytest.raises(wire.LocalProtocolError, match="HELLO"):
        wire.encode(wire.Hello("\U0001f4e6" * 4096, "00", ""))
    item = wire.MessageAvailable("q" * 4096, "p" * 4096)
    with pytest.raises(wire.LocalProtocolError, match="larger"):
        wire.encode(wire.MessageAvailableBatch((item,) * 2048))


def test_the_largest_hello_passes_both_ends() -> None:
    empty = len(wire.encode(wire.Hello("", "00", ""))) - wire.PREFIX_BYTES
    hello = wire.Hello("a" * (wire.MAX_HELLO_BYTES - empty), "00", "")
    assert len(wire.encode(hello)) == wire.PREFIX_BYTES + wire.MAX_HELLO_BYTES
    with pytest.raises(wire.LocalProtocolError):
        wire.encode(wire.Hello(hello.server_id + "a", "00", ""))
    link = wire.InboundLink(wire.HelloVerifier(b"", wire.NonceMemory(1)))
    link.receive_data(wire.encode(hello))
    assert link.next_event_untrusted() == hello
