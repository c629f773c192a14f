"""The arithmetic that a jitted decode loop needs: twins in `jax.numpy` of what the rest of kvjax does in NumPy.

Static: chunkings, groups, kinds and all bounds. Traced: positions and block tables, whose values never compile
anything again. Everything works under `jit`, `vmap`, `scan` and `while_loop`, and takes positions of any shape.
The functions called as in `kvjax.coverage`, `kvjax.plan` and `kvjax.retention` are equal to those: the law is
stated there and once more here, and a test holds the two together.

Positions are `int32` and at most `MAX_TOKENS`, and so are all sizes of the layout, so that no sum of two wraps.
What is static is checked, by a `ValueError`; a traced position beyond it, or below 0, gives any numbers.

A step that packs every chunk it completes (then `pallas_kernels.pack(leaves, moves.block_ids, moves.count, staging)`
moves them, in the same program):

>>> import jax, jax.numpy as jnp
>>> from kvjax import CacheLayout, GroupSpec, SlidingWindow, resolve_chunking, traced
>>> chunking = resolve_chunking(CacheLayout([GroupSpec("local", SlidingWindow(6), 2, block_bytes=64)]))
>>> @jax.jit
... def moves_of(positions, block_tables):  # the token at each position was just written
...     return traced.completed_chunks(chunking, 0, block_tables, positions, positions + 1, capacity=2)
>>> tables = jnp.array([[-1, 7, 5], [3, 4, -1], [6, -1, -1]], jnp.int32)
>>> moves = moves_of(jnp.array([5, 2, 1], jnp.int32), tables)  # ends block 2, no block, and block 0
>>> moves.block_ids.tolist(), moves.chunk_idx.tolist(), moves.request_idx.tolist(), int(moves.count)
([[5], [6]], [2, 0], [0, 2], 2)
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax._arguments import check_chunking
from kvjax._checks import integer, is_int
from kvjax.chunking import Chunking
from kvjax.coverage import chunk_tokens_of
from kvjax.groups import ChunkedLocal, FullAttention, GroupSpec, Kind, Recurrent, Scratch, SlidingWindow
from kvjax.packing import blocks_in_chunk
from kvjax.plan import NULL_BLOCK
from kvjax.retention import resume_step

MAX_TOKENS = 2**29


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, eq=False)
class StepMoves:
    """Chunks of one group that a step completed, in the order of requests and of tokens. All is `int32`.

    Args:
        request_idx: `(capacity,)`, rows of the block tables; -1 from `count` on.
        chunk_idx: `(capacity,)`, places in the sequence; -1 from `count` on.
        block_ids: `(capacity, blocks in a chunk)`, as `pack` takes them; -1 from `count` on.
        count: a scalar, how many rows are real.
        num_dropped: a scalar, chunks that were completed and are not whole: a block is null or was re-used.
        num_over: a scalar, chunks that found no row: of steps longer than `step_tokens`, or beyond `capacity`.
    """

    request_idx: Array
    chunk_idx: Array
    block_ids: Array
    count: Array
    num_dropped: Array
    num_over: Array


def needed(kind: Kind, position: Any) -> tuple[Array, Array]:
    """Returns the tokens `[start, stop)` that must be in the cache to compute the token at each position."""
    at = _positions(position, "position")
    none = jnp.zeros_like(at)
    match kind:
        case FullAttention():
            return none, at
        case SlidingWindow(window_tokens):
            return jnp.maximum(0, at - (_size(window_tokens, "window_tokens") - 1)), at
        case ChunkedLocal(chunk_tokens):
            return at // _size(chunk_tokens, "chunk_tokens") * chunk_tokens, at
        case Recurrent():
            return jnp.maximum(0, at - 1), at
        case Scratch():
            return none, none


def required(group: GroupSpec, position: Any) -> tuple[Array, Array]:
    """Returns `needed` extended by the group's lookahead: the tokens that must be resident."""
    start, stop = needed(group.kind, position)
    ahead = _size(group.lookahead_tokens, "lookahead_tokens")
    return start, jnp.where(stop > 0, stop + ahead, stop)


