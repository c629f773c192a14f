"""Lowers or compiles the kernels for a CUDA GPU and prints, as JSON, what each program does.

Run as `python -m tests.aot.gpu_kernels lower|compile|plant|ptx NUM_DEVICES`, see
`tests.aot.children.Child`.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import pallas_kernels
from pallas_kernels.block_copy import mosaic_gpu as block_copy_gpu
from tests.aot.compiled import Program
from tests.aot.gpu import compile_for_gpu, lower_for_gpu, mesh_of
from tests.aot.groups import GROUPS, Leaf, bytes_on_one
from tests.aot.tpu import AXIS, abstract
from tests.aot.tpu_kernels import per_device

GIB = 2**30
UNIT_WORDS = 16384
STAGING_UNITS = 1024
BLOCKS_PER_CHUNK = 2
LENGTH = 512
LARGE_BYTES = 2**20
ROW_BYTES = 64 * 8 * 2 * 128 * 2
ON_GPU = {"platform": "gpu", "implementation": "mosaic_gpu"}


@dataclass(frozen=True, slots=True)
class Call:
    """A function and what it is compiled for.

    Args:
        function: what to compile; its result is like its donated argument.
        args: its arguments.
        donated: place of the donated argument.
        temp_bytes: temporary memory that it needs on each device.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: int
    temp_bytes: int = 0

    def lower(self, mesh: Mesh, *, donate: bool = True) -> str:
        """StableHLO of the function on each device's shards."""
        result = self.args[self.donated]
        return lower_for_gpu(
            per_device(mesh, self.function, self.args, result),
            *self.args,
            donate_argnums=self.donated if donate else (),
            out_shardings=jax.tree.map(lambda array: array.sharding, result),
        )


@dataclass(frozen=True, slots=True)
class Lowered:
    """What StableHLO says.

    Args:
        donated: number of donated arrays.
        aliased: number of arguments whose memory a result re-uses.
        updated: number of results of kernels that re-use the memory of an operand.
        ops: the operations.
    """

    donated: int
    aliased: int
    updated: int
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiled program does on each device.

    Args:
        donated_bytes: donated bytes in device memory.
        host_donated_bytes: donated bytes in host memory.
        temp_bytes: temporary memory that it needs.
        large: opcodes of what makes arrays larger than 1 MiB and than that memory.
        program: memory and copies.
    """

    donated_bytes: int
    host_donated_bytes: int
    temp_bytes: int
    large: tuple[str, ...]
    program: Program

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Compiled":
        """The inverse of `asdict`, from JSON."""
        return cls(**(data | {"large": tuple(data["large"]), "program": Program.from_json(data["program"])}))


def lowered(call: Call, mesh: Mesh, **options: Any) -> Lowered:
    """Lowers a call and reads the text."""
    text = call.lower(mesh, **options)
    return Lowered(
        donated=len(jax.tree.leaves(call.args[call.donated])),
        aliased=len(re.findall(r"tf\.aliasing_output|jax\.buffer_donor", text)),
        updated=text.count("#stablehlo.output_operand_alias<"),
        ops=tuple(sorted(set(re.findall(r"= \"?stablehlo\.(\w+)", text)))),
    )


def compiled(call: Call, mesh: Mesh, **options: Any) -> Compiled:
    """Compiles a call and reads the program."""
    text = call.lower(mesh, **options)
    program, large = compile_for_gpu(text, mesh.size, large_bytes=max(call.temp_bytes, LARGE_BYTES))
    sizes = {True: 0, False: 0}
    for array in jax.tree.leaves(call.args[call.donated]):
        sizes[array.sharding.memory_kind == "pinned_host"] += bytes_on_one(array)
    return Compiled(sizes[False], sizes[True], call.temp_bytes, tuple(large), program)


def with_kind(arrays: Any, kind: str) -> Any:
    """The arrays in another memory."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding.with_memory_kind(kind)),
        arrays,
    )


