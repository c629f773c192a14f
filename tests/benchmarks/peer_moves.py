"""How fast chunks move beside tpu-inference's own functions, on the same blocks, in one run.

    pip install --no-deps tpu-inference
    python tests/benchmarks/peer_moves.py [--bytes 128MiB] [--block-bytes 64KiB] [--leaves 1,4] [--json]

Needs only that wheel and kvjax: the engine that it belongs to (vllm) is replaced by empty modules. What runs are the
functions that its offload connector (`tpu_inference/offload/tpu_offload_connector.py`) calls on plain JAX, in its way:

* store: `stack_kv_cache_cross_layers` for every bucket of at most 64 blocks, then one `device_put` to `pinned_host` for
  each block;
* load: one `device_put` for each block, then `pure_jax_update_kv_caches_one` for every bucket. (Without attention data
  parallelism the connector calls `update_kv_caches_one`, a Pallas kernel that only a TPU runs.)

`functions` times the gather and the insert alone, without any `device_put`; `peer` the whole, `kvjax` a store or a
load by a `Mover` with `transfer="auto"`, `memcpy` np.copyto of as many bytes in pieces of 1 MiB. The four take turns;
medians, in GB/s of 10^9 bytes.
"""

import argparse
import functools
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.cli.bench_moves import Case
from kvjax.cli.bench_moves_blocks import Blocks
from kvjax.cli.bench_moves_run import MoverLoop
from kvjax.cli.options import size
from kvjax.cli.timing import MemoryCopy, alternating
from kvjax.observe.progress import progress_bar

MAX_BUCKET = 64  # the largest of the connector's buckets by default


def peer_functions() -> Any:
    """The module `tpu_inference.offload.utils`, with the engine's modules replaced by empty ones.

    Raises:
        SystemExit: tpu-inference is not installed, or has no such module.
    """
    spec = importlib.util.find_spec("tpu_inference")
    if spec is None:
        raise SystemExit("tpu-inference is not installed: pip install --no-deps tpu-inference")
    package = types.ModuleType("tpu_inference")
    package.__path__ = list(spec.submodule_search_locations or ())  # its __init__ starts the engine
    sys.modules["tpu_inference"] = package
    for name, content in (
        ("tpu_inference.logger", {"init_logger": lambda _name: None}),
        ("vllm", {}),
        ("vllm.config", {"get_current_vllm_config": None}),
        ("vllm.distributed", {}),
        ("vllm.distributed.kv_transfer", {}),
        ("vllm.distributed.kv_transfer.kv_connector", {}),
        ("vllm.distributed.kv_transfer.kv_connector.factory", {"KVConnectorFactory": None}),
    ):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    try:
        return importlib.import_module("tpu_inference.offload.utils")
    except ImportError as error:
        raise SystemExit(f"this version of tpu-inference cannot be imported without its engine: {error}") from error


class PeerLoop:
    """Stores and loads as the connector's worker does, with a dict of chunks as its backend."""

    def __init__(self, peer: Any, blocks: Blocks, device: Any):
        self._peer, self._blocks = peer, blocks
        mesh = Mesh(np.array([device]), ("x",))
        self._sharding = NamedSharding(mesh, PartitionSpec())
        self._host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
        self._device = NamedSharding(mesh, PartitionSpec(), memory_kind="device")
        self._caches = [jax.device_put(cache, self._sharding) for cache in blocks.caches(device).values()]
        self._backend: dict[int, jax.Array] = {}

    def store(self) -> None:
        gathered = [block for bucket in self._gathered() for block in bucket]
        chunks = [jax.device_put(block, self._host) for block in gathered]
        jax.block_until_ready(chunks)
        self._backend = dict(zip(self._blocks.places.tolist(), chunks, strict=True))

    def load(self) -> None:
        chunks = [jax.device_put(self._backend[place], self._device) for place in self._blocks.places.tolist()]
        jax.block_until_ready(chunks)
        self._insert(chunks)

    def gather(self) -> None:
        jax.block_until_ready(list(self._gathered()))

    def insert(self) -> None:
        self._insert(self._on_device)

    @functools.cached_property
    def _on_device(self) -> list[jax.Array]:
        return [jax.device_put(self._backend[place], self._device) for place in self._blocks.places.tolist()]

    def is_exact(self) -> bool:
        self.store()
        self.load()
        return self._blocks.moved(dict(zip(self._blocks.leaves, self._caches, strict=True)), len(self._blocks.source))

    def _gathered(self) -> Iterator[list[jax.Array]]:
        for bucket in buckets(self._blocks.source):
            self._caches, stacked = self._peer.stack_kv_cache_cross_layers(
                self._caches, jnp.array(bucket), len(bucket), None
            )
            yield stacked

    def _insert(self, chunks: list[jax.Array]) -> None:
        first = 0
        for bucket in buckets(self._blocks.target):
            self._caches = self._peer.pure_jax_update_kv_caches_one(
                self._caches,
                chunks[first : first + len(bucket)],
                bucket.tolist(),
                self._sharding.mesh,
                self._sharding.spec,
                self._device,
                None,
            )
            first += len(bucket)
        jax.block_until_ready(self._caches)


