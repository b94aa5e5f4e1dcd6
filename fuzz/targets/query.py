"""A query string is refused with a ClientError, or its parameters have the types and ranges asked.

Reading it a second time says the same; errors can be encoded into an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from hypothesis import strategies as st

from queen_trio.errors import ClientError
from queen_trio.http.message import INT32_MAX, Request
from queen_trio.http.parameters import MAX_LIMIT, moment, page, uuid
from queen_trio.model.names import check_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

NAMES = ["batch", "wait", "from", "limit", "offset", "id", "consumerGroup"]
VALUES = st.one_of(
    st.text(max_size=8),
    st.integers().map(str),
    st.datetimes().map(str),
    st.uuids().map(str),
    st.sampled_from(["true", "FALSE", "1", "-", "٣", "²", "\0", "2024-01-01T00:00:00+25:00"]),
)
INPUTS = st.one_of(
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5).map(urlencode),
    st.text(st.sampled_from("abc=&%+;01fF[]/?:@ "), max_size=40),
).map(str.encode)


def check(data: bytes) -> None:
    assert answers(data) == answers(data)


def answers(data: bytes) -> list[Any]:
    return [answer(data, read) for read in READERS]


def answer(data: bytes, read: Callable[[Request], Any]) -> Any:
    request = Request({"query_string": data}, None, b"", ())  # type: ignore[arg-type]
    try:
        return read(request)
    except ClientError as error:
        assert 400 <= error.status < 500
        str(error).encode()
        return str(error)


def read_integer(request: Request) -> int | None:
    number = request.integer("batch", least=1)
    assert number is None or 1 <= number <= INT32_MAX
    return number


def read_flag(request: Request) -> bool:
    flag = request.flag("wait")
    assert flag in (True, False)
    return flag


def read_moment(request: Request) -> datetime | None:
    when = moment(request, "from")
    assert when is None or when.tzinfo is not None
    return when


def read_page(request: Request) -> object:
    asked = page(request, limit=100)
    assert 0 <= asked.limit <= MAX_LIMIT
    assert 0 <= asked.offset <= INT32_MAX
    return asked


def read_name(request: Request) -> str | None:
    text = request.text("consumerGroup")
    if text is not None:
        assert b"\0" not in check_name(text, "consumerGroup").encode()
    return text


def read_uuid(request: Request) -> object:
    text = request.text("id")
    return None if text is None else uuid(text, "id")


READERS = [read_integer, read_flag, read_moment, read_page, read_name, read_uuid]
