"""A decode loop that is one compiled program, and stores each chunk when its last token is written.

What a token leaves in a cache is drawn before; requests join at different steps. Blocks are taken when a token
needs one, freed as `traced.retained_from` allows, and used again at once: each request owns few blocks of the
sliding and the recurrent group, in a ring.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import CacheLayout, FullAttention, GroupSpec, LeafSpec, Recurrent, SlidingWindow, traced
from kvjax.chunking import resolve_chunking
from pallas_kernels import block_copy, pack

LEAVES = (
    LeafSpec("full", (4, 3, 2), "bfloat16"),
    LeafSpec("local", (2, 3), np.float32),
    LeafSpec("state", (6,), np.uint16),
)
KINDS = (FullAttention(), SlidingWindow(6), Recurrent())
TOKENS_PER_BLOCK = (4, 2, 4)
RINGS = (None, 6, 2)  # blocks that a request owns; `None`: one for each place
LAYOUT = CacheLayout(
    [
        GroupSpec(leaf.name, kind, tokens, (leaf,))
        for leaf, kind, tokens in zip(LEAVES, KINDS, TOKENS_PER_BLOCK, strict=True)
    ]
)
CHUNKING = resolve_chunking(LAYOUT, blocks_per_chunk={"local": 2})
STATE = 2
State = dict[str, Any]


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], leaf: LeafSpec) -> np.ndarray:
    if leaf.dtype == np.uint16:
        return rng.integers(0, 2**16, shape, np.uint16)
    return rng.standard_normal(shape).astype(leaf.dtype)  # XLA:CPU keeps not the bits of every NaN


def start(rng: np.random.Generator, num_requests: int, num_steps: int) -> tuple[State, State]:
    """What the loop carries, all memory filled with random bytes, and what it only reads."""
    state: State = {"tables": [], "caches": [], "staging": [], "pools": [], "logs": [], "used": [], "dropped": 0}
    given: State = {"values": [], "blocks": []}
    for g, leaf in enumerate(LEAVES):
        width = -(-num_steps // TOKENS_PER_BLOCK[g])
        owned = RINGS[g] or width
        words = (CHUNKING.chunk_bytes[g] or 0) // 4
        token_shape = leaf.block_shape if g == STATE else leaf.block_shape[1:]
        own = rng.permutation(num_requests * owned).astype(np.int32).reshape(num_requests, owned)
        given["blocks"].append(own[:, np.arange(width) % owned])
        given["values"].append(random_bits(rng, (num_requests, num_steps, *token_shape), leaf))
        state["tables"].append(np.full((num_requests, width), -1, np.int32))
        state["caches"].append(random_bits(rng, (num_requests * owned, *leaf.block_shape), leaf))
        state["staging"].append(rng.integers(0, 2**32, (num_requests, words), np.uint32))
        state["pools"].append(rng.integers(0, 2**32, (num_requests * width + 1, words), np.uint32))
        state["logs"].append(np.full((num_requests * width + 1, 2), -1, np.int32))
        state["used"].append(np.int32(0))
    state["dropped"] = np.int32(0)
    return jax.tree.map(jnp.asarray, (state, given))


@jax.jit
def decode(state: State, given: State, joins: Array, steps: Array) -> State:
    """Runs the steps. Each request writes its first token at the step at which it joins."""
    num_requests = len(joins)

    def step(state: State, number: Array) -> tuple[State, None]:
        starts = jnp.maximum(0, number - joins)
        stops = starts + (number >= joins)
        kept = traced.retained_from(CHUNKING, stops)
        new: State = {name: [] for name in state} | {"dropped": state["dropped"]}
        for g, group in enumerate(LAYOUT.groups):
            tables, cache = write(g, state, given, starts, stops)
            moves = traced.completed_chunks(CHUNKING, g, tables, starts, stops)
            staging = pack([cache], moves.block_ids, moves.count, state["staging"][g])
            rows = jnp.arange(num_requests, dtype=jnp.int32)
            units = state["used"][g] + rows
            (pool,) = block_copy([staging], rows, [state["pools"][g]], units, moves.count)
            real = jnp.where(rows < moves.count, units, len(pool))
            entry = jnp.stack([moves.request_idx, moves.chunk_idx], axis=1)
            places = jnp.arange(tables.shape[1], dtype=jnp.int32)
            freed = places < kept[group.name][:, None] // group.tokens_per_block
            new["tables"].append(jnp.where(freed, -1, tables))
            new["caches"].append(cache)
            new["staging"].append(staging)
            new["pools"].append(pool)
            new["logs"].append(state["logs"][g].at[real].set(entry, mode="drop"))
            new["used"].append(state["used"][g] + moves.count)
            new["dropped"] += moves.num_dropped + moves.num_over
        return new, None

    return jax.lax.scan(step, state, steps)[0]


def write(g: int, state: State, given: State, starts: Array, stops: Array) -> tuple[Array, Array]:
    """Takes a block where the step needs one, and writes one token of each request, or its state at a block's end."""
    tokens, (num_requests, width) = TOKENS_PER_BLOCK[g], state["tables"][g].shape
    writes = (stops > starts) & ((stops % tokens == 0) | (g != STATE))
    here = jnp.where(writes, starts // tokens, width)
    requests = jnp.arange(num_requests)
    blocks = given["blocks"][g].at[requests, here].get(mode="clip")
    tables = state["tables"][g].at[requests, here].set(blocks, mode="drop")
    cache = state["caches"][g]
    values = given["values"][g].at[requests, starts].get(mode="clip")
    target = jnp.where(writes, blocks, len(cache))
    if g == STATE:
        return tables, cache.at[target].set(values, mode="drop")
    return tables, cache.at[target, starts % tokens].set(values, mode="drop")


def chunk_bytes(g: int, values: np.ndarray, request_idx: int, chunk_idx: int) -> np.ndarray:
    """What a chunk must hold: the values of its tokens, or of the state at its end, one after the other."""
    tokens = CHUNKING.tokens_per_chunk[g] or 0
    first = (chunk_idx + 1) * tokens - 1 if g == STATE else chunk_idx * tokens
    return np.ascontiguousarray(values[request_idx, first : (chunk_idx + 1) * tokens]).view(np.uint8).ravel()
