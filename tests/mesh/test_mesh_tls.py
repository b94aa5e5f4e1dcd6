"""Mutual TLS between nodes: only who shows a certificate of the authority is heard."""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from queen_protocol import Hello, QueueConfigSet
from queen_trio.errors import ConfigError
from queen_trio.mesh.tls import load_tls
from tests.certificates import Authority, Files
from tests.mesh.nodes import (
    TENANT,
    dial,
    free_port,
    hello,
    open_node,
    open_peer,
    sync_config,
    wait_closed,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def tls(files: Files) -> dict[str, Any]:
    return {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}


async def test_two_nodes(authority: Authority) -> None:
    a, b = free_port(), free_port()
    with capture_logs() as lines:
        async with (
            open_node(
                ("127.0.0.1", b), server_id="a", mesh_port=a, **tls(authority.issue("a"))
            ) as one,
            open_node(
                ("127.0.0.1", a), server_id="b", mesh_port=b, **tls(authority.issue("b"))
            ) as two,
        ):
            await wait_until(lambda: one.mesh.peers[0].connected and two.mesh.peers[0].connected)
            one.mesh.hints.queue_changed("from a")
            two.mesh.hints.queue_changed("from b")
            await wait_until(lambda: two.received.calls == [("changed", "from a")])
            await wait_until(lambda: one.received.calls == [("changed", "from b")])
            assert one.mesh.statistics().servers_alive == ["b"]
    assert {line["tls"] for line in lines if line["event"] == "mesh"} == {"mutual"}


async def test_a_dialer_without_tls(authority: Authority) -> None:
    async with open_node(**tls(authority.issue("a"))) as node:
        async with await dial(node) as stream:
            await stream.send_all(hello())
            # TLS answers with an alert, the only thing that a listener ever writes.
            await stream.receive_some(100)
        await wait_until(lambda: node.refused("tls") == 1)
        assert node.mesh.statistics().handshake_failures == 1
        stream = await dial(node)
        await stream.aclose()  # a port probe
        await wait_until(lambda: not node.mesh._listener._waiting)
        assert node.refused("tls") == 1


@pytest.mark.parametrize("shows", ["nothing", "another authority's"])
async def test_a_dialer_without_a_good_certificate(
    authority: Authority, shows: str, tmp_path: Path
) -> None:
    """The secret alone doesn't help."""
    context = ssl.create_default_context(cafile=authority.file)
    if shows != "nothing":
        files = Authority(tmp_path, "another").issue("b")
        context.load_cert_chain(files.cert, files.key)
    async with open_node(**tls(authority.issue("a"))) as node:
        for _ in range(2):
            tcp = await dial(node)
            stream = trio.SSLStream(tcp, context, server_hostname="127.0.0.1")
            # With TLS 1.3 our side of the handshake succeeds before the node refuses.
            await stream.do_handshake()
            # An alert, or, where that was lost to the reset, the end of the stream.
            with suppress(trio.BrokenResourceError):
                assert await stream.receive_some(1) == b""
            await trio.aclose_forcefully(stream)
        await wait_until(lambda: node.refused("tls") == 2)
        assert node.mesh.statistics().messages_received == 0


async def test_a_stalled_handshake_counts_against_the_five_seconds(
    authority: Authority, mock_clock: trio.testing.MockClock
) -> None:
    async with open_node(**tls(authority.issue("a"))) as node, await dial(node) as stream:
        await wait_until(lambda: node.mesh._listener._waiting)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(5)
        await wait_closed(stream)
        assert node.refused("late_hello") == 1


@pytest.mark.parametrize("shows", ["no TLS", "another authority's", "another address"])
async def test_a_listener_without_a_good_certificate(
    authority: Authority, shows: str, tmp_path: Path
) -> None:
    """Nothing is said to it, not even HELLO."""
    there: Files | None = None
    if shows == "another authority's":
        there = Authority(tmp_path, "another").issue("b")
    elif shows == "another address":
        there = authority.issue("elsewhere", "127.0.0.9")
    with capture_logs() as lines:
        async with open_peer() as peer:
            address = ("127.0.0.1", peer.port)
            async with open_node(address, **tls(authority.issue("a"))) as node:
                for _ in range(2):
                    stream = (await peer.accept()).stream
                    if there is None:
                        assert b"of the mesh" not in await stream.receive_some(4096)
                        await stream.send_all(b"SSH-2.0-OpenSSH_9.2\r\n")
                    else:
                        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                        context.load_cert_chain(there.cert, there.key)
                        secured = trio.SSLStream(stream, context, server_side=True)
                        with pytest.raises(trio.BrokenResourceError):
                            await secured.receive_some(1)
                    await trio.aclose_forcefully(stream)
                assert node.mesh.statistics().messages_sent == 0
    [line] = [line for line in lines if line["log_level"] == "warning"]
    assert line["event"] == "mesh peer unreachable"
    assert "SSL" in line["reason"]


async def test_tls_on_the_wire_is_the_same_protocol(authority: Authority) -> None:
    files = authority.issue("b")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    async with open_peer() as peer:
        address = ("127.0.0.1", peer.port)
        async with open_node(address, **tls(authority.issue("a"))) as node:
            link = await peer.accept()
            link.stream = trio.SSLStream(link.stream, context, server_side=True)
            assert isinstance(await link.receive(), Hello)
            await wait_until(lambda: node.mesh.peers[0].connected)
            node.mesh.hints.queue_changed("q")
            assert await link.receive() == QueueConfigSet("q", TENANT)


def test_files_that_cant_be_used(authority: Authority, tmp_path: Path) -> None:
    """One sentence that names the variable and the file; nothing asks the terminal."""
    good, other = authority.issue("good"), authority.issue("other")
    locked = authority.issue("locked", password=b"secret")
    absent, garbage = tmp_path / "absent", tmp_path / "garbage"
    garbage.write_text("no PEM")
    for files, variable, named in (
        (Files(good.cert, good.key, absent), "QUEEN_MESH_TLS_CA", absent),
        (Files(good.cert, good.key, garbage), "QUEEN_MESH_TLS_CA", garbage),
        (Files(garbage, good.key, good.ca), "QUEEN_MESH_TLS_CERT", garbage),
        (Files(good.cert, garbage, good.ca), "QUEEN_MESH_TLS_KEY", garbage),
        (Files(good.cert, absent, good.ca), "QUEEN_MESH_TLS_KEY", absent),
        (Files(good.cert, other.key, good.ca), "QUEEN_MESH_TLS_KEY", other.key),
        (locked, "QUEEN_MESH_TLS_KEY", locked.key),
    ):
        with pytest.raises(ConfigError) as caught:
            load_tls(sync_config(**tls(files)))
        [fault] = caught.value.faults
        assert f"{variable}={named}" in fault
        assert "can't be used" in fault
    assert load_tls(sync_config(**tls(good))) is not None
    assert load_tls(sync_config()) is None
