"""A node's dialers against peers that refuse, move, stay silent, or answer back."""

from __future__ import annotations

import socket
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import trio
import trio.testing
from structlog.testing import capture_logs

from queen_protocol import (
    Heartbeat,
    Hello,
    HotlistDirtyBatch,
    MessageAvailable,
    MessageAvailableBatch,
    QueueConfigDelete,
    QueueConfigSet,
)
from queen_trio.backoff import FIRST_SECONDS as BACKOFF_FIRST_SECONDS
from queen_trio.mesh.dialer import (
    BACKOFF_MAX_SECONDS,
    HEALTHY_SECONDS,
    WRITE_SECONDS,
    Dialer,
    _bound_silence,
)
from queen_trio.mesh.hints import BATCH_ITEMS, GATHER_ITEMS, TICK_SECONDS
from queen_trio.mesh.peer import QUEUE_FRAMES, Peer
from tests.mesh.nodes import TENANT, free_port, open_node, open_peer, wait_until

if TYPE_CHECKING:
    import pytest
    from trio.testing import MockClock

    from tests.mesh.nodes import Node, RawLink, RawPeer

MORE_THAN_THE_BACKOFF = BACKOFF_MAX_SECONDS + 1


def peer_address(peer: RawPeer) -> tuple[str, int]:
    return ("127.0.0.1", peer.port)


async def connected(peer: RawPeer, node: Node) -> RawLink:
    """Accept the node's link and its HELLO."""
    link = await peer.accept()
    said = await link.receive()
    assert isinstance(said, Hello)
    assert said.server_id == "node"
    await wait_until(lambda: node.mesh.peers[0].connected)
    return link


async def test_hints_arrive_in_their_order() -> None:
    async with open_peer() as peer, open_node(peer_address(peer)) as node:
        link = await connected(peer, node)
        hints = node.mesh.hints
        for n in range(3):
            hints.queue_changed(f"q{n}")
        hints.queue_deleted("q0")
        assert [await link.receive() for _ in range(4)] == [
            *(QueueConfigSet(f"q{n}", TENANT) for n in range(3)),
            QueueConfigDelete("q0", TENANT),
        ]
        hints.messages_available([("q", "p"), ("q", "p")])
        assert await link.receive() == MessageAvailable("q", "p", TENANT)
        await wait_until(lambda: node.mesh.statistics().messages_sent == 6)


async def test_wakes_of_a_moment_travel_together() -> None:
    async with open_peer() as peer, open_node(peer_address(peer)) as node:
        link = await connected(peer, node)
        names = [("q" * 512, f"{n:0512}") for n in range(BATCH_ITEMS + 1)]
        node.mesh.hints.messages_available(names)
        first, second = await link.receive(), await link.receive()
        assert isinstance(first, MessageAvailableBatch)
        assert [(item.queue, item.partition) for item in first.items] == names[:BATCH_ITEMS]
        assert second == MessageAvailable(*names[-1], TENANT)
        node.mesh.hints.claims_available([("q", "p")], "g")
        marked = await link.receive()
        assert isinstance(marked, HotlistDirtyBatch)
        [mark] = marked.items
        assert (mark.queue, mark.partition, mark.tenant, mark.group) == ("q", "p", TENANT, "g")


async def test_too_many_wakes_of_a_moment_are_dropped_and_counted(mock_clock: MockClock) -> None:
    async with open_peer() as peer, open_node(peer_address(peer)) as node:
        await connected(peer, node)
        node.mesh.hints.messages_available([("the one that leaves at once", "p")])
        node.mesh.hints.messages_available(("q", str(n)) for n in range(GATHER_ITEMS))
        node.mesh.hints.messages_available([("one too many", "p")])
        assert node.mesh.statistics().messages_dropped == 1


async def test_what_comes_first_leaves_at_once_and_with_its_mark(mock_clock: MockClock) -> None:
    """Before the task that says it does anything else; what follows within a tick is gathered."""
    async with open_peer() as peer, open_node(peer_address(peer)) as node:
        link = await connected(peer, node)
        await trio.testing.wait_all_tasks_blocked()
        [state] = node.mesh.peers
        node.mesh.hints.claims_available([("q", "p")], "g")
        assert state.sent == 3  # HELLO, the mark, the wake
        node.mesh.hints.messages_available([("q", "1")])
        node.mesh.hints.messages_available([("q", "2")])
        assert state.sent == 3
        mock_clock.jump(TICK_SECONDS)
        assert isinstance(await link.receive(), HotlistDirtyBatch)
        assert await link.receive() == MessageAvailable("q", "p", TENANT)
        assert isinstance(await link.receive(), MessageAvailableBatch)


