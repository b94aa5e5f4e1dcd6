"""What neither server lets through: smuggling, oversize and slowness."""

from __future__ import annotations

import contextlib

import attrs
import pytest
import trio
import trio.testing

from queen_trio.config.server import HttpServer
from tests.http.conformance import LIMITS, Client, request, running

both = pytest.mark.parametrize("server", HttpServer)

SMUGGLED = request("/smuggled")

POST = b"POST /echo HTTP/1.1\r\nHost: test\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

# What is sent, and the status of each server. Where hypercorn answers 200, h11 reads the bytes in
# the one way that is harmless on its own (a bare LF ends a line, headers unfold, equal lengths are
# one); a proxy in front that reads them otherwise is why the lean server refuses them.
AMBIGUOUS: dict[str, tuple[bytes, int, int]] = {
    "length and chunked": (
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, 400,
    ),
    "chunked and length": (
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400, 400,
    ),
    "two lengths": (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400, 400),
    "equal lengths": (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400, 200),
    "a list of lengths": (POST + b"Content-Length: 3, 3\r\n\r\nabc", 400, 200),
    "length +3": (POST + b"Content-Length: +3\r\n\r\nabc", 400, 400),
    "length -3": (POST + b"Content-Length: -3\r\n\r\nabc", 400, 400),
    "length 0x3": (POST + b"Content-Length: 0x3\r\n\r\nabc", 400, 400),
    "length 3 3": (POST + b"Content-Length: 3 3\r\n\r\nabc", 400, 400),
    "empty length": (POST + b"Content-Length:\r\n\r\nabc", 400, 400),
    "overflowing length": (POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\nabc", 400, 400),
    "gzip, chunked": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, 501),
    "chunked, gzip": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400, 501),
    "chunked twice": (
        POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", 400, 501,
    ),
    "identity": (POST + b"Transfer-Encoding: identity\r\n\r\nabc", 501, 501),
    "xchunked": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501, 501),
    "vertical tab chunked": (POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400, 400),
    "chunked in HTTP/1.0": (
        b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, 400,
    ),
    "space before the colon": (POST + b"Content-Length : 3\r\n\r\nabc", 400, 400),
    "folded header": (POST + b"X: a\r\n Content-Length: 3\r\n\r\n", 400, 200),
    "folded first header": (b"GET /echo HTTP/1.1\r\n Host: test\r\n\r\n", 400, 400),
    "bare LF": (b"GET /echo HTTP/1.1\nHost: test\n\n", 400, 200),
    "one bare LF": (b"GET /echo HTTP/1.1\r\nHost: test\nX: y\r\n\r\n", 400, 200),
    "bare CR": (b"GET /echo HTTP/1.1\r\nHost: test\rX: y\r\n\r\n", 400, 400),
    "NUL": (b"GET /echo HTTP/1.1\r\nHost: test\r\nX: a\0b\r\n\r\n", 400, 400),
    "no colon": (b"GET /echo HTTP/1.1\r\nHost: test\r\nX\r\n\r\n", 400, 400),
    "no host": (b"GET /echo HTTP/1.1\r\n\r\n", 400, 400),
    "two hosts": (b"GET /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, 400),
    "space in the target": (b"GET /e cho HTTP/1.1\r\nHost: test\r\n\r\n", 400, 400),
    "bytes in the target": (b"GET /\xff HTTP/1.1\r\nHost: test\r\n\r\n", 400, 400),
    "lower-case method": (b"get /echo HTTP/1.1\r\nHost: test\r\n\r\n", 400, 200),
    "CONNECT": (b"CONNECT a:80 HTTP/1.1\r\nHost: test\r\n\r\n", 501, 501),
    "HTTP/0.9": (b"GET /echo\r\n\r\n", 505, 400),
    "HTTP/1.2": (b"GET /echo HTTP/1.2\r\nHost: test\r\n\r\n", 505, 200),
    "HTTP/2.0": (b"GET /echo HTTP/2.0\r\nHost: test\r\n\r\n", 505, 200),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, 400),
}  # fmt: skip

BAD_CHUNKS = {
    "not a number": b"zz\r\nabc\r\n0\r\n\r\n",
    "0x": b"0x3\r\nabc\r\n0\r\n\r\n",
    "negative": b"-3\r\nabc\r\n0\r\n\r\n",
    "empty": b"\r\nabc\r\n0\r\n\r\n",
    "overflow": b"f" * 17 + b"\r\nabc\r\n0\r\n\r\n",
    "too long": b"3\r\nabcd\r\n0\r\n\r\n",
    "no line end": b"3\r\nabc0\r\n\r\n",
    "bare CR": b"3\rabc\r\n0\r\n\r\n",
}


