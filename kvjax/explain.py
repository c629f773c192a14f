"""Why a hit is not longer: what each group can restore near it, and what the next larger one lacks.

What resuming needs is asked of `kvjax.coverage`; here it is only compared with what is resident. As there,
intervals of *tokens* are half-open `(start, stop)`; intervals of *positions* and of *chunks* are closed
`(first, last)`. The "token" of a recurrent group is the last one that its state covers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvjax._arguments import by_group, check_chunking, device_prefix, present_chunks
from kvjax._checks import integer
from kvjax._intervals import EMPTY, merged, runs_of
from kvjax._search import smallest
from kvjax.chunking import Chunking
from kvjax.coverage import (
    Hit,
    Resident,
    chunk_tokens_of,
    chunks_needed,
    chunks_required,
    common_positions,
    largest_common,
    longest_hit,
    needed,
    required,
    resident_of,
    restorable_spans,
)
from kvjax.groups import Recurrent

Range = tuple[int, int]
Ranges = tuple[Range, ...]

# Restorable intervals that are listed above the one that holds or precedes the hit.
_NUM_ABOVE = 3
# How far from the hit a search looks at first, and at most; it grows by this factor.
_FIRST_SPAN, _WIDEST_SPAN, _GROWTH = 4096, 2**22, 8
# Ranges that a sentence spells out.
_MOST_RANGES = 8


@dataclass(frozen=True, slots=True)
class Reading:
    """What one group needs in order to resume at a position.

    Args:
        position: where to resume.
        needed_tokens: the tokens that are read.
        required_tokens: those and the lookahead: the tokens that must be resident.
        chunks: the chunks with a required token.
        device_tokens: the needed tokens that the device holds.
        load_chunks: the chunks with a needed token that the device does not hold.
    """

    position: int
    needed_tokens: Range
    required_tokens: Range
    chunks: Ranges
    device_tokens: Range
    load_chunks: Ranges


@dataclass(frozen=True, slots=True)
class GroupExplanation:
    """One group's part in a hit. A scratch group has no part: `None` and empty throughout.

    Args:
        name: the group.
        alone: the hit if every other group had all it needs.
        restorable: the maximal intervals of positions up to `num_tokens` that the group can restore: the one
            that holds or precedes the hit, and the next ones above. What is further than four million
            positions from the hit is left out.
        at_hit: what the group needs at the hit.
        at_next: what it needs at the next larger candidate; `None` if there is none.
        missing_chunks: the chunks without which it cannot resume at the next larger candidate.
        missing_tokens: the required tokens in them that are nowhere.
    """

    name: str
    alone: int | None
    restorable: Ranges = ()
    at_hit: Reading | None = None
    at_next: Reading | None = None
    missing_chunks: Ranges = ()
    missing_tokens: Ranges = ()


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """Why a hit is not longer.

    Args:
        hit: what `longest_hit` answers.
        num_tokens: tokens of the request.
        next_tokens: the smallest larger hit that is possible with every chunk that is complete at `num_tokens`;
            `None` if there is none. `hit.limited_by` names the groups with `missing_chunks` for it.
        would_hit_tokens: the hit if exactly the missing chunks were there, too; at least `next_tokens`.
        reason: `"missing"`: chunks are missing; otherwise no larger hit is possible: `"last_token"`, it is always
            recomputed; `"resume_multiple"`, no multiple of it can be restored; `"incomplete"`, a group needs a
            chunk that ends past `num_tokens`; `"no_common"`, no position suits all groups.
        sentence: the reason in words, and what would give a longer hit.
        groups: every group of the layout, in order.
    """

    hit: Hit
    num_tokens: int
    next_tokens: int | None
    would_hit_tokens: int | None
    reason: str
    sentence: str
    groups: tuple[GroupExplanation, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A lookup, read: what every part below looks at. Mappings are by `group_idx`, cached groups only."""

    chunking: Chunking
    total: int
    multiple: int
    chunks: dict[int, np.ndarray]
    device: dict[int, int]
    floor: int
    resident: dict[int, Resident]
    could: dict[int, Resident]  # with every chunk that is complete at `total`


