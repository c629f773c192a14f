"""Caches that several processes hold together, seen by one of them.

A `jax.Array` of a multi-controller program lies on devices of many processes. Each of them keeps the pieces on its own
devices, as arrays of its own over the part of the mesh that is its own: no bytes are copied, and what moves them are
programs of this process alone. No program of another process waits for them, and none is waited for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from kvjax._checks import shown
from kvjax.chunking import Chunking, resolve_chunking
from kvjax.groups import CacheLayout, LeafSpec
from kvjax.memory.registration import RegisteredCaches, register


@dataclass(frozen=True, slots=True, eq=False)
class LocalLeaf:
    """What this process holds of one leaf.

    Args:
        shape: of its pieces together.
        sharding: of that array, over the devices of this process.
        pieces: for each dimension of the whole array, the spans `(start, stop)` that are here, ascending, none next to
            another.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    pieces: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class LocalView:
    """What this process holds of caches that several processes hold together.

    Args:
        layout: as the groups are here: blocks have the shape of what this process holds of them.
        whole: the caches of all processes, as registered.
        leaves: by name.
    """

    layout: CacheLayout
    whole: RegisteredCaches
    leaves: dict[str, LocalLeaf]

    def shard_of(self, shard: str) -> str:
        """Returns the name of what is held here of a shard: the same for processes that hold the same of all leaves.

        Raises:
            ValueError: `shard` is not a string.
        """
        if not isinstance(shard, str):
            raise ValueError(f"`shard` must be a string, got {shown(shard)}")
        held = ";".join(
            f"{name}:" + ",".join("+".join(f"{start}-{stop}" for start, stop in spans) for spans in leaf.pieces)
            for name, leaf in self.leaves.items()
        )
        return f"{shard}|{held}"

    def chunking(self, chunking: Chunking) -> Chunking:
        """Returns the chunking of the whole layout for what is here of it: chunks have as many blocks."""
        blocks = {
            group.name: number
            for group, number in zip(self.layout.groups, chunking.blocks_per_chunk, strict=True)
            if number is not None
        }
        return resolve_chunking(self.layout, blocks_per_chunk=blocks)

    def local(self, caches: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the arrays of this process. They share memory with `caches`: what donates them donates those."""
        return {
            name: jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, _pieces(caches[name]))
            for name, leaf in self.leaves.items()
        }

    def joined(
        self, caches: Mapping[str, Any], before: Mapping[str, jax.Array], after: Mapping[str, jax.Array]
    ) -> dict[str, Any]:
        """Returns the arrays of all processes after those of this one were updated.

        Args:
            caches: the arrays of all processes.
            before: what `local` made of them.
            after: the same, some of them replaced.
        """
        joined = dict(caches)
        for name, array in after.items():
            if array is not before[name]:
                leaf = self.whole.leaves[name]
                joined[name] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, _pieces(array))
        return joined


def local_view(layout: CacheLayout, caches: Mapping[str, Any]) -> LocalView | None:
    """Returns what this process holds of caches, or `None` if it holds all of them.

    Args:
        layout: the groups, with the shapes of whole blocks.
        caches: the arrays of all processes, by leaf name.

    Raises:
        ValueError: see `register`; a leaf without a piece here; or one whose blocks are split over processes.
    """
    arrays = caches.values() if isinstance(caches, Mapping) else ()
    if all(not isinstance(array, jax.Array) or array.is_fully_addressable for array in arrays):
        return None
    whole = register(layout, caches, of_all_processes=True)
    leaves = {name: _local_leaf(name, leaf.spec, leaf.shape, leaf.sharding) for name, leaf in whole.leaves.items()}
    groups = [
        replace(group, leaves=tuple(_local_spec(leaf, leaves) for leaf in group.leaves), block_bytes=None)
        if group.is_cached
        else group
        for group in layout.groups
    ]
    return LocalView(CacheLayout(groups, layout.tokens_per_hash), whole, leaves)


# --- parts --------------------------------------------------------------------------------------------


def _pieces(array: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in array.addressable_shards]


def _local_leaf(name: str, spec: LeafSpec, shape: tuple[int, ...], sharding: Any) -> LocalLeaf:
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"`caches` leaf {name!r} lies on devices of several processes and must have a `NamedSharding`, "
            f"got {sharding}"
        )
    held = sharding.addressable_devices_indices_map(shape)
    if not held:
        raise ValueError(f"`caches` leaf {name!r} must have a piece on a device of this process, got {sharding}")
    spans: list[tuple[tuple[int, int], ...]] = []
    for dimension, size in enumerate(shape):
        spans.append(_joined({(index or ())[dimension].indices(size)[:2] for index in held.values()}))
    blocks = 0 if spec.layers is None else 1
    here = tuple(sum(stop - start for start, stop in of_dimension) for of_dimension in spans)
    if here[blocks] != shape[blocks]:
        raise ValueError(
            f"`caches` leaf {name!r} must have its blocks on every process, got {here[blocks]} of {shape[blocks]} "
            f"here, with {sharding}: give each part of the blocks an offloader of its own"
        )
    if not all_parts_are_boxes(np.asarray(sharding.mesh.devices)):
        raise ValueError(
            f"`caches` leaf {name!r} must lie on a mesh in which the devices of each process stand together in one "
            f"block, got {sharding.mesh}"
        )
    mesh = sharding.mesh.local_mesh
    assert mesh is not None, "a mesh with devices of this process has a part of them"
    return LocalLeaf(here, NamedSharding(mesh, sharding.spec), tuple(spans))


def all_parts_are_boxes(devices: np.ndarray) -> bool:
    """Whether the devices of every process stand together in a mesh: the same answer in each of them."""
    processes = np.array([device.process_index for device in devices.flat]).reshape(devices.shape)
    for process in np.unique(processes):
        places = np.argwhere(processes == process)
        if len(places) != np.prod(places.max(0) - places.min(0) + 1):
            return False
    return True


def _joined(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Disjoint spans in order, those next to each other as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _local_spec(spec: LeafSpec, leaves: Mapping[str, LocalLeaf]) -> LeafSpec:
    shape = leaves[spec.name].shape
    if spec.layers is None:
        return replace(spec, block_shape=shape[1:])
    return replace(spec, block_shape=shape[2:], layers=shape[0])
