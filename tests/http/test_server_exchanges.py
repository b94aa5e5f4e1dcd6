"""What a well-behaved client gets, and an application that isn't: the same on both servers."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from queen_trio.config.server import HttpServer
from tests.http.conformance import LIMITS, Target, request, running

both = pytest.mark.parametrize("server", HttpServer)


@both
async def test_the_scope_is_complete(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as client:
        answer = await client.ask(
            request(
                "/a%20b/%C3%A9?x=1&y=%20",
                "X-Mixed-Case:  padded value\t",
                method="POST",
                body=b"hi",
            )
        )
        seen = answer.json()
        peer = client.stream.socket.getsockname()
    assert answer.status == 200
    assert seen["client"] == list(peer)
    assert seen["server"] == list(bench.address)
    assert ["x-mixed-case", "padded value"] in seen["headers"]
    assert ["host", "test"] in seen["headers"]
    del seen["client"], seen["server"], seen["headers"]
    assert seen == {
        "method": "POST",
        "path": "/a b/é",
        "raw_path": "/a%20b/%C3%A9",
        "query_string": "x=1&y=%20",
        "http_version": "1.1",
        "scheme": "http",
        "body": "hi",
    }


@both
async def test_answers_have_a_date_and_don_t_name_the_server(server: HttpServer) -> None:
    async with running(server) as bench:
        answer = await bench.ask(request())
    assert answer.headers["date"].endswith("GMT")
    assert "server" not in answer.headers


async def test_an_absolute_target_is_reduced_to_its_path() -> None:
    # hypercorn passes it on as it is.
    async with running(HttpServer.LEAN) as bench:
        for target, path, query in [
            ("http://other/a?b", "/a", "b"),
            ("http://other", "/", ""),
            ("http://other?b=/", "/", "b=/"),
        ]:
            seen = (await bench.ask(request(target))).json()
            assert (seen["path"], seen["query_string"]) == (path, query)
        assert (await bench.ask(request("*", method="OPTIONS"))).json()["path"] == "*"


@both
async def test_a_connection_serves_many_requests(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as client:
        for i in range(50):
            answer = await client.ask(request(method="POST", body=b"%d" % i))
            assert answer.json()["body"] == str(i)
            assert "connection" not in answer.headers


@both
async def test_byte_by_byte(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as client:
        await client.send_bytewise(request(method="POST", body=b"slowly") + request("/second"))
        assert (await client.answer()).json()["body"] == "slowly"
        assert (await client.answer()).json()["path"] == "/second"


@both
async def test_pipelined_requests_are_answered_in_order(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as client:
        await client.send(
            b"".join(request(f"/{i}", method="POST", body=b"x" * i) for i in range(1, 100))
        )
        for i in range(1, 100):
            seen = (await client.answer()).json()
            assert (seen["path"], len(seen["body"])) == (f"/{i}", i)


@both
async def test_a_body_at_the_limit_passes_whole(server: HttpServer) -> None:
    body = bytes(range(1, 251)) * (LIMITS.max_body // 250)
    async with running(server) as bench:
        answer = await bench.ask(request(method="POST", body=body))
    assert answer.json()["body"].encode("latin-1") == body


CHUNKED = (
    b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\nA;name=value\r\n0123456789\r\n1\r\n!\r\n0\r\nX-Trailer: dropped\r\n\r\n"
)


@both
async def test_chunked_bodies_whole_bytewise_and_cut(server: HttpServer) -> None:
    async with running(server) as bench:
        async with bench.client() as client:
            for send in (client.send, client.send_bytewise):
                await send(CHUNKED)
                seen = (await client.answer()).json()
                assert seen["body"] == "abc0123456789!"
                assert "x-trailer" not in dict(seen["headers"])
        served = bench.app.seen["/echo"]
        for end in range(len(CHUNKED) - 2, CHUNKED.index(b"\r\n\r\n") + 4, -5):
            async with bench.client() as client:
                await client.send(CHUNKED[:end])
                await client.stream.send_eof()
                await client.rest()
        assert bench.app.seen["/echo"] == served, "a cut body reached the application"


@both
async def test_head_is_get_without_the_body(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as client:
        await client.send(request("/big?1234", method="HEAD"))
        answer = await client.answer(to_head=True)
        assert (answer.status, answer.headers["content-length"]) == (200, "1234")
        await client.send(request(Target.STREAM.value, method="HEAD"))
        assert (await client.answer(to_head=True)).status == 200
        assert (await client.ask(request())).status == 200, "the stream is still in step"


@both
@pytest.mark.parametrize(("target", "status"), [(Target.EMPTY, 204), (Target.UNCHANGED, 304)])
async def test_no_body_and_no_length(server: HttpServer, target: Target, status: int) -> None:
    async with running(server) as bench, bench.client() as client:
        answer = await client.ask(request(target.value))
        assert answer.status == status
        assert not {"content-length", "transfer-encoding"} & answer.headers.keys()
        assert (await client.ask(request())).status == 200, "the stream is still in step"


@both
async def test_a_streamed_answer_is_chunked(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as client:
        for _ in range(2):
            answer = await client.ask(request(Target.STREAM.value))
            assert answer.headers["transfer-encoding"] == "chunked"
            assert answer.body == b"one,two,three"


@both
async def test_a_large_answer_arrives_whole(server: HttpServer) -> None:
    async with running(server) as bench, bench.client() as client:
        for size in (0, 1, 300_000, 20_000_000):
            assert len((await client.ask(request(f"/big?{size}"))).body) == size


@both
async def test_http_1_0_closes_by_default(server: HttpServer) -> None:
    async with running(server) as bench:
        async with bench.client() as client:
            answer = await client.ask(b"GET /echo HTTP/1.0\r\n\r\n")
            assert answer.json()["http_version"] == "1.0"
            assert answer.headers["connection"] == "close"
            assert await client.rest() == b""
        async with bench.client() as client:
            answer = await client.ask(b"GET /stream HTTP/1.0\r\n\r\n")
            assert "transfer-encoding" not in answer.headers
            assert answer.body == b"one,two,three"


async def test_http_1_0_may_ask_to_stay() -> None:
    # h11, and so hypercorn, always closes.
    async with running(HttpServer.LEAN) as bench, bench.client() as client:
        for _ in range(2):
            answer = await client.ask(b"GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert answer.headers["connection"] == "keep-alive"


@both
async def test_connection_close_is_the_client_s_and_the_application_s_right(
    server: HttpServer,
) -> None:
    async with running(server) as bench:
        for asked in (request(Target.ECHO.value, "Connection: close"), request(Target.CLOSE.value)):
            async with bench.client() as client:
                answer = await client.ask(asked)
                assert (answer.status, answer.headers["connection"]) == (200, "close")
                assert await client.rest() == b""


async def test_bytes_behind_the_last_request_are_not_read() -> None:
    async with running(HttpServer.LEAN) as bench, bench.client() as client:
        await client.send(request(Target.ECHO.value, "Connection: close") + request("/ignored"))
        assert (await client.answer()).status == 200
        assert await client.rest() == b""
    assert not bench.app.seen["/ignored"]


@both
async def test_100_continue(server: HttpServer) -> None:
    head = request(Target.ECHO.value, "Expect: 100-continue", "Content-Length: 2", method="POST")
    async with running(server) as bench, bench.client() as client:
        await client.send(head)
        assert (await client.answer()).status == 100
        assert (await client.ask(b"hi")).json()["body"] == "hi"
        # A client that doesn't wait is not made to.
        await client.send(head + b"hi")
        answer = await client.answer()
        assert answer.status == 200 or (await client.answer()).status == 200


async def test_100_continue_comes_in_turn_and_only_where_a_body_is_accepted() -> None:
    # hypercorn answers 100 before anybody judged the size, and ignores other expectations.
    expecting = "Expect: 100-continue"
    async with running(HttpServer.LEAN) as bench:
        async with bench.client() as client:
            waiting = request("/b", expecting, "Content-Length: 2", method="POST")
            await client.send(request("/a") + waiting)
            assert (await client.answer()).json()["path"] == "/a"
            assert (await client.answer()).status == 100
            assert (await client.ask(b"hi")).json()["path"] == "/b"
            assert (await client.ask(request("/c", expecting))).json()["path"] == "/c"
        too_large = f"Content-Length: {LIMITS.max_body + 1}"
        assert (await bench.ask(request("/", expecting, too_large, method="POST"))).status == 413
        assert (await bench.ask(request("/", "Expect: a miracle"))).status == 417


UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ")


async def test_an_upgrade_is_ignored_and_its_body_read() -> None:
    # curl --http2 and Java's client ask so on a first POST. hypercorn accepts h2c where it can.
    async with running(HttpServer.LEAN) as bench:
        async with bench.client() as client:
            await client.send(request("/a", *UPGRADE) * 3 + request("/b"))
            for path in ("/a", "/a", "/a", "/b"):
                assert (await client.answer()).json()["path"] == path
        chunked = request("/c", *UPGRADE, "Transfer-Encoding: chunked", method="POST")
        for post in (
            request("/c", *UPGRADE, method="POST", body=b"the body"),
            chunked + b"8\r\nthe body\r\n0\r\n\r\n",
        ):
            for bytewise in (False, True):
                async with bench.client() as client:
                    await (client.send_bytewise if bytewise else client.send)(post)
                    answer = await client.answer()
                    assert answer.json()["body"] == "the body"
                    assert answer.headers["connection"] == "close"
        async with bench.client() as client:
            await client.send(request("/d", *UPGRADE, method="POST", body=request("/smuggled")))
            assert (await client.answer()).json()["path"] == "/d"
            assert await client.rest() == b""
    assert not bench.app.seen["/smuggled"]


@both
@pytest.mark.parametrize(
    "target", [Target.BOOM, Target.GROUP, Target.SILENT, Target.INJECT], ids=lambda t: t.name
)
async def test_a_failing_application_is_a_500_logged_once(
    server: HttpServer, target: Target
) -> None:
    with capture_logs() as logs:
        async with running(server) as bench:
            answer = await bench.ask(request(target.value))
            assert (answer.status, answer.json()) == (500, {"error": "internal error"})
            assert (await bench.ask(request())).status == 200
    [entry] = logs
    assert entry["event"] == "http request failed"
    assert entry["target"] == target.value
    assert entry["exc_info"].__traceback__ is not None


@pytest.mark.parametrize(
    "target", [Target.TWO_STARTS, Target.NO_START, Target.UNKNOWN], ids=lambda t: t.name
)
async def test_a_misuse_of_send_is_a_failure(target: Target) -> None:
    with capture_logs() as logs:
        async with running(HttpServer.LEAN) as bench:
            assert (await bench.ask(request(target.value))).status == 500
    assert [entry["event"] for entry in logs] == ["http request failed"]


async def test_a_failure_behind_the_answer_is_logged_and_harms_nothing() -> None:
    with capture_logs() as logs:
        async with running(HttpServer.LEAN) as bench, bench.client() as client:
            assert (await client.ask(request(Target.TWO_ENDS.value))).body == b"once"
            assert (await client.ask(request())).status == 200
    assert [entry["event"] for entry in logs] == ["http request failed"]


@both
async def test_a_failure_behind_the_head_closes(server: HttpServer) -> None:
    with capture_logs() as logs:
        async with running(server) as bench:
            async with bench.client() as client:
                await client.send(request(Target.BOOM_LATE.value))
                with pytest.raises(EOFError):
                    await client.answer()
            assert (await bench.ask(request())).status == 200
    assert [entry["event"] for entry in logs] == ["http request failed"]


async def test_a_body_shorter_than_its_length_is_a_failure() -> None:
    # The lean server sees it before the head leaves; hypercorn closes behind the head.
    with capture_logs() as logs:
        async with running(HttpServer.LEAN) as bench:
            assert (await bench.ask(request(Target.SHORT.value))).status == 500
        async with running(HttpServer.HYPERCORN) as bench, bench.client() as client:
            await client.send(request(Target.SHORT.value))
            with pytest.raises(EOFError):
                await client.answer()
    assert [entry["event"] for entry in logs] == ["http request failed"] * 2
