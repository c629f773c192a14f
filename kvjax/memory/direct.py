"""The direct transport of accelerators: pack on the device, then one kernel between staging and pinned pool.

The host pool is a `pinned_host` array, donated to every move and updated in place. Packing and moving are programs
of their own: within one, the staging may be put where the compilers refuse a transfer to the host from. Two
stagings take turns, so that one is packed while the other moves.

On a mesh each device keeps its own part of every unit in a pool of its own; the same unit ids hold on all of them.
"""

from collections.abc import Iterator, Mapping
from itertools import cycle

import jax
import numpy as np

from kvjax.chunking import Chunking
from kvjax.memory.device_parts import DeviceParts
from kvjax.memory.host import WORD, HostMemory
from kvjax.memory.limits import pinned_limit_bytes
from kvjax.memory.programs import compile_all, new_pool_program, packing_programs, pool_programs
from kvjax.memory.registration import RegisteredCaches
from kvjax.packing import GRANULE_BYTES, Units
from kvjax.plan import GroupMoves

_NUM_STAGINGS = 2
_PIECES_PER_STAGING = 4


def split_refusal(caches: RegisteredCaches) -> str | None:
    """Returns why caches that are split so cannot be moved directly, or `None`.

    Every device must keep an equal part of each chunk: a leaf that several devices hold would be kept by each
    of them, and one that is split over blocks would leave units unused on the other devices.
    """
    for name, leaf in caches.leaves.items():
        if len(leaf.shards) < len(caches.devices):
            return f"`caches` leaf {name!r} is replicated, and would be kept once per device"
        if any(shard.num_blocks != leaf.num_blocks for shard in leaf.shards):
            return f"`caches` leaf {name!r} is split over blocks"
    return None


def refusal(caches: RegisteredCaches, units: Units, num_units: int) -> str | None:
    """Returns why caches and units cannot be moved directly on an accelerator, or `None`."""
    reason = split_refusal(caches)
    if reason is not None:
        return reason
    granule = GRANULE_BYTES["tpu" if caches.platform == "tpu" else "gpu"]
    per_device = units.unit_bytes / len(caches.devices)
    if per_device % granule:
        return f"units must be multiples of {granule} bytes on each device, got {units.unit_bytes} bytes on all of them"
    if num_units >= 2**31:
        return f"the host pool must have fewer than 2**31 units, got {num_units}"
    return None


def check_budget(platform: str, num_bytes: int) -> None:
    """Checks that XLA may pin so much memory.

    Raises:
        ValueError: it may not.
    """
    limit = pinned_limit_bytes(platform)
    if limit is not None and num_bytes > limit:
        raise ValueError(
            f"`host_bytes` must be at most {limit}, XLA's limit of pinned memory, got {num_bytes}; raise it by the "
            "environment variable XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, or choose `transfer='staged'`"
        )


