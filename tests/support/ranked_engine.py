"""One rank's engine among several: the same requests, blocks of the same ids, other bytes."""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

import kvjax
from kvjax.jobs import JobResult
from kvjax.ranks import RankedOffloader
from tests.support.faults import inject
from tests.support.ranks import Hub, raise_first, run_ranks
from tests.support.serving_engine import Served, ServingEngine

TIMEOUT_S = 20.0


class RankedEngine(ServingEngine):
    """Serves requests as the engines of the other ranks do.

    Args:
        rank: which one.
        hub: where the ranks meet.
        layout: as for `ServingEngine`.
        timeout_s: for the `RankedOffloader`.
        options: for the offloader.
    """

    def __init__(self, rank: int, hub: Hub, layout: kvjax.CacheLayout, *, timeout_s: float = TIMEOUT_S, **options: Any):
        super().__init__(layout, 64, seed=1, **options)
        self.rank, self.weights, self.channel = rank, rank, hub.channel(rank)
        self.local: kvjax.Offloader = self.offloader
        self.faults = inject(self.local)
        self.ranked = RankedOffloader(self.local, self.channel, timeout_s=timeout_s)
        self.offloader: Any = self.ranked

    def serve(self, name: Hashable, tokens: Any, *, step: int = 10**6) -> int:
        """Serves a request to its end, and returns the hit."""
        request = Served(name, np.asarray(tokens))
        hit_tokens = self.look_up(request).hit_tokens
        self.restore(request)
        self.finish(request, step=step)
        return hit_tokens

    def serve_alone(self, name: Hashable, tokens: Any) -> int:
        """Serves a request on this rank alone."""
        self.offloader = self.local
        try:
            return self.serve(name, tokens)
        finally:
            self.offloader = self.ranked

    def restore(self, request: Served, **options: Any) -> JobResult:
        """Loads the hit of a request, and waits for it."""
        result = self.offloader.wait(self.load(request, **options))
        self.loaded(request, result)
        return result

    def finish(self, request: Served, *, step: int = 10**6) -> None:
        """Computes and stores what is left of a request, and ends it."""
        while request.written < len(request.tokens):
            self.compute(request, request.written + step)
            self.store(request)
        self.offloader.finish(request.request_id)
        self.drop_blocks(request)


def on_ranks(
    num_ranks: int, layout: kvjax.CacheLayout, script: Callable[[RankedEngine], Any], **options: Any
) -> list[Any]:
    """Runs a script on every rank, checks every byte, and returns what each returned."""

    def work(rank: int, hub: Hub) -> Any:
        engine = RankedEngine(rank, hub, layout, **{"host_bytes": 1 << 16} | options)
        try:
            outcome = script(engine)
            engine.check_caches()
            engine.local.check_integrity()
            assert not engine.faults.violations
            return outcome
        finally:
            engine.faults.release()
            engine.ranked.close(timeout_s=TIMEOUT_S)

    return raise_first(run_ranks(num_ranks, work))
