"""Random walks of several ranks, each with faults of its own: they decide alike, and no wrong byte is read."""

import numpy as np
import pytest

from tests.support import layouts
from tests.support.faults import Fault, RandomFaults
from tests.support.ranked_engine import RankedEngine, on_ranks
from tests.support.serving_engine import Served
from tests.support.toy_engine import OutOfBlocksError

RATES = {Fault.FAIL: 0.04, Fault.RAISE: 0.02, Fault.SHORT: 0.03, Fault.LATE: 0.2}
PREFIXES = [np.arange(24), np.arange(100, 140), np.concatenate([np.arange(16), np.arange(200, 216)])]


class Walk:
    """Serves requests as a seed says, the same on every rank; what goes wrong is each rank's own."""

    def __init__(self, engine: RankedEngine, seed: int):
        self.engine, self.rng = engine, np.random.default_rng(seed)
        self.own = np.random.default_rng([seed, engine.rank])
        self.seen: list[object] = []
        self.running: list[Served] = []
        engine.faults.choose = RandomFaults(seed * 10 + engine.rank, RATES)

    def step(self, n: int) -> None:
        if self.own.random() < 0.03:
            self.engine.local.invalidate()  # this rank's pool is lost
        if len(self.running) < 3:
            self.start(n)
        else:
            self.go_on(self.running.pop(int(self.rng.integers(len(self.running)))))
        self.engine.local.check_integrity()

    def start(self, n: int) -> None:
        prefix = PREFIXES[self.rng.integers(len(PREFIXES))]
        cut = int(self.rng.integers(8, len(prefix) + 1))
        tail = self.rng.integers(1000, 1004, int(self.rng.integers(1, 12)))
        request = Served(n, np.concatenate([prefix[:cut], tail]))
        self.look_up(request)
        self.running.append(request)

    def look_up(self, request: Served) -> None:
        found = self.engine.look_up(request)
        self.seen.append((request.request_id, found.hit_tokens, found.checkpoints, sorted(found.arriving)))

    def go_on(self, request: Served) -> None:
        """Loads, possibly computes and stores before anyone knows how that ended, and goes on or begins anew."""
        engine, share, early = self.engine, bool(self.rng.random() < 0.3), bool(self.rng.random() < 0.4)
        try:
            if request.found is None:
                self.look_up(request)
            job = engine.load(request, share=share)
            if early and request.written < len(request.tokens):
                # All ranks compute with what all of them restored: garbage on one is garbage on all.
                words = engine.channel.exchange(b"x" if request.spoilt else b"", 20.0)
                request.spoilt = any(words)
                engine.compute(request, len(request.tokens))
                engine.store(request, frees=False)
            results = [] if self.rng.random() < 0.5 else engine.ranked.poll()
            result = job.result if job.result is not None else engine.ranked.wait(job)
            self.seen.append((request.request_id, result.ok, result.valid_tokens, len(results)))
            if early and not result.ok:
                engine.drop_blocks(request)
                self.look_up(request)
                self.running.append(request)
                return
            if early:
                assert not request.spoilt, "a load is not told to be well where another rank's was not"
            else:
                engine.loaded(request, result)
            engine.finish(request, step=int(self.rng.integers(3, 30)))
        except OutOfBlocksError:
            engine.drop_blocks(request)
            engine.offloader.finish(request.request_id)


def walk(layout, seed, num_ranks, steps=70):
    def script(engine):
        walked = Walk(engine, seed)
        for n in range(steps):
            walked.step(n)
        for request in walked.running:
            engine.offloader.finish(request.request_id)
            engine.drop_blocks(request)
        engine.ranked.wait()
        assert not engine.ranked._open, "all loads have ended"
        assert not engine.ranked._loadable, "nothing is remembered of requests that finished"
        assert not engine.ranked._numbers, "nor are their numbers"
        return walked.seen, engine.bytes_compared, engine.faults.counts.total()

    return on_ranks(num_ranks, layout, script, host_bytes=16000)


@pytest.mark.parametrize("name", ["gemma", "hybrid", "llama4", "uniform"])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_decide_alike_and_read_no_wrong_byte(name, seed):
    outcomes = walk(layouts.ALL[name], seed, num_ranks=2 + seed % 2)
    assert all(seen == outcomes[0][0] for seen, _, _ in outcomes)
    assert all(compared for _, compared, _ in outcomes)
    assert any(faults for _, _, faults in outcomes)
