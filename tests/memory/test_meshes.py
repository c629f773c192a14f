"""Caches that are split over devices: the bytes are right, and the pool's do not depend on the split."""

import jax
import numpy as np
import pytest
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax import CacheLayout, FullAttention, GroupSpec, LeafSpec
from kvjax.memory.direct import DirectTransport
from kvjax.memory.registration import register
from kvjax.mover import Mover
from kvjax.packing import blocks_in_chunk, cut_into_units, unit_bytes
from kvjax.plan import GroupMoves, LoadPlan, StorePlan
from kvjax.tiers.pool_bytes import PoolBytes
from tests.support.meshes import LAYOUT, SPLIT, SPLITS, mesh_of, on_one
from tests.support.toy_engine import as_bytes, make_caches, stack

NUM_BLOCKS = 16
NUM_UNITS = 4000
CHUNKS = {"full": 2, "mla": 1, "local": 3}


def make(layout, split, *, transfer, staging_bytes=None, granule=8):
    shape, sharding_of = SPLITS[split]
    mesh = mesh_of(*shape)
    host = make_caches(layout, NUM_BLOCKS, seed=5)
    caches = {
        name: jax.device_put(np.asarray(host[name]), sharding_of(leaf, mesh)) for name, leaf in layout.leaves.items()
    }
    names = {group.name for group in layout.groups}
    chunking = kvjax.resolve_chunking(layout, blocks_per_chunk={k: v for k, v in CHUNKS.items() if k in names})
    units = cut_into_units(chunking, unit_bytes(chunking, granule))
    how = "direct" if transfer == "pinned" else transfer
    mover = Mover(
        chunking, units, caches, num_units=NUM_UNITS, staging_bytes=staging_bytes, transfer=how, show_progress=False
    )
    if transfer == "pinned":
        mover._transport = DirectTransport(
            mover.caches, chunking, units, num_units=NUM_UNITS, staging_units=400, show_progress=False
        )
    return mover, chunking, units, caches


def some_moves(chunking, units, rng):
    free = iter(rng.permutation(NUM_UNITS).tolist())
    moves = []
    for g in chunking.layout.cached:
        blocks = blocks_in_chunk(chunking, g)
        count = NUM_BLOCKS // 2 // blocks
        ids = rng.permutation(NUM_BLOCKS)[: count * blocks].astype(np.int32).reshape(count, blocks)
        held = np.array([[next(free) for _ in range(units.units_per_chunk[g])] for _ in range(count)], np.int32)
        moves.append(GroupMoves(g, count, np.arange(count, dtype=np.int32), ids, held))
    return tuple(moves)


CASES = [(split, transfer) for split in SPLITS for transfer in ("direct", "staged")]


@pytest.mark.parametrize(("split", "transfer"), CASES)
@pytest.mark.parametrize("staging", [None, 1200])
def test_chunks_come_back_bit_by_bit_and_nothing_else_changes(split, transfer, staging):
    check_round_trip(*make(LAYOUT, split, transfer=transfer, staging_bytes=staging))


@pytest.mark.parametrize("split", ["one device", "heads over 4", "heads over 8"])
def test_pinned_pools_take_what_is_held_once(split):
    check_round_trip(*make(SPLIT, split, transfer="pinned"))


