"""TLS and HTTP/2, which only hypercorn speaks here."""

from __future__ import annotations

import ssl
import subprocess
from typing import TYPE_CHECKING

import httpx
import pytest
import trio

from queen_trio.config.server import HttpServer
from queen_trio.http.server import TlsFiles
from tests.http.conformance import LIMITS, Bench, Client, Target, request, running, wait_for

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A self-signed certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    files = TlsFiles(folder / "cert.pem", folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", files.key, "-out", files.cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


def url(bench: Bench, path: str) -> str:
    return f"https://127.0.0.1:{bench.address[1]}{path}"


def trusting(tls: TlsFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(tls.cert))


async def test_http_2(tls: TlsFiles) -> None:
    async with (
        running(HttpServer.HYPERCORN, tls=tls) as bench,
        httpx.AsyncClient(http2=True, verify=trusting(tls)) as client,
    ):
        answer = await client.post(url(bench, "/a%20b?x=1"), content=b"body" * 10_000)
        assert (answer.status_code, answer.http_version) == (200, "HTTP/2")
        seen = answer.json()
        assert (seen["path"], seen["query_string"], seen["scheme"]) == ("/a b", "x=1", "https")
        assert (seen["http_version"], seen["body"]) == ("2", "body" * 10_000)
        empty = await client.get(url(bench, Target.EMPTY.value))
        assert (empty.status_code, "content-length" in empty.headers) == (204, False)
        head = await client.head(url(bench, "/big?1234"))
        assert (head.headers["content-length"], head.content) == ("1234", b"")
        assert (await client.get(url(bench, Target.STREAM.value))).text == "one,two,three"
        failed = await client.get(url(bench, Target.BOOM.value))
        assert (failed.status_code, failed.json()) == (500, {"error": "internal error"})
        large = await client.post(url(bench, "/echo"), content=b"x" * (LIMITS.max_body + 1))
        assert large.status_code == 413


async def test_http_2_streams_are_parked_and_released_side_by_side(tls: TlsFiles) -> None:
    async with (
        running(HttpServer.HYPERCORN, tls=tls) as bench,
        httpx.AsyncClient(http2=True, verify=trusting(tls), timeout=20) as client,
    ):
        statuses = []

        async def park() -> None:
            statuses.append((await client.get(url(bench, Target.PARK.value))).status_code)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(park)
            await wait_for(lambda: bench.app.parked == 10)
            # httpcore reads answers in the order of its askers: look at the server's side.
            nursery.start_soon(client.get, url(bench, "/meanwhile"))
            await wait_for(lambda: bench.app.ended["/meanwhile"] == 1)
            bench.app.release.set()
        assert statuses == [204] * 10
        bench.drain.set()
        await bench.stopped.wait()


async def test_an_http_2_client_that_goes_frees_its_parked_requests(tls: TlsFiles) -> None:
    async with running(HttpServer.HYPERCORN, tls=tls) as bench:
        async with (
            httpx.AsyncClient(http2=True, verify=trusting(tls), timeout=20) as client,
            trio.open_nursery() as nursery,
        ):
            for _ in range(3):
                nursery.start_soon(client.get, url(bench, Target.PARK.value))
            await wait_for(lambda: bench.app.parked == 3)
            nursery.cancel_scope.cancel()
        await wait_for(lambda: bench.app.freed == 3)


async def test_http_1_1_over_tls(tls: TlsFiles) -> None:
    async with running(HttpServer.HYPERCORN, tls=tls) as bench:
        stream = trio.SSLStream(
            await bench.connect(), trusting(tls), server_hostname="127.0.0.1", https_compatible=True
        )
        async with stream:
            client = Client(stream)
            for i in range(3):
                seen = (await client.ask(request(f"/{i}"))).json()
                assert (seen["path"], seen["scheme"]) == (f"/{i}", "https")


async def test_certificates_imply_hypercorn(tls: TlsFiles) -> None:
    async with (
        running(HttpServer.LEAN, tls=tls) as bench,
        httpx.AsyncClient(verify=trusting(tls)) as client,
    ):
        assert (await client.get(url(bench, "/"))).status_code == 200


async def test_a_client_without_tls_harms_nobody(tls: TlsFiles) -> None:
    async with running(HttpServer.HYPERCORN, tls=tls) as bench:
        async with bench.client() as client:
            await client.send(request())
            assert not (await client.rest()).startswith(b"HTTP")
        async with httpx.AsyncClient(verify=trusting(tls)) as https:
            assert (await https.get(url(bench, "/"))).status_code == 200


async def test_unusable_files_are_an_error(tmp_path: Path) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(OSError), flatten_subgroups=True):
        async with running(
            HttpServer.HYPERCORN, tls=TlsFiles(tmp_path / "none.pem", tmp_path / "none.key")
        ):
            pytest.fail("started")
