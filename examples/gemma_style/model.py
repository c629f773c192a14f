"""A Gemma-style decoder in Flax NNX that reads and writes paged caches.

It has Gemma's structure: RMSNorm before and after each part, rotary embeddings with a local and a global
base, grouped-query attention with query and key norms, GeGLU, tied embeddings. The weights are random.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax import fused

from .presets import Attention, ModelShape, leaf_names

Caches = dict[str, jax.Array]
Rows = dict[str, dict[str, jax.Array]]
_LAYERS_TO_LEAVE = 2
_HIDDEN_PER_WIDTH = 4


class Places(NamedTuple):
    """Where one group's tokens lie in the caches during a step.

    Args:
        write_blocks: `(rows,)` block of each row's token; out of range for an unused row.
        write_offsets: `(rows,)` its place in that block.
        read_blocks: `(places,)` blocks to read. A block keeps its place for as long as it is read.
        read_starts: `(places,)` position of each block's first token, negative for none.
    """

    write_blocks: jax.Array
    write_offsets: jax.Array
    read_blocks: jax.Array
    read_starts: jax.Array


class RMSNorm(nnx.Module):
    """Gemma's norm: the learnt scale is an offset from 1."""

    def __init__(self, width: int, rngs: nnx.Rngs, scale: float = 1.0):
        noise = 0.1 * jax.random.normal(rngs.params(), (width,))
        self.offset = nnx.Param(scale - 1 + noise)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes the last axis."""
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return x * inverse * (1 + self.offset[...])


class PagedAttention(nnx.Module):
    """Grouped-query attention over a paged cache.

    Args:
        shape: the model.
        attention: the geometry of this layer.
        rngs: source of the random weights.
    """

    def __init__(self, shape: ModelShape, attention: Attention, rngs: nnx.Rngs):
        self.attention = attention
        heads, kv_heads, dim = shape.preset.query_heads, attention.kv_heads, attention.head_dim
        self.query = nnx.Linear(shape.width, heads * dim, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(shape.width, kv_heads * dim, use_bias=False, rngs=rngs)
        if not attention.keys_are_values:
            self.value = nnx.Linear(shape.width, kv_heads * dim, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(heads * dim, shape.width, use_bias=False, rngs=rngs)
        # A query norm above 1 makes random attention choose among tokens instead of averaging them.
        self.query_norm = RMSNorm(dim, rngs, scale=6.0)
        self.key_norm = RMSNorm(dim, rngs)

    def __call__(
        self, x: jax.Array, positions: jax.Array, keys: jax.Array, values: jax.Array, places: Places
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Writes the rows' keys and values, then attends to what the rows may read.

        Args:
            x: `(rows, width)`.
            positions: `(rows,)`, -1 for an unused row.
            keys: `(blocks, tokens_per_block, kv_heads, head_dim)`, updated.
            values: as `keys`.
            places: of this layer's group.

        Returns:
            `(rows, width)`, and the updated keys and values.
        """
        rows, dim = x.shape[0], self.attention.head_dim
        projected = self.key(x).reshape(rows, -1, dim)
        key = rotate(self.key_norm(projected), positions, self.attention)
        value = projected if self.attention.keys_are_values else self.value(x).reshape(rows, -1, dim)
        query = rotate(self.query_norm(self.query(x).reshape(rows, -1, dim)), positions, self.attention)
        keys = _write(keys, key, places)
        values = _write(values, value, places)

        visible = visible_tokens(positions, places.read_starts, self.attention)
        some_row = visible.any(axis=0)
        key, value = _read(keys, places, some_row), _read(values, places, some_row)
        grouped = query.reshape(rows, self.attention.kv_heads, -1, dim)
        scores = jnp.einsum("rkgd,skd->krgs", grouped, key) / math.sqrt(dim)
        scores = jnp.where(visible[None, :, None, :], scores, -1e30)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("krgs,skd->rkgd", weights, value)
        return self.out(mixed.reshape(rows, -1)), keys, values


def rotate(x: jax.Array, positions: jax.Array, attention: Attention) -> jax.Array:
    """Returns `x`, `(rows, heads, head_dim)`, with rotary position embedding."""
    half = attention.head_dim // 2
    pair = jnp.arange(half)
    frequency = jnp.where(pair < half * attention.rotary_fraction, attention.rope_base ** (-pair / half), 0.0)
    angle = positions[:, None, None] * frequency
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def visible_tokens(positions: jax.Array, read_starts: jax.Array, attention: Attention) -> jax.Array:
    """Returns `(rows, tokens read)`: which of the tokens read each row may attend to."""
    token = (read_starts[:, None] + jnp.arange(attention.tokens_per_block)).reshape(1, -1)
    row = positions[:, None]
    visible = (token >= 0) & (token <= row)
    if attention.window_tokens is not None:
        visible &= token > row - attention.window_tokens
    return visible


