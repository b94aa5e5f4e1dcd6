"""A mesh under a bad network: links are cut, nodes restart, deliveries overtake each other.

Nodes and rogues dial one listener. The network holds each connection's bytes and hands them over in
pieces of any size, in any order between connections; it cuts connections, corrupts bytes and
replays what it overheard. The model is one list of messages per connection, and the nonces that are
remembered.
"""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

import queen_protocol as wire
from queen_protocol import LinkState, Reason
from tests.protocol.wire_vectors import ONE_OF_EACH, SECRET, raw_frame

HINTS = [m for t, m in ONE_OF_EACH.items() if t is not wire.FrameType.HELLO]
CAPACITY = 2  # nonces; few, so that runs get to forgetting


@attrs.define(eq=False)
class Connection:
    """One TCP connection: the listener's end, the bytes on their way, what should come of it."""

    listener: wire.InboundLink
    dialer: wire.OutboundLink | None = None  # rogues and replays have none
    in_flight: bytearray = attrs.field(factory=bytearray)
    undelivered: list[tuple[int, Any]] = attrs.field(factory=list)  # end in the stream, message
    written: int = 0
    delivered: int = 0
    corrupted: bool = False
    received: list[Any] = attrs.field(factory=list)
    reason: Reason | None = None
    expected: list[Any] = attrs.field(factory=list)
    expected_reason: Reason | None = None

    def write(self, data: bytes, message: Any) -> None:
        self.in_flight += data
        self.written += len(data)
        self.undelivered.append((self.written, message))

    def cut(self) -> None:
        self.in_flight.clear()
        self.listener.close()
        if self.dialer is not None:
            self.dialer.close()


