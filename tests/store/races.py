"""Races as named sessions of steps, run in every order on real connections.

A session is one connection with one transaction: its steps, then COMMIT. `orders` lists all ways
to interleave sessions; `run_order` plays one. A step that has to wait for another session's lock
stays behind and goes on when the lock comes free; what a session is told meanwhile queues up.
Nothing sleeps to order things: whether a step waits is read from the server.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import trio
from attrs import field, frozen, mutable

from queen_trio.store.connection import connect
from tests.store.calls import Log, OneConnection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from contextlib import AsyncExitStack

    from queen_trio.store.connection import TrioConnection
    from queen_trio.store.settings import ConnectionSettings

    Step = Callable[[Log], Awaitable[Any]]

COMMIT = "commit"

# A step that came so far has either answered or waits for a lock; looked at again until it has.
LOOK_SECONDS = 0.002
RACE_SECONDS = 20.0


@frozen
class Outcome:
    """What the steps of one session returned, in order; an exception stands for what it broke."""

    results: list[Any]

    @property
    def errors(self) -> list[Exception]:
        return [result for result in self.results if isinstance(result, Exception)]


def orders(sessions: Mapping[str, Sequence[Step]]) -> Iterator[tuple[str, ...]]:
    """All ways to interleave the sessions' steps and their commits, as session names."""

    def place(left: Counter[str]) -> Iterator[tuple[str, ...]]:
        if not left.total():
            yield ()
        for name in sorted(left):
            if left[name]:
                for rest in place(left - Counter([name])):
                    yield (name, *rest)

    return place(Counter({name: len(steps) + 1 for name, steps in sessions.items()}))


@mutable(eq=False)
class _Session:
    connection: TrioConnection
    steps: list[Step]
    results: list[Any] = field(factory=list)
    told: int = 0  # how many steps, the commit included, it was told to take
    taken: int = 0
    more: trio.Event = field(factory=trio.Event)
    idle: trio.Event = field(factory=trio.Event)

    def go_nowait(self) -> None:
        """Tell it to take one more step."""
        self.told += 1
        self.idle = trio.Event()
        self.more.set()

    async def run(self) -> None:
        log = Log(OneConnection(self.connection))
        await self.connection.execute("BEGIN")
        broken = False
        for step in [*self.steps, None]:
            while self.told <= self.taken:
                self.more = trio.Event()
                await self.more.wait()
            try:
                if step is None:
                    await self.connection.execute("ROLLBACK" if broken else "COMMIT")
                elif not broken:
                    self.results.append(await step(log))
            except Exception as error:
                broken = True
                self.results.append(error)
            self.taken += 1
            if self.taken == self.told:
                self.idle.set()


class Arena:
    """Connections kept for all orders of a race, and one more that watches them."""

    def __init__(self, watcher: TrioConnection, connections: dict[str, TrioConnection]) -> None:
        self._watcher = watcher
        self._connections = connections

    async def run_order(
        self, sessions: Mapping[str, Sequence[Step]], order: Sequence[str]
    ) -> dict[str, Outcome]:
        """Play one interleaving; returns what each session's steps gave."""
        running = {
            name: _Session(self._connections[name], list(steps)) for name, steps in sessions.items()
        }
        with trio.fail_after(RACE_SECONDS):
            async with trio.open_nursery() as nursery:
                for session in running.values():
                    nursery.start_soon(session.run)
                for name in order:
                    running[name].go_nowait()
                    for session in running.values():
                        await self._settle(session)
        return {name: Outcome(session.results) for name, session in running.items()}

    async def _settle(self, session: _Session) -> None:
        """Block until the session has done what it was told, or waits for a lock."""
        while session.taken < session.told:
            with trio.move_on_after(LOOK_SECONDS):
                await session.idle.wait()
                return
            pid = session.connection.info.backend_pid
            cursor = await self._watcher.execute(
                "SELECT cardinality(pg_blocking_pids(%s)) > 0", [pid]
            )
            if await cursor.fetchone() == (True,):
                return


async def open_arena(
    stack: AsyncExitStack, settings: ConnectionSettings, names: Sequence[str]
) -> Arena:
    """Connect a watcher and one connection for each name; `stack` closes them."""
    connections = []
    for _ in range(len(names) + 1):
        connection = await connect(settings)
        stack.callback(connection.close_nowait)
        connections.append(connection)
    return Arena(connections[0], dict(zip(names, connections[1:], strict=True)))
