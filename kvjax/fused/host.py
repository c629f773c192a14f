"""What the caller of a jitted step prepares on the host: buckets, checked ids, rows in host memory."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kvjax._checks import integer
from kvjax.fused.transfers import Arriving

_HOST = "pinned_host"
_NO_BLOCK = -1


def bucket_of(num_rows: int, buckets: Sequence[int]) -> int:
    """Returns the smallest bucket that holds so many rows.

    Args:
        num_rows: rows to move in a step.
        buckets: the sizes that steps are compiled for; 0 among them makes steps without a transfer cost nothing.

    Raises:
        ValueError: `num_rows` or a bucket is not a non-negative int, or no bucket is large enough.

    >>> [bucket_of(n, (0, 8, 64)) for n in (0, 1, 8, 9)]
    [0, 8, 8, 64]
    """
    integer(num_rows, "num_rows", at_least=0)
    fitting = [bucket for bucket in buckets if integer(bucket, "buckets", at_least=0) >= num_rows]
    if not fitting:
        raise ValueError(f"`buckets` must hold one of at least {num_rows} rows, got {tuple(buckets)}")
    return min(fitting)


def pad_ids(block_ids: Any, *, bucket: int, num_blocks: int) -> np.ndarray:
    """Returns ids for `collect`, int32 `(bucket,)`, padded with -1.

    Args:
        block_ids: ints, at most `bucket`.
        bucket: rows that the step is compiled for.
        num_blocks: blocks of the cache.

    Raises:
        ValueError: more ids than the bucket holds, an id that is no int, out of range or named twice.

    >>> pad_ids([5, 2], bucket=4, num_blocks=6).tolist()
    [5, 2, -1, -1]
    """
    integer(bucket, "bucket", at_least=0)
    ids = np.asarray(block_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"`block_ids` must be a 1-d sequence of ints, got a {ids.ndim}-d one of {ids.dtype.name}")
    if len(ids) > bucket:
        raise ValueError(f"`block_ids` must be at most {bucket}, the rows of the bucket, got {len(ids)}")
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_blocks:
        raise ValueError(f"`block_ids` must be from 0 to {num_blocks - 1}, got {ids.min()} to {ids.max()}")
    values, times = np.unique(ids, return_counts=True)
    if (times > 1).any():
        raise ValueError(f"`block_ids` must name each block once, got block {values[times > 1][0]} twice")
    padded = np.full(bucket, _NO_BLOCK, np.int32)
    padded[: len(ids)] = ids
    return padded


def rows_sharding(cache: Any, *, stacked: bool = False, arriving: bool = True) -> Sharding:
    """Returns where the rows of a cache belong: in host memory, split within a block as the cache is.

    Args:
        cache: an array `(num_blocks, *block_shape)`, or its `jax.ShapeDtypeStruct` with a sharding.
        stacked: the cache is `(layers, num_blocks, *block_shape)` instead.
        arriving: True for rows of an `Arriving`, `(layers, bucket, *block_shape)`; False for those that `collect`
            returns, `(bucket, *block_shape)`.

    Raises:
        ValueError: the cache has no sharding, or one that is neither named nor of a single device; or it is split
            over layers or blocks.
    """
    sharding = getattr(cache, "sharding", None)
    if isinstance(sharding, SingleDeviceSharding):
        return sharding.with_memory_kind(_HOST)
    if not isinstance(sharding, NamedSharding):
        raise ValueError(f"`cache` must have a NamedSharding or lie on a single device, got {sharding}")
    lead = 2 if stacked else 1
    spec = tuple(sharding.spec)
    if any(_parts(sharding, axes) > 1 for axes in spec[:lead]):
        raise ValueError(f"`cache` must not be split over its layers or blocks, got {sharding.spec}")
    whole = (None, None) if arriving else (None,)
    return NamedSharding(sharding.mesh, PartitionSpec(*whole, *spec[lead:]), memory_kind=_HOST)


def _parts(sharding: NamedSharding, axes: Any) -> int:
    """Into how many parts the axes of a mesh split a dimension."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    return math.prod(sharding.mesh.shape[name] for name in names)


def make_arriving(rows: Any, block_ids: Any, *, bucket: int, num_blocks: int, sharding: Any) -> Arriving:
    """Puts rows into host memory as a step takes them.

    With no rows, `(layers, 0, *block_shape)`, and no ids, it makes what warms up a bucket: a count of 0.

    Args:
        rows: NumPy arrays `(layers, len(block_ids), *block_shape)`, or a tree of them. They are copied.
        block_ids: ints, where the rows go.
        bucket: rows that the step is compiled for.
        num_blocks: blocks of the caches.
        sharding: of the rows, as `rows_sharding` returns it, one for all or a tree of them.

    Raises:
        ValueError: see `pad_ids`; rows of another number than the ids; or a sharding that is not of `pinned_host`.
    """
    ids = pad_ids(block_ids, bucket=bucket, num_blocks=num_blocks)
    count = len(block_ids)

    def padded(leaf: np.ndarray) -> np.ndarray:
        if leaf.ndim < 2 or leaf.shape[1] != count:
            raise ValueError(f"`rows` must have shape (layers, {count}, *block_shape), got {leaf.shape}")
        whole = np.zeros((leaf.shape[0], bucket, *leaf.shape[2:]), leaf.dtype)
        whole[:, :count] = leaf
        return whole

    for one in jax.tree.leaves(sharding):
        if getattr(one, "memory_kind", None) != _HOST:
            raise ValueError(f"`sharding` must be of {_HOST!r} memory, got {one}")
    moved = jax.device_put(jax.tree.map(padded, rows), sharding)
    return Arriving(moved, ids, np.int32(count))