def stored_positions(chunking: Chunking, checkpoint: Any, *, resume_multiple: int = 1) -> tuple[Array, Array]:
    """Returns `(S, R)`: where requests of `checkpoint` and of `checkpoint + 1` tokens will resume."""
    at = _positions(checkpoint, "checkpoint")
    step = _step(chunking, resume_multiple)
    shorter = jnp.maximum(0, at - 1)
    return _largest_restorable(chunking, at, shorter, step), _largest_restorable(chunking, at, at, step)


def _largest_restorable(chunking: Chunking, complete_to: Array, bound: Array, step: int) -> Array:
    """The largest position up to `bound` that the chunks complete at `complete_to` can restore.

    Full and sliding groups restore up to the end of their last complete chunk, less the lookahead, and recurrent
    ones multiples of `step`. Chunked groups restore all up to that end, and wherever an attention chunk starts:
    each of them bounds the position or divides it, and every choice is tried.
    """
    chunked: dict[tuple[int, int], None] = {}
    for g in chunking.layout.cached:
        group, tokens = chunking.layout.groups[g], chunk_tokens_of(chunking, g)
        match group.kind:
            case SlidingWindow(1) if group.lookahead_tokens == 0:
                pass
            case FullAttention() | SlidingWindow():
                bound = jnp.minimum(bound, complete_to // tokens * tokens - group.lookahead_tokens)
            case ChunkedLocal(chunk_tokens):
                chunked[chunk_tokens, tokens] = None
    best = jnp.zeros_like(bound)
    for choice in itertools.product((False, True), repeat=len(chunked)):
        divisor, below = step, bound
        for (chunk_tokens, tokens), divides in zip(chunked, choice, strict=True):
            if divides:
                divisor = math.lcm(divisor, chunk_tokens)
            else:
                below = jnp.minimum(below, complete_to // tokens * tokens)
        if divisor <= MAX_TOKENS:
            best = jnp.maximum(best, below // divisor * divisor)
    return best


def retained_from(chunking: Chunking, position: Any, *, resume_multiple: int = 1) -> dict[str, Array]:
    """Returns, by group name, the first token an engine must keep so that a store at `position`, or at any later
    one, finds what it wants. Divided by `tokens_per_block`, it counts the leading blocks that may be freed."""
    at = _positions(position, "position")
    first = _step(chunking, resume_multiple)
    stored = jnp.maximum(first, stored_positions(chunking, at, resume_multiple=resume_multiple)[0])
    kept = {}
    for g, group in enumerate(chunking.layout.groups):
        if group.is_cached:
            tokens = chunk_tokens_of(chunking, g)
            kept[group.name] = jnp.minimum(required(group, stored)[0] // tokens * tokens, needed(group.kind, at)[0])
        else:
            kept[group.name] = at
    return kept


def chunks_needed(chunking: Chunking, group_idx: int, position: Any) -> tuple[Array, Array]:
    """Returns the `chunk_idx` `[first, stop)` of a cached group that hold a token of `needed(position)`."""
    return _chunks_between(chunking, group_idx, *needed(chunking.layout.groups[group_idx].kind, position))


def chunks_required(chunking: Chunking, group_idx: int, position: Any) -> tuple[Array, Array]:
    """Returns the `chunk_idx` `[first, stop)` of a cached group that hold a token of `required(position)`. Those of
    both `stored_positions` of a checkpoint are its store set."""
    return _chunks_between(chunking, group_idx, *required(chunking.layout.groups[group_idx], position))


def chunks_completed(chunking: Chunking, group_idx: int, start: Any, stop: Any) -> tuple[Array, Array]:
    """Returns the `chunk_idx` `[first, stop)` of a cached group that a step over the tokens `[start, stop)` completes.

    A recurrent group has a state only where a step ends, and so one chunk at most. An empty step completes none.
    """
    tokens = _chunk_tokens(chunking, group_idx)
    before, after = jnp.broadcast_arrays(_positions(start, "start"), _positions(stop, "stop"))
    if not isinstance(chunking.layout.groups[group_idx].kind, Recurrent):
        return before // tokens, jnp.maximum(before, after) // tokens
    ends = (after > before) & (after % tokens == 0)
    return after // tokens - ends, after // tokens


def chunk_blocks(chunking: Chunking, group_idx: int, chunks: Any, table: Array) -> Array:
    """Returns the block ids of chunks, `int32` `(…, chunks, blocks in a chunk)`; -1 is the null block.

    Args:
        chunking: the layout and its chunks.
        group_idx: a cached group.
        chunks: `int32` `(…, chunks)`; all blocks of a negative `chunk_idx` are null.
        table: `int32` `(…, max_blocks)`, block ids by place in the sequence; past its end all are null.

    Raises:
        ValueError: a table that is not `int32`, has no place or covers more than `MAX_TOKENS` tokens.
    """
    return _blocks_at(_places(chunking, group_idx, _integers(chunks, "chunks")), _table(chunking, group_idx, table))


def completed_chunks(
    chunking: Chunking,
    group_idx: int,
    block_tables: Array,
    starts: Any,
    stops: Any,
    *,
    step_tokens: int = 1,
    capacity: int | None = None,
) -> StepMoves:
    """Returns the whole chunks of a cached group that a step of a batch completes, as moves.

    A chunk is not whole, and is counted instead, if one of its blocks is null or was re-used: the request's
    table names it again at a later place that holds tokens.

    Args:
        chunking: the layout and its chunks.
        group_idx: a cached group.
        block_tables: `int32` `(requests, max_blocks)`, after the step; -1 is the null block. What lies past the
            blocks of `stops` is not looked at.
        starts: `int32` `(requests,)` or a scalar, tokens written before the step.
        stops: `int32` `(requests,)` or a scalar, tokens written after the step. In a row without a request they
            are those before it.
        step_tokens: static, the most tokens that a request has in a step.
        capacity: static, rows of the result; by default as many as such a step can complete.

    Raises:
        ValueError: see `chunk_blocks`; tables that are not 2-d, `step_tokens` or `capacity` no positive int.
    """
    tables = _table(chunking, group_idx, block_tables)
    if tables.ndim != 2:
        raise ValueError(f"`block_tables` must be int32 of shape (requests, max_blocks), got {_described(tables)}")
    most = -(-_size(step_tokens, "step_tokens", at_least=1) // _chunk_tokens(chunking, group_idx))
    if isinstance(chunking.layout.groups[group_idx].kind, Recurrent):
        most = 1
    rows = len(tables) * most if capacity is None else integer(capacity, "capacity", at_least=1)

    before = jnp.broadcast_to(_positions(starts, "starts"), len(tables))
    after = jnp.broadcast_to(_positions(stops, "stops"), len(tables))
    first, end = chunks_completed(chunking, group_idx, before, after)
    chunks = first[:, None] + jnp.arange(most, dtype=jnp.int32)
    completed = chunks < end[:, None]
    places = _places(chunking, group_idx, chunks)
    blocks = _blocks_at(places, tables)
    tokens_per_block = chunking.layout.groups[group_idx].tokens_per_block
    used = (after + (tokens_per_block - 1)) // tokens_per_block
    there = ~_named_later(blocks, places, tables, used) & (blocks != NULL_BLOCK)
    whole = completed & there.all(axis=-1)

    (chosen,) = jnp.nonzero(whole.reshape(-1), size=rows, fill_value=whole.size)
    num_whole, num_completed = whole.sum(dtype=jnp.int32), completed.sum(dtype=jnp.int32)
    count = jnp.minimum(num_whole, rows)
    return StepMoves(
        request_idx=jnp.where(chosen < whole.size, chosen // most, -1).astype(jnp.int32),
        chunk_idx=_rows(chunks.reshape(-1), chosen),
        block_ids=_rows(blocks.reshape(whole.size, -1), chosen),
        count=count,
        num_dropped=num_completed - num_whole,
        num_over=(end - first).sum(dtype=jnp.int32) - num_completed + num_whole - count,
    )


def _chunks_between(chunking: Chunking, group_idx: int, start: Array, stop: Array) -> tuple[Array, Array]:
    tokens = _chunk_tokens(chunking, group_idx)
    first = start // tokens
    return first, jnp.where(start < stop, (stop + (tokens - 1)) // tokens, first)


def _places(chunking: Chunking, group_idx: int, chunks: Array) -> Array:
    """Places in the sequence of the blocks whose bytes a chunk holds, `(…, chunks, blocks in a chunk)`."""
    blocks = blocks_in_chunk(chunking, group_idx)
    ends = (chunks + 1) * (chunking.blocks_per_chunk[group_idx] or 0)  # a recurrent chunk holds its last block
    return ends[..., None] - blocks + jnp.arange(blocks, dtype=jnp.int32)


def _blocks_at(places: Array, table: Array) -> Array:
    width = table.shape[-1]
    flat = places.reshape(*places.shape[:-2], -1)
    found = jnp.take_along_axis(table, jnp.clip(flat, 0, width - 1), axis=-1)
    return jnp.where((flat >= 0) & (flat < width) & (found >= 0), found, NULL_BLOCK).reshape(places.shape)


def _named_later(blocks: Array, places: Array, tables: Array, used: Array) -> Array:
    """Whether the request's table names each block again, after its place and before place `used`."""
    there = jnp.arange(tables.shape[-1], dtype=jnp.int32)
    later = (there > places[..., None]) & (there < used[:, None, None, None])
    return (later & (tables[:, None, None, :] == blocks[..., None])).any(axis=-1)


def _rows(values: Array, chosen: Array) -> Array:
    return values.at[chosen].get(mode="fill", fill_value=-1)


def _chunk_tokens(chunking: Chunking, group_idx: int) -> int:
    check_chunking(chunking)
    return _size(chunk_tokens_of(chunking, group_idx), "tokens_per_chunk")


def _step(chunking: Chunking, resume_multiple: int) -> int:
    """Checks all sizes, and returns the step of which every hit on stored chunks is a multiple."""
    check_chunking(chunking)
    for g in chunking.layout.cached:
        _chunk_tokens(chunking, g)
    step = resume_step(chunking, resume_multiple=resume_multiple)
    if step > MAX_TOKENS:
        raise ValueError(
            f"the least common multiple of `resume_multiple` and the recurrent groups' tokens_per_chunk must be at "
            f"most {MAX_TOKENS}, got {step}"
        )
    return step


def _size(value: int, name: str, *, at_least: int = 0) -> int:
    return integer(value, name, at_least=at_least, below=MAX_TOKENS + 1)


def _positions(value: Any, name: str) -> Array:
    """Positions as `int32`; those that are known on the host are checked."""
    known = isinstance(value, (np.ndarray, list, tuple)) or is_int(value)
    for number in np.unique(np.asarray(value)) if known else ():
        _size(number, name)
    return _integers(value, name)


def _integers(value: Any, name: str) -> Array:
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"`{name}` must be integers, got {_described(array)}")
    return array.astype(jnp.int32)


def _table(chunking: Chunking, group_idx: int, table: Any) -> Array:
    _chunk_tokens(chunking, group_idx)
    if getattr(table, "dtype", None) != jnp.int32 or not table.ndim or 0 in table.shape:
        raise ValueError(
            f"a block table must be int32 of shape (…, max_blocks) without a zero, got {_described(table)}"
        )
    tokens = table.shape[-1] * chunking.layout.groups[group_idx].tokens_per_block
    _size(tokens, "max_blocks * tokens_per_block")
    return jnp.asarray(table)


def _described(value: Any) -> str:
    return f"{value.dtype.name} of shape {tuple(value.shape)}" if hasattr(value, "dtype") else repr(value)
