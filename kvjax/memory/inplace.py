"""The direct transport of the CPU backend: blocks are copied straight to their units and back.

There, device memory is host memory. A store reads the caches where they lie. A load donates them to a program
that returns them unchanged: then the arrays it returned are the only ones over their memory (where NumPy has a view
of an array, or the array is one of NumPy's, XLA copies it), nothing that was issued before still reads it, and
nobody else has seen them yet; so their blocks are written in place before they are handed out. Both happen on the
caller's thread, and are over when the call returns. No element is ever computed with, so every bit pattern of every
dtype is kept.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.chunking import Chunking
from kvjax.memory.host import HostMemory
from kvjax.memory.programs import Program, compile_all
from kvjax.memory.registration import RegisteredCaches
from kvjax.memory.rows import ShardRows, copy_rows, row_addresses
from kvjax.packing import Units, blocks_in_chunk, leaf_offsets
from kvjax.plan import GroupMoves


class InPlaceTransport:
    """Copies chunks between caches of the CPU backend and the host pool.

    Args:
        caches: the registered arrays.
        chunking: the layout and its chunks.
        units: how chunks are cut into units.
        memory: the host pool.
        show_progress: see `progress_bar`.
    """

    name = "direct"
    most_staged_units = 0

    def __init__(
        self,
        caches: RegisteredCaches,
        chunking: Chunking,
        units: Units,
        memory: HostMemory,
        *,
        show_progress: bool | None = None,
    ):
        self._caches = caches
        self.memory = memory
        self._padding_bytes = units.padding_bytes
        cached = chunking.layout.cached
        self._rows = {g: _rows_of(caches, chunking, units, g) for g in cached}
        programs = {g: _renewing(caches, g) for g in cached}
        made = compile_all(list(programs.values()), show_progress=show_progress)
        self._renew = {g: made[program.name] for g, program in programs.items()}

    def store(self, caches: Mapping[str, jax.Array], moves: GroupMoves) -> list[tuple[int, None]]:
        """Copies chunks of one group into the pool, once the caches are written.

        Args:
            caches: the arrays; they are only read.
            moves: the chunks; all ids are in range.

        Returns:
            The number of chunks, and nothing to wait for.
        """
        blocks, unit_ids = moves.block_ids[: moves.num_chunks], moves.unit_ids[: moves.num_chunks]
        names = self._caches.group_leaves[moves.group_idx]
        jax.block_until_ready([caches[name] for name in names])
        self.memory.clear_tails(unit_ids[:, -1], self._padding_bytes[moves.group_idx] or 0)
        pieces = [
            (rows, _addresses(rows, blocks, held[rows.shard.holders[0]]))
            for rows, held in self._pieces(caches, moves.group_idx)
        ]
        copy_rows(self.memory.bytes, unit_ids, pieces, to_pool=True)
        return [(moves.num_chunks, None)]

    def load(self, caches: dict[str, jax.Array], moves: GroupMoves) -> list[tuple[int, None]]:
        """Copies chunks of one group out of the pool, once everything that reads the caches is done.

        Args:
            caches: the arrays; those of the group are donated and replaced here by new ones.
            moves: the chunks; all ids are in range, -1 is not written.

        Returns:
            The number of chunks, and nothing to wait for.

        Raises:
            RuntimeError: the backend returned an array over memory that a donated one still has.
        """
        blocks, unit_ids = moves.block_ids[: moves.num_chunks], moves.unit_ids[: moves.num_chunks]
        names = self._caches.group_leaves[moves.group_idx]
        given = tuple(caches[name] for name in names)
        pieces_given = [_pieces_of(array) for array in given]
        renewed = self._renew[moves.group_idx](given)
        caches.update(zip(names, renewed, strict=True))
        jax.block_until_ready(renewed)
        if any(_share_memory(old, new) for old, new in zip(pieces_given, renewed, strict=True)):
            raise RuntimeError("the CPU backend left a donated cache as it was, so it cannot be written in place")
        pieces = [
            (rows, _addresses(rows, blocks, held[holder]))
            for rows, held in self._pieces(caches, moves.group_idx)
            for holder in rows.shard.holders
        ]
        copy_rows(self.memory.bytes, unit_ids, pieces, to_pool=False)
        return [(moves.num_chunks, None)]

    def read(self, group_idx: int, unit_ids: np.ndarray) -> np.ndarray:  # noqa: ARG002  # units say it all
        """Returns a copy of chunks, `uint8` `(num_chunks, units_per_chunk * unit_bytes)`."""
        return self.memory.read_chunks(unit_ids)

    def write(self, group_idx: int, unit_ids: np.ndarray, chunks: np.ndarray) -> None:  # noqa: ARG002  # units say it all
        """Puts chunks, as `read` returns them, into units that nothing reads or writes."""
        for ids, data in zip(unit_ids, chunks, strict=True):
            self.memory.copy_in(ids, data)

    def revive(self) -> bool:
        """Returns false: no program takes the pool along."""
        return False

    def close(self) -> None:
        """Does nothing: no move outlives its call."""

    def _pieces(
        self, caches: Mapping[str, jax.Array], group_idx: int
    ) -> Iterator[tuple[ShardRows, tuple[jax.Array, ...]]]:
        """Each piece of each leaf, and what each device holds of the leaf."""
        for name, shards in zip(self._caches.group_leaves[group_idx], self._rows[group_idx], strict=True):
            held = self._held(name, caches[name])
            for rows in shards:
                yield rows, held

    def _held(self, name: str, array: jax.Array) -> tuple[jax.Array, ...]:
        layout = array.format.layout  # pyright: ignore[reportAttributeAccessIssue]
        if layout is not None and tuple(layout.major_to_minor) != tuple(range(array.ndim)):
            raise ValueError(f"`caches` leaf {name!r} must lie in memory in C order, got layout {layout}")
        if self._caches.mesh is None:
            return (array,)
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        return tuple(by_device[device] for device in self._caches.devices)


def donation_refusal(device: Any) -> str | None:
    """Returns why arrays on a device cannot be written in place, or `None`."""
    if _renews_in_place(device):
        return None
    return "this backend, with JAX's options as they are, does not use the memory of donated arrays again"


def _renews_in_place(device: Any) -> bool:
    with jax.set_mesh(Mesh(np.array([device]), ("device",))):  # the caller's may be of several devices
        array = jax.jit(lambda: jnp.ones(1024, jnp.uint32))()
        address = array.unsafe_buffer_pointer()
        renewed = jax.jit(lambda x: x, donate_argnums=0)(array)
    return renewed.unsafe_buffer_pointer() == address and array.is_deleted()


def _rows_of(
    caches: RegisteredCaches, chunking: Chunking, units: Units, group_idx: int
) -> tuple[tuple[ShardRows, ...], ...]:
    blocks = blocks_in_chunk(chunking, group_idx)
    leaves, offsets = caches.leaves_of(group_idx), leaf_offsets(chunking, group_idx)
    return tuple(
        tuple(ShardRows(leaf.spec, shard, offset, blocks, units.unit_bytes) for shard in leaf.shards)
        for leaf, offset in zip(leaves, offsets, strict=True)
    )


def _renewing(caches: RegisteredCaches, group_idx: int) -> Program:
    """Takes a group's arrays over and returns them unchanged."""
    structs = tuple(leaf.struct() for leaf in caches.leaves_of(group_idx))
    shardings = tuple(struct.sharding for struct in structs)
    return Program(f"renewal of group {group_idx}", lambda given: given, (structs,), (0,), shardings)


def _pieces_of(array: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in array.addressable_shards]


def _share_memory(old: list[jax.Array], new: jax.Array) -> bool:
    """Whether a piece of a donated array still lives over the memory of the new one.

    Where NumPy has a view of a piece, the piece lives on, and the new array has another one.
    """
    kept = {piece.unsafe_buffer_pointer() for piece in old if not piece.is_deleted()}
    return any(piece.unsafe_buffer_pointer() in kept for piece in _pieces_of(new))


def _addresses(rows: ShardRows, block_ids: np.ndarray, held: jax.Array) -> np.ndarray:
    """Where the rows of blocks lie in what a device holds of a leaf; -1 for blocks that are not there."""
    first, past = rows.shard.blocks
    local = np.where((block_ids >= first) & (block_ids < past), block_ids - first, -1)
    start = held.unsafe_buffer_pointer()
    return row_addresses(start, local, rows.shard.num_layers, rows.shard.num_blocks, rows.row_bytes)
