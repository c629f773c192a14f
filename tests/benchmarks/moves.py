"""How fast chunks move between the caches and the host pool, beside memcpy of as many bytes in the same run.

    python tests/benchmarks/moves.py [--mebibytes 128] [--json]

A row for each dtype and block size. Every figure is the median of several goes, in GB/s; a store counts until
the host pool holds the bytes, a load until the caches do.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.mover import Mover
from kvjax.packing import cut_into_units, unit_bytes
from kvjax.plan import GroupMoves, LoadPlan, StorePlan


def seconds(function: Callable[[], object], *, repeats: int = 5) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memcpy_seconds(num_bytes: int) -> float:
    source = np.ones((num_bytes >> 20, 2**20), np.uint8)
    target = np.zeros_like(source)
    return seconds(lambda: [np.copyto(b, a) for a, b in zip(source, target, strict=True)])


def measure(dtype: str, block_bytes: int, num_bytes: int) -> dict[str, Any]:
    leaves = 4
    element = kvjax.LeafSpec("x", (1,), dtype).dtype.itemsize
    shape = (16, block_bytes // leaves // 16 // element)
    layout = kvjax.CacheLayout(
        [
            kvjax.GroupSpec(
                "full",
                kvjax.FullAttention(),
                16,
                tuple(kvjax.LeafSpec(f"l{n}", shape, dtype) for n in range(leaves)),
            )
        ]
    )
    chunking = kvjax.resolve_chunking(layout)
    units = cut_into_units(chunking, unit_bytes(chunking, 4))
    num_chunks = num_bytes // block_bytes
    rng = np.random.default_rng(0)
    caches: dict[str, jax.Array] = {
        leaf.name: jax.device_put(
            rng.integers(0, 255, (2 * num_chunks, *shape, element), np.uint8).view(leaf.dtype)[..., 0]
        )
        for leaf in layout.groups[0].leaves
    }
    mover = Mover(chunking, units, caches, num_units=num_chunks * (units.units_per_chunk[0] or 0), show_progress=False)
    blocks = rng.permutation(2 * num_chunks)[:num_chunks].astype(np.int32)[:, None]
    held = np.arange(num_chunks * (units.units_per_chunk[0] or 0), dtype=np.int32).reshape(num_chunks, -1)
    moves = (GroupMoves(0, num_chunks, np.arange(num_chunks, dtype=np.int32), blocks, held),)
    state = {"caches": caches}

    def store() -> None:
        state["caches"], transfer = mover.store(state["caches"], StorePlan(moves, num_bytes))
        transfer.wait()

    def load() -> None:
        state["caches"], transfer = mover.load(state["caches"], LoadPlan(moves, num_bytes))
        transfer.wait()

    row: dict[str, Any] = {"bench": "moves", "dtype": dtype, "block_bytes": block_bytes, "bytes": num_bytes}
    copied = memcpy_seconds(num_bytes)
    for name, function in (("store", store), ("load", load)):
        taken = seconds(function)
        row[f"{name}_gb_per_s"] = round(num_bytes / taken / 1e9, 2)
        row[f"{name}_of_memcpy"] = round(copied / taken, 2)
    row["memcpy_gb_per_s"] = round(num_bytes / copied / 1e9, 2)
    mover.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for dtype in ("float32", "uint16", "bfloat16", "float8_e4m3fn"):
        for block_bytes in (16384, 65536, 2**20):
            row = measure(dtype, block_bytes, arguments.mebibytes << 20)
            print(json.dumps(row) if arguments.json else "  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
