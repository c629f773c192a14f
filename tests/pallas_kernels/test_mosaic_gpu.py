"""The Mosaic GPU kernels in their interpreter on the CPU: conformance, how rows are cut, races, refusals."""

import sys
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.experimental.pallas
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters import mlir

import pallas_kernels
from pallas_kernels import _gpu_rows
from pallas_kernels._gpu_cut import cut_row
from pallas_kernels.block_copy import api as block_copy_api
from pallas_kernels.block_copy import mosaic_gpu as block_copy_gpu
from pallas_kernels.packing import api as packing_api
from pallas_kernels.packing import mosaic_gpu as packing_gpu
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import BlockCopyConformance, PackingConformance
from tests.pallas_kernels.data import assert_same_bits, on, on_device, random_array

INTERPRETED = "mosaic_gpu_interpreted"
InterpretParams: Any = getattr(plgpu, "InterpretGPUParams", None)
SEES_RACES = InterpretParams is not None
if not SEES_RACES:  # jax 0.10.2 has it in a private module, and does not know how to interpret a layout
    from jax._src.pallas.mosaic_gpu.core import layout_cast_p
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as InterpretParams

    mlir.register_lowering(layout_cast_p, lambda ctx, x, **_: [x], platform="cpu")
INTERPRETER = InterpretParams(detect_races=SEES_RACES)


