"""The law: what resuming at a position needs, and all that follows from it.

`needed` and `restorable_spans` state the law for each kind of attention; everything else in this module
is arithmetic on their results that knows no kind, and no other module restates them. Positions and tokens
are counted from the start of the sequence; all intervals of *tokens* are half-open `[start, stop)`, all
intervals of *positions* are closed `[first, last]`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax._checks import integer
from kvjax._indices import chunk_indices
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
    _check_chunking(chunking)
    total = integer(num_tokens, "num_tokens", at_least=1)
    multiple = integer(resume_multiple, "resume_multiple", at_least=1)
    device, floor = _device_prefix(chunking, device_tokens, total)
    given = _present_groups(chunking, present, "present")
    chunks = {g: _present_chunks(chunking, g, listed, total) for g, listed in given.items()}
    resident = {g: _resident(chunking, g, chunks.get(g, EMPTY), device[g]) for g in chunking.layout.cached}
    hit = max(floor, _largest(chunking, resident, total - 1, multiple))
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
        group.name: np.unique(np.concatenate([_chunks_of(chunking, g, position) for position in positions]))
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
    _check_chunking(chunking)
    position = integer(checkpoint, "checkpoint", at_least=0)
    multiple = integer(resume_multiple, "resume_multiple", at_least=1)
    lost = _present_groups(chunking, missing or {}, "missing")
    complete = {g: _complete(chunking, g, position, lost.get(g)) for g in chunking.layout.cached}
    longer = _largest(chunking, complete, position, multiple)
    same = longer if longer < position else _largest(chunking, complete, max(0, position - 1), multiple)
    return same, longer


def next_cut(chunking: Chunking, position: int, checkpoints: Any, *, resume_multiple: int = 1) -> int:
    """Returns where an engine at `position` must end a step so that its states can be stored.

    That is the smallest stored position (see `stored_positions`) of a checkpoint past `position`; if
    there is none, or no recurrent group, the last checkpoint.

    Raises:
        ValueError: an argument of the wrong type or range, or no checkpoint.
    """
    _check_chunking(chunking)
    here = integer(position, "position", at_least=0)
    integer(resume_multiple, "resume_multiple", at_least=1)
    ordered = sorted(_checkpoint_list(checkpoints))
    if any(isinstance(chunking.layout.groups[g].kind, Recurrent) for g in chunking.layout.cached):
        for checkpoint in ordered:  # stored positions grow with the checkpoint: the first past `here` is it
            if checkpoint > here:
                for stored in stored_positions(chunking, checkpoint, resume_multiple=resume_multiple):
                    if stored > here:
                        return stored
    return ordered[-1]


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
    first = resume_step(chunking, resume_multiple=resume_multiple)
    stored = max(first, stored_positions(chunking, position, resume_multiple=resume_multiple)[0])
    kept = {}
    for g, group in enumerate(chunking.layout.groups):
        if not group.is_cached:
            kept[group.name] = position
            continue
        # Where `stored` requires nothing (an attention chunk starts there), later positions require its chunk.
        tokens = _tokens_per_chunk(chunking, g)
        kept[group.name] = min(required(group, stored)[0] // tokens * tokens, needed(group.kind, position)[0])
    return kept


def resume_step(chunking: Chunking, *, resume_multiple: int = 1) -> int:
    """Returns the number of which every hit on host chunks is a multiple: the least common multiple of
    `resume_multiple` and the spacings of the recurrent groups' states."""
    spacings = [
        _tokens_per_chunk(chunking, g)
        for g in chunking.layout.cached
        if isinstance(chunking.layout.groups[g].kind, Recurrent)
    ]
    return math.lcm(integer(resume_multiple, "resume_multiple", at_least=1), *spacings)


