"""`pack` and `unpack` by DMA on a TPU.

A kernel gathers the blocks of all chunks into new arrays of the blocks' own shape and dtype; XLA turns these into
the words of the staging. `unpack` goes the other way round. What is made on the way has the size of the staging.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._rows import check_dtype, in_host_memory
from pallas_kernels._tpu_blocks import check_platform, copy_blocks, gather_blocks
from pallas_kernels.packing.chunk_shape import WORD_BYTES, ChunkShape
from pallas_kernels.packing.tpu_lanes import ROW_WORDS, from_words, to_words


def pack(
    leaves: tuple[Array, ...],
    block_ids: Array,
    count: Array,
    staging: Array,
    shape: ChunkShape,
    *,
    platform: str,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.pack`.

    Args:
        leaves: see `pallas_kernels.pack`.
        block_ids: see there.
        count: see there.
        staging: see there.
        shape: where the rows of a chunk lie.
        platform: see there.
        interpret: parameters of the interpreter that is to run the kernels, on any platform; `None` compiles them
            for a TPU.

    Raises:
        NotImplementedError: the platform is not `"tpu"`; elements are not 1, 2 or 4 whole bytes; or an array lies
            in host memory.
    """
    _check(leaves, staging, platform, interpret)
    max_chunks, unit_shape = block_ids.shape[0], staging.shape[1:]
    blocks: list[Any] = [None] * len(leaves)
    for places, ids in _row_ids(block_ids, shape):
        rows = [_as_rows(leaves[place], shape, place) for place in places]
        gathered = gather_blocks(rows, ids, count * shape.rows_per_chunk[places[0]], interpret=interpret)
        for place, array in zip(places, gathered, strict=True):
            blocks[place] = array
    lane = _lane(shape)
    lanes = [_recut(_as_uints(array).reshape(max_chunks, -1), lane, interpret) for array in blocks]
    chunks = _recut(_padded(jnp.concatenate(lanes, axis=1), shape), jnp.uint32, interpret)
    units_per_chunk = shape.chunk_words // math.prod(unit_shape)
    units = chunks.reshape(max_chunks * units_per_chunk, *unit_shape)
    further = staging.shape[0] - units.shape[0]
    units = jnp.pad(units, [(0, further)] + [(0, 0)] * len(unit_shape))
    unit_idx = lax.broadcasted_iota(jnp.int32, staging.shape, 0)
    return jnp.where(unit_idx < count * units_per_chunk, units, staging)


def unpack(
    staging: Array,
    leaves: tuple[Array, ...],
    block_ids: Array,
    count: Array,
    shape: ChunkShape,
    *,
    platform: str,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """See `pallas_kernels.unpack`; for the arguments and errors see `pack`."""
    _check(leaves, staging, platform, interpret)
    max_chunks, unit_shape = block_ids.shape[0], staging.shape[1:]
    units_per_chunk = shape.chunk_words // math.prod(unit_shape)
    lane = _lane(shape)
    chunks = _recut(staging[: max_chunks * units_per_chunk].reshape(max_chunks, shape.chunk_words), lane, interpret)
    updated = list(leaves)
    for places, ids in _row_ids(block_ids, shape):
        rows = [_as_rows(leaves[place], shape, place) for place in places]
        blocks = [_blocks(chunks, leaf, shape, place, interpret) for leaf, place in zip(rows, places, strict=True)]
        at = jnp.arange(ids.shape[0], dtype=jnp.int32)
        written = copy_blocks(blocks, at, rows, ids, count * shape.rows_per_chunk[places[0]], interpret=interpret)
        for place, leaf in zip(places, written, strict=True):
            updated[place] = leaf.reshape(leaves[place].shape)
    return tuple(updated)


def _check(leaves: tuple[Array, ...], staging: Array, platform: str, interpret: Any) -> None:
    check_platform(platform, interpret)
    for leaf in leaves:
        check_dtype(leaf.dtype)
    if any(in_host_memory(array) for array in (*leaves, staging)):
        raise NotImplementedError("leaves and staging must lie in device memory")


def _row_ids(block_ids: Array, shape: ChunkShape) -> list[tuple[list[int], Array]]:
    """Places of the leaves that have equally many layers and blocks, and the ids of their rows, chunk by chunk.

    A row is one block of one layer; it has the id `layer * num_blocks + block_id`, or -1 if the block has.
    """
    found = []
    for places in shape.leaves_by_ids:
        layers = shape.rows_per_chunk[places[0]] // shape.blocks_per_chunk
        starts = jnp.arange(layers, dtype=jnp.int32)[:, None] * shape.num_blocks[places[0]]
        ids = block_ids[:, None, :]
        found.append((places, jnp.where(ids < 0, -1, ids + starts).reshape(-1)))
    return found


def _as_rows(leaf: Array, shape: ChunkShape, place: int) -> Array:
    """A leaf as `(rows, *block_shape)`; layers and blocks are not tiled, so this moves nothing."""
    return jnp.asarray(leaf).reshape(-1, *shape.block_shapes[place])


def _blocks(chunks: Array, rows: Array, shape: ChunkShape, place: int, interpret: Any) -> Array:
    """The blocks of one leaf, cut out of the chunks' lanes: `(max_chunks * rows_per_chunk, *block_shape)`."""
    lane_bytes = chunks.dtype.itemsize
    start = shape.offset_bytes[place] // lane_bytes
    lanes = chunks[:, start : start + shape.leaf_bytes[place] // lane_bytes]
    uints = _recut(lanes, _uint(rows), interpret)
    return lax.bitcast_convert_type(uints.reshape(-1, *rows.shape[1:]), rows.dtype)


def _padded(lanes: Array, shape: ChunkShape) -> Array:
    """Chunks without padding as chunks with the zeros that fill up their units."""
    chunk_lanes = shape.chunk_words * WORD_BYTES // lanes.dtype.itemsize
    return jnp.pad(lanes, ((0, 0), (0, chunk_lanes - lanes.shape[1])))


def _lane(shape: ChunkShape) -> Any:
    return jnp.dtype(jnp.uint32 if shape.rows_are_words else jnp.uint8)


def _uint(array: Array) -> Any:
    return jnp.dtype(f"uint{8 * array.dtype.itemsize}")


def _as_uints(array: Array) -> Array:
    return lax.bitcast_convert_type(array, _uint(array))


def _recut(lanes: Array, dtype: Any, interpret: Any) -> Array:
    """The little-endian bytes of each row of `(rows, lanes)`, as lanes of another unsigned integer.

    A view `(rows, lanes / n, n)` would always do, but a TPU pads its last dimension to 128.
    """
    old, new, num_rows = lanes.dtype.itemsize, jnp.dtype(dtype).itemsize, lanes.shape[0]
    if old == new:
        return lanes
    if WORD_BYTES in (old, new) and lanes.shape[1] * old % (WORD_BYTES * ROW_WORDS) == 0:
        rows = lanes.reshape(-1, WORD_BYTES * ROW_WORDS // old)
        recut = (
            to_words(rows, interpret=interpret) if new == WORD_BYTES else from_words(rows, dtype, interpret=interpret)
        )
        return recut.reshape(num_rows, -1)
    if new > old:
        lanes = lanes.reshape(num_rows, -1, new // old)
    return lax.bitcast_convert_type(lanes, dtype).reshape(num_rows, -1)
