"""What a jitted step calls for each layer."""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType

from kvjax._checks import is_int
from kvjax.fused.blocks import layer_to_device, read_blocks, to_words, write_blocks

_SPACE = jax.memory.Space
_X = TypeVar("_X")
_Cache = TypeVar("_Cache")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, eq=False)
class Arriving:
    """Blocks to restore in the layers of one group, as a step takes them. Neither donated nor changed by it.

    Args:
        rows: an array `(layers, bucket, *block_shape)` in `pinned_host` memory, or a tree of such for layers that
            own several leaves; sharded as the caches are within a block, and not over layers or rows.
        block_ids: int32 `(bucket,)`, where the rows go in each layer's cache. The first `count` must be in range
            and distinct, which no device checks; the others may be anything.
        count: int32 scalar, rows that are real; the others are padding and never written.
    """

    rows: Any
    block_ids: Array | np.ndarray
    count: Array | np.integer


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """One layer's part of an `Arriving`, on its way to the device.

    Args:
        rows: arrays `(bucket, *block_shape)` in device memory, in the tree of the `Arriving`.
        block_ids: see `Arriving`.
        count: see `Arriving`.
    """

    rows: Any
    block_ids: Array | np.ndarray
    count: Array | np.integer


def fetch(arriving: Arriving, layer: int | Array, *, platform: str | None = None) -> Fetched:
    """Starts to bring one layer's rows to the device. To be called inside a jitted function.

    The copy depends on nothing that the step computes: where it starts is the compiler's choice, ahead of the
    `restore` that needs it. The whole bucket crosses, whatever the count.

    Args:
        arriving: what to restore.
        layer: place in the first dimension of the rows. If it is traced it is not checked, and clamped.
        platform: platform the program is made for; `None` is the default backend.

    Returns:
        The rows in device memory, with their ids and count.

    Raises:
        ValueError: rows that do not lie in host memory or have no layer; another number of rows than of ids; ids
            that are not int32 of shape `(bucket,)`; a count that is not an int32 scalar; or a layer out of range.
    """
    bucket = _checked_bucket("arriving.block_ids", arriving.block_ids)
    if _shape(arriving.count) != () or _dtype(arriving.count) != jnp.int32:
        raise ValueError(f"`arriving.count` must be an int32 scalar, got {_described(arriving.count)}")
    for rows in _leaves("arriving.rows", arriving.rows):
        _check_arriving_rows(rows, bucket)
        _check_layer(layer, rows.shape[0], "arriving.rows")
    place, target = jnp.asarray(layer, jnp.int32), _platform(platform)

    def bring(rows: Array) -> Array:
        if not bucket:
            return jnp.zeros(rows.shape[1:], rows.dtype)
        return layer_to_device(rows, place, target)

    return Fetched(jax.tree.map(bring, arriving.rows), arriving.block_ids, arriving.count)


