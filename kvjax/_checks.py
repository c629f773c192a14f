"""The few argument checks that every module shares. Each error names the argument, the rule and the value."""

import operator
import re
import reprlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

# Positions and sizes stay far from the end of int64, so that no sum or product of two that belong
# together can wrap.
LIMIT = 2**48
_INT64_MAX = 2**63 - 1
_MOST_SECONDS = 1e9  # what clocks and locks can take
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_T = TypeVar("_T")
_SIZE = re.compile(r"([0-9]{1,30})(B|KiB|MiB|GiB|TiB)?")


class _Short(reprlib.Repr):
    """The `repr` of a value in a few words: arrays by type and shape, as their data may be large and on a device."""

    def __init__(self):
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 100

    def repr1(self, x: Any, level: int) -> str:
        if hasattr(x, "dtype") and getattr(x, "shape", None):
            return f"an array of {x.dtype}, shape {tuple(x.shape)}"
        return super().repr1(x, level)


_SHORT = _Short()


def shown(value: Any) -> str:
    """Returns how a message shows a value of whatever type: in one line of at most some hundred characters."""
    line = " ".join(_SHORT.repr(value).split())
    return line if len(line) <= 120 else line[:100] + " …"


def quoted(name: str) -> str:
    """Returns how a message names an argument, or one part of it.

    >>> quoted("block_bytes"), quoted("block_bytes of group 'full'")
    ('`block_bytes`', "`block_bytes` of group 'full'")
    """
    argument, of, whole = name.partition(" of ")
    return f"`{argument}`{of}{whole}"


def is_int(value: Any) -> bool:
    """True for Python and NumPy integers; False for bools, floats and everything else."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def instance(value: Any, kind: type[_T], name: str) -> _T:
    """Returns `value`, an object of a class.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise ValueError(f"`{name}` must be {article} {kind.__name__}, got {shown(value)}")
    return value


def integers(value: Any, rule: str) -> np.ndarray:
    """Returns a 1-d sequence of integers as an `int64` array.

    Args:
        value: as given.
        rule: the beginning of the message: what must hold.

    Raises:
        ValueError: it is something else, or has integers that `int64` does not.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{rule}, got sequences of various lengths") from None
    if not array.ndim:
        raise ValueError(f"{rule}, got {type(value).__name__}")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{rule}, got a {array.ndim}-d one of {array.dtype.name}")
    if array.dtype == np.uint64 and array.size and array.max() > _INT64_MAX:
        raise ValueError(f"{rule}, got {array.max()}, which is too large")
    return array.astype(np.int64)


def integer(value: Any, name: str, *, at_least: int, below: int = LIMIT) -> int:
    """Returns `value` as an `int`.

    Args:
        value: as given.
        name: of the argument, for messages; see `quoted`.
        at_least: the least that it may be.
        below: what it must be below.

    Raises:
        ValueError: `value` is not an integer (bools and floats are not), is below `at_least`, or is
            not below `below`.
    """
    if not is_int(value) or value < at_least:
        rule = {0: "a non-negative int", 1: "a positive int"}.get(at_least, f"an int of at least {at_least}")
        raise ValueError(f"{quoted(name)} must be {rule}, got {shown(value)}")
    number = operator.index(value)
    if number >= below:
        raise ValueError(f"{quoted(name)} must be below {below}, got {number}")
    return number


def flag(value: Any, name: str) -> bool:
    """Returns `value`, a `bool`.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{quoted(name)} must be True or False, got {shown(value)}")
    return bool(value)


def text(value: Any, name: str) -> str:
    """Returns `value`, a non-empty `str`.

    Raises:
        ValueError: it is something else, or empty.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{quoted(name)} must be a non-empty string, got {shown(value)}")
    return value


def one_of(value: Any, choices: Sequence[str], name: str) -> str:
    """Returns `value`, one of a few words.

    Raises:
        ValueError: it is something else.
    """
    if value not in choices:
        raise ValueError(f"{quoted(name)} must be one of {', '.join(map(repr, choices))}, got {shown(value)}")
    return value


def seconds(value: Any, name: str) -> float | None:
    """Returns a duration as a `float`, or `None` for none.

    Raises:
        ValueError: it is not a number from 0 to 1e9.
    """
    if value is None:
        return None
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not 0 <= value <= _MOST_SECONDS:
        raise ValueError(
            f"{quoted(name)} must be a number of seconds from 0 to {_MOST_SECONDS:.0e} or None, got {shown(value)}"
        )
    return float(value)


def size(text: str, name: str = "a size") -> int:
    """Returns the bytes that a size such as `8GiB` names.

    Args:
        text: as given.
        name: what the size is of, for messages.

    Raises:
        ValueError: it is not digits with an optional B, KiB, MiB, GiB or TiB.

    >>> size("64KiB")
    65536
    """
    match = _SIZE.fullmatch(text)
    if not match:
        raise ValueError(f"{name} must be digits with an optional B, KiB, MiB, GiB or TiB, got {shown(text)}")
    return int(match[1]) * _UNITS[match[2] or ""]
