"""Elements of 8 and 16 bits as words of 32 bits, and back, on a TPU.

A word takes elements that lie beside each other, where a TPU only joins those that lie above each other. Here the
matrix unit moves them: a row of bytes times a matrix of zeros, ones and 256s is a row of joined pairs of bytes. That
is exact: a byte is a bfloat16, and a pair of bytes is a float32.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._tpu_blocks import shape_like

ROW_WORDS = 128
_ROW_BYTES = 4 * ROW_WORDS
_ROWS_PER_STEP = 512


def to_words(elements: Array, *, interpret: Any = None) -> Array:
    """Joins elements to words, the first in the lowest bits.

    Args:
        elements: uint8 or uint16 `(rows, 512 bytes of elements)`.
        interpret: `None`, or parameters of an interpreter.

    Returns:
        uint32 `(rows, 128)`.
    """
    return _by_rows(_join, elements, jnp.dtype(jnp.uint32), elements.dtype.itemsize, interpret)


def from_words(words: Array, dtype: Any, *, interpret: Any = None) -> Array:
    """The inverse of `to_words`.

    Args:
        words: uint32 `(rows, 128)`.
        dtype: uint8 or uint16.
        interpret: see `to_words`.

    Returns:
        `(rows, 512 bytes of elements)` of `dtype`.
    """
    return _by_rows(_split, words, jnp.dtype(dtype), jnp.dtype(dtype).itemsize, interpret)


def _by_rows(kernel: Any, rows: Array, dtype: Any, element_bytes: int, interpret: Any) -> Array:
    step = min(_ROWS_PER_STEP, rows.shape[0])
    lanes = _ROW_BYTES // dtype.itemsize
    return pl.pallas_call(
        partial(kernel, element_bytes),
        grid=(pl.cdiv(rows.shape[0], step),),
        in_specs=[pl.BlockSpec((step, rows.shape[1]), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((step, lanes), lambda i: (i, 0)),
        out_shape=shape_like(rows, (rows.shape[0], lanes), dtype),
        interpret=False if interpret is None else interpret,
    )(rows)


def _join(element_bytes: int, elements: Any, words: Any) -> None:
    """Byte `b` of element `e` of a word is byte `e * element_bytes + b` of the word."""
    rows = elements[...].astype(jnp.int32)
    element, word = _places(rows.shape[1], ROW_WORDS)
    elements_per_word = 4 // element_bytes
    in_word = element & (elements_per_word - 1)
    mine = element - in_word == word * elements_per_word
    halves = [jnp.zeros((rows.shape[0], ROW_WORDS), jnp.float32) for _ in range(2)]
    for b in range(element_bytes):
        byte = in_word * element_bytes + b
        for half in range(2):
            weights = _weights(mine, byte - 2 * half)
            halves[half] += jnp.dot(_byte(rows, b), weights, preferred_element_type=jnp.float32)
    low, high = (half.astype(jnp.int32) for half in halves)
    words[...] = lax.bitcast_convert_type(low | (high << 16), jnp.uint32)


def _split(element_bytes: int, words: Any, elements: Any) -> None:
    """The inverse of `_join`."""
    rows = lax.bitcast_convert_type(words[...], jnp.int32)
    word, element = _places(ROW_WORDS, elements.shape[1])
    elements_per_word = 4 // element_bytes
    joined = jnp.zeros(elements.shape, jnp.float32)
    for b in range(4):
        mine = element == word * elements_per_word + b // element_bytes
        weights = _weights(mine, b % element_bytes)
        joined += jnp.dot(_byte(rows, b), weights, preferred_element_type=jnp.float32)
    elements[...] = joined.astype(jnp.int32).astype(elements.dtype)


def _places(rows: int, lanes: int) -> tuple[Array, Array]:
    """The row and the lane of each place of a matrix."""
    return lax.broadcasted_iota(jnp.int32, (rows, lanes), 0), lax.broadcasted_iota(jnp.int32, (rows, lanes), 1)


def _weights(mine: Array, byte: Any) -> Array:
    """A matrix that puts a byte at place `byte` of a pair where `mine`, and nowhere if it is not 0 or 1."""
    weight = jnp.where(byte == 0, 1.0, jnp.where(byte == 1, 256.0, 0.0))
    return jnp.where(mine, weight, 0.0).astype(jnp.bfloat16)


def _byte(rows: Array, b: int) -> Array:
    return ((rows >> (8 * b)) & 0xFF).astype(jnp.float32).astype(jnp.bfloat16)
