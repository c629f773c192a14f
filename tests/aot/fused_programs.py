"""Compiles a decoder's step with fused transfers for one accelerator and prints, as JSON, what its schedule does.

Run as `python -m tests.aot.fused_programs TARGET [planted|lowered]`, see `tests.aot.children.Child`. `TARGET` is one of
`tests.aot.tpu.TARGETS` or `gpu`, which alone can be lowered only.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax import fused
from tests.aot import gpu, tpu
from tests.aot.overlap import TO_DEVICE, TO_HOST, Schedule, schedule
from tests.aot.tpu import AXIS, abstract
from tests.support.fused_step import GROUPS, LEAVES, Places, Sizes, step

# Caches larger than any on-chip memory, so that no compiler moves a whole one there.
SIZES = Sizes(
    num_layers=8,
    width=2048,
    heads=8,
    head_dim=128,
    tokens_per_block=16,
    num_blocks=8192,
    tokens=256,
    read_blocks={"full": 128, "sliding": 16},
    window_tokens=128,
    bucket=32,
    dtype=jnp.bfloat16,
)
PLANTS = ("late fetch", "settled at once", "no donation", "an old cache returned")
BOTH = (TO_DEVICE, TO_HOST)
_CACHES = 3  # place of the caches among the step's arguments


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the tests look at; bytes are those of one device.

    Args:
        alias_bytes: of arguments whose memory the results take.
        cache_bytes: of all caches.
        staging_bytes: of all rows that arrive and leave.
        temp_bytes: of temporaries.
        schedule: transfers and matrix products in the order of the schedule, and large copies.
    """

    alias_bytes: int
    cache_bytes: int
    staging_bytes: int
    temp_bytes: int
    schedule: Schedule

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Compiled":
        """The inverse of `dataclasses.asdict`."""
        fields: Any = data | {"schedule": Schedule.from_json(data["schedule"])}
        return cls(**fields)


def arguments(mesh: Mesh, sizes: Sizes, directions: tuple[str, ...] = BOTH) -> tuple[Any, ...]:
    """The arguments of `step`, to compile for; caches and rows are split over their heads."""
    arriving = sizes if TO_DEVICE in directions else replace(sizes, bucket=0)
    leaving = sizes if TO_HOST in directions else replace(sizes, bucket=0)
    array: Any = partial(abstract, mesh)
    int32 = jnp.int32
    weights = [
        {name: array(shape, sizes.dtype) for name, shape in sizes.weight_shapes().items()}
        for _ in range(sizes.num_layers)
    ]
    cache = array(sizes.cache_shape, sizes.dtype, None, None, AXIS, None)
    rows = array(arriving.rows_shape, sizes.dtype, None, None, None, AXIS, None, kind="pinned_host")
    tokens = array((sizes.tokens,), int32)
    reads = {group: array((sizes.read_blocks[group],), int32) for group in GROUPS}
    targets, finished = array((arriving.bucket,), int32), array((leaving.bucket,), int32)
    return (
        weights,
        array((sizes.tokens, sizes.width), sizes.dtype),
        tokens,
        [dict.fromkeys(LEAVES, cache) for _ in range(sizes.num_layers)],
        {group: Places(tokens, tokens, reads[group], reads[group]) for group in GROUPS},
        dict.fromkeys(GROUPS, fused.Arriving(dict.fromkeys(LEAVES, rows), targets, array((), int32))),
        dict.fromkeys(GROUPS, finished),
    )


def compiled_step(
    platform: str,
    mesh: Mesh,
    sizes: Sizes,
    plant: str | None = None,
    directions: tuple[str, ...] = BOTH,
    fetch_ahead: int | None = None,
) -> Compiled:
    """Compiles the step, as it is or with one of `PLANTS` in it, and reads the result."""
    function: Callable[..., Any] = partial(step, sizes, platform=platform, fetch_ahead=fetch_ahead)
    if plant == "late fetch":
        function = partial(function, fetch_ahead=0)
    if plant == "settled at once":
        function = partial(function, settle_after=0)
    if plant == "an old cache returned":
        function = _returning_an_old_cache(function)
    donated = () if plant == "no donation" else _CACHES
    text, alias_bytes, temp_bytes = _compile(platform, mesh, function, arguments(mesh, sizes, directions), donated)
    item = jnp.dtype(sizes.dtype).itemsize
    leaf_bytes = math.prod(sizes.cache_shape) * item // mesh.size
    arriving_bytes = len(GROUPS) * len(LEAVES) * math.prod(sizes.rows_shape) * item // mesh.size
    return Compiled(
        alias_bytes=alias_bytes,
        cache_bytes=leaf_bytes * len(LEAVES) * sizes.num_layers,
        staging_bytes=len(directions) * arriving_bytes,
        temp_bytes=temp_bytes,
        schedule=schedule(text, num_layers=sizes.num_layers, cache_bytes=leaf_bytes),
    )


