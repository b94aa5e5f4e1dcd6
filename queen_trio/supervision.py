"""What follows from the death of a child nursery (spec 4, "Supervision and chaos").

The mesh or the jobs dying costs latency only: they are started again, with backoff. The death of
http ends the process, but not before what it accepted is stored. This is the fourth and last
place with a broad `except`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
import trio

from queen_trio.backoff import Backoff

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Awaitable, Callable

log = structlog.get_logger(__name__)

BACKOFF_MAX_SECONDS: Final = 30.0
# Whoever ran this long before it died has not crashed in a loop.
HEALTHY_SECONDS: Final = 60.0


async def supervise(name: str, run: Callable[[], Awaitable[None]], restarts: Counter[str]) -> None:
    """Run `run` again and again until it returns or we are cancelled.

    A crash is logged with its traceback and counted in `restarts`; the next start waits 250 ms,
    doubling to 30 s, jittered, and from the beginning after a minute of health.
    """
    backoff = Backoff(BACKOFF_MAX_SECONDS, HEALTHY_SECONDS)
    while True:
        started = trio.current_time()
        try:
            await run()
        except Exception:  # the supervisor's boundary
            restarts[name] += 1
            pause = backoff.seconds_after(trio.current_time() - started)
            log.exception("nursery crashed, restarting", nursery=name, in_seconds=round(pause, 3))
        else:
            return
        await trio.sleep(pause)


class Startable(Protocol):
    """What `trio.Nursery.start` takes, with no arguments left."""

    async def __call__(self, *, task_status: trio.TaskStatus[Any]) -> None: ...


async def run_vital(
    name: str,
    run: Startable,
    on_death: Callable[[Exception], None],
    task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `run` once, for `Nursery.start`; tell `on_death` about a crash after it has started.

    A crash before that is the caller's: it propagates. `on_death` must not block.
    """
    started = False
    try:
        async with trio.open_nursery() as nursery:
            task_status.started(await nursery.start(run))
            started = True
    except Exception as error:  # the supervisor's boundary
        if not started:
            raise
        log.exception("nursery crashed, stopping", nursery=name)
        on_death(error)