def junction(chunking: Chunking, num_tokens: int, chunks: Mapping[int, np.ndarray]) -> int:
    """Returns how far the full groups alone could restore a request, 0 without such a group.

    Where that is beyond the hit, prompts that share a prefix part there, and the position is worth a
    checkpoint.

    Args:
        chunking: the layout and its chunks.
        num_tokens: tokens of the request.
        chunks: resident `chunk_idx` of the request's prefix by `group_idx`; ascending `int64`.
    """
    full = {
        g: _resident(chunking, g, chunks.get(g, EMPTY), 0)
        for g in chunking.layout.cached
        if isinstance(chunking.layout.groups[g].kind, FullAttention)
    }
    return _largest(chunking, full, num_tokens - 1, 1) if full else 0


def eviction_ranks(chunking: Chunking, chunks: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Returns, per `group_idx`, the rank of each resident chunk of one prefix for eviction.

    A chunk's rank is the smallest position, of those the resident chunks can restore, that requires it
    or lies above it. Chunks of equal rank are useless without each other; evicting from the highest rank
    down leaves a usable prefix after every rank. A chunk above all those positions has the highest rank.

    Args:
        chunking: the layout and its chunks.
        chunks: resident `chunk_idx` of one request's prefix by `group_idx`; ascending `int64`.
    """
    resident = {g: _resident(chunking, g, chunks.get(g, EMPTY), 0) for g in chunking.layout.cached}
    end = max((int(r.stops[-1]) for r in resident.values() if len(r.stops)), default=0)
    end = max([end, *(int(r.states[-1]) for r in resident.values() if len(r.states))])
    firsts, lasts = _common(chunking, resident, 0, end)
    ranks = {}
    for g, indices in chunks.items():
        group = chunking.layout.groups[g]
        if isinstance(group.kind, Recurrent):
            above = (indices + 1) * _tokens_per_chunk(chunking, g)
        else:
            above = np.maximum(1, indices * _tokens_per_chunk(chunking, g) + (1 - group.lookahead_tokens))
        at = np.searchsorted(lasts, above)
        smallest = np.maximum(np.append(firsts, np.iinfo(np.int64).max)[at], above)
        ranks[g] = smallest
    return ranks


def chunks_needed(chunking: Chunking, group_idx: int, position: int) -> np.ndarray:
    """Returns the ascending `chunk_idx` of a group that hold a token of `needed(position)`."""
    start, stop = needed(chunking.layout.groups[group_idx].kind, position)
    return _chunks_between(_tokens_per_chunk(chunking, group_idx), start, stop)


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


def _check_chunking(chunking: Any) -> None:
    if not isinstance(chunking, Chunking):
        raise ValueError(f"`chunking` must be a Chunking, as `resolve_chunking` returns it, got {chunking!r}")


def _checkpoint_list(checkpoints: Any) -> list[int]:
    if isinstance(checkpoints, (str, bytes, Mapping)) or not hasattr(checkpoints, "__iter__"):
        raise ValueError(f"`checkpoints` must be a sequence of non-negative ints, got {checkpoints!r}")
    listed = [integer(checkpoint, "checkpoints", at_least=0) for checkpoint in checkpoints]
    if not listed:
        raise ValueError("`checkpoints` must hold at least one position, got none")
    return listed


def _tokens_per_chunk(chunking: Chunking, group_idx: int) -> int:
    tokens = chunking.tokens_per_chunk[group_idx]
    assert tokens is not None, "scratch groups have no chunks"
    return tokens


def _device_prefix(chunking: Chunking, device_tokens: Any, total: int) -> tuple[dict[int, int], int]:
    """Returns the tokens the device holds per cached group, and the prefix restorable whatever else."""
    layout = chunking.layout
    if isinstance(device_tokens, Mapping):
        given = {layout.index(name, "device_tokens"): tokens for name, tokens in device_tokens.items()}
        named = {g: f"device_tokens of group {layout.groups[g].name!r}" for g in given}
    else:
        given = dict.fromkeys(layout.cached, device_tokens)
        named = dict.fromkeys(layout.cached, "device_tokens")
    device = dict.fromkeys(layout.cached, 0)
    for g, tokens in given.items():
        device[g] = integer(tokens, named[g], at_least=0)
        if device[g] > total - 1:
            raise ValueError(f"`{named[g]}` must be at most num_tokens - 1 = {total - 1}, got {tokens}")
    prefixes = set(device.values())
    return device, prefixes.pop() if len(prefixes) == 1 else 0


def _present_groups(chunking: Chunking, present: Any, argument: str) -> dict[int, Any]:
    if not isinstance(present, Mapping):
        raise ValueError(f"`{argument}` must be a mapping of group names to chunks, got {present!r}")
    return {chunking.layout.index(name, argument): chunks for name, chunks in present.items()}


def _present_chunks(chunking: Chunking, group_idx: int, chunks: Any, total: int) -> np.ndarray:
    """Returns the group's `chunk_idx` that can matter to a request of `total` tokens, ascending."""
    group = chunking.layout.groups[group_idx]
    reach = total + group.lookahead_tokens
    num_chunks = -(-reach // _tokens_per_chunk(chunking, group_idx))
    return chunk_indices(chunks, f"present of group {group.name!r}", num_chunks)


def _resident(
    chunking: Chunking, group_idx: int, chunks: np.ndarray, device_tokens: int, complete_to: int = 0
) -> Resident:
    """What a group has: ascending `chunks`, the device's tokens, and every chunk that ends by `complete_to`."""
    kind = chunking.layout.groups[group_idx].kind
    tokens = _tokens_per_chunk(chunking, group_idx)
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
        return _resident(chunking, group_idx, EMPTY, 0, position)
    num_chunks = position // _tokens_per_chunk(chunking, group_idx)
    name = f"missing of group {chunking.layout.groups[group_idx].name!r}"
    has = np.ones(num_chunks, bool)
    has[chunk_indices(missing, name, num_chunks)] = False
    return _resident(chunking, group_idx, np.flatnonzero(has), 0)


def _common(chunking: Chunking, resident: Mapping[int, Resident], low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions in `[low, high]` that every cached group can restore, as ascending closed intervals."""
    firsts, lasts = _ZERO + low, _ZERO + high
    for g, has in resident.items():
        group = chunking.layout.groups[g]
        firsts, lasts = intersect(firsts, lasts, *restorable_spans(group.kind, group.lookahead_tokens, has, low, high))
        if not len(firsts):
            break
    return firsts, lasts


def _largest(chunking: Chunking, resident: Mapping[int, Resident], bound: int, multiple: int) -> int:
    """The largest multiple of `multiple`, at most `bound`, that every group can restore; 0 at least."""
    high, width = bound, max(_FIRST_SPAN, multiple)
    while high > 0:
        low = max(0, high - width)
        firsts, lasts = _common(chunking, resident, low, high)
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
        firsts, lasts = _common(chunking, resident, low, high)
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
    could = {g: _resident(chunking, g, chunks.get(g, EMPTY), device[g], total) for g in resident}
    candidate = _smallest_above(chunking, could, hit, total - 1, multiple)
    if candidate is None:
        return ()
    return tuple(
        chunking.layout.groups[g].name
        for g in resident
        if not len(_common(chunking, {g: resident[g]}, candidate, candidate)[0])
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
    tokens = _tokens_per_chunk(chunking, group_idx)
    parts = [_chunks_between(tokens, *span) for span in _missing(kind, position, device_tokens)]
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _chunks_of(chunking: Chunking, group_idx: int, position: int) -> np.ndarray:
    """The chunks with a required token of `position`."""
    group = chunking.layout.groups[group_idx]
    if not group.is_cached or position == 0:
        return EMPTY
    return _chunks_between(_tokens_per_chunk(chunking, group_idx), *required(group, position))


def _chunks_between(tokens_per_chunk: int, start: int, stop: int) -> np.ndarray:
    if start >= stop:
        return EMPTY
    return np.arange(start // tokens_per_chunk, -(-stop // tokens_per_chunk), dtype=np.int64)
