"""A node's listener against raw sockets: what is refused is bounded, counted, and logged once."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from queen_protocol import (
    Heartbeat,
    Hello,
    HotlistDirtyBatch,
    HotlistMark,
    MaintenanceModeSet,
    Message,
    MessageAvailable,
    MessageAvailableBatch,
    PopMaintenanceModeSet,
    QueueConfigDelete,
    QueueConfigSet,
    encode,
)
from queen_trio.mesh import MeshNode
from queen_trio.mesh import listener as listener_module
from queen_trio.mesh.listener import HELLO_SECONDS, MAX_WAITING
from queen_trio.mesh.node import SILENCE_LEAST_SECONDS
from tests.mesh.nodes import (
    TENANT,
    Node,
    Recorder,
    dial,
    frame,
    free_port,
    hello,
    open_node,
    open_peer,
    reset,
    sync_config,
    wait_closed,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trio.testing import MockClock

WAKE = encode(MessageAvailable("q", "p", TENANT))
WOKEN = ("messages", "q", "p")
FOUR_GIB = struct.pack(">I", 2**32 - 1)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node() as node:
        yield node


async def assert_works(node: Node) -> None:
    """Whatever happened before: a good link is served."""
    node.received.calls.clear()
    async with await dial(node) as stream:
        await stream.send_all(hello("good") + WAKE)
        await wait_until(lambda: node.received.calls == [WOKEN])


@pytest.mark.parametrize(
    ("message", "acts"),
    [
        (MessageAvailable("q", "p", TENANT), [WOKEN]),
        (MessageAvailable("q", "p", None), [WOKEN]),
        (
            MessageAvailableBatch((MessageAvailable("a", "1"), MessageAvailable("b", "2", TENANT))),
            [("messages", "a", "1"), ("messages", "b", "2")],
        ),
        (
            HotlistDirtyBatch((HotlistMark("q", "p", TENANT, "g"), HotlistMark("r", "p"))),
            [("mark", "q", "p", "g"), ("messages", "r", "p")],
        ),
        (QueueConfigSet("q", TENANT), [("changed", "q")]),
        (QueueConfigDelete("q", None), [("deleted", "q")]),
        (MaintenanceModeSet(True), [("maintenance", True)]),
        (PopMaintenanceModeSet(False), [("pop maintenance", False)]),
        (Heartbeat(), []),
        (MessageAvailable("q", "p", "another tenant"), []),
        (MessageAvailableBatch((MessageAvailable("q", "p", "another tenant"),)), []),
        (HotlistDirtyBatch((HotlistMark("q", "p", "another tenant", "g"),)), []),
        (QueueConfigSet("q", "another tenant"), []),
        (QueueConfigDelete("q", "another tenant"), []),
    ],
)
async def test_a_frame_acts_here(node: Node, message: Message, acts: list[Any]) -> None:
    async with await dial(node) as stream:
        await stream.send_all(hello() + encode(message) + encode(MaintenanceModeSet(False)))
        await wait_until(lambda: ("maintenance", False) in node.received.calls)
        assert node.received.calls == [*acts, ("maintenance", False)]
    assert node.mesh.statistics().servers_alive == ["stranger"]
    assert node.mesh.statistics().messages_received == 3


async def test_a_frame_byte_by_byte(node: Node) -> None:
    async with await dial(node) as stream:
        for byte in hello() + WAKE:
            await stream.send_all(bytes([byte]))
        await wait_until(lambda: node.received.calls == [WOKEN])


async def test_an_unknown_type_is_skipped(node: Node) -> None:
    async with await dial(node) as stream:
        await stream.send_all(hello() + frame(200, b"\xff not JSON") + WAKE)
        await wait_until(lambda: node.received.calls == [WOKEN])
    assert node.mesh.statistics().links_refused == {}


@pytest.mark.parametrize(
    ("data", "reason", "failed_handshake"),
    [
        (hello(secret="another"), "bad_mac", True),
        (WAKE + hello(), "not_hello", True),
        (frame(200) + hello(), "not_hello", True),
        (FOUR_GIB, "too_large", True),
        (struct.pack(">I", 0), "bad_length", True),
        (struct.pack(">IB", 4097, 4) + b"{" * 4096, "hello_too_large", True),
        (frame(4, b"{}"), "bad_field", True),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", "too_large", True),
        (b"second", "second_hello", False),
        (FOUR_GIB, "too_large", False),
        (frame(1, b"[]"), "bad_json", False),
        (frame(40, b'{"enabled": 1}'), "bad_field", False),
    ],
)
async def test_a_peer_that_breaks_the_protocol(
    node: Node, data: bytes, reason: str, failed_handshake: bool
) -> None:
    with capture_logs() as lines:
        for _ in range(2):
            good = b"" if failed_handshake else hello()
            bad = hello() if data == b"second" else data
            async with await dial(node) as stream:
                # What follows the violation has no effect.
                await stream.send_all(good + bad + WAKE)
                await wait_closed(stream)
    assert node.received.calls == []
    statistics = node.mesh.statistics()
    assert statistics.links_refused == {reason: 2}
    assert statistics.handshake_failures == 2 * failed_handshake
    warnings = [line for line in lines if line["log_level"] in ("warning", "error")]
    assert [line["reason"] for line in warnings] == [reason]
    await assert_works(node)


async def test_a_replayed_hello(node: Node) -> None:
    """The listener that accepted it knows it again, while the link lives and after."""
    overheard = hello()
    async with await dial(node) as first:
        await first.send_all(overheard + WAKE)
        await wait_until(lambda: node.received.calls == [WOKEN])
        async with await dial(node) as second:
            await second.send_all(overheard + WAKE)
            await wait_closed(second)
        await first.send_all(WAKE)
        await wait_until(lambda: node.received.calls == [WOKEN] * 2)
    async with await dial(node) as third:
        await third.send_all(overheard + WAKE)
        await wait_closed(third)
    assert node.refused("replayed_nonce") == node.mesh.statistics().handshake_failures == 2
    assert node.received.calls == [WOKEN] * 2


async def test_open_mode_believes_anyone() -> None:
    async with open_node(secret=None) as node:
        said = encode(Hello("anyone", "00", "no MAC at all"))
        for n in (1, 2):
            async with await dial(node) as stream:
                await stream.send_all(said + WAKE)
                await wait_until(lambda n=n: node.received.calls == [WOKEN] * n)
        async with await dial(node) as stream:
            await stream.send_all(WAKE)
            await wait_closed(stream)
        assert node.mesh.statistics().handshake_failures == 1


@pytest.mark.parametrize("end", [reset, trio.SocketStream.aclose], ids=["reset", "end"])
@pytest.mark.parametrize(
    ("opened", "rest"), [(False, b""), (False, hello()[:9]), (True, b""), (True, WAKE[:9])]
)
async def test_a_link_that_ends_in_a_frame(
    node: Node,
    opened: bool,
    rest: bytes,
    end: Callable[[trio.SocketStream], Awaitable[None] | None],
) -> None:
    """The end of a stream is no violation, not even a reset: port probes end like that."""
    stream = await dial(node)
    await stream.send_all((hello() if opened else b"") + rest)
    if (ending := end(stream)) is not None:
        await ending
    await assert_works(node)
    statistics = node.mesh.statistics()
    assert (statistics.handshake_failures, statistics.links_refused) == (0, {})


async def test_a_slow_loris(node: Node, mock_clock: MockClock) -> None:
    """Five seconds for the whole HELLO, however lively it trickles."""
    async with await dial(node) as stream:
        said = hello()
        for second in range(int(HELLO_SECONDS)):
            await stream.send_all(said[second : second + 1])
            assert node.refused("late_hello") == 0
            await wait_until(lambda: node.mesh._listener._waiting)
            mock_clock.jump(1.0)
        await wait_closed(stream)
    assert node.refused("late_hello") == node.mesh.statistics().handshake_failures == 1
    await assert_works(node)


async def test_a_link_that_falls_silent(node: Node, mock_clock: MockClock) -> None:
    threshold = 3 * 600.0  # the node's own heartbeat is slow, and so it takes others' to be
    assert threshold > SILENCE_LEAST_SECONDS
    async with await dial(node) as stream:
        await stream.send_all(hello() + WAKE)
        await wait_until(lambda: node.received.calls == [WOKEN])
        mock_clock.jump(threshold - 1)
        await stream.send_all(WAKE)
        await wait_until(lambda: node.received.calls == [WOKEN] * 2)
        mock_clock.jump(threshold)
        await wait_closed(stream)
    statistics = node.mesh.statistics()
    assert statistics.links_refused == {}
    assert (statistics.servers_alive, statistics.servers_dead) == ([], ["stranger"])


async def test_strangers_that_say_nothing_keep_no_broker_out(node: Node) -> None:
    strangers = [await dial(node) for _ in range(MAX_WAITING)]
    await wait_until(lambda: len(node.mesh._listener._waiting) == MAX_WAITING)
    await assert_works(node)
    await wait_closed(strangers[0])
    assert node.refused("crowded_out") == node.mesh.statistics().handshake_failures == 1
    for stranger in strangers:
        await stranger.aclose()
    await wait_until(lambda: not node.mesh._listener._waiting)


async def test_too_many_brokers(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_LINKS", 2)
    async with await dial(node) as one, await dial(node) as two:
        for n, stream in enumerate((one, two), 1):
            await stream.send_all(hello() + WAKE)
            await wait_until(lambda n=n: node.received.calls == [WOKEN] * n)
        async with await dial(node) as three:
            await three.send_all(hello() + WAKE)
            await wait_closed(three)
        assert node.received.calls == [WOKEN] * 2
        assert node.refused("too_many_links") == 1
    await wait_until(lambda: node.mesh._listener._open == 0)
    await assert_works(node)


async def test_another_broker_with_our_name(node: Node) -> None:
    with capture_logs() as lines:
        for n in (1, 2):
            async with await dial(node) as stream:
                await stream.send_all(hello("node") + WAKE)
                await wait_until(lambda n=n: node.received.calls == [WOKEN] * n)
    warnings = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert warnings == ["another broker has this QUEEN_SERVER_ID"]
    assert node.mesh.statistics().servers_alive == []


async def test_ourselves_among_the_peers() -> None:
    """As in a StatefulSet, where all have one list: found out, dialled no more, not alive."""
    port = free_port()
    async with (
        open_peer() as other,
        open_node(("127.0.0.1", port), ("127.0.0.1", other.port), mesh_port=port) as node,
    ):
        myself, peer = node.mesh.peers
        await wait_until(lambda: myself.is_self and not myself.connected)
        link = await other.accept()
        assert isinstance(await link.receive(), Hello)
        await wait_until(lambda: peer.connected)
        node.mesh.hints.queue_changed("q")
        assert await link.receive() == QueueConfigSet("q", TENANT)
        assert node.received.calls == []
        statistics = node.mesh.statistics()
        assert (statistics.servers_alive, statistics.handshake_failures) == ([], 0)
        assert statistics.messages_dropped == 0
        await link.stream.aclose()


async def test_a_node_that_crashed_goes_on() -> None:
    """Its supervisor runs it again: the same port, counters that go on, nonces it still knows."""
    overheard = hello()
    received = Recorder()
    async with open_peer() as peer:
        mesh = MeshNode(sync_config(("127.0.0.1", peer.port)), TENANT)
        node = Node(mesh, received)
        port = 0
        for life in (1, 2):
            async with trio.open_nursery() as nursery:
                await nursery.start(mesh.serve, received)
                link = await peer.accept()
                assert isinstance(await link.receive(), Hello)
                async with await dial(node) as stream:
                    await stream.send_all((overheard if life == 1 else hello()) + WAKE)
                    await wait_until(lambda life=life: len(received.calls) == life)
                if life == 2:
                    async with await dial(node) as stream:
                        await stream.send_all(overheard + WAKE)
                        await wait_closed(stream)
                    assert mesh.port == port
                port = mesh.port
                nursery.cancel_scope.cancel()
            assert not mesh.listening
            assert not mesh.peers[0].connected
        assert received.calls == [WOKEN] * 2
        assert mesh.statistics().links_refused == {"replayed_nonce": 1}


async def test_our_own_hello_played_back_to_us() -> None:
    """It looks like a peer entry that leads to ourselves; nothing that follows it is heard."""
    async with open_peer() as other, open_node(("127.0.0.1", other.port)) as node:
        said = await (await other.accept()).receive()
        assert isinstance(said, Hello)
        async with await dial(node) as stream:
            await stream.send_all(encode(said) + WAKE)
            await wait_closed(stream)
        assert node.received.calls == []
        assert node.mesh.peers[0].is_self
        await assert_works(node)


async def test_nothing_is_passed_on() -> None:
    async with open_peer() as other, open_node(("127.0.0.1", other.port)) as node:
        link = await other.accept()
        assert isinstance(await link.receive(), Hello)
        async with await dial(node) as stream:
            await stream.send_all(hello() + WAKE + encode(QueueConfigDelete("q")))
            await wait_until(lambda: len(node.received.calls) == 2)
        await wait_until(lambda: node.mesh.peers[0].connected)
        node.mesh.hints.queue_changed("own")
        assert await link.receive() == QueueConfigSet("own", TENANT)
        await link.stream.aclose()


async def test_a_port_that_is_taken() -> None:
    """A warning; nobody is dialled, and there is no loop of restarts (spec 8.26)."""
    with capture_logs() as lines:
        async with (
            open_peer() as taken,
            open_peer() as peer,
            open_node(("127.0.0.1", peer.port), mesh_port=taken.port) as node,
        ):
            await trio.testing.wait_all_tasks_blocked()
            statistics = node.mesh.statistics()
            assert not statistics.listening
            node.mesh.hints.queue_changed("q")
            assert node.mesh.statistics().messages_dropped == 1
            with pytest.raises(trio.TooSlowError), trio.fail_after(0):
                await peer.accept()
    [line] = lines
    assert (line["event"], line["log_level"]) == ("TCP mesh bind failed", "warning")
