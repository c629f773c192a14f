"""The law against its literal model: what is needed, hits, load sets, limits, what the device holds."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import _search, coverage
from kvjax.coverage import longest_hit, needed, required, store_set
from kvjax.groups import ChunkedLocal, FullAttention, Kind, Recurrent, Scratch, SlidingWindow
from kvjax.retention import retained_from
from tests.oracles import check_law, law
from tests.oracles.layouts import Instance, cut, group, instances, lists

KINDS = [FullAttention(), *map(SlidingWindow, (1, 2, 7)), *map(ChunkedLocal, (1, 2, 7)), Recurrent(), Scratch()]


def things(kind: Kind, interval: tuple[int, int]) -> frozenset[int]:
    """An interval of tokens as what the model counts: a state counts as the position it stands at."""
    start, stop = interval
    return frozenset({stop}) if isinstance(kind, Recurrent) and start < stop else frozenset(range(start, stop))


# --- needed, required


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != Scratch()])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_needed_and_required_are_those_of_the_model(kind, lookahead):
    if isinstance(kind, (ChunkedLocal, Recurrent)):
        lookahead = 0
    for position in range(40):
        assert things(kind, needed(kind, position)) == law.needed(kind, position)
        spec = group("g", kind, 4, lookahead)
        assert things(kind, required(spec, position)) == law.required(kind, lookahead, position)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_needed_at_0_and_scratch_never_needs_anything(kind):
    assert needed(kind, 0) == required(group("g", kind, 4), 0) == (0, 0)
    assert needed(Scratch(), 40) == required(group("g", Scratch(), 4), 40) == (0, 0)


# --- hits


@settings(max_examples=1000, deadline=None)
@given(instances(), st.booleans())
def test_hit_load_set_and_limits_equal_brute_force(instance: Instance, as_masks: bool):
    assert check_law.hit_difference(instance, as_masks=as_masks) is None


def test_20_000_random_layouts_equal_brute_force():
    """The same seeds in every run; `tests/oracles/check_law.py` runs as many more as are wanted."""
    assert [
        difference for seed in range(20_000) if (difference := check_law.with_seed(check_law.check_hit, seed))
    ] == []


@settings(max_examples=300, deadline=None)
@given(instances(), st.integers(1, 9), st.booleans())
def test_a_search_in_several_spans_finds_the_same(instance: Instance, span: int, as_masks: bool):
    """Long prompts are searched in spans that double; here the first is a few positions wide."""
    with mock.patch.object(_search, "_FIRST_SPAN", span):
        assert check_law.hit_difference(instance, as_masks=as_masks) is None


def test_a_long_prompt_finds_its_hit_far_below_its_end():
    """The hit lies many spans below the end, and the first candidate above it many spans above."""
    chunking = cut(group("full", FullAttention(), 16), group("state", Recurrent(), 50_000))
    hit = longest_hit(chunking, 1_000_000, {"full": np.arange(4_000), "state": [0]})
    assert (hit.hit_tokens, hit.limited_by) == (50_000, ("full", "state"))
    assert hit.load["full"].tolist() == list(range(3125))
    assert longest_hit(chunking, 1_000_000, {"state": [0]}).hit_tokens == 0


def test_groups_that_disagree_hit_where_all_agree():
    """Full attention holds blocks 0 and 1 of 16 tokens; states exist at 16, 48 and 80. The largest of the groups' hits,
    80, reads full blocks that are not there."""
    chunking = cut(group("full", FullAttention(), 16), group("state", Recurrent(), 16))
    assert longest_hit(chunking, 200, {"full": [0, 1], "state": [0, 2, 4]}).hit_tokens == 16
    assert longest_hit(chunking, 200, {"full": [0, 1], "state": [0, 1, 2, 4]}).hit_tokens == 32


def test_no_state_from_beyond_the_hit_is_loaded():
    """20 tokens of full attention, states at 16 and 32. Clamping one by one answers 20 and loads the state at 32."""
    chunking = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 16))
    hit = longest_hit(chunking, 40, {"full": range(5), "state": [0, 1]})
    assert (hit.hit_tokens, lists(hit.load)) == (16, {"full": [0, 1, 2, 3], "state": [0]})


def test_a_hit_may_end_inside_a_chunk():
    """36 tokens in one group, 32 in the other: the last chunk of the first is loaded and used in part."""
    chunking = cut(group("a", FullAttention(), 12), group("b", FullAttention(), 16))
    hit = longest_hit(chunking, 100, {"a": [0, 1, 2], "b": [0, 1]})
    assert (hit.hit_tokens, lists(hit.load), hit.limited_by) == (32, {"a": [0, 1, 2], "b": [0, 1]}, ("b",))


@pytest.mark.parametrize(("num_tokens", "hit_tokens"), [(64, 63), (65, 64), (41, 40), (1, 0)])
def test_the_last_token_is_always_recomputed(num_tokens, hit_tokens):
    """Blocks of 16, all stored: the hit of a 64-token prompt is 63, and one that ends at 40 inside a block is 40, not
    the 48 of three whole blocks."""
    chunking = cut(group("full", FullAttention(), 16))
    assert longest_hit(chunking, num_tokens, {"full": range(4)}).hit_tokens == hit_tokens


@pytest.mark.parametrize(("num_tokens", "hit_tokens"), [(2816, 1408), (2817, 2816), (1408, 0), (1409, 1408)])
def test_a_prompt_that_ends_exactly_at_a_state_resumes_one_state_earlier(num_tokens, hit_tokens):
    """The state at the prompt's end already contains the last token, which must be recomputed."""
    chunking = cut(group("state", Recurrent(), 1408))
    assert longest_hit(chunking, num_tokens, {"state": [0, 1]}).hit_tokens == hit_tokens


