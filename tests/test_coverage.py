"""The law against its literal model: hits, load sets, limits, store sets, cuts, and what may be freed or evicted."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import coverage
from kvjax.chunking import Chunking, resolve_chunking
from kvjax.coverage import longest_hit, needed, next_cut, required, retained_from, store_set, stored_positions
from kvjax.groups import CacheLayout, ChunkedLocal, FullAttention, GroupSpec, Kind, Recurrent, Scratch, SlidingWindow
from tests.oracles import check_law, law
from tests.oracles.layouts import Instance, chunkings, instances, random_presence

KINDS = [FullAttention(), *map(SlidingWindow, (1, 2, 7)), *map(ChunkedLocal, (1, 2, 7)), Recurrent(), Scratch()]


def group(name: str, kind: Kind, tokens_per_block: int, lookahead_tokens: int = 0) -> GroupSpec:
    return GroupSpec(name, kind, tokens_per_block, block_bytes=64, lookahead_tokens=lookahead_tokens)


def cut(*groups: GroupSpec, blocks=None) -> Chunking:
    return resolve_chunking(CacheLayout(groups), blocks_per_chunk=blocks)


def lists(chunks: dict[str, np.ndarray]) -> dict[str, list[int]]:
    return {name: indices.tolist() for name, indices in chunks.items()}


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


@settings(max_examples=3000, deadline=None)
@given(instances())
def test_hit_load_set_and_limits_equal_brute_force(instance: Instance):
    assert check_law.hit_difference(instance) is None


@settings(max_examples=1000, deadline=None)
@given(instances(), st.integers(1, 9))
def test_a_search_in_several_spans_finds_the_same(instance: Instance, span: int):
    """Long prompts are searched in spans that double; here the first is a few positions wide."""
    with mock.patch.object(coverage, "_FIRST_SPAN", span):
        assert check_law.hit_difference(instance) is None


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


# --- arguments


@pytest.mark.parametrize(
    "chunks",
    [[2, 0, 0], (0, 2), {0, 2}, range(0, 4, 2), np.array([2, 0], np.uint8), [True, False, True], [0, 2, 10**30]],
)
def test_presence_is_a_mask_or_indices_in_any_order(chunks):
    chunking = cut(group("window", SlidingWindow(4), 4))
    at = [longest_hit(chunking, n, {"window": chunks}).hit_tokens for n in range(1, 20)]
    present = law.held_by_chunks(chunking, {"window": [0, 2]})
    assert at == [max(law.restorable(chunking, present, n)) for n in range(1, 20)]


@pytest.mark.parametrize("chunks", [[], np.zeros(0), np.zeros(0, bool), np.zeros(9, bool), range(0), ()])
def test_presence_may_be_empty(chunks):
    assert longest_hit(cut(group("a", FullAttention(), 4)), 20, {"a": chunks}).hit_tokens == 0


@pytest.mark.parametrize(
    ("present", "words"),
    [
        (
            {"a": [0.0]},
            "`present of group 'a'` must be a list or 1-d array of bools or of chunk .*, got float in it",
        ),
        ({"a": np.array([1.0])}, "got a 1-d array of float64"),
        ({"a": [True, 1]}, "got a mix of bools and"),
        ({"a": [np.True_, 1]}, "got a mix of bools and"),
        ({"a": [0, -1]}, "`present of group 'a'` must hold non-negative chunk indices, got -1"),
        ({"a": [-(10**30)]}, "must hold non-negative chunk indices, got -1000"),
        ({"a": np.zeros((2, 2), int)}, "got a 2-d array of int64"),
        ({"a": 3}, "got 3"),
        ({"a": None}, "got None"),
        ({"a": "01"}, "got '01'"),
        ({"a": ["0"]}, "got str in it"),
        ({"a": [[0]]}, "got list in it"),
        ({"a": {0: True}}, "got {0: True}"),
        ({"b": [0]}, r"`present` must name groups of the layout \['a', 'ring'\], got 'b'"),
        ({"ring": []}, "`present` must name groups that are cached, got the scratch group 'ring'"),
        ([0], "`present` must be a mapping of group names to chunks, got"),
        (None, "`present` must be a mapping of group names to chunks, got None"),
    ],
)
def test_other_presence_is_refused(present, words):
    with pytest.raises(ValueError, match=words):
        longest_hit(cut(group("a", FullAttention(), 4), group("ring", Scratch(), 4)), 20, present)


@pytest.mark.parametrize(
    ("device_tokens", "words"),
    [
        (20, "`device_tokens` must be at most num_tokens - 1 = 19, got 20"),
        (-1, "`device_tokens` must be a non-negative int, got -1"),
        (1.0, "`device_tokens` must be a non-negative int, got 1.0"),
        (True, "`device_tokens` must be a non-negative int, got True"),
        (None, "`device_tokens` must be a non-negative int, got None"),
        ({"a": 20}, "`device_tokens of group 'a'` must be at most num_tokens - 1 = 19, got 20"),
        ({"a": -1}, "`device_tokens of group 'a'` must be a non-negative int, got -1"),
        ({"b": 1}, r"`device_tokens` must name groups of the layout \['a', 'ring'\], got 'b'"),
        ({"ring": 1}, "`device_tokens` must name groups that are cached, got the scratch group 'ring'"),
    ],
)
def test_other_device_prefixes_are_refused(device_tokens, words):
    with pytest.raises(ValueError, match=words):
        longest_hit(
            cut(group("a", FullAttention(), 4), group("ring", Scratch(), 4)), 20, {}, device_tokens=device_tokens
        )


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "4"])
def test_counts_must_be_positive_ints(value):
    chunking = cut(group("a", FullAttention(), 4))
    with pytest.raises(ValueError, match="`num_tokens` must be a positive int, got "):
        longest_hit(chunking, value, {})
    for call in (
        lambda: longest_hit(chunking, 9, {}, resume_multiple=value),
        lambda: store_set(chunking, 9, resume_multiple=value),
        lambda: next_cut(chunking, 0, [9], resume_multiple=value),
        lambda: retained_from(chunking, 9, resume_multiple=value),
    ):
        with pytest.raises(ValueError, match="`resume_multiple` must be a positive int, got "):
            call()


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "4"])
def test_positions_must_be_non_negative_ints(value):
    chunking = cut(group("a", Recurrent(), 4))
    with pytest.raises(ValueError, match="`checkpoint` must be a non-negative int, got "):
        store_set(chunking, value)
    with pytest.raises(ValueError, match="`position` must be a non-negative int, got "):
        next_cut(chunking, value, [9])
    with pytest.raises(ValueError, match="`checkpoints` must be a non-negative int, got "):
        next_cut(chunking, 0, [9, value])


@pytest.mark.parametrize("checkpoints", [9, "9", None, {9: 1}])
def test_checkpoints_must_be_a_sequence(checkpoints):
    with pytest.raises(ValueError, match="`checkpoints` must be a sequence of non-negative ints, got "):
        next_cut(cut(group("a", Recurrent(), 4)), 0, checkpoints)


def test_one_checkpoint_at_least_is_needed():
    with pytest.raises(ValueError, match="`checkpoints` must hold at least one position, got none"):
        next_cut(cut(group("a", Recurrent(), 4)), 0, [])


def test_a_layout_is_no_chunking():
    layout = CacheLayout([group("a", FullAttention(), 4)])
    for call in (
        lambda: longest_hit(layout, 9, {}),  # pyright: ignore
        lambda: store_set(layout, 9),  # pyright: ignore
        lambda: next_cut(layout, 0, [9]),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match="`chunking` must be a Chunking, as `resolve_chunking` returns it, got "):
            call()


def test_every_group_has_int64_indices():
    chunking = cut(group("a", FullAttention(), 4), group("ring", Scratch(), 4), group("state", Recurrent(), 8))
    for chunks in (longest_hit(chunking, 20, {"a": [0, 1], "state": [0]}).load, store_set(chunking, 20)):
        assert list(chunks) == ["a", "ring", "state"]
        assert {indices.dtype for indices in chunks.values()} == {np.dtype(np.int64)}


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
    assert lists(store_set(chunking, 20, missing={"window": [3]})) == {"full": [0, 1, 2], "window": [1, 2]}
    with pytest.raises(ValueError, match="`missing` must name groups of the layout"):
        store_set(chunking, 20, missing={"other": [3]})
    with pytest.raises(ValueError, match="`missing of group 'full'` must hold non-negative chunk indices, got -1"):
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


# --- eviction


@st.composite
def resident_prefixes(draw: st.DrawFn) -> tuple[Chunking, dict[int, np.ndarray]]:
    """A request's resident chunks by group index, ascending, with holes."""
    instance = draw(instances())
    layout = instance.chunking.layout
    return instance.chunking, {
        g: np.array(sorted(set(instance.present.get(layout.groups[g].name, []))), np.int64) for g in layout.cached
    }


