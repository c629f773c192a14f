"""Small random instances: mixed layouts, chunkings, what is on the host and what the device holds.

Everything is built from one function, `pick(low, high)`, which answers an int between the two, both
included. `seeded` makes it of a random generator, and `instances` of a hypothesis draw, so that both see
the same family and hypothesis can shrink.
"""

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from kvjax.chunking import Chunking, resolve_chunking
from kvjax.groups import CacheLayout, ChunkedLocal, FullAttention, GroupSpec, Kind, Recurrent, Scratch, SlidingWindow

Pick = Callable[[int, int], int]


@dataclass(frozen=True)
class Instance:
    """One lookup: how the cache is cut, the request, and what is where."""

    chunking: Chunking
    num_tokens: int
    present: dict[str, list[int]]
    device_tokens: int | dict[str, int]
    resume_multiple: int


def random_kind(pick: Pick) -> Kind:
    """One of the five kinds, with small parameters; full attention is twice as likely."""
    match pick(0, 5):
        case 0 | 1:
            return FullAttention()
        case 2:
            return SlidingWindow(pick(1, 20))
        case 3:
            return ChunkedLocal(pick(1, 20))
        case 4:
            return Recurrent()
    return Scratch()


def random_layout(pick: Pick) -> CacheLayout:
    """One to four groups with blocks of a few tokens, at least one of them cached."""
    unit = pick(1, 4)
    groups = []
    for g in range(pick(1, 4)):
        kind = random_kind(pick)
        lookahead = pick(0, 6) if isinstance(kind, (FullAttention, SlidingWindow)) and pick(0, 1) else 0
        groups.append(GroupSpec(f"g{g}", kind, unit * pick(1, 4), block_bytes=pick(1, 9), lookahead_tokens=lookahead))
    if not any(group.is_cached for group in groups):
        groups.append(GroupSpec("last", FullAttention(), unit, block_bytes=1))
    return CacheLayout(groups)


def random_chunking(pick: Pick) -> Chunking:
    """A random layout, with a random number of blocks per chunk in each group."""
    layout = random_layout(pick)
    blocks = {layout.groups[g].name: pick(1, 3) for g in layout.cached}
    return resolve_chunking(layout, blocks_per_chunk=blocks)


def random_presence(pick: Pick, chunking: Chunking, num_tokens: int) -> dict[str, list[int]]:
    """Which chunks are on the host, also some past the request: none, all, a prefix, a suffix or any."""
    present = {}
    for g in chunking.layout.cached:
        tokens = chunking.tokens_per_chunk[g]
        assert tokens is not None
        count = num_tokens // tokens + pick(0, 3)
        match pick(0, 5):
            case 0:
                chunks = []
            case 1:
                chunks = list(range(count))
            case 2:
                chunks = list(range(pick(0, count)))
            case 3:
                chunks = list(range(pick(0, count), count))
            case 4:
                missing = pick(0, count)
                chunks = [i for i in range(count) if i != missing]
            case _:
                chunks = [i for i in range(count) if pick(0, 2)]
        if chunks or pick(0, 1):
            present[chunking.layout.groups[g].name] = chunks
    return present


def random_device(pick: Pick, chunking: Chunking, num_tokens: int) -> int | dict[str, int]:
    """What the device holds: nothing, one prefix, or one in each of some groups."""
    match pick(0, 3):
        case 0 | 1:
            return 0
        case 2:
            return pick(0, num_tokens - 1)
    same = pick(0, num_tokens - 1)
    names = [chunking.layout.groups[g].name for g in chunking.layout.cached]
    return {name: same if pick(0, 1) else pick(0, num_tokens - 1) for name in names if pick(0, 3)}


def random_instance(pick: Pick, *, most_tokens: int = 48) -> Instance:
    """One random lookup of at most `most_tokens` tokens."""
    chunking = random_chunking(pick)
    num_tokens = pick(1, most_tokens)
    return Instance(
        chunking=chunking,
        num_tokens=num_tokens,
        present=random_presence(pick, chunking, num_tokens),
        device_tokens=random_device(pick, chunking, num_tokens),
        resume_multiple=pick(1, 8) if pick(0, 2) == 0 else 1,
    )


def random_ranks(pick: Pick, *, most_tokens: int = 48) -> list[Instance]:
    """One random lookup on two or three ranks, each with other chunks on its host and, at times, on its device."""
    first = random_instance(pick, most_tokens=most_tokens)
    cut, tokens = first.chunking, first.num_tokens
    others = [
        replace(
            first,
            present=random_presence(pick, cut, tokens),
            device_tokens=random_device(pick, cut, tokens) if pick(0, 1) else first.device_tokens,
        )
        for _ in range(pick(1, 2))
    ]
    return [first, *others]


def masks(present: Mapping[str, Collection[int]]) -> dict[str, np.ndarray]:
    """The same chunks as boolean masks; some end with the last chunk that is there, others do not."""
    lengths = {name: max(chunks, default=-1) + 1 + len(chunks) % 4 for name, chunks in present.items()}
    masked = {name: np.zeros(length, bool) for name, length in lengths.items()}
    for name, chunks in present.items():
        masked[name][list(chunks)] = True
    return masked


def seeded(seed: int) -> Pick:
    """A `pick` that answers the same for the same seed."""
    return random.Random(seed).randint


@st.composite
def instances(draw: st.DrawFn, *, most_tokens: int = 48) -> Instance:
    """Hypothesis draws of `random_instance`."""
    return random_instance(lambda low, high: draw(st.integers(low, high)), most_tokens=most_tokens)


@st.composite
def ranks(draw: st.DrawFn, *, most_tokens: int = 48) -> list[Instance]:
    """Hypothesis draws of `random_ranks`."""
    return random_ranks(lambda low, high: draw(st.integers(low, high)), most_tokens=most_tokens)


@st.composite
def chunkings(draw: st.DrawFn) -> Chunking:
    """Hypothesis draws of `random_chunking`."""
    return random_chunking(lambda low, high: draw(st.integers(low, high)))


def group(name: str, kind: Kind, tokens_per_block: int, lookahead_tokens: int = 0) -> GroupSpec:
    """A group of 64 bytes per block."""
    return GroupSpec(name, kind, tokens_per_block, block_bytes=64, lookahead_tokens=lookahead_tokens)


def cut(*groups: GroupSpec, blocks: int | dict[str, int] | None = None) -> Chunking:
    """The groups as a layout, cut into chunks."""
    return resolve_chunking(CacheLayout(groups), blocks_per_chunk=blocks)


def lists(chunks: dict[str, np.ndarray]) -> dict[str, list[int]]:
    """Chunk indices as lists, to compare."""
    return {name: indices.tolist() for name, indices in chunks.items()}