def explain_hit(
    chunking: Chunking,
    num_tokens: int,
    present: Mapping[str, Any],
    *,
    device_tokens: int | Mapping[str, int] = 0,
    resume_multiple: int = 1,
) -> Explanation:
    """Returns the longest hit and why it is not longer.

    Args:
        chunking: the layout and its chunks.
        num_tokens: as in `longest_hit`, and so are the others.
        present: the chunks on the host.
        device_tokens: the prefix that the device holds.
        resume_multiple: hits are multiples of it.

    Raises:
        ValueError: as `longest_hit`.

    >>> from kvjax import CacheLayout, FullAttention, GroupSpec, SlidingWindow, resolve_chunking
    >>> layout = CacheLayout([GroupSpec("full", FullAttention(), 16, block_bytes=64),
    ...                       GroupSpec("local", SlidingWindow(33), 16, block_bytes=64)])
    >>> present = {"full": range(6), "local": [0, 1, 5]}
    >>> explain_hit(resolve_chunking(layout), 97, present, resume_multiple=16).sentence
    "The hit would be 48 if group 'local' had chunk 2."
    """
    hit = longest_hit(chunking, num_tokens, present, device_tokens=device_tokens, resume_multiple=resume_multiple)
    ask = _read(chunking, num_tokens, present, device_tokens, resume_multiple)
    position = _smallest_above(ask, hit.hit_tokens, ask.multiple)
    groups = tuple(_explain_group(ask, g, hit.hit_tokens, position) for g in range(len(chunking.layout.groups)))
    if position is None:
        would_hit, (reason, sentence) = None, _no_larger(ask, hit.hit_tokens)
    else:
        would_hit = _hit_with(ask, groups, device_tokens)
        reason, sentence = "missing", f"The hit would be {would_hit:,} if {_had(ask, groups, position)}."
    return Explanation(hit, ask.total, position, would_hit, reason, sentence, groups)


def _read(chunking: Chunking, num_tokens: int, present: Any, device_tokens: Any, resume_multiple: int) -> _Request:
    check_chunking(chunking)
    total = integer(num_tokens, "num_tokens", at_least=1)
    device, floor = device_prefix(chunking, device_tokens, total)
    given = by_group(chunking, present, "present")
    chunks = {g: present_chunks(chunking, g, given[g], total) if g in given else EMPTY for g in chunking.layout.cached}
    return _Request(
        chunking=chunking,
        total=total,
        multiple=integer(resume_multiple, "resume_multiple", at_least=1),
        chunks=chunks,
        device=device,
        floor=floor,
        resident={g: resident_of(chunking, g, chunks[g], device[g]) for g in chunks},
        could={g: resident_of(chunking, g, chunks[g], device[g], total) for g in chunks},
    )


def _smallest_above(ask: _Request, position: int, multiple: int) -> int | None:
    """The smallest candidate above `position` that could be restored with every complete chunk."""
    return smallest([partial(common_positions, ask.chunking, ask.could)], position + 1, ask.total - 1, multiple)


# --- one group ----------------------------------------------------------------------------------------


def _explain_group(ask: _Request, g: int, hit: int, position: int | None) -> GroupExplanation:
    group = ask.chunking.layout.groups[g]
    if not group.is_cached:
        return GroupExplanation(group.name, None)
    missing = EMPTY if position is None else _missing_chunks(ask, g, position)
    return GroupExplanation(
        name=group.name,
        alone=max(ask.floor, largest_common(ask.chunking, {g: ask.resident[g]}, ask.total - 1, ask.multiple)),
        restorable=_near(ask, g, hit),
        at_hit=_reading(ask, g, hit),
        at_next=None if position is None else _reading(ask, g, position),
        missing_chunks=_closed(missing),
        missing_tokens=() if position is None else _missing_tokens(ask, g, position, missing),
    )


