"""The one loop that runs a job again and again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

log = structlog.get_logger(__name__)

BACKOFF_MAX_SECONDS: Final = 60.0


@frozen
class Job:
    """`run` is one iteration; `interval_seconds` is the pause between two."""

    name: str
    interval_seconds: float
    run: Callable[[], Awaitable[None]]


async def serve_jobs(jobs: Sequence[Job]) -> None:
    """Run all jobs side by side until cancelled; a cancelled iteration cleans up after itself."""
    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(_serve_job, job)


async def _serve_job(job: Job) -> None:
    """Run a job at its cadence, jittered so that replicas don't move in step.

    An iteration that fails costs only itself: a run of failures is logged once, each is counted,
    and the pause grows up to a minute. This is the job iteration's boundary for broad `except`.
    """
    failures = 0
    while True:
        pause = job.interval_seconds * random.uniform(0.9, 1.1)  # noqa: S311 - jitter, no secret
        await trio.sleep(pause if not failures else _backoff(pause, failures))
        try:
            await job.run()
        except Exception as error:
            failures += 1
            if failures == 1:
                log.exception("job failed", job=job.name)
            else:
                log.debug("job failed again", job=job.name, failures=failures, error=str(error))
        else:
            if failures:
                log.info("job works again", job=job.name, failures=failures)
            failures = 0


def _backoff(pause: float, failures: int) -> float:
    return max(pause, min(pause * 2.0 ** min(failures, 16), BACKOFF_MAX_SECONDS))
