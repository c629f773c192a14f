"""Lookups that reach below the host pool: what is there, whether it pays, and the promotions that bring it."""

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from kvjax.coverage import Hit
from kvjax.decision import Restore
from kvjax.handles import Lookup
from kvjax.jobs.job import Job
from kvjax.jobs.jobs import Jobs
from kvjax.ledger import Ledger
from kvjax.positions import Restorable
from kvjax.promotions import Promotion
from kvjax.requests import Request
from kvjax.tiers.fetch import Fetch
from kvjax.tiers.flow import Found, TierFlow

# How long a wait sleeps between two looks.
_SLEEP_S = 0.005
_NO_DEADLINE_S = 1e9
# Times that a promotion for which the pool makes no room is tried for less.
_MOST_TRIES = 12


class Promoter:
    """Answers lookups from all levels. It asks tiers, and waits for them, without the offloader's lock.

    Args:
        ledger: of the host pool.
        flow: the tiers.
        jobs: which promotions become.
        opened: the offloader's lock; it raises if the offloader was closed.
        see_ended: ends the jobs that have ended; called under the lock.
        deadline_s: of promotions, in seconds; `None` for none.
        wait_s: how long a lookup waits by default, in seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        flow: TierFlow,
        jobs: Jobs,
        *,
        opened: Callable[[], AbstractContextManager[None]],
        see_ended: Callable[[], None],
        deadline_s: float | None,
        wait_s: float,
    ):
        self._ledger = ledger
        self._flow = flow
        self._jobs = jobs
        self._opened = opened
        self._see_ended = see_ended
        self._deadline_s = deadline_s
        self._wait_s = wait_s
        self._under_way: dict[Hashable, Job] = {}  # the last one of each request that was looked up

    def promotion(self, request_id: Hashable) -> Job | None:
        """Returns the promotion that a request's last lookup left under way, if any. Under the lock."""
        return self._under_way.get(request_id)

    def forget(self, request_id: Hashable) -> None:
        """Forgets the promotion of a request, which goes on. Under the lock."""
        self._under_way.pop(request_id, None)

    def chosen(
        self,
        request_id: Hashable,
        request: Request,
        found: Lookup,
        *,
        ranks: Sequence[Restorable],
        restore: Restore,
        wait_s: float | None,
    ) -> Lookup:
        """Returns the answer of a lookup that can be restored from several levels, or computed instead.

        Args:
            request_id: the request.
            request: what is known of it.
            found: what the host pool alone has.
            ranks: see `Ledger.lookup`.
            restore: what the caller wants.
            wait_s: how long to wait for what must come, in seconds; `None`: the default.
        """
        below = self._flow.find(request, ranks=ranks)
        decision, hit = self._flow.decide(below, found.hit_tokens, restore)
        job = None
        if hit.hit_tokens > found.hit_tokens:
            job = self._promote(request_id, below, hit, None)
            if job is not None:
                self._await(job, self._wait_s if wait_s is None else wait_s)
        with self._opened():
            if not self._ledger.is_current(request_id, request):
                return replace(found, decision=decision)  # another call has finished it, or looked it up again
            if job is not None or hit.hit_tokens < found.hit_tokens:
                limit = None if decision.restores else 0
                found = self._ledger.look_again(request_id, ranks=ranks, max_load_tokens=limit)
            promised = found.hit_tokens
            if job is not None and job.ended is None and isinstance(job.work, Promotion):
                self._under_way[request_id] = job
                promised = max(promised, job.work.hit_tokens)
            elif job is not None:
                self._jobs.tell(job)
            return replace(found, decision=decision, promised_tokens=promised)

    def prefetch(self, request: Request, deadline_s: float | None) -> Job | None:
        """Starts to bring what a request that nobody looked up needs; `None` if there is nothing to bring."""
        if not self._flow.levels:
            return None
        found = self._flow.find(request)
        return self._promote(None, found, found.hit(), deadline_s)

    def _promote(self, request_id: Hashable, found: Found, hit: Hit, deadline_s: float | None) -> Job | None:
        """Starts to bring what a hit needs, if that is still wanted; less of it where there is no room for all."""
        limit = self._deadline_s if deadline_s is None else deadline_s
        hit = self._flow.fitting(found, hit)
        for _ in range(_MOST_TRIES):
            with self._opened():
                if request_id is not None and not self._ledger.is_current(request_id, found.request):
                    return None
                started = self._flow.promote(request_id, found, hit, _NO_DEADLINE_S if limit is None else limit)
                if started is not None:
                    promotion, fetch = started
                    if promotion.num_chunks or promotion.after:
                        return self._jobs.add(request_id, "promote", promotion, fetch, limit)
                    self._ledger.complete_promotion(promotion, ok=True)
                    return None
            if hit.hit_tokens <= found.request.fallback:
                return None
            hit = found.hit((found.request.fallback + hit.hit_tokens) // 2)
        return None

    def _await(self, job: Job, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        while job.ended is None and (left := until - time.monotonic()) > 0:
            if job.transfer.done():
                time.sleep(min(_SLEEP_S, left))  # another promotion must end first
            elif isinstance(job.transfer, Fetch):
                job.transfer.settle(min(_SLEEP_S, left))
            with self._opened():
                self._see_ended()
