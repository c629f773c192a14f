"""Fused transfers: bits, order, static shapes, and what is refused. Compiled for accelerators in `tests/aot`."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from kvjax import fused
from tests.pallas_kernels.data import DTYPES, assert_same_bits, every_pattern, ids_of, on, on_device, random_array
from tests.support.fused_step import GROUPS, LEAVES, Places, Sizes, step

NUM_BLOCKS, BUCKET, LAYERS, BLOCK = 9, 4, 3, (2, 3, 5)
ON_DEVICE = SingleDeviceSharding(jax.devices()[0])
IN_HOST = ON_DEVICE.with_memory_kind("pinned_host")


def arriving_of(rows: np.ndarray, ids: np.ndarray, count: int) -> fused.Arriving:
    """A whole bucket as given, padding too."""
    return fused.Arriving(on("pinned_host", rows), ids, np.int32(count))


@jax.jit
def fetched_rows(arriving, layer):
    return fused.fetch(arriving, layer).rows


@partial(jax.jit, donate_argnums=0)
def restored(cache, arriving, layer):
    return fused.restore(0.0, cache, fused.fetch(arriving, layer))[1]


@jax.jit
def collected(cache, ids):
    return fused.collect(cache, ids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_restored_rows_are_exact_and_no_other_byte_changes(dtype, compilations):
    rng = np.random.default_rng(1)
    seen = None
    for count in range(BUCKET + 1):
        before = random_array(rng, (NUM_BLOCKS, *BLOCK), dtype)
        rows = random_array(rng, (LAYERS, BUCKET, *BLOCK), dtype)
        ids, layer = ids_of(rng, NUM_BLOCKS, (BUCKET,), count), int(rng.integers(LAYERS))
        after = restored(on_device(before), arriving_of(rows, ids, count), np.int32(layer))
        before[ids[:count]] = rows[layer, :count]
        assert_same_bits(after, before)
        if seen is None:
            compilations.clear()
        seen = compilations[:]
    assert seen == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_donated_cache_is_updated_in_place_without_a_copy_of_it(dtype):
    cache = on_device(np.zeros((1000, 512), DTYPES[dtype]))
    arriving = arriving_of(np.zeros((1, 2, 512), DTYPES[dtype]), np.zeros(2, np.int32), 1)
    memory: Any = restored.lower(cache, arriving, np.int32(0)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes / 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_collected_rows_are_exact_in_the_order_of_the_ids(dtype):
    rng = np.random.default_rng(2)
    before = random_array(rng, (NUM_BLOCKS, *BLOCK), dtype)
    ids = np.array([7, 2, 7, -5, 2**31 - 1], np.int32)
    cache = on_device(before)
    rows = collected(cache, ids)
    assert rows.sharding.memory_kind == "pinned_host"
    assert rows.shape == (5, *BLOCK)
    assert_same_bits(np.asarray(rows)[:3], before[ids[:3]])
    assert_same_bits(cache, before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern_survives_both_ways(dtype):
    patterns = every_pattern(dtype, 8)
    ids = np.arange(8, dtype=np.int32)[::-1].copy()
    cache = on_device(np.zeros_like(patterns))
    arriving = arriving_of(patterns[None], ids, 8)
    assert_same_bits(fetched_rows(arriving, 0), patterns)
    cache = restored(cache, arriving, 0)
    assert_same_bits(cache, patterns[::-1].copy())
    assert_same_bits(collected(cache, ids), patterns)


def test_a_layer_owns_leaves_of_several_shapes_and_dtypes():
    rng = np.random.default_rng(3)
    specs = {"state": ("float32", (4, 4)), "conv": ("bfloat16", (3, 5))}
    before = {name: random_array(rng, (NUM_BLOCKS, *shape), dtype) for name, (dtype, shape) in specs.items()}
    rows = {name: random_array(rng, (LAYERS, 2, *shape), dtype) for name, (dtype, shape) in specs.items()}
    arriving = fused.make_arriving(rows, [6, 1], bucket=BUCKET, num_blocks=NUM_BLOCKS, sharding=IN_HOST)
    after = restored({name: on_device(leaf) for name, leaf in before.items()}, arriving, 2)
    left = collected(after, np.array([1, 0], np.int32))
    for name in specs:
        before[name][[6, 1]] = rows[name][2]
        assert_same_bits(after[name], before[name])
        assert_same_bits(left[name], before[name][[1, 0]])


def test_collect_reads_the_write_before_it_and_not_the_one_after():
    before = on_device(np.zeros((NUM_BLOCKS, 4), np.float32))
    arriving = arriving_of(np.full((1, 1, 4), 5.0, np.float32), np.array([3], np.int32), 1)

    @partial(jax.jit, donate_argnums=0)
    def write_around(cache):
        _, cache = fused.restore(0.0, cache, fused.fetch(arriving, 0))
        first = fused.collect(cache, jnp.array([3], jnp.int32))
        cache = cache.at[3].add(1.0)
        second = fused.collect(cache, jnp.array([3], jnp.int32))
        return cache.at[3].set(-1.0), first, second

    cache, first, second = write_around(before)
    assert (float(first[0, 0]), float(second[0, 0]), float(cache[3, 0])) == (5.0, 6.0, -1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_stacked_caches_are_scanned_over_with_the_next_layer_fetched_ahead(dtype):
    rng = np.random.default_rng(4)
    before = random_array(rng, (LAYERS, NUM_BLOCKS, *BLOCK), dtype)
    rows = random_array(rng, (LAYERS, BUCKET, *BLOCK), dtype)
    ids = ids_of(rng, NUM_BLOCKS, (BUCKET,), 3)
    finished = np.array([8, int(ids[0])], np.int32)

    @partial(jax.jit, donate_argnums=0)
    def scanned(cache, arriving):
        def body(carry, layer):
            x, cache, fetched = carry
            x, cache = fused.restore(x, cache, fetched, layer=layer)
            fetched = fused.fetch(arriving, jnp.minimum(layer + 1, LAYERS - 1))
            return (x, cache, fetched), fused.collect(cache, finished, layer=layer, as_words=True)

        start = (0.0, cache, fused.fetch(arriving, 0))
        (_, cache, _), left = lax.scan(body, start, jnp.arange(LAYERS, dtype=jnp.int32))
        return cache, left

    cache, left = scanned(on_device(before), arriving_of(rows, ids, 3))
    before[:, ids[:3]] = rows[:, :3]
    assert_same_bits(cache, before)
    assert_same_bits(left, before[:, finished].view(f"u{before.dtype.itemsize}"))
    assert left.sharding.memory_kind == "pinned_host"


SMALL = Sizes(
    num_layers=4,
    width=24,
    heads=2,
    head_dim=8,
    tokens_per_block=4,
    num_blocks=8,
    tokens=4,
    read_blocks={"full": 4, "sliding": 2},
    window_tokens=4,
    bucket=3,
    dtype=jnp.float32,
)


def decoder_arguments(sizes: Sizes, rng: np.random.Generator):
    """Weights, activations, positions and places of a step that computes tokens 12 to 15 of one sequence."""
    weights = [
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in sizes.weight_shapes().items()}
        for _ in range(sizes.num_layers)
    ]
    positions = np.arange(12, 16, dtype=np.int32)
    tables = {"full": np.array([5, 0, 7, 2]), "sliding": np.array([-1, -1, 1, 6])}
    places = {}
    for group, table in tables.items():
        read = np.arange(4 - sizes.read_blocks[group], 4)
        places[group] = Places(
            *(jnp.asarray(part, jnp.int32) for part in (table[positions // 4], positions % 4, table[read], read * 4))
        )
    x = rng.normal(size=(sizes.tokens, sizes.width)).astype(np.float32)
    return weights, x, positions, places


def test_a_step_that_restores_and_collects_computes_the_same_bits():
    """The caches of the first step hold the blocks; those of the second get them by way of host memory."""
    rng = np.random.default_rng(5)
    weights, x, positions, places = decoder_arguments(SMALL, rng)
    missing = {"full": np.array([0, 5, 7], np.int32), "sliding": np.array([1], np.int32)}
    whole = [
        {name: rng.normal(size=SMALL.cache_shape).astype(np.float32) for name in LEAVES}
        for _ in range(SMALL.num_layers)
    ]
    lacking = [{name: leaf.copy() for name, leaf in cache.items()} for cache in whole]
    arriving, nothing = {}, {}
    for g, group in enumerate(GROUPS):
        rows = {name: np.stack([cache[name][missing[group]] for cache in whole[g::2]]) for name in LEAVES}
        make = partial(fused.make_arriving, num_blocks=SMALL.num_blocks, sharding=IN_HOST)
        arriving[group] = make(rows, missing[group], bucket=SMALL.bucket)
        nothing[group] = make({name: leaf[:, :0] for name, leaf in rows.items()}, [], bucket=0)
        for cache in lacking[g::2]:
            for leaf in cache.values():
                leaf[missing[group]] = np.nan
    finished = {group: fused.pad_ids(ids, bucket=SMALL.bucket, num_blocks=8) for group, ids in missing.items()}
    none = {group: fused.pad_ids([], bucket=0, num_blocks=8) for group in GROUPS}
    run = jax.jit(partial(step, SMALL), donate_argnums=3)
    to_device = partial(jax.tree.map, on_device)
    plain_x, plain_caches, _ = run(weights, x, positions, to_device(whole), places, nothing, none)
    fused_x, fused_caches, left = run(weights, x, positions, to_device(lacking), places, arriving, finished)
    assert_same_bits(fused_x, np.asarray(plain_x))
    for i, (plain, cache) in enumerate(zip(plain_caches, fused_caches, strict=True)):
        ids = missing[GROUPS[i % 2]]
        for name in LEAVES:
            assert_same_bits(cache[name], np.asarray(plain[name]))
            assert_same_bits(np.asarray(left[i][name])[: len(ids)], np.asarray(plain[name])[ids])


def test_an_empty_bucket_adds_nothing_to_the_program():
    empty = fused.Arriving(on("pinned_host", np.zeros((1, 0, 4), np.float32)), np.zeros(0, np.int32), np.int32(0))

    def transfers(x, cache, arriving, ids):
        x, cache = fused.restore(x, cache, fused.fetch(arriving, 0))
        x, rows = fused.settle(x, fused.collect(cache, ids))
        return x, cache, rows

    jaxpr = jax.make_jaxpr(transfers)(1.0, jnp.zeros((2, 4)), empty, jnp.zeros(0, jnp.int32))
    used = {str(equation.primitive) for equation in jaxpr.eqns}
    assert used <= {"broadcast_in_dim", "device_put"}


def test_caches_split_over_heads_on_eight_devices_are_exact():
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "tests.support.fused_on_many_devices"]
    child = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-2000:]


GOOD = fused.Arriving(on("pinned_host", np.zeros((2, 3, 4), np.float32)), np.zeros(3, np.int32), np.int32(1))
CACHE = on_device(np.zeros((5, 4), np.float32))


@pytest.mark.parametrize(
    ("arriving", "layer", "message"),
    [
        (
            replace(GOOD, rows=CACHE.reshape(1, 5, 4)[:, :3]),
            0,
            "`arriving.rows` must lie in host memory, got float32 of",
        ),
        (replace(GOOD, rows=()), 0, "`arriving.rows` must hold at least one array, got none"),
        (replace(GOOD, rows=3), 0, "`arriving.rows` must be an array or a tree of arrays, got int"),
        (
            replace(GOOD, block_ids=np.zeros(2, np.int32)),
            0,
            r"must have shape \(layers, 2, \*block_shape\), as many rows",
        ),
        (
            replace(GOOD, block_ids=np.zeros(3)),
            0,
            r"`arriving.block_ids` must be int32 of shape \(bucket,\), got float64",
        ),
        (replace(GOOD, block_ids=[0, 1, 2]), 0, r"must be int32 of shape \(bucket,\), got \[0, 1, 2\]"),
        (replace(GOOD, count=1), 0, "`arriving.count` must be an int32 scalar, got 1"),
        (GOOD, 2, "`layer` must be from 0 to 1, the layers of `arriving.rows`, got 2"),
        (GOOD, 1.5, "`layer` must be an integer scalar, got 1.5"),
    ],
)
def test_fetch_refuses(arriving, layer, message):
    with pytest.raises(ValueError, match=message):
        fused.fetch(arriving, layer)


@pytest.mark.parametrize(
    ("cache", "options", "message"),
    [
        (CACHE[:, :3], {}, r"block shape and dtype of the rows, float32 of \(4,\), got float32 of \(3,\)"),
        (CACHE.astype(jnp.bfloat16), {}, r"got bfloat16 of \(4,\)"),
        ({"k": CACHE}, {}, "`cache` must have the structure of the rows"),
        (jax.device_put(CACHE, IN_HOST), {}, "`cache` must lie in device memory"),
        (CACHE[None], {"layer": 1}, "`layer` must be from 0 to 0, the layers of `cache`, got 1"),
        (CACHE[:0], {}, r"`cache` must have shape \(num_blocks, \*block_shape\) without a zero"),
        (CACHE.astype(jnp.int4), {}, "`cache` must have elements of 8, 16 or 32 bits, got int4"),
    ],
)
def test_restore_refuses(cache, options, message):
    fetched = fused.Fetched(jnp.zeros((3, 4)), np.zeros(3, np.int32), np.int32(1))
    with pytest.raises(ValueError, match=message):
        fused.restore(0.0, cache, fetched, **options)


def test_restore_refuses_what_was_not_fetched():
    with pytest.raises(ValueError, match="`fetched` must be what `fetch` returns, got Arriving"):
        fused.restore(0.0, CACHE, GOOD)  # pyright: ignore[reportArgumentType]


def test_collect_refuses_ids_that_are_not_int32():
    with pytest.raises(
        ValueError, match=r"`block_ids` must be int32 of shape \(bucket,\), got int32 of shape \(1, 1\)"
    ):
        fused.collect(CACHE, jnp.zeros((1, 1), jnp.int32))


@pytest.mark.parametrize(
    ("ids", "bucket", "message"),
    [
        ([5], 2, "`block_ids` must be from 0 to 4, got 5 to 5"),
        ([-1, 2], 2, "`block_ids` must be from 0 to 4, got -1 to 2"),
        ([1, 3, 1], 4, "`block_ids` must name each block once, got block 1 twice"),
        ([1, 2, 3], 2, "`block_ids` must be at most 2, the rows of the bucket, got 3"),
        ([0.5], 2, "`block_ids` must be a 1-d sequence of ints, got a 1-d one of float64"),
        ([0], -1, "`bucket` must be a non-negative int, got -1"),
    ],
)
def test_ids_are_refused_on_the_host(ids, bucket, message):
    with pytest.raises(ValueError, match=message):
        fused.pad_ids(ids, bucket=bucket, num_blocks=5)


def test_rows_are_made_only_for_host_memory_and_as_many_as_ids():
    rows = np.zeros((2, 1, 4), np.float32)
    with pytest.raises(ValueError, match="`sharding` must be of 'pinned_host' memory"):
        fused.make_arriving(rows, [1], bucket=2, num_blocks=5, sharding=ON_DEVICE.with_memory_kind("device"))
    with pytest.raises(ValueError, match=r"`rows` must have shape \(layers, 2, \*block_shape\), got \(2, 1, 4\)"):
        fused.make_arriving(rows, [1, 2], bucket=2, num_blocks=5, sharding=IN_HOST)


def test_no_bucket_is_large_enough():
    with pytest.raises(ValueError, match=r"`buckets` must hold one of at least 9 rows, got \(0, 8\)"):
        fused.bucket_of(9, (0, 8))


def test_rows_belong_in_host_memory_split_as_the_cache_is():
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))

    def cache(*spec):
        return jax.ShapeDtypeStruct((8, 4, 2), jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    assert fused.rows_sharding(cache(None, "model")) == NamedSharding(
        mesh, P(None, None, "model"), memory_kind="pinned_host"
    )
    assert fused.rows_sharding(cache(None, None, "model"), stacked=True, arriving=False) == NamedSharding(
        mesh, P(None, "model"), memory_kind="pinned_host"
    )
    assert fused.rows_sharding(CACHE) == IN_HOST
    with pytest.raises(ValueError, match="`cache` must not be split over its layers or blocks"):
        fused.rows_sharding(cache("model"))
    with pytest.raises(ValueError, match="`cache` must have a NamedSharding or lie on a single device, got None"):
        fused.rows_sharding(jax.ShapeDtypeStruct((8, 4), jnp.float32))


def test_explicit_axes_are_refused_with_the_way_out():
    """`jax.make_mesh` gives them by default; JAX's own error was about an update that the user never wrote."""
    mesh = jax.make_mesh((8,), ("m",))
    cache = jax.device_put(jnp.zeros((4, 8)), NamedSharding(mesh, P(None, "m")))
    with pytest.raises(
        ValueError, match=r"`cache` must be on a mesh of `Auto` axes, or within `jax.sharding.auto_axes`"
    ):
        jax.jit(lambda cache: fused.collect(cache, np.array([1, 2], np.int32)))(cache)


def test_rows_of_a_cache_may_be_split_over_axes_of_one_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    struct = jax.ShapeDtypeStruct((4, 6, 8), jnp.float32, sharding=NamedSharding(mesh, P("data", None, "model")))
    assert fused.rows_sharding(struct).spec == P(None, None, None, "model")
    over_blocks = jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=NamedSharding(mesh, P("model")))
    with pytest.raises(ValueError, match="`cache` must not be split over its layers or blocks"):
        fused.rows_sharding(over_blocks)
