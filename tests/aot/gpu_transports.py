"""Lowers the programs of the transports for CUDA, or compiles them to sm_90a code, and prints what they do as JSON.

Run as `python -m tests.aot.gpu_transports lower|compile NUM_DEVICES`, see `tests.aot.children.Child`.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax.memory.programs import Program
from kvjax.memory.registration import RegisteredCaches, registered
from tests.aot.gpu import compile_for_gpu, lower_for_gpu, mesh_of
from tests.aot.tpu import AXIS, abstract
from tests.aot.transports import CASES, GIB, LAYOUTS, SMALL, Case, given_to, programs_of, split_over


def caches_of(layout: kvjax.CacheLayout, num_devices: int, cache_bytes: int) -> RegisteredCaches:
    """Caches of so many bytes for each group on each device: split over heads, the latent replicated."""
    mesh = mesh_of(num_devices)
    caches = {}
    for group in layout.groups:
        for leaf in group.leaves:
            split = split_over(leaf.name, num_devices)
            num_blocks = cache_bytes * split // group.block_bytes
            spec = P() if split == 1 else P(None, None, AXIS)
            caches[leaf.name] = abstract(mesh, (num_blocks, *leaf.block_shape), leaf.dtype, *spec)
    devices = (SimpleNamespace(platform="gpu"),) * num_devices  # the mesh has CPU devices that stand for them
    return replace(registered(layout, caches), devices=devices, mesh=mesh)


def lowered_cases(num_devices: int) -> Iterator[tuple[str, Program, str, int, int]]:
    """Name, program, StableHLO, bytes of its group's caches and of the staging, of all programs."""
    for name, devices, transfer, cache_bytes in CASES:
        if devices != num_devices:
            continue
        for label, made, held, staging in programs_of(
            caches_of(LAYOUTS[name], devices, cache_bytes), LAYOUTS[name], transfer
        ):
            if held or cache_bytes == SMALL:
                text = lower_for_gpu(
                    made.function, *made.args, donate_argnums=made.donate, out_shardings=made.out_shardings
                )
                yield f"{name} on {devices}, {cache_bytes // GIB} GiB, {transfer}: {label}", made, text, held, staging


def main(how: str, num_devices: int) -> dict[str, Any]:
    """All cases of so many devices, by name: the number of kernels, or what the compiled program does."""
    found: dict[str, Any] = {}
    for name, made, text, held, staging in lowered_cases(num_devices):
        if how == "lower":
            found[name] = {
                "kernels": text.count("mosaic_gpu"),
                "aliased": text.count("tf.aliasing_output") + text.count("jax.buffer_donor"),
                "donated": sum(len(jax.tree.leaves(made.args[place])) for place in made.donate),
            }
            continue
        program, _ = compile_for_gpu(text, num_devices)
        pool_bytes, donated_bytes = given_to(made)
        found[name] = asdict(Case(program, held, pool_bytes, staging, donated_bytes))
    return found


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