def buckets(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Cuts ids into powers of two, the largest first, as the connector does."""
    bucket = MAX_BUCKET
    while len(ids):
        while bucket > len(ids):
            bucket //= 2
        yield ids[:bucket]
        ids = ids[bucket:]


def measure(peer: Any, case: Case, repeats: int) -> Iterator[dict[str, Any]]:
    """A row a direction."""
    device = jax.devices()[0]
    blocks, copy = Blocks(case), MemoryCopy(case.num_bytes)
    ours, theirs = MoverLoop(blocks, device), PeerLoop(peer, blocks, device)
    exact = {"kvjax_exact": ours.is_exact(), "peer_exact": theirs.is_exact()}
    for direction, own, whole, functions in (
        ("store", ours.store, theirs.store, theirs.gather),
        ("load", ours.load, theirs.load, theirs.insert),
    ):
        times = alternating((copy.in_pieces, own, whole, functions), repeats)
        memcpy, kvjax_, peer_, functions_ = (round(case.num_bytes / seconds / 1e9, 4) for seconds in times)
        yield {
            "bench": "peer_moves",
            "peer": "tpu-inference",
            "direction": direction,
            "transfer": ours.transfer,
            "backend": device.platform,
            "device": device.device_kind,
            "jax": jax.__version__,
            "dtype": case.dtype.name,
            "block_bytes": case.block_bytes,
            "num_blocks": case.num_blocks,
            "num_leaves": case.num_leaves,
            "memcpy_gb_per_s": memcpy,
            "kvjax_gb_per_s": kvjax_,
            "peer_gb_per_s": peer_,
            "functions_gb_per_s": functions_,
            "times_peer": round(times[2] / times[1], 2),
            "times_functions": round(times[3] / times[1], 2),
            **exact,
        }
    ours.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=size, default=128 * 2**20)
    parser.add_argument("--block-bytes", type=size, default=65536)
    parser.add_argument("--leaves", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4])
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "uint16", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    peer = peer_functions()
    num_blocks = arguments.bytes // arguments.block_bytes
    cases = [
        Case(jnp.dtype(dtype), arguments.block_bytes, leaves, num_blocks, "auto")
        for dtype in arguments.dtypes
        for leaves in arguments.leaves
    ]
    rows = []
    with progress_bar("peer moves", len(cases)) as advance:
        for case in cases:
            rows += measure(peer, case, arguments.repeats)
            advance(1)
    if arguments.json:
        print(json.dumps({"bench": "peer_moves", "rows": rows}))
        return
    columns = ("direction", "dtype", "num_leaves", "transfer", *(name for name in rows[0] if name.endswith("_per_s")))
    columns += ("times_peer", "times_functions", "kvjax_exact", "peer_exact")
    print("  ".join(columns))
    for row in rows:
        print("  ".join(str(row[name]).ljust(len(name)) for name in columns))


if __name__ == "__main__":
    main()
