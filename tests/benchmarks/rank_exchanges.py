"""What it costs ranks to agree: milliseconds of an exchange and of a lookup, for several numbers of processes.

    python -m tests.benchmarks.rank_exchanges
    python -m tests.benchmarks.rank_exchanges --processes 2,4,8 --json

The processes run on the loopback interface under `jax.distributed`, one device each. Each lookup is of a prompt that
all ranks have; the same lookups are timed with an `Offloader` alone.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

_TIMES = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="2,4", help="how many, separated by commas (default 2,4)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a prompt (default 8192)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.processes.split(",")]
    if options.rank is not None:
        print(json.dumps(_measure(counts[0], options.rank, options.port, options.tokens)))
        return 0
    rows = [_row(count, options.tokens) for count in counts]
    if options.json:
        print(json.dumps({"jax": jax.__version__, "tokens": options.tokens, "rows": rows}))
        return 0
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    return 0


def _row(count: int, tokens: int) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", __spec__.name, "--processes", str(count), "--tokens", str(tokens)]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--port", str(port)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    said = [process.communicate()[0] for process in processes]
    return {"processes": count, **json.loads(said[0].splitlines()[-1])}


def _measure(count: int, rank: int, port: int, tokens: int) -> dict[str, float]:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
    leaf = kvjax.LeafSpec("kv", (16, 8), jnp.float32)
    window = kvjax.LeafSpec("local", (16, 8), jnp.float32)
    layout = kvjax.CacheLayout(
        [
            kvjax.GroupSpec("full", kvjax.FullAttention(), 16, (leaf,)),
            kvjax.GroupSpec("local", kvjax.SlidingWindow(1024), 16, (window,)),
        ]
    )
    blocks = -(-tokens // 16)
    device = jax.local_devices()[0]
    caches = {name: jnp.zeros((blocks, 16, 8), jnp.float32, device=device) for name in ("kv", "local")}
    offloader = kvjax.Offloader(layout, caches, host_bytes=4 * blocks * leaf.block_bytes)
    ranked = kvjax.RankedOffloader(offloader)
    prompt = np.arange(tokens)
    ranked.lookup("first", prompt)
    caches, _ = ranked.store(caches, "first", dict.fromkeys(("full", "local"), np.arange(blocks)), tokens)
    ranked.wait()
    ranked.finish("first")

    def look_up(of: kvjax.Offloader | kvjax.RankedOffloader) -> None:
        of.lookup("again", prompt)
        of.finish("again")

    found = {
        "exchange_ms": _ms(lambda: ranked.channel.exchange(b"x" * 100, 30.0)),
        "agreed_lookup_ms": _ms(lambda: look_up(ranked)),
        "lookup_alone_ms": _ms(lambda: look_up(offloader)),
    }
    ranked.close()
    jax.distributed.shutdown()
    return found


def _ms(call: Callable[[], object]) -> float:
    """Median milliseconds of a call."""
    took = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return round(float(np.median(took)) * 1e3, 3)


if __name__ == "__main__":
    sys.exit(main())
