"""The calls that sglang-jax's HiCache makes of its host pool, in the order in which it makes them, without it.

Seen in its `hicache_controller.py`, `unified_radix_cache.py` and `scheduler.py`: a backup is staged on the scheduler's
thread and flushed on a worker's; a load is staged on the worker's and flushed on the scheduler's, after all stages
ended; each step donates the arrays of the device pool and puts new ones into its lists. What belongs where is kept in
NumPy arrays, the slow and obvious way.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.support.toy_engine import as_bytes

PAGE_TOKENS = 4
PAGES_PER_RANK = 12
LAYERS = 2


def mesh_of(data: int, tensor: int) -> Mesh:
    """A mesh as sglang-jax makes it: always both axes, both `Explicit`."""
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def paged(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...], dtype: Any, num: int, seed: int = 0) -> list:
    """Arrays of random bytes, as a device pool of sglang-jax keeps them."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return [
        jax.device_put(rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape), NamedSharding(mesh, spec))
        for _ in range(num)
    ]


def mha_pool(mesh: Mesh, dtype: Any, *, seed: int = 0, pages_per_rank: int = PAGES_PER_RANK) -> SimpleNamespace:
    """A stand-in of `MHATokenToKVPool`: K and V fused, heads packed by the bytes of the type."""
    packing = 4 // np.dtype(dtype).itemsize
    pages = pages_per_rank * mesh.shape["data"]
    spec = PartitionSpec("data", None, "tensor", None, None)
    return SimpleNamespace(
        page_size=PAGE_TOKENS,
        layer_num=LAYERS,
        dp_size=mesh.shape["data"],
        kv_buffer=paged(mesh, spec, (pages, PAGE_TOKENS, 8 // packing, packing, 16), dtype, LAYERS, seed),
    )


class HiCache:
    """Backs pages up and loads them, as a radix tree with host pages does, and knows what every page must hold.

    Args:
        host_pool: what is called.
        lists: the lists of arrays in which the device pages lie.
        num_ranks: ranks of data parallelism; each has its own part of the pages, of which page 0 is never handed out.
        seed: of all choices and bytes.
    """

    def __init__(self, host_pool: Any, lists: list[list], *, num_ranks: int = 1, seed: int = 0):
        self.pool = host_pool
        self.rng = np.random.default_rng(seed)
        self._lists = lists
        self._worker = ThreadPoolExecutor(1)
        self._writes: list[Future] = []
        self._per_rank = lists[0][0].shape[0] // num_ranks
        self._num_ranks = num_ranks
        self.device = self._held()
        self.host: dict[int, list[np.ndarray]] = {}
        self.nodes: list[list[int]] = []

    def device_pages(self, count: int) -> list[int]:
        """Distinct pages of one rank in the numbers of the whole array, as `_to_global_device_pages` maps them."""
        local = 1 + self.rng.permutation(self._per_rank - 1)[:count]
        return [int(page) for page in local + self._per_rank * int(self.rng.integers(self._num_ranks))]

    def step(self) -> None:
        """A forward pass: it donates the arrays and writes some pages."""
        pages = self.device_pages(2)
        for arrays in self._lists:
            for layer, array in enumerate(arrays):
                fresh = as_bytes(np.asarray(array))
                fresh[pages] = self.rng.integers(0, 256, fresh[pages].shape, np.uint8)
                host = fresh.reshape(-1).view(array.dtype).reshape(array.shape)
                arrays[layer] = jax.device_put(host, array.sharding)
                array.delete()
        self.device = self._held()

    def backup(self, count: int) -> bool:
        """`write_backup` of one node; a host pool that is full first evicts nodes."""
        host = self.pool.alloc(count)
        while host is None and self.nodes:
            self.evict()
            host = self.pool.alloc(count)
        if host is None:
            return False
        assert host.dtype == np.int64
        pages = [int(page) for page in host]
        device = self.device_pages(count)
        self.pool.stage_backup(device, pages)
        for device_page, page in zip(device, pages, strict=True):
            self.host[page] = [held[device_page].copy() for held in self.device]
        self._writes.append(self._worker.submit(self.pool.flush_backup, pages))
        self.nodes.append(pages)
        return True

    def load(self) -> None:
        """`init_load_back` and `finish_load_back` of a few nodes."""
        if not self.nodes:
            return
        chosen = self.rng.permutation(len(self.nodes))[:2]
        nodes = [self.nodes[n] for n in chosen]
        targets = self.device_pages(sum(map(len, nodes)))
        plan = [(node, [targets.pop() for _ in node]) for node in nodes if len(targets) >= len(node)]
        stages = [self._worker.submit(self.pool.stage_load, node) for node, _ in plan]
        for stage in stages:
            stage.result()
        for node, device in plan:
            self.pool.flush_load(node, device)
            for page, device_page in zip(node, device, strict=True):
                for held, rows in zip(self.device, self.host[page], strict=True):
                    held[device_page] = rows

    def evict(self) -> None:
        """`evict_host` of one node; it waits where sglang-jax would choose another one."""
        self.settle()
        pages = self.nodes.pop(int(self.rng.integers(len(self.nodes))))
        self.pool.free(pages)
        for page in pages:
            del self.host[page]

    def settle(self) -> None:
        """`drain_pending`."""
        for write in self._writes:
            write.result()
        self._writes.clear()

    def check(self) -> None:
        """Compares every byte of the device pool, those that nothing touched included, and recounts the pool."""
        for held, expected in zip(self._held(), self.device, strict=True):
            assert np.array_equal(held, expected)
        self.settle()
        self.pool.check_integrity()

    def close(self) -> None:
        """`reset`: every page is freed."""
        while self.nodes:
            self.evict()
        self._worker.shutdown()

    def _held(self) -> list[np.ndarray]:
        return [as_bytes(np.asarray(array)) for arrays in self._lists for array in arrays]
