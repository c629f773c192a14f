"""One process of several that hold caches together: `python -m tests.support.rank_process RANK RANKS PORT DEVICES
FOLDER`.

It prints one line of JSON with what it saw; the same from all processes, but for what is named `own`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax.fused import FusedSteps
from kvjax.ranks import CoordinationChannel, RankedOffloader, RankLostError
from tests.support.faults import Fault, FaultsAt, inject

BLOCKS, TOKENS = 16, 4
SPECS = {
    "full.k": PartitionSpec(None, None, "heads"),
    "full.v": PartitionSpec(None, None, None, "heads"),
    "latent": PartitionSpec(),
    "local.kv": PartitionSpec(None, None, None, "heads"),
    "state": PartitionSpec(None, "heads"),
}
BY_BLOCKS = PartitionSpec("heads")
PROMPT = np.arange(33)


def layout_of() -> kvjax.CacheLayout:
    """Heads over all devices, latents on each of them, a window in stacked layers, and a state."""
    return kvjax.CacheLayout(
        [
            kvjax.GroupSpec(
                "full",
                kvjax.FullAttention(),
                TOKENS,
                (
                    kvjax.LeafSpec("full.k", (TOKENS, 8, 3), "bfloat16"),
                    kvjax.LeafSpec("full.v", (TOKENS, 3, 8), "float32"),
                ),
            ),
            kvjax.GroupSpec("mla", kvjax.FullAttention(), TOKENS, (kvjax.LeafSpec("latent", (TOKENS, 5), "float16"),)),
            kvjax.GroupSpec(
                "local", kvjax.SlidingWindow(6), TOKENS, (kvjax.LeafSpec("local.kv", (TOKENS, 8), "uint8", layers=2),)
            ),
            kvjax.GroupSpec("state", kvjax.Recurrent(), 2 * TOKENS, (kvjax.LeafSpec("state", (8, 2), "float32"),)),
        ]
    )


def random_caches(layout: kvjax.CacheLayout, mesh: Mesh, seed: int) -> dict[str, jax.Array]:
    """Caches of all processes, full of random bytes that each of them knows."""
    caches = {}
    for name, leaf in layout.leaves.items():
        rng = np.random.default_rng([seed, *name.encode()])
        shape = (*(() if leaf.layers is None else (leaf.layers,)), BLOCKS, *leaf.block_shape)
        bits = rng.integers(0, 256, (*shape[:-1], shape[-1] * leaf.dtype.itemsize), np.uint8)
        whole = bits.view(leaf.dtype).reshape(shape)
        caches[name] = jax.make_array_from_callback(shape, NamedSharding(mesh, SPECS[name]), whole.__getitem__)
    return caches


def here(caches: dict[str, jax.Array]) -> dict[str, list[np.ndarray]]:
    """The bytes of the pieces of this process."""
    return {
        name: [np.asarray(shard.data).copy().view(np.uint8) for shard in array.addressable_shards]
        for name, array in caches.items()
    }


def same_blocks(layout: kvjax.CacheLayout, one: Any, other: Any) -> dict[str, list[int]]:
    """By leaf, the ids of the blocks of which this process has the same bytes in both."""
    equal = {}
    for name, leaf in layout.leaves.items():
        axis = 0 if leaf.layers is None else 1
        by_piece = [
            np.array([np.array_equal(np.take(a, b, axis), np.take(c, b, axis)) for b in range(BLOCKS)])
            for a, c in zip(one[name], other[name], strict=True)
        ]
        equal[name] = np.flatnonzero(np.all(by_piece, axis=0)).tolist()
    return equal


def refusal(call: Callable[[], Any]) -> str:
    """What a call says that must be refused."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


