"""`pack` and `unpack` as Mosaic GPU kernels, which read and write host memory as well as device memory.

Where a row of some leaf is no whole number of words, all are moved in lanes of 16 or 8 bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._gpu_cut import Cut, check_index, cut_row, lane_dtype
from pallas_kernels._gpu_rows import (
    as_rows,
    check_platform,
    copy_piece,
    from_rows,
    kernels,
    launch,
    run_part,
    zero_piece,
)
from pallas_kernels._rows import check_dtype
from pallas_kernels.packing.chunk_shape import WORD_BYTES, ChunkShape


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
    """See `pallas_kernels.pack`; thread blocks copy pieces of rows side by side.

    Args:
        leaves: see `pallas_kernels.pack`.
        block_ids: see there.
        count: see there.
        staging: see there.
        shape: where rows lie in a chunk.
        platform: see `pallas_kernels.pack`.
        interpret: parameters of the interpreter that is to run the kernel, on any platform and with all arrays in
            device memory; `None` compiles it for a GPU.

    Raises:
        NotImplementedError: the platform is no GPU; elements are not 1, 2 or 4 whole bytes; or an int32 cannot
            count the rows of a leaf, the lanes of the staging or the pieces to copy.
    """
    check_platform(platform, interpret)
    chunk = _Chunk.of(leaves, staging, shape)

    def move(item: Array, piece: Array, read: Sequence[Any], written: Sequence[Any]) -> None:
        ids, *rows = read
        (units,) = written

        def copy(place: int, index: Array) -> None:
            at = chunk.find(place, ids, item, index)
            copy_piece(rows[place], (at.row_id, 0), units, (0, at.lane), chunk.leaves[place].cut, at.piece)

        def fill(cut: Cut, piece: Array) -> None:
            zero_piece(units, (0, (item + 1) * chunk.lanes - cut.row_lanes), cut, piece)

        copies = [(leaf.num_pieces, partial(copy, place)) for place, leaf in enumerate(chunk.leaves)]
        run_part(piece, copies + [(cut.num_pieces, partial(fill, cut)) for cut in chunk.padding])

    num_pieces = sum(leaf.num_pieces for leaf in chunk.leaves) + sum(cut.num_pieces for cut in chunk.padding)
    read, written = [block_ids, *(leaf.rows for leaf in chunk.leaves)], [chunk.units]
    (packed,) = launch(move, num_pieces, len(block_ids), count, read, written, name="pack", interpret=interpret)
    return from_rows(packed, staging)


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
    """See `pallas_kernels.unpack`; thread blocks copy pieces of rows side by side.

    Args:
        staging: see `pallas_kernels.unpack`.
        leaves: see there.
        block_ids: see there.
        count: see there.
        shape: see `pack`.
        platform: see `pallas_kernels.unpack`.
        interpret: see `pack`.

    Raises:
        NotImplementedError: see `pack`.
    """
    check_platform(platform, interpret)
    chunk = _Chunk.of(leaves, staging, shape)
    updated = list(leaves)
    for places in kernels(leaves):
        rows = _unpack_leaves(places, chunk, block_ids, count, interpret)
        for place, leaf_rows in zip(places, rows, strict=True):
            updated[place] = from_rows(leaf_rows, leaves[place])
    return tuple(updated)


def _unpack_leaves(places: list[int], chunk: "_Chunk", block_ids: Array, count: Array, interpret: Any) -> list[Array]:
    """Unpacks the leaves at `places` in one kernel, and returns their rows."""

    def move(item: Array, piece: Array, read: Sequence[Any], written: Sequence[Any]) -> None:
        ids, units = read

        def copy(place: int, rows: Any, index: Array) -> None:
            at = chunk.find(place, ids, item, index)

            @pl.when(at.block_id >= 0)
            def _() -> None:
                copy_piece(units, (0, at.lane), rows, (at.row_id, 0), chunk.leaves[place].cut, at.piece)

        mine = zip(places, written, strict=True)
        run_part(piece, [(chunk.leaves[place].num_pieces, partial(copy, place, rows)) for place, rows in mine])

    num_pieces = sum(chunk.leaves[place].num_pieces for place in places)
    read, written = [block_ids, chunk.units], [chunk.leaves[place].rows for place in places]
    return launch(move, num_pieces, len(block_ids), count, read, written, name="unpack", interpret=interpret)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf as lanes: its rows `(rows, lanes)`, and where they lie in a chunk."""

    rows: Array
    num_blocks: int
    rows_per_chunk: int
    first_lane: int
    cut: Cut

    @property
    def num_pieces(self) -> int:
        """Pieces that the leaf has in a chunk."""
        return self.rows_per_chunk * self.cut.num_pieces


class _Place(NamedTuple):
    """A piece: its block and row in the leaf, the lane of the staging where the row starts, its place in the row."""

    block_id: Array
    row_id: Array
    lane: Array
    piece: Array


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk as lanes: its leaves, the staging `(1, lanes)`, the lanes between two chunks there, and its padding.

    `padding` has one entry, how what no leaf fills is cut, or none.
    """

    leaves: tuple[_Leaf, ...]
    units: Array
    blocks_per_chunk: int
    lanes: int
    padding: tuple[Cut, ...]

    @classmethod
    def of(cls, leaves: tuple[Array, ...], staging: Array, shape: ChunkShape) -> "_Chunk":
        """Cuts the chunks of a shape.

        Raises:
            NotImplementedError: elements are not 1, 2 or 4 whole bytes, or an int32 cannot count rows or lanes.
        """
        lane = lane_dtype(shape.row_bytes)
        check_index(f"lanes of {lane.name} in `staging`", staging.size * WORD_BYTES // lane.itemsize)
        chunk_lanes, used = (size // lane.itemsize for size in (shape.chunk_words * WORD_BYTES, shape.chunk_bytes))
        parts = []
        for place, leaf in enumerate(leaves):
            check_dtype(leaf.dtype)
            row_bytes, first = shape.row_bytes[place], shape.offset_bytes[place] // lane.itemsize
            num_rows = leaf.size * leaf.dtype.itemsize // row_bytes
            check_index(f"rows of `leaves[{place}]`", num_rows)
            rows = as_rows(leaf, num_rows, lane)
            cut = cut_row(rows.shape[1], lane, math.gcd(chunk_lanes, first))
            parts.append(_Leaf(rows, shape.num_blocks[place], shape.rows_per_chunk[place], first, cut))
        padding = (cut_row(chunk_lanes - used, lane, chunk_lanes),) if chunk_lanes > used else ()
        return cls(tuple(parts), as_rows(staging, 1, lane), shape.blocks_per_chunk, chunk_lanes, padding)

    def find(self, place: int, ids: Any, item: Array, index: Array) -> _Place:
        """Finds, in a kernel, a piece of the leaf at `place` in chunk `item`, counted over all its rows there."""
        leaf = self.leaves[place]
        row_idx, piece = lax.div(index, leaf.cut.num_pieces), lax.rem(index, leaf.cut.num_pieces)
        layer = lax.div(row_idx, self.blocks_per_chunk)
        block_id = ids[item, lax.rem(row_idx, self.blocks_per_chunk)]
        lane = item * self.lanes + leaf.first_lane + row_idx * leaf.cut.row_lanes
        return _Place(block_id, layer * leaf.num_blocks + block_id, lane, piece)
