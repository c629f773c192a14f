"""Synthetic traces: valid, the same for the same seed, and of the shape that each kind promises."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import FullAttention
from kvjax.observe.calls import CallOrder, FinishCall, LookupCall, Trace
from kvjax.observe.replay import replay
from kvjax.observe.workloads import KINDS, Workload, workload_calls
from kvjax.packing import cut_into_units
from tests.oracles.layouts import cut, group

SMALL = Workload(
    "mixed",
    requests=60,
    conversations=6,
    turn_tokens=40,
    reply_tokens=40,
    most_tokens=600,
    system_tokens=200,
    document_tokens=400,
    documents=3,
)
FULL16 = cut(group("full", FullAttention(), 16))


def lookups(workload):
    return [call for call in workload_calls(workload) if isinstance(call, LookupCall)]


def hit_rate(workload, chunks=100_000):
    calls = list(workload_calls(workload))
    trace = Trace(workload.tokens_per_hash, calls)
    return replay(trace, FULL16, cut_into_units(FULL16, 64), host_bytes=64 * chunks).hit_rate


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(0, 2**40),
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(1, 8),
    st.floats(0, 1),
    st.floats(0, 10),
)
def test_calls_follow_on_each_other_and_every_request_ends(kind, seed, in_flight, unit, conversations, share, zipf):
    workload = replace(
        SMALL,
        kind=kind,
        seed=seed,
        in_flight=in_flight,
        tokens_per_hash=unit,
        conversations=conversations,
        scan_share=share,
        zipf=zipf,
    )
    order = CallOrder(unit)
    begun = ended = most = 0
    for call in workload_calls(workload):
        order.check(call)
        begun += isinstance(call, LookupCall)
        ended += isinstance(call, FinishCall)
        most = max(most, begun - ended)
    assert begun == ended == 60
    assert most <= in_flight


@pytest.mark.parametrize("kind", KINDS)
def test_equal_arguments_give_equal_calls_and_other_seeds_others(kind):
    workload = replace(SMALL, kind=kind)
    calls = list(workload_calls(workload))
    assert calls == list(workload_calls(workload))
    starts, others = ({call.hashes[:16] for call in lookups(replace(workload, seed=seed))} for seed in (0, 1))
    assert not (starts & others) - {b""}, "nothing is shared with another seed"


def test_a_turn_goes_on_from_the_whole_of_the_conversation_before():
    """One conversation: each prompt begins with the one before, and is longer by its reply and a turn."""
    workload = replace(SMALL, kind="multi-turn", conversations=1, most_tokens=100_000)
    found = lookups(workload)
    for before, after in pairwise(found):
        assert after.hashes.startswith(before.hashes)
        assert after.num_tokens > before.num_tokens


def test_a_conversation_that_is_too_long_ends():
    found = lookups(replace(SMALL, kind="multi-turn", conversations=1, most_tokens=300))
    assert max(call.num_tokens for call in found) < 300
    assert any(b.num_tokens < a.num_tokens for a, b in pairwise(found))


def test_a_turn_waits_for_the_one_before():
    """With all turns of one conversation, no two requests are served at a time."""
    open_now = 0
    for call in workload_calls(replace(SMALL, kind="multi-turn", conversations=1)):
        open_now += isinstance(call, LookupCall) - isinstance(call, FinishCall)
        assert open_now <= 1


def test_prompts_that_share_a_system_prompt_share_its_units_and_no_more():
    found = lookups(replace(SMALL, kind="shared-prefix", systems=2, system_tokens=160))
    systems = Counter(call.hashes[: 10 * 16] for call in found)
    assert len(systems) == 2
    after = [call.hashes[10 * 16 : 11 * 16] for call in found if call.num_tokens >= 176]
    assert len(set(after)) == len(after) > 10


def test_popular_ones_are_asked_for_more_often():
    workload = replace(SMALL, kind="shared-prefix", requests=600, systems=8, system_tokens=32, zipf=1.5)
    ranked = Counter(call.hashes[: 2 * 16] for call in lookups(workload)).most_common()
    assert ranked[0][1] > 4 * ranked[-1][1]
    even = Counter(call.hashes[: 2 * 16] for call in lookups(replace(workload, zipf=0))).most_common()
    assert even[0][1] < 2 * even[-1][1]


@pytest.mark.parametrize(("share", "distinct"), [(0.0, 3), (1.0, 60)])
def test_a_share_of_documents_is_never_seen_again(share, distinct):
    found = lookups(replace(SMALL, kind="scan", scan_share=share))
    assert len({call.hashes[: 25 * 16] for call in found}) == distinct
    assert hit_rate(replace(SMALL, kind="scan", scan_share=1.0)) == 0


def test_documents_seen_once_flush_a_pool_that_holds_the_others():
    """A pool of about the three documents: asked for alone they stay, with scans between they do not."""
    workload = replace(
        SMALL, kind="scan", requests=200, document_tokens=1600, in_flight=1, turn_tokens=4, reply_tokens=4
    )
    alone = hit_rate(replace(workload, scan_share=0.0), chunks=310)
    flushed = hit_rate(replace(workload, scan_share=0.6), chunks=310)
    held = hit_rate(replace(workload, scan_share=0.6))
    assert alone > 0.9
    assert flushed < 0.75 * held


def test_a_mix_has_all_three():
    found = lookups(replace(SMALL, requests=200))
    starts = Counter(call.hashes[: 12 * 16] for call in found if call.num_tokens >= 200)
    assert sum(count > 8 for count in starts.values()) >= 3, "system prompts and documents come again"
    assert sum(call.num_tokens < 200 for call in found) > 5, "conversations begin short"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "random"}, "`kind` must be one of multi-turn, shared-prefix, scan, mixed, got 'random'"),
        ({"requests": 0}, "`requests` must be a positive int, got 0"),
        ({"seed": -1}, "`seed` must be a non-negative int, got -1"),
        ({"turn_tokens": 2**21}, "`turn_tokens` must be below 1048576, got 2097152"),
        ({"document_tokens": 1.5}, "`document_tokens` must be a positive int, got 1.5"),
        ({"scan_share": 1.01}, "`scan_share` must be a number from 0 to 1, got 1.01"),
        ({"scan_share": float("nan")}, "`scan_share` must be a number from 0 to 1, got nan"),
        ({"zipf": -0.5}, "`zipf` must be a number from 0 to 10, got -0.5"),
        ({"zipf": True}, "`zipf` must be a number from 0 to 10, got True"),
    ],
)
def test_a_value_out_of_range_is_refused(change, text):
    with pytest.raises(ValueError, match=text):
        replace(SMALL, **change)
