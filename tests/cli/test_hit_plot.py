"""What the picture of a hit shows: runs of chunks, states, and the part near the hit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvjax import FullAttention, Recurrent, SlidingWindow, explain_hit
from kvjax.cli import hit_plot
from tests.oracles.layouts import cut, group

CHUNKS = st.sets(st.integers(0, 40)).map(sorted)
VIEWS = st.tuples(st.integers(0, 60), st.integers(1, 100)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def rows_of(chunking, num_tokens, present, device_tokens=0):
    explanation = explain_hit(chunking, num_tokens, present, device_tokens=device_tokens)
    return explanation, hit_plot._rows(explanation, chunking, present, device_tokens)


@given(CHUNKS, st.integers(1, 5), VIEWS)
def test_runs_cover_the_tokens_of_the_chunks_that_are_in_view(chunks, tokens, view):
    chunking = cut(group("a", FullAttention(), tokens))
    _, (row,) = rows_of(chunking, 300, {"a": chunks})
    starts, stops = hit_plot._visible(row.starts, row.stops, view, least=0)
    seen = {t for start, stop in zip(starts, stops, strict=True) for t in range(int(start), int(stop))}
    assert seen == {c * tokens + i for c in chunks for i in range(tokens)} & set(range(*view))


@given(CHUNKS, VIEWS)
def test_what_is_small_is_widened_in_order_and_without_overlap(chunks, view):
    found = np.array(chunks, np.int64)
    starts, stops = hit_plot._visible(found, found + 1, view, least=0.1)
    assert (stops - starts >= 0.1 * (view[1] - view[0]) - 1e-9).all()
    assert (starts[1:] > stops[:-1]).all()
    for chunk in set(chunks) & set(range(*view)):
        assert ((starts <= chunk) & (stops >= chunk + 1)).any()


@given(CHUNKS, st.integers(1, 5), VIEWS)
def test_states_are_drawn_at_the_ends_of_their_chunks(chunks, tokens, view):
    _, (row,) = rows_of(cut(group("state", Recurrent(), tokens)), 300, {"state": chunks})
    drawn = hit_plot._states(row.starts, row.stops, tokens, view).tolist()
    assert drawn == [(c + 1) * tokens for c in chunks if view[0] <= (c + 1) * tokens <= view[1]]


def test_the_part_near_the_hit_holds_the_windows_of_the_hit_and_of_the_next_candidate():
    chunking = cut(group("full", FullAttention(), 16), group("local", SlidingWindow(256), 16))
    present = {"full": range(5000), "local": [*range(1000, 1020), *range(1022, 1100)]}
    explanation, rows = rows_of(chunking, 100_000, present)
    assert (explanation.hit.hit_tokens, explanation.next_tokens) == (17_600, 17_601)
    near = hit_plot._near(explanation, rows)
    assert near is not None
    assert 16_000 < near[0] < 17_600 - 255
    assert 17_601 < near[1] < 18_000


def test_a_small_request_is_drawn_once():
    explanation, rows = rows_of(cut(group("a", FullAttention(), 4)), 41, {"a": [0, 1]})
    assert hit_plot._near(explanation, rows) is None


def test_what_the_device_holds_is_the_needed_part_of_its_prefix():
    chunking = cut(group("full", FullAttention(), 4), group("local", SlidingWindow(5), 4), group("s", Recurrent(), 4))
    _, rows = rows_of(chunking, 41, {}, device_tokens={"full": 9, "local": 30, "s": 0})
    assert [row.device for row in rows] == [(0, 9), (26, 30), (0, 0)]
