"""`block_copy` as a Mosaic GPU kernel, which reads and writes host memory as well as device memory."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels._gpu_cut import check_index, cut_row, lane_dtype
from pallas_kernels._gpu_rows import as_rows, check_platform, copy_piece, from_rows, kernels, launch, run_part
from pallas_kernels._rows import check_dtype


def block_copy(
    src: tuple[Array, ...],
    src_ids: Array,
    dst: tuple[Array, ...],
    dst_ids: Array,
    count: Array,
    *,
    platform: str,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """See `pallas_kernels.block_copy`; thread blocks copy pieces of the blocks of all leaves side by side.

    Args:
        src: see `pallas_kernels.block_copy`.
        src_ids: see there.
        dst: see there.
        dst_ids: see there.
        count: see there.
        platform: see there.
        interpret: parameters of the interpreter that is to run the kernel, on any platform and with all leaves in
            device memory; `None` compiles it for a GPU.

    Raises:
        NotImplementedError: the platform is no GPU; elements are not 1, 2 or 4 whole bytes; or an int32 cannot
            count the blocks of a leaf, the bytes of a block or the pieces to copy.
    """
    check_platform(platform, interpret)
    for i, (source, target) in enumerate(zip(src, dst, strict=True)):
        check_dtype(source.dtype)
        check_index(f"blocks of leaf {i}", max(source.shape[0], target.shape[0]))
        check_index(f"bytes of a block of leaf {i}", _row_bytes(source))
    if any(source is target for source in src for target in dst):
        # XLA would copy a whole array that a kernel both reads and writes, so the blocks are taken out of it first.
        order = jnp.arange(len(src_ids), dtype=jnp.int32)
        taken = [jnp.empty((len(order), *leaf.shape[1:]), leaf.dtype) for leaf in src]
        src, src_ids = tuple(_copy_leaves(src, src_ids, taken, order, count, interpret)), order
    copied = list(dst)
    for places in kernels(dst):
        mine = [src[place] for place in places], [dst[place] for place in places]
        updated = _copy_leaves(mine[0], src_ids, mine[1], dst_ids, count, interpret)
        for place, leaf in zip(places, updated, strict=True):
            copied[place] = leaf
    return tuple(copied)


def _copy_leaves(
    src: Sequence[Array], src_ids: Array, dst: Sequence[Array], dst_ids: Array, count: Array, interpret: Any
) -> list[Array]:
    """`block_copy` in one kernel, which copies a piece of a block of one leaf at a time."""
    lanes = [lane_dtype([_row_bytes(leaf)]) for leaf in src]
    rows_in = [as_rows(leaf, leaf.shape[0], lane) for leaf, lane in zip(src, lanes, strict=True)]
    rows_out = [as_rows(leaf, leaf.shape[0], lane) for leaf, lane in zip(dst, lanes, strict=True)]
    cuts = [cut_row(rows.shape[1], rows.dtype, 0) for rows in rows_in]

    def move(item: Array, piece: Array, read: Sequence[Any], written: Sequence[Any]) -> None:
        src_ids_ref, dst_ids_ref, *sources = read

        def copy(leaf: int, piece: Array) -> None:
            src_at, dst_at = (src_ids_ref[item], 0), (dst_ids_ref[item], 0)
            copy_piece(sources[leaf], src_at, written[leaf], dst_at, cuts[leaf], piece)

        run_part(piece, [(cut.num_pieces, partial(copy, leaf)) for leaf, cut in enumerate(cuts)])

    num_pieces, read = sum(cut.num_pieces for cut in cuts), [src_ids, dst_ids, *rows_in]
    copied = launch(move, num_pieces, len(src_ids), count, read, rows_out, name="block_copy", interpret=interpret)
    return [from_rows(rows, leaf) for rows, leaf in zip(copied, dst, strict=True)]


def _row_bytes(leaf: Array) -> int:
    return math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
