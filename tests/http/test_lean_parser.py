"""The lean server's parser without I/O: however the bytes are cut, the verdict is the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen_trio.http.lean import (
    KNOWN_HEAD_BYTES,
    KNOWN_HEADS,
    _KnownHeads,
    _Parser,
    _Phase,
    _Refused,
    _Request,
)
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


def verdicts(pieces: list[bytes], known: _KnownHeads | None = None) -> list[object]:
    """What a connection would do with `pieces`: requests, and perhaps a refusal as the last."""
    parser = _Parser(LIMITS, BodyBudget.of(LIMITS), known or _KnownHeads())
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


@given(name=st.sampled_from(sorted(STREAMS)), data=st.data())
def test_what_is_known_of_heads_changes_no_verdict(name: str, data: st.DataObject) -> None:
    known = _KnownHeads()
    requests = [
        request("/a"),
        request("/a", "Connection: close"),
        request("/b?c", method="POST", body=b"body"),
        request("/a", *UPGRADE),
        request("/a", *UPGRADE, method="POST", body=b"body"),
        request("/", "Transfer-Encoding: chunked", method="POST") + b"0\r\n\r\n",
        request("/first"),
    ]
    for whole in requests:
        verdicts([whole], known)
    order = data.draw(st.lists(st.sampled_from(requests), max_size=4))
    end = data.draw(st.integers(0, len(STREAMS[name])))
    pieces = [*order, STREAMS[name][:end], STREAMS[name][end:], *order]
    assert verdicts([piece for piece in pieces if piece], known) == verdicts([b"".join(pieces)])


def test_a_request_with_a_known_head_has_its_own_body_and_is_within_the_budget() -> None:
    budget = BodyBudget.of(LIMITS)
    parser = _Parser(LIMITS, budget, _KnownHeads())
    for body in (b"one", b"two", b"six"):
        parser.feed(request("/b", method="POST", body=body))
        [completed] = parser.take_completed()
        assert isinstance(completed, _Request)
        assert completed.body == body
    assert budget.held == 9
    budget.limit = 10
    parser.feed(request("/b", method="POST", body=b"too"))
    [refused] = parser.completed
    assert isinstance(refused, _Refused)
    assert refused.status == 503


def test_known_heads_are_few_and_short() -> None:
    known = _KnownHeads()
    parser = _Parser(LIMITS, BodyBudget.of(LIMITS), known)
    for number in range(KNOWN_HEADS + 3):
        parser.feed(request(f"/{number}"))
        parser.take_completed()
    assert known.find(request("/0")) is None
    assert known.find(request(f"/{KNOWN_HEADS + 2}")) is not None
    long = request("/", "X-Long: " + "x" * KNOWN_HEAD_BYTES)
    parser.feed(long)
    assert isinstance(parser.completed[0], _Request)
    assert known.find(long) is None


@given(st.binary(max_size=300), st.sampled_from(sorted(STREAMS)), st.integers(0, 400))
def test_any_bytes_are_parsed_or_refused(noise: bytes, name: str, at: int) -> None:
    stream = STREAMS[name]
    parser = _Parser(LIMITS, BodyBudget.of(LIMITS), _KnownHeads())
    parser.feed(stream[:at] + noise + stream[at:])
    assert all(isinstance(item, _Request) for item in parser.completed[:-1])
    parser.feed(b"never raises either")


def test_many_small_chunks_take_no_more_memory_than_the_body() -> None:
    parser = _Parser(LIMITS, BodyBudget.of(LIMITS), _KnownHeads())
    parser.feed(CHUNKED[: CHUNKED.index(b"\r\n\r\n") + 4])
    for _ in range(100):
        parser.feed(b"1\r\nx\r\n" * 1000)
    assert isinstance(parser._body, bytearray)
    assert len(parser._body) == 100_000


def test_line_ends_alone_are_bounded() -> None:
    parser = _Parser(LIMITS, BodyBudget.of(LIMITS), _KnownHeads())
    for _ in range(LIMITS.max_head // 2 + 1):
        parser.feed(b"\r\n")
    [refused] = parser.completed
    assert isinstance(refused, _Refused)
    assert refused.status == 431
