"""Who is alive, in Trio's own time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from structlog.testing import capture_logs

from queen_trio.mesh.liveness import FORGET_SECONDS, MAX_SERVERS, Liveness

if TYPE_CHECKING:
    from trio.testing import MockClock

DEAD_SECONDS = 5.0


async def test_alive_dead_and_alive_again(autojump_clock: MockClock) -> None:
    liveness = Liveness(DEAD_SECONDS)
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(liveness.serve)
            liveness.hear("a")
            liveness.hear("b")
            await trio.sleep(DEAD_SECONDS - 0.1)
            assert (liveness.alive(), liveness.dead()) == (["a", "b"], [])
            liveness.hear("b")
            await trio.sleep(0.2)
            assert (liveness.alive(), liveness.dead()) == (["b"], ["a"])
            await trio.sleep(DEAD_SECONDS * 10)
            liveness.hear("a")
            assert (liveness.alive(), liveness.dead()) == (["a"], ["b"])
            nursery.cancel_scope.cancel()
    assert [(line["event"].rpartition(" ")[2], line["server_id"]) for line in lines] == [
        ("alive", "a"),
        ("alive", "b"),
        ("dead", "a"),
        ("dead", "b"),
        ("alive", "a"),
    ]


async def test_who_is_gone_is_forgotten(autojump_clock: MockClock) -> None:
    liveness = Liveness(DEAD_SECONDS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(liveness.serve)
        liveness.hear("replaced")
        await trio.sleep(FORGET_SECONDS)
        assert liveness.dead() == ["replaced"]
        liveness.hear("new")
        await trio.sleep(DEAD_SECONDS)
        assert (liveness.alive(), liveness.dead()) == ([], ["new"])
        nursery.cancel_scope.cancel()


async def test_invented_names_fill_no_memory() -> None:
    liveness = Liveness(DEAD_SECONDS)
    for n in range(MAX_SERVERS + 10):
        liveness.hear(f"{n:04}")
    assert len(liveness.alive()) == MAX_SERVERS
    assert liveness.alive()[0] == "0010"
    assert len(liveness._told_alive) == MAX_SERVERS