def restorable(chunking: Chunking, chunks: dict[int, np.ndarray], below: int) -> list[int]:
    named = {chunking.layout.groups[g].name: indices.tolist() for g, indices in chunks.items()}
    return law.restorable(chunking, law.held_by_chunks(chunking, named), below)


def searched_rank(chunking: Chunking, g: int, chunk_idx: int, positions: list[int]) -> int:
    """The smallest restorable position that requires the chunk or lies above its first token or at its state."""
    spec = chunking.layout.groups[g]
    held = law.held_by_chunk(spec.kind, chunking.tokens_per_chunk[g] or 0, chunk_idx)
    wanting = [
        p for p in positions if p and (p > min(held) or law.required(spec.kind, spec.lookahead_tokens, p) & held)
    ]
    return min(wanting, default=np.iinfo(np.int64).max)


@settings(max_examples=700, deadline=None)
@given(resident_prefixes())
def test_ranks_equal_a_search(prefix):
    chunking, chunks = prefix
    end = max((int(i[-1] + 1) * (chunking.tokens_per_chunk[g] or 0) for g, i in chunks.items() if len(i)), default=0)
    positions = restorable(chunking, chunks, end + 1)
    for g, ranks in coverage.eviction_ranks(chunking, chunks).items():
        assert ranks.tolist() == [searched_rank(chunking, g, int(i), positions) for i in chunks[g]]