@pytest.fixture(autouse=True)
def _register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the interpreted kernels."""
    for api, name, function in (
        (block_copy_api, "IMPLEMENTATIONS", block_copy_gpu.block_copy),
        (packing_api, "PACK", packing_gpu.pack),
        (packing_api, "UNPACK", packing_gpu.unpack),
    ):
        functions = getattr(api, name) | {INTERPRETED: partial(function, interpret=INTERPRETER)}
        monkeypatch.setattr(api, name, MappingProxyType(functions))


block_copy = partial(pallas_kernels.block_copy, implementation=INTERPRETED)
pack = partial(pallas_kernels.pack, implementation=INTERPRETED)
unpack = partial(pallas_kernels.unpack, implementation=INTERPRETED)


class TestBlockCopyMosaicGpu(BlockCopyConformance):
    implementation = INTERPRETED
    memories = ("device",)  # a program with an interpreter in it cannot return host memory; tests/aot compiles for it


class TestPackingMosaicGpu(PackingConformance):
    implementation = INTERPRETED
    memories = ("device",)


# Rows that are moved lane by lane, in one vector per thread, in whole pieces, and with each kind of tail.
ROWS = [
    ("uint32", 5),
    ("uint32", 127),
    ("uint32", 130),
    ("float32", 512),
    ("bfloat16", 1400),
    ("uint32", 4096 + 512),
    ("uint32", 4096 + 604),
    ("uint32", 3 * 4096 + 4),
    ("float8_e4m3fn", 131),
    ("bfloat16", 1031),
    ("uint8", 2051),
]


@pytest.mark.parametrize(("dtype", "elements"), ROWS)
def test_rows_of_any_length_are_moved_whole(dtype: str, elements: int):
    rng = np.random.default_rng(elements)
    leaves, others = (random_array(rng, (6, elements), dtype) for _ in range(2))
    here, there = np.array([4, 0, 5], np.int32), np.array([1, 5, 2], np.int32)
    (copied,) = jax.jit(block_copy)([on_device(leaves)], here, [on_device(others)], there, np.int32(3))
    assert_same_bits(copied, oracle.block_copy([leaves], here, [others], there, 3)[0])


@pytest.mark.parametrize(("dtype", "elements"), ROWS)
def test_chunks_of_rows_of_any_length_are_moved_whole(dtype: str, elements: int):
    rng = np.random.default_rng(elements)
    leaves = [random_array(rng, (2, 5, elements), dtype), random_array(rng, (5, 3), "float32")]
    ids, stacked = np.array([[4, 0], [3, 2]], np.int32), (True, False)
    units = -(-len(oracle.chunk_bytes(leaves, stacked, ids[0])) // 64) + 9
    staging = random_array(rng, (2 * units, 2, 8), "uint32")
    packed = jax.jit(partial(pack, stacked=stacked))([*map(on_device, leaves)], ids, np.int32(2), on_device(staging))
    assert_same_bits(
        np.asarray(packed).reshape(-1, 16), oracle.pack(leaves, stacked, ids, 2, staging.reshape(-1, 16), units)
    )
    ids = np.array([[1, -1], [0, 4]], np.int32)
    updated = jax.jit(partial(unpack, stacked=stacked))(packed, [*map(on_device, leaves)], ids, np.int32(2))
    expected = oracle.unpack(np.asarray(packed).reshape(-1, 16), leaves, stacked, ids, 2, units)
    for actual, leaf in zip(updated, expected, strict=True):
        assert_same_bits(actual, leaf)


def test_a_thread_block_moves_as_many_pieces_as_it_has_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_gpu_rows, "_MAX_THREAD_BLOCKS", 3)
    test_rows_of_any_length_are_moved_whole("uint32", 3 * 4096 + 4)
    test_chunks_of_rows_of_any_length_are_moved_whole("bfloat16", 1400)


def test_leaves_may_be_written_by_different_kernels(monkeypatch: pytest.MonkeyPatch):
    for module in (block_copy_gpu, packing_gpu):
        monkeypatch.setattr(module, "kernels", lambda written: [[i] for i in reversed(range(len(written)))])
    rng = np.random.default_rng(0)
    leaves = [random_array(rng, (6, 8 * i), "float32") for i in (1, 2, 20)]
    others, ids = [leaf[::-1].copy() for leaf in leaves], np.array([4, 0, 5], np.int32)
    copied = jax.jit(block_copy)([*map(on_device, leaves)], ids, [*map(on_device, others)], ids[::-1].copy(), 2)
    for actual, expected in zip(copied, oracle.block_copy(leaves, ids, others, ids[::-1], 2), strict=True):
        assert_same_bits(actual, expected)
    test_chunks_of_rows_of_any_length_are_moved_whole("uint32", 130)


def test_the_source_may_be_the_destination():
    leaf = random_array(np.random.default_rng(0), (6, 130), "uint32")
    (copied,) = jax.jit(lambda x: block_copy([x], jnp.array([0, 1, 2]), [x], jnp.array([1, 2, 0]), 3))(leaf)
    assert_same_bits(copied, leaf[[2, 0, 1, 3, 4, 5]])


@given(st.integers(1, 20_000), st.sampled_from(["uint8", "uint16", "uint32"]), st.integers(0, 64))
def test_pieces_share_no_lane_and_start_at_vectors(row_lanes: int, lane: str, alignment: int):
    cut = cut_row(row_lanes, lane, alignment)
    pieces = [[(i * cut.piece_lanes, cut.piece_lanes)] for i in range(cut.whole_pieces)] + [list(cut.tail)] * bool(
        cut.tail
    )
    assert len(pieces) == cut.num_pieces
    covered = [{lane for first, lanes in piece for lane in range(first, first + lanes)} for piece in pieces]
    assert sum(map(len, covered)) == row_lanes
    assert set.union(*covered) == set(range(row_lanes))
    if not cut.vector_lanes:
        assert cut.num_pieces == 1
        assert row_lanes < 128
        return
    assert cut.vector_lanes * np.dtype(lane).itemsize <= 16
    assert alignment % cut.vector_lanes == row_lanes % cut.vector_lanes == 0
    for first, lanes in (run for piece in pieces for run in piece):
        assert first % cut.vector_lanes == 0
        assert lanes % (128 * cut.vector_lanes) == 0
        assert lanes <= 8 * 128 * cut.vector_lanes


@pytest.mark.parametrize("count", [-1, 0, 3, 5])
@pytest.mark.parametrize("max_thread_blocks", [4, 2048])
def test_each_piece_is_moved_once(monkeypatch: pytest.MonkeyPatch, max_thread_blocks: int, count: int):
    monkeypatch.setattr(_gpu_rows, "_MAX_THREAD_BLOCKS", max_thread_blocks)

    def note(item: Any, piece: Any, read: Any, written: Any) -> None:
        (times,) = written
        times[item, piece] += 1

    def run(count: jax.Array) -> list[jax.Array]:
        times = [jnp.zeros((6, 7), jnp.int32)]
        return _gpu_rows.launch(note, 7, 6, count, [], times, name="note", interpret=INTERPRETER)

    (times,) = jax.jit(run)(np.int32(count))
    np.testing.assert_array_equal(times, np.repeat(np.arange(6) < count, 7).reshape(6, 7))


def test_an_index_falls_to_one_part():
    ran: list[tuple[str, int]] = []
    sizes = {"a": 2, "b": 1, "c": 3}
    for index in range(6):
        _gpu_rows.run_part(
            index, [(size, lambda at, name=name: ran.append((name, at))) for name, size in sizes.items()]
        )
    assert ran == [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1), ("c", 2)]


def test_thread_blocks_that_write_the_same_block_are_seen():
    if not SEES_RACES:
        pytest.skip("the detector of jax 0.10.2 does not compare thread blocks")
    leaf, ids = np.zeros((6, 130), np.uint32), np.array([0, 1], np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        jax.block_until_ready(jax.jit(block_copy)([leaf + 1], ids, [leaf], ids * 0, 2))


def test_device_leaves_share_a_kernel_and_each_host_leaf_has_one():
    leaf = np.zeros((2, 4), np.float32)
    device, host = on_device(leaf), on("pinned_host", leaf)
    assert _gpu_rows.kernels([host, device, host, device]) == [[1, 3], [0], [2]]
    assert _gpu_rows.kernels([device]) == [[0]]
    assert _gpu_rows.kernels([host]) == [[0]]


def refusal(function: Any, *args: Any, platform: str = "gpu", **static: Any) -> str:
    with pytest.raises(NotImplementedError) as raised:
        jax.eval_shape(partial(function, implementation="mosaic_gpu", platform=platform, **static), *args)
    return str(raised.value)


def spec(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def refusals(leaf: Any, units: tuple[int, ...] = (2, 64), **static: Any) -> list[str]:
    """Why each operation refuses a leaf."""
    ids, chunk_ids, count, staging = (
        spec((2,), "int32"),
        spec((2, 1), "int32"),
        spec((), "int32"),
        spec(units, "uint32"),
    )
    return [
        refusal(pallas_kernels.block_copy, [leaf], ids, [leaf], ids, count, **static),
        refusal(pallas_kernels.pack, [leaf], chunk_ids, count, staging, **static),
        refusal(pallas_kernels.unpack, staging, [leaf], chunk_ids, count, **static),
    ]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_platforms_are_refused(platform: str):
    reasons = refusals(spec((4, 8), "float32"), platform=platform)
    assert reasons == [f"Mosaic GPU kernels run on 'gpu' only, not on '{platform}'"] * 3


@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn", "bool", "complex64"])
def test_elements_that_are_not_one_two_or_four_bytes_are_refused(dtype: str):
    assert refusals(spec((4, 8), dtype)) == [f"elements must be numbers of 8, 16 or 32 bits, got {dtype}"] * 3


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(jax.experimental.pallas, "mosaic_gpu")
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.mosaic_gpu", None)
    for reason in refusals(spec((4, 8), "float32")):
        assert reason.startswith("Mosaic GPU kernels need a package that is not installed: ")


def test_what_an_int32_cannot_count_is_refused():
    copy, packing, unpacking = refusals(spec((2**31, 4), "uint8"), (2, 4))
    assert copy == "blocks of leaf 0 must be at most 2147483647, got 2147483648"
    assert packing == unpacking == "rows of `leaves[0]` must be at most 2147483647, got 2147483648"
    (copy, *_) = refusals(spec((1, 2**31), "uint8"), (2, 2**31))
    assert copy == "bytes of a block of leaf 0 must be at most 2147483647, got 2147483648"
    leaf, ids, count = spec((4, 8), "float32"), spec((2, 1), "int32"), spec((), "int32")
    assert refusal(pallas_kernels.pack, [leaf], ids, count, spec((2, 2**30), "uint32")) == (
        "lanes of uint32 in `staging` must be at most 2147483647, got 2147483648"
    )
    leaf, ids = spec((4, 2**30), "uint8"), spec((2**15,), "int32")
    assert refusal(pallas_kernels.block_copy, [leaf], ids, [leaf], ids, count) == (
        "pieces that `block_copy` moves, and thread blocks, must be at most 2147483647, got 2147485696"
    )
