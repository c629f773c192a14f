"""What `kvjax bench moves --vs naive` measures: the loop over blocks that one would write first."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvjax.cli.bench_moves_blocks import Blocks

_SECONDS = 0.5


class NaiveLoop:
    """One transfer for each block of each leaf, and a NumPy array as the host pool.

    Args:
        blocks: what moves. Each direction takes as many of them as it moves in about half a second.
        device: where the caches are.
    """

    transfer = "naive"

    def __init__(self, blocks: Blocks, device: Any):
        self.case = blocks.case
        self._blocks = blocks
        self._device = device
        self._caches = blocks.caches(device)
        self._pools = {
            name: np.zeros((blocks.case.num_blocks, *blocks.shape), blocks.case.dtype) for name in blocks.leaves
        }
        self._read = jax.jit(lambda cache, block: cache[block])
        self._write = jax.jit(lambda cache, block, row: cache.at[block].set(row), donate_argnums=0)
        self.timed_blocks = {"store": self._count(self._store), "load": self._count(self._load)}

    def store(self) -> None:
        """Brings each block of each leaf to the host, then puts them into the pool by fancy index."""
        self._store(self.timed_blocks["store"])

    def load(self) -> None:
        """Takes the blocks out of the pool by fancy index, then puts each into its leaf."""
        self._load(self.timed_blocks["load"])

    def is_exact(self) -> bool:
        """True if the blocks that both directions move arrive as they were, and no other changes."""
        count = min(self.timed_blocks.values())
        self._caches = self._blocks.caches(self._device)
        self._store(count)
        self._load(count)
        return self._blocks.moved(self._caches, count)

    def _count(self, move: Callable[[int], None]) -> int:
        """How many blocks `move` moves in the time that one call may take, at least one."""
        move(1)  # compiles
        start = time.perf_counter()
        move(1)
        affordable = int(_SECONDS / (time.perf_counter() - start))
        return max(1, min(affordable, self.case.num_blocks))

    def _store(self, count: int) -> None:
        for name, pool in self._pools.items():
            cache = self._caches[name]
            rows = [np.asarray(self._read(cache, block)) for block in self._blocks.source[:count]]
            pool[self._blocks.places[:count]] = rows

    def _load(self, count: int) -> None:
        for name, pool in self._pools.items():
            cache = self._caches.pop(name)
            for block, row in zip(self._blocks.target[:count], pool[self._blocks.places[:count]], strict=True):
                cache = self._write(cache, block, jax.device_put(row, self._device))
            self._caches[name] = cache
        jax.block_until_ready(self._caches)
