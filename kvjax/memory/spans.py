"""Copies many spans of bytes between places in host memory, in few calls.

A call of NumPy for each span would cost as much as copying several KiB. Memory is therefore seen as one array of
elements that no span cuts, and many spans are copied at once by their places in it. Only elements that a span names
are ever touched. (A block's row in 16 KiB, say, is four elements of a page, as large arrays start alike in a page.)
"""

import ctypes
from typing import Any

import numpy as np

_LONG_SPAN_BYTES = 2**18  # from here on, a call for each span costs nothing
_LEAST_ELEMENT_BYTES = 1024  # below, places cost more than calls
_MIDDLING_SPAN_BYTES = 2**14  # from here on, a call for each span costs less than a second copy
_LEAST_RUN_BYTES = 2**15
_LEAST_SPANS_PER_RUN = 8
_BUFFER_BYTES = 2**18  # stays in the processor's cache


def address_of(memory: np.ndarray) -> int:
    """Returns where an array's memory starts."""
    return memory.__array_interface__["data"][0]


def bytes_at(address: int, num_bytes: int) -> np.ndarray:
    """Views memory as `uint8`. Whoever calls keeps the owner alive for as long as the view is used."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * num_bytes).from_address(address))


def copy_spans(dst: np.ndarray, src: np.ndarray, lengths: np.ndarray) -> None:
    """Copies `lengths[i]` bytes from address `src[i]` to address `dst[i]`, for all i.

    Args:
        dst: `int64` addresses; the spans there overlap neither each other nor those of `src`.
        src: `int64` addresses.
        lengths: `int64`, positive.
    """
    if not len(lengths):
        return
    dst, src, lengths = _joined(dst, src, lengths)
    total = int(lengths.sum())
    if total < _LONG_SPAN_BYTES * len(lengths):
        enough = total // _LEAST_RUN_BYTES
        for by, copy in ((dst, _copy_to_runs), (src, _copy_from_runs)):
            order = np.argsort(by)  # the order of copies is of no account, as spans do not overlap
            firsts = _runs(by[order], lengths[order])
            grouped = len(firsts) <= enough and len(firsts) * _LEAST_SPANS_PER_RUN <= len(lengths)
            if grouped and copy(dst[order], src[order], lengths[order], firsts):
                return
        if total < _MIDDLING_SPAN_BYTES * len(lengths) and _copy_by_buffer(dst, src, lengths):
            return
    _copy_one_by_one(dst, src, lengths)


def _joined(dst: np.ndarray, src: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Joins spans that follow one another on both sides."""
    apart = (dst[1:] != dst[:-1] + lengths[:-1]) | (src[1:] != src[:-1] + lengths[:-1])
    if apart.all():
        return dst, src, lengths
    firsts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    return dst[firsts], src[firsts], np.add.reduceat(lengths, firsts)


def _copy_to_runs(dst: np.ndarray, src: np.ndarray, lengths: np.ndarray, firsts: np.ndarray) -> bool:
    """Copies run by run of where the spans go to, if elements serve where they come from; tells whether it did."""
    size = _element_bytes(src, lengths)
    if size < _LEAST_ELEMENT_BYTES:
        return False
    elements, places, ends = _elements(src, lengths, size)
    for low, high, start in _run_bounds(firsts, ends, dst):
        out = bytes_at(start, (high - low) * size).view(elements.dtype)
        np.take(elements, places[low:high], out=out, mode="clip")  # other modes would copy to a buffer first
    return True


def _copy_from_runs(dst: np.ndarray, src: np.ndarray, lengths: np.ndarray, firsts: np.ndarray) -> bool:
    """Copies run by run of where the spans come from, if elements serve where they go to; tells whether it did."""
    size = _element_bytes(dst, lengths)
    if size < _LEAST_ELEMENT_BYTES:
        return False
    elements, places, ends = _elements(dst, lengths, size)
    for low, high, start in _run_bounds(firsts, ends, src):
        elements[places[low:high]] = bytes_at(start, (high - low) * size).view(elements.dtype)
    return True


def _copy_by_buffer(dst: np.ndarray, src: np.ndarray, lengths: np.ndarray) -> bool:
    """Copies in two steps if elements of one size serve both sides; tells whether it did."""
    size = int(np.gcd(_element_bytes(src, lengths), _element_bytes(dst, lengths)))
    if size < _LEAST_ELEMENT_BYTES:
        return False
    into, to, _ = _elements(dst, lengths, size)
    of, places, _ = _elements(src, lengths, size)
    step = max(1, _BUFFER_BYTES // size)
    buffer = np.empty(step, of.dtype)
    for low in range(0, len(places), step):
        some = buffer[: len(places[low : low + step])]
        np.take(of, places[low : low + step], out=some, mode="clip")
        into[to[low : low + step]] = some
    return True


def _copy_one_by_one(dst: np.ndarray, src: np.ndarray, lengths: np.ndarray) -> None:
    to: Any = _all_bytes(dst, lengths)
    of: Any = _all_bytes(src, lengths)
    spans = zip((dst - dst.min()).tolist(), (src - src.min()).tolist(), lengths.tolist(), strict=True)
    if lengths.max() < _LEAST_RUN_BYTES:
        to, of = memoryview(to), memoryview(of)  # takes half of NumPy's time, but keeps the interpreter's lock
    for d, s, length in spans:
        to[d : d + length] = of[s : s + length]


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """First span of each run of spans that follow one another."""
    return np.concatenate([[0], np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1])


def _run_bounds(firsts: np.ndarray, ends: np.ndarray, starts: np.ndarray) -> list[tuple[int, int, int]]:
    """For each run: its first element, the one past its last, and the address where it starts."""
    edges = np.concatenate([[0], ends])
    past = edges[np.append(firsts[1:], len(starts))]
    return list(zip(edges[firsts].tolist(), past.tolist(), starts[firsts].tolist(), strict=True))


def _element_bytes(starts: np.ndarray, lengths: np.ndarray) -> int:
    """The largest size of elements that no span cuts."""
    return int(np.gcd(np.gcd.reduce(starts - starts[0]), np.gcd.reduce(lengths)))


def _elements(starts: np.ndarray, lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Memory as an array of elements, the places of the spans' elements in it, and how many precede each span's end."""
    elements = _all_bytes(starts, lengths).view(np.dtype((np.void, size)))
    counts = lengths // size
    ends = np.cumsum(counts)
    within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return elements, np.repeat((starts - starts.min()) // size, counts) + within, ends


def _all_bytes(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """All memory from the first span to the last. What lies between them may not even exist."""
    first = int(starts.min())
    return bytes_at(first, int((starts + lengths).max()) - first)