@both
@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_ambiguous_requests(server: HttpServer, name: str) -> None:
    data, lean, hypercorn = AMBIGUOUS[name]
    expected = lean if server is HttpServer.LEAN else hypercorn
    async with running(server) as bench, bench.client() as client:
        await client.send(data + SMUGGLED)
        if expected == 200:
            assert (await client.answer()).status == 200
            return
        if server is HttpServer.LEAN:
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (expected, "close")
            assert answer.json()["error"]
            assert await client.rest() == b""
        else:
            # Its reading task may close before the guard has answered.
            reply = await client.rest()
            assert not reply or reply.startswith(b"HTTP/1.1 %d " % expected)
        assert not bench.app.seen


@both
@pytest.mark.parametrize("name", BAD_CHUNKS)
async def test_bad_chunks(server: HttpServer, name: str) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with running(server) as bench, bench.client() as client:
        await client.send(head + BAD_CHUNKS[name] + SMUGGLED)
        await client.stream.send_eof()
        if server is HttpServer.LEAN:
            answer = await client.answer()
            assert answer.status == 400
            assert answer.json()["error"].startswith("malformed request: ")
        # hypercorn has begun the exchange by then: it answers 400 or only closes.
        await client.rest()
        assert not bench.app.seen


async def test_good_requests_before_a_bad_one_are_answered() -> None:
    async with running(HttpServer.LEAN) as bench, bench.client() as client:
        await client.send(request("/1") + request("/2") + b"nonsense\r\n\r\n" + SMUGGLED)
        assert (await client.answer()).json()["path"] == "/1"
        assert (await client.answer()).json()["path"] == "/2"
        assert (await client.answer()).status == 400
        assert await client.rest() == b""
    assert bench.app.seen.total() == 2


async def test_the_http_2_preface_is_named() -> None:
    # hypercorn speaks it.
    async with running(HttpServer.LEAN) as bench:
        answer = await bench.ask(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert answer.status == 505
    assert "HTTP/1.1" in answer.json()["error"]


@both
@pytest.mark.parametrize(
    ("lines", "target", "lean", "hypercorn"),
    [
        (["X: " + "x" * LIMITS.max_head], "/echo", 431, 431),
        ([f"X-{i}: " + "x" * 500 for i in range(9)], "/echo", 431, 431),
        (["Y" * LIMITS.max_head + ": x"], "/echo", 431, 431),
        ([f"X-{i}: y" for i in range(LIMITS.max_headers)], "/echo", 431, 431),
        ([], "/" + "x" * LIMITS.max_target, 414, 414),
        ([], "/?" + "x" * LIMITS.max_target, 414, 414),
    ],
    ids=["one large", "many large", "a large name", "many small", "target", "query"],
)
async def test_head_limits(
    server: HttpServer, lines: list[str], target: str, lean: int, hypercorn: int
) -> None:
    async with running(server) as bench:
        answer = await bench.ask(request(target, *lines))
        assert answer.status == (lean if server is HttpServer.LEAN else hypercorn)
        assert answer.headers["connection"] == "close"
    assert not bench.app.seen


@both
async def test_just_below_the_head_limits(server: HttpServer) -> None:
    async with running(server) as bench:
        few = [f"X-{i}: y" for i in range(LIMITS.max_headers - 1)]
        assert (await bench.ask(request("/echo", *few))).status == 200
        assert (await bench.ask(request("/" + "x" * (LIMITS.max_target - 1)))).status == 200
        large = "X: " + "x" * (LIMITS.max_head - 100)
        assert (await bench.ask(request("/echo", large))).status == 200


ENDLESS = {
    "header value": b"GET /echo HTTP/1.1\r\nHost: test\r\nX: ",
    "header name": b"GET /echo HTTP/1.1\r\nHost: test\r\n",
    "target": b"GET /",
    "chunk extension": POST + b"Transfer-Encoding: chunked\r\n\r\n3;",
    "trailer": POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ",
}


@both
@pytest.mark.parametrize("name", ENDLESS)
async def test_endless_elements_end(server: HttpServer, name: str) -> None:
    async with running(server) as bench, bench.client() as client:
        await client.send(ENDLESS[name])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send_until_closed, client, b"x" * 1000)
            reply = await client.rest()
        if server is HttpServer.LEAN:
            assert reply.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 414 "))
        assert not bench.app.seen


async def _send_until_closed(client: Client, data: bytes) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        while True:
            await client.send(data)
            await trio.sleep(0.001)


