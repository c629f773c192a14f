"""Checks of arguments that the operations share. They read shapes and dtypes only, never a value."""

import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array


def describe(array: Any) -> str:
    """Dtype and shape of an array, for messages."""
    return f"{jnp.dtype(array.dtype).name} of shape {tuple(array.shape)}"


def arrays(name: str, value: Any) -> tuple[Array, ...]:
    """Checks that `value` is a non-empty list or tuple of arrays, and returns it as a tuple.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"`{name}` must be a list or tuple of arrays, got {type(value).__name__}")
    for i, item in enumerate(value):
        array(f"{name}[{i}]", item)
    if not value:
        raise ValueError(f"`{name}` must name at least one array, got none")
    return tuple(value)


def array(name: str, value: Any) -> None:
    """Checks that `value` has a shape and a dtype.

    Raises:
        ValueError: it has not.
    """
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise ValueError(f"`{name}` must be an array, got {type(value).__name__}")


def ids(name: str, value: Any, dims: tuple[str, ...]) -> Array:
    """Checks the dtype and rank of ids, and that there is room for one.

    Args:
        name: of the argument.
        value: the argument.
        dims: what its dimensions count.

    Returns:
        The ids as a JAX array.

    Raises:
        ValueError: they are not int32, of another rank or empty.
    """
    array(name, value)
    if value.dtype != jnp.int32 or value.ndim != len(dims):
        expected = f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"
        raise ValueError(f"`{name}` must be int32 of shape {expected}, got {describe(value)}")
    if 0 in value.shape:
        raise ValueError(f"`{name}` must have room for at least one id, got shape {tuple(value.shape)}")
    return jnp.asarray(value)


def count(value: Any, limit: int) -> Array:
    """Checks that a count is one integer, and returns it as an int32 scalar no larger than `limit`.

    Raises:
        ValueError: it is an array of more than one number, or no integer.
    """
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"`count` must be an integer scalar, got {value!r}")
        return jnp.int32(min(max(value, 0), limit))
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"`count` must be an integer scalar, got {describe(value)}")
    return jnp.minimum(jnp.asarray(value, jnp.int32), limit)


def positive(name: str, value: Any) -> int:
    """Checks that `value` is a static integer of at least 1.

    Raises:
        ValueError: it is not.
    """
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}")
    return number
