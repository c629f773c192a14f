"""The transports' programs as compile tests see them: layouts, cases, and what is wrong with a compiled program."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

import kvjax
from kvjax.memory import direct
from kvjax.memory.device_parts import DeviceParts
from kvjax.memory.programs import (
    Program,
    cutting_programs,
    new_pool_program,
    packing_programs,
    pool_programs,
    unit_shape,
)
from kvjax.memory.registration import RegisteredCaches
from kvjax.packing import GRANULE_BYTES, Units, cut_into_units, unit_bytes
from tests.aot.compiled import HOST
from tests.aot.compiled import Program as Compiled

GIB = 2**30
STAGING_BYTES = 16 * 2**20
POOL_BYTES = 4 * GIB
SMALL, LARGE = GIB, 8 * GIB

# Ragged paged attention v3 keeps K and V of a block as (tokens, 2 * heads / p, p, head_dim), p elements to a word.
GEMMA = kvjax.CacheLayout(
    [
        kvjax.GroupSpec("full", kvjax.FullAttention(), 32, (kvjax.LeafSpec("full", (32, 8, 2, 128), "bfloat16"),)),
        kvjax.GroupSpec(
            "local",
            kvjax.SlidingWindow(1024),
            16,
            tuple(kvjax.LeafSpec(f"local{n}", (16, 8, 2, 128), "bfloat16") for n in range(3)),
        ),
    ]
)
# A latent is the same on every device of a tensor-parallel mesh.
MLA = kvjax.CacheLayout(
    [kvjax.GroupSpec("mla", kvjax.FullAttention(), 64, (kvjax.LeafSpec("latent", (32, 2, 640), "bfloat16"),))]
)
LAYOUTS = {"gemma": GEMMA, "mla": MLA}
LARGEST_TEMPORARY = 4  # stagings

# Layout, devices, transport, bytes of each group's caches on a device.
CASES = (
    ("gemma", 1, "direct", SMALL),
    ("gemma", 1, "direct", LARGE),
    ("gemma", 1, "staged", SMALL),
    ("gemma", 4, "direct", SMALL),
    ("gemma", 4, "staged", SMALL),
    ("gemma", 4, "staged", LARGE),
    ("mla", 1, "direct", SMALL),
    ("mla", 4, "staged", SMALL),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A compiled program, and the bytes on one device of what it was given.

    Args:
        program: what it does.
        cache_bytes: of the leaves of its group; 0 if it sees none.
        pool_bytes: of the host pool; 0 if it does not see it.
        staging_bytes: of one staging.
        donated_bytes: of what is donated.
    """

    program: Compiled
    cache_bytes: int
    pool_bytes: int
    staging_bytes: int
    donated_bytes: int


def on_one(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device."""
    return int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize  # pyright: ignore


def split_over(leaf_name: str, num_devices: int) -> int:
    """Over how many of the devices a leaf is split: a latent is replicated."""
    return 1 if leaf_name == "latent" else num_devices


def programs_of(
    caches: RegisteredCaches, layout: kvjax.CacheLayout, transfer: str
) -> Iterator[tuple[str, Program, int, int]]:
    """Name, program, bytes of its group's caches and of the staging, of all programs of a transport."""
    chunking = kvjax.resolve_chunking(layout, blocks_per_chunk=2)
    of_devices = len(caches.devices) if transfer == "direct" else 1
    units = cut_into_units(chunking, unit_bytes(chunking, GRANULE_BYTES[caches.platform] * of_devices))
    unit = units.unit_bytes // of_devices
    piece_units = STAGING_BYTES // unit
    staging_bytes = piece_units * unit
    assert transfer == "staged" or direct.refusal(caches, units, POOL_BYTES // units.unit_bytes) is None
    for g in layout.cached:
        parts = DeviceParts(caches, chunking, units, g, of_devices=of_devices)
        held = sum(on_one(struct) for struct in parts.structs)
        for made in packing_programs(caches, parts, piece_units):
            yield made.name, made, held, staging_bytes
    for made in _others(transfer, caches, units, piece_units):
        yield made.name, made, 0, staging_bytes


def _others(transfer: str, caches: RegisteredCaches, units: Units, piece_units: int) -> list[Program]:
    if transfer == "staged":
        return cutting_programs(caches, unit_shape(caches.platform, units.unit_bytes), piece_units, piece_units // 4)
    num_units = POOL_BYTES // units.unit_bytes
    return [*pool_programs(caches, units, num_units, piece_units), new_pool_program(caches, units, num_units)]


def given_to(made: Program) -> tuple[int, int]:
    """Bytes on one device of what a program is given in host memory, and of what is donated to it."""
    donated = [leaf for place in made.donate for leaf in jax.tree.leaves(made.args[place])]
    on_host = [leaf for leaf in jax.tree.leaves(made.args) if leaf.sharding.memory_kind == "pinned_host"]
    return sum(map(on_one, on_host)), sum(map(on_one, donated))


def faults(case: Case) -> list[str]:
    """Everything that is wrong with a compiled program."""
    made, found = case.program, []
    aliased = made.alias_bytes + made.host_alias_bytes
    if aliased < case.donated_bytes:
        found.append(f"{aliased} of {case.donated_bytes} donated bytes are used again")
    if made.temp_bytes > LARGEST_TEMPORARY * case.staging_bytes:
        found.append(f"{made.temp_bytes} bytes of temporaries")
    if made.host_temp_bytes:
        found.append(f"{made.host_temp_bytes} bytes of temporaries on the host")
    limit = min(size for size in (case.cache_bytes, case.pool_bytes, LARGEST_TEMPORARY * case.staging_bytes) if size)
    found += [f"a copy of {copy.target.num_bytes} bytes: {copy.name}" for copy in made.copies_of(limit)]
    found += [
        f"a copy to or from the host at once: {copy.name}"
        for copy in made.copies
        if HOST in (copy.source.space, copy.target.space) and copy.opcode == "copy"
    ]
    return found