def _near(ask: _Request, g: int, hit: int) -> Ranges:
    """The restorable interval that holds or precedes `hit`, and the next ones above."""
    group, width = ask.chunking.layout.groups[g], _FIRST_SPAN
    while True:
        low, high = max(0, hit - width), min(ask.total, hit + width)
        firsts, lasts = merged(*restorable_spans(group.kind, group.lookahead_tokens, ask.resident[g], low, high))
        at = int(np.searchsorted(firsts, hit, side="right")) - 1
        stop = at + 1 + _NUM_ABOVE
        whole_below = low == 0 or (at >= 0 and firsts[at] > low)
        whole_above = high == ask.total or (stop <= len(lasts) and lasts[stop - 1] < high)
        if (whole_below and whole_above) or width >= _WIDEST_SPAN:
            return _pairs(firsts[max(at, 0) : stop], lasts[max(at, 0) : stop])
        width *= _GROWTH


def _reading(ask: _Request, g: int, position: int) -> Reading:
    group = ask.chunking.layout.groups[g]
    start, stop = needed(group.kind, position)
    held_start, held_stop = needed(group.kind, ask.device[g])
    held = max(start, held_start), min(stop, held_stop)
    load = chunks_needed(ask.chunking, g, position)
    return Reading(
        position=position,
        needed_tokens=(start, stop),
        required_tokens=required(group, position),
        chunks=_closed(chunks_required(ask.chunking, g, position)),
        device_tokens=held if held[0] < held[1] else (start, start),
        load_chunks=_closed(load[_off_device(ask, g, load, (start, stop))]),
    )


def _missing_chunks(ask: _Request, g: int, position: int) -> np.ndarray:
    """The chunks with a required token that is neither in a present chunk nor on the device."""
    chunks = chunks_required(ask.chunking, g, position)
    off_device = _off_device(ask, g, chunks, required(ask.chunking.layout.groups[g], position))
    return np.setdiff1d(chunks[off_device], ask.chunks[g], assume_unique=True)


def _off_device(ask: _Request, g: int, chunks: np.ndarray, tokens: Range) -> np.ndarray:
    """A mask of the chunks with a token of the interval `tokens` that the device does not hold."""
    per_chunk = chunk_tokens_of(ask.chunking, g)
    held_start, held_stop = needed(ask.chunking.layout.groups[g].kind, ask.device[g])
    first = np.maximum(chunks * per_chunk, tokens[0])
    return (first < held_start) | (np.minimum((chunks + 1) * per_chunk, tokens[1]) > held_stop)


def _missing_tokens(ask: _Request, g: int, position: int, missing: np.ndarray) -> Ranges:
    """The required tokens of the missing chunks, without those that the device holds."""
    start, stop = required(ask.chunking.layout.groups[g], position)
    held_start, held_stop = needed(ask.chunking.layout.groups[g].kind, ask.device[g])
    starts, stops = (bound * chunk_tokens_of(ask.chunking, g) for bound in runs_of(missing))
    starts, stops = np.maximum(starts, start), np.minimum(stops, stop)
    if held_start < held_stop:
        starts, stops = (
            np.concatenate([starts, np.maximum(starts, held_stop)]),
            np.concatenate([np.minimum(stops, held_start), stops]),
        )
    some = starts < stops
    order = np.argsort(starts[some])
    return _pairs(starts[some][order], stops[some][order])


# --- in words -----------------------------------------------------------------------------------------


def ranges_text(ranges: Ranges, most: int = _MOST_RANGES) -> str:
    """Returns closed ranges as `0-3, 7`, at most `most` of them.

    >>> ranges_text(((0, 3), (7, 7)))
    '0-3, 7'
    """
    spelled = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges[:most]]
    more = f", … ({count(ranges):,} in all)" if len(ranges) > most else ""
    return ", ".join(spelled) + more


def count(ranges: Iterable[Range]) -> int:
    """Returns how many integers closed ranges hold."""
    return sum(last - first + 1 for first, last in ranges)


def _hit_with(ask: _Request, groups: tuple[GroupExplanation, ...], device_tokens: Any) -> int:
    """The hit if the missing chunks were present, too."""
    added = {g: [np.arange(first, last + 1) for first, last in groups[g].missing_chunks] for g in ask.chunks}
    return longest_hit(
        ask.chunking,
        ask.total,
        {groups[g].name: np.concatenate([ask.chunks[g], *added[g]]) for g in ask.chunks},
        device_tokens=device_tokens,
        resume_multiple=ask.multiple,
    ).hit_tokens


