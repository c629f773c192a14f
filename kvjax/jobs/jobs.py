"""The jobs of an offloader: who waits for what, and when the books of each are closed."""

import time
from collections.abc import Callable, Hashable

import numpy as np

from kvjax.handles import Load, Store
from kvjax.jobs.job import Job, JobResult
from kvjax.ledger import Ledger
from kvjax.mover import Transfer
from kvjax.observe.durations import Durations
from kvjax.promotions import Promotion
from kvjax.tiers.fetch import Fetch

CANCELLED = "cancelled"
LATE = "not done by its deadline"


class Jobs:
    """Jobs in the order in which they were issued. Not thread-safe.

    What was issued runs to its end, whatever becomes of its job: a transfer cannot be called back. A job that is
    cancelled, or late, has its result at once; its chunks stay pinned or reserved until its transfer has ended, so
    that nothing is written to memory that others have.

    Args:
        ledger: whose books are closed.
        on_error: called after a job whose transfer failed.
        on_moved: called with a job whose moves have ended and are in the books, and how long they took, in seconds.
    """

    def __init__(
        self, ledger: Ledger, on_error: Callable[[], None], on_moved: Callable[[Job, float], None] = lambda *_: None
    ):
        self.num_cancelled = 0
        self.num_late = 0
        self.load_seconds = Durations()
        self.store_seconds = Durations()
        self._ledger = ledger
        self._on_error = on_error
        self._on_moved = on_moved
        self.promote_seconds = Durations()
        self._open: dict[int, Job] = {}  # without a result
        self._given_up: dict[int, Job] = {}  # with one, and a transfer that goes on
        self._ended: list[Job] = []  # not told yet by `take_ended`
        self._failed: list[Job] = []  # loads of whose failure nobody knows
        self._next_id = 0

    @property
    def num_open(self) -> int:
        """Jobs without a result."""
        return len(self._open)

    @property
    def num_given_up(self) -> int:
        """Jobs that were cancelled or late, and whose transfers have not ended."""
        return len(self._given_up)

    def open_jobs(self) -> list[Job]:
        """Returns the jobs without a result."""
        return list(self._open.values())

    def unsettled(self) -> list[Job]:
        """Returns the jobs whose transfers have not been seen to end."""
        return [*self._given_up.values(), *self._open.values()]

    def depends_on(self, job: Job) -> list[Job]:
        """Returns a job after those whose transfers must have ended before it can end, in the order of their issue."""
        by_work = {other.work: other for other in self.unsettled()}
        found, open_ = {job.job_id: job}, [job]
        while open_:
            for work in open_.pop().work.after:
                other = by_work.get(work)
                if other is not None and other.job_id not in found:
                    found[other.job_id] = other
                    open_.append(other)
        return [found[job_id] for job_id in sorted(found)]

    def add(
        self,
        request_id: Hashable,
        operation: str,
        work: Load | Store | Promotion,
        transfer: Transfer | Fetch,
        deadline_s: float | None = None,
    ) -> Job:
        """Takes on a move that was prepared in the ledger and issued."""
        now = time.monotonic()
        deadline = None if deadline_s is None else now + deadline_s
        job = Job(self._next_id, request_id, operation, work, transfer, now, deadline, self)
        self._next_id += 1
        self._open[job.job_id] = job
        if not work.num_chunks and self._may_end(job):
            self._end(job)
        return job

    def has(self, job: object) -> bool:
        """Whether a job is one of these."""
        return isinstance(job, Job) and job.owner is self

    def see_ended(self) -> None:
        """Ends the jobs whose transfers ended, and gives up those that are late. Does not wait."""
        self._acknowledge()
        self._ledger.pool.clear_away()
        for job in [*self._given_up.values()]:
            if self._may_end(job):
                self._end(job)
        now = time.monotonic()
        for job in [*self._open.values()]:  # a job comes after those that it depends on
            if self._may_end(job):
                self._end(job)
            elif job.deadline is not None and now >= job.deadline:
                self._give_up(job, LATE)
                self.num_late += 1

    def cancel(self, job: Job, why: str = CANCELLED) -> None:
        """Gives up an open job."""
        self._give_up(job, why)
        self.num_cancelled += 1
        job.was_told = True
        self._acknowledge()

    def take_ended(self) -> list[JobResult]:
        """Returns the results not told yet; they are told now."""
        ended, self._ended = self._ended, []
        results = [job.result for job in ended]
        self._acknowledge()
        return [result for result in results if result is not None]

    def tell(self, job: Job) -> JobResult:
        """Returns the result of a job that ended; it is told now."""
        self._ended = [ended for ended in self._ended if ended is not job]
        result = job.result
        assert result is not None, "the job ended"
        self._acknowledge()
        return result

    def _acknowledge(self) -> None:
        for job in self._failed:
            if job.was_told and isinstance(job.work, Load):
                self._ledger.acknowledge(job.work)
        self._failed = [job for job in self._failed if not job.was_told]

    def _may_end(self, job: Job) -> bool:
        return job.transfer.done() and self._ledger.may_complete(job.work)

    def _give_up(self, job: Job, why: str) -> None:
        del self._open[job.job_id]
        self._given_up[job.job_id] = job
        valid_tokens = None
        if isinstance(job.work, Load):
            valid_tokens = job.work.device_tokens
            self._ledger.give_up(job.work)
            self._failed.append(job)
        if isinstance(job.transfer, Fetch):
            job.transfer.abandon(why)
        self._conclude(job, ok=False, valid_tokens=valid_tokens, error=why)
        if self._may_end(job):  # a promotion: nothing of it goes on
            self._end(job)

    def _end(self, job: Job) -> None:
        self._open.pop(job.job_id, None)
        self._given_up.pop(job.job_id, None)
        took = time.monotonic() - job.issued_at
        work, transfer = job.work, job.transfer
        error: Exception | None = None
        valid_tokens = None
        if isinstance(transfer, Fetch):
            assert isinstance(work, Promotion), "only promotions are fetched"
            ok, why = self._end_promotion(work, transfer)
            self.promote_seconds.add(took)
        else:
            assert not isinstance(work, Promotion), "promotions are fetched"
            error = transfer.settle()
            moved = transfer.moved(work.plan)
            why = f"{type(error).__name__}: {error}" if error is not None else ""
            if isinstance(work, Load):
                valid_tokens = self._ledger.complete_load(work, ok=moved, told=job.was_told, void=transfer.is_void)
                ok = valid_tokens == work.hit_tokens and error is None
                if not ok and not job.was_told and job.ended is None:
                    self._failed.append(job)
                why = why or ("" if ok else _why_not(work))
                self.load_seconds.add(took)
            else:
                wanted = job.ended is None  # a store that was given up is not published
                ok = self._ledger.complete_store(work, ok=moved if wanted else False) and error is None
                why = why or ("" if ok else "a load that its tokens were computed from failed")
                self.store_seconds.add(took)
        self._on_moved(job, took)
        if error is not None:
            self._on_error()
        if job.ended is None:
            self._conclude(job, ok=ok, valid_tokens=valid_tokens, error=why)

    def _end_promotion(self, promotion: Promotion, fetch: Fetch) -> tuple[bool, str]:
        """Whether all chunks of a promotion came and became resident, and why not."""
        came = fetch.came
        published = self._ledger.complete_promotion(promotion, ok=came)
        invalidated = "its chunks were invalidated meanwhile" if published < np.count_nonzero(came) else ""
        why = fetch.why_not or invalidated
        return not why, why

    def _conclude(self, job: Job, *, ok: bool, valid_tokens: int | None, error: str) -> None:
        job.ended = JobResult(
            job_id=job.job_id,
            request_id=job.request_id,
            operation=job.operation,
            ok=ok,
            num_chunks=job.work.num_chunks,
            num_bytes=job.work.num_bytes,
            valid_tokens=valid_tokens,
            error=error,
        )
        self._ended.append(job)


def _why_not(load: Load) -> str:
    if load.stale:
        return "its chunks were invalidated after the lookup"
    return "a load whose blocks it shares failed"