class DirectTransport:
    """Moves chunks between the caches and a pinned host pool.

    Args:
        caches: the registered arrays, which `refusal` takes.
        chunking: the layout and its chunks.
        units: how chunks are cut into units.
        num_units: units of the host pool.
        staging_units: units that are staged at most at a time on each device, at least one chunk of every group.
        show_progress: see `progress_bar`.
    """

    name = "direct"
    memory: HostMemory | None = None

    def __init__(
        self,
        caches: RegisteredCaches,
        chunking: Chunking,
        units: Units,
        *,
        num_units: int,
        staging_units: int,
        show_progress: bool | None = None,
    ):
        devices = len(caches.devices)
        self._caches = caches
        self._num_units = num_units
        self._unit_bytes = units.unit_bytes
        self._parts = {g: DeviceParts(caches, chunking, units, g, of_devices=devices) for g in chunking.layout.cached}
        largest = max(parts.units_per_chunk for parts in self._parts.values())
        self._piece_units = max(largest, staging_units // (_NUM_STAGINGS * _PIECES_PER_STAGING))
        num_stagings = _NUM_STAGINGS if self._piece_units * _NUM_STAGINGS <= staging_units else 1
        self.most_staged_units = num_stagings * self._piece_units
        self._device = caches.on_each_device()
        packing = {g: packing_programs(caches, parts, self._piece_units) for g, parts in self._parts.items()}
        to_pool, from_pool = pool_programs(caches, units, num_units, self._piece_units)
        new_pool = new_pool_program(caches, units, num_units)
        self._staging = to_pool.args[0]
        programs = [program for pair in packing.values() for program in pair]
        made = compile_all([*programs, to_pool, from_pool, new_pool], show_progress=show_progress)
        self._pack = {g: made[pair[0].name] for g, pair in packing.items()}
        self._unpack = {g: made[pair[1].name] for g, pair in packing.items()}
        self._to_pool, self._from_pool, self._new_pool = (made[each.name] for each in (to_pool, from_pool, new_pool))
        self._pool = self._new_pool()
        self._stagings = [self._new_staging() for _ in range(num_stagings)]
        self._turns = cycle(range(num_stagings))

    def store(self, caches: Mapping[str, jax.Array], moves: GroupMoves) -> Iterator[tuple[int, jax.Array]]:
        """Starts the move of chunks of one group to the pool.

        Args:
            caches: the arrays; they are read and stay the caller's.
            moves: the chunks; all ids are in range.

        Yields:
            For each piece whose move was started, in order, its number of chunks and what is ready once the pool
            holds it.
        """
        pack_group = self._pack[moves.group_idx]
        max_chunks = self._max_chunks(moves.group_idx)
        leaves = tuple(caches[name] for name in self._caches.group_leaves[moves.group_idx])
        for turn, block_ids, unit_ids in self._pieces(moves):
            ids, count = self._ids(max_chunks, block_ids)
            staging = self._take_staging(turn)
            self._stagings[turn] = staging = pack_group(leaves, ids, count, staging)
            self._pool, stored = self._to_pool(staging, self._pool, *self._places(unit_ids))
            yield len(block_ids), stored

    def load(self, caches: dict[str, jax.Array], moves: GroupMoves) -> Iterator[tuple[int, jax.Array]]:
        """Starts the move of chunks of one group to the device.

        Args:
            caches: the arrays; those of the group are donated and replaced here by the updated ones.
            moves: the chunks; all ids are in range, -1 is not written.

        Yields:
            For each piece whose move was started, in order, its number of chunks and what is ready once the caches
            are written.
        """
        unpack_group = self._unpack[moves.group_idx]
        max_chunks = self._max_chunks(moves.group_idx)
        names = self._caches.group_leaves[moves.group_idx]
        for turn, block_ids, unit_ids in self._pieces(moves):
            staging = self._fetch(turn, unit_ids)
            ids, count = self._ids(max_chunks, block_ids)
            leaves, loaded = unpack_group(staging, tuple(caches[name] for name in names), ids, count)
            caches.update(zip(names, leaves, strict=True))
            yield len(block_ids), loaded

    def read(self, group_idx: int, unit_ids: np.ndarray) -> np.ndarray:
        """Returns a copy of chunks, `uint8` `(num_chunks, units_per_chunk * unit_bytes)`; they pass the device."""
        parts = self._parts[group_idx]
        chunks = np.empty((len(unit_ids), parts.units_per_chunk * self._unit_bytes), np.uint8)
        step = self._max_chunks(group_idx)
        for low in range(0, len(unit_ids), step):
            piece = unit_ids[low : low + step]
            staging = self._fetch(0, piece)
            held = {shard.device: shard.data for shard in staging.addressable_shards}
            memory = HostMemory(piece.size, self._unit_bytes, show_progress=False)
            here = np.arange(piece.size, dtype=np.int32).reshape(piece.shape)
            for part, device in zip(parts.of_all(len(piece)), self._caches.devices, strict=True):
                packed = np.array(held[device])
                parts.keep(memory, here, part, packed.reshape(len(packed), -1))
            chunks[low : low + step] = memory.bytes.reshape(len(piece), -1)
        return chunks

    def write(self, group_idx: int, unit_ids: np.ndarray, chunks: np.ndarray) -> None:
        """Puts chunks, as `read` returns them, into units that nothing reads or writes; they pass the device."""
        parts = self._parts[group_idx]
        step = self._max_chunks(group_idx)
        for low in range(0, len(unit_ids), step):
            piece = unit_ids[low : low + step]
            memory = HostMemory(piece.size, self._unit_bytes, show_progress=False)
            memory.bytes[:] = chunks[low : low + step].reshape(-1)
            here = np.arange(piece.size, dtype=np.int32).reshape(piece.shape)
            rows = np.zeros(self._staging.shape, WORD).reshape(len(self._caches.devices), self._piece_units, -1)
            for part, packed in zip(parts.of_all(len(piece)), rows, strict=True):
                parts.fill(memory, here, part, packed)
            staging = jax.device_put(rows.reshape(self._staging.shape), self._device)
            self._pool, stored = self._to_pool(staging, self._pool, *self._places(piece))
            stored.block_until_ready()

    def revive(self) -> bool:
        """Makes the pool anew if a program that failed took it along, and tells whether one did."""
        try:
            if not self._pool.is_deleted():
                self._pool.block_until_ready()
                return False
        except jax.errors.JaxRuntimeError:
            pass
        self._pool = self._new_pool()
        return True

    def close(self) -> None:
        """Waits for the moves under way."""
        if not self._pool.is_deleted():
            jax.block_until_ready(self._pool)

    def _max_chunks(self, group_idx: int) -> int:
        return self._piece_units // self._parts[group_idx].units_per_chunk

    def _fetch(self, turn: int, unit_ids: np.ndarray) -> jax.Array:
        """Starts the move of units into a staging, in order."""
        slots, places, count = self._places(unit_ids)
        staging = self._take_staging(turn)
        self._stagings[turn], _ = self._from_pool(self._pool, staging, places, slots, count)
        return self._stagings[turn]

    def _take_staging(self, turn: int) -> jax.Array:
        """The staging, which a program will take over; a new one if a program that failed took it along."""
        staging = self._stagings[turn]
        return self._new_staging() if staging.is_deleted() else staging

    def _pieces(self, moves: GroupMoves) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        step = self._max_chunks(moves.group_idx)
        for low in range(0, moves.num_chunks, step):
            rows = slice(low, min(low + step, moves.num_chunks))
            yield next(self._turns), moves.block_ids[rows], moves.unit_ids[rows]

    def _ids(self, max_chunks: int, block_ids: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Block ids and their count, the same for each device."""
        ids = np.full((max_chunks, block_ids.shape[1]), -1, np.int32)
        ids[: len(block_ids)] = block_ids
        return self._on_each(ids), self._on_each(np.array([len(block_ids)], np.int32))

    def _places(self, unit_ids: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Units of the staging, units of the pool, and how many they are, the same for each device."""
        places = np.zeros(self._piece_units, np.int32)
        places[: unit_ids.size] = unit_ids.reshape(-1)
        slots = np.arange(self._piece_units, dtype=np.int32)
        return self._on_each(slots), self._on_each(places), self._on_each(np.array([unit_ids.size], np.int32))

    def _on_each(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(np.concatenate([array] * len(self._caches.devices)), self._device)

    def _new_staging(self) -> jax.Array:
        return jax.device_put(np.zeros(self._staging.shape, WORD), self._device)
