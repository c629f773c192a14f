"""kvjax's host pool beside sglang-jax's own on real device pools of sglang-jax, in one process on the CPU.

Speed on `MHATokenToKVPool`: random pages to the host and back, bytes checked, and a copy of as many bytes in pieces of
1 MiB in the same run. Then one round trip on each other device pool, bytes checked, those that nothing touched
included. sglang-jax's own pool loads with a kernel for TPUs; its tests replace that on the CPU, and so does this.

    python tests/benchmarks/sglang_jax_pools.py --json
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import sgl_jax.test.mem_cache.conftest  # noqa: F401  # the replacement of the kernel
from sgl_jax.srt.mem_cache.host_kv_pool import LRUHostKVPool
from sgl_jax.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from sgl_jax.srt.mem_cache.recurrent_state_pool import RecurrentStatePool
from sgl_jax.srt.utils.mesh_utils import create_device_mesh

from kvjax.serving.sglang_jax import DeviceGroup, HostPool, MixedHostPool, groups_of

PAGE_TOKENS = 16
LAYERS = 8
HEADS = 8
HEAD_DIM = 128
MESH = create_device_mesh(ici_parallelism=[1, -1], dcn_parallelism=[1, 1])


def mha_pool(dtype: Any, num_pages: int) -> MHATokenToKVPool:
    """Pages of 64 KiB per layer in bfloat16."""
    size = num_pages * PAGE_TOKENS
    return MHATokenToKVPool(size, PAGE_TOKENS, dtype, HEADS, HEAD_DIM, LAYERS, MESH, dp_size=1)


def made(kind: Callable[..., Any], device_pool: Any, num_pages: int, **options: Any) -> Any:
    """A host pool, made as sglang-jax makes its own."""
    return kind(
        device_pool=device_pool,
        pool_size=num_pages,
        page_size=device_pool.page_size,
        layer_num=device_pool.layer_num,
        per_layer_shape=tuple(device_pool.kv_buffer[0].shape[1:]),
        dtype=device_pool.dtype,
        mesh=MESH,
        partition_spec=device_pool.kv_sharding.spec,
        **options,
    )


def fill(group: DeviceGroup, rng: np.random.Generator, *, numbers: bool = False) -> list[np.ndarray]:
    """Puts random bytes, or those of random numbers, into a group's arrays and returns them, one row per page."""
    rows, arrays = [], {}
    for name, array in group.arrays().items():
        if numbers:
            data = rng.standard_normal(array.size, np.float32).astype(array.dtype).view(np.uint8)
        else:
            data = rng.integers(0, 256, array.nbytes, np.uint8)
        arrays[name] = jax.device_put(data.view(array.dtype).reshape(array.shape), array.sharding)
        rows.append(data.reshape(array.shape[0], -1))
    group.put(arrays)
    return rows


def holds(group: DeviceGroup, rows: list[np.ndarray]) -> bool:
    """Whether a group's arrays hold these bytes."""
    held = [np.asarray(array).reshape(array.shape[0], -1).view(np.uint8) for array in group.arrays().values()]
    return all(np.array_equal(ours, theirs) for ours, theirs in zip(held, rows, strict=True))


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The median time of a call after a first one."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_gb_per_s(num_bytes: int, repeats: int) -> float:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)

    def copy() -> None:
        for low in range(0, num_bytes, 2**20):
            np.copyto(target[low : low + 2**20], source[low : low + 2**20])

    return num_bytes / seconds(copy, repeats) / 1e9


