"""How long a lookup takes: `longest_hit`, keys and the ledger's lookup, on a long prompt of six groups.

    python tests/benchmarks/lookup.py [--tokens 131072] [--json]

Each figure is the median of several calls, in milliseconds. `memcpy_ms` copies 64 MiB in pieces of 1 MiB, as
a measure of the machine.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

import kvjax
from kvjax.keys import namespace_of, prefix_hashes
from kvjax.ledger import Ledger
from kvjax.packing import cut_into_units

WINDOW = 1024


def milliseconds(function: Callable[[], object], *, repeats: int = 15) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times), 3)


def stores(num_tokens: int, step: int = 2048) -> list[float]:
    """Milliseconds of each store's bookkeeping, while a prompt is computed in steps, with checkpoints by default."""
    groups = [
        kvjax.GroupSpec("sliding", kvjax.SlidingWindow(128), 16, block_bytes=393_216),
        kvjax.GroupSpec("full", kvjax.FullAttention(), 16, block_bytes=393_216),
    ]
    chunking = kvjax.resolve_chunking(kvjax.CacheLayout(groups))
    ledger = Ledger(chunking, cut_into_units(chunking, 393_216), host_bytes=2**36)
    ledger.lookup("a", np.random.default_rng(0).integers(0, 200_000, num_tokens))
    tables = {group.name: np.arange(num_tokens // 16) for group in groups}
    times = []
    for position in range(step, num_tokens + 1, step):
        start = time.perf_counter()
        ledger.complete_store(ledger.prepare_store("a", tables, position), ok=True)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure(num_tokens: int) -> dict[str, float | int | str]:
    groups = [kvjax.GroupSpec("full", kvjax.FullAttention(), 16, block_bytes=65536)]
    groups += [kvjax.GroupSpec(f"local{n}", kvjax.SlidingWindow(WINDOW), 16, block_bytes=65536) for n in range(5)]
    chunking = kvjax.resolve_chunking(kvjax.CacheLayout(groups))
    num_chunks = num_tokens // 16
    rng = np.random.default_rng(0)
    resident = {group.name: np.ones(num_chunks, bool) for group in groups}
    holes = {name: rng.random(num_chunks) > 0.05 for name in resident}
    half = {name: rng.random(num_chunks) > 0.5 for name in resident}
    tokens = rng.integers(0, 250_000, num_tokens)
    namespace = namespace_of(chunking)

    ledger = Ledger(chunking, cut_into_units(chunking, 65536), host_bytes=6 * num_chunks * 65536)
    ledger.lookup("a", tokens)
    tables = {group.name: np.arange(num_chunks) for group in groups}
    ledger.complete_store(ledger.prepare_store("a", tables, num_tokens), ok=True)

    of_steps = stores(num_tokens)
    source, target = np.ones((64, 2**20), np.uint8), np.ones((64, 2**20), np.uint8)
    return {
        "bench": "lookup",
        "tokens": num_tokens,
        "groups": len(groups),
        "machine": platform.machine(),
        "store_of_2048_tokens_median_ms": round(statistics.median(of_steps), 3),
        "store_of_2048_tokens_longest_ms": round(max(of_steps), 3),
        "longest_hit_resident_ms": milliseconds(lambda: kvjax.longest_hit(chunking, num_tokens, resident)),
        "longest_hit_5_percent_missing_ms": milliseconds(lambda: kvjax.longest_hit(chunking, num_tokens, holes)),
        "longest_hit_half_missing_ms": milliseconds(lambda: kvjax.longest_hit(chunking, num_tokens, half)),
        "store_set_ms": milliseconds(lambda: kvjax.store_set(chunking, num_tokens)),
        "keys_ms": milliseconds(lambda: prefix_hashes(namespace, tokens, chunking.tokens_per_hash)),
        "ledger_lookup_ms": milliseconds(lambda: ledger.lookup("a", tokens)),
        "memcpy_ms": milliseconds(lambda: [np.copyto(b, a) for a, b in zip(source, target, strict=True)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.tokens)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:36s} {value}")


if __name__ == "__main__":
    main()