def _had(ask: _Request, groups: tuple[GroupExplanation, ...], position: int) -> str:
    wishes = []
    for part, group in zip(groups, ask.chunking.layout.groups, strict=True):
        if part.missing_chunks:
            noun = "chunk" if count(part.missing_chunks) == 1 else "chunks"
            state = f" (the state at {position:,})" if isinstance(group.kind, Recurrent) else ""
            wishes.append(f"group {part.name!r} had {noun} {ranges_text(part.missing_chunks)}{state}")
    return " and ".join([", ".join(wishes[:-1])] * (len(wishes) > 1) + wishes[-1:])


def _no_larger(ask: _Request, hit: int) -> tuple[str, str]:
    """The reason and the sentence where no larger hit is possible, whatever chunks are stored by now."""
    last = ask.total - 1
    if hit == last:
        return "last_token", (
            f"No larger hit is possible: the last token is always recomputed, so a request of {_tokens(ask.total)} "
            f"resumes at {last:,} at most."
        )
    stuck = [g for g in ask.could if largest_common(ask.chunking, {g: ask.could[g]}, last, 1) <= hit]
    if stuck:
        ends = [_end_of_next_chunk(ask, g, hit) for g in stuck]
        early = all(end == ask.total for _, end in ends)
        return ("last_token", "incomplete")[not early], (
            f"No larger hit is possible{'' if early else ' yet'}: "
            + "; ".join(_stuck(ask, g, hit, *end) for g, end in zip(stuck, ends, strict=True))
            + "."
        )
    free = _smallest_above(ask, hit, 1)
    if free is not None:
        return "resume_multiple", _no_multiple(ask, hit, free)
    return "no_common", (
        f"No larger hit is possible yet: even with every chunk that is complete at {_tokens(ask.total)}, no position "
        f"above {hit:,} can be restored in all groups."
    )


def _end_of_next_chunk(ask: _Request, g: int, hit: int) -> tuple[int, int]:
    """The last chunk that a group lacks to resume at the position after `hit`, and where it ends.

    Of a recurrent group the chunk may be there: then its state is further than that position.
    """
    state = isinstance(ask.chunking.layout.groups[g].kind, Recurrent)
    chunks = chunks_required(ask.chunking, g, hit + 1) if state else _missing_chunks(ask, g, hit + 1)
    chunk_idx = int(chunks[-1])
    return chunk_idx, (chunk_idx + 1) * chunk_tokens_of(ask.chunking, g)


def _stuck(ask: _Request, g: int, hit: int, chunk_idx: int, end: int) -> str:
    group = ask.chunking.layout.groups[g]
    past = f"past the {_tokens(ask.total)} of the request"
    if isinstance(group.kind, Recurrent):
        if end == ask.total:
            past = "the end of the request, whose last token is always recomputed"
        return f"the next state of group {group.name!r} is at {end:,}, {past}"
    ahead = f" (it looks {_tokens(group.lookahead_tokens)} ahead)" if group.lookahead_tokens else ""
    return f"to resume past {hit:,}, group {group.name!r} needs chunk {chunk_idx}{ahead}, which ends at {end:,}, {past}"


def _no_multiple(ask: _Request, hit: int, free: int) -> str:
    following = hit // ask.multiple * ask.multiple + ask.multiple
    rule = f"No larger hit is possible: hits are multiples of {ask.multiple:,} (`resume_multiple`), and "
    if following >= ask.total:
        return rule + (
            f"the next, {following:,}, is past {ask.total - 1:,}, the largest position of a request of "
            f"{_tokens(ask.total)} (the last token is always recomputed)."
        )
    return rule + (
        f"none from {following:,} to {ask.total - 1:,} could be restored, even with every complete chunk; "
        f"{free:,} could, but is no such multiple."
    )


def _tokens(number: int) -> str:
    return f"{number:,} token" + "s" * (number != 1)


# --- intervals ----------------------------------------------------------------------------------------


def _pairs(lows: np.ndarray, highs: np.ndarray) -> Ranges:
    return tuple(zip(lows.tolist(), highs.tolist(), strict=True))


def _closed(chunks: np.ndarray) -> Ranges:
    """Ascending chunks as closed ranges."""
    starts, stops = runs_of(chunks)
    return _pairs(starts, stops - 1)
