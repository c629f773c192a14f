"""Kinds, leaves, groups and layouts: what they derive, and every refusal by name."""

import math
from dataclasses import FrozenInstanceError

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.groups import (
    CacheLayout,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    LeafSpec,
    Recurrent,
    Scratch,
    SlidingWindow,
    cache_dtype,
    hash_unit,
)

KINDS = [FullAttention(), SlidingWindow(8), ChunkedLocal(8), Recurrent(), Scratch()]
NOT_POSITIVE_INTS = [0, -1, 1.0, 2.5, True, False, "4", None, [4], np.float32(4), np.True_]


def group(name="g", kind=None, tokens_per_block=4, block_bytes=64, **more):
    return GroupSpec(name, kind or FullAttention(), tokens_per_block, block_bytes=block_bytes, **more)


def leaf(name="k", shape=(4, 2), dtype="bfloat16", layers=None):
    return LeafSpec(name, shape, dtype, layers)


# --- kinds


@pytest.mark.parametrize("value", NOT_POSITIVE_INTS)
def test_window_and_attention_chunk_must_be_positive_ints(value):
    with pytest.raises(ValueError, match="`window_tokens` must be a positive int, got "):
        SlidingWindow(value)
    with pytest.raises(ValueError, match="`chunk_tokens` must be a positive int, got "):
        ChunkedLocal(value)


def test_kinds_are_values():
    assert SlidingWindow(8) == SlidingWindow(np.int32(8)) != SlidingWindow(9)
    assert type(SlidingWindow(np.int32(8)).window_tokens) is int
    assert len({FullAttention(), FullAttention(), Recurrent(), ChunkedLocal(8), SlidingWindow(8)}) == 4
    with pytest.raises(FrozenInstanceError):
        SlidingWindow(8).window_tokens = 9  # pyright: ignore


# --- dtypes and leaves


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [
        ("bfloat16", 2),
        (ml_dtypes.bfloat16, 2),
        ("float8_e4m3fn", 1),
        (np.float32, 4),
        ("float16", 2),
        (np.dtype("int8"), 1),
        ("uint8", 1),
    ],
)
def test_cache_dtypes_include_the_small_floats(dtype, itemsize):
    assert cache_dtype(dtype).itemsize == itemsize


def test_the_byte_order_of_a_dtype_does_not_matter():
    assert cache_dtype(">f4") == cache_dtype("<f4") == np.dtype("float32")


@pytest.mark.parametrize(
    "dtype", [None, "bf16x", object, "O", "U4", "S3", "M8[s]", np.dtype([("a", "i4")]), np.dtype("2i4"), "V3", 3]
)
def test_dtypes_that_are_no_cache_elements_are_refused(dtype):
    with pytest.raises(ValueError, match="`dtype` must name the element type of a cache, such as 'bfloat16', got "):
        LeafSpec("k", (4,), dtype)


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "int2", "float4_e2m1fn", "float6_e2m3fn", "bool", "float64", "int64", "complex64"]
)
def test_elements_of_other_widths_are_refused_with_a_way_out(dtype):
    with pytest.raises(
        ValueError, match=f"must have elements .* 8, 16 or 32 bits, got {dtype}; view the cache as one of"
    ):
        cache_dtype(dtype)


@given(st.lists(st.integers(1, 9), min_size=0, max_size=4), st.none() | st.integers(1, 5))
def test_bytes_of_a_leaf_are_the_bytes_of_its_array(shape, layers):
    made = leaf(shape=shape, layers=layers, dtype="float32")
    array = np.zeros((layers or 1, 1, *shape), np.float32)
    assert made.block_shape == tuple(shape)
    assert made.block_bytes == array.nbytes
    assert made.row_bytes * made.rows_per_block == made.block_bytes
    assert made.rows_per_block == (layers or 1)


@pytest.mark.parametrize("value", NOT_POSITIVE_INTS)
def test_shapes_and_layers_must_be_positive_ints(value):
    with pytest.raises(ValueError, match="`block_shape` of leaf 'k' must be a positive int, got "):
        leaf(shape=(4, value))
    if value is not None:
        with pytest.raises(ValueError, match="`layers` of leaf 'k' must be a positive int, got "):
            leaf(layers=value)


@pytest.mark.parametrize("shape", [4, "42", b"42", None])
def test_a_shape_must_be_a_sequence(shape):
    with pytest.raises(ValueError, match="`block_shape` of leaf 'k' must be a tuple of positive ints, got "):
        leaf(shape=shape)


