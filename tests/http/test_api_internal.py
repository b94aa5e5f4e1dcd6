"""The stats of the mesh on a broker without one, and hints from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from tests.http.api import data

if TYPE_CHECKING:
    from tests.http.api import Api, Json

STATS = (
    "/internal/api/shared-state/stats",
    "/internal/api/inter-instance/stats",
    "/api/v1/system/shared-state",
)


@pytest.mark.parametrize("path", STATS)
async def test_without_peers(api: Api, path: str) -> None:
    response = await api.http.get(path)
    assert response.status_code == 200
    state = response.json()
    assert state.pop("server_id")
    assert state == {
        "enabled": False,
        "reason": "no_peers",
        "transport": "tcp-mesh",
        "maintenance_mode": False,
        "pop_maintenance_mode": False,
    }


@pytest.mark.parametrize("named", [{}, {"partition": "p"}])
async def test_a_hint_from_outside(api: Api, queue: str, named: Json) -> None:
    """A hint for what isn't there changes nothing; the parked pop goes on to wait."""
    got: list[Json | None] = []

    async def park() -> None:
        got.append(await api.pop(queue, wait="true", timeout=30_000))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(park)
            await api.wait_parked(1)
            response = await api.http.post("/internal/api/notify", json={"queue": queue, **named})
            assert (response.status_code, response.json()) == (200, {"success": True})
            await api.push(queue, "here", partition="p")
    assert data(got[0]) == ["here"]


@pytest.mark.parametrize(
    ("body", "about"),
    [
        ({}, "queue"),
        ({"queue": ""}, "queue"),
        ({"queue": 1}, "queue"),
        ({"queue": "q", "partition": ""}, "partition"),
        ({"queue": "q", "partition": "x" * 513}, "partition"),
        ({"queue": "a\0b"}, "queue"),
        ([], "object"),
    ],
)
async def test_a_hint_that_names_nothing(api: Api, body: object, about: str) -> None:
    response = await api.http.post("/internal/api/notify", json=body)
    assert response.status_code == 400
    assert about in response.json()["error"]
