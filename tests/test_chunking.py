"""`resolve_chunking`: the worked numbers, `"auto"` against a search, and every refusal by name."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.chunking import longer_than_window, resolve_chunking
from kvjax.groups import CacheLayout, ChunkedLocal, FullAttention, GroupSpec, Recurrent, Scratch, SlidingWindow
from tests.oracles.layouts import random_layout


def full(name, tokens_per_block, block_bytes=64):
    return GroupSpec(name, FullAttention(), tokens_per_block, block_bytes=block_bytes)


MIXED = CacheLayout([full("a", 12), full("b", 16)])
UNIFORM = CacheLayout([full("a", 16), GroupSpec("ring", Scratch(), 4, block_bytes=8), full("b", 16)])


# --- worked numbers


@pytest.mark.parametrize(("blocks", "tokens", "hashes"), [(None, (12, 16), (3, 4)), (2, (24, 32), (6, 8))])
def test_groups_of_12_and_16_tokens_share_a_hash_unit_of_4(blocks, tokens, hashes):
    cut = resolve_chunking(MIXED, blocks_per_chunk=blocks)
    assert cut.tokens_per_hash == 4
    assert cut.tokens_per_chunk == tokens
    assert cut.hashes_per_chunk == hashes


@pytest.mark.parametrize(
    ("blocks", "tokens"),
    [
        (1, (256, 64, 64, 4, 8)),
        (2, (512, 128, 128, 8, 16)),
        (4, (1024, 256, 256, 16, 32)),
        (8, (2048, 512, 512, 32, 64)),
    ],
)
def test_one_number_multiplies_every_group_of_a_five_group_model(blocks, tokens):
    windows = [(64, 128), (64, 128), (4, 8), (8, 128)]
    sliding = [GroupSpec(f"w{i}", SlidingWindow(w), t, block_bytes=64) for i, (t, w) in enumerate(windows)]
    cut = resolve_chunking(CacheLayout([full("kv", 256), *sliding]), blocks_per_chunk=blocks)
    assert cut.tokens_per_hash == 4
    assert cut.tokens_per_chunk == tokens


@pytest.mark.parametrize(
    ("tokens", "unit", "lcm"),
    [
        ([3584, 4, 3584, 3584, 3584, 3584, 64], 64, 3584),
        ([4480, 4, 4480, 4480, 4480], 4480, 4480),
        ([1152, 4, 1152, 1152, 1152, 1152], 1152, 1152),
    ],
)
def test_a_scratch_ring_keeps_its_place_and_has_no_chunks(tokens, unit, lcm):
    """A ring block of 4 tokens per request among large groups made a start-up check fail ("4 is not divisible by
    64"); leaving the group out of the list made every later block list belong to the wrong group."""
    groups = [
        GroupSpec(f"g{i}", Scratch() if t == 4 else FullAttention(), t, block_bytes=8) for i, t in enumerate(tokens)
    ]
    cut = resolve_chunking(CacheLayout(groups))
    assert cut.tokens_per_hash == unit
    assert cut.tokens_per_chunk == tuple(None if t == 4 else t for t in tokens)
    assert math.lcm(*(t for t in cut.tokens_per_chunk if t)) == lcm
    for per_group in (cut.blocks_per_chunk, cut.hashes_per_chunk, cut.chunk_bytes):
        assert len(per_group) == len(tokens)
        assert [i for i, value in enumerate(per_group) if value is None] == [1]


def test_the_hash_unit_follows_the_groups_and_not_a_global_block_size():
    """Groups of 256 and 64 tokens and a user's block size of 256: the unit is 64, and a chunk of 256 tokens is legal
    for both, as 1 block and as 4."""
    cut = resolve_chunking(CacheLayout([full("a", 256), full("b", 64)]), blocks_per_chunk={"b": 4})
    assert cut.tokens_per_hash == 64
    assert cut.tokens_per_chunk == (256, 256)
    assert cut.hashes_per_chunk == (4, 4)


# --- blocks_per_chunk


def test_a_mapping_leaves_missing_groups_at_one_block():
    assert resolve_chunking(UNIFORM, blocks_per_chunk={"b": np.int64(3)}).blocks_per_chunk == (1, None, 3)
    assert resolve_chunking(UNIFORM, blocks_per_chunk={}).blocks_per_chunk == (1, None, 1)


def test_a_recurrent_chunk_has_the_bytes_of_one_state():
    layout = CacheLayout([full("a", 4, 100), GroupSpec("state", Recurrent(), 4, block_bytes=700)])
    cut = resolve_chunking(layout, blocks_per_chunk=5)
    assert cut.chunk_bytes == (500, 700)
    assert cut.tokens_per_chunk == (20, 20)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_everything_derived_follows_from_blocks_per_chunk(data):
    layout = random_layout(lambda low, high: data.draw(st.integers(low, high)))
    wanted = {layout.groups[g].name: data.draw(st.integers(1, 9)) for g in layout.cached}
    cut = resolve_chunking(layout, blocks_per_chunk=wanted)
    for g, group in enumerate(layout.groups):
        derived = (cut.blocks_per_chunk[g], cut.tokens_per_chunk[g], cut.hashes_per_chunk[g], cut.chunk_bytes[g])
        if isinstance(group.kind, Scratch):
            assert derived == (None, None, None, None)
            continue
        blocks = wanted[group.name]
        tokens = blocks * group.tokens_per_block
        num_bytes = group.block_bytes * (1 if isinstance(group.kind, Recurrent) else blocks)
        assert derived == (blocks, tokens, tokens // cut.tokens_per_hash, num_bytes)
        assert tokens % cut.tokens_per_hash == 0


# --- auto


def searched_auto(group: GroupSpec, unit: int, least_bytes: int) -> int:
    """The definition, literally: the smallest legal value that is large enough, but within the window; the
    smallest legal one if the window has no room for any."""
    legal = [n for n in range(1, 2000) if n * group.tokens_per_block % unit == 0]
    if isinstance(group.kind, Recurrent):
        return legal[0]
    large_enough = next(n for n in legal if n * group.block_bytes >= least_bytes)
    span = getattr(group.kind, "window_tokens", getattr(group.kind, "chunk_tokens", None))
    if span is None or large_enough * group.tokens_per_block <= span:
        return large_enough
    return max((n for n in legal if n * group.tokens_per_block <= span), default=legal[0])


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_auto_equals_a_search(data):
    layout = random_layout(lambda low, high: data.draw(st.integers(low, high)))
    unit = data.draw(st.none() | st.integers(1, 24))
    least = data.draw(st.integers(1, 200))
    layout = CacheLayout(layout.groups, tokens_per_hash=unit)
    cut = resolve_chunking(layout, blocks_per_chunk="auto", min_chunk_bytes=least)
    for g in layout.cached:
        assert cut.blocks_per_chunk[g] == searched_auto(layout.groups[g], cut.tokens_per_hash, least)


def test_auto_makes_a_chunk_of_a_block_smaller_than_the_hash_unit():
    layout = CacheLayout([full("a", 64, 65536), full("b", 4, 65536)], tokens_per_hash=64)
    assert resolve_chunking(layout, blocks_per_chunk="auto").blocks_per_chunk == (1, 16)


def test_auto_stays_within_the_window():
    groups = [
        GroupSpec("wide", SlidingWindow(1024), 16, block_bytes=64),
        GroupSpec("llama", ChunkedLocal(96), 16, block_bytes=64),
        GroupSpec("narrow", SlidingWindow(8), 16, block_bytes=64),
        GroupSpec("state", Recurrent(), 16, block_bytes=64),
    ]
    cut = resolve_chunking(CacheLayout(groups), blocks_per_chunk="auto")
    assert cut.blocks_per_chunk == (64, 6, 1, 1)


# --- block_size


def test_block_size_is_tokens_per_chunk_and_ignores_scratch():
    assert resolve_chunking(UNIFORM, block_size=64).blocks_per_chunk == (4, None, 4)
    assert resolve_chunking(UNIFORM, block_size=16) == resolve_chunking(UNIFORM)


@pytest.mark.parametrize(("tokens", "valid"), [(24, 32), (8, 16), (17, 32), (1, 16)])
def test_a_block_size_that_is_no_multiple_names_the_next_valid_value(tokens, valid):
    words = f"`block_size` must be a multiple of tokens_per_block, 16, got {tokens}; the next valid value is {valid}"
    with pytest.raises(ValueError, match=words):
        resolve_chunking(UNIFORM, block_size=tokens)


def test_block_size_for_mixed_groups_lists_every_group_and_names_the_way_out():
    layout = CacheLayout([*MIXED.groups, GroupSpec("ring", Scratch(), 4, block_bytes=8)])
    with pytest.raises(ValueError, match="`block_size` must not be given") as refused:
        resolve_chunking(layout, block_size=48)
    for words in ("a=12", "b=16", "ring=4 (scratch)", "got 48", "give `blocks_per_chunk` instead"):
        assert words in str(refused.value)


# --- refusals


def test_only_one_of_the_two_may_be_given():
    with pytest.raises(ValueError, match="only one of `blocks_per_chunk` and `block_size` may be given, got 2 and 32"):
        resolve_chunking(UNIFORM, blocks_per_chunk=2, block_size=32)


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, True, False, "2", np.float32(2), np.True_])
def test_zero_negatives_floats_bools_and_text_are_refused(value):
    with pytest.raises(ValueError, match=r"`blocks_per_chunk` must be a positive int.*, got "):
        resolve_chunking(UNIFORM, blocks_per_chunk=value)
    with pytest.raises(ValueError, match="`blocks_per_chunk` of group 'a' must be a positive int, got "):
        resolve_chunking(UNIFORM, blocks_per_chunk={"a": value})
    with pytest.raises(ValueError, match="`block_size` must be a positive int, got "):
        resolve_chunking(UNIFORM, block_size=value)
    with pytest.raises(ValueError, match="`min_chunk_bytes` must be a positive int, got "):
        resolve_chunking(UNIFORM, blocks_per_chunk="auto", min_chunk_bytes=value)