@pytest.mark.parametrize("name", ["", None, 3, b"k"])
def test_names_must_be_non_empty_strings(name):
    with pytest.raises(ValueError, match="`name` must be a non-empty string, got "):
        leaf(name=name)
    with pytest.raises(ValueError, match="`name` must be a non-empty string, got "):
        group(name=name)


# --- groups


def test_block_bytes_is_the_sum_over_all_leaves():
    """Two arrays of 4 tokens and one that stacks 3 layers; `num_layers` is for display and never multiplies."""
    leaves = [leaf("k"), leaf("v"), leaf("rest", (4, 2), "uint8", layers=3)]
    made = GroupSpec("g", FullAttention(), 4, leaves, num_layers=7)
    assert made.block_bytes == 16 + 16 + 24
    assert made.leaves == tuple(leaves)
    assert GroupSpec("g", FullAttention(), 4, leaves, block_bytes=56) == GroupSpec("g", FullAttention(), 4, leaves)


def test_caches_of_two_page_shapes_in_one_group_are_summed():
    """78 latent caches of 576 bytes per token and 21 index caches of 132: 47,700 bytes per token, by neither shape."""
    latent = [LeafSpec(f"latent{i}", (1, 576), np.uint8) for i in range(78)]
    index = [LeafSpec(f"index{i}", (1, 132), np.uint8) for i in range(21)]
    assert GroupSpec("mla", FullAttention(), 1, latent + index).block_bytes == 47_700


@pytest.mark.parametrize("value", NOT_POSITIVE_INTS)
def test_sizes_of_a_group_must_be_positive_ints(value):
    with pytest.raises(ValueError, match="`tokens_per_block` of group 'g' must be a positive int, got "):
        group(tokens_per_block=value)
    if value is not None:
        with pytest.raises(ValueError, match="`block_bytes` of group 'g' must be a positive int, got "):
            group(block_bytes=value)


@pytest.mark.parametrize("value", [-1, 1.0, True, "4", None])
def test_counts_of_a_group_must_be_non_negative_ints(value):
    for name in ("num_layers", "lookahead_tokens"):
        with pytest.raises(ValueError, match=f"`{name}` of group 'g' must be a non-negative int, got "):
            group(**{name: value})


def test_sizes_beyond_any_machine_are_refused():
    with pytest.raises(ValueError, match="`block_bytes` of group 'g' must be below 281474976710656, got "):
        group(block_bytes=2**48)


def test_block_bytes_and_leaves_must_agree_and_one_must_be_given():
    with pytest.raises(ValueError, match="one of `leaves` and `block_bytes` of group 'g' must be given, got neither"):
        GroupSpec("g", FullAttention(), 4)
    with pytest.raises(ValueError, match="`block_bytes` of group 'g' must be the sum over its leaves, 16, got 17"):
        GroupSpec("g", FullAttention(), 4, [leaf()], block_bytes=17)


@pytest.mark.parametrize("leaves", [leaf(), 3, ["k"], [leaf(), None]])
def test_leaves_must_be_leaf_specs(leaves):
    with pytest.raises(ValueError, match="`leaves` of group 'g' must be a sequence of LeafSpec, got "):
        GroupSpec("g", FullAttention(), 4, leaves)


def test_a_leaf_listed_twice_in_a_group_is_refused():
    with pytest.raises(ValueError, match="`leaves` of group 'g' must have distinct names, got 'k' twice"):
        GroupSpec("g", FullAttention(), 4, [leaf(), leaf("v"), leaf()])


@pytest.mark.parametrize("kind", ["full", "mamba", FullAttention, None, 3])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(
        ValueError, match=r"`kind` of group 'g' must be FullAttention.*, Recurrent.* or Scratch.*, got "
    ):
        GroupSpec("g", kind, 4, block_bytes=64)


@pytest.mark.parametrize("kind", KINDS)
def test_only_full_and_sliding_attention_have_a_lookahead(kind):
    assert group(kind=kind, lookahead_tokens=0).lookahead_tokens == 0
    if isinstance(kind, (FullAttention, SlidingWindow)):
        assert group(kind=kind, lookahead_tokens=3).lookahead_tokens == 3
    else:
        words = f"`lookahead_tokens` of group 'g' must be 0 for {type(kind).__name__}: only full and sliding .*, got 3"
        with pytest.raises(ValueError, match=words):
            group(kind=kind, lookahead_tokens=3)