def _write(cache: jax.Array, rows: jax.Array, places: Places) -> jax.Array:
    """Writes each row's token into its block; a row whose block is out of range is not written.

    One token at a time, seen as integers if it is bfloat16: on some versions of XLA:CPU a scatter of
    bfloat16 converts the whole cache.
    """
    rows = rows.astype(cache.dtype)
    word = jnp.uint16 if cache.dtype.itemsize == 2 else jnp.uint32

    def write_row(i: jax.Array, cache: jax.Array) -> jax.Array:
        def write(cache: jax.Array) -> jax.Array:
            words = jax.lax.bitcast_convert_type(cache, word)
            token = jax.lax.bitcast_convert_type(rows[i], word)
            words = jax.lax.dynamic_update_slice(
                words, token[None, None], (places.write_blocks[i], places.write_offsets[i], 0, 0)
            )
            return jax.lax.bitcast_convert_type(words, cache.dtype)

        return jax.lax.cond(places.write_blocks[i] < cache.shape[0], write, lambda cache: cache, cache)

    return jax.lax.fori_loop(0, rows.shape[0], write_row, cache)


def _read(cache: jax.Array, places: Places, visible: jax.Array) -> jax.Array:
    blocks = cache.at[places.read_blocks].get(mode="clip")
    tokens = blocks.reshape(-1, *blocks.shape[2:]).astype(jnp.float32)
    # A block may still hold another request's bytes, NaN among them, and 0 times NaN is NaN: what no
    # row may see becomes zero before the product, not only in the scores.
    return jnp.where(visible[:, None, None], tokens, 0.0)


class GeGLU(nnx.Module):
    """Gemma's feed-forward part."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        hidden = _HIDDEN_PER_WIDTH * width
        self.gate = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `(rows, width)`."""
        return self.down(jax.nn.gelu(self.gate(x), approximate=True) * self.up(x))


class Layer(nnx.Module):
    """Attention and feed-forward, each between two norms.

    The norms after them have a scale above 1, so that a token's own embedding does not decide what follows it.
    """

    def __init__(self, shape: ModelShape, attention: Attention, rngs: nnx.Rngs):
        self.attention = PagedAttention(shape, attention, rngs)
        self.feed_forward = GeGLU(shape.width, rngs)
        self.before_attention = RMSNorm(shape.width, rngs)
        self.after_attention = RMSNorm(shape.width, rngs, scale=4.0)
        self.before_feed_forward = RMSNorm(shape.width, rngs)
        self.after_feed_forward = RMSNorm(shape.width, rngs, scale=4.0)

    def __call__(
        self, x: jax.Array, positions: jax.Array, keys: jax.Array, values: jax.Array, places: Places
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the new hidden states and the updated caches."""
        attended, keys, values = self.attention(self.before_attention(x), positions, keys, values, places)
        x = x + self.after_attention(attended)
        return x + self.after_feed_forward(self.feed_forward(self.before_feed_forward(x))), keys, values


class GemmaStyle(nnx.Module):
    """The decoder.

    Args:
        shape: preset and scale.
        seed: of the random weights.
    """

    def __init__(self, shape: ModelShape, seed: int):
        rngs = nnx.Rngs(seed)
        self.shape = shape
        embedding = jax.random.normal(rngs.params(), (shape.vocabulary, shape.width)) / math.sqrt(shape.width)
        self.embedding = nnx.Param(embedding)
        self.layers = nnx.List(Layer(shape, shape.preset.attention(group), rngs) for group in shape.layer_groups)
        self.final_norm = RMSNorm(shape.width, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        last_row: jax.Array,
        caches: Caches,
        places: Mapping[str, Places],
        arriving: Mapping[str, fused.Arriving],
        leaving: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, Caches, Rows]:
        """Computes one step.

        Args:
            tokens: `(rows,)`.
            positions: `(rows,)`, -1 for an unused row.
            last_row: the row whose logits are wanted.
            caches: by leaf name.
            places: by group.
            arriving: by group, blocks that are restored before their layer reads them; none if it is empty.
            leaving: by group, ids of blocks that are sent to the host after their layer wrote them.

        Returns:
            `(vocabulary,)` logits, the updated caches, and what leaves, by group and leaf name.
        """
        caches = dict(caches)
        rows: Rows = {group: {} for group in leaving}
        sent: list[tuple[str, str]] = []
        embedding = self.embedding[...]
        x = embedding[tokens] * math.sqrt(self.shape.width)
        for i, (layer, group) in enumerate(zip(self.layers, self.shape.layer_groups, strict=True)):
            k, v = leaf_names(i)
            if group in arriving:
                blocks = arriving[group]
                here = fused.Arriving({name: blocks.rows[name] for name in (k, v)}, blocks.block_ids, blocks.count)
                x, restored = fused.restore(x, {k: caches[k], v: caches[v]}, fused.fetch(here, 0))
                caches |= restored
            x, caches[k], caches[v] = layer(x, positions, caches[k], caches[v], places[group])
            if group in leaving:
                rows[group] |= fused.collect({k: caches[k], v: caches[v]}, leaving[group])
                sent.append((group, k))
                if len(sent) > _LAYERS_TO_LEAVE:  # rows have the time of so many layers to reach the host
                    early, name = sent[-1 - _LAYERS_TO_LEAVE]
                    x, rows[early][name] = fused.settle(x, rows[early][name])
        return self.final_norm(x[last_row]) @ embedding.T, caches, rows