async def test_what_the_kernel_does_not_take_goes_first_when_it_does() -> None:
    """A frame may be cut anywhere; the others queue up behind its rest."""
    async with open_peer(buffer_bytes=4096) as peer, open_node(peer_address(peer)) as node:
        link = await connected(peer, node)
        [state] = node.mesh.peers
        names = [f"{n}{'x' * 4000}" for n in range(QUEUE_FRAMES // 2)]
        for number, name in enumerate(names):
            # As long as all is taken, each frame finds the link waiting for it.
            await trio.testing.wait_all_tasks_blocked()
            node.mesh.hints.queue_changed(name)
            if state.sent <= number:
                break
        for name in names[number + 1 :]:
            node.mesh.hints.queue_changed(name)
        assert state.sent <= number < len(names) - 1, "the kernel has taken all"
        assert [await link.receive() for _ in names] == [
            QueueConfigSet(name, TENANT) for name in names
        ]
        assert state.dropped == 0


async def test_frames_of_a_busy_sender_stay_whole_and_in_order_however_slow_the_peer() -> None:
    """Written at once or queued, and cut anywhere: also while heartbeats fall due."""
    frames = 1500
    random = Random(1)
    names = [f"{n}{'x' * random.randrange(1000, 4000)}" for n in range(frames)]
    async with (
        open_peer(buffer_bytes=4096) as peer,
        open_node(peer_address(peer), heartbeat_ms=1) as node,
    ):
        link = await connected(peer, node)
        received: list[Any] = []

        async def send() -> None:
            for number, name in enumerate(names):
                while number - len(received) >= QUEUE_FRAMES // 2:
                    await trio.lowlevel.checkpoint()
                node.mesh.hints.queue_changed(name)
                for _ in range(random.randrange(3)):
                    await trio.lowlevel.checkpoint()

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                while len(received) < frames:
                    event = await link.receive()
                    if not isinstance(event, Heartbeat):
                        received.append(event)
        assert received == [QueueConfigSet(name, TENANT) for name in names]


async def test_heartbeats_when_there_is_nothing_to_say() -> None:
    async with open_peer() as peer, open_node(peer_address(peer), heartbeat_ms=10) as node:
        link = await connected(peer, node)
        assert [await link.receive() for _ in range(3)] == [Heartbeat()] * 3


async def test_what_is_said_to_nobody_is_dropped_and_counted() -> None:
    async with open_node(("127.0.0.1", free_port())) as node:
        node.mesh.hints.queue_changed("q")
        node.mesh.hints.messages_available([("q", "p")])
        statistics = node.mesh.statistics()
        assert (statistics.messages_sent, statistics.messages_dropped) == (0, 2)


async def test_a_listener_answers_back() -> None:
    """Not a mesh port at all, as a rule. One line however often it is dialled."""
    with capture_logs() as lines:
        async with open_peer() as peer, open_node(peer_address(peer)) as node:
            for _ in range(2):
                async with (await peer.accept()).stream as stream:
                    await stream.send_all(b"SSH-2.0-OpenSSH_9.2\r\n")
                    await wait_until(lambda: not node.mesh.peers[0].connected)
    reasons = [line["reason"] for line in lines if line["log_level"] == "warning"]
    assert reasons == ["unexpected_bytes"]


async def test_a_listener_that_closes_at_once_is_one_line() -> None:
    """As one does that has another secret."""
    with capture_logs() as lines:
        async with open_peer() as peer, open_node(peer_address(peer)):
            for _ in range(3):
                await (await peer.accept()).stream.aclose()
            last = await peer.accept()
            await last.stream.aclose()
    events = [line["event"] for line in lines if line["log_level"] in ("warning", "info")]
    assert events == ["mesh", "mesh peer connected", "mesh peer closed the link"]


async def test_a_peer_that_never_reads(mock_clock: MockClock) -> None:
    """Its queue fills and drops, the caller never waits; after five seconds the link is closed.

    On the next one nothing is said that had been queued for the last.
    """
    async with open_peer(buffer_bytes=4096) as peer, open_node(peer_address(peer)) as node:
        await peer.accept()
        [state] = node.mesh.peers
        await wait_until(lambda: state.connected)
        sends = 0
        while state.dropped == 0:
            for _ in range(QUEUE_FRAMES // 4):
                node.mesh.hints.queue_changed("stale" * 100)
            sends += QUEUE_FRAMES // 4
            await trio.testing.wait_all_tasks_blocked()
        assert state._receive.statistics().current_buffer_used <= QUEUE_FRAMES
        assert state.connected
        assert state.sent + state.dropped < sends
        mock_clock.jump(WRITE_SECONDS)
        await wait_until(lambda: not state.connected)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(MORE_THAN_THE_BACKOFF)
        link = await connected(peer, node)
        node.mesh.hints.queue_changed("fresh")
        assert await link.receive() == QueueConfigSet("fresh", TENANT)
        # With two HELLOs and the fresh one.
        await wait_until(lambda: state.sent + state.dropped == sends + 3)


async def test_a_peer_that_refuses_and_then_serves() -> None:
    port = free_port()
    with capture_logs() as lines:
        async with open_node(("127.0.0.1", port)) as node:
            await wait_until(lambda: [line for line in lines if line["log_level"] == "debug"])
            async with open_peer(port=port) as peer:
                link = await connected(peer, node)
                await link.stream.aclose()
    events = [line["event"] for line in lines if line["log_level"] in ("warning", "info")]
    # No second line for the same failure, and one for the end of it.
    assert events[:3] == ["mesh", "mesh peer unreachable", "mesh peer connected"]


class Resolver(trio.abc.HostnameResolver):
    """Names that move."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked = 0

    async def getaddrinfo(
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        await trio.lowlevel.checkpoint()
        assert host == b"queen-1.queen-mesh"
        self.asked += 1
        if not self.address:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        where = (self.address, port)
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", where)]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        raise NotImplementedError


async def test_a_peer_that_moves_to_another_address() -> None:
    """Its name is resolved for each attempt: no name, an address, another address."""
    resolver = Resolver("")
    trio.socket.set_custom_hostname_resolver(resolver)
    port = free_port()
    async with open_node(("queen-1.queen-mesh", port)) as node:
        [state] = node.mesh.peers
        await wait_until(lambda: resolver.asked > 1)
        for address in ("127.0.0.2", "127.0.0.3"):
            resolver.address = address
            async with open_peer(address, port) as peer:
                link = await connected(peer, node)
                assert state.resolved_ip == address
                await link.stream.aclose()


async def test_a_name_that_no_resolver_can_be_asked_for() -> None:
    """`a..b` can't be encoded: unreachable like any other, nothing crashes."""
    with capture_logs() as lines:
        async with open_node(("a..b", 1)):
            await wait_until(lambda: [line for line in lines if line["log_level"] == "debug"])
    assert [line["event"] for line in lines if line["log_level"] in ("warning", "error")] == [
        "mesh peer unreachable"
    ]


async def test_the_backoff(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    """From 250 ms, doubling to 5 s, each shortened by up to half."""
    times: list[float] = []

    async def open_tcp_stream(host: str, port: int) -> None:
        times.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(trio, "open_tcp_stream", open_tcp_stream)
    with trio.move_on_after(60):
        await Dialer(Peer("peer", 1), "node", b"", 1.0, None, lambda nonce: None).serve()
    gaps = [after - before for before, after in pairwise(times)]
    assert len(gaps) > 10
    for n, gap in enumerate(gaps):
        most = min(BACKOFF_FIRST_SECONDS * 2**n, BACKOFF_MAX_SECONDS)
        assert most / 2 <= gap <= most
    assert len(set(gaps[6:])) > 1


async def test_a_link_that_lasted_is_dialled_again_soon(mock_clock: MockClock) -> None:
    async with open_peer() as peer, open_node(peer_address(peer)) as node:
        for _ in range(4):  # the backoff grows
            link = await connected(peer, node)
            await link.stream.aclose()
            await wait_until(lambda: not node.mesh.peers[0].connected)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(MORE_THAN_THE_BACKOFF)
        link = await connected(peer, node)
        mock_clock.jump(HEALTHY_SECONDS)
        await link.stream.aclose()
        await wait_until(lambda: not node.mesh.peers[0].connected)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(BACKOFF_FIRST_SECONDS)
        link = await connected(peer, node)
        await link.stream.aclose()


async def test_a_host_that_is_gone_is_noticed_by_the_kernel() -> None:
    """No test can pull a cable here; but the kernel was told how long to wait."""
    async with open_peer() as peer:
        tcp = await trio.open_tcp_stream("127.0.0.1", peer.port)
        _bound_silence(tcp)
        assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == WRITE_SECONDS * 1000
        await tcp.aclose()
