"""The device caches a mover was made for, and the check that later ones are alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kvjax._checks import shown
from kvjax.groups import CacheLayout, LeafSpec
from kvjax.memory.shards import Shard, shards_of


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredLeaf:
    """One array of the cache.

    Args:
        spec: what the layout says of it.
        shape: `(num_blocks, *block_shape)`, or `(layers, num_blocks, *block_shape)`.
        sharding: taken once; later arrays must have an equivalent one.
        shards: the distinct pieces that the devices hold.
        array_type: type of the array that was registered.
    """

    spec: LeafSpec
    shape: tuple[int, ...]
    sharding: Sharding
    shards: tuple[Shard, ...]
    array_type: type

    @property
    def num_blocks(self) -> int:
        """Blocks that the array holds (of each layer, if it is stacked)."""
        return self.shape[0 if self.spec.layers is None else 1]

    def is_like(self, array: Any) -> bool:
        """A quick answer to whether an array is as registered and alive; false if it takes a closer look."""
        return (
            type(array) is self.array_type
            and array.shape == self.shape
            and array.dtype == self.spec.dtype
            and array.sharding == self.sharding
            and not array.is_deleted()
        )

    def struct(self) -> jax.ShapeDtypeStruct:
        """The array, abstractly."""
        return jax.ShapeDtypeStruct(self.shape, self.spec.dtype, sharding=self.sharding)


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredCaches:
    """All arrays of a layout.

    Args:
        leaves: by name, in layout order.
        optional: names of the scratch groups' leaves, which may be passed along and are not looked at.
        group_leaves: names of each group's leaves, in layout order, empty for scratch groups.
        devices: the `jax.Device`s that hold the caches, in the order of the mesh if there is one.
        mesh: the mesh that all leaves are laid out on; `None` if one device holds them all, on no mesh of `Explicit`
            axes.
    """

    leaves: dict[str, RegisteredLeaf]
    optional: frozenset[str]
    group_leaves: tuple[tuple[str, ...], ...]
    devices: tuple[Any, ...]
    mesh: Mesh | None

    @property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"` or `"tpu"`."""
        return self.devices[0].platform

    def leaves_of(self, group_idx: int) -> tuple[RegisteredLeaf, ...]:
        """A group's leaves, in layout order."""
        return tuple(self.leaves[name] for name in self.group_leaves[group_idx])

    def on_each_device(self, memory_kind: str | None = None) -> Sharding:
        """Sharding of an array whose first dimension is split evenly over the devices.

        Args:
            memory_kind: memory that holds the array; `None` is device memory.
        """
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0], memory_kind=memory_kind)
        return NamedSharding(self.mesh, self.over_all_axes, memory_kind=memory_kind)

    @property
    def over_all_axes(self) -> PartitionSpec:
        """Splits one dimension over all axes of the mesh."""
        assert self.mesh is not None, "one device has no mesh"
        return PartitionSpec(self.mesh.axis_names)

    def num_blocks(self, group_idx: int) -> int:
        """Blocks that every leaf of a group holds."""
        return min(self.leaves[name].num_blocks for name in self.group_leaves[group_idx])

    def check(self, caches: Any) -> None:
        """Checks that `caches` are alike to the ones registered.

        Raises:
            ValueError: another number of leaves, a leaf deleted (donated), or of another shape, dtype or
                sharding.
        """
        _check_names(caches, self.leaves, self.optional)
        for name, leaf in self.leaves.items():
            array = caches[name]
            if leaf.is_like(array):
                continue
            _check_array(name, array, leaf.spec)
            if array.shape != leaf.shape:
                raise ValueError(
                    f"`caches` leaf {name!r} must have shape {leaf.shape} as registered, got {array.shape}"
                )
            if not array.sharding.is_equivalent_to(leaf.sharding, len(leaf.shape)):
                raise ValueError(
                    f"`caches` leaf {name!r} must have the sharding it was registered with, {leaf.sharding}, "
                    f"got {array.sharding}"
                )
            if array.is_deleted():
                raise ValueError(f"`caches` leaf {name!r} must be a live array, got one that was donated or deleted")
        _check_distinct({name: caches[name] for name in self.leaves})


def register(layout: CacheLayout, caches: Any, *, of_all_processes: bool = False) -> RegisteredCaches:
    """Takes down the arrays of a layout.

    Args:
        layout: every cached group must list its leaves.
        caches: the arrays, by leaf name.
        of_all_processes: they may lie partly on devices of other processes.

    Raises:
        ValueError: a group without leaves, another number of leaves than the layout's, a leaf that is no
            JAX array, of another shape or dtype, on other devices or another mesh than the rest, partly on
            devices of other processes, or not in device memory.
    """
    for g in layout.cached:
        if not layout.groups[g].leaves:
            raise ValueError(
                f"group {layout.groups[g].name!r} must list its leaves to be moved, got only `block_bytes`"
            )
    specs = layout.leaves
    optional = frozenset(leaf.name for group in layout.groups for leaf in group.leaves) - specs.keys()
    _check_names(caches, specs, optional)
    for name, spec in specs.items():
        _check_array(name, caches[name], spec)
        _check_order(name, caches[name])
    _check_distinct({name: caches[name] for name in specs})
    for name in specs if not of_all_processes else ():
        if not caches[name].sharding.is_fully_addressable:
            raise ValueError(
                f"`caches` leaf {name!r} must lie on devices of this process only, got {caches[name].sharding}"
            )
    return registered(layout, caches)


