"""The law: what resuming at a position needs, and all that follows from it.

`needed` and `restorable_spans` state the law for each kind of attention; everything else in this module
is arithmetic on their results that knows no kind, and no other module restates them. Positions and tokens
are counted from the start of the sequence; all intervals of *tokens* are half-open `[start, stop)`, all
intervals of *positions* are closed `[first, last]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax._arguments import by_group, check_chunking, checkpoint_list, chunk_indices, device_prefix, present_chunks
from kvjax._checks import integer
from kvjax._intervals import EMPTY, intersect, runs_of, with_run
from kvjax.chunking import Chunking
from kvjax.groups import ChunkedLocal, FullAttention, GroupSpec, Kind, Recurrent, Scratch, SlidingWindow

# The first span of positions that a search looks at; each further one is twice as wide. A long prompt
# then costs what its answer costs.
_FIRST_SPAN = 4096
# … up to this, so that what a search holds at a time stays small.
_WIDEST_SPAN = 2**22

_ZERO = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """The longest prefix that can be restored.

    Args:
        hit_tokens: length of the prefix, what the device holds already included.
        load: for every group of the layout, in order, the ascending `int64` `chunk_idx` to load.
        limited_by: the groups that keep the next larger candidate from being a hit, in layout order.
    """

    hit_tokens: int
    load: dict[str, np.ndarray]
    limited_by: tuple[str, ...]


# --- the law ------------------------------------------------------------------------------------------


def needed(kind: Kind, position: int) -> tuple[int, int]:
    """Returns the tokens `[start, stop)` that must be in the cache to compute the token at `position`.

    A recurrent group needs its state *at* `position`, which is the last token a state covers: the
    interval holds that token alone.

    >>> needed(SlidingWindow(4), 10)
    (7, 10)
    """
    if position == 0:
        return (0, 0)
    match kind:
        case FullAttention():
            return (0, position)
        case SlidingWindow(window_tokens):
            return (max(0, position - window_tokens + 1), position)
        case ChunkedLocal(chunk_tokens):
            return (position // chunk_tokens * chunk_tokens, position)
        case Recurrent():
            return (position - 1, position)
        case Scratch():
            return (0, 0)


def required(group: GroupSpec, position: int) -> tuple[int, int]:
    """Returns `needed` extended by the group's lookahead: the tokens that must be resident."""
    start, stop = needed(group.kind, position)
    if position == 0 or not group.lookahead_tokens:
        return (start, stop)
    return (start, position + group.lookahead_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """What one group has, on the host or on the device.

    Args:
        starts: ascending `int64`, first tokens of the maximal runs of resident tokens.
        stops: `int64`, the ends of those runs (exclusive).
        states: ascending `int64` positions at which a recurrent group has its state.
        spacing: positions `spacing, 2 * spacing, …` up to `spaced_to` are states, too.
        spaced_to: see `spacing`.
    """

    starts: np.ndarray
    stops: np.ndarray
    states: np.ndarray
    spacing: int = 1
    spaced_to: int = 0


def restorable_spans(
    kind: Kind, lookahead: int, resident: Resident, low: int, high: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions in `[low, high]` that `resident` can restore, as ascending closed intervals."""
    match kind:
        case FullAttention():
            from_zero = (resident.starts[:1] == 0).nonzero()[0]
            firsts, lasts = resident.starts[from_zero], resident.stops[from_zero] - lookahead
        case SlidingWindow(1) if lookahead == 0:
            firsts, lasts = _ZERO + low, _ZERO + high
        case SlidingWindow(window_tokens):
            firsts = np.where(resident.starts == 0, 0, resident.starts + (window_tokens - 1))
            lasts = resident.stops - lookahead
        case ChunkedLocal(chunk_tokens):
            firsts = np.arange(low // chunk_tokens * chunk_tokens, high + 1, chunk_tokens, dtype=np.int64)
            run = np.searchsorted(resident.starts, firsts, side="right") - 1
            reach = np.concatenate([resident.stops, _ZERO])[run]  # run -1, before every run, reaches 0
            lasts = np.where(reach > firsts, np.minimum(firsts + (chunk_tokens - 1), reach), firsts)
        case Recurrent():
            spaced = np.arange(
                -(-max(low, 1) // resident.spacing) * resident.spacing,
                min(high, resident.spaced_to) + 1,
                resident.spacing,
                dtype=np.int64,
            )
            firsts = lasts = np.union1d(resident.states, spaced) if len(spaced) else resident.states
        case Scratch():
            firsts, lasts = _ZERO + low, _ZERO + high
    firsts, lasts = np.maximum(firsts, low), np.minimum(lasts, high)
    some = firsts <= lasts
    firsts, lasts = firsts[some], lasts[some]
    if low == 0 and not (len(firsts) and firsts[0] == 0):
        firsts, lasts = np.concatenate([_ZERO, firsts]), np.concatenate([_ZERO, lasts])
    return firsts, lasts


def reach(kind: Kind, lookahead: int, resident: Resident) -> int | None:
    """Returns a position beyond which `resident` restores nothing, `None` if there is no such bound."""
    match kind:
        case FullAttention():
            return int(resident.stops[0]) - lookahead if len(resident.stops) else 0
        case SlidingWindow(window_tokens) if window_tokens > 1 or lookahead:
            return int(resident.stops[-1]) - lookahead if len(resident.stops) else 0
        case Recurrent():
            return max(resident.spaced_to, int(resident.states[-1]) if len(resident.states) else 0)
    return None


# --- what follows from it -----------------------------------------------------------------------------


def longest_hit(
    chunking: Chunking,
    num_tokens: int,
    present: Mapping[str, Any],
    *,
    device_tokens: int | Mapping[str, int] = 0,
    resume_multiple: int = 1,
) -> Hit:
    """Returns the longest prefix of a request of `num_tokens` tokens that can be restored.

    Args:
        chunking: the layout and its chunks.
        num_tokens: tokens of the request; the last one is always recomputed.
        present: the chunks on the host, by group name: a boolean mask by `chunk_idx`, or integer
            `chunk_idx` in any order. A missing group has none.
        device_tokens: length of the prefix that the device holds, one for all groups or one per group
            (a missing group has 0); at most `num_tokens - 1`.
        resume_multiple: the hit is a multiple of this, or what the device holds already.

    Raises:
        ValueError: an argument of the wrong type or range, or a group that is unknown or scratch.

    >>> from kvjax import CacheLayout, FullAttention, GroupSpec, Recurrent, resolve_chunking
    >>> layout = CacheLayout([GroupSpec("full", FullAttention(), 4, block_bytes=64),
    ...                       GroupSpec("state", Recurrent(), 16, block_bytes=64)])
    >>> longest_hit(resolve_chunking(layout), 28, {"full": range(7), "state": [0]}).hit_tokens
    16
    """
    check_chunking(chunking)
    total = integer(num_tokens, "num_tokens", at_least=1)
    multiple = integer(resume_multiple, "resume_multiple", at_least=1)
    device, floor = device_prefix(chunking, device_tokens, total)
    given = by_group(chunking, present, "present")
    chunks = {g: present_chunks(chunking, g, listed, total) for g, listed in given.items()}
    resident = {g: resident_of(chunking, g, chunks.get(g, EMPTY), device[g]) for g in chunking.layout.cached}
    hit = max(floor, largest_common(chunking, resident, total - 1, multiple))
    return Hit(
        hit_tokens=hit,
        load={
            group.name: _load_chunks(chunking, g, hit, device[g]) if g in device else EMPTY
            for g, group in enumerate(chunking.layout.groups)
        },
        limited_by=_limited_by(chunking, chunks, device, resident, hit, total, multiple),
    )


def store_set(
    chunking: Chunking,
    checkpoint: int,
    *,
    resume_multiple: int = 1,
    missing: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Returns, for every group in order, the ascending `chunk_idx` worth storing at `checkpoint`.

    They are the required chunks of the two positions at which a later request will resume: one token
    longer than `checkpoint`, and exactly as long.

    Args:
        chunking: the layout and its chunks.
        checkpoint: tokens of the request by then.
        resume_multiple: see `longest_hit`.
        missing: chunks that cannot be had, as in `present` of `longest_hit`; none by default. The
            positions are then the best that can be had without them.

    Raises:
        ValueError: an argument of the wrong type or range, or a group that is unknown or scratch.
    """
    positions = stored_positions(chunking, checkpoint, resume_multiple=resume_multiple, missing=missing)
    return {
        group.name: np.unique(np.concatenate([chunks_required(chunking, g, position) for position in positions]))
        for g, group in enumerate(chunking.layout.groups)
    }


def stored_positions(
    chunking: Chunking,
    checkpoint: int,
    *,
    resume_multiple: int = 1,
    missing: Mapping[str, Any] | None = None,
) -> tuple[int, int]:
    """Returns `(S, R)`: where requests of `checkpoint` and of `checkpoint + 1` tokens will resume.

    Both are 0 where nothing can be restored, and never decrease as `checkpoint` grows.

    Args:
        chunking: the layout and its chunks.
        checkpoint: tokens of the request by then.
        resume_multiple: see `longest_hit`.
        missing: see `store_set`.

    Raises:
        ValueError: as `store_set`.
    """
    check_chunking(chunking)
    position = integer(checkpoint, "checkpoint", at_least=0)
    multiple = integer(resume_multiple, "resume_multiple", at_least=1)
    lost = by_group(chunking, missing or {}, "missing")
    complete = {g: _complete(chunking, g, position, lost.get(g)) for g in chunking.layout.cached}
    longer = largest_common(chunking, complete, position, multiple)
    same = longer if longer < position else largest_common(chunking, complete, max(0, position - 1), multiple)
    return same, longer


def next_cut(chunking: Chunking, position: int, checkpoints: Any, *, resume_multiple: int = 1) -> int:
    """Returns where an engine at `position` must end a step so that its states can be stored.

    That is the smallest stored position (see `stored_positions`) of a checkpoint past `position`; if
    there is none, or no recurrent group, the last checkpoint.

    Raises:
        ValueError: an argument of the wrong type or range, or no checkpoint.
    """
    check_chunking(chunking)
    here = integer(position, "position", at_least=0)
    integer(resume_multiple, "resume_multiple", at_least=1)
    ordered = sorted(checkpoint_list(checkpoints))
    if any(isinstance(chunking.layout.groups[g].kind, Recurrent) for g in chunking.layout.cached):
        for checkpoint in ordered:  # stored positions grow with the checkpoint: the first past `here` is it
            if checkpoint > here:
                for stored in stored_positions(chunking, checkpoint, resume_multiple=resume_multiple):
                    if stored > here:
                        return stored
    return ordered[-1]


def first_tokens(chunking: Chunking, group_idx: int, chunks: np.ndarray) -> np.ndarray:
    """Returns the first token that each chunk holds: of a recurrent chunk the last one it covers, whose state it is."""
    tokens = chunk_tokens_of(chunking, group_idx)
    if isinstance(chunking.layout.groups[group_idx].kind, Recurrent):
        return (chunks + 1) * tokens - 1
    return chunks * tokens


def chunks_needed(chunking: Chunking, group_idx: int, position: int) -> np.ndarray:
    """Returns the ascending `chunk_idx` of a group that hold a token of `needed(position)`."""
    start, stop = needed(chunking.layout.groups[group_idx].kind, position)
    return _chunks_between(chunk_tokens_of(chunking, group_idx), start, stop)


def blocks_to_load(
    chunking: Chunking, group_idx: int, position: int, device_tokens: int, chunks: np.ndarray
) -> np.ndarray:
    """Returns a mask `(len(chunks), blocks_per_chunk)` of the blocks of `chunks` that a load must write:
    those with a needed token that the device does not hold. A block held in part is among them.

    A recurrent chunk has one state and one column, its last block.
    """
    group = chunking.layout.groups[group_idx]
    if isinstance(group.kind, Recurrent):
        return np.ones((len(chunks), 1), bool)
    blocks_per_chunk = chunking.blocks_per_chunk[group_idx] or 0
    starts = (chunks[:, None] * blocks_per_chunk + np.arange(blocks_per_chunk)) * group.tokens_per_block
    wanted = np.zeros(starts.shape, bool)
    for start, stop in _missing(group.kind, position, device_tokens):
        if start < stop:
            wanted |= (starts < stop) & (starts + group.tokens_per_block > start)
    return wanted


# --- arithmetic that knows no kind ----------------------------------------------------------------------


def chunk_tokens_of(chunking: Chunking, group_idx: int) -> int:
    """Returns `tokens_per_chunk` of a cached group."""
    tokens = chunking.tokens_per_chunk[group_idx]
    assert tokens is not None, "scratch groups have no chunks"
    return tokens


def resident_of(
    chunking: Chunking, group_idx: int, chunks: np.ndarray, device_tokens: int, complete_to: int = 0
) -> Resident:
    """What a group has: ascending `chunks`, the device's tokens, and every chunk that ends by `complete_to`."""
    kind = chunking.layout.groups[group_idx].kind
    tokens = chunk_tokens_of(chunking, group_idx)
    if isinstance(kind, Recurrent):
        states = (chunks + 1) * tokens
        if device_tokens:
            states = np.union1d(states, [device_tokens])
        return Resident(EMPTY, EMPTY, states, tokens, complete_to)
    starts, stops = (bound * tokens for bound in runs_of(chunks))
    for start, stop in (needed(kind, device_tokens), (0, complete_to // tokens * tokens)):
        if start < stop:
            starts, stops = with_run(starts, stops, start, stop)
    return Resident(starts, stops, EMPTY)


def _complete(chunking: Chunking, group_idx: int, position: int, missing: Any) -> Resident:
    """What a group has if every chunk that is complete at `position` is resident but the missing ones."""
    if missing is None:
        return resident_of(chunking, group_idx, EMPTY, 0, position)
    num_chunks = position // chunk_tokens_of(chunking, group_idx)
    name = f"missing of group {chunking.layout.groups[group_idx].name!r}"
    has = np.ones(num_chunks, bool)
    has[chunk_indices(missing, name, num_chunks)] = False
    return resident_of(chunking, group_idx, np.flatnonzero(has), 0)


def common_positions(
    chunking: Chunking, resident: Mapping[int, Resident], low: int, high: int
) -> tuple[np.ndarray, np.ndarray]:
    """Positions in `[low, high]` that every cached group can restore, as ascending closed intervals."""
    firsts, lasts = _ZERO + low, _ZERO + high
    for g, has in resident.items():
        group = chunking.layout.groups[g]
        firsts, lasts = intersect(firsts, lasts, *restorable_spans(group.kind, group.lookahead_tokens, has, low, high))
        if not len(firsts):
            break
    return firsts, lasts


def largest_common(chunking: Chunking, resident: Mapping[int, Resident], bound: int, multiple: int) -> int:
    """The largest multiple of `multiple`, at most `bound`, that every group can restore; 0 at least."""
    reaches = [
        reach(chunking.layout.groups[g].kind, chunking.layout.groups[g].lookahead_tokens, has)
        for g, has in resident.items()
    ]
    high = min([bound, *(limit for limit in reaches if limit is not None)])
    width = max(_FIRST_SPAN, multiple)
    while high > 0:
        low = max(0, high - width)
        firsts, lasts = common_positions(chunking, resident, low, high)
        candidates = lasts // multiple * multiple
        candidates = candidates[candidates >= firsts]
        if len(candidates):
            return int(candidates[-1])
        high, width = low - 1, max(width, min(2 * width, _WIDEST_SPAN))
    return 0


def _smallest_above(
    chunking: Chunking, resident: Mapping[int, Resident], position: int, bound: int, multiple: int
) -> int | None:
    low, width = position + 1, max(_FIRST_SPAN, multiple)
    while low <= bound:
        high = min(bound, low + width)
        firsts, lasts = common_positions(chunking, resident, low, high)
        candidates = -(-firsts // multiple) * multiple
        candidates = candidates[candidates <= lasts]
        if len(candidates):
            return int(candidates[0])
        low, width = high + 1, max(width, min(2 * width, _WIDEST_SPAN))
    return None


def _limited_by(
    chunking: Chunking,
    chunks: Mapping[int, np.ndarray],
    device: Mapping[int, int],
    resident: Mapping[int, Resident],
    hit: int,
    total: int,
    multiple: int,
) -> tuple[str, ...]:
    if hit + multiple - hit % multiple > total - 1:
        return ()
    could = {g: resident_of(chunking, g, chunks.get(g, EMPTY), device[g], total) for g in resident}
    candidate = _smallest_above(chunking, could, hit, total - 1, multiple)
    if candidate is None:
        return ()
    return tuple(
        chunking.layout.groups[g].name
        for g in resident
        if not len(common_positions(chunking, {g: resident[g]}, candidate, candidate)[0])
    )


def _missing(kind: Kind, position: int, device_tokens: int) -> list[tuple[int, int]]:
    """The tokens of `needed(position)` that a device with the prefix `device_tokens` lacks."""
    start, stop = needed(kind, position)
    held_start, held_stop = needed(kind, device_tokens)
    if held_start >= held_stop:
        return [(start, stop)]
    return [(start, min(stop, held_start)), (max(start, held_stop), stop)]


def _load_chunks(chunking: Chunking, group_idx: int, position: int, device_tokens: int) -> np.ndarray:
    kind = chunking.layout.groups[group_idx].kind
    tokens = chunk_tokens_of(chunking, group_idx)
    parts = [_chunks_between(tokens, *span) for span in _missing(kind, position, device_tokens)]
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def chunks_required(chunking: Chunking, group_idx: int, position: int) -> np.ndarray:
    """The chunks with a required token of `position`."""
    group = chunking.layout.groups[group_idx]
    if not group.is_cached or position == 0:
        return EMPTY
    return _chunks_between(chunk_tokens_of(chunking, group_idx), *required(group, position))


def _chunks_between(tokens_per_chunk: int, start: int, stop: int) -> np.ndarray:
    if start >= stop:
        return EMPTY
    return np.arange(start // tokens_per_chunk, -(-stop // tokens_per_chunk), dtype=np.int64)
