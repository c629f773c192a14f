"""Reading chunk indices from what a caller gives: masks, lists, arrays."""

from typing import Any

import numpy as np

from kvjax._intervals import EMPTY


def chunk_indices(chunks: Any, name: str, num_chunks: int) -> np.ndarray:
    """Returns the distinct `chunk_idx` below `num_chunks` that `chunks` names, ascending `int64`.

    Args:
        chunks: a boolean mask by `chunk_idx`, or integer `chunk_idx` in any order.
        name: what an error calls it.
        num_chunks: larger indices are left out.

    Raises:
        ValueError: floats, negative indices, a mix of bools and integers, or anything else.
    """
    array = _one_type(chunks, name)
    if array.dtype == bool:
        return array[:num_chunks].nonzero()[0].astype(np.int64)
    if len(array) and array.min() < 0:
        raise ValueError(f"`{name}` must hold non-negative chunk indices, got {array.min()}")
    array = array[array < num_chunks].astype(np.int64)
    return np.unique(array) if len(array) > 1 and not (array[1:] > array[:-1]).all() else array


def _one_type(chunks: Any, name: str) -> np.ndarray:
    """Returns a 1-d array of bools, of integers or, for integers past int64, of Python objects."""
    rule = f"`{name}` must be a list or 1-d array of bools or of chunk indices"
    if isinstance(chunks, (list, tuple, range, set, frozenset)):
        kinds = set(map(type, chunks))
        bools = {kind for kind in kinds if issubclass(kind, (bool, np.bool_))}
        if bools and bools != kinds:
            raise ValueError(f"{rule}, got a mix of bools and {sorted(k.__name__ for k in kinds - bools)}")
        wrong = sorted(kind.__name__ for kind in kinds - bools if not issubclass(kind, (int, np.integer)))
        if wrong:
            raise ValueError(f"{rule}, got {wrong[0]} in it")
        values = list(chunks)
        if bools:
            return np.array(values, bool)
        try:
            return np.array(values, np.int64)
        except OverflowError:
            return np.array([int(value) for value in values], object)
    if not isinstance(chunks, np.ndarray) and hasattr(chunks, "__array__"):
        chunks = np.asarray(chunks)
    if not isinstance(chunks, np.ndarray):
        raise ValueError(f"{rule}, got {chunks!r}")
    if chunks.ndim != 1 or (chunks.dtype.kind not in "biu" and len(chunks)):
        raise ValueError(f"{rule}, got a {chunks.ndim}-d array of {chunks.dtype.name}")
    return chunks if len(chunks) else EMPTY
