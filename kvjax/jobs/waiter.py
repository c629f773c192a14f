"""Waiting for jobs, with and without an event loop."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kvjax._checks import shown
from kvjax.jobs.job import Job, JobResult
from kvjax.jobs.jobs import Jobs
from kvjax.tiers.fetch import Fetch

# How long a wait sleeps between two looks, in seconds, at first and at most.
_FIRST_SLEEP_S = 0.0001
LONGEST_SLEEP_S = 0.005


def after(timeout_s: float | None) -> float | None:
    """Returns the time so many seconds from now by the monotonic clock; `None` for never."""
    return None if timeout_s is None else time.monotonic() + timeout_s


class Waiter:
    """Waits for the jobs of an offloader. Other threads may call it meanwhile.

    Args:
        jobs: the jobs.
        opened: the offloader's lock; it raises if the offloader was closed.
        locked: the same lock, also after that.
        see_ended: ends the jobs that have ended; called under the lock.
    """

    def __init__(
        self,
        jobs: Jobs,
        *,
        opened: Callable[[], AbstractContextManager[None]],
        locked: Callable[[], AbstractContextManager[None]],
        see_ended: Callable[[], None],
    ):
        self._jobs = jobs
        self._opened = opened
        self._locked = locked
        self._see_ended = see_ended

    def check(self, job: Any) -> None:
        """Raises a `ValueError` if a job is none of these."""
        if not self._jobs.has(job):
            raise ValueError(f"`job` must be one of this offloader, got {shown(job)}")

    def wait(self, job: Job | None, timeout_s: float | None) -> JobResult | list[JobResult]:
        """Waits for a job, or for all of them; see `Offloader.wait`."""
        until = after(timeout_s)
        for one in self._waited_for(job):
            sleep = _FIRST_SLEEP_S
            while one.ended is None:
                self._look_at(one, until)
                limits = [limit for limit in (until, one.deadline) if limit is not None]
                if one.ended is None and not limits and not isinstance(one.transfer, Fetch):
                    self._block(one)
                elif one.ended is None:
                    time.sleep(max(0.0, min([sleep, *(limit - time.monotonic() for limit in limits)])))
                    sleep = min(2 * sleep, LONGEST_SLEEP_S)
        return self._tell(job)

    async def wait_async(self, job: Job | None, timeout_s: float | None) -> JobResult | list[JobResult]:
        """`wait` for an event loop."""
        until = after(timeout_s)
        for one in self._waited_for(job):
            sleep = _FIRST_SLEEP_S
            while one.ended is None:
                self._look_at(one, until)
                if one.ended is None:
                    await asyncio.sleep(sleep)
                    sleep = min(2 * sleep, LONGEST_SLEEP_S)
        return self._tell(job)

    def _waited_for(self, job: Job | None) -> list[Job]:
        with self._opened():
            if job is None:
                return self._jobs.open_jobs()
            self.check(job)
            return [job]

    def _look_at(self, job: Job, until: float | None) -> None:
        """Sees what ended; raises a `TimeoutError` if it is too late for a job."""
        with self._opened():
            self._see_ended()
        if job.ended is None and until is not None and time.monotonic() >= until:
            raise TimeoutError(f"job {job.job_id} did not end in time")

    def _block(self, job: Job) -> None:
        """Waits for the transfers of a job and of those that it depends on."""
        with self._locked():
            needed = self._jobs.depends_on(job)
        for other in needed:
            other.transfer.settle()

    def _tell(self, job: Job | None) -> JobResult | list[JobResult]:
        with self._locked():
            if job is None:
                return self._jobs.take_ended()
            return self._jobs.tell(job)
