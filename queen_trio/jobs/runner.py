"""The one loop that runs a job again and again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import define

from queen_trio.model.jobs import JobStatistics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

log = structlog.get_logger(__name__)

BACKOFF_MAX_SECONDS: Final = 60.0


@define(eq=False)
class Job:
    """`run` is one iteration; `interval_seconds` is the pause between two, 0 is never.

    The rest is counted.
    """

    name: str
    interval_seconds: float
    run: Callable[[], Awaitable[None]]
    runs: int = 0
    failures: int = 0
    failures_in_a_row: int = 0

    def statistics(self) -> JobStatistics:
        """Return the counts of this moment."""
        return JobStatistics(self.name, self.runs, self.failures)


async def serve_jobs(jobs: Sequence[Job]) -> None:
    """Run all jobs side by side until cancelled; a cancelled iteration cleans up after itself."""
    async with trio.open_nursery() as nursery:
        for job in jobs:
            if job.interval_seconds:
                nursery.start_soon(_serve_job, job)


async def _serve_job(job: Job) -> None:
    """Run a job at its cadence, jittered so that replicas don't move in step.

    An iteration that fails costs only itself: a run of failures is logged once, each is counted,
    and the pause grows up to a minute. This is the job iteration's boundary for broad `except`.
    """
    while True:
        pause = job.interval_seconds * random.uniform(0.9, 1.1)  # noqa: S311 - jitter, no secret
        await trio.sleep(_backoff(pause, job.failures_in_a_row))
        job.runs += 1
        try:
            await job.run()
        except Exception as error:
            job.failures += 1
            job.failures_in_a_row += 1
            if job.failures_in_a_row == 1:
                log.exception("job failed", job=job.name)
            else:
                log.debug("job failed again", job=job.name, error=str(error))
        else:
            if job.failures_in_a_row:
                log.info("job works again", job=job.name, failures=job.failures_in_a_row)
            job.failures_in_a_row = 0


def _backoff(pause: float, failures: int) -> float:
    return max(pause, min(pause * 2.0 ** min(failures, 16), BACKOFF_MAX_SECONDS))
