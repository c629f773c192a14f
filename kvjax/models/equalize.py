"""Equal block bytes across groups, as engines need whose groups share one pool of blocks.

A *page* is one block of one layer. Attention gets as many tokens per block as make its page as large as
the largest state (and as one another), so that any block of the pool can serve any group; layers are then
dealt into groups of equal width. What does not fit exactly is padding, and is reported.
"""

import math
from dataclasses import dataclass

from kvjax._checks import integer
from kvjax.groups import Recurrent, Scratch
from kvjax.models.grouping import Bucket

# A model is dealt into at most this many groups where its layers allow: every group has a block table.
MAX_GROUPS = 10
# Attention of different widths gets pages that match exactly up to this multiple of the widest one.
_LARGEST_COMMON = 8


@dataclass(frozen=True, slots=True)
class Pages:
    """How buckets share pages.

    Args:
        page_bytes: bytes of one block of one layer in the shared pool.
        tokens_per_block: of each bucket.
        padding_bytes: of each bucket, bytes of a page that it leaves empty; `None` where it takes no page.
        width: layers of a group; a block of the pool is `width` pages.
        widths: of each bucket, the layers of each of its groups.
    """

    page_bytes: int
    tokens_per_block: tuple[int, ...]
    padding_bytes: tuple[int | None, ...]
    width: int
    widths: tuple[tuple[int, ...], ...]


def equal_pages(found: list[Bucket], tokens_per_block: list[int], align_tokens: int) -> Pages:
    """Returns pages of equal bytes: the fewest whole multiples of `align_tokens` tokens of the widest
    attention that hold the largest state.

    Keys of an indexer lie beside the pool and follow the blocks of the attention that they index, so that
    their narrow rows do not stretch its pages, nor it theirs. Scratch takes no part.

    Args:
        found: the caches that are alike.
        tokens_per_block: of each bucket, kept where there is nothing to equalize.
        align_tokens: tokens per block of attention groups are multiples of this.

    Raises:
        ValueError: `align_tokens` is not a positive int.
    """
    align = integer(align_tokens, "align_tokens", at_least=1)
    roles = [_part_taken(bucket, found) for bucket in found]
    steps = {n: _step(bucket, align) for n, bucket in enumerate(found) if roles[n] == "attention"}
    largest = max((bucket.one.state_bytes for n, bucket in enumerate(found) if roles[n] == "state"), default=0)
    page = _page_bytes([num_bytes for _, num_bytes in steps.values()], largest)
    tokens, padding = list(tokens_per_block), [None for _ in found]
    for n, (step_tokens, step_bytes) in steps.items():
        tokens[n] = page // step_bytes * step_tokens
    spacing = max((tokens[n] for n in steps), default=None)
    for n, bucket in enumerate(found):
        if roles[n] == "state":  # a state is taken once for each block of the attention beside it
            tokens[n] = spacing or tokens[n]
        elif roles[n] == "beside":
            host = next(m for m in steps if _indexes(bucket, found[m]))
            tokens[n] = math.lcm(bucket.one.tokens_per_state, tokens[host])
    padding = tuple(
        page % steps[n][1] if n in steps else page - bucket.one.state_bytes if roles[n] == "state" else None
        for n, bucket in enumerate(found)
    )
    pooled = [bucket.num_layers for n, bucket in enumerate(found) if roles[n] in ("attention", "state")]
    width = best_width(pooled)
    widths = tuple(
        deal(bucket.num_layers, width) if roles[n] in ("attention", "state") else (bucket.num_layers,)
        for n, bucket in enumerate(found)
    )
    return Pages(page, tuple(tokens), padding, width, widths)


def _part_taken(bucket: Bucket, found: list[Bucket]) -> str:
    if isinstance(bucket.one.kind, Scratch):
        return "none"
    if isinstance(bucket.one.kind, Recurrent):
        return "state"
    return "beside" if any(_indexes(bucket, other) for other in found) else "attention"


def _indexes(bucket: Bucket, other: Bucket) -> bool:
    layers = {cache.layer for cache in other.caches}
    return (
        bucket.one.role == "index"
        and other.one.role != "index"
        and bucket.one.kind == other.one.kind
        and all(cache.layer in layers for cache in bucket.caches)
    )


def _page_bytes(steps: list[int], largest_state: int) -> int:
    if not steps:
        return largest_state
    common = math.lcm(*steps)
    quantum = common if common <= _LARGEST_COMMON * max(steps) else max(steps)
    return quantum * max(1, -(-largest_state // quantum))


def _step(bucket: Bucket, align: int) -> tuple[int, int]:
    """The smallest tokens of a block that are whole states and aligned, and their bytes in one layer."""
    tokens = math.lcm(align, bucket.one.tokens_per_state)
    return tokens, tokens // bucket.one.tokens_per_state * bucket.one.state_bytes


def best_width(layers: list[int], max_groups: int = MAX_GROUPS) -> int:
    """Returns how many layers a group should have, for buckets of these many layers.

    Every group takes as many pages of a block as the widest has layers: the width that leaves the fewest
    pages empty wins, then the one with the fewest groups; a bucket of one odd layer does not split all
    others into groups of one.

    >>> best_width([20, 30]), best_width([30, 10, 5, 1]), best_width([34, 11])
    (10, 5, 12)
    """
    most = max(max_groups, len(layers))

    def cost(width: int) -> tuple[int, int]:
        groups = [-(-count // width) for count in layers]
        return sum(groups) * width - sum(layers), sum(groups)

    allowed = [width for width in range(1, max(layers) + 1) if cost(width)[1] <= most]
    return min(allowed, key=cost)


def deal(layers: int, width: int) -> tuple[int, ...]:
    """Returns the layers of each group when `layers` are dealt as evenly as may be into groups of `width`.

    >>> deal(34, 12)
    (12, 11, 11)
    """
    groups = -(-layers // width)
    return tuple(layers // groups + (n < layers % groups) for n in range(groups))
