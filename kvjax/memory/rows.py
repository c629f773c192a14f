"""Copies rows between host memory that holds blocks and the units of the host pool.

A *row* is one block of one layer of one leaf; a device may hold a part of it. The pool holds whole rows, as
`kvjax.packing` lays them out, so that its bytes do not depend on how the caches are split over devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvjax.groups import LeafSpec
from kvjax.memory.shards import Shard
from kvjax.memory.spans import address_of, bytes_at, copy_spans


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """A leaf's rows in a chunk, cut wherever a unit ends. All arrays have one entry per cut, in order of bytes.

    Args:
        row_idx: the row it is of.
        in_row: where it starts in the row.
        unit_idx: the chunk's unit that holds it.
        in_unit: where it starts in the unit.
        num_bytes: its length.
    """

    row_idx: np.ndarray
    in_row: np.ndarray
    unit_idx: np.ndarray
    in_unit: np.ndarray
    num_bytes: np.ndarray


class ShardRows:
    """Where the rows of one piece of one leaf lie in a chunk's units.

    Args:
        spec: the leaf.
        shard: the piece.
        offset_bytes: where the leaf's first row starts in a chunk.
        blocks: blocks of each layer in a chunk.
        unit_bytes: bytes of a unit of the pool.
    """

    def __init__(self, spec: LeafSpec, shard: Shard, offset_bytes: int, blocks: int, unit_bytes: int):
        self.shard = shard
        self.row_bytes = shard.row_bytes(spec)
        self._unit_bytes = unit_bytes
        first = offset_bytes + shard.layers[0] * blocks * spec.row_bytes
        self._cuts = _cut(first, shard.num_layers * blocks, spec.row_bytes, unit_bytes)
        self._box = None
        if not shard.has_whole_blocks(spec):
            *outer, (low, high) = shard.box
            size = spec.dtype.itemsize
            self._whole_shape = (*spec.block_shape[:-1], spec.block_shape[-1] * size)
            self._box = (*(slice(*span) for span in outer), slice(low * size, high * size))

    @property
    def holds_parts(self) -> bool:
        """Whether the piece holds parts of rows only."""
        return self._box is not None

    def spans(
        self, pool_address: int, unit_ids: np.ndarray, row_addresses: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the spans that whole rows take in the pool and in memory.

        Args:
            pool_address: where the pool starts.
            unit_ids: `(num_chunks, units_per_chunk)`.
            row_addresses: `(num_chunks, rows)`; -1 is nowhere.

        Returns:
            Addresses in the pool, addresses in memory (-1: nowhere) and lengths, each `(num_chunks, cuts)`.
        """
        cuts = self._cuts
        in_pool = unit_ids[:, cuts.unit_idx].astype(np.int64) * self._unit_bytes + (cuts.in_unit + pool_address)
        rows = row_addresses[:, cuts.row_idx]
        return in_pool, np.where(rows >= 0, rows + cuts.in_row, -1), np.broadcast_to(cuts.num_bytes, in_pool.shape)

    def copy_parts(self, pool_address: int, unit_ids: np.ndarray, row_addresses: np.ndarray, *, to_pool: bool) -> None:
        """Copies parts of rows to or from the pool; for the arguments see `spans`."""
        for in_pool, lengths, address in self._rows(pool_address, unit_ids, row_addresses):
            row, is_copy = _row_image(in_pool, lengths)
            of_pool = row.reshape(self._whole_shape)[self._box]
            of_memory = bytes_at(address, self.row_bytes).reshape(of_pool.shape)
            if not to_pool:
                np.copyto(of_memory, of_pool)
                continue
            np.copyto(of_pool, of_memory)
            if is_copy:
                copy_spans(in_pool, _places_in(row, lengths), lengths)

    def _rows(
        self, pool_address: int, unit_ids: np.ndarray, row_addresses: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """For each row that moves: where its cuts lie in the pool, their lengths, and its address in memory."""
        in_pool, _, _ = self.spans(pool_address, unit_ids, row_addresses)
        cuts = self._cuts
        edges = np.append(np.searchsorted(cuts.row_idx, np.arange(row_addresses.shape[1])), len(cuts.row_idx)).tolist()
        for chunk, row in np.argwhere(row_addresses >= 0).tolist():
            of_row = slice(edges[row], edges[row + 1])
            yield in_pool[chunk, of_row], cuts.num_bytes[of_row], int(row_addresses[chunk, row])


def copy_rows(
    pool: np.ndarray,
    unit_ids: np.ndarray,
    pieces: Sequence[tuple[ShardRows, np.ndarray]],
    *,
    to_pool: bool,
) -> None:
    """Copies the rows of chunks of one group between memory and the pool.

    Args:
        pool: `uint8`, the whole pool.
        unit_ids: `(num_chunks, units_per_chunk)`.
        pieces: for each piece of each leaf, its rows and their addresses, `int64` `(num_chunks, rows)`, layers
            before blocks; -1 is left alone. The memory there must stay alive.
        to_pool: the direction.
    """
    address = address_of(pool)
    spans = [rows.spans(address, unit_ids, starts) for rows, starts in pieces if not rows.holds_parts]
    if spans:
        in_pool, in_memory, lengths = (np.concatenate(columns, axis=1) for columns in zip(*spans, strict=True))
        moved = in_memory >= 0
        dst, src = (in_pool, in_memory) if to_pool else (in_memory, in_pool)
        copy_spans(dst[moved], src[moved], lengths[moved])
    for rows, starts in pieces:
        if rows.holds_parts:
            rows.copy_parts(address, unit_ids, starts, to_pool=to_pool)


def row_addresses(start: int, block_rows: np.ndarray, num_layers: int, layer_rows: int, row_bytes: int) -> np.ndarray:
    """Returns where rows lie in memory that holds `layer_rows` rows of each layer, layer after layer.

    Args:
        start: address of the memory.
        block_rows: `(num_chunks, blocks)`, row of each block in its layer; -1 is nowhere.
        num_layers: layers.
        layer_rows: rows of each layer.
        row_bytes: bytes of a row.

    Returns:
        `int64` `(num_chunks, layers * blocks)`; -1 is nowhere.

    >>> row_addresses(1000, np.array([[2, -1]]), 2, 10, 4)
    array([[1008,   -1, 1048,   -1]])
    """
    rows = block_rows.astype(np.int64)[:, None, :] + np.arange(num_layers, dtype=np.int64)[:, None] * layer_rows
    addresses = np.where(block_rows[:, None, :] >= 0, rows * row_bytes + start, -1)
    return addresses.reshape(len(block_rows), num_layers * block_rows.shape[1])


def _cut(first: int, num_rows: int, row_bytes: int, unit_bytes: int) -> _Cuts:
    past = first + num_rows * row_bytes
    rows = np.arange(first, past, row_bytes, dtype=np.int64)
    units = np.arange(-(-first // unit_bytes) * unit_bytes, past, unit_bytes, dtype=np.int64)
    starts = np.union1d(rows, units)
    return _Cuts(
        row_idx=(starts - first) // row_bytes,
        in_row=(starts - first) % row_bytes,
        unit_idx=starts // unit_bytes,
        in_unit=starts % unit_bytes,
        num_bytes=np.diff(starts, append=past),
    )


def _row_image(in_pool: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, bool]:
    """The bytes of one whole row: a view of the pool if it lies there in one piece, else a copy."""
    if (np.diff(in_pool) == lengths[:-1]).all():
        return bytes_at(int(in_pool[0]), int(lengths.sum())), False
    row = np.empty(int(lengths.sum()), np.uint8)
    copy_spans(_places_in(row, lengths), in_pool, lengths)
    return row, True


def _places_in(row: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return address_of(row) + np.cumsum(lengths) - lengths
