"""Compiles the kernels for one TPU and prints, as JSON, what each compiled program does.

Run as `python -m tests.aot.tpu_kernels TARGET`, see `tests.aot.children.Child`.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import pallas_kernels
from tests.aot.compiled import Program
from tests.aot.groups import GROUPS, RECURRENT, SHORT_CONVOLUTION, Leaf, bytes_on_one
from tests.aot.tpu import AXIS, abstract, compile_for_tpu, mesh_of

GIB = 2**30
UNIT_SHAPE = (64, 256)
UNIT_BYTES = 4 * math.prod(UNIT_SHAPE)
STAGING_UNITS = 1024
POOL_UNITS = {"1 GiB": 16384, "4 GiB": 65536}
BLOCKS_PER_CHUNK = 2
NUM_IDS = 256
TPU = {"platform": "tpu", "implementation": "mosaic_tpu"}
COPY = partial(pallas_kernels.block_copy, **TPU)


@dataclass(frozen=True, slots=True)
class Case:
    """A compiled program and what it was given, on each device.

    Args:
        donated_bytes: donated bytes in device memory.
        host_donated_bytes: donated bytes in host memory.
        leaf_bytes: the smallest cache leaf, or the pool.
        staging_bytes: bytes that move at most.
        program: what came out.
    """

    donated_bytes: int
    host_donated_bytes: int
    leaf_bytes: int
    staging_bytes: int
    program: Program

    def to_json(self) -> dict[str, Any]:
        """The case as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Case":
        """The inverse of `to_json`."""
        return cls(**{**data, "program": Program.from_json(data["program"])})


def blocks_of(group: tuple[Leaf, ...], cache_bytes: int) -> int:
    """Blocks of a cache, a whole number of tiles of 8, so that a leaf in any layout is its elements and no padding."""
    return cache_bytes // sum(leaf.block_bytes for leaf in group) // 8 * 8


