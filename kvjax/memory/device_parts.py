"""What each device has of a group's chunks, packed as if its part of each leaf were the whole leaf.

A *part* is the list of chunks that a device packs or unpacks, and the packed rows. If one device holds the caches,
its packed rows are the units of the pool.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvjax.chunking import Chunking
from kvjax.memory.host import HostMemory
from kvjax.memory.registration import RegisteredCaches, RegisteredLeaf
from kvjax.memory.rows import ShardRows, copy_rows
from kvjax.memory.shards import Shard
from kvjax.memory.spans import address_of
from kvjax.packing import Units, blocks_in_chunk, leaf_offsets


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Chunks that one device packs or unpacks, in the order in which they lie in its staging.

    Args:
        device_idx: place of the device.
        chunks: which of the chunks that move, ascending.
        block_ids: `(num_chunks, blocks)`, places in the device's own part of the leaves; -1 is not there.
    """

    device_idx: int
    chunks: np.ndarray
    block_ids: np.ndarray

    @property
    def num_chunks(self) -> int:
        """How many they are."""
        return len(self.chunks)


class DeviceParts:
    """Splits the chunks of one group over the devices, and puts what they packed into the pool or back.

    Args:
        caches: the registered arrays.
        chunking: the layout and its chunks.
        units: how chunks are cut into units.
        group_idx: the group.
        of_devices: devices that each keep an equal part of every unit; 1 where the pool holds whole units.

    Raises:
        ValueError: the leaves of the group are split over blocks in different ways.
    """

    def __init__(
        self, caches: RegisteredCaches, chunking: Chunking, units: Units, group_idx: int, *, of_devices: int = 1
    ):
        leaves = caches.leaves_of(group_idx)
        self.group_idx = group_idx
        self.blocks = blocks_in_chunk(chunking, group_idx)
        self.structs = tuple(leaf.struct() for leaf in leaves)
        self.stacked = tuple(leaf.spec.layers is not None for leaf in leaves)
        self._num_devices = len(caches.devices)
        self.unit_bytes = units.unit_bytes // of_devices
        self._padding_bytes = units.padding_bytes[group_idx] or 0
        self._blocks_of = _blocks_of(chunking.layout.groups[group_idx].name, leaves, self._num_devices)
        # Every device has as much of a leaf as any other: JAX splits evenly.
        self._row_bytes = tuple(leaf.shards[0].row_bytes(leaf.spec) for leaf in leaves)
        self._rows = tuple(leaf.shards[0].num_layers * self.blocks for leaf in leaves)
        sizes = [rows * size for rows, size in zip(self._rows, self._row_bytes, strict=True)]
        self._offsets = tuple(np.cumsum([0, *sizes])[:-1].tolist())
        self.units_per_chunk = -(-sum(sizes) // self.unit_bytes)
        self._shards = tuple(
            tuple(ShardRows(leaf.spec, shard, offset, self.blocks, units.unit_bytes) for shard in leaf.shards)
            for leaf, offset in zip(leaves, leaf_offsets(chunking, group_idx), strict=True)
        )
        self._is_whole = self._num_devices == 1

    def to_store(self, block_ids: np.ndarray) -> list[Part]:
        """Returns what each device has to pack: of what several hold, one of them has its turn."""
        return self._split(block_ids, lambda shard, chunks: chunks % len(shard.holders))

    def of_all(self, num_chunks: int) -> list[Part]:
        """Returns the parts of chunks of which every device packed all blocks."""
        chunks = np.arange(num_chunks)
        present = np.zeros((num_chunks, self.blocks), np.int32)
        return [Part(device, chunks, present) for device in range(self._num_devices)]

    def to_load(self, block_ids: np.ndarray) -> list[Part]:
        """Returns what each device has to unpack: all that it holds."""
        return self._split(block_ids, None)

    def keep(self, memory: HostMemory, unit_ids: np.ndarray, part: Part, packed: np.ndarray) -> None:
        """Copies what a device packed into the pool.

        Args:
            memory: the pool.
            unit_ids: `(all chunks that move, units_per_chunk)`.
            part: what the device packed.
            packed: `(units, words)`, its staging.
        """
        if self._is_whole:
            mine = unit_ids[part.chunks]
            memory.write(mine.reshape(-1), packed[: mine.size])
            return
        memory.clear_tails(unit_ids[part.chunks, -1], self._padding_bytes)
        pieces = []
        for leaf_idx, rows in self._held_by(part.device_idx):
            turn = rows.shard.holders.index(part.device_idx)
            mine = (part.chunks % len(rows.shard.holders) == turn)[:, None]
            pieces.append((rows, np.where(mine, self._addresses(leaf_idx, part, packed), -1)))
        copy_rows(memory.bytes, unit_ids[part.chunks], pieces, to_pool=True)

    def fill(self, memory: HostMemory, unit_ids: np.ndarray, part: Part, packed: np.ndarray) -> None:
        """Copies out of the pool what a device has to unpack; see `keep`."""
        if self._is_whole:
            memory.read(unit_ids[part.chunks].reshape(-1), packed)
            return
        pieces = [(rows, self._addresses(leaf_idx, part, packed)) for leaf_idx, rows in self._held_by(part.device_idx)]
        copy_rows(memory.bytes, unit_ids[part.chunks], pieces, to_pool=False)

    def _split(self, block_ids: np.ndarray, turns: Callable[[Shard, np.ndarray], np.ndarray] | None) -> list[Part]:
        chunks = np.arange(len(block_ids))
        parts = []
        for device, (first, past) in enumerate(self._blocks_of):
            local = np.where((block_ids >= first) & (block_ids < past), block_ids - first, -1)
            here = (local >= 0).any(axis=1)
            if turns is not None:
                wanted = np.zeros(len(chunks), bool)
                for _, rows in self._held_by(device):
                    wanted |= turns(rows.shard, chunks) == rows.shard.holders.index(device)
                here &= wanted
            mine = np.flatnonzero(here)
            parts.append(Part(device, mine, local[mine]))
        return parts

    def _held_by(self, device_idx: int) -> list[tuple[int, ShardRows]]:
        return [
            (leaf_idx, rows)
            for leaf_idx, shards in enumerate(self._shards)
            for rows in shards
            if device_idx in rows.shard.holders
        ]

    def _addresses(self, leaf_idx: int, part: Part, packed: np.ndarray) -> np.ndarray:
        """Where the rows of a leaf lie in a staging; -1 for blocks that the device does not hold."""
        chunk_bytes = self.units_per_chunk * self.unit_bytes
        rows = np.arange(self._rows[leaf_idx], dtype=np.int64) * self._row_bytes[leaf_idx]
        chunks = np.arange(part.num_chunks, dtype=np.int64)[:, None] * chunk_bytes
        addresses = chunks + (rows + (self._offsets[leaf_idx] + address_of(packed)))
        layers = self._rows[leaf_idx] // self.blocks
        return np.where(np.tile(part.block_ids >= 0, layers), addresses, -1)


def _blocks_of(name: str, leaves: tuple[RegisteredLeaf, ...], num_devices: int) -> tuple[tuple[int, int], ...]:
    """First block, and the one past the last, that each device holds of all leaves of a group."""
    if all(shard.num_blocks == leaf.num_blocks for leaf in leaves for shard in leaf.shards):
        return ((0, min(leaf.num_blocks for leaf in leaves)),) * num_devices
    held: list[set[tuple[int, int]]] = [set() for _ in range(num_devices)]
    for leaf in leaves:
        for shard in leaf.shards:
            for holder in shard.holders:
                held[holder].add(shard.blocks)
    for device, ranges in enumerate(held):
        if len(ranges) > 1:
            raise ValueError(
                f"`caches` of group {name!r} must all be split over blocks alike, got blocks "
                f"{' and '.join(f'{low} to {past - 1}' for low, past in sorted(ranges))} on device {device}"
            )
    return tuple(ranges.pop() for ranges in held)
