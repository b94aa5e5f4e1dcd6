"""The handshake: what a HELLO proves, and what the listener remembers of it.

    mac = hex(HMAC-SHA256(key = secret, message = the ASCII bytes of the nonce))

Theory of operation
===================

The listener never answers, so it can't challenge: the dialer picks the nonce, and a HELLO that was
overheard is as good as new. What the wire allows against that is memory: each listener has one
NonceMemory and accepts a nonce once. The MAC is checked first, so only those who know the secret
can fill the memory; when it is full the oldest nonce is forgotten and could be replayed. mesh.md
says what remains, and why the port stays behind a firewall.

An empty secret is open mode: a HELLO only says who dials. Nothing is verified or remembered.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from enum import Enum, unique
from typing import TYPE_CHECKING

from queen_protocol.errors import HandshakeError, LocalProtocolError, Reason

if TYPE_CHECKING:
    from collections.abc import Container

    from queen_protocol.messages import Hello


def sign_nonce(secret: bytes, nonce: str) -> str:
    """Return the MAC of a nonce, as 64 lower-case hex digits; an empty secret signs too."""
    if not nonce.isascii():
        raise LocalProtocolError("a nonce is ASCII")
    return hmac.digest(secret, nonce.encode("ascii"), "sha256").hex()


class NonceMemory:
    """The last `capacity` nonces that a listener accepted, the oldest out first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise LocalProtocolError(f"a nonce memory needs room for one nonce, not {capacity}")
        self.capacity = capacity
        self._nonces: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nonces)

    def remember(self, nonce: str) -> bool:
        """Return True if the nonce is new, and remember it; a repeat renews nothing."""
        if nonce in self._nonces:
            return False
        if len(self._nonces) == self.capacity:
            self._nonces.popitem(last=False)
        self._nonces[nonce] = None
        return True


class HelloVerifier:
    """Decides on HELLOs for one listener, across all its links."""

    def __init__(self, secret: bytes, nonces: NonceMemory) -> None:
        self._secret = secret
        self._nonces = nonces

    @property
    def open_mode(self) -> bool:
        """Without a secret any well-formed HELLO is accepted, as often as it comes."""
        return not self._secret

    def verify_untrusted(self, hello: Hello) -> None:
        """Return if the HELLO is good, and remember its nonce.

        HandshakeError with BAD_MAC (compared in constant time) or REPLAYED_NONCE.
        """
        if self.open_mode:
            return
        expected = sign_nonce(self._secret, hello.nonce)
        if not hmac.compare_digest(expected.encode(), hello.mac.encode()):
            raise HandshakeError(Reason.BAD_MAC, "the MAC doesn't match our secret")
        if not self._nonces.remember(hello.nonce):
            raise HandshakeError(Reason.REPLAYED_NONCE, "this nonce was accepted before")


@unique
class HelloOrigin(Enum):
    """Who sent an accepted HELLO (spec 8.29)."""

    PEER = "peer"
    OURSELVES = "ourselves"
    """A peer entry leads back to this node: stop that dialer; not a peer that is alive."""
    DUPLICATE_ID = "duplicate_id"
    """Another node was given our QUEEN_SERVER_ID: warn."""


def hello_origin(hello: Hello, *, server_id: str, sent_nonces: Container[str]) -> HelloOrigin:
    """Tell who sent a HELLO, by our own server id and the nonces that our dialers sent."""
    if hello.server_id != server_id:
        return HelloOrigin.PEER
    if hello.nonce in sent_nonces:
        return HelloOrigin.OURSELVES
    return HelloOrigin.DUPLICATE_ID