@both
async def test_a_declared_body_above_the_limit_is_refused_unread(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as client:
        answer = await client.ask(
            request("/echo", f"Content-Length: {LIMITS.max_body + 1}", method="POST")
        )
        assert answer.status == 413
        assert str(LIMITS.max_body) in answer.json()["error"]
        assert answer.headers["connection"] == "close"


@both
async def test_a_chunked_body_above_the_limit_is_refused_underway(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as client:
        await client.send(CHUNKED)
        piece = b"2710\r\n" + b"x" * 10_000 + b"\r\n"
        for _ in range(LIMITS.max_body // 10_000 + 1):
            await client.send(piece)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        # The rest of a chunk or two still on its way doesn't reset the connection.
        await client.send(piece)
    assert not bench.app.seen


async def test_a_client_that_sends_all_of_too_much_still_reads_why() -> None:
    async with running(HttpServer.LEAN) as bench, bench.client() as client:
        await client.send(request("/echo", method="POST", body=b"x" * 5_000_000))
        answer = await client.answer()
        assert answer.status == 413


@both
async def test_bodies_underway_are_bounded_together(server: HttpServer) -> None:
    limits = attrs.evolve(LIMITS, max_bodies=LIMITS.max_body)
    half = b"x" * (LIMITS.max_body // 2)
    head = request("/echo", f"Content-Length: {2 * len(half)}", method="POST")
    async with running(server, limits=limits) as bench, bench.client() as second:
        for _ in range(3):  # What the first holds comes back when it goes.
            async with bench.client() as first:
                await first.send(head + half)
                await trio.testing.wait_all_tasks_blocked(0.02)
                async with bench.client() as refused:
                    answer = await refused.ask(head + half + b"x" * 100)
                    assert answer.status == 503
                assert (await second.ask(request())).status == 200
            await trio.testing.wait_all_tasks_blocked(0.02)
        for _ in range(3):  # And when it is answered.
            assert (await second.ask(head + half + half)).status == 200


QUICK = attrs.evolve(
    LIMITS,
    max_headers=100_000,
    max_head=1_000_000,
    header_seconds=0.2,
    body_seconds=0.2,
    keep_alive_seconds=0.2,
    sweep_seconds=0.02,
    min_body_rate=1_000_000,
)


@both
async def test_slow_loris(server: HttpServer) -> None:
    async with running(server, limits=QUICK) as bench, bench.client() as client:
        await client.send(b"GET /echo HTTP/1.1\r\nHost: test\r\n")
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send_until_closed, client, b"X:y\r\n")
            reply = await client.rest()
        assert trio.current_time() - started >= 0.9 * QUICK.header_seconds
        if server is HttpServer.LEAN:
            assert reply.startswith(b"HTTP/1.1 408 ")
        assert not bench.app.seen


@both
async def test_a_silent_connection_is_closed_without_a_word(server: HttpServer) -> None:
    async with running(server, limits=QUICK) as bench:
        async with bench.client() as client:
            assert await client.rest() == b""
        async with bench.client() as client:
            assert (await client.ask(request())).status == 200
            assert await client.rest() == b""


async def test_a_late_head_is_a_408() -> None:
    # hypercorn closes without a word.
    async with running(HttpServer.LEAN, limits=QUICK) as bench, bench.client() as client:
        answer = await client.ask(b"GET /echo HTTP/1.1\r\nHost")
        assert (answer.status, answer.json()) == (408, {"error": "the head took too long"})
        assert await client.rest() == b""


@both
@pytest.mark.parametrize("trickle", [False, True])
async def test_a_late_body_is_a_408(server: HttpServer, trickle: bool) -> None:
    async with running(server, limits=QUICK) as bench, bench.client() as client:
        await client.send(request("/echo", "Content-Length: 5000", method="POST"))
        async with trio.open_nursery() as nursery:
            if trickle:

                async def send_slowly() -> None:
                    while True:
                        await client.send(b"x")
                        await trio.sleep(0.01)

                nursery.start_soon(send_slowly)
            answer = await client.answer()
            assert (answer.status, answer.json()) == (408, {"error": "the body took too long"})
            nursery.cancel_scope.cancel()
    assert not bench.app.seen


@both
async def test_times_don_t_run_while_the_application_works(server: HttpServer) -> None:
    async with running(server, limits=QUICK) as bench, bench.client() as client:
        await client.send(request("/park"))
        with trio.move_on_after(3 * QUICK.keep_alive_seconds):
            await client.answer()
            pytest.fail("answered without a reason")
        bench.app.release.set()
        assert (await client.answer()).status == 204
