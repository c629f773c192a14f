"""Caches with a copy of what every byte of them must be, and blocks with reference counts.

What a token leaves in a cache is a function of a mark, which stands for the weights, the tenant and the prefix that
ends with the token. Blocks that nobody holds any more are filled with garbage at once.
"""

import itertools
from functools import partial

import jax
import numpy as np

from kvjax.groups import CacheLayout, LeafSpec, Recurrent
from tests.support.toy_engine import OutOfBlocksError, make_caches, stack

_ODD = np.uint64(0x9E3779B97F4A7C15)


def mixed(words: np.ndarray) -> np.ndarray:
    """Scrambles `uint64` words one by one; see Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def marks_of(tokens: np.ndarray, seed: int) -> np.ndarray:
    """What tells the prefixes that end with each token apart, `uint64`."""
    places = np.arange(1, len(tokens) + 1, dtype=np.uint64)
    sums = np.cumsum(mixed(mixed(tokens.astype(np.uint64) + _ODD) + places * _ODD), dtype=np.uint64)
    return mixed(sums + np.array([seed], np.uint64) * _ODD)


class ExactCaches:
    """Real JAX caches, updated in place.

    Args:
        layout: the groups; no two share a leaf. A block of an attention group has its tokens in the first dimension
            of each leaf's block shape; one of a recurrent group is one state.
        num_blocks: of every cache.
        seed: of block ids and garbage.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, seed: int = 0):
        self.layout = layout
        self.num_blocks = num_blocks
        self.rng = np.random.default_rng(seed)
        self.caches = make_caches(layout, num_blocks, seed)
        self.must_be = self.read()
        self.refs = {g: np.zeros(num_blocks, np.int64) for g in layout.cached}
        self._free = {g: list(range(num_blocks)) for g in layout.cached}
        self._dirty: dict[int, set[int]] = {g: set() for g in layout.cached}

    # --- blocks

    def take(self, g: int, *, like: int = -1) -> int:
        """Returns a block that nobody holds, now held once; with the bytes of the block `like`, or with garbage.

        Raises:
            OutOfBlocksError: there is none.
        """
        free = self._free[g]
        if not free:
            raise OutOfBlocksError(self.layout.groups[g].name)
        at = int(self.rng.integers(len(free)))
        free[at], free[-1] = free[-1], free[at]
        block = free.pop()
        self.refs[g][block] = 1
        if like >= 0:
            for leaf in self.layout.groups[g].leaves:
                self.must_be[leaf.name][block] = self.must_be[leaf.name][like]
            self._dirty[g].add(block)
        return block

    def hold(self, g: int, block: int) -> None:
        """Counts one more holder of a block."""
        self.refs[g][block] += 1

    def release(self, g: int, block: int) -> None:
        """Ends one hold; a block that nobody holds is filled with garbage at once."""
        self.refs[g][block] -= 1
        if self.refs[g][block] == 0:
            self._free[g].append(block)
            for leaf in self.layout.groups[g].leaves:
                held = self.must_be[leaf.name][block]
                held[...] = self.rng.integers(0, 256, held.shape, np.uint8)
            self._dirty[g].add(block)

    def write(self, g: int, blocks: np.ndarray, rows: np.ndarray, marks: np.ndarray) -> None:
        """Writes what tokens leave in rows of blocks; the arguments are parallel."""
        for leaf in self.layout.groups[g].leaves:
            self.must_be[leaf.name][blocks, :, rows] = self.content(g, leaf, marks)
        self._dirty[g].update(blocks.tolist())

    def check_held(self, g: int, holds: np.ndarray) -> None:
        """Every block is free, or held as often as `holds` says."""
        assert np.array_equal(holds, self.refs[g]), "a block is held as often as the tables say"
        assert sorted(self._free[g]) == np.flatnonzero(holds == 0).tolist(), "a block is free or held"

    # --- bytes

    def read(self) -> dict[str, np.ndarray]:
        """The bytes of all caches, `(num_blocks, layers, rows, bytes of a row)`; a row is a token, or a state."""
        return {name: self._by_block(array, self.layout.leaves[name]) for name, array in _copied(self.caches).items()}

    def content(self, g: int, leaf: LeafSpec, marks: np.ndarray) -> np.ndarray:
        """What tokens leave in a leaf, `uint8` `(len(marks), layers, bytes of a row)`."""
        layers, row_bytes = leaf.layers or 1, self.must_be[leaf.name].shape[-1]
        words = np.arange(layers * -(-row_bytes // 8), dtype=np.uint64).reshape(layers, -1)
        of_leaf = np.uint64(1000 * g + self.layout.groups[g].leaves.index(leaf) * 100_000)
        found = mixed(marks[:, None, None] + (words + of_leaf) * _ODD)
        return found.view(np.uint8)[..., :row_bytes]

    def block(self, g: int, leaf: LeafSpec, marks: np.ndarray, places: np.ndarray) -> np.ndarray:
        """What whole blocks of a request must hold, `(len(places), layers, rows, bytes of a row)`."""
        tokens_per_block = self.layout.groups[g].tokens_per_block
        rows = self.must_be[leaf.name].shape[2]
        tokens = (places[:, None] + 1) * tokens_per_block - rows + np.arange(rows)
        tokens = np.minimum(tokens, len(marks) - 1)  # a block that the device holds in part may be the last one
        found = self.content(g, leaf, marks[tokens.ravel()])
        return np.moveaxis(found.reshape(*tokens.shape, *found.shape[1:]), 1, 2)

    def check_caches(self) -> None:
        """Every byte of every cache is what it must be."""
        self.flush()
        for name, found in self.read().items():
            assert np.array_equal(found, self.must_be[name]), f"{name}: a block changed that nothing may change"

    def flush(self) -> None:
        """Brings the caches to what they must be, in place."""
        for g, blocks in self._dirty.items():
            if not blocks:
                continue
            names = [leaf.name for leaf in self.layout.groups[g].leaves]
            ids = np.fromiter(blocks, np.int32, len(blocks))
            padded = np.full(_padded(len(ids)), self.num_blocks, np.int32)
            padded[: len(ids)] = ids
            rows = [self._as_leaf(self.must_be[name].take(padded, 0, mode="clip"), name) for name in names]
            axes = tuple(len(stack(self.layout.leaves[name])) for name in names)
            updated = _updated([self.caches[name] for name in names], padded, rows, axes)
            self.caches.update(zip(names, updated, strict=True))
            blocks.clear()

    def is_recurrent(self, g: int) -> bool:
        return isinstance(self.layout.groups[g].kind, Recurrent)

    # --- parts

    def _by_block(self, array: jax.Array, leaf: LeafSpec) -> np.ndarray:
        host = np.asarray(array)
        blocks_first = np.ascontiguousarray(np.moveaxis(host, len(stack(leaf)), 0))
        g = next(g for g in self.layout.cached if leaf in self.layout.groups[g].leaves)
        rows = 1 if self.is_recurrent(g) else leaf.block_shape[0]
        return blocks_first.reshape(len(blocks_first), leaf.layers or 1, rows, -1).view(np.uint8).copy()

    def _as_leaf(self, blocks: np.ndarray, name: str) -> np.ndarray:
        """The inverse of `_by_block`, for some blocks."""
        leaf = self.layout.leaves[name]
        values = blocks.reshape(len(blocks), leaf.layers or 1, -1).view(leaf.dtype)
        values = values.reshape(len(blocks), *stack(leaf), *leaf.block_shape)
        return np.ascontiguousarray(np.moveaxis(values, 0, len(stack(leaf))))


def same_blocks(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """A mask of the blocks that are equal."""
    return (some == others).all(axis=(1, 2, 3))


def _padded(count: int) -> int:
    """One of few lengths, so that few programs are compiled."""
    return next(length for length in (8 * 4**n for n in itertools.count()) if length >= count)


@jax.jit
def _copied(caches: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(lambda array: array.copy(), caches)


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _updated(
    arrays: list[jax.Array], block_ids: jax.Array, rows: list[jax.Array], axes: tuple[int, ...]
) -> list[jax.Array]:
    """Arrays with some blocks replaced, in place; ids past the last block are dropped. They move as integers, since
    XLA may change the bits of a float that is not a number."""
    updated = []
    for array, row, axis in zip(arrays, rows, axes, strict=True):
        unsigned = np.dtype(f"uint{8 * array.dtype.itemsize}")
        words, values = (jax.lax.bitcast_convert_type(each, unsigned) for each in (array, row))
        words = words.at[(slice(None),) * axis + (block_ids,)].set(values, mode="drop")
        updated.append(jax.lax.bitcast_convert_type(words, array.dtype))
    return updated
