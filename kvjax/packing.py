"""Bytes of a chunk, and the equal units of the host pool that chunks are kept in.

A chunk's bytes are one format for pool, tiers and frames: the group's leaves in layout order; in each
leaf its layers in order (one, unless the leaf is stacked); in each layer the chunk's blocks in order, each
block in C order, little-endian. Zeros pad it to whole units. A stacked leaf thus has the bytes of the same
layers as separate leaves. A recurrent chunk holds one block, the state at its end.
"""

from dataclasses import dataclass

import numpy as np

from kvjax._checks import integer
from kvjax.chunking import Chunking
from kvjax.groups import Recurrent

# Bytes to which a transport aligns what it moves, by platform.
GRANULE_BYTES = {"cpu": 4, "gpu": 256, "tpu": 8192}

_SMALLEST_NATURAL_UNIT = 65536
_PADDING_PARTS = 50  # at most 1/50 = 2 % of a chunk is padding


@dataclass(frozen=True, slots=True)
class Units:
    """How chunks are cut into units of the host pool. Tuples are in layout order, `None` for scratch.

    Args:
        unit_bytes: bytes of every unit.
        units_per_chunk: units that one chunk takes.
        padding_bytes: bytes of those units that the chunk does not use.
    """

    unit_bytes: int
    units_per_chunk: tuple[int | None, ...]
    padding_bytes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LeafSlice:
    """Where one layer of one leaf lies in a chunk.

    Args:
        leaf_name: the array.
        layer: its layer, 0 unless the leaf is stacked.
        offset_bytes: of the layer's first block, from the start of the chunk.
        row_bytes: bytes of one block of the layer.
    """

    leaf_name: str
    layer: int
    offset_bytes: int
    row_bytes: int


def unit_bytes(chunking: Chunking, granule_bytes: int) -> int:
    """Returns the bytes of a unit for chunks of these sizes.

    The greatest common divisor of the chunks' bytes if it is at least 64 KiB and a multiple of the
    granule; else the largest multiple of the granule, no larger than the smallest chunk, that pads no
    chunk by more than 2 % of its bytes; else the granule.

    Raises:
        ValueError: `granule_bytes` is not a positive int.
    """
    granule = integer(granule_bytes, "granule_bytes", at_least=1)
    sizes = np.array(sorted({size for size in chunking.chunk_bytes if size is not None}), np.int64)
    common = int(np.gcd.reduce(sizes))
    if common >= _SMALLEST_NATURAL_UNIT and common % granule == 0:
        return common
    smallest = int(sizes[0])
    # A unit pads the smallest chunk little enough only if, for some k, k units hold it with at most 2 %
    # to spare: the candidates lie in [smallest / k, 1.02 * smallest / k].
    for parts in range(1, _PADDING_PARTS + 1):
        low = -(-smallest // parts)
        high = min(smallest, (smallest + smallest // _PADDING_PARTS) // parts)
        found = _largest_unit(sizes, low, high, granule)
        if found:
            return found
    # From here on, every multiple of the granule pads the smallest chunk by less than 2 %.
    return _largest_unit(sizes, 1, smallest // _PADDING_PARTS, granule) or granule


def _largest_unit(sizes: np.ndarray, low: int, high: int, granule: int) -> int | None:
    top = high // granule * granule
    step = granule * 65536
    while top >= low:
        candidates = np.arange(top, max(low, top - step + 1) - 1, -granule, dtype=np.int64)
        padding = -sizes[:, None] % candidates
        good = (padding * _PADDING_PARTS <= sizes[:, None]).all(axis=0)
        if good.any():
            return int(candidates[good.argmax()])
        top -= step
    return None


def cut_into_units(chunking: Chunking, bytes_per_unit: int) -> Units:
    """Returns how the chunks are cut into units of `bytes_per_unit` bytes, any number of at least 1.

    Raises:
        ValueError: `bytes_per_unit` is not a positive int.
    """
    unit = integer(bytes_per_unit, "unit_bytes", at_least=1)
    counts = tuple(None if size is None else -(-size // unit) for size in chunking.chunk_bytes)
    padding = tuple(
        None if size is None or count is None else count * unit - size
        for size, count in zip(chunking.chunk_bytes, counts, strict=True)
    )
    return Units(unit, counts, padding)


def blocks_in_chunk(chunking: Chunking, group_idx: int) -> int:
    """Returns how many blocks' bytes one chunk of a cached group holds: one state, if it is recurrent."""
    blocks = chunking.blocks_per_chunk[group_idx]
    assert blocks is not None, "scratch groups have no chunks"
    return 1 if isinstance(chunking.layout.groups[group_idx].kind, Recurrent) else blocks


def chunk_slices(chunking: Chunking, group_idx: int) -> tuple[LeafSlice, ...]:
    """Returns where each layer of each leaf of a group lies in its chunks, in the order of the bytes."""
    blocks = blocks_in_chunk(chunking, group_idx)
    slices = []
    offset = 0
    for leaf in chunking.layout.groups[group_idx].leaves:
        for layer in range(leaf.rows_per_block):
            slices.append(LeafSlice(leaf.name, layer, offset, leaf.row_bytes))
            offset += leaf.row_bytes * blocks
    return tuple(slices)


def leaf_offsets(chunking: Chunking, group_idx: int) -> tuple[int, ...]:
    """Returns where each leaf of a group starts in its chunks, in bytes, in layout order."""
    return tuple(piece.offset_bytes for piece in chunk_slices(chunking, group_idx) if piece.layer == 0)


def tokens_that_fit(chunking: Chunking, units: Units, budget_bytes: int) -> int:
    """Returns the largest prefix, in tokens, whose complete chunks of all groups fit a budget together.

    Raises:
        ValueError: `budget_bytes` is not a non-negative int.
    """
    num_units = integer(budget_bytes, "budget_bytes", at_least=0, below=2**63) // units.unit_bytes
    costs = [
        (tokens, count)
        for tokens, count in zip(chunking.tokens_per_chunk, units.units_per_chunk, strict=True)
        if tokens is not None and count is not None
    ]

    def taken(tokens: int) -> int:
        return sum(tokens // per_chunk * count for per_chunk, count in costs)

    low, high = 0, 1
    while taken(high) <= num_units:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle) <= num_units else (low, middle)
    return low