def test_a_prompt_of_28_tokens_resumes_at_the_state_at_16():
    chunking = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 16))
    assert longest_hit(chunking, 28, {"full": range(7), "state": [0]}).hit_tokens == 16


def test_only_blocks_in_the_window_are_loaded():
    """Full blocks of 256, window blocks of 64 and a window of 128: a hit of 1024 loads 4 full blocks and the last 2 of
    the window; 2 of the 4 window blocks per 256 tokens need no store at all."""
    chunking = cut(group("full", FullAttention(), 256), group("window", SlidingWindow(128), 64))
    hit = longest_hit(chunking, 1025, {"full": range(4), "window": range(16)})
    assert (hit.hit_tokens, lists(hit.load)) == (1024, {"full": [0, 1, 2, 3], "window": [14, 15]})
    only_boundaries = [i for i in range(16) if i % 4 in (2, 3)]
    for num_tokens in range(257, 1026, 256):
        present = {"full": range(4), "window": only_boundaries}
        assert longest_hit(chunking, num_tokens, present, resume_multiple=256).hit_tokens == num_tokens - 1


def test_a_chunk_that_is_not_there_yet_does_not_stop_a_window_behind_it():
    """[hit, hit, miss, pending] with a window of 2 chunks: the first two serve, and nothing waits for the last."""
    chunking = cut(group("window", SlidingWindow(8), 4))
    hit = longest_hit(chunking, 17, {"window": [0, 1]})
    assert (hit.hit_tokens, lists(hit.load), hit.limited_by) == (8, {"window": [0, 1]}, ("window",))


def test_chunked_attention_reads_from_the_start_of_its_attention_chunk():
    """Attention chunks of 8 tokens in blocks of 4, 13 tokens: a hit at 12 needs block 2 alone, a hit at 8 no block, and
    an engine at 13 may free blocks 0 and 1."""
    chunking = cut(group("chunked", ChunkedLocal(8), 4))
    hit = longest_hit(chunking, 14, {"chunked": [2]})
    assert (hit.hit_tokens, lists(hit.load)) == (12, {"chunked": [2]})
    hit = longest_hit(chunking, 12, {})
    assert (hit.hit_tokens, lists(hit.load)) == (8, {"chunked": []})
    assert retained_from(chunking, 13)["chunked"] == 8


