"""The releases really are different ones, and a missing one is a failure that says what to do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.client.releases import directory, imported

if TYPE_CHECKING:
    from types import ModuleType


def test_every_part_comes_from_the_release(client: ModuleType, release: str) -> None:
    late = importlib.import_module("queen.consumer.consumer_manager")
    for module in (client, late):
        assert Path(str(module.__file__)).is_relative_to(directory(release))


def test_the_release_gives_the_name_back(release: str) -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith("queen.")}
    path = list(sys.path)
    with imported(release) as client:
        assert sys.modules["queen"] is client
    assert sys.modules.get("queen") is not client
    assert sys.path == path
    after = {name: module for name, module in sys.modules.items() if name.startswith("queen.")}
    assert after == before


def test_a_missing_release_says_what_to_run() -> None:
    with pytest.raises(RuntimeError, match=r"pip install .*-r requirements-clients/0\.0\.1\.txt"):
        directory("0.0.1")