class Mesh(RuleBasedStateMachine):
    connections = Bundle("connections")

    def __init__(self) -> None:
        super().__init__()
        self.nonces_drawn = 0
        self.everyone: list[Connection] = []
        self.overheard: list[wire.Hello] = []

    @initialize(secret=st.sampled_from([SECRET, SECRET, b""]))
    def start(self, secret: bytes) -> None:
        self.secret = secret
        self.start_listener()

    def start_listener(self) -> None:
        self.verifier = wire.HelloVerifier(self.secret, wire.NonceMemory(CAPACITY))
        self.remembered: list[str] = []

    def new_nonce(self) -> str:
        self.nonces_drawn += 1
        return f"{self.nonces_drawn:032x}"

    def connect(self, dialer: wire.OutboundLink | None = None) -> Connection:
        connection = Connection(wire.InboundLink(self.verifier), dialer)
        self.everyone.append(connection)
        return connection

    # -- who writes --------------------------------------------------------------------------------

    @rule(target=connections, server_id=st.sampled_from(["queen-a", "queen-b"]), now=st.booleans())
    def dial(self, server_id: str, now: bool) -> Connection:
        dialer = wire.OutboundLink(server_id=server_id, secret=self.secret, nonce=self.new_nonce())
        connection = self.connect(dialer)
        connection.write(dialer.say_hello(), dialer.hello)
        self.overheard.append(dialer.hello)
        return self.perhaps_deliver(connection, now)

    @rule(connection=connections, hint=st.sampled_from(HINTS))
    def send(self, connection: Connection, hint: Any) -> None:
        if connection.dialer is not None and connection.dialer.state is LinkState.OPEN:
            connection.write(connection.dialer.send(hint), hint)

    @rule(target=connections, back=st.integers(1, 6), now=st.booleans())
    def replay(self, back: int, now: bool) -> Connection:
        """Open a connection with an overheard HELLO and a frame that would do harm."""
        connection = self.connect()
        for hello in self.overheard[-back:][:1]:
            connection.write(wire.encode(hello), hello)
        harm = wire.PopMaintenanceModeSet(True)
        connection.write(wire.encode(harm), harm)
        return self.perhaps_deliver(connection, now)

    @rule(
        target=connections,
        start=st.sampled_from(["good hello", "good hello", "forged hello", "unknown", *HINTS]),
        rest=st.lists(st.sampled_from(["good hello", "unknown", *HINTS])),
        now=st.booleans(),
    )
    def rogue(self, start: Any, rest: list[Any], now: bool) -> Connection:
        """Say anything in any order."""
        connection = self.connect()
        for line in [start, *rest]:
            if line == "unknown":
                connection.write(raw_frame(77, b"{"), wire.UnknownFrame(77))
                continue
            if line in ("good hello", "forged hello"):
                secret = self.secret if line == "good hello" else b"guess"
                nonce = self.new_nonce()
                message: Any = wire.Hello("rogue", nonce, wire.sign_nonce(secret, nonce))
            else:
                message = line
            connection.write(wire.encode(message), message)
        return self.perhaps_deliver(connection, now)

    # -- the network -------------------------------------------------------------------------------

    @rule(connection=connections, size=st.integers(1, 300))
    def deliver(self, connection: Connection, size: int) -> None:
        data = bytes(connection.in_flight[:size])
        del connection.in_flight[:size]
        connection.delivered += len(data)
        listener = connection.listener
        was_greeted = listener.hello is not None
        try:
            listener.receive_data(data)
            while (event := listener.next_event_untrusted()) is not None:
                connection.received.append(event)
        except wire.RemoteProtocolError as error:
            connection.reason = error.reason
        if not connection.corrupted:
            self.expect(connection)
        elif self.secret and listener.hello is not None and not was_greeted:
            self.remember(listener.hello.nonce)

    @rule(size=st.integers(1, 300), backwards=st.booleans())
    def settle(self, size: int, backwards: bool) -> None:
        """All that is on its way arrives, the connections taking turns."""
        while waiting := [connection for connection in self.everyone if connection.in_flight]:
            for connection in reversed(waiting) if backwards else waiting:
                self.deliver(connection, size)

    def perhaps_deliver(self, connection: Connection, now: bool) -> Connection:
        if now:
            self.deliver(connection, len(connection.in_flight))
        return connection

    @rule(connection=connections, data=st.data())
    def corrupt(self, connection: Connection, data: st.DataObject) -> None:
        if connection.in_flight:
            at = data.draw(st.integers(0, len(connection.in_flight) - 1))
            connection.in_flight[at] ^= data.draw(st.integers(1, 255))
            connection.corrupted = True

    @rule(connection=connections)
    def cut(self, connection: Connection) -> None:
        connection.cut()

    @rule()
    def restart_listener(self) -> None:
        """Every connection is gone, and so is the memory of nonces."""
        for connection in self.everyone:
            connection.cut()
        self.start_listener()

    # -- the model ---------------------------------------------------------------------------------

    def remember(self, nonce: str) -> None:
        self.remembered = [*self.remembered, nonce][-CAPACITY:]

    def expect(self, connection: Connection) -> None:
        """Take the frames that are whole by now and say what they should have done."""
        while connection.undelivered and connection.undelivered[0][0] <= connection.delivered:
            _, message = connection.undelivered.pop(0)
            if connection.expected_reason is not None:
                continue
            connection.expected_reason = self.refusal(message, bool(connection.expected))
            if connection.expected_reason is None:
                if isinstance(message, wire.Hello) and self.secret:
                    self.remember(message.nonce)
                connection.expected.append(message)

    def refusal(self, message: Any, greeted: bool) -> Reason | None:
        if greeted:
            return Reason.SECOND_HELLO if isinstance(message, wire.Hello) else None
        if not isinstance(message, wire.Hello):
            return Reason.NOT_HELLO
        if not self.secret:
            return None
        if message.mac != wire.sign_nonce(self.secret, message.nonce):
            return Reason.BAD_MAC
        return Reason.REPLAYED_NONCE if message.nonce in self.remembered else None

    @invariant()
    def links_do_what_the_model_says(self) -> None:
        for connection in self.everyone:
            if not connection.corrupted:
                assert connection.received == connection.expected
                assert connection.reason is connection.expected_reason

    @invariant()
    def nothing_happens_without_a_good_hello(self) -> None:
        for connection in self.everyone:
            hello = connection.listener.hello
            assert hello == (connection.received[0] if connection.received else None)
            if hello is not None and self.secret:
                assert wire.sign_nonce(self.secret, hello.nonce) == hello.mac
            if connection.reason is not None:
                assert connection.listener.state is LinkState.CLOSED


TestMesh = Mesh.TestCase
TestMesh.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