@settings(max_examples=700, deadline=None)
@given(resident_prefixes())
def test_evicting_from_the_highest_rank_down_leaves_every_position_below_it(prefix):
    """After each step the positions below the evicted rank are those of the start, no other has come, and each chunk
    that is left is below or part of one of them."""
    chunking, chunks = prefix
    before = restorable(chunking, chunks, 90)
    ranks = coverage.eviction_ranks(chunking, chunks)
    for rank in sorted({int(r) for of_group in ranks.values() for r in of_group}, reverse=True):
        left = {g: indices[ranks[g] < rank] for g, indices in chunks.items()}
        after = restorable(chunking, left, 90)
        assert [p for p in after if p < rank] == [p for p in before if p < rank]
        assert set(after) <= set(before)
        usable = [p for p in before if p < rank]
        assert all(searched_rank(chunking, g, int(i), usable) < rank for g, kept in left.items() for i in kept)


def test_the_tail_of_a_prefix_goes_first_down_to_the_state_that_still_serves():
    """Full blocks 0 to 5 of 4 tokens and states at 8 and 16: the two blocks past 16 are useless, then everything past 8
    goes at once, then the rest."""
    chunking = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 8))
    ranks = coverage.eviction_ranks(chunking, {0: np.arange(6), 1: np.arange(2)})
    nothing = np.iinfo(np.int64).max
    assert ranks[0].tolist() == [8, 8, 16, 16, nothing, nothing]
    assert ranks[1].tolist() == [8, 16]


# --- blocks, and junctions


@settings(max_examples=700, deadline=None)
@given(chunkings(), st.integers(0, 40), st.integers(0, 40))
def test_blocks_to_load_hold_a_needed_token_that_the_device_lacks(chunking, position, on_device):
    for g in chunking.layout.cached:
        spec, blocks_per_chunk = chunking.layout.groups[g], chunking.blocks_per_chunk[g] or 0
        chunks = coverage.chunks_needed(chunking, g, position)
        wanted = law.needed(spec.kind, position)
        assert chunks.tolist() == law.chunks_with(wanted, spec.kind, chunking.tokens_per_chunk[g] or 0)
        found = coverage.blocks_to_load(chunking, g, position, on_device, chunks)
        if isinstance(spec.kind, Recurrent):
            assert found.tolist() == [[True]] * len(chunks)
            continue
        missing = wanted - law.needed(spec.kind, on_device)
        for row, chunk_idx in zip(found.tolist(), chunks.tolist(), strict=True):
            first = chunk_idx * blocks_per_chunk
            tokens = [
                range(b * spec.tokens_per_block, (b + 1) * spec.tokens_per_block)
                for b in range(first, first + blocks_per_chunk)
            ]
            assert row == [not missing.isdisjoint(block) for block in tokens]


def test_a_block_that_the_device_holds_whole_is_not_loaded_with_its_chunk():
    """Blocks of 8 tokens, two per chunk, a window of 5. The device stands at 8 and holds tokens 4 to 7; a hit at 10
    needs 6 to 9: block 1 is loaded, and block 0, which may be shared, is not touched."""
    chunking = cut(group("window", SlidingWindow(5), 8), blocks=2)
    assert coverage.blocks_to_load(chunking, 0, 10, 8, np.array([0])).tolist() == [[False, True]]


@settings(max_examples=500, deadline=None)
@given(resident_prefixes(), st.integers(1, 60))
def test_a_junction_is_the_hit_of_the_full_groups_alone(prefix, num_tokens):
    chunking, chunks = prefix
    named = {chunking.layout.groups[g].name: indices.tolist() for g, indices in chunks.items()}
    resident = law.held_by_chunks(chunking, named)
    full = {spec.name for spec, _ in law.cached_groups(chunking) if isinstance(spec.kind, FullAttention)}
    expected = [p for p in range(num_tokens) if not full & set(law.refusing(chunking, resident, p))] if full else [0]
    assert coverage.junction(chunking, num_tokens, chunks) == expected[-1]