def speed(dtype: str, num_pages: int, repeats: int) -> dict[str, Any]:
    """Stores and loads of each host pool, in GB/s."""
    rng = np.random.default_rng(0)
    device = mha_pool(jnp.dtype(dtype), 2 * num_pages)
    (group,) = groups_of(device)
    num_bytes = num_pages * group.spec.block_bytes
    found: dict[str, Any] = {"dtype": dtype, "num_bytes": num_bytes, "page_bytes": group.spec.block_bytes}
    found["memcpy"] = round(copy_gb_per_s(num_bytes, repeats), 2)
    kinds = {"own": (LRUHostKVPool, {}), "direct": (HostPool, {"transfer": "direct"})}
    kinds["staged"] = (HostPool, {"transfer": "staged"})
    for name, (kind, options) in kinds.items():
        pool = made(kind, device, num_pages, **options)
        rows = fill(group, rng, numbers=True)  # its replaced kernel changes the bits of NaNs, wherever they are
        pages = 1 + rng.permutation(2 * num_pages)
        source, target = pages[:num_pages].tolist(), pages[num_pages:].tolist()
        host = pool.alloc(num_pages).tolist()

        def load(pool: Any = pool, host: list[int] = host, target: list[int] = target) -> None:
            pool.copy_to_device(host, target)
            jax.block_until_ready(device.kv_buffer)

        store = num_bytes / seconds(lambda: pool.copy_into(source, host), repeats) / 1e9  # noqa: B023
        loaded = num_bytes / seconds(load, repeats) / 1e9
        for each in rows:
            each[target] = each[source]
        found[name] = {"store": round(store, 2), "load": round(loaded, 2), "bytes_right": holds(group, rows)}
    return found


def other_pools() -> dict[str, tuple[Any, list[DeviceGroup]]]:
    """Small device pools with other groups, by the name of their class."""
    common = {"page_size": PAGE_TOKENS, "dtype": jnp.bfloat16, "mesh": MESH}
    mha = {"head_num": 4, "head_dim": 128, "dp_size": 1}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "indexer_key_dim": 128, "num_indexer_layers": 2}
    mla = MLATokenToKVPool(size=256, layer_num=3, dp_size=1, **latent, **common)
    swa = SWAKVPool(256, 128, swa_attention_layer_ids=[0, 1], full_attention_layer_ids=[2], **mha, **common)
    hybrid = HybridLinearKVPool(256, full_attention_layer_ids=[1], **mha, **common)
    states = RecurrentStatePool([0, 2], 8, 4, 128, 4, MESH)
    return {
        "MLATokenToKVPool": (mla, groups_of(mla)),
        "SWAKVPool": (swa, groups_of(swa, window_tokens=64)),
        "HybridLinearKVPool": (hybrid, groups_of(hybrid, state_pool=states)),
    }


def round_trip(groups: list[DeviceGroup], transfer: str) -> dict[str, bool]:
    """Moves three blocks of each group to the host and back to others; tells by group whether all bytes are right."""
    pool = MixedHostPool(groups, host_bytes=64 * 2**20, transfer=transfer)
    rows = [fill(group, np.random.default_rng(g)) for g, group in enumerate(groups)]
    for group, held in zip(groups, rows, strict=True):
        host = pool[group.spec.name].alloc(3).tolist()
        pool[group.spec.name].copy_into([1, 2, 5], host)
        pool[group.spec.name].copy_to_device(host, [7, 4, 3])
        for each in held:
            each[[7, 4, 3]] = each[[1, 2, 5]]
    return {group.spec.name: holds(group, held) for group, held in zip(groups, rows, strict=True)}


def own_round_trip(device_pool: Any) -> str:
    """What sglang-jax's own host pool says of a device pool."""
    try:
        pool = made(LRUHostKVPool, device_pool, 4)
        host = pool.alloc(1).tolist()
        pool.copy_into([1], host)
        pool.copy_to_device(host, [2])
    except Exception as error:  # noqa: BLE001  # whatever it is, it is told
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return "moved a page of `kv_buffer`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with jax.set_mesh(MESH):
        found: dict[str, Any] = {
            "speed": [speed(dtype, options.pages, options.repeats) for dtype in ("bfloat16", "float32")],
            "round_trips": {},
        }
        for name, (device_pool, groups) in other_pools().items():
            own = own_round_trip(device_pool)
            kvjax = {transfer: round_trip(groups, transfer) for transfer in ("direct", "staged")}
            found["round_trips"][name] = {"own": own, "kvjax": kvjax}
    sys.stdout.write(json.dumps(found, indent=None if options.json else 2) + "\n")


if __name__ == "__main__":
    main()
