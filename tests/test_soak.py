"""A few seconds of the soak of `tests/benchmarks/soak.py`, with more faults than in the long one."""

import pytest

from tests.benchmarks.soak import Soak, run
from tests.support.faults import Fault

RATES = {Fault.RAISE: 0.005, Fault.FAIL: 0.01, Fault.HANG: 0.005, Fault.LATE: 0.1, Fault.SHORT: 0.005}


@pytest.mark.parametrize(("transfer", "policy"), [("direct", "lru"), ("staged", "arc")])
def test_many_requests_under_faults_get_right_bytes_and_leave_nothing_behind(transfer, policy):
    soak = Soak(0, transfer=transfer, policy=policy, most_requests=24, host_bytes=2**14, fault_rates=RATES)
    for _ in range(120):
        soak.tick()
    stats = soak.offloader.stats()
    left = soak.drain()
    assert {name: number for name, number in left.items() if number} == {}
    assert min(stats.chunks_loaded, stats.evicted_chunks, stats.failed_jobs) > 0
    assert soak.engine.bytes_compared > 0
    assert {fault for _, fault in soak.faulty.counts} == set(Fault)


def test_the_summary_says_what_happened():
    summary = run(Soak(1, most_requests=4), seconds=0.5, show_progress=False)
    assert summary["leaks"] == {}
    assert summary["lookups"] > 0
    assert set(summary["longest_ms"]) == {"lookup", "poll", "prepare_load", "prepare_store"}
