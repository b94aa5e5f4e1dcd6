"""Sans-I/O: what the package may import, and that every error says who caused it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import queen_protocol as wire

SOURCES = sorted(Path(wire.__file__).parent.glob("*.py"))
ALLOWED = {
    "__future__",
    "attrs",
    "collections",
    "enum",
    "hmac",
    "json",
    "queen_protocol",
    "re",
    "struct",
    "typing",
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_imports(source: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            imported.add(node.module)
    assert {name.partition(".")[0] for name in imported} <= ALLOWED


def test_exports() -> None:
    assert {name for name in wire.__all__ if not hasattr(wire, name)} == set()


def test_errors_say_who_caused_them() -> None:
    assert not issubclass(wire.LocalProtocolError, wire.RemoteProtocolError)
    for cls in (wire.LocalProtocolError, wire.RemoteProtocolError):
        assert issubclass(cls, wire.ProtocolError)
    kinds = set(wire.RemoteProtocolError.__subclasses__())
    assert kinds == {
        wire.FramingError,
        wire.PayloadError,
        wire.HandshakeError,
        wire.SequenceError,
    }
    error = wire.PayloadError(wire.Reason.BAD_JSON, "why")
    assert (error.reason, error.detail, str(error)) == ("bad_json", "why", "bad_json: why")


def test_reasons_are_documented() -> None:
    document = (Path(__file__).parents[2] / "protocol" / "mesh.md").read_text()
    table = document.partition("## Reasons")[2].partition("## ")[0]
    rows = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert rows == set(wire.Reason)
