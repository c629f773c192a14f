"""What ranks send each other: which call they are in, what it is about, and what they have to say."""

import json
from collections.abc import Sequence
from typing import Any

from kvjax._checks import shown
from kvjax.ranks.channel import RanksDifferError

_VERSION = 1
_SHOWN = 200


def encode(call: str, about: Any, body: Any, *, failure: str = "", raised: str = "") -> bytes:
    """Returns a message.

    Args:
        call: what the rank does.
        about: what it does it to; the same on every rank.
        body: what this rank has to say. Both are made of what JSON has.
        failure: what went wrong on this rank, if anything did; `about` and `body` are then of no account.
        raised: what an earlier call raised that exchanges nothing, if the others may not know.
    """
    return json.dumps([_VERSION, call, about, body, failure, raised], separators=(",", ":")).encode()


def bodies(messages: Sequence[bytes], rank: int) -> list[Any]:
    """Returns what each rank has to say, once all are known to be in one call about the same.

    Args:
        messages: by rank, as `encode` made them.
        rank: this one.

    Raises:
        RanksDifferError: they are not, or one of them failed.
    """
    decoded = [_decoded(message, of) for of, message in enumerate(messages)]
    _, call, about, *_ = decoded[rank]
    raised = "".join(f"; on rank {of}, {words[-1]}" for of, words in enumerate(decoded) if words[-1])
    for other, (_, their_call, their_about, _, failure, _) in enumerate(decoded):
        if failure:
            raise RanksDifferError(f"rank {other} failed in {their_call!r}: {failure}")
        if their_call != call:
            raise RanksDifferError(
                f"all ranks must make the same calls in the same order, got {shown(call)} on rank {rank} "
                f"and {their_call!r} on rank {other}{raised}"
            )
        if their_about != about:
            name, mine, theirs = _difference(about, their_about)
            raise RanksDifferError(
                f"all ranks must call {call!r} with the same{name}, got {_shown(mine)} on rank {rank} "
                f"and {_shown(theirs)} on rank {other}{raised}"
            )
    return [body for _, _, _, body, *_ in decoded]


def failures(messages: Sequence[bytes]) -> list[str]:
    """Returns what went wrong on each rank, empty where nothing did."""
    return [_decoded(message, rank)[-2] for rank, message in enumerate(messages)]


def _decoded(message: bytes, rank: int) -> list[Any]:
    try:
        fields = json.loads(message)
    except ValueError:
        fields = None
    if not isinstance(fields, list) or len(fields) != 6 or fields[0] != _VERSION:
        raise RanksDifferError(
            f"rank {rank} must speak version {_VERSION} of the messages of kvjax, got {shown(message[:40])}"
        )
    return fields


def _difference(about: Any, theirs: Any) -> tuple[str, Any, Any]:
    """Returns the first option that differs, where a call is about named ones, and what it is here and there."""
    named, others = about[-1], theirs[-1]
    if isinstance(named, dict) and isinstance(others, dict):
        for name in {**named, **others}:
            if named.get(name) != others.get(name):
                return f" {name}", named.get(name), others.get(name)
    return "", about, theirs


def _shown(value: Any) -> str:
    written = json.dumps(value)
    return written if len(written) <= _SHOWN else f"{written[:_SHOWN]}…"
