"""The positions that one rank can restore, as a value that ranks send each other.

Every rank of a model may hold other chunks, and all must resume at one position. That is a position which
each of them can restore: the largest of the *intersection* of their sets. A minimum of their hits would be
wrong, as a rank that could go further need not be able to resume there.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvjax._checks import LIMIT, shown
from kvjax._intervals import EMPTY, Intervals, intersect

# More intervals than this are refused, so that a few bad bytes cannot ask for all memory.
MOST_INTERVALS = 2**22

_VERSION = 1
# A number below `LIMIT` takes at most so many bytes of 7 bits.
_MOST_BYTES = 7
_SHOWN = 8


class Restorable:
    """An immutable set of positions, 0 always among them: ascending closed intervals that do not touch.

    Sets are intersected by `a & b` or `a.intersect(b, c, …)`, and asked by `position in a`.

    Args:
        firsts: first positions of the intervals, ascending; the first one is 0.
        lasts: their last positions.

    Raises:
        ValueError: the two are no such intervals, or there are more than `MOST_INTERVALS`.

    >>> Restorable([0, 16, 48], [0, 31, 48]) & Restorable([0, 20], [9, 48])
    Restorable(0, 20-31, 48)
    """

    __slots__ = ("firsts", "lasts")

    firsts: np.ndarray
    lasts: np.ndarray

    def __init__(self, firsts: Any, lasts: Any):
        pair = _positions(firsts, "firsts"), _positions(lasts, "lasts")
        _check_intervals(*pair)
        for name, bounds in zip(self.__slots__, pair, strict=True):
            bounds.flags.writeable = False
            object.__setattr__(self, name, bounds)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Restorable cannot be changed, tried to set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Restorable cannot be changed, tried to delete {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Restorable, (self.firsts, self.lasts)

    # --- asking ---------------------------------------------------------------------------------------

    def largest(self) -> int:
        """Returns the largest position."""
        return int(self.lasts[-1])

    def within(self, low: int, high: int) -> Intervals:
        """Returns the positions in `[low, high]` as ascending closed intervals."""
        first, stop = self.lasts.searchsorted(low), self.firsts.searchsorted(high, side="right")
        return np.maximum(self.firsts[first:stop], low), np.minimum(self.lasts[first:stop], high)

    def __contains__(self, position: int) -> bool:
        return len(self.within(position, position)[0]) > 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Restorable):
            return NotImplemented
        return np.array_equal(self.firsts, other.firsts) and np.array_equal(self.lasts, other.lasts)

    def __hash__(self) -> int:
        return hash((self.firsts.tobytes(), self.lasts.tobytes()))

    def __repr__(self) -> str:
        pairs = list(zip(self.firsts.tolist(), self.lasts.tolist(), strict=True))
        if len(pairs) > _SHOWN:
            shown = [*map(_interval_text, pairs[: _SHOWN - 2]), "…", _interval_text(pairs[-1])]
            return f"Restorable({', '.join(shown)}; {len(pairs)} intervals)"
        return f"Restorable({', '.join(map(_interval_text, pairs))})"

    # --- intersecting ---------------------------------------------------------------------------------

    def intersect(self, *others: "Restorable") -> "Restorable":
        """Returns the positions that this set and all others hold.

        Raises:
            ValueError: one of the others is no `Restorable`.
        """
        firsts, lasts = self.firsts, self.lasts
        for other in check_all(others, "others"):
            firsts, lasts = intersect(firsts, lasts, other.firsts, other.lasts)
        return Restorable(firsts, lasts)

    def __and__(self, other: "Restorable") -> "Restorable":
        return self.intersect(other) if isinstance(other, Restorable) else NotImplemented

    # --- bytes ----------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Returns the set as bytes, the same for equal sets.

        A version byte, the last position of the first interval, then for each stretch of intervals of equal
        distance and length: how many they are, the distance from the position before, the length (both less what
        they are at least). All are unsigned LEB128 numbers.

        A prefix of 1,048,576 tokens without a gap takes 4 bytes; states every 1,408 tokens of it, or all multiples
        of 16, 5 to 8; 1,000 intervals in no order about 5,000.
        """
        gaps = self.firsts[1:] - self.lasts[:-1] - 2
        lengths = self.lasts[1:] - self.firsts[1:]
        changes = np.flatnonzero((gaps[1:] != gaps[:-1]) | (lengths[1:] != lengths[:-1])) + 1
        begins = np.concatenate([[0], changes]) if len(gaps) else EMPTY
        counts = np.diff(np.append(begins, len(gaps)))
        stretches = np.stack([counts - 1, gaps[begins], lengths[begins]], axis=1)
        return bytes([_VERSION]) + _varints(np.concatenate([self.lasts[:1], stretches.ravel()]))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Restorable":
        """Returns the set that `to_bytes` turned into `data`.

        Raises:
            ValueError: `data` is anything but the bytes of a set.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise _refused(f"got {type(data).__name__}")
        given = bytes(data)
        if given[:1] != bytes([_VERSION]):
            raise _refused(f"of version {_VERSION}, got {given[0] if given else 'nothing'}")
        numbers = _numbers(given[1:])
        if len(numbers) % 3 != 1:
            raise _refused(f"of 1 number and 3 for each stretch, got {len(numbers)}")
        made = cls(*_bounds(int(numbers[0]), *numbers[1:].reshape(-1, 3).T))
        if made.to_bytes() != given:
            raise _refused("as `to_bytes` writes them, got another spelling of the same set")
        return made


def check_all(sets: Any, name: str) -> list[Restorable]:
    """Returns the sets as a list.

    Raises:
        ValueError: `sets` is no sequence, or not of `Restorable` alone.
    """
    if isinstance(sets, (str, bytes, Mapping, Restorable)) or not isinstance(sets, Iterable):
        raise ValueError(f"`{name}` must be a sequence of Restorable, got {shown(sets)}")
    try:
        listed = list(sets)
    except TypeError:  # what claims to be iterable need not be, as an array without dimensions
        raise ValueError(f"`{name}` must be a sequence of Restorable, got {shown(sets)}") from None
    for one in listed:
        if not isinstance(one, Restorable):
            raise ValueError(f"`{name}` must be a sequence of Restorable, got {shown(one)} in it")
    return listed


# --- parts --------------------------------------------------------------------------------------------


def _positions(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise ValueError(f"`{name}` must be a non-empty 1-d sequence of ints, got {shown(values)}")
    if array.min() < 0 or array.max() >= LIMIT:
        raise ValueError(f"`{name}` must hold positions from 0 to below {LIMIT}, got {array.min()} to {array.max()}")
    return array.astype(np.int64)


def _check_intervals(firsts: np.ndarray, lasts: np.ndarray) -> None:
    if len(firsts) != len(lasts) or len(firsts) > MOST_INTERVALS:
        raise ValueError(
            f"`firsts` and `lasts` must be equally many, at most {MOST_INTERVALS}, got {len(firsts)} and {len(lasts)}"
        )
    if firsts[0] != 0:
        raise ValueError(f"`firsts` must begin with 0, which is always restorable, got {firsts[0]}")
    if (firsts > lasts).any():
        wrong = (firsts > lasts).argmax()
        raise ValueError(f"an interval must not end before it begins, got {firsts[wrong]} to {lasts[wrong]}")
    if (firsts[1:] <= lasts[:-1] + 1).any():
        wrong = (firsts[1:] <= lasts[:-1] + 1).argmax()
        raise ValueError(
            f"intervals must ascend and not touch, got one from {firsts[wrong + 1]} after one to {lasts[wrong]}"
        )


def _interval_text(interval: tuple[int, int]) -> str:
    first, last = interval
    return f"{first}" if first == last else f"{first}-{last}"


def _refused(why: str) -> ValueError:
    return ValueError(f"`data` must be the bytes of a Restorable, {why}")


def _varints(numbers: np.ndarray) -> bytes:
    """Unsigned LEB128: 7 bits to a byte, low ones first, the top bit set on all bytes but a number's last."""
    shifted = numbers[:, None] >> (7 * np.arange(_MOST_BYTES))
    kept = shifted > 0
    kept[:, 0] = True
    more = np.zeros_like(kept)
    more[:, :-1] = kept[:, 1:]
    return ((shifted & 0x7F) | (more << 7)).astype(np.uint8)[kept].tobytes()