def registered(layout: CacheLayout, caches: Mapping[str, Any]) -> RegisteredCaches:
    """Takes down arrays, or `jax.ShapeDtypeStruct`s with shardings, that are known to fit the layout.

    Raises:
        ValueError: they lie on other devices or another mesh than the rest.
    """
    specs = layout.leaves
    devices, mesh = _devices({name: caches[name].sharding for name in specs})
    leaves = {}
    for name, spec in specs.items():
        shape, sharding = tuple(caches[name].shape), caches[name].sharding
        leaves[name] = RegisteredLeaf(
            spec, shape, sharding, shards_of(spec, shape, sharding, devices), type(caches[name])
        )
    return RegisteredCaches(
        leaves,
        frozenset(leaf.name for group in layout.groups for leaf in group.leaves) - specs.keys(),
        tuple(tuple(leaf.name for leaf in group.leaves) if group.is_cached else () for group in layout.groups),
        devices,
        mesh,
    )


def _devices(shardings: Mapping[str, Sharding]) -> tuple[tuple[Any, ...], Mesh | None]:
    """The devices of all leaves in order, and their mesh if there are several, or if it types arrays."""
    first, *others = shardings.items()
    for name, sharding in others:
        if sharding.device_set != first[1].device_set:
            raise ValueError(
                f"`caches` must lie on the same devices, got leaf {first[0]!r} on {_names(first[1])} "
                f"and leaf {name!r} on {_names(sharding)}"
            )
    if len(first[1].device_set) == 1 and not any(_types_arrays(sharding) for sharding in shardings.values()):
        return tuple(first[1].device_set), None
    meshes: list[tuple[str, Mesh]] = []
    for name, sharding in shardings.items():
        if not isinstance(sharding, NamedSharding):
            lies = (
                "on several devices" if len(sharding.device_set) > 1 else "beside leaves of a mesh of `Explicit` axes"
            )
            raise ValueError(f"`caches` leaf {name!r} lies {lies} and must have a `NamedSharding`, got {sharding}")
        if not isinstance(sharding.mesh, Mesh):
            raise ValueError(f"`caches` leaf {name!r} must have a sharding over a concrete mesh, got {sharding}")
        if sharding.mesh != first[1].mesh:  # pyright: ignore[reportAttributeAccessIssue]
            raise ValueError(
                f"`caches` must lie on one mesh, got leaf {first[0]!r} with {first[1]} "
                f"and leaf {name!r} with {sharding}"
            )
        meshes.append((name, sharding.mesh))
    mesh = meshes[0][1]
    return tuple(mesh.devices.flat), mesh


def _types_arrays(sharding: Sharding) -> bool:
    """Whether the type of an array says how it is split, so that plain indexing and reshapes of it are refused."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _names(sharding: Sharding) -> str:
    return ", ".join(sorted(map(str, sharding.device_set)))


def _check_names(caches: Any, wanted: Mapping[str, Any], optional: frozenset[str]) -> None:
    if not isinstance(caches, Mapping):
        raise ValueError(f"`caches` must be a mapping of leaf names to arrays, got {type(caches).__name__}")
    missing = [name for name in wanted if name not in caches]
    if missing:
        raise ValueError(f"`caches` must hold the {len(wanted)} leaves of the layout, got none called {missing[0]!r}")
    extra = [name for name in caches if name not in wanted and name not in optional]
    if extra:
        raise ValueError(f"`caches` must hold only the {len(wanted)} leaves of the layout, got also {extra[0]!r}")


def _check_distinct(caches: Mapping[str, Any]) -> None:
    if len({id(array) for array in caches.values()}) == len(caches):
        return
    first: dict[int, str] = {}
    for name, array in caches.items():
        if id(array) in first:
            raise ValueError(
                f"`caches` leaves {first[id(array)]!r} and {name!r} must be different arrays, got one under both names"
            )
        first[id(array)] = name


def _check_order(name: str, array: Any) -> None:
    """Checks that an array of the CPU backend lies in memory in C order; elsewhere compilers see to the layout."""
    layout = array.format.layout
    ordered = layout is None or tuple(layout.major_to_minor) == tuple(range(array.ndim))
    if not ordered and next(iter(array.sharding.device_set)).platform == "cpu":
        raise ValueError(f"`caches` leaf {name!r} must lie in memory in C order, got layout {layout}")


def _check_array(name: str, array: Any, spec: LeafSpec) -> None:
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        raise ValueError(f"`caches` leaf {name!r} must be a JAX array, got {type(array).__name__}")
    if array.dtype != spec.dtype:
        raise ValueError(f"`caches` leaf {name!r} must be of {spec.dtype.name}, got {array.dtype.name}")
    stacked = () if spec.layers is None else (spec.layers,)
    lead = len(stacked) + 1
    if (
        array.ndim != lead + len(spec.block_shape)
        or array.shape[lead:] != spec.block_shape
        or (array.shape[: lead - 1] != stacked)
    ):
        wanted = ", ".join([*map(str, stacked), "num_blocks", *map(str, spec.block_shape)])
        raise ValueError(f"`caches` leaf {name!r} must have shape ({wanted}), got {array.shape}")
    if array.shape[lead - 1] == 0:
        raise ValueError(f"`caches` leaf {name!r} must hold at least one block, got shape {array.shape}")
    kind = array.sharding.memory_kind
    default = next(iter(array.sharding.device_set)).default_memory().kind
    if kind not in (None, "device", default):
        raise ValueError(f"`caches` leaf {name!r} must lie in device memory, got {shown(kind)}")
