"""The law of what resuming needs, written out literally: sets of things, and every position tried.

What a group must have in the cache, and what its chunks hold, are sets of *things*: token positions, or
for a recurrent group the positions of its states. A position is restorable if the things it requires are
a subset of the things that are resident. Nothing here is clever, nothing is shared with `kvjax.coverage`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from kvjax.chunking import Chunking
from kvjax.groups import ChunkedLocal, FullAttention, GroupSpec, Kind, Recurrent, SlidingWindow

Things = frozenset[int]
Resident = dict[str, Things]
Device = int | Mapping[str, int]
Chunks = Mapping[str, Collection[int]]

NO_CHUNKS: Chunks = {}


class Expected(NamedTuple):
    """What a lookup must answer."""

    hit_tokens: int
    load: dict[str, list[int]]
    limited_by: tuple[str, ...]


def cached_groups(chunking: Chunking) -> Iterator[tuple[GroupSpec, int]]:
    """Yields each group that is not scratch, with its tokens per chunk."""
    for group, tokens in zip(chunking.layout.groups, chunking.tokens_per_chunk, strict=True):
        if tokens is not None:
            yield group, tokens


@cache
def needed(kind: Kind, position: int) -> Things:
    """What must be in the cache to compute the token at `position`."""
    if position == 0:
        return frozenset()
    match kind:
        case FullAttention():
            return frozenset(range(position))
        case SlidingWindow(window_tokens):
            return frozenset(range(max(0, position - window_tokens + 1), position))
        case ChunkedLocal(chunk_tokens):
            return frozenset(range(position // chunk_tokens * chunk_tokens, position))
        case Recurrent():
            return frozenset({position})
    raise AssertionError(kind)


@cache
def required(kind: Kind, lookahead_tokens: int, position: int) -> Things:
    """What must be resident to resume at `position`: what it needs and the tokens a draft head looks at."""
    if position == 0:
        return frozenset()
    return needed(kind, position) | frozenset(range(position, position + lookahead_tokens))


@cache
def held_by_chunk(kind: Kind, tokens_per_chunk: int, chunk_idx: int) -> Things:
    """What one chunk holds: its tokens, or the state at its end."""
    end = (chunk_idx + 1) * tokens_per_chunk
    return frozenset({end}) if isinstance(kind, Recurrent) else frozenset(range(end - tokens_per_chunk, end))


def chunks_with(things: Iterable[int], kind: Kind, tokens_per_chunk: int) -> list[int]:
    """The chunks that hold one of the things, ascending."""
    back = 1 if isinstance(kind, Recurrent) else 0
    return sorted({(thing - back) // tokens_per_chunk for thing in things})


def device_prefix(chunking: Chunking, device_tokens: Device) -> dict[str, int]:
    """The prefix that the device holds in each cached group."""
    if isinstance(device_tokens, Mapping):
        return {group.name: device_tokens.get(group.name, 0) for group, _ in cached_groups(chunking)}
    return {group.name: device_tokens for group, _ in cached_groups(chunking)}


def held_by_device(chunking: Chunking, device_tokens: Device) -> Resident:
    """A device that holds the prefix D holds what D needs, and no more."""
    prefix = device_prefix(chunking, device_tokens)
    return {group.name: needed(group.kind, prefix[group.name]) for group, _ in cached_groups(chunking)}


def held_by_chunks(chunking: Chunking, chunks: Chunks) -> Resident:
    """What the chunks hold together, by group."""
    return {
        group.name: frozenset().union(*(held_by_chunk(group.kind, tokens, i) for i in chunks.get(group.name, ())))
        for group, tokens in cached_groups(chunking)
    }


def complete_chunks(chunking: Chunking, position: int, missing: Chunks = NO_CHUNKS) -> dict[str, list[int]]:
    """Every chunk whose last token is before `position`, but those that are missing."""
    return {
        group.name: [
            i for i in range(position) if (i + 1) * tokens - 1 < position and i not in missing.get(group.name, ())
        ]
        for group, tokens in cached_groups(chunking)
    }


def union(*residents: Resident) -> Resident:
    """What is resident in any of them."""
    return {name: frozenset().union(*(resident[name] for resident in residents)) for name in residents[0]}


def refusing(chunking: Chunking, resident: Resident, position: int) -> tuple[str, ...]:
    """The groups in which `position` is not restorable, in layout order."""
    return tuple(
        group.name
        for group, _ in cached_groups(chunking)
        if not required(group.kind, group.lookahead_tokens, position) <= resident[group.name]
    )


def restorable(chunking: Chunking, resident: Resident, below: int) -> list[int]:
    """Every position below `below` at which a request can resume."""
    return [position for position in range(below) if not refusing(chunking, resident, position)]


def positions_of_rank(
    chunking: Chunking,
    num_tokens: int,
    present: Chunks,
    device_tokens: Device = 0,
    resume_multiple: int = 1,
) -> set[int]:
    """Every position at which one rank can resume the request."""
    resident = union(held_by_chunks(chunking, present), held_by_device(chunking, device_tokens))
    positions = {p for p in range(0, num_tokens, resume_multiple) if not refusing(chunking, resident, p)}
    prefixes = set(device_prefix(chunking, device_tokens).values())
    return positions | prefixes if len(prefixes) == 1 else positions


def longest_hit(
    chunking: Chunking,
    num_tokens: int,
    present: Chunks,
    device_tokens: Device = 0,
    resume_multiple: int = 1,
    ranks: Iterable[set[int]] = (),
) -> Expected:
    """The hit, its load set, and the groups that stand in the way of a longer one."""
    hit = max(
        position
        for position in positions_of_rank(chunking, num_tokens, present, device_tokens, resume_multiple)
        if all(position in positions for positions in ranks)
    )
    on_device = held_by_device(chunking, device_tokens)
    resident = union(held_by_chunks(chunking, present), on_device)
    candidates = range(0, num_tokens, resume_multiple)
    load = {name: [] for name in chunking.layout.names}
    for group, tokens in cached_groups(chunking):
        load[group.name] = chunks_with(needed(group.kind, hit) - on_device[group.name], group.kind, tokens)

    everything = union(resident, held_by_chunks(chunking, complete_chunks(chunking, num_tokens)))
    for position in candidates:
        if position > hit and not refusing(chunking, everything, position):
            return Expected(hit, load, refusing(chunking, resident, position))
    return Expected(hit, load, ())


def stored_positions(
    chunking: Chunking, checkpoint: int, resume_multiple: int = 1, missing: Chunks = NO_CHUNKS
) -> tuple[int, int]:
    """R, where a longer prompt resumes, and S, where the same prompt sent again does."""
    resident = held_by_chunks(chunking, complete_chunks(chunking, checkpoint, missing))
    positions = [p for p in restorable(chunking, resident, checkpoint + 1) if p % resume_multiple == 0]
    return max(positions), max((p for p in positions if p < checkpoint), default=0)


def store_set(
    chunking: Chunking, checkpoint: int, resume_multiple: int = 1, missing: Chunks = NO_CHUNKS
) -> dict[str, list[int]]:
    """The chunks that R or S requires, by group."""
    stored = {name: [] for name in chunking.layout.names}
    for group, tokens in cached_groups(chunking):
        things: Things = frozenset()
        for position in stored_positions(chunking, checkpoint, resume_multiple, missing):
            things |= required(group.kind, group.lookahead_tokens, position)
        stored[group.name] = chunks_with(things, group.kind, tokens)
    return stored


def next_cut(chunking: Chunking, position: int, checkpoints: Iterable[int], resume_multiple: int = 1) -> int:
    """Where the step that starts at `position` must end."""
    checkpoints = list(checkpoints)
    has_state = any(isinstance(group.kind, Recurrent) for group in chunking.layout.groups)
    states = {s for c in checkpoints for s in stored_positions(chunking, c, resume_multiple) if s > position}
    return min(states) if has_state and states else max(checkpoints)


def tokens_that_fit(chunking: Chunking, units_per_chunk: Iterable[int | None], num_units: int) -> int:
    """The longest prefix whose complete chunks take at most `num_units` units, token by token."""
    costs = [(t, u) for t, u in zip(chunking.tokens_per_chunk, units_per_chunk, strict=True) if t and u]
    tokens = 0
    while sum((tokens + 1) // per_chunk * units for per_chunk, units in costs) <= num_units:
        tokens += 1
    return tokens


def largest_unit(sizes: Iterable[int], granule: int, allowed: Callable[[int], bool]) -> int:
    """The largest multiple of the granule up to the smallest size that is allowed; else the granule."""
    found = [unit for unit in range(granule, min(sizes) + 1, granule) if allowed(unit)]
    return max(found, default=granule)
