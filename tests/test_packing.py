"""Bytes of a chunk and units of the pool, against searches over every multiple."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvjax.chunking import Chunking, resolve_chunking
from kvjax.groups import CacheLayout, FullAttention, GroupSpec, LeafSpec, Recurrent, Scratch, SlidingWindow
from kvjax.packing import (
    GRANULE_BYTES,
    LeafSlice,
    blocks_in_chunk,
    chunk_slices,
    cut_into_units,
    tokens_that_fit,
    unit_bytes,
)
from tests.oracles import law
from tests.oracles.layouts import chunkings


def sized(*sizes: int) -> Chunking:
    """Chunks of these bytes, with a scratch group between them."""
    groups = [GroupSpec(f"g{i}", FullAttention(), 4, block_bytes=size) for i, size in enumerate(sizes)]
    return resolve_chunking(CacheLayout([groups[0], GroupSpec("ring", Scratch(), 4, block_bytes=1), *groups[1:]]))


def searched_unit(sizes: tuple[int, ...], granule: int) -> int:
    """The definition, literally, over every multiple of the granule."""
    common = math.gcd(*sizes)
    if common >= 65536 and common % granule == 0:
        return common

    def pads_little(unit: int) -> bool:
        return all((-size % unit) * 100 <= size * 2 for size in sizes)

    return law.largest_unit(sizes, granule, pads_little)


# --- the size of a unit


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=4).map(tuple), st.integers(1, 64))
@example((4000, 3923), 1)
@example((50, 51), 1)
@example((49,), 64)
def test_the_unit_of_small_chunks_equals_a_search(sizes, granule):
    assert unit_bytes(sized(*sizes), granule) == searched_unit(sizes, granule)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.sampled_from([8192, 65536, 65537, 65540, 131072, 24576]),
    st.sampled_from(list(GRANULE_BYTES.values())),
)
@example([2, 3], 65536, 8192)
@example([2, 3], 65540, 8192)
@example([2, 3], 65532, 4)
def test_the_unit_of_chunks_with_a_large_common_divisor_equals_a_search(counts, common, granule):
    sizes = tuple(common * count for count in counts)
    assert unit_bytes(sized(*sizes), granule) == searched_unit(sizes, granule)


@pytest.mark.parametrize(
    ("sizes", "granule", "unit"),
    [
        ((65536, 131072), 4, 65536),  # the divisor itself, just large enough
        ((65532, 131064), 4, 65532),  # the divisor is too small, and yet pads nothing
        ((65540, 131080), 8192, 8192),  # the divisor is no multiple of 8 KiB: and 65,540 takes 9 of 8 KiB
        ((1_000_000, 1_010_000), 8192, 507_904),  # two units hold 1,015,808: 1.58 % and 0.58 %
        ((100, 1000), 256, 256),  # every chunk is smaller than the granule
    ],
)
def test_units_of_known_chunks(sizes, granule, unit):
    assert unit_bytes(sized(*sizes), granule) == unit


def test_a_unit_that_pads_by_exactly_two_percent_is_taken():
    """Two units of 51 bytes hold 101 bytes and, with 2 to spare, 100; no larger unit pads both so little."""
    assert unit_bytes(sized(100, 101), 1) == 51


def test_a_scratch_group_has_no_part_in_the_unit():
    assert unit_bytes(sized(65536), 4) == 65536


@pytest.mark.parametrize("granule", [0, -4, 4.0, True, "4", None])
def test_a_granule_must_be_a_positive_int(granule):
    with pytest.raises(ValueError, match="`granule_bytes` must be a positive int, got "):
        unit_bytes(sized(64), granule)


# --- units of a chunk


@settings(max_examples=300, deadline=None)
@given(chunkings(), st.integers(1, 40))
def test_a_chunk_takes_the_fewest_units_that_hold_it(cut, unit):
    units = cut_into_units(cut, unit)
    assert units.unit_bytes == unit
    for size, count, padding in zip(cut.chunk_bytes, units.units_per_chunk, units.padding_bytes, strict=True):
        if size is None:
            assert count is padding is None
        else:
            assert (count - 1) * unit < size <= count * unit
            assert padding == count * unit - size


@pytest.mark.parametrize("unit", [0, -1, 1.5, False, "8"])
def test_a_unit_must_be_a_positive_int(unit):
    with pytest.raises(ValueError, match="`unit_bytes` must be a positive int, got "):
        cut_into_units(sized(64), unit)


# --- capacity


@settings(max_examples=500, deadline=None)
@given(chunkings(), st.integers(1, 12), st.integers(0, 300))
def test_tokens_that_fit_equal_a_count_token_by_token(cut, unit, budget):
    units = cut_into_units(cut, unit)
    assert tokens_that_fit(cut, units, budget) == law.tokens_that_fit(cut, units.units_per_chunk, budget // unit)


def test_each_group_takes_its_own_bytes_and_not_a_row_for_all():
    """Chunks of 100, 20 and 20 bytes and 1,400 bytes of host memory: 10 chunks of all three fit. A pool that gives
    every key a row for all groups holds 10 keys of the 30."""
    cut = sized(100, 20, 20)
    units = cut_into_units(cut, 20)
    assert units.units_per_chunk == (5, None, 1, 1)
    assert tokens_that_fit(cut, units, 1400) == 10 * 4 + 3
    assert tokens_that_fit(cut, units, 1399) == 9 * 4 + 3


def test_no_budget_holds_what_completes_no_chunk():
    assert tokens_that_fit(sized(64), cut_into_units(sized(64), 64), 0) == 3


@pytest.mark.parametrize("budget", [-1, 1.0, True, None])
def test_a_budget_must_be_a_non_negative_int(budget):
    with pytest.raises(ValueError, match="`budget_bytes` must be a non-negative int, got "):
        tokens_that_fit(sized(64), cut_into_units(sized(64), 64), budget)


# --- where a leaf lies


def test_leaves_lie_in_order_and_a_stacked_leaf_layer_by_layer():
    leaves = [
        LeafSpec("k", (2, 3), "uint8"),
        LeafSpec("stack", (5,), "uint16", layers=2),
        LeafSpec("v", (1,), "float32"),
    ]
    layout = CacheLayout([GroupSpec("ring", Scratch(), 1, block_bytes=1), GroupSpec("g", FullAttention(), 4, leaves)])
    cut = resolve_chunking(layout, blocks_per_chunk={"g": 3})
    assert chunk_slices(cut, 1) == (
        LeafSlice("k", 0, 0, 6),
        LeafSlice("stack", 0, 18, 10),
        LeafSlice("stack", 1, 48, 10),
        LeafSlice("v", 0, 78, 4),
    )
    assert cut.chunk_bytes[1] == 78 + 3 * 4


def test_a_stacked_leaf_has_the_bytes_of_the_same_layers_apart():
    stacked = GroupSpec("g", FullAttention(), 4, [LeafSpec("s", (5,), "uint16", layers=3)])
    apart = GroupSpec("g", FullAttention(), 4, [LeafSpec(f"s{i}", (5,), "uint16") for i in range(3)])
    offsets = [
        [(part.offset_bytes, part.row_bytes) for part in chunk_slices(resolve_chunking(CacheLayout([g])), 0)]
        for g in (stacked, apart)
    ]
    assert offsets[0] == offsets[1] == [(0, 10), (10, 10), (20, 10)]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([FullAttention(), SlidingWindow(9), Recurrent()]),
)
def test_slices_fill_a_chunk_without_gap_or_overlap(shapes, blocks, kind):
    leaves = [LeafSpec(f"l{i}", (width,), "uint16", layers) for i, (width, layers) in enumerate(shapes)]
    cut = resolve_chunking(CacheLayout([GroupSpec("g", kind, 4, leaves)]), blocks_per_chunk=blocks)
    held = blocks_in_chunk(cut, 0)
    assert held == (1 if isinstance(kind, Recurrent) else blocks)
    covered = [
        byte
        for part in chunk_slices(cut, 0)
        for byte in range(part.offset_bytes, part.offset_bytes + held * part.row_bytes)
    ]
    assert covered == list(range(cut.chunk_bytes[0] or 0))
