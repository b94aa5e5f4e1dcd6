"""Fixtures of the API tests: one broker for the session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.http.api import Api, open_api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.brokers import LiveBroker


@pytest.fixture
async def api(shared_broker: LiveBroker) -> AsyncIterator[Api]:
    """A client of the session's broker."""
    async with open_api(shared_broker) as api:
        yield api
