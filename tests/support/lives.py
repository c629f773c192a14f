"""The lives of requests of a `ServingEngine`: looked up, loading, computing, preempted and admitted again, finished.

An engine that goes on before it knows how a load ended keeps its blocks until it does, and gives up what it computed if
the load failed. Every result must be told once.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import kvjax
from kvjax.jobs import Job, JobResult
from tests.support.serving_engine import Served, ServingEngine


@dataclass(eq=False)
class Life:
    """Where a request is. Its load is there until its result was told."""

    served: Served
    goal: int = 0  # tokens at which it ends
    looked_up: bool = False
    state: Literal["waiting", "loading", "computing", "finished"] = "waiting"
    load: Job | None = None


class Lives:
    """What happens to requests. `OutOfBlocksError` leaves a request that must be preempted.

    Args:
        engine: serves them.
    """

    def __init__(self, engine: ServingEngine):
        self.engine = engine
        self.jobs: dict[int, Life] = {}  # those whose result was not told
        self.done = Counter[str]()

    def look_up(self, one: Life, *, on_device: bool = False, **limits: Any) -> kvjax.Lookup:
        """Looks a request up, again perhaps, whatever of it is in flight."""
        found = self.engine.look_up(one.served, on_device=on_device, **limits)
        one.looked_up, one.state, one.load = True, "waiting", None
        self.done["hits"] += found.hit_tokens > 0
        self.done["loads"] += found.hit_tokens > found.device_tokens
        return found

    def load(self, one: Life, **options: Any) -> Job:
        """Loads the hit of a request that was looked up and did not go on since."""
        one.load = self._noted(one, self.engine.load(one.served, **options))
        one.state = "loading"
        return one.load

    def cancel(self, one: Life) -> None:
        """Gives up a load, and goes on as its result says: what was computed on top of it must not be stored."""
        assert one.load is not None, "it is loading"
        self.engine.offloader.cancel(one.load)
        self.hear(self.engine.offloader.poll())

    def step(self, one: Life, num_tokens: int, *, checkpoint: bool = False, **options: Any) -> Job:
        """Computes some tokens at most, and stores."""
        self.engine.compute(one.served, one.served.written + num_tokens)
        return self.store(one, checkpoint=checkpoint, **options)

    def accept(self, one: Life, tokens: np.ndarray) -> None:
        """Adds tokens."""
        self.engine.accept(one.served, tokens)

    def store(self, one: Life, **options: Any) -> Job:
        """Stores; of a request that computes, blocks that left a window are freed."""
        self.done["stores"] += 1
        return self._noted(one, self.engine.store(one.served, frees=one.state == "computing", **options))

    def preempt(self, one: Life, *, store: bool) -> None:
        """Takes a request's blocks, perhaps after a last store. It is to be looked up again. A load under way is given
        up first, as others might be told to share its blocks."""
        if store and one.state != "waiting":
            self.store(one, checkpoint=True)
        if one.load is not None:
            self.engine.offloader.cancel(one.load)
        self.engine.drop_blocks(one.served)
        one.state, one.load = "waiting", None
        self.done["preemptions"] += 1

    def end(self, one: Life) -> None:
        """Finishes a request, whatever of it is in flight."""
        if one.state != "waiting":
            self.store(one, checkpoint=True)
        if one.looked_up:
            self.engine.offloader.finish(one.served.request_id)
        self.engine.drop_blocks(one.served)
        one.state, one.load = "finished", None

    def hear(self, results: Iterable[JobResult], *, keeps: bool = False) -> None:
        """Goes on as results say.

        Args:
            results: as they were told.
            keeps: a request of whose load only a prefix is good keeps the blocks past it, whatever they hold.
        """
        for result in results:
            one = self.jobs.pop(result.job_id)
            self.done["failed"] += not result.ok
            if one.load is None or one.load.job_id != result.job_id:
                continue
            one.load, one.state = None, "computing"
            if one.served.written == one.served.hit_tokens:
                self.engine.loaded(one.served, result, keeps=keeps)
            elif result.ok:
                assert not one.served.spoilt, "a load that did not restore all is not told to be well"
                assert not one.served.stale, "what was invalidated before the load is not restored"
            else:
                self.preempt(one, store=False)  # what it computed since is worth nothing

    def _noted(self, one: Life, job: Job) -> Job:
        assert job.job_id not in self.jobs
        self.jobs[job.job_id] = one
        return job
