"""Load or recompute: whether restoring pays, and from where."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvjax._checks import shown

Restore = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to begin a request.

    Args:
        source: the lowest level that something is restored from: `"device"` if nothing is restored, `"host"`, or the
            name of a tier.
        hit_tokens: where the request would resume.
        num_bytes: of the chunks to load, from wherever.
        tier_bytes: of those that come from tiers below the host pool.
        restore_s: how long restoring will take, in seconds; `None` if nothing like it was measured lately.
        recompute_s: how long the tokens from there on will take; `None` if nobody told how fast tokens are computed.
    """

    source: str
    hit_tokens: int
    num_bytes: int
    tier_bytes: int
    restore_s: float | None
    recompute_s: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """Which way was taken, and what the others would have cost.

    Args:
        chosen: the way that was taken.
        options: all ways, by `hit_tokens`, the first one restoring nothing.
        forced: the caller said what to do.
        reason: why, in a few words.
    """

    chosen: Option
    options: tuple[Option, ...]
    forced: bool
    reason: str

    @property
    def restores(self) -> bool:
        """Whether anything is restored."""
        return self.chosen.source != "device"

    @property
    def restore_s(self) -> float | None:
        """What restoring as much as there is would take, and computing the rest, in seconds; `None` if unknown."""
        return _total(self.options[-1])

    @property
    def recompute_s(self) -> float | None:
        """What computing all that the device does not hold would take, in seconds; `None` if unknown."""
        return self.options[0].recompute_s


def check_restore(restore: Restore) -> Restore:
    """Returns `restore`.

    Raises:
        ValueError: it is no such word.
    """
    if restore not in get_args(Restore):
        raise ValueError(f"`restore` must be one of {', '.join(map(repr, get_args(Restore)))}, got {shown(restore)}")
    return restore


def decide(options: Sequence[Option], restore: Restore) -> Decision:
    """Chooses the way that takes least time.

    What was not measured is tried: a level without a measurement counts as taking no time. If nobody told how fast
    tokens are computed, as much as possible is restored.

    Args:
        options: at least one, by `hit_tokens`, the first one restoring nothing.
        restore: `"auto"`, or `"always"` the longest hit, or `"never"` any.
    """
    ways = tuple(options)
    if restore == "never":
        return Decision(ways[0], ways, True, "told to restore nothing")
    if restore == "always":
        return Decision(ways[-1], ways, True, "told to restore all")
    if ways[0].recompute_s is None:
        return Decision(ways[-1], ways, False, "nobody told how fast tokens are computed")
    if ways[-1].restore_s is None:
        return Decision(ways[-1], ways, False, f"{ways[-1].source} was not measured lately")
    best = min(ways, key=lambda way: (_total(way) or 0.0, -way.hit_tokens))
    return Decision(best, ways, False, "takes least time")


def _total(option: Option) -> float | None:
    if option.recompute_s is None or option.restore_s is None:
        return None
    return option.restore_s + option.recompute_s
