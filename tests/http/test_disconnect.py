"""`HangupWatcher` by itself, in both of its ways, and `cancel_on_disconnect` on its fallback."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import trio
import trio.testing

from queen_trio.http import disconnect
from queen_trio.http.disconnect import HangupWatcher, cancel_on_disconnect, is_hung_up_nowait
from tests.http.conformance import wait_for

ways = pytest.mark.parametrize("use_epoll", [True, False], ids=["epoll", "polling"])


@pytest.fixture
def pair() -> Any:
    """Two connected non-blocking sockets."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


@ways
async def test_every_watch_is_called_once(
    pair: Any, use_epoll: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disconnect, "POLL_SECONDS", 0.01)
    ours, theirs = pair
    watcher = HangupWatcher(use_epoll=use_epoll)
    calls: list[str] = []
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.serve)
            watcher.watch(ours.fileno(), lambda: calls.append("one"))
            unwatch = watcher.watch(ours.fileno(), lambda: calls.append("two"))
            watcher.watch(ours.fileno(), lambda: calls.append("three"))
            unwatch()
            unwatch()
            theirs.send(b"pipelined")
            await trio.sleep(0.05)  # Time to do wrong: nothing is to happen.
            assert calls == []
            ours.recv(100)
            theirs.close()
            await wait_for(lambda: len(calls) == 2)
            assert calls == ["one", "three"]
            unwatch()
            # Too late to see it happen is still in time.
            watcher.watch(ours.fileno(), lambda: calls.append("late"))
            await wait_for(lambda: calls[-1] == "late")
            nursery.cancel_scope.cancel()


@ways
async def test_unwatched_sockets_are_forgotten(pair: Any, use_epoll: bool) -> None:
    ours, theirs = pair
    watcher = HangupWatcher(use_epoll=use_epoll)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watcher.serve)
        watcher.watch(ours.fileno(), lambda: pytest.fail("called"))()
        theirs.close()
        await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
    assert not watcher._callbacks


@ways
async def test_a_dropped_descriptor_starts_anew(pair: Any, use_epoll: bool) -> None:
    ours, theirs = pair
    watcher = HangupWatcher(use_epoll=use_epoll)
    stale = watcher.watch(ours.fileno(), lambda: pytest.fail("called"))
    watcher.drop(ours.fileno())
    called = trio.Event()
    watcher.watch(ours.fileno(), called.set)
    stale()
    theirs.close()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.serve)
            await called.wait()
            nursery.cancel_scope.cancel()


def test_hung_up(pair: Any) -> None:
    ours, theirs = pair
    assert not is_hung_up_nowait(ours.fileno())
    theirs.close()
    assert is_hung_up_nowait(ours.fileno())


def test_hung_up_without_rdhup(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("select.POLLRDHUP")
    ours, theirs = pair
    assert not is_hung_up_nowait(ours.fileno())
    theirs.send(b"x")
    assert not is_hung_up_nowait(ours.fileno())
    ours.recv(1)
    theirs.close()
    assert is_hung_up_nowait(ours.fileno())


async def never() -> Any:
    await trio.sleep_forever()


async def at_once() -> Any:
    return {"type": "http.disconnect"}


async def test_the_fallback_cancels_the_body() -> None:
    async with cancel_on_disconnect({}, at_once) as presence:
        await trio.sleep_forever()
    assert presence.gone


async def test_the_fallback_passes_results_errors_and_cancellation() -> None:
    async with cancel_on_disconnect({}, never) as presence:
        pass
    assert not presence.gone
    with pytest.raises(ZeroDivisionError):
        async with cancel_on_disconnect({}, never):
            raise ZeroDivisionError
    with trio.move_on_after(0) as outer:
        async with cancel_on_disconnect({}, never) as presence:
            await trio.sleep_forever()
    assert outer.cancelled_caught
    assert not presence.gone
