"""Compiles the programs of the transports for one TPU and prints, as JSON, what each compiled program does.

Run as `python -m tests.aot.tpu_transports TARGET`, see `tests.aot.children.Child`.
"""

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

import kvjax
from kvjax.memory.programs import Program
from kvjax.memory.registration import RegisteredCaches, registered
from tests.aot.compiled import program
from tests.aot.tpu import AXIS, abstract, mesh_of
from tests.aot.transports import (
    CASES,
    GEMMA,
    GIB,
    LAYOUTS,
    SMALL,
    Case,
    given_to,
    on_one,
    programs_of,
    split_over,
)


def caches_of(layout: kvjax.CacheLayout, target: str, num_devices: int, cache_bytes: int) -> RegisteredCaches:
    """Caches of so many bytes for each group on each device: split over heads, the latent replicated."""
    mesh = mesh_of(target, num_devices)
    caches = {}
    for group in layout.groups:
        for leaf in group.leaves:
            split = split_over(leaf.name, num_devices)
            num_blocks = cache_bytes * split // group.block_bytes
            if num_devices == 1:
                sharding = SingleDeviceSharding(mesh.devices.flat[0])
                array = jax.ShapeDtypeStruct((num_blocks, *leaf.block_shape), leaf.dtype, sharding=sharding)
            else:
                spec = P() if split == 1 else P(None, None, AXIS)
                array = abstract(mesh, (num_blocks, *leaf.block_shape), leaf.dtype, *spec)
            caches[leaf.name] = array
    return registered(layout, caches)


def compiled_case(made: Program, group_bytes: int, staging_bytes: int) -> Case:
    """Compiles one program."""
    compiled = program(made.traced().lower(lowering_platforms=("tpu",)).compile())
    pool_bytes, donated_bytes = given_to(made)
    return Case(compiled, group_bytes, pool_bytes, staging_bytes, donated_bytes)


def all_cases(target: str) -> dict[str, dict[str, Any]]:
    """All cases of a target, by name: layout, devices, bytes of each group's caches on a device, program."""
    found = {}
    for name, num_devices, transfer, cache_bytes in CASES:
        caches = caches_of(LAYOUTS[name], target, num_devices, cache_bytes)
        for label, made, held, staging in programs_of(caches, LAYOUTS[name], transfer):
            if held or cache_bytes == SMALL:  # what sees no cache is the same for all of them
                case = compiled_case(made, held, staging)
                found[f"{name} on {num_devices}, {cache_bytes // GIB} GiB, {transfer}: {label}"] = asdict(case)
    return found


def planted(target: str) -> dict[str, dict[str, Any]]:
    """Programs with a fault each, which the tests must see."""
    caches = caches_of(GEMMA, target, 1, SMALL)
    made = {label: (program, held, staging) for label, program, held, staging in programs_of(caches, GEMMA, "direct")}
    unpack, held, staging = made["unpack of group 0"]
    move, _, _ = made["copy to the pool"]
    pool, _, _ = made["a pinned pool"]

    def copies_caches(staging: Any, leaves: Any, ids: Any, count: Any) -> Any:
        return unpack.function(staging, leaves, ids, count), leaves  # who keeps the old cache has it copied

    def zeros() -> Any:
        return jax.numpy.zeros(move.args[1].shape, "uint32")

    faulty = {
        "the donation of a cache is dropped": (replace(unpack, donate=()), held, staging),
        "the donation of the pool is dropped": (replace(move, donate=()), 0, staging),
        "a cache is copied": (replace(unpack, function=copies_caches, out_shardings=None), held, staging),
        "a pool is made on the device": (replace(pool, function=zeros), 0, staging),
    }
    cases = {}
    for name, (program_, group_bytes, staging_bytes) in faulty.items():
        donated = unpack.args[1] if "cache" in name else [move.args[1]]
        case = compiled_case(program_, group_bytes, staging_bytes)
        cases[name] = asdict(replace(case, donated_bytes=sum(map(on_one, jax.tree.leaves(donated)))))
    return cases


if __name__ == "__main__":
    print(json.dumps((planted if sys.argv[2:] == ["planted"] else all_cases)(sys.argv[1])))