def per_device(mesh: Mesh, function: Callable[..., Any], args: Any, result: Any) -> Callable[..., Any]:
    """The function on each device's shards; on a mesh of one device, the function."""
    if mesh.size == 1:
        return function
    specs = jax.tree.map(lambda array: array.sharding.spec, (args, result))
    return jax.shard_map(function, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def compiled_case(
    mesh: Mesh,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    donated: int,
    leaf_bytes: int,
    staging_bytes: int,
    *,
    donate: bool = True,
) -> Case:
    """Compiles a function whose result is like its argument `donated`."""
    result = args[donated]
    shardings = jax.tree.map(lambda array: array.sharding, result)
    program = compile_for_tpu(
        per_device(mesh, function, args, result),
        *args,
        donate_argnums=(donated,) if donate else (),
        out_shardings=shardings,
    )
    sizes = {"device": 0, "pinned_host": 0}
    for array in jax.tree.leaves(result):
        sizes[array.sharding.memory_kind] += bytes_on_one(array)
    return Case(sizes["device"], sizes["pinned_host"], leaf_bytes, staging_bytes, program)


def packing_case(unpacks: bool, group: tuple[Leaf, ...], cache_bytes: int, mesh: Mesh) -> Case:
    """`pack` or `unpack` of one group; each device has a staging of its own."""
    num_blocks = blocks_of(group, cache_bytes)
    leaves = tuple(leaf.of(mesh, num_blocks) for leaf in group)
    block_bytes = [bytes_on_one(leaf) // num_blocks for leaf in leaves]
    per_chunk = -(-BLOCKS_PER_CHUNK * sum(block_bytes) // UNIT_BYTES)
    ids = abstract(mesh, (STAGING_UNITS // per_chunk, BLOCKS_PER_CHUNK), jnp.int32)
    count = abstract(mesh, (), jnp.int32)
    staging = abstract(mesh, (STAGING_UNITS * mesh.size, *UNIT_SHAPE), jnp.uint32, AXIS)
    static = {"units_per_chunk": per_chunk, "stacked": tuple(leaf.layers is not None for leaf in group)} | TPU
    bounds = (num_blocks * min(block_bytes), STAGING_UNITS * UNIT_BYTES)
    if unpacks:
        unpack = partial(pallas_kernels.unpack, **static)
        return compiled_case(mesh, unpack, (staging, leaves, ids, count), 1, *bounds)
    pack = partial(pallas_kernels.pack, **static)
    return compiled_case(mesh, pack, (leaves, ids, count, staging), 3, *bounds)


def copy_case(group: tuple[Leaf, ...], cache_bytes: int, mesh: Mesh, *, donate: bool = True) -> Case:
    """`block_copy` from a few blocks to a cache."""
    num_blocks = blocks_of(group, cache_bytes)
    src, dst = (tuple(leaf.of(mesh, n) for leaf in group) for n in (NUM_IDS, num_blocks))
    ids, count = abstract(mesh, (NUM_IDS,), jnp.int32), abstract(mesh, (), jnp.int32)
    bounds = (min(map(bytes_on_one, dst)), sum(map(bytes_on_one, src)))
    return compiled_case(mesh, COPY, (src, ids, dst, ids, count), 2, *bounds, donate=donate)


def copy_within_case(group: tuple[Leaf, ...], cache_bytes: int, mesh: Mesh) -> Case:
    """`block_copy` from a cache to itself."""
    num_blocks = blocks_of(group, cache_bytes)
    cache = tuple(leaf.of(mesh, num_blocks) for leaf in group)
    ids, count = abstract(mesh, (NUM_IDS,), jnp.int32), abstract(mesh, (), jnp.int32)
    leaf_bytes = [bytes_on_one(leaf) for leaf in cache]
    bounds = (min(leaf_bytes), sum(leaf_bytes) // num_blocks * NUM_IDS)

    def copy_within(cache: Any, src_ids: Any, dst_ids: Any, count: Any) -> Any:
        return COPY(cache, src_ids, cache, dst_ids, count)

    return compiled_case(mesh, copy_within, (cache, ids, ids, count), 0, *bounds)


def host_case(loads: bool, pool_units: int, mesh: Mesh) -> Case:
    """`block_copy` between the staging and the host pool; each device has units of its own."""
    staging = abstract(mesh, (STAGING_UNITS * mesh.size, *UNIT_SHAPE), jnp.uint32, AXIS)
    pool = abstract(mesh, (pool_units * mesh.size, *UNIT_SHAPE), jnp.uint32, AXIS, kind="pinned_host")
    ids, count = abstract(mesh, (STAGING_UNITS,), jnp.int32), abstract(mesh, (), jnp.int32)
    src, dst = (pool, staging) if loads else (staging, pool)
    bounds = (bytes_on_one(pool), bytes_on_one(staging))
    return compiled_case(mesh, COPY, ((src,), ids, (dst,), ids, count), 2, *bounds)


def mixed_case(mesh: Mesh) -> Case:
    """`block_copy` of several leaves between device and host memory, and within the device."""
    few, many = ((n, *UNIT_SHAPE) for n in (NUM_IDS, POOL_UNITS["1 GiB"]))
    device, host = (abstract(mesh, many, jnp.uint32, kind=kind) for kind in ("device", "pinned_host"))
    staging = abstract(mesh, few, jnp.uint32)
    ids, count = abstract(mesh, (NUM_IDS,), jnp.int32), abstract(mesh, (), jnp.int32)
    src, dst = (staging, host, staging, host, staging), (host, device, device, device, host)
    return compiled_case(mesh, COPY, (src, ids, dst, ids, count), 2, bytes_on_one(host), bytes_on_one(staging))


def read_after_copy_case(group: tuple[Leaf, ...], cache_bytes: int, mesh: Mesh) -> Case:
    """A mistake: the cache as it was before the copy is read after it, so that it has to be kept."""
    num_blocks = blocks_of(group, cache_bytes)
    src, dst = (tuple(leaf.of(mesh, n) for leaf in group) for n in (NUM_IDS, num_blocks))
    ids, count = abstract(mesh, (NUM_IDS,), jnp.int32), abstract(mesh, (), jnp.int32)
    bounds = (min(map(bytes_on_one, dst)), sum(map(bytes_on_one, src)))

    def copy_twice(src: Any, ids: Any, dst: Any, count: Any) -> Any:
        return COPY(COPY(src, ids, dst, ids, count), ids, dst, ids[::-1], count)

    return compiled_case(mesh, copy_twice, (src, ids, dst, count), 2, *bounds)


SMALL, LARGE = GIB, 8 * GIB
BF16 = "RPA v3, bf16"
PACKINGS: dict[str, Callable[..., Case]] = {
    "pack": partial(packing_case, False),
    "unpack": partial(packing_case, True),
}
KERNELS: dict[str, Callable[..., Case]] = {"copy": copy_case, "copy within": copy_within_case} | PACKINGS
# `block_copy` takes no stacked leaves, and every leaf by itself; XLA takes long over those of a short convolution.
COPIED = [
    name
    for name, group in GROUPS.items()
    if name not in (RECURRENT, SHORT_CONVOLUTION) and all(leaf.layers is None for leaf in group)
]
ON_ONE_DEVICE = [
    *product(("copy", "copy within"), COPIED),
    ("copy", SHORT_CONVOLUTION),
    ("copy within", RECURRENT),
    *product(PACKINGS, GROUPS),
]
ON_FOUR_DEVICES = [*product(KERNELS, (BF16, "RPA v3, fp8", "MLA, bf16")), *product(PACKINGS, (RECURRENT,))]
# With leaves that a kernel reaches, and with leaves that XLA gathers and scatters. Both are larger than the memory on
# a chip at either size: the compiler takes smaller leaves there, and then has less of it for temporaries.
COMPARED_IN_SIZE = [*product(KERNELS, (BF16,)), *product(("copy", "pack", "unpack"), (SHORT_CONVOLUTION,))]


def kernel_case(name: str, group: str, cache_bytes: int, num_devices: int = 1) -> str:
    """The name of a kernel's case."""
    return f"{name}, {group}, {cache_bytes // GIB} GiB, {num_devices} devices"


# Name of the case: devices, and what compiles it.
CASES: dict[str, tuple[int, Callable[[Mesh], Case]]] = {
    **{
        f"{name}, pool of {size}, {n} devices": (n, partial(host_case, loads, units))
        for n in (1, 4)
        for size, units in POOL_UNITS.items()
        for name, loads in (("store", False), ("load", True))
    },
    **{
        kernel_case(name, group, cache_bytes, n): (n, partial(KERNELS[name], GROUPS[group], cache_bytes))
        for kernels, cache_bytes, n in (
            (ON_ONE_DEVICE, LARGE, 1),
            (COMPARED_IN_SIZE, SMALL, 1),
            (ON_FOUR_DEVICES, LARGE, 4),
        )
        for name, group in kernels
    },
    "copy, leaves in both memories": (1, mixed_case),
}
MISTAKES: dict[str, tuple[int, Callable[[Mesh], Case]]] = {
    "nothing donated": (1, partial(copy_case, GROUPS[BF16], SMALL, donate=False)),
    "read after the copy": (1, partial(read_after_copy_case, GROUPS[BF16], SMALL)),
}


# Leaves of every kind of padding: `(128, 2, rows, lanes)`.
LEAVES = [
    jax.ShapeDtypeStruct((128, 2, rows, lanes), jnp.dtype(dtype))
    for dtype in ("float32", "bfloat16", "uint16", "float8_e4m3fn", "int8")
    for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32, 40)
    for lanes in (64, 128, 192, 256, 640)
]


def row_major(target: str) -> list[bool]:
    """For each of `LEAVES`, whether the compiler keeps it in row-major order."""
    mesh = mesh_of(target)
    leaves = [abstract(mesh, leaf.shape, leaf.dtype) for leaf in LEAVES]
    lowered = jax.jit(lambda *_: 0, keep_unused=True).trace(*leaves).lower(lowering_platforms=("tpu",))
    layouts = [array.layout.major_to_minor for array in lowered.compile().input_formats[0]]
    return [layout == tuple(range(len(layout))) for layout in layouts]


def report(target: str) -> dict[str, Any]:
    """Every case of a target, by name, as JSON; of one that does not compile, the compiler's words."""
    found: dict[str, Any] = {"row major": row_major(target)}
    for name, (num_devices, compile_case) in (CASES | MISTAKES).items():
        try:
            found[name] = compile_case(mesh_of(target, num_devices)).to_json()
        except jax.errors.JaxRuntimeError as refusal:
            found[name] = str(refusal)[:2000]
    return found


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1])))
