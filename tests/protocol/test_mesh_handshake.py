"""The handshake: what is verified, what is remembered, and who said HELLO."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import queen_protocol as wire
from tests.protocol.wire_vectors import NONCE, SECRET, new_inbound, new_listener, run


def hello(nonce: str = NONCE, secret: bytes = SECRET, server_id: str = "queen-a") -> wire.Hello:
    return wire.Hello(server_id, nonce, wire.sign_nonce(secret, nonce))


def refusal(verifier: wire.HelloVerifier, greeting: wire.Hello) -> wire.Reason | None:
    try:
        verifier.verify_untrusted(greeting)
    except wire.HandshakeError as error:
        return error.reason
    return None


def test_a_nonce_is_accepted_once() -> None:
    listener = new_listener()
    assert not listener.open_mode
    assert refusal(listener, hello()) is None
    assert refusal(listener, hello()) is wire.Reason.REPLAYED_NONCE
    assert refusal(listener, hello(server_id="queen-b")) is wire.Reason.REPLAYED_NONCE
    assert refusal(listener, hello(nonce="01")) is None


def test_a_wrong_mac_leaves_no_trace() -> None:
    nonces = wire.NonceMemory(10)
    listener = wire.HelloVerifier(SECRET, nonces)
    assert refusal(listener, hello(secret=b"other")) is wire.Reason.BAD_MAC
    assert len(nonces) == 0
    assert refusal(listener, hello()) is None
    assert len(nonces) == 1
    # A wrong MAC is told before a repeat, so that the memory can't be asked without the secret.
    assert refusal(listener, hello(secret=b"other")) is wire.Reason.BAD_MAC


def test_open_mode_verifies_and_remembers_nothing() -> None:
    nonces = wire.NonceMemory(10)
    listener = wire.HelloVerifier(b"", nonces)
    assert listener.open_mode
    for greeting in (hello(), hello(), wire.Hello("queen-b", NONCE, "")):
        assert refusal(listener, greeting) is None
    assert len(nonces) == 0


def test_a_captured_hello_opens_no_second_link() -> None:
    listener = new_listener()
    captured = wire.OutboundLink(server_id="queen-a", secret=SECRET, nonce=NONCE).say_hello()
    hint = wire.encode(wire.PopMaintenanceModeSet(True))
    assert run(wire.InboundLink(listener), [captured]).reason is None
    replay = run(wire.InboundLink(listener), [captured, hint])
    assert replay.reason is wire.Reason.REPLAYED_NONCE
    assert replay.events == ()
    assert run(new_inbound(), [captured]).reason is None  # another listener: mesh.md says so


@given(st.integers(1, 5), st.lists(st.sampled_from("0123456789abcdef")))
def test_nonce_memory_against_a_list(capacity: int, nonces: list[str]) -> None:
    memory = wire.NonceMemory(capacity)
    model: list[str] = []
    for nonce in nonces:
        assert memory.remember(nonce) is (nonce not in model)
        if nonce not in model:
            model = [*model, nonce][-capacity:]
        assert len(memory) == len(model)


@pytest.mark.parametrize("capacity", [0, -1])
def test_nonce_memory_needs_room(capacity: int) -> None:
    with pytest.raises(wire.LocalProtocolError):
        wire.NonceMemory(capacity)


def test_only_ascii_is_signed() -> None:
    with pytest.raises(wire.LocalProtocolError):
        wire.sign_nonce(SECRET, "é")


def test_the_secret_is_in_no_repr() -> None:
    link = wire.OutboundLink(server_id="queen-a", secret=b"hush-hush", nonce=NONCE)
    for thing in (new_listener(b"hush-hush"), link, link.hello):
        assert "hush" not in repr(thing)


@pytest.mark.parametrize(
    ("server_id", "nonce", "origin"),
    [
        ("queen-b", "aa", wire.HelloOrigin.PEER),
        ("queen-b", "bb", wire.HelloOrigin.PEER),
        ("queen-a", "aa", wire.HelloOrigin.OURSELVES),
        ("queen-a", "bb", wire.HelloOrigin.DUPLICATE_ID),
    ],
)
def test_origin(server_id: str, nonce: str, origin: wire.HelloOrigin) -> None:
    greeting = wire.Hello(server_id, nonce, "")
    assert wire.hello_origin(greeting, server_id="queen-a", sent_nonces={"aa"}) is origin