@pytest.mark.parametrize("value", [[2], (2,), "Auto", "", {2}, b"auto"])
def test_other_types_of_blocks_per_chunk_are_refused(value):
    with pytest.raises(
        ValueError, match="must be a positive int, a mapping of group names to positive ints, or 'auto'"
    ):
        resolve_chunking(UNIFORM, blocks_per_chunk=value)


def test_a_missing_value_in_a_mapping_is_refused():
    with pytest.raises(ValueError, match="`blocks_per_chunk` of group 'a' must be a positive int, got None"):
        resolve_chunking(UNIFORM, blocks_per_chunk={"a": None})  # pyright: ignore


def test_unknown_and_scratch_names_are_refused():
    with pytest.raises(ValueError, match=r"`blocks_per_chunk` must name groups of the layout .*, got 'c'"):
        resolve_chunking(UNIFORM, blocks_per_chunk={"c": 2})
    with pytest.raises(ValueError, match=r"`blocks_per_chunk` must name groups that are cached, got the .* 'ring'"):
        resolve_chunking(UNIFORM, blocks_per_chunk={"ring": 2})


def test_a_chunk_that_is_no_whole_number_of_hash_units_is_named_with_the_next_valid_value():
    """The error once advised to turn prefix caching on, which was on. It names the group, its tokens and the unit."""
    layout = CacheLayout([full("a", 64), full("b", 4)], tokens_per_hash=64)
    with pytest.raises(ValueError, match="group 'b'") as refused:
        resolve_chunking(layout, blocks_per_chunk={"b": 17})
    assert str(refused.value) == (
        "group 'b': a chunk must be a whole number of hash units of 64 tokens, got 17 blocks of 4 tokens = 68; "
        "the next valid `blocks_per_chunk` is 32"
    )
    assert resolve_chunking(layout, blocks_per_chunk={"b": 32}).hashes_per_chunk == (1, 2)


def test_a_layout_must_be_a_layout():
    with pytest.raises(ValueError, match="`layout` must be a CacheLayout, got "):
        resolve_chunking([full("a", 4)])  # pyright: ignore


@pytest.mark.parametrize("blocks", [2**47, 2**40])
def test_chunks_beyond_any_machine_are_refused(blocks):
    with pytest.raises(ValueError, match=r"`(tokens_per_chunk|chunk_bytes)` of group 'a' must be below"):
        resolve_chunking(CacheLayout([full("a", 16, 65536)]), blocks_per_chunk=blocks)


# --- longer_than_window


@pytest.mark.parametrize(
    ("kind", "blocks", "tokens", "longer"),
    [
        (SlidingWindow(8), 2, 8, False),
        (SlidingWindow(8), 2, 10, True),
        (SlidingWindow(8), 1, 16, False),
        (ChunkedLocal(8), 3, 9, True),
        (ChunkedLocal(8), 4, 8, False),
        (FullAttention(), 9, 900, False),
        (Recurrent(), 9, 900, False),
    ],
)
def test_only_several_blocks_beyond_the_window_are_longer_than_it(kind, blocks, tokens, longer):
    assert longer_than_window(kind, blocks, tokens) is longer
