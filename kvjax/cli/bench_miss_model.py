"""The decode step of `kvjax bench miss`: one token of one sequence, a Gemma-style model on paged caches.

It has the geometry of Gemma-3-270m in every layer (4 query heads, one KV head of 256, a window of 512 in five of
six layers, blocks of 16 tokens) and random weights. One leaf a layer holds keys and values.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.groups import CacheLayout, FullAttention, GroupSpec, LeafSpec, SlidingWindow

FULL, LOCAL = "full", "local"
TOKENS_PER_BLOCK = 16
WINDOW_TOKENS = 512
VOCABULARY = 4096
_PATTERN = 6  # every sixth layer is a full one
_QUERY_HEADS, _HEAD_DIM = 4, 256
_ROPE_BASE = {FULL: 1e6, LOCAL: 1e4}

Caches = dict[str, jax.Array]


class Layer(NamedTuple):
    """Weights of one layer; a matrix is `(in, out)`, a norm's scale an offset from 1."""

    before_attention: jax.Array
    query: jax.Array
    key_value: jax.Array
    out: jax.Array
    after_attention: jax.Array
    before_feed_forward: jax.Array
    gate_up: jax.Array
    down: jax.Array
    after_feed_forward: jax.Array


class Weights(NamedTuple):
    """Weights of the model; the embedding is `(VOCABULARY, width)`, tied to the output."""

    embedding: jax.Array
    layers: tuple[Layer, ...]
    final_norm: jax.Array


def group_of(layer_idx: int) -> str:
    """Returns the group of a layer."""
    return FULL if layer_idx % _PATTERN == _PATTERN - 1 else LOCAL


def layout_of(num_layers: int) -> CacheLayout:
    """Returns the cache layout: the full layers and the sliding ones, float32."""
    shape = (TOKENS_PER_BLOCK, 2, _HEAD_DIM)
    leaves = {
        name: [LeafSpec(f"layer{i}", shape, "float32") for i in range(num_layers) if group_of(i) == name]
        for name in (FULL, LOCAL)
    }
    kinds = {FULL: FullAttention(), LOCAL: SlidingWindow(WINDOW_TOKENS)}
    return CacheLayout(
        [GroupSpec(name, kinds[name], TOKENS_PER_BLOCK, leaves[name], num_layers=len(leaves[name])) for name in leaves]
    )


def new_caches(layout: CacheLayout, num_blocks: int, device: Any) -> Caches:
    """Returns zeroed caches of so many blocks in every group, committed to the device."""
    return {
        name: jnp.zeros((num_blocks, *leaf.block_shape), leaf.dtype, device=device)
        for name, leaf in layout.leaves.items()
    }


@partial(jax.jit, static_argnums=(1, 2))
def random_weights(key: jax.Array, num_layers: int, width: int) -> Weights:
    """Returns weights for so many layers, at least one pattern, of so many elements in a hidden state."""
    kv_width, query_width, hidden = 2 * _HEAD_DIM, _QUERY_HEADS * _HEAD_DIM, 16 * width // 5
    keys = iter(jax.random.split(key, 5 * num_layers + 1))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / math.sqrt(rows)

    norm = jnp.zeros(width)
    layers = tuple(
        Layer(
            norm,
            matrix(width, query_width),
            matrix(width, kv_width),
            matrix(query_width, width),
            norm,
            norm,
            matrix(width, 2 * hidden),
            matrix(hidden, width),
            norm,
        )
        for _ in range(num_layers)
    )
    return Weights(matrix(VOCABULARY, width), layers, norm)


def decode_step() -> Callable[..., tuple[jax.Array, Caches]]:
    """Returns the jitted step: `(weights, caches, token, position, table)` to the next token and the caches.

    The caches are donated. `token` and `position` are scalars, `table` is `(blocks,)`, the blocks of the sequence in
    every group.
    """
    return jax.jit(_decode, donate_argnums=1)


def _decode(
    weights: Weights, caches: Caches, token: jax.Array, position: jax.Array, table: jax.Array
) -> tuple[jax.Array, Caches]:
    caches = dict(caches)
    x = weights.embedding[token] * math.sqrt(weights.embedding.shape[1])
    for i, layer in enumerate(weights.layers):
        name = f"layer{i}"
        mixed, caches[name] = _attend(
            layer, _norm(x, layer.before_attention), position, caches[name], table, group_of(i)
        )
        x = x + _norm(mixed, layer.after_attention)
        gate, up = jnp.split(_norm(x, layer.before_feed_forward) @ layer.gate_up, 2)
        x = x + _norm((jax.nn.gelu(gate, approximate=True) * up) @ layer.down, layer.after_feed_forward)
    return jnp.argmax(weights.embedding @ _norm(x, weights.final_norm)), caches


def _attend(
    layer: Layer, x: jax.Array, position: jax.Array, cache: jax.Array, table: jax.Array, group: str
) -> tuple[jax.Array, jax.Array]:
    query = _rotated((x @ layer.query).reshape(_QUERY_HEADS, _HEAD_DIM), position, group)
    key, value = (x @ layer.key_value).reshape(2, _HEAD_DIM)
    key = _rotated(key[None], position, group)[0]
    cache = cache.at[table[position // TOKENS_PER_BLOCK], position % TOKENS_PER_BLOCK].set(jnp.stack([key, value]))
    first, count = 0, table.shape[0]
    if group == LOCAL:
        first = jnp.maximum(position - WINDOW_TOKENS + 1, 0) // TOKENS_PER_BLOCK
        count = min(count, WINDOW_TOKENS // TOKENS_PER_BLOCK + 1)
    block_idx = first + jnp.arange(count)
    read = cache[table[jnp.minimum(block_idx, table.shape[0] - 1)]].reshape(-1, 2, _HEAD_DIM)
    tokens = (block_idx[:, None] * TOKENS_PER_BLOCK + jnp.arange(TOKENS_PER_BLOCK)).reshape(-1)
    visible = tokens <= position
    if group == LOCAL:
        visible &= tokens > position - WINDOW_TOKENS
    scores = jnp.where(visible, query @ read[:, 0].T / math.sqrt(_HEAD_DIM), -1e30)
    return (jax.nn.softmax(scores, axis=-1) @ read[:, 1]).reshape(-1) @ layer.out, cache


def _rotated(x: jax.Array, position: jax.Array, group: str) -> jax.Array:
    half = _HEAD_DIM // 2
    angle = position * _ROPE_BASE[group] ** (-jnp.arange(half) / half)
    first, second = x[:, :half], x[:, half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _norm(x: jax.Array, offset: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x)) + 1e-6) * (1 + offset)
