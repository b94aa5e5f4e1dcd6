"""The lean server's parser without I/O: however the bytes are cut, the verdict is the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen_trio.http.lean import _Parser, _Phase, _Refused, _Request
from queen_trio.http.limits import BodyBudget
from tests.http.conformance import LIMITS, request
from tests.http.test_server_exchanges import CHUNKED, UPGRADE
from tests.http.test_server_refusals import AMBIGUOUS, BAD_CHUNKS

STREAMS = {
    "pipelined": request("/a") + request("/b?c", method="POST", body=b"body") + request("/d"),
    "chunked": CHUNKED + request("/after") + CHUNKED,
    "line ends between": request("/a") + b"\r\n\r\n" + request("/b"),
    "upgrades": request("/a", *UPGRADE) * 2 + request("/b"),
    "upgrade with a body": request("/a", *UPGRADE, method="POST", body=b"body") + request("/no"),
    "closing": request("/a", "Connection: close") + request("/no"),
    "limits": request("/" + "x" * LIMITS.max_target) + request("/no"),
    **{name: request("/first") + data for name, (data, _, _) in AMBIGUOUS.items()},
    **{
        f"chunk: {name}": request("/", "Transfer-Encoding: chunked", method="POST") + data
        for name, data in BAD_CHUNKS.items()
    },
}


def verdicts(pieces: list[bytes]) -> list[object]:
    """What a connection would do with `pieces`: requests, and perhaps a refusal as the last."""
    parser = _Parser(LIMITS, BodyBudget.of(LIMITS))
    found: list[object] = []
    for piece in pieces:
        parser.feed(piece)
        for completed in parser.take_completed():
            if isinstance(completed, _Refused):
                return [*found, completed.status]
            assert isinstance(completed, _Request)
            found.append((completed.method, completed.target, completed.headers, completed.body))
            if not completed.keep_alive:
                return [*found, "close"]
    assert parser.phase is _Phase.IDLE or parser.phase is _Phase.HEAD
    return found


@pytest.mark.parametrize("name", STREAMS)
def test_byte_by_byte(name: str) -> None:
    stream = STREAMS[name]
    assert verdicts([bytes([byte]) for byte in stream]) == verdicts([stream])


@given(name=st.sampled_from(sorted(STREAMS)), data=st.data())
def test_cut_anywhere(name: str, data: st.DataObject) -> None:
    stream = STREAMS[name]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=8)))
    pieces = [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert verdicts(pieces) == verdicts([stream])


@given(st.binary(max_size=300), st.sampled_from(sorted(STREAMS)), st.integers(0, 400))
def test_any_bytes_are_parsed_or_refused(noise: bytes, name: str, at: int) -> None:
    stream = STREAMS[name]
    parser = _Parser(LIMITS, BodyBudget.of(LIMITS))
    parser.feed(stream[:at] + noise + stream[at:])
    assert all(isinstance(item, _Request) for item in parser.completed[:-1])
    parser.feed(b"never raises either")


def test_many_small_chunks_take_no_more_memory_than_the_body() -> None:
    parser = _Parser(LIMITS, BodyBudget.of(LIMITS))
    parser.feed(CHUNKED[: CHUNKED.index(b"\r\n\r\n") + 4])
    for _ in range(100):
        parser.feed(b"1\r\nx\r\n" * 1000)
    assert isinstance(parser._body, bytearray)
    assert len(parser._body) == 100_000


def test_line_ends_alone_are_bounded() -> None:
    parser = _Parser(LIMITS, BodyBudget.of(LIMITS))
    for _ in range(LIMITS.max_head // 2 + 1):
        parser.feed(b"\r\n")
    [refused] = parser.completed
    assert isinstance(refused, _Refused)
    assert refused.status == 431