@pytest.mark.parametrize("transfer", ["direct", "staged"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_meshes_of_explicit_axes_are_taken_within_their_context(shape, transfer):
    """sglang-jax lays its pools out so, also on one device: reshapes were refused there, and within its mesh of
    several devices the check of what the backend donates."""
    mesh = Mesh(mesh_of(*shape).devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    leaf = LeafSpec("k", (4, 8, 3), "bfloat16")
    layout = CacheLayout([GroupSpec("full", FullAttention(), 4, (leaf,))])
    chunking = kvjax.resolve_chunking(layout)
    units = cut_into_units(chunking, unit_bytes(chunking, 8))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("data", None, "model", None))
        (host,) = make_caches(layout, NUM_BLOCKS, seed=5).values()
        caches = {"k": jax.device_put(np.asarray(host), sharding)}
        mover = Mover(chunking, units, caches, num_units=NUM_UNITS, transfer=transfer, show_progress=False)
        check_round_trip(mover, chunking, units, caches)


def test_a_leaf_without_a_mesh_beside_one_of_explicit_axes_is_refused():
    mesh = Mesh(mesh_of(1).devices, ("data",), axis_types=(AxisType.Explicit,))
    layout = CacheLayout(
        [GroupSpec("full", FullAttention(), 4, (LeafSpec("k", (4,), "int8"), LeafSpec("v", (4,), "int8")))]
    )
    caches = make_caches(layout, NUM_BLOCKS, seed=5)
    caches["k"] = jax.device_put(caches["k"], NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(ValueError, match="leaf 'v' lies beside leaves of a mesh of `Explicit` axes and must have a"):
        register(layout, caches)


def check_round_trip(mover, chunking, units, caches):
    rng = np.random.default_rng(2)
    for _ in range(3):
        moves = some_moves(chunking, units, rng)
        before = {leaf: as_bytes(array) for leaf, array in caches.items()}
        shardings = {leaf: array.sharding for leaf, array in caches.items()}
        caches, transfer = mover.store(caches, StorePlan(moves, 0))
        transfer.wait()
        moved = []
        for move in moves:
            target = rng.permutation(NUM_BLOCKS)[: move.block_ids.size].astype(np.int32).reshape(move.block_ids.shape)
            target[rng.random(target.shape) < 0.3] = -1
            moved.append(GroupMoves(move.group_idx, move.num_chunks, move.chunk_idx, target, move.unit_ids))
        caches, transfer = mover.load(caches, LoadPlan(tuple(moved), 0))
        transfer.wait()
        expected = {leaf: rows.copy() for leaf, rows in before.items()}
        for source, target in zip(moves, moved, strict=True):
            for leaf in chunking.layout.groups[source.group_idx].leaves:
                axis = len(stack(leaf))
                rows, out = np.moveaxis(before[leaf.name], axis, 0), np.moveaxis(expected[leaf.name], axis, 0)
                for old, new in zip(source.block_ids.ravel(), target.block_ids.ravel(), strict=True):
                    if new >= 0:
                        out[new] = rows[old]
        for leaf, array in caches.items():
            assert np.array_equal(as_bytes(array), expected[leaf]), leaf
            assert array.sharding.is_equivalent_to(shardings[leaf], array.ndim)
            for shard in array.addressable_shards:  # replicas, too
                whole = expected[leaf].reshape(*array.shape[:-1], -1, array.dtype.itemsize)
                assert np.array_equal(as_bytes(shard.data).ravel(), whole[shard.index].ravel()), leaf
    mover.close()


@pytest.mark.parametrize(("split", "transfer"), CASES)
def test_the_bytes_of_a_chunk_do_not_depend_on_how_the_caches_are_split(split, transfer):
    """A rank of a tensor-parallel engine kept a latent twice, and rows of other bytes than one device has."""
    held = []
    for how, by in (("one device", "staged"), (split, transfer)):
        mover, chunking, units, caches = make(LAYOUT, how, transfer=by)
        moves = some_moves(chunking, units, np.random.default_rng(4))
        everything = np.arange(NUM_UNITS, dtype=np.int32)[:, None]
        mover._transport.memory.bytes[:] = 0xAB  # stale bytes, which padding must not keep
        mover.store(caches, StorePlan(moves, 0))[1].wait()
        held.append(mover.read_chunks(0, everything))
        sizes = sum(units.units_per_chunk[move.group_idx] * move.num_chunks for move in moves)
        assert (held[-1] != 0xAB).any(axis=1).sum() <= sizes
        mover.close()
    assert np.array_equal(*held)


@pytest.mark.parametrize("split", ["heads over 4", "heads over 8"])
def test_chunks_read_from_a_pinned_pool_have_the_one_format(split):
    held = []
    for how, transfer in (("one device", "staged"), (split, "pinned")):
        mover, chunking, units, caches = make(SPLIT, how, transfer=transfer, granule=32)
        moves = some_moves(chunking, units, np.random.default_rng(4))
        mover.store(caches, StorePlan(moves, 0))[1].wait()
        held.append([mover.read_chunks(move.group_idx, move.unit_ids) for move in moves])
        mover.close()
    for one, other in zip(*held, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("split", "transfer"), [*CASES, ("heads over 4", "pinned"), ("heads over 8", "pinned"), ("one device", "pinned")]
)
def test_what_one_split_wrote_to_a_tier_another_one_reads(split, transfer):
    """An entry has a chunk's bytes in the one format, replicated latents once: caches split over other devices take it
    as their own (a latent of 576 and an index of 132 had 389,120 bytes on one rank and 196,608 on two)."""
    layout = SPLIT if transfer == "pinned" else LAYOUT
    first, chunking, units, caches = make(layout, "one device", transfer="staged", granule=32)
    moves = some_moves(chunking, units, np.random.default_rng(4))
    first.store(caches, StorePlan(moves, 0))[1].wait()
    other, _, _, _ = make(layout, split, transfer=transfer, granule=32)
    pools = [PoolBytes(mover, units) for mover in (first, other)]
    for move in moves:
        for ids in move.unit_ids:
            entry = np.full(chunking.chunk_bytes[move.group_idx], 0xAB, np.uint8)
            pools[0].copy_out(move.group_idx, ids, entry)
            pools[1].copy_in(move.group_idx, ids, entry)
        assert np.array_equal(*(mover.read_chunks(move.group_idx, move.unit_ids) for mover in (first, other)))
    check = on_each_device(other, chunking, moves, split, layout)
    for name, array in caches.items():
        blocks = np.concatenate(
            [
                m.block_ids.ravel()
                for m in moves
                for one in chunking.layout.groups[m.group_idx].leaves
                if one.name == name
            ]
        )
        axis = len(stack(layout.leaves[name]))
        assert np.array_equal(*(np.take(as_bytes(one), blocks, axis) for one in (array, check[name]))), name
    first.close()
    other.close()


def on_each_device(mover, chunking, moves, split, layout):
    """Caches of a split, into which all moves were loaded."""
    shape, sharding_of = SPLITS[split]
    mesh = mesh_of(*shape)
    host = make_caches(layout, NUM_BLOCKS, seed=8)
    caches = {
        name: jax.device_put(np.asarray(host[name]), sharding_of(leaf, mesh)) for name, leaf in layout.leaves.items()
    }
    caches, transfer = mover.load(caches, LoadPlan(moves, 0))
    transfer.wait()
    return caches


@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_other_objects_of_the_same_sharding_compile_nothing(compilations, transfer):
    """A step that donates its caches returned another spec for the same placement, and every transfer recompiled."""
    mover, chunking, units, caches = make(LAYOUT, "heads over 4, all twice", transfer=transfer)
    moves = some_moves(chunking, units, np.random.default_rng(6))
    other = {}
    for name, array in caches.items():
        spec = [*array.sharding.spec, *[None] * (array.ndim - len(array.sharding.spec))]
        other[name] = jax.device_put(np.array(array), NamedSharding(mesh_of(2, 4), PartitionSpec(*spec)))
    compilations.clear()
    for given in (caches, other):
        given, stored = mover.store(given, StorePlan(moves, 0))
        stored.wait()
        given, loaded = mover.load(given, LoadPlan(moves, 0))
        loaded.wait()
    assert compilations == []
    mover.close()


def test_caches_on_other_devices_or_meshes_are_refused():
    layout = SPLIT
    mesh, other = mesh_of(4), jax.sharding.Mesh(np.array(jax.devices()[3::-1]), ("model",))
    leaves = list(layout.leaves.values())
    host = make_caches(layout, NUM_BLOCKS)

    def caches(*shardings):
        return {
            leaf.name: jax.device_put(np.asarray(host[leaf.name]), s) for leaf, s in zip(leaves, shardings, strict=True)
        }

    whole, turned = NamedSharding(mesh, PartitionSpec()), NamedSharding(other, PartitionSpec())
    with pytest.raises(
        ValueError, match=r"`caches` must lie on the same devices, got leaf 'heads\.k' on .*'heads\.v' on "
    ):
        kvjax.Offloader(layout, caches(whole, on_one(leaves[1], mesh), whole), host_bytes=10**5)
    with pytest.raises(
        ValueError, match=r"`caches` must lie on one mesh, got leaf 'heads\.k' with .*leaf 'heads\.stack'"
    ):
        kvjax.Offloader(layout, caches(whole, whole, turned), host_bytes=10**5)
    positional = GSPMDSharding.get_replicated(tuple(mesh.devices.flat))
    with pytest.raises(ValueError, match=r"'heads\.k' lies on several devices and must have a `NamedSharding`, got"):
        kvjax.Offloader(layout, caches(positional, whole, whole), host_bytes=10**5)
