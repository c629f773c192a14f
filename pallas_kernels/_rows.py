"""Rows of arrays read and written as unsigned integers, so that no backend can change a bit of them.

A row is `leaf[at]` of a leaf of shape `(blocks, *block_shape)` or `(layers, blocks, *block_shape)`; `at` has an index
for each dimension before the block's. Leaves keep their shape: seen as `(rows, elements)`, one with a dimension of 1
would get another layout from XLA, and with it a copy of the whole leaf.

XLA:CPU normalises floats narrower than 32 bits:
it does a slice or an update of them in a wider float, which rewrites NaN payloads and converts the whole array.
There, the whole leaf is seen through an integer view *beside* each slice or update, inside the loop. XLA fuses
the view into the slice or update, so that no array is made and only the row is read or stored (an update also
steps over the ids of all rows, at well under a nanosecond each). A view made outside of the loop would be a
copy of the leaf.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_SPACE = jax.memory.Space
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def check_dtype(dtype: Any) -> None:
    """Refuses dtypes whose elements are not 1, 2 or 4 whole bytes.

    Raises:
        NotImplementedError: the dtype is such a one, or is bool.
    """
    if jax.dtypes.itemsize_bits(dtype) not in (8, 16, 32) or dtype == jnp.bool_:
        raise NotImplementedError(f"elements must be numbers of 8, 16 or 32 bits, got {jnp.dtype(dtype).name}")


def read_row(leaf: Array, at: tuple[Array, ...], platform: str) -> Array:
    """Reads a row of a leaf.

    Args:
        leaf: the array.
        at: int32 scalars. Inside a loop, they must depend on the loop's index.
        platform: platform the program is made for.

    Returns:
        `(elements,)`, unsigned integers of the element's width.
    """
    uint = _UINTS[leaf.dtype.itemsize]
    if _needs_view(leaf, platform):
        # Tied to the loop's index, the view cannot be moved out of the loop, where it would be a copy.
        leaf, at = lax.optimization_barrier((leaf, at))
        leaf = lax.bitcast_convert_type(leaf, uint)
    row = lax.dynamic_slice(leaf, _start(leaf, at), (*(1 for _ in at), *leaf.shape[len(at) :]))
    return lax.bitcast_convert_type(row, uint).reshape(-1)


def write_row(leaf: Array, at: tuple[Array, ...], row: Array, platform: str) -> Array:
    """Writes a row of a leaf, in place if the leaf's buffer may be re-used.

    Args:
        leaf: the array.
        at: int32 scalars.
        row: `(elements,)`, unsigned integers of the element's width.
        platform: platform the program is made for.

    Returns:
        The leaf with that row replaced.
    """
    row = row.reshape(*(1 for _ in at), *leaf.shape[len(at) :])
    if _needs_view(leaf, platform):
        view = lax.bitcast_convert_type(leaf, row.dtype)
        view = lax.dynamic_update_slice(view, row, _start(leaf, at))
        return lax.bitcast_convert_type(view, leaf.dtype)
    return lax.dynamic_update_slice(leaf, lax.bitcast_convert_type(row, leaf.dtype), _start(leaf, at))


def _start(leaf: Array, at: tuple[Array, ...]) -> tuple[Any, ...]:
    return (*at, *(0 for _ in leaf.shape[len(at) :]))


def to_lanes(row: Array, lane: Any) -> Array:
    """Little-endian bytes of a row, as unsigned integers of dtype `lane` (which they fill evenly)."""
    wide, narrow = jnp.dtype(lane).itemsize, row.dtype.itemsize
    if wide > narrow:
        row = row.reshape(-1, wide // narrow)
    return lax.bitcast_convert_type(row, lane).reshape(-1)


def from_lanes(lanes: Array, dtype: Any) -> Array:
    """The inverse of `to_lanes`: a row as unsigned integers of the width of `dtype`."""
    return to_lanes(lanes, _UINTS[jnp.dtype(dtype).itemsize])


def in_host_memory(array: Any) -> bool:
    """Whether an array's type says that it lies in host memory."""
    return getattr(jax.typeof(array), "memory_space", _SPACE.Device) == _SPACE.Host


def to_device(array: Any, platform: str) -> Array:
    """Makes an array usable by device code: on the CPU backend, host memory is, without a copy.

    Raises:
        NotImplementedError: the array lies in host memory, and the platform is not `"cpu"`.
    """
    if not in_host_memory(array):
        return jnp.asarray(array)
    if platform != "cpu":
        raise NotImplementedError(f"arrays in host memory are copied in place on 'cpu' only, not on {platform!r}")
    return jax.device_put(array, _SPACE.Device)


def to_space_of(array: Array, original: Any) -> Array:
    """Gives an array the memory space of `original`, which `to_device` was given."""
    return jax.device_put(array, _SPACE.Host) if in_host_memory(original) else array


def _needs_view(leaf: Array, platform: str) -> bool:
    return platform == "cpu" and leaf.dtype.itemsize < 4 and jnp.issubdtype(leaf.dtype, jnp.floating)
