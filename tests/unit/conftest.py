"""Fixtures of the unit tests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Whatever configures logging in this process does it for the tests to come, too: undo that."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)
