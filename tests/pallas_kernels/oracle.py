"""Slow, obvious models of the operations, on NumPy arrays and bytes."""

from collections.abc import Sequence

import numpy as np


def block_copy(
    src: Sequence[np.ndarray], src_ids: np.ndarray, dst: Sequence[np.ndarray], dst_ids: np.ndarray, count: int
) -> list[np.ndarray]:
    """The leaves of `dst` after the copy, as new arrays."""
    result = [leaf.copy() for leaf in dst]
    for source, leaf in zip(src, result, strict=True):
        for src_id, dst_id in zip(src_ids[:count], dst_ids[:count], strict=True):
            leaf[dst_id] = source[src_id]
    return result


def layers_of(leaf: np.ndarray, stacked: bool) -> list[np.ndarray]:
    """The layers of a leaf, as views `(num_blocks, *block_shape)`."""
    return list(leaf) if stacked else [leaf]


def chunk_bytes(leaves: Sequence[np.ndarray], stacked: Sequence[bool], block_ids: np.ndarray) -> bytes:
    """The bytes of the chunk of these blocks, without padding."""
    return b"".join(
        layer[block_id].tobytes()
        for leaf, has_layers in zip(leaves, stacked, strict=True)
        for layer in layers_of(leaf, has_layers)
        for block_id in block_ids
    )


def pack(
    leaves: Sequence[np.ndarray],
    stacked: Sequence[bool],
    block_ids: np.ndarray,
    count: int,
    staging: np.ndarray,
    units_per_chunk: int,
) -> np.ndarray:
    """The staging after `pack`, as a new array."""
    result = staging.copy()
    for i in range(count):
        units = result[i * units_per_chunk : (i + 1) * units_per_chunk]
        data = chunk_bytes(leaves, stacked, block_ids[i]).ljust(units.nbytes, b"\0")
        units[:] = np.frombuffer(data, "<u4").reshape(units.shape)
    return result


def unpack(
    staging: np.ndarray,
    leaves: Sequence[np.ndarray],
    stacked: Sequence[bool],
    block_ids: np.ndarray,
    count: int,
    units_per_chunk: int,
) -> list[np.ndarray]:
    """The leaves after `unpack`, as new arrays."""
    result = [leaf.copy() for leaf in leaves]
    for i in range(count):
        data = staging[i * units_per_chunk : (i + 1) * units_per_chunk].tobytes()
        for leaf, has_layers in zip(result, stacked, strict=True):
            for layer in layers_of(leaf, has_layers):
                for block_id in block_ids[i]:
                    row, data = data[: layer[0].nbytes], data[layer[0].nbytes :]
                    if block_id != -1:
                        layer[block_id] = np.frombuffer(row, leaf.dtype).reshape(layer[0].shape)
    return result
