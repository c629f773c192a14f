"""The portable transport: pack on the device, one bulk transfer of a few large arrays, and back.

Everything is compiled when the transport is made: one program to pack and one to unpack each group, and,
for each power of two of units, one to cut a piece off the staging and one to put a piece into it. No size
of step compiles anything later.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from kvjax.chunking import Chunking
from kvjax.memory.host import WORD
from kvjax.memory.registration import RegisteredCaches
from kvjax.observe.progress import progress_bar
from kvjax.packing import Units, blocks_in_chunk
from pallas_kernels import pack, unpack

Caches = Mapping[str, jax.Array]


@dataclass(frozen=True, slots=True, eq=False)
class _GroupPrograms:
    max_chunks: int
    blocks: int
    units_per_chunk: int
    pack: Callable[..., Any]
    unpack: Callable[..., Any]


class StagedTransport:
    """Moves chunks of one group at a time between the caches and arrays in host memory.

    The staging is the transport's own device array of `staging_units` units; what it holds between calls
    is of no interest to anyone.

    Args:
        caches: the registered arrays.
        chunking: the layout and its chunks.
        units: how chunks are cut into units.
        staging_units: units of the staging, the most that one move takes; at least one chunk of every group.
        show_progress: see `progress_bar`.
    """

    def __init__(
        self,
        caches: RegisteredCaches,
        chunking: Chunking,
        units: Units,
        staging_units: int,
        *,
        show_progress: bool | None = None,
    ):
        self.staging_units = staging_units
        self._caches = caches
        self._words = units.unit_bytes // WORD.itemsize
        self._device = SingleDeviceSharding(caches.device)
        self._host = SingleDeviceSharding(caches.device, memory_kind="pinned_host")
        self._buckets = _buckets(staging_units)
        cached = chunking.layout.cached
        with progress_bar("compiling transfers", 2 * (len(cached) + len(self._buckets)), show=show_progress) as done:
            self._groups = {g: self._group_programs(chunking, units, g, done) for g in cached}
            self._cut = {bucket: self._cut_program(bucket, done) for bucket in self._buckets}
            self._put = {bucket: self._put_program(bucket, done) for bucket in self._buckets}
        self._staging = self._new_staging()

    def max_chunks(self, group_idx: int) -> int:
        """Chunks of a group that fit the staging."""
        return self._groups[group_idx].max_chunks

    def staged_units(self, group_idx: int, num_chunks: int) -> int:
        """Units that a move of `num_chunks` chunks stages."""
        return self._bucket(num_chunks * self._groups[group_idx].units_per_chunk)

    def to_host(self, caches: Caches, group_idx: int, block_ids: np.ndarray) -> jax.Array:
        """Starts the move of chunks to the host.

        Args:
            caches: the arrays; they are read and stay the caller's.
            group_idx: the group.
            block_ids: `(num_chunks, blocks in a chunk)`, at most `max_chunks` rows, all ids in range.

        Returns:
            An array in `pinned_host`, `(at least the chunks' units, words)`, which the caller owns.
        """
        group = self._groups[group_idx]
        ids, count = self._padded_ids(group, block_ids)
        try:
            self._staging = group.pack(self._leaves(caches, group_idx), ids, count, self._staging)
        except BaseException:
            self._staging = self._new_staging()  # a program that fails takes what was donated to it along
            raise
        bucket = self._bucket(len(block_ids) * group.units_per_chunk)
        return jax.device_put(self._cut[bucket](self._staging), self._host)

    def to_device(
        self, caches: dict[str, jax.Array], group_idx: int, block_ids: np.ndarray, rows: np.ndarray
    ) -> tuple[jax.Array, jax.Array]:
        """Starts the move of chunks to the device.

        Args:
            caches: the arrays; those of the group are donated and replaced here by the updated ones.
            group_idx: the group.
            block_ids: `(num_chunks, blocks in a chunk)`, at most `max_chunks` rows; -1 is not written.
            rows: `(staged_units, words)` of the chunks, which must not change any more.

        Returns:
            Two small or transient arrays: the first is ready once `rows` was read, the second once the
            caches are written.
        """
        group = self._groups[group_idx]
        ids, count = self._padded_ids(group, block_ids)
        piece = jax.device_put(jax.device_put(rows, self._host), self._device)
        try:
            self._staging = self._put[len(rows)](self._staging, piece)
            leaves, written = group.unpack(self._staging, self._leaves(caches, group_idx), ids, count)
        except BaseException:
            self._staging = self._new_staging()
            raise
        caches.update(zip(self._caches.group_leaves[group_idx], leaves, strict=True))
        return piece, written

    def _leaves(self, caches: Caches, group_idx: int) -> tuple[jax.Array, ...]:
        return tuple(caches[name] for name in self._caches.group_leaves[group_idx])

    def _padded_ids(self, group: _GroupPrograms, block_ids: np.ndarray) -> tuple[jax.Array, jax.Array]:
        padded = np.full((group.max_chunks, group.blocks), -1, np.int32)
        padded[: len(block_ids)] = block_ids
        return jax.device_put(padded, self._device), jax.device_put(np.int32(len(block_ids)), self._device)

    def _bucket(self, num_units: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= num_units)

    def _new_staging(self) -> jax.Array:
        return jax.device_put(np.zeros((self.staging_units, self._words), WORD), self._device)

    def _group_programs(
        self, chunking: Chunking, units: Units, group_idx: int, done: Callable[[float], None]
    ) -> _GroupPrograms:
        per_chunk = units.units_per_chunk[group_idx] or 0
        max_chunks = self.staging_units // per_chunk
        blocks = blocks_in_chunk(chunking, group_idx)
        names = self._caches.group_leaves[group_idx]
        leaves = tuple(self._caches.leaves[name].struct() for name in names)
        stacked = tuple(self._caches.leaves[name].spec.layers is not None for name in names)
        platform = self._caches.device.platform
        ids = self._struct((max_chunks, blocks), jnp.int32)
        count = self._struct((), jnp.int32)

        def pack_group(leaves: Any, ids: Any, count: Any, staging: Any) -> Any:
            return pack(leaves, ids, count, staging, units_per_chunk=per_chunk, stacked=stacked, platform=platform)

        def unpack_group(staging: Any, leaves: Any, ids: Any, count: Any) -> Any:
            updated = unpack(staging, leaves, ids, count, units_per_chunk=per_chunk, stacked=stacked, platform=platform)
            return updated, count + 0

        shardings = tuple(leaf.sharding for leaf in leaves)
        packer = _compiled(pack_group, (leaves, ids, count, self._staging_struct()), donate=(3,), out=self._device)
        done(1)
        unpacker = _compiled(
            unpack_group, (self._staging_struct(), leaves, ids, count), donate=(1,), out=(shardings, self._device)
        )
        done(1)
        return _GroupPrograms(max_chunks, blocks, per_chunk, packer, unpacker)

    def _cut_program(self, bucket: int, done: Callable[[float], None]) -> Callable[..., Any]:
        program = _compiled(lambda staging: staging[:bucket] + 0, (self._staging_struct(),), out=self._device)
        done(1)
        return program

    def _put_program(self, bucket: int, done: Callable[[float], None]) -> Callable[..., Any]:
        program = _compiled(
            lambda staging, piece: staging.at[:bucket].set(piece),
            (self._staging_struct(), self._struct((bucket, self._words), jnp.uint32)),
            donate=(0,),
            out=self._device,
        )
        done(1)
        return program

    def _staging_struct(self) -> jax.ShapeDtypeStruct:
        return self._struct((self.staging_units, self._words), jnp.uint32)

    def _struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._device)


def _buckets(staging_units: int) -> tuple[int, ...]:
    """Powers of two below `staging_units`, and itself."""
    return (*(1 << n for n in range((staging_units - 1).bit_length())), staging_units)


def _compiled(
    function: Callable[..., Any], args: tuple[Any, ...], *, donate: tuple[int, ...] = (), out: Any
) -> Callable[..., Any]:
    return jax.jit(function, donate_argnums=donate, out_shardings=out).lower(*args).compile()
