"""The portable transport: pack on the devices, one bulk transfer of a few large arrays, and back.

Each device packs its own part of a group's chunks, as if its part of each leaf were the whole leaf, into its own
staging. Where one device holds everything, what it packs are the units of the pool; otherwise the host puts the
parts of each row together. What several devices hold is sent to the host by one of them, in turn.

Everything is compiled when the transport is made: one program to pack and one to unpack each group, and, for each
power of two of units, one to cut a piece off the staging and one to put a piece into it. No size of step compiles
anything later.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.chunking import Chunking
from kvjax.memory.device_parts import DeviceParts, Part
from kvjax.memory.host import WORD, HostMemory
from kvjax.memory.programs import compiled, on_each_device
from kvjax.memory.registration import RegisteredCaches
from kvjax.observe.progress import progress_bar
from kvjax.packing import Units
from kvjax.plan import GroupMoves
from pallas_kernels import pack, unpack

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
        self._memory = memory
        self._words = units.unit_bytes // WORD.itemsize
        self._parts = {g: DeviceParts(caches, chunking, units, g) for g in chunking.layout.cached}
        self._most_units = staging_units
        largest = max(parts.units_per_chunk for parts in self._parts.values())
        self._piece_units = max(largest, staging_units // PIECES_PER_STAGING)
        self._device = caches.on_each_device()
        self._host = caches.on_each_device("pinned_host")
        self._buckets = _buckets(self._piece_units)
        total = 2 * (len(self._parts) + len(self._buckets))
        with progress_bar("compiling transfers", total, show=show_progress) as done:
            self._pack = {g: self._pack_program(g, done) for g in self._parts}
            self._unpack = {g: self._unpack_program(g, done) for g in self._parts}
            self._cut = {bucket: self._cut_program(bucket, done) for bucket in self._buckets}
            self._put = {bucket: self._put_program(bucket, done) for bucket in self._buckets}
        self._staging = self._new_staging()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvjax-mover")
        self._staged: deque[tuple[int, Future[None] | jax.Array]] = deque()

    def store(self, caches: Mapping[str, jax.Array], moves: GroupMoves) -> Iterator[Future[None]]:
        """Starts the move of chunks of one group to the pool.

        Args:
            caches: the arrays; they are read and stay the caller's.
            moves: the chunks; all ids are in range.

        Yields:
            For each piece whose move was started, what ends when the pool holds it.
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
            yield kept

    def load(self, caches: dict[str, jax.Array], moves: GroupMoves) -> Iterator[jax.Array]:
        """Starts the move of chunks of one group to the device.

        Args:
            caches: the arrays; those of the group are donated and replaced here by the updated ones.
            moves: the chunks; all ids are in range, -1 is not written.

        Yields:
            For each piece whose move was started, what is ready once the caches are written.
        """
        group, program = self._parts[moves.group_idx], self._unpack[moves.group_idx]
        names = self._caches.group_leaves[moves.group_idx]
        for block_ids, unit_ids in self._pieces(moves):
            parts = group.to_load(block_ids)
            staged = self._make_room(group, parts)
            rows = np.empty((len(parts), staged, self._words), WORD)
            for part, staging in zip(parts, rows, strict=True):
                group.fill(self._memory, unit_ids, part, staging)
            ids, counts = self._ids(group, parts, absent=-1)
            array = jax.device_put(jax.device_put(rows.reshape(-1, self._words), self._host), self._device)
            leaves = tuple(caches[name] for name in names)
            try:
                self._staging = self._put[staged](self._staging, array)
                leaves, written = program(self._staging, leaves, ids, counts)
            except BaseException:
                self._staging = self._new_staging()
                raise
            caches.update(zip(names, leaves, strict=True))
            self._staged.append((staged, array))
            yield written

    def read(self, group_idx: int, unit_ids: np.ndarray) -> np.ndarray:  # noqa: ARG002  # units say it all
        """Returns a copy of chunks, `uint8` `(num_chunks, units_per_chunk * unit_bytes)`."""
        return self._memory.read_chunks(unit_ids)

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
                group.keep(self._memory, unit_ids, part, np.asarray(held[device]))

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
        return jax.device_put(np.zeros(self._staging_struct().shape, WORD), self._device)

    def _pack_program(self, group_idx: int, done: Callable[[float], None]) -> Callable[..., Any]:
        group, platform = self._parts[group_idx], self._caches.platform

        def pack_part(leaves: Any, ids: Any, count: Any, staging: Any) -> Any:
            return pack(
                leaves,
                ids,
                count[0],
                staging,
                units_per_chunk=group.units_per_chunk,
                stacked=group.stacked,
                platform=platform,
            )

        program = on_each_device(pack_part, self._caches, (group_idx, None, None, None), None)
        made = compiled(program, (group.structs, *self._id_structs(group), self._staging_struct()), (3,), self._device)
        done(1)
        return made

    def _unpack_program(self, group_idx: int, done: Callable[[float], None]) -> Callable[..., Any]:
        group, platform = self._parts[group_idx], self._caches.platform

        def unpack_part(staging: Any, leaves: Any, ids: Any, count: Any) -> Any:
            updated = unpack(
                staging,
                leaves,
                ids,
                count[0],
                units_per_chunk=group.units_per_chunk,
                stacked=group.stacked,
                platform=platform,
            )
            return updated, count + 0

        program = on_each_device(unpack_part, self._caches, (None, group_idx, None, None), (group_idx, None))
        out = (tuple(struct.sharding for struct in group.structs), self._device)
        made = compiled(program, (self._staging_struct(), group.structs, *self._id_structs(group)), (1,), out)
        done(1)
        return made

    def _cut_program(self, bucket: int, done: Callable[[float], None]) -> Callable[..., Any]:
        program = on_each_device(lambda staging: staging[:bucket] + 0, self._caches, (None,), None)
        made = compiled(program, (self._staging_struct(),), (), self._device)
        done(1)
        return made

    def _put_program(self, bucket: int, done: Callable[[float], None]) -> Callable[..., Any]:
        program = on_each_device(
            lambda staging, piece: staging.at[:bucket].set(piece), self._caches, (None, None), None
        )
        piece = self._struct((bucket, self._words), jnp.uint32)
        made = compiled(program, (self._staging_struct(), piece), (0,), self._device)
        done(1)
        return made

    def _id_structs(self, group: DeviceParts) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return (
            self._struct((self._max_chunks(group.group_idx), group.blocks), jnp.int32),
            self._struct((1,), jnp.int32),
        )

    def _staging_struct(self) -> jax.ShapeDtypeStruct:
        return self._struct((self._piece_units, self._words), jnp.uint32)

    def _struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """An array of which each device holds `shape`."""
        whole = (len(self._caches.devices) * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(whole, dtype, sharding=self._device)


def ended(part: "Future[None] | jax.Array") -> bool:
    """True if a move is over, well or not."""
    return part.done() if isinstance(part, Future) else part.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


def _buckets(staging_units: int) -> tuple[int, ...]:
    """Powers of two below `staging_units`, and itself."""
    return (*(1 << n for n in range((staging_units - 1).bit_length())), staging_units)