def restore(
    x: _X, cache: _Cache, fetched: Fetched, *, layer: int | Array | None = None, platform: str | None = None
) -> tuple[_X, _Cache]:
    """Writes fetched rows into a layer's cache; what the layer reads must be the cache that this returns.

    It works in place on a cache that the step was given as a donated argument; all other blocks keep every bit. No
    other ids and no other count compile anything again.

    The write waits for `x`: compilers otherwise write the caches of later layers first, and with that make the first
    layer wait for all transfers.

    Args:
        x: what the layer takes, an array or a tree.
        cache: an array `(num_blocks, *block_shape)` or `(layers, num_blocks, *block_shape)`, or a tree of them with
            the structure of the rows.
        fetched: as `fetch` returned it.
        layer: place in the first dimension of caches that have layers, `None` for caches without. If it is traced
            it is not checked.
        platform: platform the program is made for; `None` is the default backend.

    Returns:
        `x` and the cache; what the layer takes must be these.

    Raises:
        ValueError: `fetched` is not what `fetch` returns; caches and rows that differ in structure, block shape or
            dtype; a cache in host memory, without blocks, or not of 8, 16 or 32 bits;
            or a layer out of range.
    """
    if not isinstance(fetched, Fetched):
        raise ValueError(f"`fetched` must be what `fetch` returns, got {type(fetched).__name__}")
    wanted, got = jax.tree.structure(fetched.rows), jax.tree.structure(cache)
    if wanted != got:
        raise ValueError(f"`cache` must have the structure of the rows, {wanted}, got {got}")
    for leaf, rows in zip(jax.tree.leaves(cache), jax.tree.leaves(fetched.rows), strict=True):
        block_shape = _checked_block_shape(leaf, layer)
        if block_shape != rows.shape[1:] or leaf.dtype != rows.dtype:
            raise ValueError(
                f"`cache` must have the block shape and dtype of the rows, {rows.dtype.name} of {rows.shape[1:]}, "
                f"got {leaf.dtype.name} of {block_shape}"
            )
    if not fetched.block_ids.shape[0]:
        return x, cache
    place, target = _place(layer), _platform(platform)
    x, ids = jax.lax.optimization_barrier((x, jnp.asarray(fetched.block_ids)))
    count = jnp.asarray(fetched.count)

    def write(leaf: Array, rows: Array) -> Array:
        return write_blocks(leaf, place, rows, ids, count, target)

    return x, jax.tree.map(write, cache, fetched.rows)


def collect(
    cache: _Cache,
    block_ids: Array | np.ndarray,
    *,
    layer: int | Array | None = None,
    as_words: bool = False,
    platform: str | None = None,
) -> _Cache:
    """Starts to send blocks of a layer's cache to host memory.

    It reads the version of the cache that it is given: the one that the layer's write returned. Return the rows from
    the step; they are readable when the step has ended. The whole bucket crosses.

    Args:
        cache: an array `(num_blocks, *block_shape)` or `(layers, num_blocks, *block_shape)`, or a tree of them.
        block_ids: int32 `(bucket,)`, blocks to send; they may repeat. An id out of range, such as padding, sends
            some block.
        layer: place in the first dimension of caches that have layers, `None` for caches without. If it is traced
            it is not checked.
        as_words: return unsigned integers of the elements' width. `lax.scan` stacks its outputs by updates, with
            which XLA:CPU normalizes narrow floats (bfloat16 on jax 0.10, float8_e5m2 on 0.12 too): words stay exact.
        platform: platform the program is made for; `None` is the default backend.

    Returns:
        Rows `(bucket, *block_shape)` in host memory in the order of the ids, in the tree of the cache.

    Raises:
        ValueError: ids that are not int32 of shape `(bucket,)`; a cache in host memory, without blocks, or not of 8, 16
            or 32 bits; or a layer out of range.
    """
    bucket = _checked_bucket("block_ids", block_ids)
    for leaf in _leaves("cache", cache):
        _checked_block_shape(leaf, layer)
    place, target = _place(layer), _platform(platform)

    def send(leaf: Array) -> Array:
        if not bucket:
            rows = jnp.zeros((0, *_checked_block_shape(leaf, layer)), leaf.dtype)
        else:
            rows = read_blocks(leaf, place, jnp.asarray(block_ids), target)
        if as_words:
            rows = to_words(rows)
        return jax.device_put(rows, _SPACE.Host)

    return jax.tree.map(send, cache)


def settle(x: _X, rows: _Cache) -> tuple[_X, _Cache]:
    """Says that rows must have reached host memory before anything that is computed from the returned `x`.

    Without it, compilers delay all collects to the end of the step, where nothing is left to hide them. Called after
    a layer with the rows of two layers before, it gives each transfer two layers of time.

    Args:
        x: what the next layer takes, an array or a tree.
        rows: as `collect` returned them, or a tree of such; those of an empty bucket order nothing.

    Returns:
        `x` and the rows; what is used from here on must be these.
    """
    if not any(leaf.size for leaf in jax.tree.leaves(rows)):
        return x, rows
    return jax.lax.optimization_barrier((x, rows))


