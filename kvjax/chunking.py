"""How many blocks of each group form a chunk: `blocks_per_chunk`, and `block_size` as it was."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvjax._checks import integer, is_int, shown
from kvjax.groups import CacheLayout, ChunkedLocal, GroupSpec, Kind, Recurrent, SlidingWindow, hash_unit

PerGroup = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Chunking:
    """A layout cut into chunks. Tuples are in layout order and hold `None` for scratch groups.

    Args:
        layout: the groups.
        tokens_per_hash: tokens covered by one prefix hash.
        blocks_per_chunk: consecutive blocks of a group that move together.
        tokens_per_chunk: `tokens_per_block * blocks_per_chunk`.
        hashes_per_chunk: `tokens_per_chunk / tokens_per_hash`.
        chunk_bytes: `block_bytes * blocks_per_chunk`; one state (`block_bytes`) for recurrent groups.
    """

    layout: CacheLayout
    tokens_per_hash: int
    blocks_per_chunk: PerGroup
    tokens_per_chunk: PerGroup
    hashes_per_chunk: PerGroup
    chunk_bytes: PerGroup


def resolve_chunking(
    layout: CacheLayout,
    *,
    blocks_per_chunk: int | Mapping[str, int] | str | None = None,
    block_size: int | None = None,
    min_chunk_bytes: int = 65536,
) -> Chunking:
    """Returns the chunking that the arguments describe.

    Args:
        layout: the groups.
        blocks_per_chunk: blocks per chunk for all groups; or a mapping by group name (missing names: 1);
            or `"auto"`: per group the smallest whole number of hash units that reaches
            `min_chunk_bytes`, kept within the window of windowed groups.
        block_size: tokens per chunk, for layouts whose cached groups all have the same
            `tokens_per_block`.
        min_chunk_bytes: what `"auto"` aims for, in bytes.

    Raises:
        ValueError: both ways given, a value of the wrong type or range, a group unknown or scratch, a
            `block_size` for mixed groups or not a multiple of a block, or a chunk that is no whole
            number of hash units.

    >>> from kvjax import CacheLayout, FullAttention, GroupSpec, resolve_chunking
    >>> layout = CacheLayout([GroupSpec("a", FullAttention(), 12, block_bytes=64),
    ...                       GroupSpec("b", FullAttention(), 16, block_bytes=64)])
    >>> resolve_chunking(layout, blocks_per_chunk=2).tokens_per_chunk
    (24, 32)
    """
    if not isinstance(layout, CacheLayout):
        raise ValueError(f"`layout` must be a CacheLayout, got {shown(layout)}")
    if blocks_per_chunk is not None and block_size is not None:
        raise ValueError(
            f"only one of `blocks_per_chunk` and `block_size` may be given, "
            f"got {shown(blocks_per_chunk)} and {shown(block_size)}"
        )
    least_bytes = integer(min_chunk_bytes, "min_chunk_bytes", at_least=1)
    unit = layout.tokens_per_hash or hash_unit(layout.groups)
    if block_size is not None:
        wanted = _from_block_size(layout, block_size)
    else:
        wanted = _from_blocks(layout, blocks_per_chunk, unit, least_bytes)
    return _chunking(layout, unit, wanted)


def longer_than_window(kind: Kind, blocks_per_chunk: int, tokens_per_chunk: int) -> bool:
    """True if an engine that frees blocks as they leave the window never completes such a chunk."""
    span = _span_tokens(kind)
    return blocks_per_chunk > 1 and span is not None and tokens_per_chunk > span


def _span_tokens(kind: Kind) -> int | None:
    match kind:
        case SlidingWindow(window_tokens):
            return window_tokens
        case ChunkedLocal(chunk_tokens):
            return chunk_tokens
    return None


def _from_block_size(layout: CacheLayout, block_size: Any) -> dict[int, int]:
    tokens = integer(block_size, "block_size", at_least=1)
    cached = [layout.groups[g] for g in layout.cached]
    per_block = {group.tokens_per_block for group in cached}
    if len(per_block) > 1:
        listed = ", ".join(
            f"{group.name}={group.tokens_per_block}{'' if group.is_cached else ' (scratch)'}" for group in layout.groups
        )
        raise ValueError(
            f"`block_size` must not be given when groups differ in tokens_per_block ({listed}), got {tokens}; "
            f"give `blocks_per_chunk` instead"
        )
    (one,) = per_block
    if tokens % one:
        raise ValueError(
            f"`block_size` must be a multiple of tokens_per_block, {one}, got {tokens}; "
            f"the next valid value is {-(-tokens // one) * one}"
        )
    return dict.fromkeys(layout.cached, tokens // one)


def _from_blocks(layout: CacheLayout, blocks: Any, unit: int, least_bytes: int) -> dict[int, int]:
    if blocks is None:
        return dict.fromkeys(layout.cached, 1)
    if isinstance(blocks, str) and blocks == "auto":
        return {g: _auto(layout.groups[g], unit, least_bytes) for g in layout.cached}
    if isinstance(blocks, Mapping):
        given = {
            layout.index(name, "blocks_per_chunk"): integer(n, f"blocks_per_chunk of group {name!r}", at_least=1)
            for name, n in blocks.items()
        }
        return {g: given.get(g, 1) for g in layout.cached}
    if not is_int(blocks):
        raise ValueError(
            f"`blocks_per_chunk` must be a positive int, a mapping of group names to positive ints, or 'auto', "
            f"got {shown(blocks)}"
        )
    return {g: integer(blocks, "blocks_per_chunk", at_least=1) for g in layout.cached}


def _auto(group: GroupSpec, unit: int, least_bytes: int) -> int:
    step = unit // math.gcd(unit, group.tokens_per_block)
    if isinstance(group.kind, Recurrent):
        return step
    span = _span_tokens(group.kind)
    steps = max(1, -(-least_bytes // (step * group.block_bytes)))
    if span is not None:
        steps = max(1, min(steps, span // (step * group.tokens_per_block)))
    return step * steps


def _chunking(layout: CacheLayout, unit: int, blocks: dict[int, int]) -> Chunking:
    tokens: list[int | None] = []
    num_bytes: list[int | None] = []
    for g, group in enumerate(layout.groups):
        if g not in blocks:
            tokens.append(None)
            num_bytes.append(None)
            continue
        per_chunk = group.tokens_per_block * blocks[g]
        if per_chunk % unit:
            step = unit // math.gcd(unit, group.tokens_per_block)
            raise ValueError(
                f"group {group.name!r}: a chunk must be a whole number of hash units of {unit} tokens, got "
                f"{blocks[g]} blocks of {group.tokens_per_block} tokens = {per_chunk}; "
                f"the next valid `blocks_per_chunk` is {-(-blocks[g] // step) * step}"
            )
        integer(per_chunk, f"tokens_per_chunk of group {group.name!r}", at_least=1)
        size = group.block_bytes * (1 if isinstance(group.kind, Recurrent) else blocks[g])
        tokens.append(per_chunk)
        num_bytes.append(integer(size, f"chunk_bytes of group {group.name!r}", at_least=1))
    return Chunking(
        layout=layout,
        tokens_per_hash=unit,
        blocks_per_chunk=tuple(blocks.get(g) for g in range(len(layout.groups))),
        tokens_per_chunk=tuple(tokens),
        hashes_per_chunk=tuple(None if t is None else t // unit for t in tokens),
        chunk_bytes=tuple(num_bytes),
    )
