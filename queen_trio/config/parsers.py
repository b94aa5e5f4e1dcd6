"""How the text of a variable becomes a value: one strict parser per kind of variable.

A parser is called with a text that isn't empty. It returns the value or raises ValueError, whose
message completes the sentence `NAME="text" …` and never repeats the text: it may be a secret.
"""

from __future__ import annotations

import re
from enum import Enum
from ipaddress import IPv6Address
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import attrs

T_co = TypeVar("T_co", covariant=True)
E = TypeVar("E", bound=Enum)

INT64_DIGITS = 19  # longer than any bound below; keeps int() away from its own limit on digits


class Parser(Protocol[T_co]):
    """Text to value; `accepts` says in a few words what it takes, for the reference page."""

    def __call__(self, text: str) -> T_co: ...

    @property
    def accepts(self) -> str: ...


@attrs.frozen
class Boolean:
    """true/false, 1/0, yes/no, on/off, in any case (spec 5)."""

    accepts: str = "boolean"

    def __call__(self, text: str) -> bool:
        match text.lower():
            case "true" | "1" | "yes" | "on":
                return True
            case "false" | "0" | "no" | "off":
                return False
        raise ValueError("is not a boolean (true/false, 1/0, yes/no, on/off)")


@attrs.frozen
class Integer:
    """A decimal integer from `low` to `high`, both included; no spaces, signs, underscores."""

    low: int
    high: int

    @property
    def accepts(self) -> str:
        return f"{self.low} to {self.high}"

    def __call__(self, text: str) -> int:
        if not re.fullmatch(r"-?[0-9]+", text):
            raise ValueError(f"is not an integer ({self.low} to {self.high})")
        digits = text.lstrip("-").lstrip("0")
        if len(digits) > INT64_DIGITS or not self.low <= int(text) <= self.high:
            raise ValueError(f"is out of range ({self.low} to {self.high})")
        return int(text)


PORTS = Integer(1, 65535)


@attrs.frozen
class Decimal:
    """A decimal number from `low` to `high`, both included; no exponent, no infinity."""

    low: float
    high: float

    @property
    def accepts(self) -> str:
        return f"{self.low:g} to {self.high:g}"

    def __call__(self, text: str) -> float:
        if not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text):
            raise ValueError(f"is not a number ({self.accepts})")
        if not self.low <= float(text) <= self.high:
            raise ValueError(f"is out of range ({self.accepts})")
        return float(text)


@attrs.frozen
class Choice(Generic[E]):
    """One of the values of a string enum, in any case; `synonyms` maps other names to members."""

    members: type[E]
    synonyms: dict[str, E] = attrs.field(factory=dict)

    @property
    def accepts(self) -> str:
        return ", ".join(member.value for member in self.members)

    def __call__(self, text: str) -> E:
        by_name = {member.value.lower(): member for member in self.members} | self.synonyms
        try:
            return by_name[text.lower()]
        except KeyError:
            raise ValueError(f"is not one of {self.accepts}") from None


@attrs.frozen
class Text:
    """Any text, taken as it is: a password may begin with a space."""

    accepts: str = "text"

    def __call__(self, text: str) -> str:
        return text


@attrs.frozen
class Word:
    """Text without white space or control characters: a host, a name, a URL."""

    accepts: str = "text"

    def __call__(self, text: str) -> str:
        if not text.isprintable() or any(char.isspace() for char in text):
            raise ValueError("contains white space or an unprintable character")
        return text


@attrs.frozen
class FilePath:
    """A path of the file system, as it is: neither `~` nor variables are expanded."""

    accepts: str = "path"

    def __call__(self, text: str) -> Path:
        if "\0" in text:
            raise ValueError("contains a zero byte")
        return Path(text)


@attrs.frozen
class HexKey:
    """A key of `size` bytes, in hexadecimal digits of either case."""

    size: int

    @property
    def accepts(self) -> str:
        return f"{2 * self.size} hexadecimal digits"

    def __call__(self, text: str) -> bytes:
        if not re.fullmatch(r"[0-9A-Fa-f]*", text) or len(text) != 2 * self.size:
            raise ValueError(f"is not {self.accepts}")
        return bytes.fromhex(text)


ENTRY_CHARS = 80  # of a faulty peer: a sentence stays a line

UNSPECIFIED_PORT = 0  # `load` puts the port of our own mesh in its place


@attrs.frozen
class Peer:
    """The address of another replica's mesh port; `host` is bare, without IPv6 brackets."""

    host: str
    port: int = UNSPECIFIED_PORT

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == UNSPECIFIED_PORT else f"{host}:{self.port}"


@attrs.frozen
class PeerList:
    """Comma-separated `host[:port]`, IPv6 in brackets; a scheme is ignored (spec 5).

    Spaces around an entry and an empty entry are harmless.
    """

    accepts: str = "host[:port], …"

    def __call__(self, text: str) -> tuple[Peer, ...]:
        peers: list[Peer] = []
        faults: list[str] = []
        for entry in filter(None, map(str.strip, text.split(","))):
            try:
                peers.append(_peer(entry))
            except ValueError as error:
                faults.append(f"entry {entry[:ENTRY_CHARS]!r} {error}")
        if faults:
            raise ValueError(f"is not a list of host[:port]: {'; '.join(faults)}")
        return tuple(peers)


_PEER = re.compile(
    r"(?:[A-Za-z][A-Za-z0-9+.-]*://)?"
    r"(?: \[ (?P<ipv6>[^\[\]]*) \] | (?P<host>[A-Za-z0-9._-]+) )"
    r"(?: : (?P<port>[0-9]+) )?",
    re.VERBOSE,
)


def _peer(entry: str) -> Peer:
    match = _PEER.fullmatch(entry)
    if match is None:
        hint = " (IPv6 goes in brackets)" if entry.count(":") > 1 and "://" not in entry else ""
        raise ValueError(f"is not host[:port]{hint}")
    host = match["host"]
    if host is None:
        host = match["ipv6"]
        try:
            IPv6Address(host)
        except ValueError:
            raise ValueError("has no IPv6 address in its brackets") from None
    if match["port"] is None:
        return Peer(host)
    try:
        return Peer(host, PORTS(match["port"]))
    except ValueError as error:
        raise ValueError(f"has a port that {error}") from None
