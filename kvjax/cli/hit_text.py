"""What `kvjax hit --explain` says: the JSON form of an explanation, and the lines for people."""

import sys
from dataclasses import asdict
from typing import Any

from kvjax.explain import Explanation, GroupExplanation, Ranges, Reading, count, ranges_text
from kvjax.groups import CacheLayout, ChunkedLocal, FullAttention, GroupSpec, Recurrent, Scratch, SlidingWindow


def describe_explanation(explanation: Explanation) -> dict[str, Any]:
    """Returns the value of the key `explain`, as the docstring of `kvjax.cli.hit` states it."""
    return {
        "next": explanation.next_tokens,
        "would_hit": explanation.would_hit_tokens,
        "reason": explanation.reason,
        "sentence": explanation.sentence,
        "groups": [asdict(part) for part in explanation.groups],
    }


def print_explanation(explanation: Explanation, layout: CacheLayout) -> None:
    """Prints each group's part in the hit, then the sentence that sums it up."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines(explanation, layout):
        print(line.encode(encoding, "backslashreplace").decode(encoding))


def lines(explanation: Explanation, layout: CacheLayout) -> list[str]:
    """Returns what is printed, line by line."""
    said = []
    for part, group in zip(explanation.groups, layout.groups, strict=True):
        said += ["", f"{part.name!r}: {_kind_text(group)}", *(f"  {line}" for line in _group_lines(part, group))]
    return [*said, "", explanation.sentence]


def _kind_text(group: GroupSpec) -> str:
    match group.kind:
        case FullAttention():
            words = "full attention"
        case SlidingWindow(window_tokens):
            words = f"sliding window of {_tokens(window_tokens)}"
        case ChunkedLocal(chunk_tokens):
            words = f"attention chunks of {_tokens(chunk_tokens)}"
        case Recurrent():
            words = "recurrent"
        case Scratch():
            words = "scratch, never stored and never in the way"
    return words + (f", looks {_tokens(group.lookahead_tokens)} ahead" if group.lookahead_tokens else "")


def _group_lines(part: GroupExplanation, group: GroupSpec) -> list[str]:
    if part.at_hit is None:
        return []
    at = [f"at {part.at_hit.position:,}", "" if part.at_next is None else f"at {part.at_next.position:,}"]
    width = max(len("restorable"), *map(len, at))
    rows = [
        ("restorable", _positions(part.restorable)),
        ("alone", f"would allow a hit of {part.alone:,}"),
        (at[0], f"{_reads(part.at_hit, group)}; {_loads(part.at_hit)}"),
    ]
    if part.at_next is not None:
        rows.append((at[1], f"{_reads(part.at_next, group)}; {_lacks(part, group)}"))
    return [f"{name:<{width}}  {words}" for name, words in rows]


def _reads(reading: Reading, group: GroupSpec) -> str:
    """What is read at a position, the chunks that hold it, and what of it is on the device."""
    start, stop = reading.needed_tokens
    held = reading.device_tokens[0] < reading.device_tokens[1]
    if isinstance(group.kind, Recurrent) and start < stop:
        where = "which the device holds" if held else f"the end of {_chunks(reading.chunks)}"
        return f"needs the state at {reading.position:,}, {where}"
    words = f"needs {_span(start, stop)}" if start < stop else f"needs nothing{_why_nothing(reading, group)}"
    if isinstance(group.kind, ChunkedLocal) and start < stop:
        words += f" (its attention chunk starts at {start:,})"
    if reading.required_tokens[1] > max(stop, reading.position):
        words += f" and, to look ahead, {_span(reading.position, reading.required_tokens[1])}"
    if reading.chunks:
        words += f" = {_chunks(reading.chunks)}"
    return words + (f"; the device holds {_span(*reading.device_tokens)}" if held else "")


def _why_nothing(reading: Reading, group: GroupSpec) -> str:
    if reading.position == 0:
        return " at the start"
    return ": an attention chunk starts here" if isinstance(group.kind, ChunkedLocal) else ""


def _loads(reading: Reading) -> str:
    return f"loads {_chunks(reading.load_chunks)}" if reading.load_chunks else "loads nothing"


def _lacks(part: GroupExplanation, group: GroupSpec) -> str:
    if not part.missing_chunks:
        return "nothing is missing"
    chunks = count(part.missing_chunks)
    words = f"missing {ranges_text(part.missing_chunks)} ({chunks:,} chunk{'s' * (chunks != 1)})"
    if isinstance(group.kind, Recurrent):
        return words
    tokens = sum(stop - start for start, stop in part.missing_tokens)
    closed = tuple((start, stop - 1) for start, stop in part.missing_tokens)
    return f"{words}: {'token' if tokens == 1 else 'tokens'} {_positions(closed)}"


def _chunks(ranges: Ranges) -> str:
    chunks = count(ranges)
    spelled = f"{'chunk' if chunks == 1 else 'chunks'} {ranges_text(ranges)}"
    return f"{spelled} ({chunks:,})" if len(ranges) > 1 and "in all" not in spelled else spelled


def _span(start: int, stop: int) -> str:
    return f"token {start:,}" if stop == start + 1 else f"tokens {start:,}-{stop - 1:,}"


def _positions(ranges: Ranges, most: int = 8) -> str:
    spelled = [f"{first:,}" if first == last else f"{first:,}-{last:,}" for first, last in ranges[:most]]
    return "; ".join([*spelled, "…"] if len(ranges) > most else spelled)


def _tokens(number: int) -> str:
    return f"{number:,} token" + "s" * (number != 1)
