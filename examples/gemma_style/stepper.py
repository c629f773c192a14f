"""The one jitted step, of a fixed number of rows, that prefills and decodes alike."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .model import Caches, GemmaStyle, Places, Rows
from .presets import FULL, LOCAL, Attention, ModelShape

_NO_TOKEN = -(2**30)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Stepper:
    """Computes up to `rows` consecutive tokens of one sequence at a time.

    Two rules make the bits of a token's logits the same however its sequence was cut into steps. The token
    at position P is always in row `P % rows` of a step of `rows` rows: another number of rows makes XLA:CPU
    sum in another order. And a block that is read has a place that depends on its index in the sequence
    alone, so that no sum over tokens changes its order as the window slides.

    Args:
        shape: the model.
        seed: of its random weights.
        rows: tokens in one step.
        max_tokens: tokens of the longest sequence.
    """

    def __init__(self, shape: ModelShape, *, seed: int, rows: int, max_tokens: int):
        self.shape = shape
        self.rows = rows
        self.max_tokens = max_tokens
        self.attention = {name: shape.preset.attention(name) for name in (FULL, LOCAL)}
        self._places = {name: self._places_read(kind) for name, kind in self.attention.items()}
        graph, self._weights = nnx.split(GemmaStyle(shape, seed))

        def step(weights, tokens, positions, last_row, caches, places, arriving, leaving):
            model = nnx.merge(graph, weights)
            logits, caches, rows = model(tokens, positions, last_row, caches, places, arriving, leaving)
            return jnp.argmax(logits), logits, caches, rows

        self._step = jax.jit(step, donate_argnames="caches")

    def table_blocks(self, group: str) -> int:
        """Returns how many blocks of a group the longest sequence has."""
        return -(-self.max_tokens // self.attention[group].tokens_per_block)

    def new_caches(self, num_blocks: Mapping[str, int]) -> Caches:
        """Returns zeroed caches of so many blocks, by group.

        They are committed to their device, as are those that a load returns: for `jit`, arrays that are not
        committed are of another kind, and a step called with both would be compiled twice.
        """
        device = jax.devices()[0]
        return {
            leaf.name: jnp.zeros((num_blocks[group.name], *leaf.block_shape), leaf.dtype, device=device)
            for group in self.shape.layout().groups
            for leaf in group.leaves
        }

    def last_stop(self, start: int, stop: int) -> int:
        """Returns where a step from `start` towards `stop` ends: a row is `position % rows`."""
        return min(stop, (start // self.rows + 1) * self.rows)

    def __call__(
        self,
        caches: Caches,
        token_ids: Sequence[int],
        start: int,
        block_tables: Mapping[str, np.ndarray],
        arriving: Mapping[str, Any] = _NOTHING,
        leaving: Mapping[str, Any] = _NOTHING,
    ) -> tuple[jax.Array, jax.Array, Caches, Rows]:
        """Computes the tokens at `start, start + 1, …`.

        Args:
            caches: by leaf name, donated.
            token_ids: at most as many as fit up to the next multiple of `rows`; none is allowed.
            start: position of the first one.
            block_tables: `(table_blocks,)` block ids by group; blocks out of the window may be -1.
            arriving: see `GemmaStyle`.
            leaving: see `GemmaStyle`.

        Returns:
            The most likely next token, the logits `(vocabulary,)` of the last token, the caches, and what leaves.
        """
        first = start % self.rows
        used = slice(first, first + len(token_ids))
        tokens = np.zeros(self.rows, np.int32)
        tokens[used] = token_ids
        positions = np.full(self.rows, -1, np.int32)
        positions[used] = np.arange(start, start + len(token_ids))
        last_row = np.int32(max(0, first + len(token_ids) - 1))
        places = {
            name: self._places_of(name, kind, positions, start, start + len(token_ids), block_tables)
            for name, kind in self.attention.items()
        }
        return self._step(self._weights, tokens, positions, last_row, caches, places, dict(arriving), dict(leaving))

    def _places_read(self, kind: Attention) -> int:
        """Returns how many blocks a step can read."""
        total = -(-self.max_tokens // kind.tokens_per_block)
        if kind.window_tokens is None:
            return total
        return min(total, -(-(kind.window_tokens - 1 + self.rows) // kind.tokens_per_block) + 1)

    def _places_of(
        self,
        name: str,
        kind: Attention,
        positions: np.ndarray,
        start: int,
        stop: int,
        block_tables: Mapping[str, np.ndarray],
    ) -> Places:
        per_block, num_places = kind.tokens_per_block, self._places[name]
        table = block_tables[name]
        used = positions >= 0
        write_blocks = np.full(self.rows, np.iinfo(np.int32).max, np.int32)  # out of range: not written
        write_blocks[used] = table[positions[used] // per_block]
        read_blocks = np.zeros(num_places, np.int32)
        read_starts = np.full(num_places, _NO_TOKEN, np.int32)
        if start < stop:
            block_idx = np.arange(kind.first_needed(start) // per_block, (stop - 1) // per_block + 1)
            read_blocks[block_idx % num_places] = table[block_idx]
            read_starts[block_idx % num_places] = block_idx * per_block
        return Places(write_blocks, positions % per_block, read_blocks, read_starts)  # pyright: ignore[reportArgumentType]
