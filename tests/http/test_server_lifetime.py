"""Clients that come in crowds, go, or stall; and the end of the server."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from queen_trio.config.server import HttpServer
from queen_trio.errors import QueenError
from queen_trio.http.listeners import bind_listeners
from tests.http.conformance import LIMITS, Bench, Client, Target, request, running, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

both = pytest.mark.parametrize("server", HttpServer)

PARK = request(Target.PARK.value)

CROWD = 500

HUGE = 50_000_000
"""Bytes; more than the buffers of two sockets."""


@both
async def test_a_crowd_is_served(server: HttpServer) -> None:
    async with running(server) as bench, trio.open_nursery() as nursery:

        async def visit(number: int) -> None:
            async with bench.client() as client:
                for _ in range(2):
                    answer = await client.ask(request(f"/{number}"))
                    assert answer.json()["path"] == f"/{number}"

        for number in range(CROWD):
            nursery.start_soon(visit, number)


@both
async def test_a_pipelining_client_does_not_starve_others(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as greedy, bench.client() as modest:
        assert (await modest.ask(request())).status == 200
        await greedy.send(request("/greedy") * 1000)
        await wait_for(lambda: bench.app.seen["/greedy"] > 0)
        assert (await modest.ask(request())).status == 200
        assert bench.app.seen["/greedy"] < 500


@both
@pytest.mark.parametrize("target", [Target.PARK, Target.RECEIVE], ids=lambda t: t.name)
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_client_that_goes_frees_its_parked_request(
    server: HttpServer, target: Target, reset: bool
) -> None:
    async with running(server) as bench:
        async with contextlib.AsyncExitStack() as clients:
            for _ in range(20):
                client = await clients.enter_async_context(bench.client())
                await client.send(request(target.value))
                if reset:
                    client.stream.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                    )
            await wait_for(lambda: bench.app.parked == 20)
            assert bench.app.freed == 0
        await wait_for(lambda: bench.app.freed == 20)
        assert bench.app.parked == 0


@both
async def test_bytes_behind_a_parked_request_are_no_disconnect(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as client:
        await client.send(PARK)
        await wait_for(lambda: bench.app.parked == 1)
        await client.send(request("/next"))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert bench.app.parked == 1
        bench.app.release.set()
        assert (await client.answer()).status == 204
        assert (await client.answer()).json()["path"] == "/next"


@both
async def test_a_write_to_a_client_that_went_harms_nobody(server: HttpServer) -> None:
    with capture_logs() as logs:
        async with running(server) as bench:
            async with bench.client() as client:
                await client.send(request(f"/big?{HUGE}"))
                await client.answer(to_head=True)
            await wait_for(lambda: bench.app.ended["/big"] == 1)
            assert (await bench.ask(request())).status == 200
    assert logs == [], "nobody's fault"
    # The lean server tells the application; hypercorn doesn't.
    assert bench.app.failed_writes == (server is HttpServer.LEAN)


async def stalled_client(bench: Bench) -> Client:
    """A client that asked for more than the kernel's buffers hold, and never reads."""
    stream = await bench.connect()
    await stream.send_all(request(f"/big?{HUGE}"))
    await wait_for(lambda: bench.app.seen["/big"] > 0)
    return Client(stream)


@both
async def test_a_client_that_stops_reading_is_dropped(server: HttpServer) -> None:
    impatient = attrs.evolve(LIMITS, write_seconds=0.5)
    async with running(server, limits=impatient) as bench:
        client = await stalled_client(bench)
        await wait_for(lambda: bench.app.ended["/big"] == 1)
        assert len(await client.rest()) < HUGE
        await client.stream.aclose()
        assert bench.app.failed_writes == (server is HttpServer.LEAN)


# Drain ------------------------------------------------------------------------------------------


async def refuses_connections(bench: Bench) -> bool:
    try:
        async with await bench.connect():
            return False
    except OSError:
        return True


