"""`pack` and `unpack` in plain JAX.

A loop over chunks holds a loop over rows, which copies one row of every leaf a turn. Where every row is whole
words, rows are copied straight between leaf and staging; otherwise a chunk's bytes pass through a buffer.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._rows import (
    check_dtype,
    from_lanes,
    read_row,
    to_device,
    to_lanes,
    to_space_of,
    write_row,
)
from pallas_kernels.packing.chunk_shape import WORD_BYTES, ChunkShape

_MAX_INDEX = 2**31 - 1


def pack(
    leaves: tuple[Array, ...],
    block_ids: Array,
    count: Array,
    staging: Array,
    shape: ChunkShape,
    *,
    platform: str,
) -> Array:
    """See `pallas_kernels.pack`.

    Raises:
        NotImplementedError: elements are not 1, 2 or 4 whole bytes; an array lies in host memory and the
            platform is not `"cpu"`; or an index would not fit int32.
    """
    rows, words = _on_device(leaves, staging, platform)

    def pack_chunk(i: Array, words: Array) -> Array:
        start = i * shape.chunk_words
        if not shape.rows_are_words:
            buffer = jnp.zeros(shape.chunk_words * WORD_BYTES, jnp.uint8)
            buffer = _rows_to_lanes(rows, block_ids[i], buffer, 0, shape, platform)
            return lax.dynamic_update_slice(words, to_lanes(buffer, jnp.uint32), (start,))
        words = _rows_to_lanes(rows, block_ids[i], words, start, shape, platform)
        used = shape.chunk_bytes // WORD_BYTES
        padding = jnp.zeros(shape.chunk_words - used, jnp.uint32)
        return lax.dynamic_update_slice(words, padding, (start + used,)) if padding.size else words

    return to_space_of(lax.fori_loop(0, count, pack_chunk, words).reshape(staging.shape), staging)


def unpack(
    staging: Array,
    leaves: tuple[Array, ...],
    block_ids: Array,
    count: Array,
    shape: ChunkShape,
    *,
    platform: str,
) -> tuple[Array, ...]:
    """See `pallas_kernels.unpack`.

    Raises:
        NotImplementedError: see `pack`.
    """
    rows, words = _on_device(leaves, staging, platform)

    def unpack_chunk(i: Array, rows: tuple[Array, ...]) -> tuple[Array, ...]:
        start = i * shape.chunk_words
        if not shape.rows_are_words:
            chunk = lax.dynamic_slice(words, (start,), (shape.chunk_words,))
            return _lanes_to_rows(to_lanes(chunk, jnp.uint8), 0, rows, block_ids[i], shape, platform)
        return _lanes_to_rows(words, start, rows, block_ids[i], shape, platform)

    rows = lax.fori_loop(0, count, unpack_chunk, rows)
    return tuple(to_space_of(updated, leaf) for updated, leaf in zip(rows, leaves, strict=True))


def _on_device(leaves: tuple[Array, ...], staging: Array, platform: str) -> tuple[tuple[Array, ...], Array]:
    """The leaves as they are, and the staging as `(words,)`."""
    for leaf in leaves:
        check_dtype(leaf.dtype)
    if math.prod(staging.shape) > _MAX_INDEX:
        raise NotImplementedError(f"`staging` must have at most {_MAX_INDEX} words, got {math.prod(staging.shape)}")
    return tuple(to_device(leaf, platform) for leaf in leaves), to_device(staging, platform).reshape(-1)


def _rows_to_lanes(
    rows: tuple[Array, ...], ids: Array, lanes: Array, start: Any, shape: ChunkShape, platform: str
) -> Array:
    """Copies the rows of the chunk of the blocks `ids` to where they belong in `lanes`, from `start` on."""
    for rows_per_chunk, places in shape.leaves_by_rows.items():

        def copy_rows(r: Array, lanes: Array, places: list[int] = places) -> Array:
            layer, block_id = r // shape.blocks_per_chunk, ids[r % shape.blocks_per_chunk]
            for place in places:
                row = read_row(rows[place], _place_of_row(shape, place, rows[place], layer, block_id), platform)
                at, _ = _lanes_of_row(shape, place, r, lanes.dtype)
                lanes = lax.dynamic_update_slice(lanes, to_lanes(row, lanes.dtype), (start + at,))
            return lanes

        lanes = lax.fori_loop(0, rows_per_chunk, copy_rows, lanes)
    return lanes


def _lanes_to_rows(
    lanes: Array, start: Any, rows: tuple[Array, ...], ids: Array, shape: ChunkShape, platform: str
) -> tuple[Array, ...]:
    """Copies the chunk in `lanes`, from `start` on, to the rows of the blocks `ids`; none where the id is -1."""
    updated = list(rows)
    for rows_per_chunk, places in shape.leaves_by_rows.items():

        def copy_rows(r: Array, mine: tuple[Array, ...], places: list[int] = places) -> tuple[Array, ...]:
            layer, block_id = r // shape.blocks_per_chunk, ids[r % shape.blocks_per_chunk]

            def write(mine: tuple[Array, ...]) -> tuple[Array, ...]:
                written = []
                for place, leaf in zip(places, mine, strict=True):
                    at, size = _lanes_of_row(shape, place, r, lanes.dtype)
                    row = from_lanes(lax.dynamic_slice(lanes, (start + at,), (size,)), leaf.dtype)
                    written.append(write_row(leaf, _place_of_row(shape, place, leaf, layer, block_id), row, platform))
                return tuple(written)

            return lax.cond(block_id >= 0, write, lambda mine: mine, mine)

        result = lax.fori_loop(0, rows_per_chunk, copy_rows, tuple(updated[place] for place in places))
        for place, leaf in zip(places, result, strict=True):
            updated[place] = leaf
    return tuple(updated)


def _place_of_row(shape: ChunkShape, place: int, leaf: Array, layer: Array, block_id: Array) -> tuple[Array, ...]:
    """Where a row of the leaf is in it: a leaf without a dimension of layers has one."""
    is_stacked = leaf.ndim > len(shape.block_shapes[place]) + 1
    return (layer, block_id) if is_stacked else (block_id,)


def _lanes_of_row(shape: ChunkShape, place: int, row_idx: Array, lane: Any) -> tuple[Array, int]:
    """Where the leaf's row starts in its chunk, and its size, both in lanes."""
    lane_bytes = jnp.dtype(lane).itemsize
    size = shape.row_bytes[place] // lane_bytes
    return shape.offset_bytes[place] // lane_bytes + row_idx * size, size
