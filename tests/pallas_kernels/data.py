"""Random bytes as arrays of any dtype and in any memory, exact comparison, and the dtypes under test."""

from typing import Any

import jax
import ml_dtypes
import numpy as np

NARROW = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
    "uint8": np.uint8,
    "uint16": np.uint16,
}
WIDE = {"float32": np.float32, "int32": np.int32, "uint32": np.uint32}
DTYPES = {name: np.dtype(dtype) for name, dtype in {**NARROW, **WIDE}.items()}
OUT_OF_RANGE = (2**31 - 1, -7, -(2**31), 1000)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array whose bytes are random: floats are of every kind, NaNs included."""
    num_bytes = int(np.prod(shape)) * DTYPES[dtype].itemsize
    return np.frombuffer(rng.bytes(num_bytes), DTYPES[dtype]).reshape(shape).copy()


def every_pattern(dtype: str, num_blocks: int) -> np.ndarray:
    """`(num_blocks, elements)` with every bit pattern of an 8- or 16-bit dtype, once."""
    bits = 8 * DTYPES[dtype].itemsize
    patterns = np.arange(1 << bits, dtype=np.dtype(f"u{bits // 8}"))
    return patterns.view(DTYPES[dtype]).reshape(num_blocks, -1)


def on(memory_kind: str, array: np.ndarray) -> jax.Array:
    """The array in a memory of the first device, in a buffer of its own that may be donated."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory_kind)
    return jax.block_until_ready(jax.device_put(array.copy(), sharding))


def on_device(array: np.ndarray) -> jax.Array:
    """The array in device memory, in a buffer of its own that may be donated."""
    return on("device", array)


def assert_same_bits(actual: Any, expected: np.ndarray) -> None:
    """Compares shape, dtype and every bit."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    uint = np.dtype(f"u{expected.dtype.itemsize}")
    np.testing.assert_array_equal(
        np.frombuffer(actual.tobytes(), uint), np.frombuffer(expected.tobytes(), uint), strict=True
    )


def ids_of(rng: np.random.Generator, num_blocks: int, shape: tuple[int, ...], count: int) -> np.ndarray:
    """Ids in any order, without repetition in the first `count` entries or rows, and garbage after them."""
    ids = rng.choice(np.array(OUT_OF_RANGE), shape).astype(np.int32)
    used = ids[:count]
    used[...] = rng.permutation(num_blocks)[: used.size].reshape(used.shape)
    return ids
