"""`pack` and `unpack`: their contract and their implementations."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax import Array
from jax.typing import ArrayLike

from pallas_kernels import _checks
from pallas_kernels.dispatch import dispatch
from pallas_kernels.packing import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.packing.chunk_shape import chunk_shape

PACK: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"mosaic_tpu": mosaic_tpu.pack, "mosaic_gpu": mosaic_gpu.pack, "reference": reference.pack}
)
UNPACK: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"mosaic_tpu": mosaic_tpu.unpack, "mosaic_gpu": mosaic_gpu.unpack, "reference": reference.unpack}
)

_IDS = ("max_chunks", "blocks_per_chunk")


def pack(
    leaves: Sequence[Array],
    block_ids: Array,
    count: ArrayLike,
    staging: Array,
    *,
    units_per_chunk: int | None = None,
    stacked: Sequence[bool] | None = None,
    platform: str | None = None,
    implementation: str | None = None,
) -> Array:
    """Writes the bytes of chunk i, for `i < count`, to the units of the staging from `i * units_per_chunk` on.

    A chunk's bytes are the leaves in order, in each leaf its layers in order, in each layer the chunk's
    blocks in order, each block in C order, little-endian, without gaps; zeros fill up its last unit, and any
    further units of the chunk. All other units keep their contents.

    It is made to be called inside a jitted function. There it works in place on a donated staging, and
    neither other ids nor another count compile anything again. Every bit pattern of every dtype is kept.

    The ids are not checked: an id out of range in the first `count` rows gives unspecified bytes or worse.
    Check ids on the host before the launch. Rows of ids from `count` on may hold anything.

    Args:
        leaves: arrays `(num_blocks, *block_shape)`, or `(layers, num_blocks, *block_shape)` if stacked; block
            shapes, dtypes and numbers of blocks may differ.
        block_ids: int32 `(max_chunks, blocks_per_chunk)`, the blocks of each chunk.
        count: number of chunks, an integer scalar; it is usually traced.
        staging: uint32 `(units, *unit_shape)`; a unit's words are in C order.
        units_per_chunk: units of one chunk; `None` divides the staging evenly among `max_chunks` chunks.
        stacked: for each leaf, whether its first dimension counts layers; `None` is no leaf.
        platform: platform the program is made for; `None` is the default backend.
        implementation: name of the implementation to use; `None` is the first that can.

    Returns:
        The staging.

    Raises:
        ValueError: leaves, ids and staging do not fit together, `count` is no integer scalar, or
            `implementation` is unknown.
        NotImplementedError: the named implementation cannot take the arguments.
        ExceptionGroup: no implementation can; it holds each one's reason.
    """
    leaves, block_ids = _checks.arrays("leaves", leaves), _checks.ids("block_ids", block_ids, _IDS)
    shape = chunk_shape(leaves, block_ids, staging, stacked, units_per_chunk)
    args = (leaves, block_ids, _checks.count(count, block_ids.shape[0]), staging, shape)
    return dispatch("pack", PACK, *args, platform=platform, implementation=implementation)


def unpack(
    staging: Array,
    leaves: Sequence[Array],
    block_ids: Array,
    count: ArrayLike,
    *,
    units_per_chunk: int | None = None,
    stacked: Sequence[bool] | None = None,
    platform: str | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Writes the blocks of chunk i, for `i < count`, from the units where `pack` puts them into the leaves.

    A block whose id is -1 is not written anywhere. All other blocks of the leaves keep every bit. Donated
    leaves are updated in place. If an id comes twice, which of its blocks arrives is unspecified. For ids
    out of range and for ids from row `count` on see `pack`.

    Args:
        staging: uint32 `(units, *unit_shape)`, as `pack` fills it; it is only read.
        leaves: see `pack`.
        block_ids: see `pack`; -1 is nowhere.
        count: see `pack`.
        units_per_chunk: see `pack`.
        stacked: see `pack`.
        platform: see `pack`.
        implementation: see `pack`.

    Returns:
        The leaves, in order.

    Raises:
        ValueError: see `pack`.
        NotImplementedError: see `pack`.
        ExceptionGroup: see `pack`.
    """
    leaves, block_ids = _checks.arrays("leaves", leaves), _checks.ids("block_ids", block_ids, _IDS)
    shape = chunk_shape(leaves, block_ids, staging, stacked, units_per_chunk)
    args = (staging, leaves, block_ids, _checks.count(count, block_ids.shape[0]), shape)
    return dispatch("unpack", UNPACK, *args, platform=platform, implementation=implementation)
