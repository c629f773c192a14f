"""The bytes that `kvjax bench moves` moves, and the check that they arrived."""

from typing import Any

import jax
import numpy as np

from kvjax.cli.bench_moves import TOKENS_PER_BLOCK, Case


class Blocks:
    """Random bytes in twice the blocks of a case, and which of the blocks move.

    Args:
        case: the configuration.
    """

    def __init__(self, case: Case):
        rng = np.random.default_rng(0)
        row_elements = case.block_bytes // case.num_leaves // case.dtype.itemsize
        self.case = case
        self.shape = (TOKENS_PER_BLOCK, row_elements // TOKENS_PER_BLOCK)
        row_bytes = row_elements * case.dtype.itemsize
        self.leaves = {
            f"leaf{n}": np.frombuffer(rng.bytes(2 * case.num_blocks * row_bytes), np.uint8).reshape(-1, row_bytes)
            for n in range(case.num_leaves)
        }
        self.source, self.target = rng.permutation(2 * case.num_blocks).reshape(2, -1)
        self.places = rng.permutation(case.num_blocks)

    def caches(self, device: Any) -> dict[str, jax.Array]:
        """Returns arrays of these bytes, `(2 * num_blocks, *shape)`, that are committed to the device."""
        shape = (2 * self.case.num_blocks, *self.shape)
        return {
            name: jax.device_put(rows.view(self.case.dtype).reshape(shape), device, may_alias=False)
            for name, rows in self.leaves.items()
        }

    def moved(self, caches: dict[str, jax.Array], count: int) -> bool:
        """True if the first `count` target blocks hold the bytes of the source blocks, and all others their own."""
        for name, rows in self.leaves.items():
            expected = rows.copy()
            expected[self.target[:count]] = rows[self.source[:count]]
            found = np.asarray(caches[name]).reshape(len(rows), -1).view(np.uint8)
            if not np.array_equal(found, expected):
                return False
        return True
