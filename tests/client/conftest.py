"""Fixtures for the public client against a live broker: one release of it at a time."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests.client.releases import RELEASES, imported

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_numbers = itertools.count(1)


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """The client's release: each of them, or those a test names with `indirect=True`."""
    return str(request.param)


@pytest.fixture
def client(release: str) -> Iterator[ModuleType]:
    """The client's package, as `import queen` would give it."""
    with imported(release) as module:
        yield module


@pytest.fixture
def name() -> str:
    """A name that no other test uses, for a queue, a namespace or a group."""
    return f"client-{next(_numbers)}"
