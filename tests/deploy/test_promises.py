"""docs/reference/promises.md names tests and sections that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/reference/promises.md"
# Both pages together promise about so much; a row that gets lost is noticed.
LEAST_ROWS = 75


def rows() -> list[tuple[str, str]]:
    """The promise and what shows it, for each row of the tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return [(a.strip(), b.strip()) for a, b in cells if a.strip() != "promise"]


@cache
def functions_in(path: str) -> set[str]:
    """The test functions of a module, those in classes too."""
    tree = ast.parse((ROOT / path).read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_"
    }


@cache
def anchors(path: Path) -> set[str]:
    """The headings of a page, as links spell them."""
    found = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize(("promise", "evidence"), rows())
def test_each_promise_has_evidence_that_exists(promise: str, evidence: str) -> None:
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", evidence)
    links = re.findall(r"\]\(([^)#]+)#([^)]+)\)", evidence)
    assert tests or links, promise
    for path, name in tests:
        assert name in functions_in(path), f"{promise}: {path}::{name}"
    for path, anchor in links:
        assert anchor in anchors((PAGE.parent / path).resolve()), f"{promise}: {path}#{anchor}"


def test_no_row_got_lost() -> None:
    promises = [promise for promise, _ in rows()]
    assert len(promises) >= LEAST_ROWS
    assert len(set(promises)) == len(promises)
