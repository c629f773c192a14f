"""The plain-JAX implementations: conformance, and what holds of them only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_copy, pack, unpack
from tests.pallas_kernels.conformance import BlockCopyConformance, PackingConformance
from tests.pallas_kernels.data import assert_same_bits, on, on_device, random_array

IN_PLACE = ["float32", "uint32", "uint16", "int8", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
ROW_BYTES, NUM_BLOCKS, LEAVES = 4096, 64, 3


class TestBlockCopyReference(BlockCopyConformance):
    implementation = "reference"


class TestPackingReference(PackingConformance):
    implementation = "reference"


def leaves_of(dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    elements = ROW_BYTES // jnp.dtype(dtype).itemsize
    return (jax.ShapeDtypeStruct((NUM_BLOCKS, 4, elements // 4), jnp.dtype(dtype)),) * LEAVES


def spec(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def assert_in_place(compiled: jax.stages.Compiled, num_bytes: int) -> None:
    """All of the result is the donated memory, and temporaries are less than a single row."""
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == num_bytes
    assert memory.temp_size_in_bytes < ROW_BYTES


@pytest.mark.parametrize("dtype", IN_PLACE)
def test_block_copy_works_in_place(dtype: str):
    leaves, ids, count = leaves_of(dtype), spec((16,), "int32"), spec((), "int32")
    compiled = jax.jit(block_copy, donate_argnums=2).lower(leaves, ids, leaves, ids, count).compile()
    assert_in_place(compiled, LEAVES * NUM_BLOCKS * ROW_BYTES)


@pytest.mark.parametrize("of", ["device", "pinned_host"])
@pytest.mark.parametrize("to", ["device", "pinned_host"])
def test_block_copy_works_in_place_across_the_memory_spaces(of: str, to: str):
    array = np.zeros((NUM_BLOCKS, ROW_BYTES // 4), np.float32)
    ids = np.zeros(16, np.int32)
    args = ([on(of, array)], ids, [on(to, array)], ids, np.int32(3))
    assert_in_place(jax.jit(block_copy, donate_argnums=2).lower(*args).compile(), NUM_BLOCKS * ROW_BYTES)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("dtype", IN_PLACE)
def test_pack_and_unpack_work_in_place(dtype: str, blocks_per_chunk: int):
    leaves, ids, count = leaves_of(dtype), spec((8, blocks_per_chunk), "int32"), spec((), "int32")
    staging = spec((8, LEAVES * blocks_per_chunk * ROW_BYTES // 4 + 8), "uint32")
    packer = jax.jit(pack, donate_argnums=3).lower(leaves, ids, count, staging).compile()
    assert_in_place(packer, staging.size * 4)
    unpacker = jax.jit(unpack, donate_argnums=1).lower(staging, leaves, ids, count).compile()
    assert_in_place(unpacker, LEAVES * NUM_BLOCKS * ROW_BYTES)


@pytest.mark.parametrize("layers", [(), (3,)], ids=["alone", "stacked"])
@pytest.mark.parametrize("block_shape", [(4, 1, 256), (1, 1, 1024)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_with_a_dimension_of_one_make_no_copy_of_the_leaf(dtype, block_shape, layers):
    """A head for all queries, say. XLA gave such a leaf, seen as rows, another layout, and copied it whole."""
    element_bytes = jnp.dtype(dtype).itemsize
    block_shape = (*block_shape[:-1], block_shape[-1] * 4 // element_bytes)
    leaf = spec((*layers, NUM_BLOCKS, *block_shape), dtype)
    row_words = leaf.size // NUM_BLOCKS * element_bytes // 4
    ids, count, staging = spec((8, 1), "int32"), spec((), "int32"), spec((8, 2 * row_words), "uint32")
    stacked = [bool(layers)] * 2
    packer = jax.jit(lambda *a: pack(*a, stacked=stacked), donate_argnums=3)
    unpacker = jax.jit(lambda *a: unpack(*a, stacked=stacked), donate_argnums=1)
    assert_in_place(packer.lower((leaf, leaf), ids, count, staging).compile(), staging.size * 4)
    assert_in_place(unpacker.lower(staging, (leaf, leaf), ids, count).compile(), 2 * leaf.size * element_bytes)
    if not layers:
        copier = jax.jit(block_copy, donate_argnums=2).lower(
            (leaf,), spec((8,), "int32"), (leaf,), spec((8,), "int32"), count
        )
        assert_in_place(copier.compile(), leaf.size * element_bytes)


def test_rows_of_odd_bytes_take_no_more_than_a_few_chunks_of_memory():
    leaves, ids = (spec((100_000, 3), "bfloat16"),), spec((8, 2), "int32")
    staging, count = spec((8 * 4, 4), "uint32"), spec((), "int32")
    packer = jax.jit(pack, donate_argnums=3).lower(leaves, ids, count, staging).compile()
    unpacker = jax.jit(unpack, donate_argnums=1).lower(staging, leaves, ids, count).compile()
    assert_in_place(packer, staging.size * 4)
    assert_in_place(unpacker, 600_000)


def test_operations_run_outside_of_jit_with_a_python_count():
    rng = np.random.default_rng(0)
    leaf = random_array(rng, (4, 8), "bfloat16")
    ids = np.array([[3], [1]], np.int32)
    packed = pack([on_device(leaf)], ids, 1, jnp.zeros((2, 4), jnp.uint32))
    assert np.asarray(packed)[0].tobytes() == leaf[3].tobytes()
    assert not np.asarray(packed)[1].any()
    (updated,) = unpack(packed, [jnp.zeros((4, 8), jnp.bfloat16)], ids[::-1].copy(), 1)
    assert np.asarray(updated)[1].tobytes() == leaf[3].tobytes()
    (copied,) = block_copy([on_device(leaf)], ids[:, 0], [updated], ids[:, 0], 2)
    assert_same_bits(copied[jnp.array([1, 3])], leaf[[1, 3]])


def test_operations_are_part_of_a_larger_jitted_function():
    @jax.jit
    def swap_first_two(leaf: jax.Array, count: jax.Array) -> jax.Array:
        ids = jnp.array([[0, 1]], jnp.int32)
        staging = pack([leaf * 2], ids, count, jnp.zeros((1, 8), jnp.uint32))
        (leaf,) = unpack(staging, [leaf], ids[:, ::-1], count)
        return leaf

    leaf = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(swap_first_two(leaf, 1), np.stack([leaf[1] * 2, leaf[0] * 2, leaf[2]]), strict=True)
    np.testing.assert_array_equal(swap_first_two(leaf, 0), leaf, strict=True)


@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn", "bool", "complex64"])
def test_elements_that_are_not_one_two_or_four_bytes_are_refused(dtype: str):
    leaf, ids = spec((4, 8), dtype), spec((2,), "int32")
    reason = f"elements must be numbers of 8, 16 or 32 bits, got {dtype}"
    args = ([leaf], ids, [leaf], ids, spec((), "int32"))
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda *a: block_copy(*a, implementation="reference"), *args)
    args = ([leaf], spec((2, 2), "int32"), spec((), "int32"), spec((2, 64), "uint32"))
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda *a: pack(*a, implementation="reference"), *args)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_host_memory_is_refused_off_the_cpu(platform: str):
    leaf, ids = on("pinned_host", np.zeros((4, 8), np.float32)), np.zeros((2, 1), np.int32)
    device, staging = jnp.zeros((4, 8)), jnp.zeros((2, 8), jnp.uint32)
    reason = f"arrays in host memory are copied in place on 'cpu' only, not on '{platform}'"
    named = {"platform": platform, "implementation": "reference"}
    for src, dst in ((leaf, device), (device, leaf)):
        with pytest.raises(NotImplementedError, match=reason):
            block_copy([src], ids[:, 0], [dst], ids[:, 0], 1, **named)
    with pytest.raises(NotImplementedError, match=reason):
        pack([leaf], ids, 1, staging, **named)
    with pytest.raises(NotImplementedError, match=reason):
        unpack(staging, [leaf], ids, 1, **named)


def test_a_staging_that_int32_cannot_index_is_refused():
    args = ([spec((4, 8), "float32")], spec((2, 1), "int32"), spec((), "int32"), spec((2, 2**30), "uint32"))
    with pytest.raises(NotImplementedError, match="`staging` must have at most 2147483647 words, got 2147483648"):
        jax.eval_shape(lambda *a: pack(*a, implementation="reference"), *args)
