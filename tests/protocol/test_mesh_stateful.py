"""A mesh under a bad network: links are cut, nodes restart, deliveries overtake each other.

Two nodes dial one listener. The network holds each connection's bytes and hands them over in pieces
of any size, in any order between connections; it cuts connections, corrupts bytes and replays what
it overheard. The model is one list per connection: what its dialer sent.
"""

from __future__ import annotations

from typing import Any

import attrs
import queen_protocol as wire
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from queen_protocol import LinkState, Reason
from wire_vectors import ONE_OF_EACH, SECRET

HINTS = [m for t, m in ONE_OF_EACH.items() if t is not wire.FrameType.HELLO]
CAPACITY = 4  # nonces; few, so that runs get to forgetting


@attrs.define(eq=False)
class Connection:
    """One TCP connection with its two ends and the bytes between them."""

    dialer: wire.OutboundLink | None  # None for a replay: nobody is behind it
    listener: wire.InboundLink
    sent: list[Any] = attrs.field(factory=list)
    received: list[Any] = attrs.field(factory=list)
    in_flight: bytearray = attrs.field(factory=bytearray)
    captured: bytes = b""
    corrupted: bool = False
    reason: Reason | None = None


class Mesh(RuleBasedStateMachine):
    connections = Bundle("connections")

    def __init__(self) -> None:
        super().__init__()
        self.nonces_dialled = 0
        self.everyone: list[Connection] = []
        self.handshake_failures = 0

    @initialize()
    def start_listener(self) -> None:
        self.verifier = wire.HelloVerifier(SECRET, wire.NonceMemory(CAPACITY))
        self.remembered: list[str] = []

    @rule(target=connections, server_id=st.sampled_from(["queen-a", "queen-b"]))
    def dial(self, server_id: str) -> Connection:
        self.nonces_dialled += 1
        dialer = wire.OutboundLink(
            server_id=server_id, secret=SECRET, nonce=f"{self.nonces_dialled:032x}"
        )
        connection = Connection(dialer, wire.InboundLink(self.verifier))
        connection.captured = dialer.say_hello()
        connection.in_flight += connection.captured
        connection.sent.append(dialer.hello)
        self.everyone.append(connection)
        return connection

    @rule(connection=connections, hint=st.sampled_from(HINTS))
    def send(self, connection: Connection, hint: Any) -> None:
        if connection.dialer is not None and connection.dialer.state is LinkState.OPEN:
            connection.in_flight += connection.dialer.send(hint)
            connection.sent.append(hint)

    @rule(connection=connections, size=st.integers(1, 300))
    def deliver(self, connection: Connection, size: int) -> None:
        data = bytes(connection.in_flight[:size])
        del connection.in_flight[:size]
        listener = connection.listener
        before = listener.state
        try:
            listener.receive_data(data)
            while (event := listener.next_event_untrusted()) is not None:
                connection.received.append(event)
        except wire.RemoteProtocolError as error:
            if before is not LinkState.CLOSED:
                self.handshake_failures += listener.hello is None
                connection.reason = error.reason
        if connection.reason is Reason.REPLAYED_NONCE and before is LinkState.AWAITING_HELLO:
            assert connection.sent[0].nonce in self.remembered
        if before is LinkState.AWAITING_HELLO and listener.hello is not None:
            nonce = listener.hello.nonce
            assert nonce not in self.remembered
            self.remembered = [*self.remembered, nonce][-CAPACITY:]

    @rule(connection=connections)
    def deliver_all(self, connection: Connection) -> None:
        while connection.in_flight:
            self.deliver(connection, 7)

    @rule(target=connections, connection=connections)
    def replay(self, connection: Connection) -> Connection:
        """Open a connection with an overheard HELLO and a frame that would do harm."""
        harm = wire.encode(wire.PopMaintenanceModeSet(True))
        again = Connection(None, wire.InboundLink(self.verifier), captured=connection.captured)
        again.in_flight += again.captured + harm
        again.sent = [connection.sent[0], wire.PopMaintenanceModeSet(True)]
        self.everyone.append(again)
        return again

    @rule(connection=connections, data=st.data())
    def corrupt(self, connection: Connection, data: st.DataObject) -> None:
        if connection.in_flight:
            at = data.draw(st.integers(0, len(connection.in_flight) - 1))
            connection.in_flight[at] ^= data.draw(st.integers(1, 255))
            connection.corrupted = True

    @rule(connection=consumes(connections))
    def cut(self, connection: Connection) -> None:
        connection.in_flight.clear()
        connection.listener.close()
        if connection.dialer is not None:
            connection.dialer.close()

    @rule(target=connections)
    def restart_listener(self) -> Any:
        """Every connection is gone, and so is the memory of nonces."""
        for connection in self.everyone:
            connection.in_flight.clear()
            connection.listener.close()
            if connection.dialer is not None:
                connection.dialer.close()
        self.start_listener()
        return multiple()

    @invariant()
    def received_is_a_prefix_of_sent(self) -> None:
        for connection in self.everyone:
            received = connection.received
            if not connection.corrupted:
                assert received == connection.sent[: len(received)]

    @invariant()
    def only_hello_opens(self) -> None:
        for connection in self.everyone:
            hello = connection.listener.hello
            assert hello == (connection.received[0] if connection.received else None)
            if hello is not None:
                assert wire.sign_nonce(SECRET, hello.nonce) == hello.mac

    @invariant()
    def only_the_network_breaks_links(self) -> None:
        for connection in self.everyone:
            if connection.reason is not None and not connection.corrupted:
                assert connection.reason is Reason.REPLAYED_NONCE
        failed = [c for c in self.everyone if c.reason is not None and c.listener.hello is None]
        assert len(failed) == self.handshake_failures


TestMesh = Mesh.TestCase
TestMesh.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
