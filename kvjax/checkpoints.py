"""What checkpoints cost, and how far apart they are worth having.

Full groups grow with every token, checkpoint or not. What one checkpoint costs beyond that are the windows
before the positions it serves, and the states at them. Nothing here states what a kind of attention needs;
see `kvjax.coverage`.
"""

import math
from fractions import Fraction

from kvjax._arguments import check_chunking
from kvjax._checks import LIMIT, integer, shown
from kvjax.chunking import Chunking
from kvjax.coverage import chunk_tokens_of, stored_positions
from kvjax.groups import ChunkedLocal, FullAttention, Recurrent
from kvjax.law import required

# Periodic checkpoints are an insurance, for the second of several prompts that share a prefix (the later ones
# find a junction) and for prompts that were edited: it takes at most a fifth of what the pool holds.
_FIXED_PER_GROWING = Fraction(1, 4)

# Tokens between positions at which all states can stand, beyond which there is no default.
_FARTHEST = 2**24

# Tokens between checkpoints where nothing grows, so that nothing tells what one is worth.
_WITHOUT_GROWTH = 4096

# A position beyond every window.
_FAR = 2**40


def fixed_bytes_per_checkpoint(chunking: Chunking) -> dict[str, int]:
    """Returns, for every group in order, the bytes of the chunks that one checkpoint requires beyond what grows.

    These are the windows and states of both positions that a checkpoint serves (see `stored_positions`), far
    from the start and where all chunks and attention chunks end: the same prompt sent again then needs a whole
    attention chunk. Checkpoints closer than a window share chunks and cost less. Full and scratch groups have 0.

    Raises:
        ValueError: `chunking` is not a Chunking.

    >>> from kvjax import CacheLayout, FullAttention, GroupSpec, Recurrent, SlidingWindow, resolve_chunking
    >>> layout = CacheLayout([GroupSpec("full", FullAttention(), 4, block_bytes=100),
    ...                       GroupSpec("window", SlidingWindow(8), 4, block_bytes=100),
    ...                       GroupSpec("state", Recurrent(), 16, block_bytes=900)])
    >>> fixed_bytes_per_checkpoint(resolve_chunking(layout))
    {'full': 0, 'window': 400, 'state': 1800}
    """
    check_chunking(chunking)
    position = _aligned_far(chunking)
    served = stored_positions(chunking, position)
    return {
        group.name: _num_chunks(chunking, g, served) * (chunking.chunk_bytes[g] or 0)
        if group.is_cached and not isinstance(group.kind, FullAttention)
        else 0
        for g, group in enumerate(chunking.layout.groups)
    }


def _num_chunks(chunking: Chunking, g: int, positions: tuple[int, int]) -> int:
    """How many chunks of a group one of the two positions requires."""
    tokens = chunk_tokens_of(chunking, g)
    spans = [required(chunking.layout.groups[g], position) for position in positions]
    ranges = [range(start // tokens, -(-stop // tokens)) for start, stop in spans if start < stop]
    both = range(max(r.start for r in ranges), min(r.stop for r in ranges)) if len(ranges) == 2 else range(0)
    return sum(map(len, ranges)) - len(both)


def growing_bytes_per_token(chunking: Chunking) -> Fraction:
    """Returns the chunk bytes that each token adds whether there are checkpoints or not: those of full groups.

    Raises:
        ValueError: `chunking` is not a Chunking.
    """
    check_chunking(chunking)
    return sum(
        (
            Fraction(chunking.chunk_bytes[g] or 0, chunk_tokens_of(chunking, g))
            for g in chunking.layout.cached
            if isinstance(chunking.layout.groups[g].kind, FullAttention)
        ),
        Fraction(0),
    )


def default_checkpoint_tokens(chunking: Chunking) -> int | None:
    """Returns how far apart checkpoints are worth having, or `None` for none but the ends of prompts and requests.

    It is the smallest multiple of every group's `tokens_per_chunk` over which the full groups grow by at least
    four times what one checkpoint costs; without a full group, of at least 4,096 tokens. A layout of full
    groups has no need of checkpoints: every position is one.

    Raises:
        ValueError: `chunking` is not a Chunking.

    >>> from kvjax import CacheLayout, FullAttention, GroupSpec, SlidingWindow, resolve_chunking
    >>> layout = CacheLayout([GroupSpec("full", FullAttention(), 16, block_bytes=160),
    ...                       GroupSpec("window", SlidingWindow(1024), 16, block_bytes=800)])
    >>> default_checkpoint_tokens(resolve_chunking(layout))
    20480
    """
    check_chunking(chunking)
    cached = chunking.layout.cached
    states = [chunk_tokens_of(chunking, g) for g in cached if isinstance(chunking.layout.groups[g].kind, Recurrent)]
    step = math.lcm(*(chunk_tokens_of(chunking, g) for g in cached))
    if math.lcm(*states) > _FARTHEST or step > _FAR:
        return None  # states that hardly ever fall together: no spacing serves
    fixed, growing = sum(fixed_bytes_per_checkpoint(chunking).values()), growing_bytes_per_token(chunking)
    if not fixed:
        return None
    if not growing:
        return -(-_WITHOUT_GROWTH // step) * step
    tokens = math.ceil(fixed / (growing * _FIXED_PER_GROWING) / step) * step
    return tokens if tokens < LIMIT else None


def checkpoint_spacing(chunking: Chunking, checkpoint_tokens: int | str | None) -> int | None:
    """Returns the tokens between checkpoints that the argument `checkpoint_tokens` asks for.

    Args:
        chunking: the layout and its chunks.
        checkpoint_tokens: a number, `None`, or `"auto"` for the default.

    Raises:
        ValueError: it is anything else.
    """
    if checkpoint_tokens is None:
        return None
    if isinstance(checkpoint_tokens, str):
        if checkpoint_tokens != "auto":
            raise ValueError(
                f"`checkpoint_tokens` must be a positive int, 'auto' or None, got {shown(checkpoint_tokens)}"
            )
        return default_checkpoint_tokens(chunking)
    return integer(checkpoint_tokens, "checkpoint_tokens", at_least=1)


def _aligned_far(chunking: Chunking) -> int:
    """A far position where all chunks and attention chunks end, if there is one."""
    lengths = [chunk_tokens_of(chunking, g) for g in chunking.layout.cached]
    kinds = [group.kind for group in chunking.layout.groups]
    lengths += [kind.chunk_tokens for kind in kinds if isinstance(kind, ChunkedLocal)]
    step = math.lcm(*lengths)
    return _FAR // step * step or _FAR
