"""What is worth keeping, by the law: blocks on the device, chunks in a pool that is full.

Nothing here states what a kind of attention needs; see `kvjax.coverage`.
"""

import math
from collections.abc import Mapping

import numpy as np

from kvjax._arguments import check_chunking
from kvjax._checks import integer
from kvjax._intervals import EMPTY
from kvjax.chunking import Chunking
from kvjax.coverage import (
    ChunkMask,
    chunk_tokens_of,
    common_positions,
    largest_common,
    needed,
    needed_from,
    required,
    resident_of,
    stored_positions,
)
from kvjax.groups import FullAttention, Recurrent

# The rank of chunks above all positions that can be restored.
UNRANKED = np.iinfo(np.int64).max


def retained_from(chunking: Chunking, position: int, *, resume_multiple: int = 1) -> dict[str, int]:
    """Returns, by group name, the first token an engine must keep so that a store at `position`, or at
    any later one, finds what it wants.

    A block that ends at or before that token may be freed. At most about one chunk more than the window
    itself is kept. Scratch groups keep nothing. Where there are recurrent groups, their states are taken
    to exist at the stored positions: the steps end where `next_cut` says.

    Raises:
        ValueError: an argument of the wrong type or range.
    """
    # Stored positions never decrease, and the first one of all is no smaller than `resume_step`.
    check_chunking(chunking)
    first = resume_step(chunking, resume_multiple=resume_multiple)
    stored = max(first, stored_positions(chunking, position, resume_multiple=resume_multiple)[0])
    kept = {}
    for g, group in enumerate(chunking.layout.groups):
        if not group.is_cached:
            kept[group.name] = position
            continue
        # Where `stored` requires nothing (an attention chunk starts there), later positions require its chunk.
        tokens = chunk_tokens_of(chunking, g)
        kept[group.name] = min(required(group, stored)[0] // tokens * tokens, needed(group.kind, position)[0])
    return kept


def resume_step(chunking: Chunking, *, resume_multiple: int = 1) -> int:
    """Returns the number of which every hit on host chunks is a multiple: the least common multiple of
    `resume_multiple` and the spacings of the recurrent groups' states."""
    spacings = [
        chunk_tokens_of(chunking, g)
        for g in chunking.layout.cached
        if isinstance(chunking.layout.groups[g].kind, Recurrent)
    ]
    return math.lcm(integer(resume_multiple, "resume_multiple", at_least=1), *spacings)


def junction(chunking: Chunking, num_tokens: int, chunks: Mapping[int, np.ndarray | ChunkMask]) -> int:
    """Returns how far the full groups alone could restore a request, 0 without such a group.

    Where that is beyond the hit, prompts that share a prefix part there, and the position is worth a
    checkpoint.

    Args:
        chunking: the layout and its chunks.
        num_tokens: tokens of the request.
        chunks: the resident chunks of the request's prefix by `group_idx`, as in `Resident`.
    """
    full = {
        g: resident_of(chunking, g, chunks.get(g, EMPTY), 0)
        for g in chunking.layout.cached
        if isinstance(chunking.layout.groups[g].kind, FullAttention)
    }
    return largest_common(chunking, full, num_tokens - 1, 1) if full else 0


def eviction_ranks(chunking: Chunking, chunks: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Returns, per `group_idx`, the rank of each resident chunk of one prefix for eviction.

    A chunk's rank is the smallest position, of those the resident chunks can restore, that requires it
    or lies above it. Chunks of equal rank are useless without each other; evicting from the highest rank
    down leaves a usable prefix after every rank. A chunk above all those positions has the highest rank.

    Args:
        chunking: the layout and its chunks.
        chunks: resident `chunk_idx` of one request's prefix by `group_idx`; ascending `int64`.
    """
    ranked, _ = ranks_above(chunking, chunks, 0)
    return {g: ranks for g, (_, ranks) in ranked.items()}


def ranks_above(
    chunking: Chunking, chunks: Mapping[int, np.ndarray], position: int
) -> tuple[dict[int, tuple[np.ndarray, np.ndarray]], int]:
    """Returns the ranks of those chunks whose rank lies above a position, see `eviction_ranks`.

    Chunks that come to a prefix from there on change the ranks of no others.

    Args:
        chunking: the layout and its chunks.
        chunks: as for `eviction_ranks`.
        position: 0 for all chunks; or the largest position that could be restored when the others were ranked.

    Returns:
        Per `group_idx` the `chunk_idx` of these chunks and their ranks, and the largest position that can be
        restored now.
    """
    resident = {g: resident_of(chunking, g, chunks.get(g, EMPTY), 0) for g in chunking.layout.cached}
    end = max(held.end() for held in resident.values())
    firsts, lasts = common_positions(chunking, resident, min(position + 1, end), end)
    firsts = np.append(firsts, UNRANKED)
    ranked = {}
    for g, indices in chunks.items():
        above = _positions_above(chunking, g, indices)
        tail = int(above.searchsorted(position, side="right"))
        above = above[tail:]
        ranked[g] = indices[tail:], np.maximum(firsts[np.searchsorted(lasts, above)], above)
    return ranked, max(position, int(lasts[-1]) if len(lasts) else 0)


def of_use(chunking: Chunking, group_idx: int, indices: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Returns a mask of the chunks that some position which can be restored may require. The others lie below
    positions that do not, and serve nothing unless other chunks come, or wait for chunks above all positions.

    Args:
        chunking: the layout and its chunks.
        group_idx: the group.
        indices: `chunk_idx`.
        ranks: parallel to them, as `ranks_above` returns them.
    """
    known = np.where(ranks < UNRANKED, ranks, 1)
    first = needed_from(chunking.layout.groups[group_idx].kind, known)
    return (ranks < UNRANKED) & (first < (indices + 1) * chunk_tokens_of(chunking, group_idx))


def _positions_above(chunking: Chunking, group_idx: int, indices: np.ndarray) -> np.ndarray:
    """The smallest position that may require each chunk or lies above it."""
    tokens = chunk_tokens_of(chunking, group_idx)
    group = chunking.layout.groups[group_idx]
    if isinstance(group.kind, Recurrent):
        return (indices + 1) * tokens
    return np.maximum(1, indices * tokens + (1 - group.lookahead_tokens))
