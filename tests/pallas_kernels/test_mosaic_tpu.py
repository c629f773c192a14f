"""The Mosaic TPU kernels, run by the interpreter that runs DMAs when they are waited for and detects races."""

from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels
from pallas_kernels import _tpu_blocks
from pallas_kernels.block_copy import api as block_copy_api
from pallas_kernels.block_copy import mosaic_tpu as block_copy_tpu
from pallas_kernels.packing import api as packing_api
from pallas_kernels.packing import mosaic_tpu as packing_tpu
from pallas_kernels.packing.tpu_lanes import from_words, to_words
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import BlockCopyConformance, PackingConformance
from tests.pallas_kernels.data import assert_same_bits, ids_of, on, on_device, random_array

INTERPRETER = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True)
NAME = "mosaic_tpu_interpreted"


class RaceError(AssertionError):
    """The interpreter printed that two accesses of a memory are not ordered."""


@pytest.fixture
def race_check(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[], None]]:
    """Fails if the interpreter found a race; newer versions of JAX raise by themselves, older ones print."""

    def check() -> None:
        if "RACE DETECTED" in capfd.readouterr().out:
            raise RaceError

    yield check
    pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, race_check: Callable[[], None]) -> Iterator[None]:
    """Registers the interpreted kernels; what they do is free of races."""
    for api, name, function in (
        (block_copy_api, "IMPLEMENTATIONS", block_copy_tpu.block_copy),
        (packing_api, "PACK", packing_tpu.pack),
        (packing_api, "UNPACK", packing_tpu.unpack),
    ):
        named = {NAME: partial(function, interpret=INTERPRETER)}
        monkeypatch.setattr(api, name, MappingProxyType(getattr(api, name) | named))
    yield
    race_check()


