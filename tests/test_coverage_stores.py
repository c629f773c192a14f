"""Store sets, cuts, and what an engine may free, against the literal model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.chunking import Chunking
from kvjax.coverage import longest_hit, next_cut, store_set, stored_positions
from kvjax.groups import ChunkedLocal, FullAttention, Recurrent, SlidingWindow
from kvjax.retention import retained_from
from tests.oracles import check_law, law
from tests.oracles.layouts import chunkings, cut, group, lists, random_presence

# --- store sets and cuts


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Chunking, int, int, dict[str, list[int]]]:
    """A chunking, a checkpoint, a multiple and the chunks that cannot be had."""

    def pick(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    chunking, checkpoint = draw(chunkings()), pick(1, 60)
    missing = random_presence(pick, chunking, checkpoint) if pick(0, 2) == 0 else {}
    return chunking, checkpoint, pick(1, 5), missing


@settings(max_examples=1500, deadline=None)
@given(checkpoints())
def test_the_store_set_equals_brute_force_and_later_requests_hit_where_they_could(case):
    assert check_law.store_difference(*case) is None


@given(chunkings())
def test_nothing_is_stored_at_0(chunking):
    assert stored_positions(chunking, 0) == (0, 0)
    assert lists(store_set(chunking, 0)) == {name: [] for name in chunking.layout.names}


def test_a_lost_chunk_makes_the_store_fall_back_to_what_can_still_be_had():
    """A chunk slid out of the window and was re-used before it was stored: nothing that needs it is stored for it."""
    chunking = cut(group("full", FullAttention(), 4), group("window", SlidingWindow(8), 4))
    assert stored_positions(chunking, 20, missing={"window": [3]}) == (12, 12)
    for missing in ([3], [9, 3], np.array([0, 0, 0, 1, 0, 1, 1, 1], bool)):
        assert lists(store_set(chunking, 20, missing={"window": missing})) == {"full": [0, 1, 2], "window": [1, 2]}
    with pytest.raises(ValueError, match="`missing` must name groups of the layout"):
        store_set(chunking, 20, missing={"other": [3]})
    with pytest.raises(ValueError, match="`missing` of group 'full' must hold non-negative chunk indices, got -1"):
        store_set(chunking, 20, missing={"full": [-1]})


def test_a_store_serves_the_window_of_the_hit_and_not_of_the_prompt():
    """A window of 2 blocks before a prompt's end, 40, is not that before the hit, 32, which states at multiples of
    16 allow: storing blocks 8 and 9 would be stored for ever and never hit."""
    chunking = cut(group("window", SlidingWindow(8), 4), group("state", Recurrent(), 16))
    assert lists(store_set(chunking, 40)) == {"window": [6, 7], "state": [1]}


def test_a_draft_heads_lookahead_is_stored():
    """Window of 2 blocks; the draft head looks one block ahead. Keeping 2 blocks would be stores and never a hit."""
    chunking = cut(group("draft", SlidingWindow(9), 4, lookahead_tokens=4))
    stored = store_set(chunking, 16, resume_multiple=4)
    assert lists(stored) == {"draft": [1, 2, 3]}
    assert longest_hit(chunking, 17, stored, resume_multiple=4).hit_tokens == 12


def test_a_prompt_that_ends_at_a_state_stores_the_state_before_it_too():
    """The same prompt sent again resumes one state earlier (S), a longer one at its end (R)."""
    chunking = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 8))
    assert stored_positions(chunking, 24) == (16, 24)
    assert lists(store_set(chunking, 24)) == {"full": [0, 1, 2, 3, 4, 5], "state": [1, 2]}


@settings(max_examples=1500, deadline=None)
@given(
    chunkings(),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.integers(0, 50),
    st.booleans(),
    st.integers(1, 4),
)
def test_the_next_cut_equals_brute_force(chunking, checkpoints, position, just_before_one, multiple):
    if just_before_one:
        position = max(0, checkpoints[0] - 1)
    found = next_cut(chunking, position, checkpoints, resume_multiple=multiple)
    assert found == law.next_cut(chunking, position, checkpoints, multiple)


def test_a_checkpoint_one_token_ahead_is_a_cut():
    assert next_cut(cut(group("state", Recurrent(), 4)), 3, [9, 4]) == 4


def test_an_engine_that_ends_its_steps_at_the_cuts_can_store_every_state():
    chunking = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 8))
    position, cuts = 0, []
    while position < 27:
        position = next_cut(chunking, position, [12, 24, 27])
        cuts.append(position)
    assert cuts == [8, 16, 24, 27]


def test_without_states_a_step_may_run_to_the_last_checkpoint():
    assert next_cut(cut(group("full", FullAttention(), 4)), 0, [9, 30, 20]) == 30


# --- what an engine may free


@settings(max_examples=700, deadline=None)
@given(chunkings(), st.integers(0, 40), st.integers(1, 4))
def test_freeing_all_that_may_be_freed_costs_no_later_store(chunking, position, multiple):
    """Every block that ends at or before the token is freed: no chunk of any later store set has lost a block, and no
    token that a later position reads is gone."""
    kept = retained_from(chunking, position, resume_multiple=multiple)
    assert list(kept) == list(chunking.layout.names)
    later = [store_set(chunking, p, resume_multiple=multiple) for p in range(position, position + 50)]
    for g in chunking.layout.cached:
        spec = chunking.layout.groups[g]
        first_kept = kept[spec.name] // spec.tokens_per_block  # the first block that does not end by then
        blocks_per_chunk = chunking.blocks_per_chunk[g]
        for chunk_idx in {i for chunks in later for i in chunks[spec.name].tolist()}:
            blocks = range(chunk_idx * blocks_per_chunk, (chunk_idx + 1) * blocks_per_chunk)
            assert (blocks[-1] if isinstance(spec.kind, Recurrent) else blocks[0]) >= first_kept
        if not isinstance(spec.kind, Recurrent):
            for p in range(position, position + 20):
                assert min(law.needed(spec.kind, p), default=p) // spec.tokens_per_block >= first_kept


@settings(max_examples=500, deadline=None)
@given(chunkings(), st.integers(0, 60))
def test_at_most_a_chunk_more_than_the_windows_is_kept(chunking, position):
    """The windows are those before the position and before S, where the same prompt sent again resumes."""
    kept, later = retained_from(chunking, position), retained_from(chunking, position + 1)
    same, _ = stored_positions(chunking, position)
    for g, spec in enumerate(chunking.layout.groups):
        assert kept[spec.name] <= later[spec.name]
        if spec.is_cached:
            reach = min(min(law.needed(spec.kind, p), default=p) for p in (position, same))
            assert kept[spec.name] >= reach - (chunking.tokens_per_chunk[g] or 0)
        else:
            assert kept[spec.name] == position


def test_a_chunk_that_starts_before_an_attention_chunk_is_kept_for_it():
    """Attention chunks of 2 tokens in chunks of 3: a hit at 2 requires nothing, but one at 3 requires chunk 0, of which
    an engine at 3 must therefore not free the first two blocks."""
    chunking = cut(group("chunked", ChunkedLocal(2), 1), group("state", Recurrent(), 1), blocks={"chunked": 3})
    assert stored_positions(chunking, 3) == (2, 3)
    assert retained_from(chunking, 3)["chunked"] == 0


def test_a_window_keeps_about_a_chunk_more_than_itself():
    chunking = cut(group("window", SlidingWindow(10), 4), blocks={"window": 2})
    assert [retained_from(chunking, position)["window"] for position in (8, 16, 100, 101, 104, 105)] == [
        0,
        0,
        80,
        80,
        88,
        88,
    ]
