"""What every implementation of an operation has to do. A test file inherits these classes once for each.

A class that inherits sets `implementation`, and may narrow the dtypes and memories that it is made for.
"""

from functools import cache, partial
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

import pallas_kernels
from tests.pallas_kernels import oracle
from tests.pallas_kernels.data import (
    DTYPES,
    NARROW,
    OUT_OF_RANGE,
    assert_same_bits,
    every_pattern,
    ids_of,
    on,
    on_device,
    random_array,
)

# One jitted function per set of static arguments, so that no case is compiled twice.
jitted = cache(lambda op, donate, **static: jax.jit(partial(op, **static), donate_argnums=donate))


def signalling_nans() -> np.ndarray:
    """`(8, 64)` float32 NaNs of both signs, signalling and quiet, with payloads."""
    payloads = np.random.default_rng(0).integers(1, 1 << 23, (8, 64), np.uint32)
    signs = np.arange(64, dtype=np.uint32) % 2 << 31
    return (payloads | 0x7F800000 | signs).view(np.float32)


class BlockCopyConformance:
    """`block_copy` of one implementation."""

    implementation: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    memories: ClassVar[tuple[str, ...]] = ("device", "pinned_host")
    length = 8

    def block_copy(self, src: Any, src_ids: Any, dst: Any, dst_ids: Any, count: int) -> tuple[jax.Array, ...]:
        function = jitted(pallas_kernels.block_copy, 2, implementation=self.implementation)
        return function(src, src_ids, dst, dst_ids, np.int32(count))

    def check(
        self,
        src: list[np.ndarray],
        src_ids: np.ndarray,
        dst: list[np.ndarray],
        dst_ids: np.ndarray,
        count: int,
        memories: tuple[str, str] = ("device", "device"),
    ) -> None:
        sources = [on(memories[0], leaf) for leaf in src]
        copied = self.block_copy(sources, src_ids, [on(memories[1], leaf) for leaf in dst], dst_ids, count)
        assert isinstance(copied, tuple)
        assert len(copied) == len(dst)
        for actual, expected in zip(copied, oracle.block_copy(src, src_ids, dst, dst_ids, count), strict=True):
            assert_same_bits(actual, expected)
            assert actual.sharding.memory_kind == memories[1]
        for actual, expected in zip(sources, src, strict=True):
            assert_same_bits(actual, expected)

    def leaves(self, num_blocks: int, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [random_array(rng, (num_blocks, 2, 8 + 4 * i), dtype) for i, dtype in enumerate(self.dtypes)]

    @pytest.mark.parametrize("count", [0, 1, 5, 8])
    def test_first_ids_are_copied_and_all_else_keeps_its_bits(self, count: int):
        rng = np.random.default_rng(count)
        src_ids, dst_ids = ids_of(rng, 8, (self.length,), count), ids_of(rng, 11, (self.length,), count)
        self.check(self.leaves(8, 1), src_ids, self.leaves(11, 2), dst_ids, count)

    def test_a_source_block_may_be_copied_to_many_places(self):
        src_ids = np.array([3, 3, 0, 3, 7, 0, *OUT_OF_RANGE[:2]], np.int32)
        dst_ids = np.array([10, 0, 4, 2, 9, 1, *OUT_OF_RANGE[2:]], np.int32)
        self.check(self.leaves(8, 3), src_ids, self.leaves(11, 4), dst_ids, 6)

    def test_a_count_over_the_number_of_ids_copies_all(self):
        ids = np.arange(self.length, dtype=np.int32)
        src, dst = self.leaves(8, 5), self.leaves(11, 6)
        copied = self.block_copy([*map(on_device, src)], ids, [*map(on_device, dst)], ids[::-1].copy(), 1000)
        for actual, expected in zip(copied, oracle.block_copy(src, ids, dst, ids[::-1], 8), strict=True):
            assert_same_bits(actual, expected)

    def test_every_bit_pattern_is_kept(self):
        narrow = [name for name in self.dtypes if name in NARROW]
        patterns = [every_pattern(name, 8) for name in narrow] + [signalling_nans()]
        ids = np.array([6, 1, 0, 3, 2, 7, 5, 4], np.int32)
        others = [np.roll(leaf, 3, axis=1) for leaf in patterns]
        self.check(patterns, ids, [np.concatenate([leaf, leaf]) for leaf in others], ids * 2, 8)

    @pytest.mark.parametrize("to", ["device", "pinned_host"])
    @pytest.mark.parametrize("of", ["device", "pinned_host"])
    def test_blocks_cross_the_memory_spaces(self, of: str, to: str):
        if not {of, to} <= set(self.memories):
            pytest.skip(f"{self.implementation} is not made for {of} to {to}")
        rng = np.random.default_rng(7)
        src_ids, dst_ids = ids_of(rng, 8, (self.length,), 5), ids_of(rng, 11, (self.length,), 5)
        self.check(self.leaves(8, 8), src_ids, self.leaves(11, 9), dst_ids, 5, (of, to))

    def test_other_ids_and_counts_compile_nothing(self):
        function = jax.jit(partial(pallas_kernels.block_copy, implementation=self.implementation), donate_argnums=2)
        rng = np.random.default_rng(10)
        src, dst = (on_device(random_array(rng, (8, 4, 8), "float32")),), random_array(rng, (8, 4, 8), "float32")
        for count in (0, 3, 8):
            ids = ids_of(rng, 8, (self.length,), count)
            function(src, ids, (on_device(dst),), ids, np.int32(count))
        assert function._cache_size() == 1


class PackingConformance:
    """`pack` and `unpack` of one implementation."""

    implementation: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    memories: ClassVar[tuple[str, ...]] = ("device", "pinned_host")
    max_chunks = 4
    blocks_per_chunk = 2
    unit_words = 16
    # Per case: the leaves (shape, dtype, stacked), and how many units a chunk takes. `words`: rows are whole
    # words, and a chunk is padded by part of a unit; `exact`: no padding; `odd`: rows of any number of bytes.
    cases: ClassVar[dict[str, tuple[list[tuple[tuple[int, ...], str, bool]], int]]] = {
        "words": (
            [
                ((9, 2, 3), "float32", False),
                ((9, 4, 2), "bfloat16", False),
                ((3, 12, 4), "float8_e5m2", True),
                ((2, 9, 2, 2), "int8", True),
                ((10, 8), "uint32", False),
                ((9, 8), "float16", False),
            ],
            4,
        ),
        "exact": ([((9, 8, 4), "float32", False)], 16),
        "odd": (
            [
                ((9, 3), "bfloat16", False),
                ((10,), "uint8", False),
                ((3, 9, 5), "float8_e4m3fn", True),
                ((9, 2, 2), "float32", False),
                ((9, 7), "float8_e5m2", False),
            ],
            4,
        ),
    }

    def pack(self, leaves: Any, ids: Any, count: int, staging: Any, **static: Any) -> jax.Array:
        function = jitted(pallas_kernels.pack, 3, implementation=self.implementation, **static)
        return function(leaves, ids, np.int32(count), staging)

    def unpack(self, staging: Any, leaves: Any, ids: Any, count: int, **static: Any) -> tuple[jax.Array, ...]:
        function = jitted(pallas_kernels.unpack, 1, implementation=self.implementation, **static)
        return function(staging, leaves, ids, np.int32(count))

    def arrays(self, case: str, seed: int) -> tuple[list[np.ndarray], tuple[bool, ...], np.ndarray, int]:
        """Leaves, which are stacked, staging and units per chunk, all of random bytes."""
        rng = np.random.default_rng(seed)
        leaves, units = self.cases[case]
        staging = random_array(rng, (self.max_chunks * units, self.unit_words), "uint32")
        return [random_array(rng, s, d) for s, d, _ in leaves], tuple(s for *_, s in leaves), staging, units

    def ids(self, seed: int, count: int) -> np.ndarray:
        return ids_of(np.random.default_rng(seed), 9, (self.max_chunks, self.blocks_per_chunk), count)

    def check_pack(self, case: str, ids: np.ndarray, count: int, memory: str = "device") -> None:
        leaves, stacked, staging, units = self.arrays(case, 1)
        packed = self.pack([on(memory, leaf) for leaf in leaves], ids, count, on(memory, staging), stacked=stacked)
        assert packed.sharding.memory_kind == memory
        assert_same_bits(packed, oracle.pack(leaves, stacked, ids, count, staging, units))

    def check_unpack(self, case: str, ids: np.ndarray, count: int, memory: str = "device") -> None:
        leaves, stacked, staging, units = self.arrays(case, 2)
        given = on(memory, staging)
        updated = self.unpack(given, [on(memory, leaf) for leaf in leaves], ids, count, stacked=stacked)
        assert isinstance(updated, tuple)
        expected = oracle.unpack(staging, leaves, stacked, ids, count, units)
        for actual, leaf in zip(updated, expected, strict=True):
            assert actual.sharding.memory_kind == memory
            assert_same_bits(actual, leaf)
        assert_same_bits(given, staging)

    @pytest.mark.parametrize("count", [0, 1, 3, 4])
    @pytest.mark.parametrize("case", ["words", "exact", "odd"])
    def test_pack_writes_the_chunks_and_zeros_and_keeps_all_other_units(self, case: str, count: int):
        self.check_pack(case, self.ids(count, count), count)

    @pytest.mark.parametrize("count", [0, 1, 3, 4])
    @pytest.mark.parametrize("case", ["words", "exact", "odd"])
    def test_unpack_writes_the_blocks_and_keeps_all_others(self, case: str, count: int):
        self.check_unpack(case, self.ids(10 + count, count), count)

    @pytest.mark.parametrize("case", ["words", "odd"])
    def test_pack_reads_a_block_as_often_as_it_is_named(self, case: str):
        self.check_pack(case, np.array([[8, 8], [0, 8], [0, 0], OUT_OF_RANGE[:2]], np.int32), 3)

    @pytest.mark.parametrize("case", ["words", "exact", "odd"])
    def test_unpack_writes_a_block_with_id_minus_one_nowhere(self, case: str):
        self.check_unpack(case, np.array([[-1, 8], [-1, -1], [2, -1], OUT_OF_RANGE[:2]], np.int32), 3)

    @pytest.mark.parametrize("case", ["words", "odd"])
    def test_a_count_over_the_number_of_chunks_is_all_of_them(self, case: str):
        ids = self.ids(5, 4)
        leaves, stacked, staging, units = self.arrays(case, 6)
        packed = self.pack([*map(on_device, leaves)], ids, 1000, on_device(staging), stacked=stacked)
        assert_same_bits(packed, oracle.pack(leaves, stacked, ids, 4, staging, units))
        updated = self.unpack(packed, [*map(on_device, leaves)], ids, 1000, stacked=stacked)
        for actual, expected in zip(updated, leaves, strict=True):
            assert_same_bits(actual, expected)

    @pytest.mark.parametrize("case", ["words", "odd"])
    def test_unpack_is_the_inverse_of_pack_at_other_places(self, case: str):
        leaves, stacked, staging, _ = self.arrays(case, 7)
        others, *_ = self.arrays(case, 8)
        here, there = self.ids(1, 4), self.ids(2, 4)
        packed = self.pack([*map(on_device, leaves)], here, 4, on_device(staging), stacked=stacked)
        updated = self.unpack(packed, [*map(on_device, others)], there, 4, stacked=stacked)
        for actual, leaf, other, has_layers in zip(updated, leaves, others, stacked, strict=True):
            expected = other.copy()
            for source, target in zip(
                oracle.layers_of(leaf, has_layers), oracle.layers_of(expected, has_layers), strict=True
            ):
                target[there] = source[here]
            assert_same_bits(actual, expected)

    def test_layers_of_a_stacked_leaf_have_the_bytes_of_separate_leaves(self):
        rng = np.random.default_rng(9)
        leaf, ids = random_array(rng, (3, 9, 4), "float32"), self.ids(3, 4)
        staging = random_array(rng, (8, self.unit_words), "uint32")
        one = self.pack([on_device(leaf)], ids, 4, on_device(staging), stacked=(True,))
        three = self.pack([*map(on_device, leaf)], ids, 4, on_device(staging))
        assert_same_bits(one, np.asarray(three))

    def test_units_per_chunk_may_leave_units_of_the_staging_over(self):
        leaves, stacked, staging, units = self.arrays("words", 11)
        ids = self.ids(4, 3)
        longer = np.concatenate([staging, staging[:3]])
        static = {"stacked": stacked, "units_per_chunk": units}
        packed = self.pack([*map(on_device, leaves)], ids, 3, on_device(longer), **static)
        assert_same_bits(packed, oracle.pack(leaves, stacked, ids, 3, longer, units))
        updated = self.unpack(packed, [*map(on_device, leaves)], ids, 3, **static)
        for actual, expected in zip(updated, leaves, strict=True):
            assert_same_bits(actual, expected)

    @pytest.mark.parametrize("case", ["words", "odd"])
    def test_the_words_of_a_unit_may_have_any_shape(self, case: str):
        leaves, stacked, staging, units = self.arrays(case, 13)
        ids, shape = self.ids(5, 3), (len(staging), 2, 2, self.unit_words // 4)
        packed = self.pack([*map(on_device, leaves)], ids, 3, on_device(staging.reshape(shape)), stacked=stacked)
        assert_same_bits(packed, oracle.pack(leaves, stacked, ids, 3, staging, units).reshape(shape))
        updated = self.unpack(packed, [*map(on_device, leaves)], ids, 3, stacked=stacked)
        for actual, expected in zip(updated, leaves, strict=True):
            assert_same_bits(actual, expected)

    def test_every_bit_pattern_is_kept(self):
        narrow = [name for name in self.dtypes if name in NARROW]
        leaves = [every_pattern(name, 8) for name in narrow] + [signalling_nans()]
        others = [np.roll(leaf, 3, axis=1) for leaf in leaves]
        here, there = np.array([[6, 1], [0, 3], [2, 7], [5, 4]]), np.array([[7, 0], [2, 9], [15, 8], [4, 1]])
        units = -(-len(oracle.chunk_bytes(leaves, (False,) * len(leaves), here[0])) // (4 * self.unit_words))
        staging = np.zeros((4 * units, self.unit_words), np.uint32)
        packed = self.pack([*map(on_device, leaves)], here.astype(np.int32), 4, on_device(staging))
        assert_same_bits(packed, oracle.pack(leaves, (False,) * len(leaves), here, 4, staging, units))
        wider = [np.concatenate([leaf, leaf]) for leaf in others]
        updated = self.unpack(packed, [*map(on_device, wider)], there.astype(np.int32), 4)
        for actual, leaf, before in zip(updated, leaves, wider, strict=True):
            before[there] = leaf[here]
            assert_same_bits(actual, before)

    def test_arrays_may_lie_in_host_memory(self):
        if "pinned_host" not in self.memories:
            pytest.skip(f"{self.implementation} is not made for host memory")
        ids = self.ids(6, 3)
        self.check_pack("words", ids, 3, "pinned_host")
        self.check_unpack("words", ids, 3, "pinned_host")

    def test_other_ids_and_counts_compile_nothing(self):
        leaves, stacked, staging, _ = self.arrays("exact", 12)
        static = {"implementation": self.implementation, "stacked": stacked}
        pack = jax.jit(partial(pallas_kernels.pack, **static), donate_argnums=3)
        unpack = jax.jit(partial(pallas_kernels.unpack, **static), donate_argnums=1)
        for count in (0, 2, 4):
            ids = self.ids(count, count)
            packed = pack([*map(on_device, leaves)], ids, np.int32(count), on_device(staging))
            unpack(packed, [*map(on_device, leaves)], ids, np.int32(count))
        assert pack._cache_size() == unpack._cache_size() == 1
