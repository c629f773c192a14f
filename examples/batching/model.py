"""A small decoder with full attention, sliding windows and recurrent states, and one step for any batch."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import kvjax

FULL, LOCAL, STATE = "full", "local", "state"
TOKENS_PER_BLOCK = {FULL: 16, LOCAL: 8, STATE: 16}
WINDOW_TOKENS = 24
LAYERS = (LOCAL, STATE, FULL, LOCAL, STATE, FULL)
WIDTH, HEADS, HEAD_DIM, VOCABULARY = 64, 4, 16, 256

Caches = dict[str, jax.Array]


class Batch(NamedTuple):
    """The rows of one step. A row is one token of one sequence; those of a sequence follow each other.

    Args:
        tokens: `(rows,)`.
        positions: `(rows,)`, -1 for an unused row.
        seats: `(rows,)`, the sequence of each row, by its place in the tables.
        full: `(seats, blocks)` block ids; what is not there is below 0, and is not read.
        local: as `full`.
        slots: `(seats,)`, where each sequence has its states.
    """

    tokens: jax.Array
    positions: jax.Array
    seats: jax.Array
    full: jax.Array
    local: jax.Array
    slots: jax.Array


def layout() -> kvjax.CacheLayout:
    """The three groups of the cache."""
    of = {name: [i for i, kind in enumerate(LAYERS) if kind == name] for name in TOKENS_PER_BLOCK}
    kinds = {FULL: kvjax.FullAttention(), LOCAL: kvjax.SlidingWindow(WINDOW_TOKENS), STATE: kvjax.Recurrent()}
    return kvjax.CacheLayout(
        [
            kvjax.GroupSpec(
                name,
                kinds[name],
                tokens,
                leaves=tuple(
                    kvjax.LeafSpec(leaf, (WIDTH,) if name == STATE else (tokens, HEADS, HEAD_DIM), jnp.float32)
                    for i in of[name]
                    for leaf in ([f"s{i}"] if name == STATE else [f"k{i}", f"v{i}"])
                ),
                num_layers=len(of[name]),
            )
            for name, tokens in TOKENS_PER_BLOCK.items()
        ]
    )


def new_caches(groups: kvjax.CacheLayout, num_blocks: Mapping[str, int], mesh: Mesh | None) -> tuple[Caches, Any]:
    """Zeroed caches, and where a step leaves what it returns.

    Args:
        groups: the layout.
        num_blocks: by group.
        mesh: of one axis, over which heads and states are split; `None` for one device.
    """
    shapes = {
        leaf.name: (num_blocks[group.name], *leaf.block_shape) for group in groups.groups for leaf in group.leaves
    }
    if mesh is None:
        places: Any = SingleDeviceSharding(jax.devices()[0])
        shardings = dict.fromkeys(shapes, places)
    else:
        (axis,) = mesh.axis_names
        places = NamedSharding(mesh, PartitionSpec())
        by_kind = {2: PartitionSpec(None, axis), 4: PartitionSpec(None, None, axis)}
        shardings = {name: NamedSharding(mesh, by_kind[len(shape)]) for name, shape in shapes.items()}
    make = jax.jit(
        lambda: {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}, out_shardings=shardings
    )
    return make(), (places, shardings)


def new_weights(seed: int) -> dict[str, jax.Array]:
    """Random weights."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    for i, kind in enumerate(LAYERS):
        if kind == STATE:
            shapes |= {f"in{i}": (WIDTH, WIDTH), f"out{i}": (WIDTH, WIDTH)}
        else:
            shapes |= {f"{x}{i}": (WIDTH, HEADS * HEAD_DIM) for x in ("query", "key", "value")}
            shapes[f"out{i}"] = (HEADS * HEAD_DIM, WIDTH)
        shapes |= {f"up{i}": (WIDTH, 2 * WIDTH), f"down{i}": (2 * WIDTH, WIDTH)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) / math.sqrt(shape[0])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def step(weights: Mapping[str, jax.Array], caches: Caches, batch: Batch) -> tuple[jax.Array, Caches]:
    """Computes the rows of a batch.

    Returns:
        `(rows,)` the token that follows each row, and the updated caches.
    """
    caches = dict(caches)
    x = _norm(weights["embedding"][batch.tokens])
    for i, kind in enumerate(LAYERS):
        if kind == STATE:
            mixed, caches[f"s{i}"] = _recur(_norm(x) @ weights[f"in{i}"], caches[f"s{i}"], batch)
        else:
            table = batch.full if kind == FULL else batch.local
            mixed, caches[f"k{i}"], caches[f"v{i}"] = _attend(weights, i, _norm(x), caches, table, batch, kind)
        x = x + _norm(mixed @ weights[f"out{i}"])
        x = x + _norm(jax.nn.gelu(_norm(x) @ weights[f"up{i}"]) @ weights[f"down{i}"])
    return jnp.argmax(_norm(x) @ weights["head"], axis=-1), caches


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _attend(
    weights: Mapping[str, jax.Array], i: int, x: jax.Array, caches: Caches, table: jax.Array, batch: Batch, kind: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens_per_block = TOKENS_PER_BLOCK[kind]
    query, key, value = ((x @ weights[f"{name}{i}"]).reshape(-1, HEADS, HEAD_DIM) for name in ("query", "key", "value"))
    query, key = _rotated(query, batch.positions), _rotated(key, batch.positions)
    used = batch.positions >= 0
    blocks = table[batch.seats, batch.positions // tokens_per_block]
    blocks = jnp.where(used, blocks, caches[f"k{i}"].shape[0])  # out of range: not written
    offsets = batch.positions % tokens_per_block
    keys = caches[f"k{i}"].at[blocks, offsets].set(key, mode="drop")
    values = caches[f"v{i}"].at[blocks, offsets].set(value, mode="drop")

    token = jnp.arange(table.shape[1] * tokens_per_block)
    row = batch.positions[:, None]
    seen = (token <= row) & (token > row - (WINDOW_TOKENS if kind == LOCAL else token.size + 1))

    def read(cache: jax.Array) -> jax.Array:
        held = cache.at[table[batch.seats]].get(mode="clip").reshape(len(row), -1, HEADS, HEAD_DIM)
        return jnp.where(seen[..., None, None], held, 0.0)  # what is not seen may be anything, NaN among it

    scores = jnp.einsum("rhd,rthd->rht", query, read(keys)) * (2.0 / math.sqrt(HEAD_DIM))
    shares = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("rht,rthd->rhd", shares, read(values)).reshape(len(row), -1), keys, values


def _rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    half = HEAD_DIM // 2
    angle = positions[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _recur(inputs: jax.Array, states: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """One row after the other, each from the state that the one before it left."""

    def one(states: jax.Array, row: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        new, position, slot = row
        before = jnp.where(position > 0, states.at[slot].get(mode="clip"), 0.0)
        state = jnp.tanh(0.9 * before + new)
        return states.at[jnp.where(position < 0, states.shape[0], slot)].set(state, mode="drop"), state

    states, outputs = jax.lax.scan(one, states, (inputs, batch.positions, batch.slots[batch.seats]))
    return outputs, states