@pytest.mark.parametrize(("tokens_per_chunk", "counts"), [(1024, {8}), (3000, {3, 4})])
def test_an_attention_chunk_of_8192_tokens_takes_few_chunks(tokens_per_chunk, counts):
    """8192 tokens in chunks of 1024 are at most 8; in chunks of 3000 they are 3 or 4, depending on where they start."""
    chunking = cut(group("chunked", ChunkedLocal(8192), tokens_per_chunk))
    found = {len(coverage.chunks_needed(chunking, 0, last)) for last in range(8191, 20 * 8192, 8192)}
    assert found == counts


def test_a_draft_head_costs_its_lookahead_and_no_more():
    """Full and recurrent groups, 16 tokens per block, all stored; the draft head looks one block ahead. A 33-token
    prompt is served 16 tokens, not 0; one that goes on a block further loses nothing."""
    draft = group("draft", FullAttention(), 16, lookahead_tokens=16)
    chunking = cut(group("full", FullAttention(), 16), group("state", Recurrent(), 16), draft)
    present = {"full": range(2), "state": range(2), "draft": range(2)}
    hit = longest_hit(chunking, 33, present)
    assert (hit.hit_tokens, lists(hit.load)) == (16, {"full": [0], "state": [0], "draft": [0]})
    present["draft"] = range(3)
    assert longest_hit(chunking, 33, present).hit_tokens == 32


def test_scratch_groups_have_no_part_in_a_hit():
    chunking = cut(group("full", FullAttention(), 64), group("ring", Scratch(), 4), group("more", FullAttention(), 64))
    hit = longest_hit(chunking, 130, {"full": [0, 1], "more": [0, 1]})
    assert (hit.hit_tokens, lists(hit.load)) == (128, {"full": [0, 1], "ring": [], "more": [0, 1]})
    assert lists(store_set(chunking, 128)) == {"full": [0, 1], "ring": [], "more": [0, 1]}


# --- what the device holds


@pytest.mark.parametrize("on_host", [0, 256])
def test_a_device_that_has_more_than_the_host_loads_nothing(on_host):
    """Host hit 0 or 256, device 400: nothing to load, never -400 or -144 tokens."""
    chunking = cut(group("full", FullAttention(), 16))
    hit = longest_hit(chunking, 500, {"full": range(on_host // 16)}, device_tokens=400)
    assert (hit.hit_tokens, lists(hit.load)) == (400, {"full": []})


def test_the_device_prefix_needs_neither_a_multiple_nor_a_lookahead():
    chunking = cut(group("draft", FullAttention(), 4, lookahead_tokens=4))
    assert longest_hit(chunking, 20, {}, device_tokens=7, resume_multiple=4).hit_tokens == 7
    assert longest_hit(chunking, 20, {}, device_tokens={"draft": 7}, resume_multiple=4).hit_tokens == 7
    assert longest_hit(chunking, 20, {"draft": [2]}, device_tokens=8).hit_tokens == 8


def test_device_prefixes_that_differ_are_no_floor():
    chunking = cut(group("a", FullAttention(), 4), group("b", FullAttention(), 4))
    assert longest_hit(chunking, 20, {}, device_tokens={"a": 9}).hit_tokens == 0
    hit = longest_hit(chunking, 20, {"b": [0, 1, 2]}, device_tokens={"a": 9})
    assert (hit.hit_tokens, lists(hit.load), hit.limited_by) == (9, {"a": [], "b": [0, 1, 2]}, ("a",))


def test_a_state_on_the_device_need_not_stand_at_a_chunks_end():
    chunking = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 16))
    hit = longest_hit(chunking, 20, {"full": [2]}, device_tokens={"full": 8, "state": 10})
    assert (hit.hit_tokens, lists(hit.load)) == (10, {"full": [2], "state": []})
