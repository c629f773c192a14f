"""The portable transport: pack on the devices, one bulk transfer of a few large arrays, and back.

Each device packs its own part of a group's chunks, as if its part of each leaf were the whole leaf, into its own
staging. Where one device holds everything, what it packs are the units of the pool; otherwise the host puts the
parts of each row together. What several devices hold is sent to the host by one of them, in turn.

Everything is compiled when the transport is made: one program to pack and one to unpack each group, and, for each
power of two of units, one to cut a piece off the staging and one to put a piece into it. No size of step compiles
anything later.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from kvjax.chunking import Chunking
from kvjax.memory.device_parts import DeviceParts, Part
from kvjax.memory.host import WORD, HostMemory
from kvjax.memory.programs import compile_all, cutting_programs, packing_programs, unit_shape
from kvjax.memory.registration import RegisteredCaches
from kvjax.packing import Units
from kvjax.plan import GroupMoves

# A large move goes in pieces, so that packing one, transferring the one before and copying the one before that
# overlap, and so that allocators re-use memory: fresh pages cost more than the copy itself.
PIECES_PER_STAGING = 8


class StagedTransport:
    """Moves chunks between the caches and the host pool through arrays of packed units.

    All JAX work is issued on the caller's thread; one thread of its own waits for arrays and copies bytes. The
    staging is the transport's own device array; what it holds between calls is of no interest to anyone.

    Args:
        caches: the registered arrays.
        chunking: the layout and its chunks.
        units: how chunks are cut into units.
        memory: the host pool.
        staging_units: units that are staged at most at a time on each device, at least one chunk of every group.
        show_progress: see `progress_bar`.
    """

    name = "staged"

    def __init__(
        self,
        caches: RegisteredCaches,
        chunking: Chunking,
        units: Units,
        memory: HostMemory,
        *,
        staging_units: int,
        show_progress: bool | None = None,
    ):
        self.most_staged_units = 0
        self._caches = caches
        self.memory = memory
        self._parts = {g: DeviceParts(caches, chunking, units, g) for g in chunking.layout.cached}
        self._most_units = staging_units
        largest = max(parts.units_per_chunk for parts in self._parts.values())
        self._piece_units = max(largest, staging_units // PIECES_PER_STAGING)
        self._device = caches.on_each_device()
        self._host = caches.on_each_device("pinned_host")
        self._unit_shape = unit_shape(caches.platform, units.unit_bytes)
        self._buckets = _buckets(self._piece_units)
        packing = {g: packing_programs(caches, parts, self._piece_units) for g, parts in self._parts.items()}
        cutting = {n: cutting_programs(caches, self._unit_shape, self._piece_units, n) for n in self._buckets}
        programs = [program for some in (*packing.values(), *cutting.values()) for program in some]
        made = compile_all(programs, show_progress=show_progress)
        self._pack, self._unpack = ({g: made[pair[way].name] for g, pair in packing.items()} for way in (0, 1))
        self._cut, self._put = ({n: made[pair[way].name] for n, pair in cutting.items()} for way in (0, 1))
        self._staging = self._new_staging()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvjax-mover")
        self._staged: deque[tuple[int, Future[None] | jax.Array]] = deque()

    def store(self, caches: Mapping[str, jax.Array], moves: GroupMoves) -> Iterator[tuple[int, Future[None]]]:
        """Starts the move of chunks of one group to the pool.

        Args:
            caches: the arrays; they are read and stay the caller's.
            moves: the chunks; all ids are in range.

        Yields:
            For each piece whose move was started, in order, its number of chunks and what ends when the pool holds it.
        """
        group, program = self._parts[moves.group_idx], self._pack[moves.group_idx]
        leaves = tuple(caches[name] for name in self._caches.group_leaves[moves.group_idx])
        for block_ids, unit_ids in self._pieces(moves):
            parts = group.to_store(block_ids)
            staged = self._make_room(group, parts)
            ids, counts = self._ids(group, parts, absent=0)
            try:
                self._staging = program(leaves, ids, counts, self._staging)
            except BaseException:
                self._staging = self._new_staging()  # a program that fails takes what was donated to it along
                raise
            array = jax.device_put(self._cut[staged](self._staging), self._host)
            kept = self._worker.submit(self._keep, group, parts, array, unit_ids)
            self._staged.append((staged, kept))
            yield len(block_ids), kept

    def load(self, caches: dict[str, jax.Array], moves: GroupMoves) -> Iterator[tuple[int, jax.Array]]:
        """Starts the move of chunks of one group to the device.

        Args:
            caches: the arrays; those of the group are donated and replaced here by the updated ones.
            moves: the chunks; all ids are in range, -1 is not written.

        Yields:
            For each piece whose move was started, in order, its number of chunks and what is ready once the caches
            are written.
        """
        group, program = self._parts[moves.group_idx], self._unpack[moves.group_idx]
        names = self._caches.group_leaves[moves.group_idx]
        for block_ids, unit_ids in self._pieces(moves):
            parts = group.to_load(block_ids)
            staged = self._make_room(group, parts)
            rows = np.empty((len(parts), staged, *self._unit_shape), WORD)
            for part, staging in zip(parts, rows, strict=True):
                group.fill(self.memory, unit_ids, part, staging.reshape(staged, -1))
            ids, counts = self._ids(group, parts, absent=-1)
            array = jax.device_put(jax.device_put(rows.reshape(-1, *self._unit_shape), self._host), self._device)
            leaves = tuple(caches[name] for name in names)
            try:
                self._staging = self._put[staged](self._staging, array)
                leaves, written = program(self._staging, leaves, ids, counts)
            except BaseException:
                self._staging = self._new_staging()
                raise
            caches.update(zip(names, leaves, strict=True))
            self._staged.append((staged, array))
            yield len(block_ids), written

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
        """Waits for the stores under way and ends the thread."""
        self._worker.shutdown(wait=True)

    def _keep(self, group: DeviceParts, parts: list[Part], array: jax.Array, unit_ids: np.ndarray) -> None:
        held = {shard.device: shard.data for shard in array.addressable_shards}
        for part, device in zip(parts, self._caches.devices, strict=True):
            if part.num_chunks:
                packed = np.asarray(held[device])
                group.keep(self.memory, unit_ids, part, packed.reshape(len(packed), -1))

    def _pieces(self, moves: GroupMoves) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        step = self._max_chunks(moves.group_idx)
        for low in range(0, moves.num_chunks, step):
            rows = slice(low, min(low + step, moves.num_chunks))
            yield moves.block_ids[rows], moves.unit_ids[rows]

    def _max_chunks(self, group_idx: int) -> int:
        return self._piece_units // self._parts[group_idx].units_per_chunk

    def _make_room(self, group: DeviceParts, parts: list[Part]) -> int:
        """Waits until a piece can be staged within the bound; returns the units it takes on each device."""
        needed = max(1, *(part.num_chunks for part in parts)) * group.units_per_chunk
        wanted = next(bucket for bucket in self._buckets if bucket >= needed)
        while self._staged and self._staged_units() + wanted > self._most_units:
            _, part = self._staged.popleft()
            part.exception() if isinstance(part, Future) else part.block_until_ready()
        self.most_staged_units = max(self.most_staged_units, self._staged_units() + wanted)
        return wanted

    def _staged_units(self) -> int:
        while self._staged and ended(self._staged[0][1]):
            self._staged.popleft()
        return sum(staged for staged, _ in self._staged)

    def _ids(self, group: DeviceParts, parts: list[Part], *, absent: int) -> tuple[jax.Array, jax.Array]:
        """Block ids `(devices * max_chunks, blocks)` and counts `(devices,)`, each device's its own."""
        ids = np.full((len(parts), self._max_chunks(group.group_idx), group.blocks), absent, np.int32)
        for place, part in zip(ids, parts, strict=True):
            place[: part.num_chunks] = np.where(part.block_ids < 0, absent, part.block_ids)
        counts = np.array([part.num_chunks for part in parts], np.int32)
        return jax.device_put((ids.reshape(-1, group.blocks), counts), self._device)

    def _new_staging(self) -> jax.Array:
        num_units = len(self._caches.devices) * self._piece_units
        return jax.device_put(np.zeros((num_units, *self._unit_shape), WORD), self._device)


def ended(part: Any) -> bool:
    """True if a move, a future or an array, is over, well or not."""
    return part.done() if isinstance(part, Future) else part.is_ready()


def _buckets(staging_units: int) -> tuple[int, ...]:
    """Powers of two below `staging_units`, and itself."""
    return (*(1 << n for n in range((staging_units - 1).bit_length())), staging_units)
