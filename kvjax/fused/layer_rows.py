"""Rows of fused steps between host memory and the pool.

A fused step takes and gives, for each leaf, an array `(layers, bucket, *block_shape)` of whole blocks (layers = 1
unless the leaf is stacked); a row is a block of one layer.
"""

from typing import Any

import jax
import numpy as np

from kvjax.chunking import Chunking
from kvjax.memory.host import HostMemory
from kvjax.memory.registration import RegisteredCaches
from kvjax.memory.rows import ShardRows, copy_rows, row_addresses
from kvjax.memory.shards import Shard
from kvjax.memory.spans import address_of
from kvjax.packing import Units, blocks_in_chunk, leaf_offsets
from kvjax.plan import GroupMoves


class LayerRows:
    """Copies the blocks of a group's chunks between the pool and one array of rows for each leaf.

    Args:
        caches: the registered arrays.
        chunking: the layout and its chunks.
        units: how chunks are cut into units.
        group_idx: the group.
    """

    def __init__(self, caches: RegisteredCaches, chunking: Chunking, units: Units, group_idx: int):
        self.leaves = dict(zip(caches.group_leaves[group_idx], caches.leaves_of(group_idx), strict=True))
        self._padding_bytes = units.padding_bytes[group_idx] or 0
        blocks, offsets = blocks_in_chunk(chunking, group_idx), leaf_offsets(chunking, group_idx)
        self._rows = {}
        for (name, leaf), offset in zip(self.leaves.items(), offsets, strict=True):
            whole = Shard(
                (0,), (0, leaf.spec.layers or 1), (0, leaf.num_blocks), tuple((0, n) for n in leaf.spec.block_shape)
            )
            self._rows[name] = ShardRows(leaf.spec, whole, offset, blocks, units.unit_bytes)

    def from_pool(self, memory: HostMemory, moves: GroupMoves, bucket: int) -> dict[str, np.ndarray]:
        """Returns new arrays `(layers, bucket, *block_shape)` by leaf, with the blocks of `rows_of` in order."""
        arrays = {
            name: np.zeros((leaf.spec.layers or 1, bucket, *leaf.spec.block_shape), leaf.spec.dtype)
            for name, leaf in self.leaves.items()
        }
        if moves.num_chunks:
            self._copy(memory, moves, bucket, arrays, to_pool=False)
        return arrays

    def to_pool(self, memory: HostMemory, moves: GroupMoves, bucket: int, rows: dict[str, np.ndarray]) -> None:
        """Copies the blocks of `rows_of`, which lie in C order in arrays as `from_pool` returns them, into the pool."""
        memory.clear_tails(moves.unit_ids[: moves.num_chunks, -1], self._padding_bytes)
        self._copy(memory, moves, bucket, rows, to_pool=True)

    def checked(self, rows: Any, bucket: int, group_name: str) -> dict[str, list[jax.Array]]:
        """Returns what a step collected, by leaf, as the arrays of its layers or one array of them all.

        Raises:
            ValueError: a leaf is missing, or has another shape or another width of elements.
        """
        found = {}
        for name, leaf in self.leaves.items():
            if not isinstance(rows, dict) or name not in rows:
                raise ValueError(f"`rows` of group {group_name!r} must hold leaf {name!r}, got {_names(rows)}")
            arrays = list(rows[name]) if isinstance(rows[name], (list, tuple)) else [rows[name]]
            layers, shape = leaf.spec.layers or 1, (bucket, *leaf.spec.block_shape)
            fits = [getattr(array, "shape", None) for array in arrays] in ([shape] * layers, [(layers, *shape)])
            if not fits or any(array.dtype.itemsize != leaf.spec.dtype.itemsize for array in arrays):
                raise ValueError(
                    f"`rows` of leaf {name!r} must be {layers} layers of {leaf.spec.dtype.name}{list(shape)}, as "
                    f"`collect` returns them, got {', '.join(map(_described, arrays)) or 'none'}"
                )
            found[name] = arrays
        return found

    def _copy(
        self, memory: HostMemory, moves: GroupMoves, bucket: int, arrays: dict[str, np.ndarray], *, to_pool: bool
    ) -> None:
        slots = slots_of(moves)
        pieces = []
        for name, array in arrays.items():
            rows, leaf = self._rows[name], self.leaves[name]
            addresses = row_addresses(address_of(array), slots, leaf.spec.layers or 1, bucket, leaf.spec.row_bytes)
            pieces.append((rows, addresses))
        copy_rows(memory.bytes, moves.unit_ids[: moves.num_chunks], pieces, to_pool=to_pool)


def slots_of(moves: GroupMoves) -> np.ndarray:
    """Returns the row of each block that moves, `(num_chunks, blocks)`, counted in order; -1 where none moves."""
    moved = moves.block_ids[: moves.num_chunks] >= 0
    return np.where(moved, np.cumsum(moved).reshape(moved.shape) - 1, -1)


def rows_of(moves: GroupMoves) -> np.ndarray:
    """Returns the blocks that move, in the order of their rows."""
    ids = moves.block_ids[: moves.num_chunks]
    return ids[ids >= 0]


def _names(rows: Any) -> str:
    return (", ".join(map(repr, rows)) or "none") if isinstance(rows, dict) else type(rows).__name__


def _described(array: Any) -> str:
    return f"{array.dtype.name}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
