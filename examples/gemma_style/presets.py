"""Geometry per layer of three Gemma models, and the KV-cache layout that follows from it."""

from dataclasses import dataclass

import numpy as np

import kvjax

FULL, LOCAL = "full", "local"


@dataclass(frozen=True, slots=True)
class Attention:
    """One kind of attention layer: its cache and its rotary embedding.

    Args:
        kv_heads: heads of the keys and values.
        head_dim: elements of one head, query, key and value alike.
        tokens_per_block: tokens in one block of the paged cache.
        rope_base: base of the rotary embedding.
        window_tokens: tokens a query reads, itself included; `None` reads all.
        rotary_fraction: part of a head that is rotated.
        keys_are_values: keys and values share one projection. The cache still holds both.
    """

    kv_heads: int
    head_dim: int
    tokens_per_block: int
    rope_base: float
    window_tokens: int | None = None
    rotary_fraction: float = 1.0
    keys_are_values: bool = False

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of one block of keys, or of values."""
        return (self.tokens_per_block, self.kv_heads, self.head_dim)

    def first_needed(self, position: int) -> int:
        """Returns the first token that the token at `position` reads."""
        return 0 if self.window_tokens is None else max(0, position - self.window_tokens + 1)


@dataclass(frozen=True, slots=True)
class Preset:
    """What a model has in each layer, whatever its width and depth.

    Args:
        query_heads: heads of the queries, in every layer.
        local: the sliding-window layers.
        full: the full-attention layers, every `pattern`-th one.
        pattern: layers from one full layer to the next.
        turns: of each conversation, unless the user says how many; fewer where a token costs more.
    """

    query_heads: int
    local: Attention
    full: Attention
    pattern: int = 6
    turns: int = 3

    def attention(self, group: str) -> Attention:
        """Returns the kind of attention of a group's layers."""
        return self.full if group == FULL else self.local


PRESETS = {
    "gemma-3-270m": Preset(
        query_heads=4,
        local=Attention(kv_heads=1, head_dim=256, tokens_per_block=16, rope_base=1e4, window_tokens=512),
        full=Attention(kv_heads=1, head_dim=256, tokens_per_block=16, rope_base=1e6),
        turns=6,
    ),
    "gemma-3-4b": Preset(
        query_heads=8,
        local=Attention(kv_heads=4, head_dim=256, tokens_per_block=16, rope_base=1e4, window_tokens=1024),
        full=Attention(kv_heads=4, head_dim=256, tokens_per_block=16, rope_base=1e6),
    ),
    # Global layers have one KV head of 512: engines give them blocks of 64 tokens, so that a block of
    # either group has the same bytes per layer.
    "gemma-4-12B": Preset(
        query_heads=16,
        local=Attention(kv_heads=8, head_dim=256, tokens_per_block=16, rope_base=1e4, window_tokens=1024),
        full=Attention(
            kv_heads=1, head_dim=512, tokens_per_block=64, rope_base=1e6, rotary_fraction=0.25, keys_are_values=True
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A preset scaled to what this machine decodes.

    Args:
        preset: geometry per layer.
        num_layers: layers, at least one pattern.
        width: elements of a hidden state.
        vocabulary: number of tokens, at least the 256 bytes.
        cache_dtype: element type of the caches.
    """

    preset: Preset
    num_layers: int
    width: int
    vocabulary: int
    cache_dtype: np.dtype

    @property
    def layer_groups(self) -> tuple[str, ...]:
        """The group of each layer."""
        pattern = self.preset.pattern
        return tuple(FULL if i % pattern == pattern - 1 else LOCAL for i in range(self.num_layers))

    def layout(self) -> kvjax.CacheLayout:
        """Returns the cache layout: a group of full layers and one of sliding layers."""
        groups = []
        for name in (FULL, LOCAL):
            attention = self.preset.attention(name)
            layers = [i for i, group in enumerate(self.layer_groups) if group == name]
            window = attention.window_tokens
            groups.append(
                kvjax.GroupSpec(
                    name,
                    kvjax.FullAttention() if window is None else kvjax.SlidingWindow(window),
                    attention.tokens_per_block,
                    leaves=tuple(
                        kvjax.LeafSpec(leaf, attention.block_shape, self.cache_dtype)
                        for i in layers
                        for leaf in leaf_names(i)
                    ),
                    num_layers=len(layers),
                )
            )
        return kvjax.CacheLayout(tuple(groups))


def leaf_names(layer: int) -> tuple[str, str]:
    """Returns the names of a layer's keys and values among the caches."""
    return f"layer{layer}.k", f"layer{layer}.v"