def _checked_bucket(name: str, block_ids: Any) -> int:
    if len(_shape(block_ids) or ()) != 1 or _dtype(block_ids) != jnp.int32:
        raise ValueError(f"`{name}` must be int32 of shape (bucket,), got {_described(block_ids)}")
    return block_ids.shape[0]


def _check_arriving_rows(rows: Array, bucket: int) -> None:
    if rows.ndim < 2 or rows.shape[1] != bucket or not rows.shape[0]:
        raise ValueError(
            f"`arriving.rows` must have shape (layers, {bucket}, *block_shape), as many rows as ids, "
            f"got {_described(rows)}"
        )
    _check_axes("arriving.rows", rows)
    if not _in_host_memory(rows):
        raise ValueError(f"`arriving.rows` must lie in host memory, got {_described(rows)} in device memory")


def _checked_block_shape(cache: Array, layer: Any) -> tuple[int, ...]:
    """Checks one cache array, and returns the shape of its blocks."""
    lead = 0 if layer is None else 1
    dims = "num_blocks" if layer is None else "layers, num_blocks"
    if cache.ndim < lead + 1 or 0 in cache.shape[: lead + 1]:
        raise ValueError(f"`cache` must have shape ({dims}, *block_shape) without a zero, got {_described(cache)}")
    _check_axes("cache", cache)
    if _in_host_memory(cache):
        raise ValueError(f"`cache` must lie in device memory, got {_described(cache)} in host memory")
    if jax.dtypes.itemsize_bits(cache.dtype) not in (8, 16, 32):
        raise ValueError(f"`cache` must have elements of 8, 16 or 32 bits, got {_described(cache)}")
    if layer is not None:
        _check_layer(layer, cache.shape[0], "cache")
    return cache.shape[lead + 1 :]


def _check_axes(name: str, array: Array) -> None:
    """Checks that the compiler, and not the type of an array, says how it is split."""
    mesh = getattr(jax.typeof(array).sharding, "mesh", None)
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"`{name}` must be on a mesh of `Auto` axes, or within `jax.sharding.auto_axes`, got axes {mesh.axis_types}"
        )


def _check_layer(layer: Any, num_layers: int, name: str) -> None:
    if is_int(layer):
        if not 0 <= layer < num_layers:
            raise ValueError(f"`layer` must be from 0 to {num_layers - 1}, the layers of `{name}`, got {layer}")
    elif _shape(layer) != () or not jnp.issubdtype(_dtype(layer), jnp.integer):
        raise ValueError(f"`layer` must be an integer scalar, got {_described(layer)}")


def _leaves(name: str, tree: Any) -> list[Array]:
    leaves = jax.tree.leaves(tree)
    for leaf in leaves:
        if _shape(leaf) is None or _dtype(leaf) is None:
            raise ValueError(f"`{name}` must be an array or a tree of arrays, got {type(leaf).__name__}")
    if not leaves:
        raise ValueError(f"`{name}` must hold at least one array, got none")
    return leaves


def _place(layer: Any) -> Array | None:
    return None if layer is None else jnp.asarray(layer, jnp.int32)


def _platform(platform: str | None) -> str:
    return jax.default_backend() if platform is None else platform


def _in_host_memory(array: Array | np.ndarray) -> bool:
    return getattr(jax.typeof(array), "memory_space", _SPACE.Device) == _SPACE.Host


def _shape(value: Any) -> tuple[int, ...] | None:
    return getattr(value, "shape", None)


def _dtype(value: Any) -> Any:
    return getattr(value, "dtype", None)


def _described(value: Any) -> str:
    return f"{value.dtype.name} of shape {tuple(value.shape)}" if hasattr(value, "dtype") else repr(value)
