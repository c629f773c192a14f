"""A decoder's step with transfers inside: layers that alternate between a full and a sliding group.

What each instruction belongs to is in the compiled text: every layer is a named scope.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax import fused

GROUPS = ("full", "sliding")
LEAVES = ("k", "v")
SETTLE_AFTER = 2
Cache = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model and of its step; both groups have blocks of the same shape."""

    num_layers: int
    width: int
    heads: int
    head_dim: int
    tokens_per_block: int
    num_blocks: int
    tokens: int
    read_blocks: Mapping[str, int]
    window_tokens: int
    bucket: int
    dtype: Any

    @property
    def block_shape(self) -> tuple[int, ...]:
        return self.tokens_per_block, self.heads, self.head_dim

    @property
    def cache_shape(self) -> tuple[int, ...]:
        return self.num_blocks, *self.block_shape

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Rows that arrive in one group."""
        return self.num_layers // len(GROUPS), self.bucket, *self.block_shape

    def weight_shapes(self) -> dict[str, tuple[int, int]]:
        inner = self.heads * self.head_dim
        square = dict.fromkeys(("q", "k", "v"), (self.width, inner))
        return square | {
            "o": (inner, self.width),
            "up": (self.width, 4 * self.width),
            "down": (4 * self.width, self.width),
        }

    def without_transfers(self) -> "Sizes":
        return replace(self, bucket=0)


class Places(NamedTuple):
    """Where one group's tokens lie: written at `(block, offset)`, read from blocks whose first position is given."""

    write_blocks: Array
    write_offsets: Array
    read_blocks: Array
    read_starts: Array


def step(
    sizes: Sizes,
    weights: Sequence[Mapping[str, Array]],
    x: Array,
    positions: Array,
    caches: Sequence[Cache],
    places: Mapping[str, Places],
    arriving: Mapping[str, fused.Arriving],
    finished: Mapping[str, Array],
    *,
    platform: str | None = None,
    settle_after: int = SETTLE_AFTER,
    fetch_ahead: int | None = None,
) -> tuple[Array, list[Cache], list[Cache]]:
    """Returns the activations, the updated caches and the rows that leave, by layer.

    With `fetch_ahead`, no transfer to the device starts before so many layers ahead of its own; with 0, which is a
    mistake for tests to find, none starts before its own.
    """

    def bring(i: int, place: Array) -> fused.Fetched:
        return fused.fetch(arriving[GROUPS[i % len(GROUPS)]], place, platform=platform)

    ahead = fetch_ahead or 0
    fetched = [bring(i, jnp.int32(i // len(GROUPS))) for i in range(ahead)]
    updated, leaving = [], []
    for i, weight in enumerate(weights):
        group = GROUPS[i % len(GROUPS)]
        with jax.named_scope(f"layer{i}_"):
            if i + ahead < len(weights):
                place = jnp.int32((i + ahead) // len(GROUPS))
                if fetch_ahead is not None:
                    x, place = jax.lax.optimization_barrier((x, place))
                fetched.append(bring(i + ahead, place))
            x, cache = fused.restore(x, caches[i], fetched[i], platform=platform)
            x, cache = layer(sizes, weight, x, positions, cache, group, places[group])
            leaving.append(fused.collect(cache, finished[group], platform=platform))
            if i >= settle_after:
                x, leaving[i - settle_after] = fused.settle(x, leaving[i - settle_after])
        updated.append(cache)
    return x, updated, leaving


def layer(
    sizes: Sizes,
    weight: Mapping[str, Array],
    x: Array,
    positions: Array,
    cache: Cache,
    group: str,
    places: Places,
) -> tuple[Array, Cache]:
    """Writes the tokens' keys and values, attends to the blocks read, and returns what the next layer takes."""
    heads = (-1, sizes.heads, sizes.head_dim)
    cache = {
        name: cache[name]
        .at[places.write_blocks, places.write_offsets]
        .set((x @ weight[name]).reshape(heads).astype(cache[name].dtype), mode="drop")
        for name in LEAVES
    }
    k, v = (cache[name].at[places.read_blocks].get(mode="clip").reshape(heads).astype(x.dtype) for name in LEAVES)
    query = (x @ weight["q"]).reshape(heads)
    token = (places.read_starts[:, None] + jnp.arange(sizes.tokens_per_block)).reshape(1, -1)
    visible = (token >= 0) & (token <= positions[:, None])
    if group == "sliding":
        visible &= token > positions[:, None] - sizes.window_tokens
    scores = jnp.einsum("rhd,shd->hrs", query, k).astype(jnp.float32) / math.sqrt(sizes.head_dim)
    mixed = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1).astype(x.dtype)
    values = jnp.where((token >= 0).reshape(-1, 1, 1), v, 0)
    x = x + jnp.einsum("hrs,shd->rhd", mixed, values).reshape(x.shape[0], -1) @ weight["o"]
    return x + jax.nn.gelu(x @ weight["up"]) @ weight["down"], cache