def _numbers(data: bytes) -> np.ndarray:
    raw = np.frombuffer(data, np.uint8).astype(np.int64)
    ends = np.flatnonzero(raw < 0x80)
    if not len(raw) or not len(ends) or ends[-1] != len(raw) - 1:
        raise _refused("whole, got bytes that end within a number")
    begins = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - begins + 1
    if sizes.max() > _MOST_BYTES:
        raise _refused(f"with numbers of at most {_MOST_BYTES} bytes, got one of {sizes.max()}")
    place = np.arange(len(raw)) - np.repeat(begins, sizes)
    return np.add.reduceat((raw & 0x7F) << (7 * place), begins)


def _bounds(last: int, counts: np.ndarray, gaps: np.ndarray, lengths: np.ndarray) -> Intervals:
    """The intervals of stretches, see `Restorable.to_bytes`."""
    if len(counts) and (counts.max() >= MOST_INTERVALS or (counts + 1).sum() >= MOST_INTERVALS):
        raise _refused(f"of at most {MOST_INTERVALS} intervals, got more")
    steps = np.stack([np.repeat(gaps, counts + 1) + 2, np.repeat(lengths, counts + 1)], axis=1).ravel()
    bounds = np.cumsum(np.concatenate([[0, last], steps]))
    # No step reaches 2**50, so that the first sum that wraps is negative.
    if (bounds < 0).any() or bounds[-1] >= LIMIT:
        raise _refused(f"of positions below {LIMIT}, got larger ones")
    return bounds[::2], bounds[1::2]
