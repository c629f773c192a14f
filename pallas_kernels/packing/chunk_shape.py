"""Where the rows of a chunk lie in its units: what the caller's shapes say, checked once.

A *row* is one block of one layer of one leaf. A chunk's bytes are its rows without gaps: leaves in order, in
each leaf its layers in order, in each layer the chunk's blocks in order. Zeros fill up its last unit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _checks

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Where the rows of a chunk lie.

    Args:
        blocks_per_chunk: blocks of each layer in a chunk.
        chunk_words: words between the starts of two chunks in the staging, which is all units of a chunk.
        num_blocks: blocks of one layer of each leaf.
        rows_per_chunk: rows that each leaf gives to a chunk, layers × blocks_per_chunk.
        row_bytes: bytes of one row of each leaf.
        block_shapes: shape of one block of each leaf.
    """

    blocks_per_chunk: int
    chunk_words: int
    num_blocks: tuple[int, ...]
    rows_per_chunk: tuple[int, ...]
    row_bytes: tuple[int, ...]
    block_shapes: tuple[tuple[int, ...], ...]

    @property
    def leaf_bytes(self) -> tuple[int, ...]:
        """Bytes of each leaf in a chunk."""
        return tuple(rows * size for rows, size in zip(self.rows_per_chunk, self.row_bytes, strict=True))

    @property
    def offset_bytes(self) -> tuple[int, ...]:
        """Where each leaf's first row starts, from the start of the chunk."""
        return tuple(accumulate(self.leaf_bytes[:-1], initial=0))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk without its padding."""
        return sum(self.leaf_bytes)

    @property
    def rows_are_words(self) -> bool:
        """Whether every row starts and ends at a whole word of its chunk."""
        return all(size % WORD_BYTES == 0 for size in self.row_bytes)

    @property
    def leaves_by_rows(self) -> dict[int, list[int]]:
        """Places of the leaves, by the number of rows they give to a chunk."""
        places: dict[int, list[int]] = {}
        for place, rows in enumerate(self.rows_per_chunk):
            places.setdefault(rows, []).append(place)
        return places

    @property
    def leaves_by_ids(self) -> list[list[int]]:
        """Places of the leaves, those with equally many layers and equally many blocks together."""
        places: dict[tuple[int, int], list[int]] = {}
        for place, key in enumerate(zip(self.rows_per_chunk, self.num_blocks, strict=True)):
            places.setdefault(key, []).append(place)
        return list(places.values())


def chunk_shape(
    leaves: tuple[Any, ...],
    block_ids: Any,
    staging: Any,
    stacked: Sequence[bool] | None,
    units_per_chunk: int | None,
) -> ChunkShape:
    """Checks that leaves, ids and staging fit together, and says where the rows lie.

    Args:
        leaves: see `pack`.
        block_ids: `(max_chunks, blocks_per_chunk)`.
        staging: see `pack`.
        stacked: see `pack`.
        units_per_chunk: see `pack`.

    Raises:
        ValueError: they do not; the message names the argument, what must hold and what came.
    """
    if stacked is None:
        stacked = (False,) * len(leaves)
    if len(stacked) != len(leaves):
        raise ValueError(f"`stacked` must have one entry per leaf, got {len(stacked)} for {len(leaves)} leaves")
    max_chunks, blocks_per_chunk = block_ids.shape
    num_blocks, rows_per_chunk, row_bytes, block_shapes = [], [], [], []
    for i, (leaf, has_layers) in enumerate(zip(leaves, stacked, strict=True)):
        leading = 2 if has_layers else 1
        if leaf.ndim < leading or 0 in leaf.shape:
            expected = "(layers, num_blocks, *block_shape)" if has_layers else "(num_blocks, *block_shape)"
            raise ValueError(f"`leaves[{i}]` must have shape {expected} without a zero, got shape {tuple(leaf.shape)}")
        num_blocks.append(leaf.shape[leading - 1])
        rows_per_chunk.append((leaf.shape[0] if has_layers else 1) * blocks_per_chunk)
        block_shapes.append(tuple(leaf.shape[leading:]))
        row_bytes.append(math.prod(block_shapes[-1]) * leaf.dtype.itemsize)
    units = _units_per_chunk(staging, max_chunks, units_per_chunk)
    unit_words = math.prod(staging.shape[1:])
    shape = ChunkShape(
        blocks_per_chunk,
        units * unit_words,
        tuple(num_blocks),
        tuple(rows_per_chunk),
        tuple(row_bytes),
        tuple(block_shapes),
    )
    if shape.chunk_words * WORD_BYTES < shape.chunk_bytes:
        raise ValueError(
            f"`staging` must hold {shape.chunk_bytes} bytes per chunk, got {units} units of "
            f"{unit_words * WORD_BYTES} bytes per chunk"
        )
    return shape


def _units_per_chunk(staging: Any, max_chunks: int, units_per_chunk: int | None) -> int:
    _checks.array("staging", staging)
    if staging.dtype != jnp.uint32 or staging.ndim < 2 or 0 in staging.shape:
        raise ValueError(
            f"`staging` must be uint32 of shape (units, *unit_shape) without a zero, got {_checks.describe(staging)}"
        )
    num_units = staging.shape[0]
    if units_per_chunk is None:
        if num_units % max_chunks:
            raise ValueError(
                f"`staging` must have a whole number of units for each of {max_chunks} chunks, got {num_units} "
                "units; `units_per_chunk` may be given instead"
            )
        return num_units // max_chunks
    units_per_chunk = _checks.positive("units_per_chunk", units_per_chunk)
    if units_per_chunk * max_chunks > num_units:
        raise ValueError(
            f"`staging` must have {units_per_chunk} units for each of {max_chunks} chunks, got {num_units} units"
        )
    return units_per_chunk
