"""The CPU backend's transport writes arrays in place that nobody else may see change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheLayout, FullAttention, GroupSpec, LeafSpec
from kvjax.memory import inplace
from kvjax.memory.spans import address_of
from kvjax.mover import Mover
from kvjax.packing import cut_into_units, unit_bytes
from kvjax.plan import GroupMoves, LoadPlan, StorePlan

BLOCKS = 8
LAYOUT = CacheLayout([GroupSpec("full", FullAttention(), 4, (LeafSpec("x", (4, 16), np.uint32),))])


def mover_for(caches, layout=LAYOUT, **options):
    chunking = kvjax.resolve_chunking(layout)
    units = cut_into_units(chunking, unit_bytes(chunking, 4))
    return Mover(chunking, units, caches, num_units=64, show_progress=False, **options)


def moves_of(blocks):
    ids = np.asarray(blocks, np.int32)[:, None]
    return (GroupMoves(0, len(ids), ids[:, 0], ids, np.arange(len(ids), dtype=np.int32)[:, None]),)


def store(mover, caches, blocks):
    caches, moved = mover.store(caches, StorePlan(moves_of(blocks), 0))
    moved.wait()
    return caches


def load(mover, caches, blocks):
    caches, moved = mover.load(caches, LoadPlan(moves_of(blocks), 0))
    moved.wait()
    return caches


def filled(value: int) -> jax.Array:
    return jnp.full((BLOCKS, 4, 16), value, jnp.uint32)


def test_a_load_writes_the_memory_of_the_cache_it_was_given():
    caches = {"x": filled(1)}
    mover = mover_for(caches)
    assert mover.transfer == "direct"
    caches = store(mover, caches, [0])
    address = caches["x"].unsafe_buffer_pointer()
    caches = load(mover, caches, [3])
    assert caches["x"].unsafe_buffer_pointer() == address


def test_numpy_arrays_that_a_cache_was_made_of_never_change():
    """`device_put` may share a writable NumPy buffer: writing the cache in place would have written the array."""
    memory = np.zeros(BLOCKS * 4 * 16 + 16, np.uint32)
    start = -address_of(memory) % 64 // 4
    mine = memory[start : start + BLOCKS * 4 * 16].reshape(BLOCKS, 4, 16)
    mine[:] = np.arange(BLOCKS, dtype=np.uint32)[:, None, None]
    caches = {"x": jax.device_put(mine)}
    assert caches["x"].unsafe_buffer_pointer() == address_of(mine), "the case is about a buffer that is shared"
    mover = mover_for(caches)
    caches = load(mover, store(mover, caches, [0, 1]), [5, 6])
    assert np.array_equal(mine[:, 0, 0], np.arange(BLOCKS))
    assert np.asarray(caches["x"])[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 7]


def test_views_of_a_cache_that_were_taken_before_a_load_never_change():
    caches = {"x": filled(7)}
    mover = mover_for(caches)
    caches = store(mover, caches, [0])
    caches = {"x": caches["x"].at[:].set(8)}
    view = np.asarray(caches["x"])
    caches = load(mover, caches, [2])
    assert (view == 8).all()
    assert np.asarray(caches["x"])[:, 0, 0].tolist() == [8, 8, 7, 8, 8, 8, 8, 8]


def test_what_was_computed_from_a_cache_before_a_load_does_not_see_the_load():
    @jax.jit
    def slow(cache):
        product = jax.lax.fori_loop(0, 30, lambda _, m: jnp.sin(m @ m), jnp.ones((300, 300)) * 1e-3)
        return cache.sum() + (product[0, 0] * 0).astype(jnp.uint32)

    caches = {"x": filled(1)}
    mover = mover_for(caches)
    caches = store(mover, {"x": filled(100)}, [0])
    for _ in range(20):
        caches = {"x": filled(1)}
        pending = slow(caches["x"])
        caches = load(mover, caches, list(range(1)))
        assert int(pending) == BLOCKS * 4 * 16
        assert np.asarray(caches["x"])[:, 0, 0].tolist() == [100, *[1] * 7]


@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_a_store_reads_the_update_that_precedes_it(transfer):
    """150 of 150 rounds stored stale bytes in an engine whose copy did not wait for the write."""

    @jax.jit
    def write(cache, value):
        slow = jax.lax.fori_loop(0, 10, lambda _, m: jnp.sin(m @ m), jnp.ones((100, 100)) * 1e-3)
        return cache.at[:].set(value + (slow[0, 0] * 0).astype(jnp.uint32))

    caches = {"x": filled(0)}
    mover = mover_for(caches, transfer=transfer)
    for value in range(150):
        caches = {"x": write(caches["x"], np.uint32(value))}
        caches, stored = mover.store(caches, StorePlan(moves_of([3, 4]), 0))
        caches = {"x": write(caches["x"], np.uint32(10**6))}
        stored.wait()
        assert (mover.read_chunks(0, np.array([[0], [1]])).view(np.uint32) == value).all()


@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_a_load_is_not_undone_by_a_write_that_was_pending_before_it(transfer):
    write = jax.jit(lambda cache, value: cache.at[:].set(value), donate_argnums=0)
    caches = {"x": filled(9)}
    mover = mover_for(caches, transfer=transfer)
    caches = store(mover, caches, [0])
    for value in range(100):
        caches = {"x": write(caches["x"], np.uint32(value))}
        caches, loaded = mover.load(caches, LoadPlan(moves_of([5]), 0))
        loaded.wait()
        expected = [value] * BLOCKS
        expected[5] = 9
        assert np.asarray(caches["x"])[:, 0, 0].tolist() == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint16", "float32"])
def test_every_bit_pattern_is_kept(dtype):
    layout = CacheLayout([GroupSpec("full", FullAttention(), 4, (LeafSpec("x", (4, 4096), dtype),))])
    size = layout.leaves["x"].dtype.itemsize
    rng = np.random.default_rng(0)
    patterns = np.arange(BLOCKS * 4 * 4096, dtype=np.uint32).view(np.uint8)[: BLOCKS * 4 * 4096 * size].copy()
    if size == 4:
        patterns = rng.integers(0, 256, patterns.size, np.uint8)
    rows = patterns.view(layout.leaves["x"].dtype).reshape(BLOCKS, 4, 4096)
    caches = {"x": jax.device_put(rows)}
    mover = mover_for(caches, layout)
    caches = load(mover, store(mover, caches, list(range(4))), [4, 5, 6, 7])
    expected = rows.view(np.uint8).copy()
    expected[4:] = expected[:4]
    assert np.array_equal(np.asarray(caches["x"]).view(np.uint8), expected)


def test_a_cache_given_under_two_names_fails_the_load_and_changes_nothing(capfd):
    layout = CacheLayout(
        [GroupSpec("full", FullAttention(), 4, tuple(LeafSpec(name, (4, 16), np.uint32) for name in "xy"))]
    )
    caches = {"x": filled(1), "y": filled(2)}
    mover = mover_for(caches, layout)
    caches = store(mover, caches, [0])
    same = filled(3)
    _, loaded = mover.load({"x": same, "y": same}, LoadPlan(moves_of([1]), 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="donate the same buffer twice"):
        loaded.wait()
    capfd.readouterr()  # XLA logs it


def test_a_backend_that_does_not_use_donated_memory_again_takes_the_staged_way(monkeypatch, caplog):
    monkeypatch.setattr(inplace, "_renews_in_place", lambda _: False)
    with caplog.at_level("INFO", "kvjax"):
        mover = mover_for({"x": filled(1)})
    assert mover.transfer == "staged"
    assert "`transfer` is 'staged', as 'direct' was not taken: this backend does not use the memory" in caplog.text
    with pytest.raises(ValueError, match=r"`transfer` must not be 'direct' here: this backend does not use the memory"):
        mover_for({"x": filled(1)}, transfer="direct")


def test_an_array_that_outlives_its_donation_is_never_written(monkeypatch):
    caches = {"x": filled(4)}
    mover = mover_for(caches)
    caches = store(mover, caches, [0])
    caches = {"x": filled(5)}
    mover._transport._renew[0] = lambda given: given  # as if a backend ignored donation
    _, loaded = mover.load(caches, LoadPlan(moves_of([1]), 0))
    with pytest.raises(RuntimeError, match="left a donated cache as it was"):
        loaded.wait()
    assert (np.asarray(caches["x"]) == 5).all()


@pytest.mark.parametrize("transfer", ["", "fast", None, "Direct"])
def test_unknown_transfers_are_refused(transfer):
    with pytest.raises(ValueError, match=r"`transfer` must be one of 'auto', 'direct', 'staged', got "):
        mover_for({"x": filled(1)}, transfer=transfer)
