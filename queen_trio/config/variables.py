"""How a variable is declared: once, as a field of a section, with all there is to know about it.

Loading, the boot lines, `queen-trio config` and the reference page all derive from `Variable`.

Defaults and ranges come from specification 5 where it names them. A bound that it doesn't name is
there to catch a slip (seconds for milliseconds, a missing digit), not to forbid a taste.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs

if TYPE_CHECKING:
    from .parsers import Parser

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
MIB = 1024 * 1024
GIB = 1024 * MIB

T = TypeVar("T")
Values = Mapping[str, str]
_KEY = "queen_trio.variable"


@attrs.frozen
class Variable:
    """One environment variable.

    `default` is written as an operator would write it; None leaves the value None. A default that
    depends on other variables has `derive` (their texts to its text) and, as `default`, the words
    that describe it. A secret is shown by its length only.
    """

    name: str
    parse: Parser[Any]
    meaning: str
    default: str | None
    derive: Callable[[Values], str] | None
    alias: str | None
    unit: str | None
    secret: bool

    def default_value(self, values: Values) -> Any:
        """The value when the variable is unset and `values` are the texts of those set."""
        text = self.default if self.derive is None else self.derive(values)
        return None if text is None else self.parse(text)


def setting(
    name: str,
    parse: Parser[T],
    meaning: str,
    *,
    default: str,
    derive: Callable[[Values], str] | None = None,
    alias: str | None = None,
    unit: str | None = None,
    secret: bool = False,
) -> T:
    """Declare the field of a section that the variable `name` fills; see `Variable`."""
    return cast("T", _field(Variable(name, parse, meaning, default, derive, alias, unit, secret)))


def optional(
    name: str, parse: Parser[T], meaning: str, *, unit: str | None = None, secret: bool = False
) -> T | None:
    """Declare a field that is None unless the variable `name` is set."""
    return cast("T | None", _field(Variable(name, parse, meaning, None, None, None, unit, secret)))


def _field(variable: Variable) -> Any:
    return attrs.field(
        factory=lambda: variable.default_value({}),
        repr=not variable.secret,
        metadata={_KEY: variable},
    )


def variables(section: type[attrs.AttrsInstance]) -> Iterator[tuple[str, Variable]]:
    """The fields of a section in the order of their declaration, with their variables."""
    for field in attrs.fields(section):
        yield field.name, field.metadata[_KEY]
