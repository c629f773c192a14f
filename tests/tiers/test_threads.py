"""One thread serves requests from tiers, others ask, flush, fetch and invalidate. All restored bytes are compared."""

from collections import OrderedDict
from itertools import count

import numpy as np
import pytest

from tests.support.faults import inject
from tests.support.served import check_nothing_is_left, serve
from tests.support.serving_engine import ServingEngine
from tests.support.tier_faults import Fault, RandomFaults, no_faults
from tests.support.tiered_walk import LAYOUT
from tests.support.tiers import FaultyTier, MemoryTier
from tests.test_threads import Others
from tests.test_threads import switches_often as switches_often

PROMPTS = [np.arange(40) + 1000 * n for n in range(6)]


@pytest.mark.parametrize("transfer", ["direct", "staged"])
@pytest.mark.parametrize("write", ["through", "back"])
def test_others_may_call_whatever_they_like(transfer, write):
    entries = OrderedDict()
    rates = {fault: 0.2 / len(Fault) for fault in Fault}
    tier = FaultyTier(MemoryTier(entries=entries, write=write, timeout_s=0.05), RandomFaults(3, rates))
    engine = ServingEngine(LAYOUT, 200, host_bytes=3000, transfer=transfer, checkpoint_tokens=8, tiers=[tier])
    faulty, offloader, numbers = inject(engine.offloader), engine.offloader, count()

    def look_up():
        name = f"other {next(numbers)}"
        found = offloader.lookup(name, PROMPTS[0], wait_s=0.01)
        assert found.promised_tokens >= found.hit_tokens
        offloader.finish(name)

    def fetch_ahead():
        job = offloader.prefetch(PROMPTS[1])
        if job is not None:
            offloader.cancel(job)

    def clear_the_tenants():
        offloader.invalidate(offloader.namespace(b"nobody"))

    with Others(
        look_up,
        fetch_ahead,
        clear_the_tenants,
        offloader.stats,
        lambda: offloader.flush(timeout_s=0.01),
        lambda: offloader.note_prefill(100, 1e-9 if next(numbers) % 2 else 1.0),
    ):
        for n in range(20):
            serve(engine, f"mine {n}", PROMPTS[n % len(PROMPTS)], step=16)
    assert engine.bytes_compared > 0
    tier.choose = no_faults
    tier.settle()
    offloader._flow.levels[0].health.answered()
    offloader.wait()
    check_nothing_is_left(engine, faulty)
    tier.timeout_s = 30.0
    offloader.flush(timeout_s=30)  # what was under way may fail still
    assert offloader.flush(timeout_s=30)
    offloader.close()
