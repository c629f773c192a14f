"""The mover runs plans as they are: it is given its own here, without a ledger."""

import threading

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import CacheLayout, FullAttention, GroupSpec, LeafSpec
from kvjax.memory.direct import DirectTransport
from kvjax.mover import Mover
from kvjax.packing import blocks_in_chunk, cut_into_units, unit_bytes
from kvjax.plan import GroupMoves, LoadPlan, StorePlan
from tests.support import layouts
from tests.support.toy_engine import as_bytes, make_caches, stack

NUM_BLOCKS = 12
NUM_UNITS = 120


TRANSFERS = ["direct", "staged", "pinned"]


def make(layout, *, transfer="auto", staging_bytes=None, granule=4, **chunks):
    """A mover by transfer; `"pinned"` is the direct transport of accelerators, run on the CPU backend."""
    chunking = kvjax.resolve_chunking(layout, **chunks)
    units = cut_into_units(chunking, unit_bytes(chunking, granule))
    caches = make_caches(layout, NUM_BLOCKS, seed=3)
    mover = Mover(
        chunking,
        units,
        caches,
        num_units=NUM_UNITS,
        staging_bytes=staging_bytes,
        transfer="direct" if transfer == "pinned" else transfer,
        show_progress=False,
    )
    if transfer == "pinned":
        staging_units = (staging_bytes or 10**6) // units.unit_bytes
        mover._transport = DirectTransport(
            mover.caches, chunking, units, num_units=NUM_UNITS, staging_units=staging_units, show_progress=False
        )
    return mover, chunking, units, caches