class Process:
    """One process, its caches and its offloader."""

    def __init__(self, rank: int, num_ranks: int, folder: Path):
        self.rank, self.num_ranks, self.folder = rank, num_ranks, folder
        self.mesh = Mesh(np.array(jax.devices()), ("heads",))
        self.layout = layout_of()
        self.caches = random_caches(self.layout, self.mesh, 0)
        self.tables = {
            group.name: np.arange(-(-len(PROMPT) // group.tokens_per_block)) + 2 for group in self.layout.groups
        }
        self.total = jax.jit(lambda caches: sum(x.astype("float32").sum() for x in caches.values()))

    def ranked(self, **options: Any) -> RankedOffloader:
        """A new offloader over the caches, in step with those of the others."""
        offloader = kvjax.Offloader(self.layout, self.caches, host_bytes=1 << 20, show_progress=False, **options)
        self.faults = inject(offloader)
        return RankedOffloader(offloader, timeout_s=20.0)

    def compute(self, ranked: RankedOffloader, name: str, start: int) -> None:
        """Goes to the end of the prompt, where states want it, with a step of all devices after each cut."""
        while start < len(PROMPT):
            start = min(ranked.next_cut(name, start) or len(PROMPT), len(PROMPT))
            self.total(self.caches).block_until_ready()
            tables = {group: table.copy() for group, table in self.tables.items()}
            ends = {start // (2 * TOKENS) - 1} if start % (2 * TOKENS) == 0 else set()
            tables["state"] = np.array([b if i in ends else -1 for i, b in enumerate(tables["state"])])
            self.caches, _ = ranked.store(self.caches, name, tables, start)

    def serve(self, ranked: RankedOffloader, name: str) -> list[Any]:
        """Serves the prompt; says what was found and how the load ended."""
        found = ranked.lookup(name, PROMPT)
        tables = dict(self.tables)
        at_hit = found.hit_tokens // (2 * TOKENS) - 1
        tables["state"] = np.array([b if i == at_hit else -1 for i, b in enumerate(tables["state"])])
        self.caches, job = ranked.load(self.caches, name, tables)
        result = ranked.wait(job)
        self.compute(ranked, name, result.valid_tokens)
        ranked.wait()
        ranked.finish(name)
        return [found.hit_tokens, result.ok, result.valid_tokens, result.error]

    def garbage(self) -> None:
        """Overwrites all caches."""
        self.caches = random_caches(self.layout, self.mesh, 1)

    def run(self) -> dict[str, Any]:
        """All that is tried while every process lives."""
        before = here(self.caches)
        seen: dict[str, Any] = {}
        with self.ranked() as ranked:
            seen["first"] = self.serve(ranked, "first")
            self.garbage()
            garbage = here(self.caches)
            shardings = {name: array.sharding for name, array in self.caches.items()}
            found = ranked.lookup("again", PROMPT)
            states = np.full(5, -1)
            states[found.hit_tokens // (2 * TOKENS) - 1] = 9  # another block than the one it came from
            self.caches, job = ranked.load(self.caches, "again", {**self.tables, "state": states})
            result = ranked.wait(job)
            after = here(self.caches)
            seen["again"] = [found.hit_tokens, result.ok]
            seen["restored"] = same_blocks(self.layout, after, before)
            seen["untouched"] = same_blocks(self.layout, after, garbage)
            seen["kept"] = all(array.sharding == shardings[name] for name, array in self.caches.items())
            at_hit = self.tables["state"][found.hit_tokens // (2 * TOKENS) - 1]
            seen["state"] = all(
                np.array_equal(a[9], b[at_hit]) for a, b in zip(after["state"], before["state"], strict=True)
            )
            ranked.finish("again")
            if self.rank == 1:
                ranked.offloader.invalidate()
            seen["lost on one"] = self.serve(ranked, "lost")
            if self.rank == 1:
                self.faults.choose = FaultsAt({("load", 0): Fault.FAIL})
            seen["failed on one"] = self.serve(ranked, "failed")
            seen["and then"] = self.serve(ranked, "then")
            seen["own"] = {"shard": ranked.offloader.ledger.shard, "bytes": ranked.offloader.stats().bytes_stored}
            seen["fused"] = refusal(lambda: FusedSteps(ranked.offloader))
        split = {**self.caches, "latent": jax.device_put(self.caches["latent"], NamedSharding(self.mesh, BY_BLOCKS))}
        seen["split"] = refusal(lambda: kvjax.Offloader(self.layout, split, host_bytes=1 << 20))
        seen["shard"] = refusal(lambda: kvjax.Offloader(self.layout, self.caches, host_bytes=1 << 20, shard=3))  # pyright: ignore[reportArgumentType]
        url = f"file://{self.folder}"
        with self.ranked(tiers=[url]) as ranked:
            seen["tier, first"] = self.serve(ranked, "first")
        with self.ranked(tiers=[url]) as ranked:
            seen["tier, after a restart"] = self.serve(ranked, "again")[:3]
        return seen

    def lose(self, lost: int) -> dict[str, Any]:
        """One process dies; what the others see."""
        ranked = RankedOffloader(
            kvjax.Offloader(self.layout, self.caches, host_bytes=1 << 20, show_progress=False),
            CoordinationChannel("lost"),
            timeout_s=2.0,
        )
        if self.rank == lost:
            os._exit(9)
        began = time.monotonic()
        try:
            ranked.lookup("a", PROMPT)
        except RankLostError as error:
            took = time.monotonic() - began
            ranked.close()
            return {"lost": error.ranks, "in time": took < 10, "message": str(error)}
        return {}


def main() -> None:
    rank, num_ranks, port, devices = map(int, sys.argv[1:5])
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_ranks, rank)
    process = Process(rank, num_ranks, Path(sys.argv[5]))
    seen = process.run()
    seen |= process.lose(num_ranks - 1)
    print(json.dumps(seen), flush=True)
    # The service ends with process 0, and JAX then aborts those that are left.
    CoordinationChannel("end", process_ids=range(num_ranks - 1)).exchange(b"", 20.0)
    time.sleep(0 if rank else 2.0)
    os._exit(0)  # without one of them, the others cannot shut the service down


if __name__ == "__main__":
    main()
