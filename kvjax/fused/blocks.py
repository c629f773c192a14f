"""Blocks of one array read and written by id, in the array's own shape, so that any sharding of a block survives.

Accelerators gather and scatter in the array's own dtype: no bit changes, and an integer view of a whole cache would be
a pass over it. XLA:CPU copies block by block; it normalizes floats narrower than 32 bits, and sees them as integers.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

_SPACE = jax.memory.Space
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def layer_to_device(rows: Array, layer: Array, platform: str) -> Array:
    """Returns `rows[layer]` of `(layers, bucket, *block_shape)` rows in host memory, in device memory."""
    if platform == "cpu":
        return _at(jax.device_put(rows, _SPACE.Device), (layer,), rows.shape[1:])
    return jax.device_put(lax.dynamic_index_in_dim(rows, layer, 0, keepdims=False), _SPACE.Device)


def write_blocks(
    cache: Array, layer: Array | None, rows: Array, block_ids: Array, count: Array, platform: str
) -> Array:
    """Writes the first `count` rows into the cache, in place if its buffer may be re-used.

    Args:
        cache: `(num_blocks, *block_shape)`, or `(layers, num_blocks, *block_shape)` with a `layer`.
        layer: int32 scalar, or `None` for a cache without layers.
        rows: `(bucket, *block_shape)` in device memory.
        block_ids: int32 `(bucket,)`; the first `count` are in range and distinct.
        count: int32 scalar.
        platform: platform the program is made for.

    Returns:
        The cache.
    """
    bucket = rows.shape[0]
    places = jnp.arange(bucket, dtype=jnp.int32)
    lead = () if layer is None else (layer,)
    if platform == "cpu":
        return _copy_one_by_one(rows, (), places, cache, lead, block_ids, jnp.minimum(count, bucket))
    # Padding goes out of range, to distinct places, and is dropped.
    targets = jnp.where(places < count, block_ids, cache.shape[len(lead)] + places)
    return cache.at[(*lead, targets)].set(rows, mode="drop", unique_indices=True)


def read_blocks(cache: Array, layer: Array | None, block_ids: Array, platform: str) -> Array:
    """Returns the blocks, `(bucket, *block_shape)`; an id out of range reads some other block.

    Args:
        cache: `(num_blocks, *block_shape)`, or `(layers, num_blocks, *block_shape)` with a `layer`.
        layer: int32 scalar, or `None` for a cache without layers.
        block_ids: int32 `(bucket,)`.
        platform: platform the program is made for.
    """
    lead = () if layer is None else (layer,)
    ids = jnp.clip(block_ids, 0, cache.shape[len(lead)] - 1)
    if platform == "cpu":
        bucket = ids.shape[0]
        rows = jnp.zeros((bucket, *cache.shape[len(lead) + 1 :]), cache.dtype)
        return _copy_one_by_one(cache, lead, ids, rows, (), jnp.arange(bucket, dtype=jnp.int32), jnp.int32(bucket))
    return cache.at[(*lead, ids)].get(mode="promise_in_bounds")


def to_words(array: Array) -> Array:
    """The bits of an array as unsigned integers of its elements' width.

    Beside a slice or an update it is free on CPU; elsewhere it copies.
    """
    return lax.bitcast_convert_type(array, _UINTS[array.dtype.itemsize])


def _copy_one_by_one(
    src: Array,
    src_lead: tuple[Array, ...],
    src_ids: Array,
    dst: Array,
    dst_lead: tuple[Array, ...],
    dst_ids: Array,
    count: Array,
) -> Array:
    block_shape = src.shape[len(src_lead) + 1 :]

    def copy_one(i: Array, dst: Array) -> Array:
        # Both ids are loaded: a block at the loop's own index makes XLA:CPU of jax 0.12 convert the whole of `dst`.
        block = _at(src, (*src_lead, src_ids[i]), block_shape)
        return _set(dst, (*dst_lead, dst_ids[i]), block)

    return lax.fori_loop(0, count, copy_one, dst)


def _at(array: Array, index: tuple[Array, ...], shape: tuple[int, ...]) -> Array:
    """`array[index]` of that shape. The barrier keeps the view beside the slice, where it costs nothing."""
    sizes = (*(1 for _ in index), *shape)
    start = (*index, *(0 for _ in shape))
    if not _is_narrow_float(array):
        return lax.dynamic_slice(array, start, sizes).reshape(shape)
    tied, last = lax.optimization_barrier((array, index[-1]))
    start = (*index[:-1], last, *(0 for _ in shape))
    words = lax.dynamic_slice(to_words(tied), start, sizes)
    return lax.bitcast_convert_type(words, array.dtype).reshape(shape)


def _set(array: Array, index: tuple[Array, ...], block: Array) -> Array:
    """`array` with `array[index]` replaced."""
    start = (*index, *(0 for _ in block.shape))
    block = block.reshape(*(1 for _ in index), *block.shape)
    if not _is_narrow_float(array):
        return lax.dynamic_update_slice(array, block, start)
    return lax.bitcast_convert_type(lax.dynamic_update_slice(to_words(array), to_words(block), start), array.dtype)


def _is_narrow_float(array: Array) -> bool:
    return array.dtype.itemsize < 4 and jnp.issubdtype(array.dtype, jnp.floating)