def moves_of(chunking, units, rng, *, skip: float = 0.0) -> tuple[GroupMoves, ...]:
    """Random moves: some chunks of each group, distinct blocks and units, in any order."""
    free = iter(rng.permutation(NUM_UNITS).tolist())
    blocks_left = {g: iter(rng.permutation(NUM_BLOCKS).tolist()) for g in chunking.layout.cached}
    moves = []
    for g in chunking.layout.cached:
        blocks = blocks_in_chunk(chunking, g)
        count = int(rng.integers(0, min(NUM_BLOCKS // 2 // blocks, 20 // units.units_per_chunk[g]) + 1))
        ids = np.array([[next(blocks_left[g]) for _ in range(blocks)] for _ in range(count)], np.int32)
        ids = ids.reshape(count, blocks)
        ids[rng.random(ids.shape) < skip] = -1
        held = np.array([[next(free) for _ in range(units.units_per_chunk[g])] for _ in range(count)], np.int32)
        if count:
            moves.append(GroupMoves(g, count, np.arange(count, dtype=np.int32), ids, held.reshape(count, -1)))
    return tuple(moves)


@pytest.mark.parametrize("name", sorted(layouts.ALL))
@pytest.mark.parametrize("staging", [None, 700])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_what_is_stored_is_loaded_again_bit_by_bit_and_nothing_else_changes(name, staging, transfer):
    mover, chunking, units, caches = make(layouts.ALL[name], staging_bytes=staging, transfer=transfer)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        moves = moves_of(chunking, units, rng)
        before = {leaf: as_bytes(array) for leaf, array in caches.items()}
        caches, transfer = mover.store(caches, StorePlan(moves, 0))
        caches = {leaf: jax.device_put(np.asarray(array)[...].copy()) for leaf, array in caches.items()}
        transfer.wait()
        # Elsewhere: the same chunks come back into other blocks, some of them skipped.
        order = {g: rng.permutation(NUM_BLOCKS) for g in chunking.layout.cached}
        moved = []
        for move in moves:
            target = order[move.group_idx][move.block_ids].astype(np.int32)
            target[rng.random(target.shape) < 0.3] = -1
            moved.append(GroupMoves(move.group_idx, move.num_chunks, move.chunk_idx, target, move.unit_ids))
        caches, transfer = mover.load(caches, LoadPlan(tuple(moved), 0))
        transfer.wait()
        expected = {leaf: rows.copy() for leaf, rows in before.items()}
        for source, target in zip(moves, moved, strict=True):
            for leaf in chunking.layout.groups[source.group_idx].leaves:
                axis = len(stack(leaf))
                rows = np.moveaxis(before[leaf.name], axis, 0)
                out = np.moveaxis(expected[leaf.name], axis, 0)
                for old, new in zip(source.block_ids.ravel(), target.block_ids.ravel(), strict=True):
                    if new >= 0:
                        out[new] = rows[old]
        for leaf, array in caches.items():
            assert np.array_equal(as_bytes(array), expected[leaf]), leaf
    mover.close()


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_no_step_compiles_anything_after_warm_up(compilations, transfer):
    mover, _chunking, units, caches = make(layouts.GEMMA, staging_bytes=2000, transfer=transfer)
    rng = np.random.default_rng(0)
    compilations.clear()
    for count in [1, 2, 3, 5, 6, 7, 12]:
        blocks = rng.permutation(NUM_BLOCKS)[:count].astype(np.int32)[:, None]
        held = np.arange(count * units.units_per_chunk[1], dtype=np.int32).reshape(count, -1)
        moves = (GroupMoves(1, count, np.arange(count, dtype=np.int32), blocks, held),)
        caches, stored = mover.store(caches, StorePlan(moves, 0))
        stored.wait()
        caches, loaded = mover.load(caches, LoadPlan(moves, 0))
        loaded.wait()
    assert compilations == []
    mover.close()


def test_the_compilation_counter_counts(compilations):
    compilations.clear()
    jax.jit(lambda x: x * 3 + 1)(np.float32(2)).block_until_ready()
    assert len(compilations) >= 1


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 60))
def test_staging_never_exceeds_its_bound(staged_blocks):
    block = layouts.UNIFORM.groups[0].block_bytes
    mover, _, units, caches = make(layouts.UNIFORM, staging_bytes=staged_blocks * block, transfer="staged")
    ids = np.arange(NUM_BLOCKS, dtype=np.int32)[:, None]
    moves = (GroupMoves(0, NUM_BLOCKS, ids[:, 0], ids, ids[:, ::-1] * units.units_per_chunk[0]),)
    caches, stored = mover.store(caches, StorePlan(moves, 0))
    caches, loaded = mover.load(caches, LoadPlan(moves, 0))
    stored.wait()
    loaded.wait()
    assert 0 < mover.most_staged_bytes <= staged_blocks * block
    mover.close()


def test_ids_out_of_range_are_refused_before_anything_moves():
    mover, _chunking, _units, caches = make(layouts.UNIFORM)
    before = {leaf: as_bytes(array) for leaf, array in caches.items()}
    for blocks, held, text in [
        (NUM_BLOCKS, 0, r"`plan` must have block_ids from 0 to 11, got 12 to 12"),
        (-1, 0, r"`plan` must have block_ids from 0 to 11, got -1 to -1"),
        (0, NUM_UNITS, r"`plan` must have unit_ids from 0 to 119, got 120 to 120"),
        (0, -1, r"`plan` must have unit_ids from 0 to 119, got -1 to -1"),
    ]:
        ids = np.full((1, 1), blocks, np.int32)
        moves = (GroupMoves(0, 1, np.zeros(1, np.int32), ids, np.full((1, 1), held, np.int32)),)
        with pytest.raises(ValueError, match=text):
            mover.store(caches, StorePlan(moves, 0))
        if blocks != -1:
            with pytest.raises(ValueError, match=text.replace("block_ids from 0", "block_ids from -1")):
                mover.load(caches, LoadPlan(moves, 0))
    assert all(np.array_equal(as_bytes(caches[leaf]), before[leaf]) for leaf in caches)
    mover.close()


def test_donated_caches_are_refused():
    mover, _, _, caches = make(layouts.UNIFORM)
    jax.jit(lambda x: x + 1, donate_argnums=0)(caches["full.k"]).block_until_ready()
    with pytest.raises(ValueError, match=r"leaf 'full.k' must be a live array, got one that was donated or deleted"):
        mover.store(caches, StorePlan((), 0))
    mover.close()


def test_caches_unlike_the_registered_ones_are_refused():
    mover, _, _, caches = make(layouts.UNIFORM)
    for other, text in [
        (caches["full.k"].astype("float16"), r"leaf 'full.k' must be of bfloat16, got float16"),
        (caches["full.k"][:5], r"leaf 'full.k' must have shape \(12, 4, 3\) as registered, got \(5, 4, 3\)"),
        (jax.device_put(caches["full.k"], jax.devices()[1]), r"leaf 'full.k' must have the sharding it was registered"),
        (np.asarray(caches["full.k"]), r"leaf 'full.k' must be a JAX array, got ndarray"),
    ]:
        with pytest.raises(ValueError, match=text):
            mover.store(caches | {"full.k": other}, StorePlan((), 0))
    mover.close()


def test_a_staging_that_died_with_a_program_is_made_anew():
    mover, chunking, units, caches = make(layouts.GEMMA, transfer="pinned")
    moves = moves_of(chunking, units, np.random.default_rng(1))
    before = {leaf: as_bytes(array) for leaf, array in caches.items()}
    for staging in mover._transport._stagings:
        staging.delete()
    caches, transfer = mover.store(caches, StorePlan(moves, 0))
    transfer.wait()
    for staging in mover._transport._stagings:
        staging.delete()
    caches, transfer = mover.load(caches, LoadPlan(moves, 0))
    transfer.wait()
    assert all(np.array_equal(as_bytes(array), before[leaf]) for leaf, array in caches.items())
    mover.close()


def test_caches_in_host_memory_or_on_two_devices_are_refused():
    layout = CacheLayout([GroupSpec("a", FullAttention(), 2, (LeafSpec("x", (2, 3), np.float32),))])
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    caches = {"x": jax.device_put(np.zeros((4, 2, 3), np.float32), host)}
    with pytest.raises(ValueError, match=r"leaf 'x' must lie in device memory, got 'pinned_host'"):
        kvjax.Offloader(layout, caches, host_bytes=1000)


def test_a_group_without_leaves_cannot_be_moved():
    layout = CacheLayout([GroupSpec("a", FullAttention(), 2, block_bytes=64)])
    with pytest.raises(ValueError, match=r"group 'a' must list its leaves to be moved, got only `block_bytes`"):
        kvjax.Offloader(layout, {}, host_bytes=1000)


def test_moves_run_on_the_callers_thread_and_one_of_its_own():
    before = threading.active_count()
    mover, chunking, units, caches = make(layouts.GEMMA, transfer="staged")
    caches, transfer = mover.store(caches, StorePlan(moves_of(chunking, units, np.random.default_rng(1)), 0))
    transfer.wait()
    assert threading.active_count() <= before + 1
    mover.close()
    assert threading.active_count() == before


def test_a_move_that_fails_on_the_worker_is_told_by_wait(monkeypatch):
    mover, _chunking, _units, caches = make(layouts.UNIFORM, transfer="staged")

    def broken(*_):
        raise OSError("no such memory")

    monkeypatch.setattr(mover._transport.memory, "write", broken)
    ids = np.zeros((1, 1), np.int32)
    caches, transfer = mover.store(caches, StorePlan((GroupMoves(0, 1, ids[0], ids, ids),), 0))
    with pytest.raises(OSError, match="no such memory"):
        transfer.wait()
    assert transfer.done()
    mover.close()
