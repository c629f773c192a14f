"""What follows from the law (`kvjax.law`): hits, load sets, store sets, cuts.

It is arithmetic on the law's results. Positions and tokens are counted from the start of the sequence; all
intervals of *tokens* are half-open `[start, stop)`, all intervals of *positions* are closed `[first, last]`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kvjax._arguments import by_group, check_chunking, checkpoint_list, chunk_indices, device_prefix, presence
from kvjax._checks import integer
from kvjax._intervals import EMPTY, Intervals, merged, multiples_in, with_run
from kvjax._resident import ChunkMask as ChunkMask
from kvjax._resident import Resident as Resident
from kvjax._search import PositionSet, in_common, largest, smallest
from kvjax.chunking import Chunking
from kvjax.groups import FullAttention, Kind, Recurrent
from kvjax.law import needed as needed
from kvjax.law import needed_from as needed_from
from kvjax.law import reach as reach
from kvjax.law import required as required
from kvjax.law import restorable_spans as restorable_spans
from kvjax.positions import Restorable, check_all


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


def longest_hit(
    chunking: Chunking,
    num_tokens: int,
    present: Mapping[str, Any],
    *,
    device_tokens: int | Mapping[str, int] = 0,
    resume_multiple: int = 1,
    ranks: Sequence[Restorable] = (),
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
        ranks: what other ranks of the model can restore for the request, as their `restorable` says: the hit
            is then the largest position that this rank and all of them can restore, and equal on all ranks.
            `limited_by` still names groups of this rank alone, those that cannot restore the next larger
            candidate *here*; it is empty where only another rank limits.

    Raises:
        ValueError: an argument of the wrong type or range, or a group that is unknown or scratch.

    >>> from kvjax import CacheLayout, FullAttention, GroupSpec, Recurrent, resolve_chunking
    >>> layout = CacheLayout([GroupSpec("full", FullAttention(), 4, block_bytes=64),
    ...                       GroupSpec("state", Recurrent(), 16, block_bytes=64)])
    >>> longest_hit(resolve_chunking(layout), 28, {"full": range(7), "state": [0]}).hit_tokens
    16
    """
    return hit_of(_request(chunking, num_tokens, present, device_tokens, resume_multiple), check_all(ranks, "ranks"))


def hit_of(
    request: "Asked", ranks: Sequence[Restorable] = (), most: int | None = None, *, with_limits: bool = True
) -> Hit:
    """Returns the hit of a request, see `longest_hit`; what is beyond `most` is not restored from the host.
    `limited_by` is empty without `with_limits`, which takes most of the time where nothing is restored."""
    chunking = request.chunking
    hit = _hit_tokens(request, ranks, request.total - 1 if most is None else min(most, request.total - 1))
    return Hit(
        hit_tokens=hit,
        load={
            group.name: _load_chunks(chunking, g, hit, request.device[g]) if group.is_cached else EMPTY
            for g, group in enumerate(chunking.layout.groups)
        },
        limited_by=_limited_by(request, hit) if with_limits else (),
    )


def restorable(
    chunking: Chunking,
    num_tokens: int,
    present: Mapping[str, Any],
    *,
    device_tokens: int | Mapping[str, int] = 0,
    resume_multiple: int = 1,
) -> Restorable:
    """Returns every position at which a request of `num_tokens` tokens can resume on this rank.

    They are the hits that `longest_hit` may choose from: 0, the multiples of `resume_multiple` below
    `num_tokens` that every group can restore, and what the device holds in all groups. Ranks that hold
    different chunks send each other these sets (`Restorable.to_bytes`) and resume at the largest position
    of the intersection.

    Args:
        chunking: the layout and its chunks.
        num_tokens: see `longest_hit`; likewise the others.
        present: the chunks of this rank.
        device_tokens: what this rank's device holds.
        resume_multiple: of more than 1, every position but the device's is an interval of its own.

    Raises:
        ValueError: as `longest_hit`, or the set has more than `kvjax.positions.MOST_INTERVALS` intervals.

    >>> from kvjax import CacheLayout, FullAttention, GroupSpec, SlidingWindow, resolve_chunking
    >>> layout = CacheLayout([GroupSpec("full", FullAttention(), 4, block_bytes=64),
    ...                       GroupSpec("window", SlidingWindow(4), 4, block_bytes=64)])
    >>> restorable(resolve_chunking(layout), 28, {"full": range(5), "window": [0, 3, 4]})
    Restorable(0-4, 15-20)
    """
    return restorable_of(_request(chunking, num_tokens, present, device_tokens, resume_multiple))


