"""The loop that runs the jobs: cadence, backoff, and errors that stay with their job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from structlog.testing import capture_logs

from queen_trio.jobs.runner import BACKOFF_MAX_SECONDS, Job, serve_jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio.testing import MockClock

JITTER = 0.1


class Work:
    """A job's work: notes when it runs, and fails while it is told to."""

    def __init__(self, takes: float = 0) -> None:
        self.takes = takes
        self.fails = False
        self.at: list[float] = []
        self.cancelled = 0

    async def run(self) -> None:
        self.at.append(trio.current_time())
        try:
            await trio.sleep(self.takes)
        except trio.Cancelled:
            self.cancelled += 1
            raise
        if self.fails:
            raise OSError("broken")

    @property
    def pauses(self) -> list[float]:
        ends = [at + self.takes for at in self.at]
        return [later - end for end, later in zip(ends, self.at[1:], strict=False)]


async def serve_for(seconds: float, jobs: Sequence[Job]) -> None:
    with trio.move_on_after(seconds):
        await serve_jobs(jobs)


async def test_cadence(autojump_clock: MockClock) -> None:
    """The interval is the pause between two iterations, jittered: replicas drift apart."""
    quick, slow = Work(), Work(takes=3)
    jobs = [Job("quick", 5, quick.run), Job("slow", 60, slow.run)]
    await serve_for(605, jobs)
    assert quick.at[0] >= 5 * (1 - JITTER), "not in the moment of the boot"
    assert all(5 * (1 - JITTER) <= pause <= 5 * (1 + JITTER) for pause in quick.pauses)
    assert all(60 * (1 - JITTER) <= pause <= 60 * (1 + JITTER) for pause in slow.pauses)
    assert len({round(pause, 6) for pause in quick.pauses}) > 10
    assert (jobs[0].runs, jobs[0].failures) == (len(quick.at), 0)
    assert 109 <= len(quick.at) <= 134


async def test_an_interval_of_0_is_never(autojump_clock: MockClock) -> None:
    """QUEEN_LOG_RATES_MS=0 means it; a loop without a pause would take the whole processor."""
    works, never = Work(), Work(takes=1)
    await serve_for(60, [Job("works", 5, works.run), Job("never", 0, never.run)])
    assert works.at
    assert never.at == []


async def test_errors_cost_only_their_job(autojump_clock: MockClock) -> None:
    works, breaks = Work(), Work()
    breaks.fails = True
    jobs = [Job("works", 5, works.run), Job("breaks", 5, breaks.run)]
    with capture_logs() as logs:
        await serve_for(600, jobs)
    assert len(works.at) >= 109
    assert jobs[1].failures == jobs[1].runs == len(breaks.at)
    # 5, 10, 20, 40, 60, 60 …
    for pause, want in zip(breaks.pauses, [10, 20, 40, 60, 60, 60], strict=False):
        most = min(want * (1 + JITTER), BACKOFF_MAX_SECONDS)
        assert want * (1 - JITTER) <= pause <= most + 1e-6
    loud = [line for line in logs if line["log_level"] == "error"]
    assert [(line["event"], line["job"]) for line in loud] == [("job failed", "breaks")]
    assert loud[0]["exc_info"]
    quiet = [line for line in logs if line["log_level"] == "debug"]
    assert len(quiet) == len(breaks.at) - 1


async def test_it_recovers_and_is_logged_again_the_next_time(autojump_clock: MockClock) -> None:
    work = Work()
    work.fails = True
    job = Job("job", 5, work.run)
    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_jobs, [job])
            await trio.sleep(50)
            work.fails = False
            await trio.sleep(100)
            assert job.failures_in_a_row == 0
            assert work.pauses[-1] <= 5 * (1 + JITTER)
            failures = job.failures
            work.fails = True
            await trio.sleep(6)
            nursery.cancel_scope.cancel()
    assert failures >= 3
    assert job.failures > failures
    events = [line["event"] for line in logs if line["log_level"] != "debug"]
    assert events == ["job failed", "job works again", "job failed"]
    assert logs[failures]["failures"] == failures


async def test_a_long_interval_is_not_shortened_by_an_error(autojump_clock: MockClock) -> None:
    work = Work()
    work.fails = True
    await serve_for(2000, [Job("job", 600, work.run)])
    assert all(pause >= 600 * (1 - JITTER) for pause in work.pauses)
    assert len(work.at) >= 3


async def test_cancellation_ends_an_iteration(autojump_clock: MockClock) -> None:
    work = Work(takes=1000)
    await serve_for(10, [Job("job", 1, work.run)])
    assert work.cancelled == 1


async def test_what_is_no_error_of_the_job_ends_all(autojump_clock: MockClock) -> None:
    async def interrupt() -> None:
        await trio.lowlevel.checkpoint()
        raise KeyboardInterrupt

    with pytest.raises(BaseExceptionGroup) as caught:
        await serve_for(10, [Job("job", 1, interrupt)])
    assert caught.group_contains(KeyboardInterrupt)
