"""Mistakes of the caller: each is a `ValueError` that names the argument, the rule and what came."""

import re
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import block_copy, pack, unpack


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def ids(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


LEAF = zeros(4, 2, 8)
BLOCK_COPY = {"src": [LEAF], "src_ids": ids(3), "dst": [zeros(9, 2, 8)], "dst_ids": ids(3), "count": 1}
PACKING = {"leaves": [LEAF], "block_ids": ids(3, 2), "count": 1, "staging": zeros(6, 16, dtype=np.uint32)}

BLOCK_COPY_MISTAKES = [
    ({"src": LEAF}, "`src` must be a list or tuple of arrays, got ndarray"),
    ({"src": [None]}, "`src[0]` must be an array, got NoneType"),
    ({"src": [], "dst": []}, "`src` must name at least one array, got none"),
    ({"src": [LEAF, LEAF]}, "`src` and `dst` must have equally many leaves, got 2 and 1"),
    (
        {"dst": [zeros(9, 2, 4)]},
        "`src[0]` and `dst[0]` must agree in block shape and dtype, got float32 of shape (4, 2, 8) and "
        "float32 of shape (9, 2, 4)",
    ),
    (
        {"src": [LEAF, LEAF], "dst": [LEAF, LEAF.astype(np.int32)]},
        "`src[1]` and `dst[1]` must agree in block shape and dtype, got float32 of shape (4, 2, 8) and "
        "int32 of shape (4, 2, 8)",
    ),
    (
        {"dst": [zeros(0, 2, 8)]},
        "`dst[0]` must have shape (num_blocks, *block_shape) without a zero, got shape (0, 2, 8)",
    ),
    ({"src": [zeros()]}, "`src[0]` must have shape (num_blocks, *block_shape) without a zero, got shape ()"),
    ({"src_ids": [0]}, "`src_ids` must be an array, got list"),
    ({"src_ids": ids(3, 1)}, "`src_ids` must be int32 of shape (length,), got int32 of shape (3, 1)"),
    ({"dst_ids": zeros(3)}, "`dst_ids` must be int32 of shape (length,), got float32 of shape (3,)"),
    ({"src_ids": ids(0)}, "`src_ids` must have room for at least one id, got shape (0,)"),
    ({"dst_ids": ids(4)}, "`src_ids` and `dst_ids` must have one length, got 3 and 4"),
    ({"count": ids(1)}, "`count` must be an integer scalar, got int32 of shape (1,)"),
    ({"count": 1.0}, "`count` must be an integer scalar, got 1.0"),
    ({"count": True}, "`count` must be an integer scalar, got True"),
    ({"count": np.float32(1)}, "`count` must be an integer scalar, got float32 of shape ()"),
    (
        {"implementation": "fast"},
        "`implementation` of `block_copy` must be one of `mosaic_tpu`, `mosaic_gpu`, `reference`, got 'fast'",
    ),
]

PACKING_MISTAKES = [
    ({"leaves": "leaf"}, "`leaves` must be a list or tuple of arrays, got str"),
    ({"leaves": ()}, "`leaves` must name at least one array, got none"),
    ({"leaves": [zeros()]}, "`leaves[0]` must have shape (num_blocks, *block_shape) without a zero, got shape ()"),
    (
        {"leaves": [zeros(4)], "stacked": [True]},
        "`leaves[0]` must have shape (layers, num_blocks, *block_shape) without a zero, got shape (4,)",
    ),
    (
        {"leaves": [LEAF, zeros(4, 0)]},
        "`leaves[1]` must have shape (num_blocks, *block_shape) without a zero, got shape (4, 0)",
    ),
    ({"stacked": [True, False]}, "`stacked` must have one entry per leaf, got 2 for 1 leaves"),
    (
        {"block_ids": ids(3)},
        "`block_ids` must be int32 of shape (max_chunks, blocks_per_chunk), got int32 of shape (3,)",
    ),
    (
        {"block_ids": ids(3, 2).astype(np.int64)},
        "`block_ids` must be int32 of shape (max_chunks, blocks_per_chunk), got int64 of shape (3, 2)",
    ),
    ({"block_ids": ids(3, 0)}, "`block_ids` must have room for at least one id, got shape (3, 0)"),
    ({"count": "1"}, "`count` must be an integer scalar, got '1'"),
    ({"staging": [1]}, "`staging` must be an array, got list"),
    (
        {"staging": zeros(6, 16)},
        "`staging` must be uint32 of shape (units, *unit_shape) without a zero, got float32 of shape (6, 16)",
    ),
    (
        {"staging": zeros(96, dtype=np.uint32)},
        "`staging` must be uint32 of shape (units, *unit_shape) without a zero, got uint32 of shape (96,)",
    ),
    (
        {"staging": zeros(7, 16, dtype=np.uint32)},
        "`staging` must have a whole number of units for each of 3 chunks, got 7 units; `units_per_chunk` may be "
        "given instead",
    ),
    (
        {"units_per_chunk": 3},
        "`staging` must have 3 units for each of 3 chunks, got 6 units",
    ),
    ({"units_per_chunk": 0}, "`units_per_chunk` must be an integer of at least 1, got 0"),
    ({"units_per_chunk": 2.0}, "`units_per_chunk` must be an integer of at least 1, got 2.0"),
    ({"units_per_chunk": True}, "`units_per_chunk` must be an integer of at least 1, got True"),
    (
        {"staging": zeros(6, 15, dtype=np.uint32)},
        "`staging` must hold 128 bytes per chunk, got 2 units of 60 bytes per chunk",
    ),
]


@pytest.mark.parametrize(("mistake", "message"), BLOCK_COPY_MISTAKES, ids=lambda value: str(value)[:40])
def test_block_copy_names_the_mistake(mistake: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        block_copy(**(BLOCK_COPY | mistake))


@pytest.mark.parametrize("operation", [pack, unpack])
@pytest.mark.parametrize(("mistake", "message"), PACKING_MISTAKES, ids=lambda value: str(value)[:40])
def test_pack_and_unpack_name_the_mistake(operation: Any, mistake: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        operation(**(PACKING | mistake))


@pytest.mark.parametrize("operation", [pack, unpack])
def test_pack_and_unpack_name_an_unknown_implementation(operation: Any):
    names = "`mosaic_tpu`, `mosaic_gpu`, `reference`"
    with pytest.raises(ValueError, match=f"`implementation` of `{operation.__name__}` must be one of {names}, got"):
        operation(**PACKING, implementation="fast")


def test_the_right_arguments_are_taken():
    assert [leaf.shape for leaf in block_copy(**BLOCK_COPY)] == [(9, 2, 8)]
    assert pack(**PACKING).shape == (6, 16)
    assert [leaf.shape for leaf in unpack(**PACKING)] == [LEAF.shape]


def test_mistakes_are_found_while_tracing():
    with pytest.raises(ValueError, match="`src_ids` and `dst_ids` must have one length, got 3 and 4"):
        jax.eval_shape(lambda arguments: block_copy(**arguments), BLOCK_COPY | {"dst_ids": ids(4)})