def _returning_an_old_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    def step_and_old_cache(*args: Any) -> Any:
        return function(*args), args[_CACHES][3]["k"]

    return step_and_old_cache


def _compile(
    platform: str, mesh: Mesh, function: Callable[..., Any], args: tuple[Any, ...], donated: Any
) -> tuple[str, int, int]:
    """Returns the final text, and the bytes of aliased arguments and of temporaries."""
    memory: Any
    if platform == "gpu":
        lowered = gpu.lower_for_gpu(function, *args, debug_info=True, donate_argnums=donated)
        compiled = gpu.executable(lowered, mesh.size)
        memory = compiled.get_compiled_memory_stats()
        return compiled.hlo_modules()[0].to_string(), memory.alias_size_in_bytes, memory.temp_size_in_bytes
    traced = jax.jit(function, donate_argnums=donated).trace(*args)
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    memory = compiled.memory_analysis()
    return compiled.as_text() or "", memory.alias_size_in_bytes, memory.temp_size_in_bytes


def lowered_for_gpu() -> dict[str, int]:
    """Counts what the lowered step holds: placements in either memory, and donated arguments that a result re-uses."""
    text = gpu.lower_for_gpu(
        partial(step, SIZES, platform="gpu"), *arguments(gpu.mesh_of(1), SIZES), donate_argnums=_CACHES
    )
    calls = [line for line in text.splitlines() if "annotate_device_placement" in line]
    return {
        TO_HOST: sum('"pinned_host"' in line for line in calls),
        TO_DEVICE: sum('"device"' in line for line in calls),
        "aliased": text.count("tf.aliasing_output"),
    }


def compiled_for(target: str) -> dict[str, Compiled]:
    """What the tests need of one target."""
    return compiled_for_gpu() if target == "gpu" else compiled_for_tpu(target)


def compiled_for_tpu(target: str) -> dict[str, Compiled]:
    """What the tests need of one TPU."""
    one, larger = tpu.mesh_of(target), replace(SIZES, num_blocks=2 * SIZES.num_blocks)
    return {
        "one device": compiled_step("tpu", one, SIZES),
        "twice the blocks": compiled_step("tpu", one, larger),
        "four devices": compiled_step("tpu", tpu.mesh_of(target, 4), larger),
    }


def compiled_for_gpu() -> dict[str, Compiled]:
    """What the tests need of an H200."""
    mesh, larger = gpu.mesh_of(1), replace(SIZES, num_blocks=2 * SIZES.num_blocks)
    return {
        "both ways": compiled_step("gpu", mesh, SIZES),
        "twice the blocks": compiled_step("gpu", mesh, larger),
        TO_DEVICE: compiled_step("gpu", mesh, SIZES, directions=(TO_DEVICE,), fetch_ahead=1),
        TO_HOST: compiled_step("gpu", mesh, SIZES, directions=(TO_HOST,)),
    }


def planted(target: str) -> dict[str, Compiled]:
    """The step with each of `PLANTS` in it."""
    platform, mesh = ("gpu", gpu.mesh_of(1)) if target == "gpu" else ("tpu", tpu.mesh_of(target))
    return {plant: compiled_step(platform, mesh, SIZES, plant) for plant in PLANTS}


def main(target: str, what: str = "compiled") -> None:
    """Prints what a target makes of the step, or of the steps with a plant, or what is lowered for it."""
    if what == "lowered":
        found: dict[str, Any] = lowered_for_gpu()
    else:
        compiled = planted(target) if what == "planted" else compiled_for(target)
        found = {name: asdict(one) for name, one in compiled.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
