"""The programs of the transports: what each device that holds the caches does with its own part of them."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import NamedSharding, Sharding

from kvjax.memory.device_parts import DeviceParts
from kvjax.memory.registration import RegisteredCaches
from kvjax.observe.progress import progress_bar
from kvjax.packing import Units
from pallas_kernels import block_copy, pack, unpack

_TPU_TILE_WORDS = 256  # a TPU addresses host memory in whole tiles of 8 x 256 words

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A jitted function and the arrays that it is compiled for.

    Args:
        name: what it does, for messages.
        function: of `args`.
        args: arrays, abstractly.
        donate: places of the arguments that are donated.
        out_shardings: of the results.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]
    out_shardings: Any

    def traced(self) -> Any:
        """The function, traced for its arguments; it can be lowered for any platform.

        Arrays are typed by the memory that they lie in, as they are when a function is called. JAX takes a
        `ShapeDtypeStruct` on a single device for an array in device memory, whatever its sharding says.
        """
        options: dict[str, Any] = {"out_shardings": self.out_shardings, "donate_argnums": self.donate}
        if any(isinstance(arg.sharding, NamedSharding) for arg in jax.tree.leaves(self.args)):
            return jax.jit(self.function, **options).trace(*self.args)
        types = jax.tree.map(lambda arg: ShapedArray(arg.shape, arg.dtype, memory_space=_space(arg)), self.args)
        shardings = jax.tree.map(lambda arg: arg.sharding, self.args)
        return jax.jit(self.function, in_shardings=shardings, **options).trace(*types)

    def compiled(self) -> Callable[..., Any]:
        """Compiles it. What comes out takes arrays of equivalent shardings, too, and never compiles again."""
        return self.traced().lower().compile()


def _space(struct: jax.ShapeDtypeStruct) -> Any:
    on_host = struct.sharding is not None and struct.sharding.memory_kind == "pinned_host"
    return jax.memory.Space.Host if on_host else jax.memory.Space.Device


def compile_all(programs: Sequence[Program], *, show_progress: bool | None) -> dict[str, Callable[..., Any]]:
    """Compiles programs, by name; each is logged with the time that it took."""
    made = {}
    with progress_bar("compiling transfers", len(programs), show=show_progress) as done:
        for program in programs:
            start = time.perf_counter()
            made[program.name] = program.compiled()
            _LOG.info("compiled %s in %.2f s", program.name, time.perf_counter() - start)
            done(1)
    return made


def unit_shape(platform: str, unit_bytes: int) -> tuple[int, ...]:
    """Returns the shape of a unit of a staging or of a pinned pool, in 32-bit words."""
    words = unit_bytes // 4
    return (words // _TPU_TILE_WORDS, _TPU_TILE_WORDS) if platform == "tpu" else (words,)


def packing_programs(caches: RegisteredCaches, parts: DeviceParts, piece_units: int) -> tuple[Program, Program]:
    """Returns the programs that pack a group's chunks into the staging, and that unpack them from there.

    `pack` takes leaves, block ids `(max_chunks, blocks)`, count `(1,)` and staging `(piece_units, *unit_shape)`, and
    returns the staging; `unpack` takes staging, leaves, block ids and count, and returns the leaves and an array that
    is ready when they are. Ids, count and staging are what each device has.
    """
    group, platform = parts.group_idx, caches.platform
    static = {"units_per_chunk": parts.units_per_chunk, "stacked": parts.stacked, "platform": platform}

    def pack_part(leaves: Any, ids: Any, count: Any, staging: Any) -> Any:
        return pack(leaves, ids, count[0], staging, **static)

    def unpack_part(staging: Any, leaves: Any, ids: Any, count: Any) -> Any:
        return unpack(staging, leaves, ids, count[0], **static), count + 0

    device = caches.on_each_device()
    ids = of_each_device(caches, (piece_units // parts.units_per_chunk, parts.blocks), jnp.int32, device)
    count = of_each_device(caches, (1,), jnp.int32, device)
    staging = of_each_device(caches, (piece_units, *unit_shape(platform, parts.unit_bytes)), jnp.uint32, device)
    shardings = tuple(struct.sharding for struct in parts.structs)
    return (
        Program(
            f"pack of group {group}",
            on_each_device(pack_part, caches, (group, None, None, None), None),
            (parts.structs, ids, count, staging),
            (3,),
            device,
        ),
        Program(
            f"unpack of group {group}",
            on_each_device(unpack_part, caches, (None, group, None, None), (group, None)),
            (staging, parts.structs, ids, count),
            (1,),
            (shardings, device),
        ),
    )


def pool_programs(caches: RegisteredCaches, units: Units, num_units: int, piece_units: int) -> tuple[Program, Program]:
    """Returns the programs that copy units from the staging to a pinned pool, and back.

    Both take source, target (donated), ids in the source and in the target `(piece_units,)` and their count `(1,)`, and
    return the target and an array that is ready when it is.
    """
    platform = caches.platform

    def move(src: Any, dst: Any, src_ids: Any, dst_ids: Any, count: Any) -> Any:
        (moved,) = block_copy([src], src_ids, [dst], dst_ids, count[0], platform=platform)
        return moved, count + 0

    device = caches.on_each_device()
    shape = unit_shape(platform, units.unit_bytes // len(caches.devices))
    staging = of_each_device(caches, (piece_units, *shape), jnp.uint32, device)
    pool = of_each_device(caches, (num_units, *shape), jnp.uint32, caches.on_each_device("pinned_host"))
    ids = of_each_device(caches, (piece_units,), jnp.int32, device)
    count = of_each_device(caches, (1,), jnp.int32, device)
    function = on_each_device(move, caches, (None,) * 5, (None, None))
    return (
        Program("copy to the pool", function, (staging, pool, ids, ids, count), (1,), (pool.sharding, device)),
        Program("copy from the pool", function, (pool, staging, ids, ids, count), (1,), (device, device)),
    )


def new_pool_program(caches: RegisteredCaches, units: Units, num_units: int) -> Program:
    """Returns the program that makes a pinned pool, of whatever the memory holds.

    Zeros would be made on the device first: the compilers take as much device memory for them as the pool has. So would
    an array that the compiler has to split over devices by itself.
    """
    shape = unit_shape(caches.platform, units.unit_bytes // len(caches.devices))
    make = on_each_device(lambda: lax.empty((num_units, *shape), jnp.uint32), caches, (), None)
    return Program("a pinned pool", make, (), (), caches.on_each_device("pinned_host"))


def cutting_programs(caches: RegisteredCaches, unit: tuple[int, ...], piece_units: int, bucket: int) -> list[Program]:
    """Returns the programs that cut the first `bucket` units off the staging, and that put them into it."""
    device = caches.on_each_device()
    staging = of_each_device(caches, (piece_units, *unit), jnp.uint32, device)
    piece = of_each_device(caches, (bucket, *unit), jnp.uint32, device)
    cut = on_each_device(lambda staging: staging[:bucket] + 0, caches, (None,), None)
    put = on_each_device(lambda staging, piece: staging.at[:bucket].set(piece), caches, (None, None), None)
    return [
        Program(f"cut of {bucket} units", cut, (staging,), (), device),
        Program(f"put of {bucket} units", put, (staging, piece), (0,), device),
    ]


def of_each_device(
    caches: RegisteredCaches, shape: tuple[int, ...], dtype: Any, sharding: Sharding
) -> jax.ShapeDtypeStruct:
    """An array, abstractly, of which each device holds `shape`."""
    return jax.ShapeDtypeStruct((len(caches.devices) * shape[0], *shape[1:]), dtype, sharding=sharding)


def on_each_device(
    function: Callable[..., Any], caches: RegisteredCaches, inputs: tuple[int | None, ...], outputs: Any
) -> Callable[..., Any]:
    """Makes a function of one device's parts one of whole arrays.

    Args:
        function: what each device does, of arguments as `inputs` says.
        caches: the registered arrays.
        inputs: for each argument, the index of the group whose leaves it is, or `None` for an array whose first
            dimension is split evenly over the devices.
        outputs: the same of the results, one or a tuple.
    """
    if caches.mesh is None:
        return function

    def spec(argument: int | None) -> Any:
        if argument is None:
            return caches.over_all_axes
        return tuple(leaf.sharding.spec for leaf in caches.leaves_of(argument))  # pyright: ignore[reportAttributeAccessIssue]

    return jax.shard_map(
        function,
        mesh=caches.mesh,
        in_specs=tuple(spec(argument) for argument in inputs),
        out_specs=tuple(spec(result) for result in outputs) if isinstance(outputs, tuple) else spec(outputs),
        check_vma=False,
    )
