"""Durations fall into the bucket whose bound they do not pass, and a snapshot stays as it was."""

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.observe.durations import BOUNDS_SECONDS, DurationCounts, Durations


@given(st.lists(st.floats(0, 100) | st.sampled_from(BOUNDS_SECONDS)))
def test_each_duration_is_counted_once_below_its_bound(seconds):
    durations = Durations()
    for one in seconds:
        durations.add(one)
    counts = durations.snapshot()
    edges = [*BOUNDS_SECONDS, float("inf")]
    below = [sum(one <= edge for one in seconds) for edge in edges]
    assert [sum(counts.counts[: n + 1]) for n in range(len(edges))] == below
    assert counts.num_durations == len(seconds)
    assert counts.total_seconds == pytest.approx(sum(seconds))


def test_bounds_ascend():
    assert list(BOUNDS_SECONDS) == sorted(set(BOUNDS_SECONDS))
    assert bisect.bisect_left(BOUNDS_SECONDS, 0.0) == 0


def test_a_snapshot_is_not_changed_by_later_durations():
    durations = Durations()
    durations.add(0.001)
    before = durations.snapshot()
    durations.add(0.001)
    assert before.num_durations == 1
    assert durations.snapshot().num_durations == 2
    assert Durations().snapshot() == DurationCounts()


@pytest.mark.parametrize("seconds", [-1e-9, float("nan"), float("inf")])
def test_what_is_no_duration_is_refused(seconds):
    durations = Durations()
    with pytest.raises(ValueError, match="`seconds` must be finite and not negative, got"):
        durations.add(seconds)
    assert durations.snapshot() == DurationCounts()
