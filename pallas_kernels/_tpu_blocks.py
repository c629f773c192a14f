"""Blocks copied by DMA on a TPU, and by XLA where a kernel cannot reach them.

A TPU keeps arrays in tiles. An array whose blocks fill their tiles without padding lies in row-major order, each
block in one piece. Any other array has its dimensions in another order, and a kernel, which wants them in row-major
order, would be given a copy of the whole array. The blocks of such an array are gathered and scattered by XLA.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._rows import in_host_memory

_LANES, _SUBLANES = 128, 8
# The host side of a DMA is addressed in whole pages of 4 KiB, two tiles of 32-bit words.
_HOST_TILE = (_SUBLANES, 2 * _LANES)
# Ids come to SMEM, which has 1 MiB, in segments of so many, and so many blocks of a leaf are under way at most.
_SEGMENT = 1024


def check_platform(platform: str, interpret: Any) -> None:
    """Refuses platforms other than a TPU, unless the kernels are interpreted.

    Raises:
        NotImplementedError: it is another platform.
    """
    if platform != "tpu" and interpret is None:
        raise NotImplementedError(f"Mosaic TPU kernels run on 'tpu' only, not on {platform!r}")


def fills_tiles(leaf: Any) -> bool:
    """Whether the blocks of a leaf `(num_blocks, *block_shape)` fill the tiles of a TPU, and a kernel takes the dtype.

    The last dimension must be a multiple of 128. The one before must be a multiple of 8, or a smaller power of two
    that fills 32-bit words. This is when XLA's own layout of the array is row-major, on v4 to 7x. Mosaic takes no
    float16.
    """
    if leaf.ndim < 3 or leaf.dtype == jnp.float16:
        return False
    rows, lanes = leaf.shape[-2:]
    small_tiles = [rows for rows in (1, 2, 4) if rows * leaf.dtype.itemsize >= 4]
    return lanes % _LANES == 0 and (rows % _SUBLANES == 0 or rows in small_tiles)


def check_host_leaf(name: str, leaf: Any) -> None:
    """Refuses leaves in host memory whose blocks a DMA cannot address there.

    Raises:
        NotImplementedError: it lies in host memory, and its blocks are not whole pages of 32-bit words.
    """
    if not in_host_memory(leaf):
        return
    rows, lanes = leaf.shape[-2:] if leaf.ndim > 2 else (1, 1)
    if leaf.dtype.itemsize != 4 or rows % _HOST_TILE[0] or lanes % _HOST_TILE[1]:
        raise NotImplementedError(
            f"`{name}` lies in host memory, where blocks must be 32-bit words whose last two dimensions are multiples "
            f"of {_HOST_TILE}, got {jnp.dtype(leaf.dtype).name} blocks of shape {tuple(leaf.shape[1:])}"
        )


def shape_like(array: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A result that differs between the devices of a `shard_map` as `array` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)


def gather_blocks(leaves: Sequence[Array], ids: Array, count: Array, *, interpret: Any = None) -> list[Array]:
    """Reads blocks `ids[:count]` of every leaf.

    Args:
        leaves: arrays `(num_blocks, *block_shape)`.
        ids: int32 `(length,)`; the first `count` are in range.
        count: int32 scalar, at most `length`.
        interpret: `None`, or parameters of an interpreter, which takes every leaf by DMA.

    Returns:
        New arrays `(length, *block_shape)`, in the leaves' order; blocks from `count` on are unspecified.
    """
    places = jnp.arange(ids.shape[0], dtype=jnp.int32)

    def by_dma(leaves: list[Array], _: list[Array]) -> list[Array]:
        made = [shape_like(leaf, (ids.shape[0], *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        return _start_all_wait_all(leaves, ids, made, places, count, interpret)

    return _divide(by_dma, lambda leaf, _: leaf.at[ids].get(mode="clip"), leaves, leaves, interpret)


def copy_blocks(
    src: Sequence[Array],
    src_ids: Array,
    dst: Sequence[Array],
    dst_ids: Array,
    count: Array,
    *,
    interpret: Any = None,
) -> list[Array]:
    """Copies block `src_ids[i]` of `src[k]` to block `dst_ids[i]` of `dst[k]` for `i < count`, unless that is negative.

    Args:
        src: arrays `(num_blocks, *block_shape)`, none of which is in `dst`.
        src_ids: int32 `(length,)`; the first `count` are in range.
        dst: as many arrays, with the block shapes and dtypes of their partners.
        dst_ids: int32 `(length,)`; the first `count` are in range or negative.
        count: int32 scalar, at most `length`.
        interpret: see `gather_blocks`.

    Returns:
        The arrays of `dst`, updated in place where they are donated.
    """
    counted = jnp.arange(dst_ids.shape[0]) < count

    def by_dma(src: list[Array], dst: list[Array]) -> list[Array]:
        return _start_all_wait_all(src, src_ids, dst, dst_ids, count, interpret)

    def by_xla(src: Array, dst: Array) -> Array:
        ids = jnp.where(counted & (dst_ids >= 0), dst_ids, dst.shape[0])
        return dst.at[ids].set(src.at[src_ids].get(mode="clip"), mode="drop")

    return _divide(by_dma, by_xla, src, dst, interpret)


def _divide(
    by_dma: Callable[[list[Array], list[Array]], list[Array]],
    by_xla: Callable[[Array, Array], Array],
    src: Sequence[Array],
    dst: Sequence[Array],
    interpret: Any,
) -> list[Array]:
    """Copies pairs of leaves: in device memory all that a kernel reaches by one kernel, the others one by one by XLA.

    A pair with a leaf in host memory has a kernel of its own: the compiler dies of a kernel with several results if
    an operand lies in host memory.
    """
    copied: dict[int, Array] = {}
    together = []
    for place, pair in enumerate(zip(src, dst, strict=True)):
        if any(map(in_host_memory, pair)):
            (copied[place],) = by_dma([pair[0]], [pair[1]])
        elif interpret is not None or fills_tiles(pair[0]):
            together.append(place)
        else:
            copied[place] = by_xla(*pair)
    if together:
        arrays = by_dma([src[place] for place in together], [dst[place] for place in together])
        copied.update(zip(together, arrays, strict=True))
    return [copied[place] for place in range(len(src))]


def _start_all_wait_all(
    src: list[Array], src_ids: Array, dst: list[Any], dst_ids: Array, count: Array, interpret: Any
) -> list[Array]:
    """Calls the kernel. Where `dst` are arrays they are updated in place, where they are shapes they are made."""
    segments = -(-src_ids.shape[0] // _SEGMENT)
    segment = src_ids.shape[0] if segments == 1 else _SEGMENT
    padding = (0, segments * segment - src_ids.shape[0])
    ids = jnp.stack([jnp.pad(ids, padding).reshape(segments, segment) for ids in (src_ids, dst_ids)], axis=1)
    given = [leaf for leaf in dst if not isinstance(leaf, jax.ShapeDtypeStruct)]
    spaces = [_space(leaf, interpret) for leaf in dst]
    operands = [ids, *src, *given]
    return pl.pallas_call(
        partial(_kernel, len(src), segment),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(segments,),
            in_specs=[
                pl.BlockSpec((None, 2, segment), lambda i, _: (i, 0, 0), memory_space=pltpu.MemorySpace.SMEM),
                *(pl.BlockSpec(memory_space=_space(leaf, interpret)) for leaf in (*src, *given)),
            ],
            out_specs=[pl.BlockSpec(memory_space=space) for space in spaces],
            scratch_shapes=[pltpu.SemaphoreType.DMA((len(src),))],
        ),
        out_shape=[_result(leaf) for leaf in dst],
        input_output_aliases={1 + len(operands) - len(given) + k: k for k in range(len(given))},
        interpret=False if interpret is None else interpret,
    )(count.reshape(1), *operands)


def _kernel(num_leaves: int, segment: int, count: Any, ids: Any, *refs: Any) -> None:
    """Copies the blocks of one segment of ids.

    Args:
        num_leaves: number of leaves.
        segment: ids of a segment.
        count: `(1,)` in SMEM, how many ids of all segments count.
        ids: `(2, segment)` in SMEM, blocks to read and blocks to write; those to write may be negative.
        *refs: `src` leaves, any operands that are aliased by results, `dst` leaves, a DMA semaphore for each leaf.
    """
    src, dst, semaphores = refs[:num_leaves], refs[-1 - num_leaves : -1], refs[-1]
    here = jnp.clip(count[0] - pl.program_id(0) * segment, 0, segment)

    def for_each_copy(act: Callable[[Any], None]) -> None:
        @pl.loop(0, here)
        def _(i: Array) -> None:
            src_id, dst_id = ids[0, i], ids[1, i]

            @pl.when(dst_id >= 0)
            def _() -> None:
                for k in range(num_leaves):
                    act(pltpu.make_async_copy(src[k].at[src_id], dst[k].at[dst_id], semaphores.at[k]))

    for_each_copy(lambda copy: copy.start())
    for_each_copy(lambda copy: copy.wait())


def _space(leaf: Any, interpret: Any) -> Any:
    """Where a leaf lies, for the kernel; interpreters know one memory only."""
    if interpret is not None:
        return pl.ANY
    return pl.HOST if _is_array_on_host(leaf) else pltpu.MemorySpace.HBM


def _result(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if _is_array_on_host(leaf):
        return pl.MemoryRef(ShapedArray(leaf.shape, leaf.dtype), pl.HOST)
    return shape_like(leaf, leaf.shape, leaf.dtype)


def _is_array_on_host(leaf: Any) -> bool:
    return not isinstance(leaf, jax.ShapeDtypeStruct) and in_host_memory(leaf)