def restorable_of(request: "Asked") -> Restorable:
    """Returns every position at which a request can resume, see `restorable`."""
    chunking = request.chunking
    high = common_reach(chunking, request.resident, request.total - 1)
    firsts, lasts = merged(*common_positions(chunking, request.resident, 0, max(0, high)))
    if request.multiple > 1:
        firsts = lasts = multiples_in(firsts, lasts, request.multiple)
    if request.floor:
        firsts, stops = with_run(firsts, lasts + 1, request.floor, request.floor + 1)
        lasts = stops - 1
    return Restorable(firsts, lasts)


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
        group.name: _union(*(chunks_required(chunking, g, position) for position in positions))
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


def chunks_lacking(
    chunking: Chunking, num_tokens: int, position: int, device_tokens: int | Mapping[str, int]
) -> dict[int, np.ndarray]:
    """Returns, by `group_idx`, the ascending `chunk_idx` with a token that a request needs to resume at a position and
    the device lacks: those that a load reads, and those that a draft head requires beyond.

    Args:
        chunking: the layout and its chunks.
        num_tokens: tokens of the request.
        position: one that can be restored.
        device_tokens: see `longest_hit`.
    """
    device, floor = device_prefix(chunking, device_tokens, num_tokens)
    lacking = {}
    for g in chunking.layout.cached:
        group, tokens = chunking.layout.groups[g], chunk_tokens_of(chunking, g)
        wanted = required(group, position) if position not in (0, floor) else (0, 0)
        lacking[g] = _chunks_of(tokens, _without(wanted, needed(group.kind, device[g])))
    return lacking


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


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A lookup whose arguments were checked; `floor` is what the device holds in all groups."""

    chunking: Chunking
    total: int
    multiple: int
    device: dict[int, int]
    floor: int
    resident: dict[int, Resident]


def _request(chunking: Any, num_tokens: Any, present: Any, device_tokens: Any, resume_multiple: Any) -> Asked:
    check_chunking(chunking)
    total = integer(num_tokens, "num_tokens", at_least=1)
    multiple = integer(resume_multiple, "resume_multiple", at_least=1)
    given = by_group(chunking, present, "present")
    chunks = {g: presence(chunking, g, listed, total) for g, listed in given.items()}
    return asked(chunking, total, chunks, device_tokens, multiple)


def asked(
    chunking: Chunking,
    num_tokens: int,
    chunks: Mapping[int, np.ndarray | ChunkMask],
    device_tokens: int | Mapping[str, int],
    resume_multiple: int,
) -> Asked:
    """Returns a lookup of which all but `device_tokens` is right, with `chunks` as in `Resident`, by `group_idx`.

    Raises:
        ValueError: `device_tokens` of the wrong type or range, or of a group that is unknown or scratch.
    """
    device, floor = device_prefix(chunking, device_tokens, num_tokens)
    resident = {g: resident_of(chunking, g, chunks.get(g, EMPTY), device[g]) for g in chunking.layout.cached}
    return Asked(chunking, num_tokens, resume_multiple, device, floor, resident)


def _hit_tokens(request: Asked, ranks: Sequence[Restorable], most: int) -> int:
    """The largest position that this rank and the others can restore; of what is on the host, at most `most`."""
    sets = [*_sets(request.chunking, request.resident), *(rank.within for rank in ranks)]
    high = common_reach(request.chunking, request.resident, most)
    found = largest(sets, min([high, *(rank.largest() for rank in ranks)]), request.multiple)
    return max(found, request.floor if all(request.floor in rank for rank in ranks) else 0)


def chunk_tokens_of(chunking: Chunking, group_idx: int) -> int:
    """Returns `tokens_per_chunk` of a cached group."""
    tokens = chunking.tokens_per_chunk[group_idx]
    assert tokens is not None, "scratch groups have no chunks"
    return tokens


def resident_of(
    chunking: Chunking,
    group_idx: int,
    chunks: np.ndarray | ChunkMask,
    device_tokens: int,
    complete_to: int = 0,
) -> Resident:
    """What a group has: `chunks` (see `Resident`), the device's tokens, and every chunk that ends by `complete_to`."""
    tokens = chunk_tokens_of(chunking, group_idx)
    start, stop = needed(chunking.layout.groups[group_idx].kind, device_tokens)
    return Resident(tokens, chunks, (start, stop) if start < stop else (0, 0), complete_to // tokens)


def _complete(chunking: Chunking, group_idx: int, position: int, missing: Any) -> Resident:
    """What a group has if every chunk that is complete at `position` is resident but the missing ones."""
    if missing is None:
        return resident_of(chunking, group_idx, EMPTY, 0, position)
    num_chunks = position // chunk_tokens_of(chunking, group_idx)
    name = f"missing of group {chunking.layout.groups[group_idx].name!r}"
    has = np.ones(num_chunks, bool)
    has[chunk_indices(missing, name, num_chunks)] = False
    return resident_of(chunking, group_idx, has, 0)


def _sets(chunking: Chunking, resident: Mapping[int, Resident]) -> list[PositionSet]:
    """What each group can restore, as sets of positions: first those that leave the least for others to be read."""
    groups = chunking.layout.groups
    return [
        partial(restorable_spans, groups[g].kind, groups[g].lookahead_tokens, resident[g])
        for g in _full_first(chunking, resident)
    ]


def common_positions(chunking: Chunking, resident: Mapping[int, Resident], low: int, high: int) -> Intervals:
    """Positions in `[low, high]` that every group of `resident` can restore, as ascending closed intervals."""
    return in_common(_sets(chunking, resident), low, high)


def common_reach(chunking: Chunking, resident: Mapping[int, Resident], bound: int) -> int:
    """A position, at most `bound`, beyond which the groups have none in common up to `bound`."""
    groups = chunking.layout.groups
    for g in _full_first(chunking, resident):
        if bound <= 0:
            break
        bound = reach(groups[g].kind, groups[g].lookahead_tokens, resident[g], bound)
    return bound


def _full_first(chunking: Chunking, resident: Mapping[int, Resident]) -> list[int]:
    return sorted(resident, key=lambda g: not isinstance(chunking.layout.groups[g].kind, FullAttention))


def largest_common(chunking: Chunking, resident: Mapping[int, Resident], bound: int, multiple: int) -> int:
    """The largest multiple of `multiple`, at most `bound`, that every group can restore; 0 at least."""
    return largest(_sets(chunking, resident), common_reach(chunking, resident, bound), multiple)


def _limited_by(request: Asked, hit: int) -> tuple[str, ...]:
    chunking, total, multiple = request.chunking, request.total, request.multiple
    if hit + multiple - hit % multiple > total - 1:
        return ()
    could = {g: replace(has, num_complete=total // has.tokens_per_chunk) for g, has in request.resident.items()}
    candidate = smallest(_sets(chunking, could), hit + 1, total - 1, multiple)
    if candidate is None:
        return ()
    return tuple(
        chunking.layout.groups[g].name
        for g, has in request.resident.items()
        if not len(common_positions(chunking, {g: has}, candidate, candidate)[0])
    )


def _missing(kind: Kind, position: int, device_tokens: int) -> list[tuple[int, int]]:
    """The tokens of `needed(position)` that a device with the prefix `device_tokens` lacks."""
    return _without(needed(kind, position), needed(kind, device_tokens))


def _without(tokens: tuple[int, int], held: tuple[int, int]) -> list[tuple[int, int]]:
    """What is left of an interval of tokens without another one, as one or two intervals, empty perhaps."""
    (start, stop), (held_start, held_stop) = tokens, held
    if held_start >= held_stop:
        return [(start, stop)]
    return [(start, min(stop, held_start)), (max(start, held_stop), stop)]


def _load_chunks(chunking: Chunking, group_idx: int, position: int, device_tokens: int) -> np.ndarray:
    kind = chunking.layout.groups[group_idx].kind
    tokens = chunk_tokens_of(chunking, group_idx)
    return _chunks_of(tokens, _missing(kind, position, device_tokens))


def _chunks_of(tokens_per_chunk: int, spans: list[tuple[int, int]]) -> np.ndarray:
    """The chunks with a token of one or two intervals, in order."""
    parts = [_chunks_between(tokens_per_chunk, *span) for span in spans]
    return parts[0] if len(parts) == 1 else _union(*parts)


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


def _union(chunks: np.ndarray, more: np.ndarray) -> np.ndarray:
    """The union of two ranges of `chunk_idx`, the first of which starts first unless one is empty."""
    if not len(chunks) or not len(more):
        return more if len(more) else chunks
    assert chunks[0] <= more[0], "the ranges are in order"
    return np.concatenate([chunks, more[max(0, int(chunks[-1] - more[0]) + 1) :]])
