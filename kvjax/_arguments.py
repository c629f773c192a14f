"""Reading what a caller gives to the law: chunkings, chunks by group, device prefixes, checkpoints."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax._checks import integer, quoted, shown
from kvjax._intervals import EMPTY
from kvjax.chunking import Chunking


def check_chunking(chunking: Any) -> None:
    if not isinstance(chunking, Chunking):
        raise ValueError(f"`chunking` must be a Chunking, as `resolve_chunking` returns it, got {shown(chunking)}")


def checkpoint_list(checkpoints: Any) -> list[int]:
    if isinstance(checkpoints, (str, bytes, Mapping)) or not hasattr(checkpoints, "__iter__"):
        raise ValueError(f"`checkpoints` must be a sequence of non-negative ints, got {shown(checkpoints)}")
    listed = [integer(checkpoint, "checkpoints", at_least=0) for checkpoint in checkpoints]
    if not listed:
        raise ValueError("`checkpoints` must hold at least one position, got none")
    return listed


def device_prefix(chunking: Chunking, device_tokens: Any, total: int) -> tuple[dict[int, int], int]:
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
            raise ValueError(f"{quoted(named[g])} must be at most num_tokens - 1 = {total - 1}, got {tokens}")
    prefixes = set(device.values())
    return device, prefixes.pop() if len(prefixes) == 1 else 0


def by_group(chunking: Chunking, present: Any, argument: str) -> dict[int, Any]:
    if not isinstance(present, Mapping):
        raise ValueError(f"`{argument}` must be a mapping of group names to chunks, got {shown(present)}")
    return {chunking.layout.index(name, argument): chunks for name, chunks in present.items()}


def presence(chunking: Chunking, group_idx: int, chunks: Any, total: int) -> np.ndarray:
    """Returns the group's chunks that can matter to a request of `total` tokens, see `chunk_set`."""
    group = chunking.layout.groups[group_idx]
    reach = total + group.lookahead_tokens
    num_chunks = -(-reach // (chunking.tokens_per_chunk[group_idx] or 1))
    return chunk_set(chunks, f"present of group {group.name!r}", num_chunks)


def present_chunks(chunking: Chunking, group_idx: int, chunks: Any, total: int) -> np.ndarray:
    """Returns the group's `chunk_idx` that can matter to a request of `total` tokens, ascending."""
    return _as_indices(presence(chunking, group_idx, chunks, total))


def chunk_indices(chunks: Any, name: str, num_chunks: int) -> np.ndarray:
    """Returns the distinct `chunk_idx` below `num_chunks` that `chunks` names, ascending `int64`.

    Args and errors are those of `chunk_set`.
    """
    return _as_indices(chunk_set(chunks, name, num_chunks))


def chunk_set(chunks: Any, name: str, num_chunks: int) -> np.ndarray:
    """Returns the chunks below `num_chunks` that `chunks` names: a boolean mask, which may be a view of what was
    given, or distinct `chunk_idx`, ascending `int64`.

    Args:
        chunks: a boolean mask by `chunk_idx`, or integer `chunk_idx` in any order.
        name: what an error calls it.
        num_chunks: larger indices are left out.

    Raises:
        ValueError: floats, negative indices, a mix of bools and integers, or anything else.
    """
    array = _one_type(chunks, name)
    if array.dtype == bool:
        return array[:num_chunks]
    ascending = array.dtype == np.int64 and bool((array[1:] > array[:-1]).all())
    if len(array) and (least := array[0] if ascending else array.min()) < 0:
        raise ValueError(f"{quoted(name)} must hold non-negative chunk indices, got {least}")
    if ascending:
        return array[: np.searchsorted(array, num_chunks)]
    return np.unique(array[array < num_chunks].astype(np.int64))


def _as_indices(chunks: np.ndarray) -> np.ndarray:
    return chunks.nonzero()[0].astype(np.int64) if chunks.dtype == bool else chunks


def _one_type(chunks: Any, name: str) -> np.ndarray:
    """Returns a 1-d array of bools, of integers or, for integers past int64, of Python objects."""
    rule = f"{quoted(name)} must be a list or 1-d array of bools or of chunk indices"
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
        raise ValueError(f"{rule}, got {shown(chunks)}")
    if chunks.ndim != 1 or (chunks.dtype.kind not in "biu" and len(chunks)):
        raise ValueError(f"{rule}, got a {chunks.ndim}-d array of {chunks.dtype.name}")
    return chunks if len(chunks) else EMPTY
