"""What pops and acks promise, again with QUEEN_HOTLIST=0 (issue 4): the SQL scan alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

# Collected here, they run with the broker of this folder's conftest.
from tests.http.test_api_ack import *  # noqa: F403
from tests.http.test_api_pop import *  # noqa: F403

if TYPE_CHECKING:
    from tests.http.api import Api


async def test_the_broker_has_no_hotlist(api: Api) -> None:
    """Or the tests above would show nothing."""
    exposition = (await api.http.get("/metrics/prometheus")).text
    assert "queen_parked_pops" in exposition
    assert "queen_hotlist" not in exposition