@pytest.mark.usefixtures("interpreted")
class TestBlockCopyMosaicTpu(BlockCopyConformance):
    implementation = NAME
    memories = ("device",)  # no interpreter knows host memory; tests/aot compiles these directions

    def test_a_cache_is_copied_within_itself(self):
        rng = np.random.default_rng(0)
        leaf, src_ids, dst_ids = random_array(rng, (9, 2, 8), "bfloat16"), ids_of(rng, 9, (6,), 4), [8, 1, 2, 0, -7, 99]
        copy = jax.jit(lambda leaf: pallas_kernels.block_copy([leaf], src_ids, [leaf], dst_ids, 4, implementation=NAME))
        dst_ids = np.array(dst_ids, np.int32)
        (copied,) = copy(on_device(leaf))
        assert_same_bits(copied, oracle.block_copy([leaf], src_ids, [leaf], dst_ids, 4)[0])

    @pytest.mark.parametrize("count", [0, 3, 4, 9, 11])
    def test_ids_come_in_segments(self, count: int, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(_tpu_blocks, "_SEGMENT", 4)
        rng = np.random.default_rng(count)
        src, dst = [random_array(rng, (12, 8), "float32")], [random_array(rng, (15, 8), "float32")]
        src_ids, dst_ids = ids_of(rng, 12, (11,), count), ids_of(rng, 15, (11,), count)
        copied = pallas_kernels.block_copy(
            [on_device(src[0])], src_ids, [on_device(dst[0])], dst_ids, count, implementation=NAME
        )
        assert_same_bits(copied[0], oracle.block_copy(src, src_ids, dst, dst_ids, count)[0])


@pytest.mark.usefixtures("interpreted")
class TestPackingMosaicTpu(PackingConformance):
    implementation = NAME
    memories = ("device",)


def copy_two(src_ids: list[int], dst_ids: list[int]) -> np.ndarray:
    """Copies two blocks with the kernel as it is now; returns which elements arrived."""
    src, dst = jnp.arange(1, 65, dtype=jnp.int32).reshape(4, 2, 8), jnp.zeros((5, 2, 8), jnp.int32)
    ids = np.array(src_ids, np.int32), np.array(dst_ids, np.int32)
    (copied,) = block_copy_tpu.block_copy(
        (src,), jnp.array(ids[0]), (dst,), jnp.array(ids[1]), jnp.int32(2), platform="cpu", interpret=INTERPRETER
    )
    return np.asarray(copied)[ids[1]] == np.asarray(src)[ids[0]]


def test_copies_arrive_because_they_are_waited_for(race_check: Callable[[], None]):
    assert copy_two([3, 1], [0, 4]).all()
    race_check()


def without_waiting(num_leaves: int, segment: int, count: Any, ids: Any, *refs: Any) -> None:
    """The kernel, with a mistake."""
    src, dst, semaphores = refs[:num_leaves], refs[-1 - num_leaves : -1], refs[-1]

    @pl.loop(0, count[0])
    def _(i: jax.Array) -> None:
        for k in range(num_leaves):
            pltpu.make_async_copy(src[k].at[ids[0, i]], dst[k].at[ids[1, i]], semaphores.at[k]).start()


def waiting_for_all_but_one(num_leaves: int, segment: int, count: Any, ids: Any, *refs: Any) -> None:
    """The kernel, with a mistake that a test of one block does not show."""
    src, dst, semaphores = refs[:num_leaves], refs[-1 - num_leaves : -1], refs[-1]
    without_waiting(num_leaves, segment, count, ids, *refs)

    @pl.loop(1, count[0])
    def _(i: jax.Array) -> None:
        for k in range(num_leaves):
            pltpu.make_async_copy(src[k].at[ids[0, i]], dst[k].at[ids[1, i]], semaphores.at[k]).wait()


@pytest.mark.parametrize("kernel", [without_waiting, waiting_for_all_but_one])
def test_a_missing_wait_is_seen(
    kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch, race_check: Callable[[], None]
):
    monkeypatch.setattr(_tpu_blocks, "_kernel", kernel)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        assert copy_two([3, 1], [0, 4]).all()


def reading_what_is_under_way(num_leaves: int, segment: int, count: Any, ids: Any, *refs: Any) -> None:
    """The kernel, with a mistake: the second block is copied from where the first one is about to arrive."""
    src, dst, semaphores = refs[0], refs[-2], refs[-1]
    first = pltpu.make_async_copy(src.at[ids[0, 0]], dst.at[ids[1, 0]], semaphores.at[0])
    second = pltpu.make_async_copy(dst.at[ids[1, 0]], dst.at[ids[1, 1]], semaphores.at[0])
    first.start()
    second.start()
    first.wait()
    second.wait()


def test_a_race_is_seen(monkeypatch: pytest.MonkeyPatch, race_check: Callable[[], None]):
    """Of two DMAs, one reads what the other writes. Two that write one block are no race to the interpreter."""
    monkeypatch.setattr(_tpu_blocks, "_kernel", reading_what_is_under_way)

    def copy_with_check() -> None:
        copy_two([3, 3], [0, 4])
        race_check()

    with pytest.raises((RaceError, jax.errors.JaxRuntimeError)):
        copy_with_check()


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("rows", [1, 37, 600])
def test_words_are_the_little_endian_bytes_of_elements(dtype: str, rows: int):
    elements = random_array(np.random.default_rng(rows), (rows, 512 // np.dtype(dtype).itemsize), dtype)
    words = elements.view("<u4")
    assert_same_bits(to_words(on_device(elements), interpret=True), words)
    assert_same_bits(from_words(on_device(words), np.dtype(dtype), interpret=True), elements)


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8"])
def test_xla_copies_the_blocks_that_a_kernel_does_not_reach(dtype: str):
    rng = np.random.default_rng(1)
    src, dst = random_array(rng, (9, 3, 5), dtype), random_array(rng, (12, 3, 5), dtype)
    src_ids, dst_ids = ids_of(rng, 9, (8,), 5), ids_of(rng, 12, (8,), 5)
    assert not _tpu_blocks.fills_tiles(jnp.asarray(src))
    (gathered,) = _tpu_blocks.gather_blocks([on_device(src)], jnp.array(src_ids), jnp.int32(5))
    assert_same_bits(gathered[:5], src[src_ids[:5]])
    dst_ids[2] = -1
    (copied,) = _tpu_blocks.copy_blocks(
        [on_device(src)], jnp.array(src_ids), [on_device(dst)], jnp.array(dst_ids), jnp.int32(5)
    )
    kept = np.array([0, 1, 3, 4])
    assert_same_bits(copied, oracle.block_copy([src], src_ids[kept], [dst], dst_ids[kept], 4)[0])


@pytest.mark.parametrize(
    ("block_shape", "dtype", "fills"),
    [
        ((64, 8, 2, 128), "bfloat16", True),
        ((64, 16, 1, 128), "float32", True),
        ((64, 4, 4, 128), "float8_e4m3fn", True),
        ((16, 2, 640), "bfloat16", True),
        ((8, 128), "uint8", True),
        ((64, 16, 1, 128), "bfloat16", False),
        ((64, 8, 2, 128), "float8_e4m3fn", False),
        ((64, 8, 8, 64), "bfloat16", False),
        ((3, 8192), "bfloat16", False),
        ((8192, 3), "float32", False),
        ((1024,), "float32", False),
        ((16, 8, 128), "float16", False),
    ],
)
def test_a_kernel_reaches_leaves_whose_blocks_fill_tiles(block_shape: tuple[int, ...], dtype: str, fills: bool):
    leaf = jax.ShapeDtypeStruct((24, *block_shape), jnp.dtype(dtype))
    assert _tpu_blocks.fills_tiles(leaf) == fills


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_other_platforms_are_refused(platform: str):
    leaf, ids, staging = jnp.zeros((4, 8)), np.zeros((2, 1), np.int32), jnp.zeros((2, 8), jnp.uint32)
    named = {"platform": platform, "implementation": "mosaic_tpu"}
    reason = f"^Mosaic TPU kernels run on 'tpu' only, not on '{platform}'$"
    with pytest.raises(NotImplementedError, match=reason):
        pallas_kernels.block_copy([leaf], ids[:, 0], [leaf], ids[:, 0], 1, **named)
    with pytest.raises(NotImplementedError, match=reason):
        pallas_kernels.pack([leaf], ids, 1, staging, **named)
    with pytest.raises(NotImplementedError, match=reason):
        pallas_kernels.unpack(staging, [leaf], ids, 1, **named)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 8, 256), "uint16"), ((4, 8, 128), "uint32"), ((4, 4, 256), "float32"), ((4, 256), "int32")],
)
def test_host_blocks_that_a_dma_cannot_address_are_refused(shape: tuple[int, ...], dtype: str):
    host, device, ids = on("pinned_host", np.zeros(shape, dtype)), jnp.zeros(shape, dtype), np.zeros(2, np.int32)
    named = {"platform": "tpu", "implementation": "mosaic_tpu"}
    for name, src, dst in (("src", host, device), ("dst", device, host)):
        reason = (
            rf"^`{name}\[0\]` lies in host memory, where blocks must be 32-bit words whose last two dimensions are "
            rf"multiples of \(8, 256\), got {dtype} blocks of shape \({', '.join(map(str, shape[1:]))},?\)$"
        )
        with pytest.raises(NotImplementedError, match=reason):
            pallas_kernels.block_copy([src], ids, [dst], ids, 1, **named)