@both
async def test_drain_closes_the_idle_and_finishes_the_rest(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as idle, bench.client() as busy:
        assert (await idle.ask(request())).status == 200
        await busy.send(PARK)
        await wait_for(lambda: bench.app.parked == 1)
        bench.drain.set()
        assert await idle.rest() == b""
        assert await refuses_connections(bench)
        assert not bench.stopped.is_set()
        bench.app.release.set()
        answer = await busy.answer()
        assert (answer.status, answer.headers["connection"]) == (204, "close")
        assert await busy.rest() == b""
        await bench.stopped.wait()


@both
async def test_a_body_underway_at_drain_is_served(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as client:
        await client.send(request("/echo", "Content-Length: 4", method="POST") + b"ab")
        await trio.testing.wait_all_tasks_blocked(0.01)
        bench.drain.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        answer = await client.ask(b"cd")
        assert (answer.json()["body"], answer.headers["connection"]) == ("abcd", "close")
        await bench.stopped.wait()


async def test_requests_at_the_moment_of_drain_are_served() -> None:
    # hypercorn drops what it hasn't read yet.
    async with (
        running(HttpServer.LEAN) as bench,
        bench.client() as idle,
        bench.client() as fresh,
        bench.client() as silent,
    ):
        assert (await idle.ask(request())).status == 200
        await fresh.send(b"GET /fresh HTTP/1.1\r\n")
        await trio.testing.wait_all_tasks_blocked(0.01)
        await idle.send(request("/idle"))
        bench.drain.set()
        assert (await idle.answer()).json()["path"] == "/idle"
        await fresh.send(b"Host: test\r\n\r\n")
        assert (await fresh.answer()).json()["path"] == "/fresh"
        assert await silent.rest() == b""
        await bench.stopped.wait()


async def test_the_backlog_at_the_moment_of_drain_is_served() -> None:
    async with running(HttpServer.LEAN) as bench:
        # The kernel connects them; the server doesn't run meanwhile.
        waiting = [socket.create_connection(bench.address) for _ in range(100)]
        for sock in waiting:
            sock.sendall(request("/backlog"))
            sock.setblocking(False)
        bench.drain.set()
        for sock in waiting:
            async with trio.SocketStream(trio.socket.from_stdlib_socket(sock)) as stream:
                answer = await Client(stream).answer()
            assert (answer.json()["path"], answer.headers["connection"]) == ("/backlog", "close")
        await bench.stopped.wait()


@both
async def test_the_drain_deadline_cancels_what_is_left(server: HttpServer) -> None:
    async with running(server, drain_seconds=0.1) as bench, bench.client() as client:
        await client.send(PARK)
        await wait_for(lambda: bench.app.parked == 1)
        bench.drain.set()
        assert await client.rest() == b""
        await bench.stopped.wait()


@both
async def test_an_error_beside_the_deadline_s_cancellation_is_only_logged(
    server: HttpServer,
) -> None:
    with capture_logs() as logs:
        async with running(server, drain_seconds=0.1) as bench, bench.client() as client:
            await client.send(request(Target.STUBBORN.value))
            await wait_for(lambda: bench.app.seen["/stubborn"] == 1)
            bench.drain.set()
            await bench.stopped.wait()
    assert "http request failed" in [entry["event"] for entry in logs]


@both
async def test_a_client_that_stops_reading_cannot_stall_the_drain(server: HttpServer) -> None:
    impatient = attrs.evolve(LIMITS, write_seconds=1)
    limits = LIMITS if server is HttpServer.LEAN else impatient
    async with running(server, limits=limits, drain_seconds=0.1) as bench:
        client = await stalled_client(bench)
        async with client.stream:
            bench.drain.set()
            with trio.fail_after(8):
                await bench.stopped.wait()


@both
async def test_a_slow_head_cannot_stall_the_drain(server: HttpServer) -> None:
    async with running(server, drain_seconds=5) as bench, bench.client() as client:
        await client.send(b"GET /echo HTTP/1.1\r\nHost")
        await trio.testing.wait_all_tasks_blocked(0.01)
        bench.drain.set()
        with trio.fail_after(3):
            await bench.stopped.wait()
        await client.rest()


@both
async def test_cancellation_leaves_no_socket_behind(server: HttpServer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with running(server) as bench, bench.client() as client, bench.client():
        await client.send(PARK)
        await wait_for(lambda: bench.app.parked == 1)
    assert len(os.listdir("/proc/self/fd")) == before


# Listeners --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bind_addr", ["127.0.0.1", "localhost", "", "*", "0.0.0.0"])
async def test_listeners_share_one_port(bind_addr: str) -> None:
    listeners = await bind_listeners(bind_addr, 0)
    with contextlib.ExitStack() as opened:
        for listener in listeners:
            opened.enter_context(listener)
        [port] = {listener.getsockname()[1] for listener in listeners}
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            assert stream.socket.getpeername()[1] == port
        with pytest.raises(QueenError, match="in use"):
            await bind_listeners(bind_addr, port)


async def test_ipv6() -> None:
    [listener] = await bind_listeners("[::1]", 0)
    with listener:
        async with await trio.open_tcp_stream("::1", listener.getsockname()[1]):
            pass


async def test_accepts_resume_when_descriptors_are_free_again() -> None:
    async with running(HttpServer.LEAN) as bench:
        # Connected by the kernel at once: the server hasn't run yet.
        with socket.create_connection(bench.address) as sock, capture_logs() as logs:
            with no_free_descriptors():
                await wait_for(lambda: bool(logs))
            sock.setblocking(False)
            sock.send(request())
            await trio.lowlevel.wait_readable(sock)
            assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
    assert {entry["event"] for entry in logs} == {"http accept failed"}


@contextlib.contextmanager
def no_free_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard)
    )
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        yield
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
