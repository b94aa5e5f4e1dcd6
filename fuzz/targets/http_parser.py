"""Any bytes, cut anywhere, are the same requests and at most one refusal, and nothing is raised.

So they are where their beginning has been seen before.

A request has a target, headers and a body within the limits; the body budget is given back. Which
of two faults a refusal names may depend on the cut: llhttp tells of a name at its end, or the
piece's.
"""

from __future__ import annotations

from hypothesis import strategies as st

from queen_trio.http.lean import _KnownHeads, _Parser, _Refused, _Request
from queen_trio.http.limits import BodyBudget, HttpLimits

LIMITS = HttpLimits(max_body=200, max_head=400, max_target=60, max_headers=8)

HEADERS = ["Host: b", "Content-Length: 4", "Transfer-Encoding: chunked", "Connection: close",
           "Expect: 100-continue", "Upgrade: h2c", "Connection: upgrade", "X: y",
           "Transfer-Encoding: gzip", "Content-Length: 5", ": x", " folded", "Host: c"]  # fmt: skip
BODIES = [b"", b"body", b"4\r\nbody\r\n0\r\n\r\n", b"4;ext\r\nbody\r\n0\r\nT: x\r\n\r\n", b"zz\r\n"]


def request(line: str, headers: list[str], body: bytes) -> bytes:
    return "\r\n".join([line, "Host: a", *headers, "", ""]).encode() + body


INPUTS = st.lists(
    st.one_of(
        st.builds(
            request,
            st.sampled_from(["GET / HTTP/1.1", "POST /a?b HTTP/1.1", "GET / HTTP/1.0",
                             "CONNECT a:1 HTTP/1.1", "GET http://a/b HTTP/1.1", "PRI * HTTP/2.0"]),
            st.lists(st.sampled_from(HEADERS), max_size=3),
            st.sampled_from(BODIES),
        ),
        st.binary(max_size=10),
    ),
    max_size=3,
).map(b"".join)  # fmt: skip


def check(data: bytes) -> None:
    known = _KnownHeads()
    whole = verdicts([data], known)
    assert whole == verdicts([data[n : n + 1] for n in range(len(data))], _KnownHeads())
    assert whole == verdicts([data], known)


def verdicts(pieces: list[bytes], known: _KnownHeads) -> list[object]:
    """What a connection would do: requests, and a refusal or a close as the last."""
    budget = BodyBudget.of(LIMITS)
    parser = _Parser(LIMITS, budget, known)
    try:
        return feed(parser, pieces)
    finally:
        parser.close()
        assert budget.held == 0


def feed(parser: _Parser, pieces: list[bytes]) -> list[object]:
    found: list[object] = []
    for piece in pieces:
        parser.feed(piece)
        for one in parser.take_completed():
            if isinstance(one, _Refused):
                assert 400 <= one.status <= 599
                return [*found, "refused"]
            check_request(one)
            found.append((one.method, one.target, one.headers, one.body, one.version))
            if not one.keep_alive:
                return [*found, "close"]
    return found


def check_request(one: _Request) -> None:
    assert len(one.target) <= LIMITS.max_target
    one.target.decode("ascii")
    assert len(one.body) <= LIMITS.max_body
    assert len(one.headers) <= LIMITS.max_headers
    for name, value in one.headers:
        assert name
        assert not set(name + value) & set(b"\r\n\0")