def test_copies_within_host_memory_are_refused():
    host, ids = on("pinned_host", np.zeros((4, 8, 256), np.uint32)), np.zeros(2, np.int32)
    with pytest.raises(NotImplementedError, match=r"^`src\[0\]` and `dst\[0\]` must not both lie in host memory$"):
        pallas_kernels.block_copy([host], ids, [host], ids, 1, platform="tpu", implementation="mosaic_tpu")


def test_packing_in_host_memory_is_refused():
    leaf, ids, staging = jnp.zeros((4, 8)), np.zeros((2, 1), np.int32), np.zeros((2, 8), np.uint32)
    named = {"platform": "tpu", "implementation": "mosaic_tpu"}
    with pytest.raises(NotImplementedError, match=r"^leaves and staging must lie in device memory$"):
        pallas_kernels.pack([leaf], ids, 1, on("pinned_host", staging), **named)


@pytest.mark.parametrize("dtype", ["int4", "bool", "complex64"])
def test_elements_that_are_not_one_two_or_four_bytes_are_refused(dtype: str):
    leaf, ids = jax.ShapeDtypeStruct((4, 8), jnp.dtype(dtype)), jax.ShapeDtypeStruct((2,), jnp.int32)
    copy = partial(pallas_kernels.block_copy, platform="tpu", implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match=f"elements must be numbers of 8, 16 or 32 bits, got {dtype}"):
        jax.eval_shape(copy, [leaf], ids, [leaf], ids, jax.ShapeDtypeStruct((), jnp.int32))
