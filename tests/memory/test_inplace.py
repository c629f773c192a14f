"""The CPU backend's transport writes arrays in place that nobody else may see change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from kvjax import CacheLayout, FullAttention, GroupSpec, LeafSpec
from kvjax.memory import inplace
from kvjax.memory.spans import address_of
from kvjax.mover import Mover
from kvjax.packing import cut_into_units, unit_bytes
from kvjax.plan import GroupMoves, LoadPlan, StorePlan
from tests.support.meshes import mesh_of

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


def test_a_cache_given_under_two_names_is_refused_before_anything_is_donated():
    layout = CacheLayout(
        [GroupSpec("full", FullAttention(), 4, tuple(LeafSpec(name, (4, 16), np.uint32) for name in "xy"))]
    )
    same = filled(3)
    text = r"`caches` leaves 'x' and 'y' must be different arrays, got one under both names"
    with pytest.raises(ValueError, match=text):
        mover_for({"x": same, "y": same}, layout)
    mover = mover_for({"x": filled(1), "y": filled(2)}, layout)
    for move in (lambda c: mover.store(c, StorePlan((), 0)), lambda c: mover.load(c, LoadPlan(moves_of([1]), 0))):
        with pytest.raises(ValueError, match=text):
            move({"x": same, "y": same})
    assert not same.is_deleted()


def test_caches_that_do_not_lie_in_c_order_are_refused():
    order = Layout(major_to_minor=(2, 1, 0))
    turned = jax.device_put(filled(1), Format(order, jax.sharding.SingleDeviceSharding(jax.devices()[0])))
    with pytest.raises(ValueError, match=r"`caches` leaf 'x' must lie in memory in C order, got layout"):
        mover_for({"x": turned})


@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_a_block_may_be_one_element(transfer):
    layout = CacheLayout([GroupSpec("full", FullAttention(), 4, (LeafSpec("x", (), np.uint32),))])
    caches = {"x": jnp.arange(BLOCKS, dtype=jnp.uint32)}
    mover = mover_for(caches, layout, transfer=transfer)
    caches = load(mover, store(mover, caches, [1, 2]), [6, 7])
    assert np.asarray(caches["x"]).tolist() == [0, 1, 2, 3, 4, 5, 1, 2]


@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_leaves_of_a_group_may_have_other_numbers_of_blocks(transfer):
    layout = CacheLayout(
        [GroupSpec("full", FullAttention(), 4, tuple(LeafSpec(name, (4,), np.uint32) for name in "xy"))]
    )
    caches = {name: jnp.arange(4 * n, dtype=jnp.uint32).reshape(n, 4) for name, n in (("x", 8), ("y", 11))}
    mover = mover_for(caches, layout, transfer=transfer)
    caches = load(mover, store(mover, caches, [1, 2]), [6, 7])
    assert np.asarray(caches["x"])[:, 0].tolist() == [0, 4, 8, 12, 16, 20, 4, 8]
    assert np.asarray(caches["y"])[:, 0].tolist() == [0, 4, 8, 12, 16, 20, 4, 8, 32, 36, 40]


@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_meshes_may_have_explicit_axes(transfer):
    """`jax.make_mesh` gives them by default."""
    sharding = NamedSharding(jax.make_mesh((8,), ("m",)), PartitionSpec(None, None, "m"))
    caches = {"x": jax.device_put(np.arange(BLOCKS * 64, dtype=np.uint32).reshape(BLOCKS, 4, 16), sharding)}
    before = np.array(caches["x"])
    mover = mover_for(caches, transfer=transfer)
    caches = load(mover, store(mover, caches, [0, 1]), [6, 7])
    before[6:] = before[:2]
    assert np.array_equal(np.array(caches["x"]), before)
    assert caches["x"].sharding == sharding


def test_a_backend_that_does_not_use_donated_memory_again_takes_the_staged_way(monkeypatch, caplog):
    monkeypatch.setattr(inplace, "_renews_in_place", lambda _: False)
    with caplog.at_level("INFO", "kvjax"):
        mover = mover_for({"x": filled(1)})
    assert mover.transfer == "staged"
    assert (
        "`transfer` is 'staged', as 'direct' was not taken: this backend, with JAX's options as they are,"
        in caplog.text
    )
    with pytest.raises(
        ValueError, match=r"`transfer` must not be 'direct' here: this backend, with JAX's options as they are,"
    ):
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


@pytest.mark.parametrize("spec", [(), ("model",), (None, None, "model")])
@pytest.mark.parametrize("held", ["whole", "first piece", "last piece"])
def test_views_of_a_piece_never_change_and_keep_nothing_from_being_loaded(spec, held):
    """XLA hands over the pieces that nobody looks at, and copies the others."""
    sharding = NamedSharding(mesh_of(8), PartitionSpec(*spec))
    caches = {"x": jax.device_put(np.full((BLOCKS, 4, 16), 7, np.uint32), sharding)}
    mover = mover_for(caches)
    caches = store(mover, caches, [0])
    caches = {"x": jax.jit(lambda x: x + 1, out_shardings=sharding)(caches["x"])}
    pieces = [shard.data for shard in caches["x"].addressable_shards]
    views = {"whole": caches["x"], "first piece": pieces[0], "last piece": pieces[-1]}
    view = np.asarray(views[held])
    del pieces, views
    caches = load(mover, caches, [2])
    assert (view == 8).all()
    assert np.array(caches["x"])[:, 0, 0].tolist() == [8, 8, 7, 8, 8, 8, 8, 8]


def test_pieces_that_the_caller_holds_are_donated_with_their_array():
    sharding = NamedSharding(mesh_of(8), PartitionSpec("model"))
    caches = {"x": jax.jit(lambda: jnp.ones((BLOCKS, 4, 16), jnp.uint32), out_shardings=sharding)()}
    mover = mover_for(caches)
    caches = store(mover, caches, [0])
    addresses = [shard.data.unsafe_buffer_pointer() for shard in caches["x"].addressable_shards]
    caches = load(mover, caches, [2])
    assert [shard.data.unsafe_buffer_pointer() for shard in caches["x"].addressable_shards] == addresses