def packing_calls(mesh: Mesh, group: tuple[Leaf, ...], cache_bytes: int) -> Iterator[tuple[str, Call]]:
    """`pack` and `unpack` of one group, with each device's staging in device and in host memory."""
    num_blocks = cache_bytes // sum(leaf.block_bytes for leaf in group)
    leaves = tuple(leaf.of(mesh, num_blocks) for leaf in group)
    chunk_bytes = BLOCKS_PER_CHUNK * sum(bytes_on_one(leaf) // num_blocks for leaf in leaves)
    per_chunk = -(-chunk_bytes // (4 * UNIT_WORDS))
    static = {"units_per_chunk": per_chunk, "stacked": tuple(leaf.layers is not None for leaf in group), **ON_GPU}
    ids, count = (
        abstract(mesh, (STAGING_UNITS // per_chunk, BLOCKS_PER_CHUNK), jnp.int32),
        abstract(mesh, (), jnp.int32),
    )
    for kind in ("device", "pinned_host"):
        staging = abstract(mesh, (STAGING_UNITS * mesh.size, UNIT_WORDS), jnp.uint32, AXIS, kind=kind)
        yield f"pack to {kind}", Call(partial(pallas_kernels.pack, **static), (leaves, ids, count, staging), 3)
        yield f"unpack from {kind}", Call(partial(pallas_kernels.unpack, **static), (staging, leaves, ids, count), 1)


def copying_calls(mesh: Mesh, leaves: Any, others: Any) -> Iterator[tuple[str, Call]]:
    """`block_copy` of `leaves` to `others`, between all memories."""
    ids, count = abstract(mesh, (LENGTH,), jnp.int32), abstract(mesh, (), jnp.int32)
    copy = partial(pallas_kernels.block_copy, **ON_GPU)
    for of, to in (("device", "device"), ("device", "pinned_host"), ("pinned_host", "device")):
        yield f"copy {of} to {to}", Call(copy, (with_kind(leaves, of), ids, with_kind(others, to), ids, count), 2)


def copying_within(mesh: Mesh, leaves: Any) -> Call:
    """`block_copy` from leaves to themselves."""
    ids, count = abstract(mesh, (LENGTH,), jnp.int32), abstract(mesh, (), jnp.int32)

    def within(leaves: Any, src_ids: Any, dst_ids: Any, count: Any) -> Any:
        return pallas_kernels.block_copy(leaves, src_ids, leaves, dst_ids, count, **ON_GPU)

    taken = sum(bytes_on_one(leaf) // leaf.shape[0] * LENGTH for leaf in leaves)
    return Call(within, (leaves, ids, ids, count), 0, taken)


def calls(mesh: Mesh, *gibs: int) -> Iterator[tuple[str, Call]]:
    """Calls with caches and pools of so many GiB, by name."""
    for gib in gibs:
        for name, group in GROUPS.items():
            for op, call in packing_calls(mesh, group, gib * GIB):
                yield f"{op}: {name}, {gib} GiB", call
            flat = tuple(leaf for leaf in group if leaf.layers is None)
            if not flat:
                continue
            num_blocks = gib * GIB // sum(leaf.block_bytes for leaf in flat)
            leaves, others = (tuple(leaf.of(mesh, n) for leaf in flat) for n in (num_blocks // 2, num_blocks))
            for op, call in copying_calls(mesh, leaves, others):
                yield f"{op}: {name}, {gib} GiB", call
            yield f"copy within: {name}, {gib} GiB", copying_within(mesh, others)
        units = (abstract(mesh, (STAGING_UNITS * mesh.size, UNIT_WORDS), jnp.uint32, AXIS),)
        pool = (abstract(mesh, (mesh.size * gib * GIB // (4 * UNIT_WORDS), UNIT_WORDS), jnp.uint32, AXIS),)
        for op, call in copying_calls(mesh, units, pool):
            yield f"{op}: units to a pool, {gib} GiB", call
        for op, call in copying_calls(mesh, pool, units):
            yield f"{op}: a pool to units, {gib} GiB", call


def planted(mesh: Mesh) -> dict[str, Any]:
    """The facts of programs with a mistake in them."""
    leaves = tuple(leaf.of(mesh, 4096) for leaf in GROUPS["RPA v3, bf16"])
    good = dict(copying_calls(mesh, leaves, leaves))["copy device to device"]

    def reads_what_it_writes(src: Any, src_ids: Any, dst: Any, dst_ids: Any, count: Any) -> Any:
        return tuple(block_copy_gpu._copy_leaves(dst, src_ids, dst, dst_ids, count, None))

    def touches_the_cache(src: Any, src_ids: Any, dst: Any, dst_ids: Any, count: Any) -> Any:
        return good.function(src, src_ids, tuple(-leaf for leaf in dst), dst_ids, count)

    found = {"donation dropped": compiled(good, mesh, donate=False)}
    for function in (reads_what_it_writes, touches_the_cache):
        found[function.__name__.replace("_", " ")] = compiled(replace(good, function=function), mesh)
    return {name: asdict(facts) for name, facts in found.items()}


def ptx(mesh: Mesh) -> dict[str, str]:
    """The PTX of `block_copy` between two bf16 caches of 8 GiB."""
    leaves = (Leaf((64, 8, 2, 128), "bfloat16").of(mesh, 8 * GIB // ROW_BYTES),)
    with TemporaryDirectory() as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": folder}
        compiled(dict(copying_calls(mesh, leaves, leaves))["copy device to pinned_host"], mesh)
        return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).glob("*.ptx")}


def main(mode: str, num_devices: int) -> None:
    jax.config.update("jax_num_cpu_devices", num_devices)
    mesh = mesh_of(num_devices)
    if mode == "ptx":
        facts: dict[str, Any] = ptx(mesh)
    elif mode == "plant":
        facts = planted(mesh)
    elif mode == "lower":
        facts = {name: asdict(lowered(call, mesh)) for name, call in calls(mesh, 8)}
        facts["donation dropped"] = asdict(lowered(next(calls(mesh, 8))[1], mesh, donate=False))
    else:
        gibs = (1, 8) if mesh.size == 1 else (8,)
        facts = {name: asdict(compiled(call, mesh)) for name, call in calls(mesh, *gibs)}
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