# --- layouts


def test_only_scratch_groups_are_not_cached():
    layout = CacheLayout([group(f"g{i}", kind) for i, kind in enumerate(KINDS)])
    assert layout.names == ("g0", "g1", "g2", "g3", "g4")
    assert layout.cached == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("tokens", "unit"),
    [
        ([3584, 4, 3584, 3584, 3584, 3584, 64], 64),
        ([4480, 4, 4480, 4480, 4480], 4480),
        ([1152, 4, 1152, 1152, 1152, 1152], 1152),
    ],
)
def test_a_scratch_ring_of_4_tokens_does_not_lower_the_hash_unit(tokens, unit):
    """A ring of one in-place block per request stands second among large groups. Taken into the greatest common
    divisor it would make the unit 4; left out of the list it would shift every later group."""
    kinds = [Scratch() if t == 4 else FullAttention() for t in tokens]
    layout = CacheLayout([group(f"g{i}", kind, t) for i, (kind, t) in enumerate(zip(kinds, tokens, strict=True))])
    assert hash_unit(layout.groups) == unit
    assert layout.cached == tuple(i for i, t in enumerate(tokens) if t != 4)
    assert layout.groups[1].name == "g1"


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_the_hash_unit_is_the_largest_that_divides_every_block(tokens):
    unit = hash_unit([group(f"g{i}", None, t) for i, t in enumerate(tokens)])
    assert unit == max(u for u in range(1, 61) if all(t % u == 0 for t in tokens)) == math.gcd(*tokens)


def test_groups_must_have_distinct_names():
    with pytest.raises(ValueError, match="`groups` must have distinct names, got 'a' twice"):
        CacheLayout([group("a"), group("b"), group("a", Scratch())])


def test_a_layout_needs_a_group_that_is_cached():
    with pytest.raises(ValueError, match="`groups` must hold at least one group, got none"):
        CacheLayout([])
    with pytest.raises(ValueError, match=r"at least one group that is not scratch, got only \['a', 'b'\]"):
        CacheLayout([group("a", Scratch()), group("b", Scratch())])


@pytest.mark.parametrize("groups", [group(), 3, None, ["full"], [group(), 4]])
def test_groups_must_be_group_specs(groups):
    with pytest.raises(ValueError, match="`groups` must be a sequence of GroupSpec, got "):
        CacheLayout(groups)


@pytest.mark.parametrize("value", [0, -4, 4.0, True, "4"])
def test_a_given_hash_unit_must_be_a_positive_int(value):
    with pytest.raises(ValueError, match="`tokens_per_hash` must be a positive int, got "):
        CacheLayout([group()], tokens_per_hash=value)


def test_groups_may_share_an_array_of_one_shape():
    first = GroupSpec("a", FullAttention(), 4, [leaf("pool"), leaf("own")])
    layout = CacheLayout([first, GroupSpec("b", SlidingWindow(8), 4, [leaf("pool")])])
    assert list(layout.leaves) == ["pool", "own"]


@pytest.mark.parametrize(
    ("other", "came"),
    [
        (leaf("pool", (2, 4)), r"bfloat16\[4, 2\] and bfloat16\[2, 4\]"),
        (leaf("pool", dtype="float16"), r"bfloat16\[4, 2\] and float16\[4, 2\]"),
        (leaf("pool", layers=2), r"bfloat16\[4, 2\] and bfloat16\[4, 2\] x 2 layers"),
    ],
)
def test_an_array_shared_under_two_shapes_is_refused(other, came):
    with pytest.raises(
        ValueError, match=f"leaf 'pool' is shared by groups 'a' and 'b' and must have one .* got {came}"
    ):
        CacheLayout([GroupSpec("a", FullAttention(), 4, [leaf("pool")]), GroupSpec("b", Recurrent(), 4, [other])])


def test_index_finds_cached_groups_and_names_the_argument_otherwise():
    layout = CacheLayout([group("a"), group("ring", Scratch()), group("b")])
    assert layout.index("b", "present") == 2
    with pytest.raises(ValueError, match=r"`present` must name groups of the layout \['a', 'ring', 'b'\], got 'c'"):
        layout.index("c", "present")
    with pytest.raises(ValueError, match="`present` must name groups that are cached, got the scratch group 'ring'"):
        layout.index("ring", "present")
