"""A request and a response, as handlers see them."""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from attrs import define, field, frozen

from queen_trio.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from .lean import Receive, Scope

INT32_MAX: Final = 2**31 - 1
_TRUE: Final = frozenset({"true", "1"})
_FALSE: Final = frozenset({"false", "0"})


# Consumers ask the same again and again; bounded, as are the strings (by the length of a head).
@lru_cache(maxsize=64)
def _parse_query(query: bytes) -> Mapping[str, str]:
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100
        )
    except ValueError:
        raise ClientError("the query string is not valid UTF-8, or too long") from None
    return MappingProxyType(dict(pairs))


JSON_HEADERS: Final = ((b"content-type", b"application/json"),)


@define(eq=False)
class Request:
    """One request with its whole body; `path` holds the decoded variable segments of its route.

    `subject` is the `sub` of the token that came with it; None without one.
    """

    scope: Scope
    receive: Receive
    body: bytes
    path: tuple[str, ...]
    subject: str | None = None
    _query: Mapping[str, str] | None = None

    @property
    def query(self) -> Mapping[str, str]:
        """The query parameters; of a repeated one the last counts. Empty values are kept."""
        if self._query is None:
            self._query = _parse_query(self.scope["query_string"])
        return self._query

    def text(self, name: str) -> str | None:
        """A parameter; None when it is absent or empty."""
        return self.query.get(name) or None

    def flag(self, name: str) -> bool:
        """A boolean parameter, false by default: true, false, 1, 0 in any case."""
        value = self.query.get(name, "").lower()
        if value in _TRUE:
            return True
        if value in _FALSE or not value:
            return False
        raise ClientError(f"{name}={self.query[name]!r} is not a boolean (true or false)")

    def integer(self, name: str, *, least: int = -INT32_MAX, most: int = INT32_MAX) -> int | None:
        """An integer parameter in a range; None when it is absent or empty."""
        value = self.query.get(name)
        if not value:
            return None
        digits = value[1:] if value[0] == "-" else value
        if not (digits.isascii() and digits.isdigit()):
            raise ClientError(f"{name}={value!r} is not an integer")
        number = int(value) if len(value) < 20 else most + 1
        if not least <= number <= most:
            raise ClientError(f"{name}={value} is out of range ({least} to {most})")
        return number


@frozen
class Response:
    """An answer; `undelivered` runs when the client could not be given it, and shields itself."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = field(default=JSON_HEADERS)
    undelivered: Callable[[], Awaitable[None]] | None = None


Handler = Any
"""`async (Broker, Request) -> Response`"""

NO_CONTENT: Final = Response(204, headers=())
