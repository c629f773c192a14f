"""Host pages of sliding-window and recurrent pools beside those of full attention, in one memory."""

from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest

import kvjax
from kvjax.serving.sglang_jax import MixedHostPool, groups_of
from tests.support.sglang_jax_calls import LAYERS, HiCache, mesh_of, mha_pool, paged
from tests.support.toy_engine import as_bytes

P = jax.sharding.PartitionSpec
BF16 = ml_dtypes.bfloat16
WINDOW = 9
SLOTS = 6


def swa_pool(mesh):
    """A stand-in of `SWAKVPool`."""
    full, swa = mha_pool(mesh, BF16), mha_pool(mesh, BF16, seed=1, pages_per_rank=7)
    return SimpleNamespace(page_size=full.page_size, full_kv_pool=full, swa_kv_pool=swa)


def state_pool(mesh):
    """A stand-in of `RecurrentStatePool`: states of each layer, and a list of convolution states of each layer."""
    slots = SLOTS * mesh.shape["data"]
    states = paged(mesh, P("data", "tensor", None, None), (slots, 4, 8, 8), np.float32, LAYERS, seed=2)
    convolutions = paged(mesh, P("data", "tensor", None), (slots, 24, 3), BF16, LAYERS, seed=3)
    return SimpleNamespace(
        num_linear_recurrent_layers=LAYERS,
        recurrent_buffers=states,
        conv_buffers=[[array] for array in convolutions],
    )


@pytest.mark.parametrize(("mesh", "transfer"), [((1, 1), "staged"), ((2, 2), "direct")])
def test_random_moves_of_each_group_keep_every_byte_of_all(mesh, transfer):
    mesh = mesh_of(*mesh)
    device, state = swa_pool(mesh), state_pool(mesh)
    groups = groups_of(device, window_tokens=WINDOW, state_pool=state, tokens_per_state=16)
    pool = MixedHostPool(groups, host_bytes=200_000, transfer=transfer)
    assert list(pool) == ["full", "swa", "recurrent"]
    lists = [
        [device.full_kv_pool.kv_buffer],
        [device.swa_kv_pool.kv_buffer],
        [state.recurrent_buffers, *state.conv_buffers],
    ]
    callers = [
        HiCache(pool[name], arrays, num_ranks=mesh.shape["data"], seed=seed)
        for seed, (name, arrays) in enumerate(zip(pool, lists, strict=True))
    ]
    rng = np.random.default_rng(1)
    for _ in range(60):
        calls = callers[rng.integers(3)]
        what = rng.integers(4)
        if what == 0:
            calls.step()
        elif what == 1 or not calls.nodes:
            calls.backup(int(rng.integers(1, 4)))
        elif what == 2:
            calls.load()
        else:
            calls.evict()
        for each in callers:
            each.check()
    for each in callers:
        each.close()
    assert all(group.total_size() == group.available_size() for group in pool.values())
    pool.close()


def test_groups_share_the_memory():
    mesh = mesh_of(1, 1)
    device, state = swa_pool(mesh), state_pool(mesh)
    groups = groups_of(device, window_tokens=WINDOW, state_pool=state)
    page, _, states = (group.spec.block_bytes for group in groups)
    pool = MixedHostPool(groups, host_bytes=8 * max(page, states))
    before = {name: pool[name].available_size() for name in pool}
    assert before["full"] == before["swa"] > 8 * states // page - 2
    taken = pool["full"].alloc(before["full"])
    assert [pool[name].available_size() for name in pool] == [0, 0, 0]
    assert pool["recurrent"].alloc(1) is None
    pool["full"].free(taken[:1])
    assert states > page
    assert [pool[name].available_size() for name in pool] == [1, 1, 0]
    assert pool["recurrent"].alloc(1) is None
    pool["full"].free(taken[1:])
    assert {name: pool[name].available_size() for name in pool} == before


def test_a_hit_loads_only_the_window_pages_and_the_state_that_it_needs():
    """The law says which pages of each group a resumed request reads; the others are neither kept nor moved."""
    mesh = mesh_of(1, 1)
    device, state = swa_pool(mesh), state_pool(mesh)
    groups = groups_of(device, window_tokens=WINDOW, state_pool=state)
    pool = MixedHostPool(groups, host_bytes=200_000)
    tables = {"full": [3, 5, 1, 8, 2, 9], "swa": [-1, -1, 4, 2, 6, 1], "recurrent": [-1, -1, -1, 1, 3, -1]}
    stored = kvjax.store_set(pool.chunking, 20)
    assert {name: chunks.tolist() for name, chunks in stored.items()} == {
        "full": [0, 1, 2, 3, 4],
        "swa": [2, 3, 4],
        "recurrent": [3, 4],
    }
    host = {
        name: dict(zip(chunks.tolist(), pool[name].alloc(len(chunks)), strict=True)) for name, chunks in stored.items()
    }
    held = {group.spec.name: [as_bytes(np.asarray(a)) for a in group.arrays().values()] for group in groups}
    for name, pages in host.items():
        pool[name].copy_into([tables[name][place] for place in pages], list(pages.values()))
    hit = kvjax.longest_hit(pool.chunking, 24, {name: list(pages) for name, pages in host.items()})
    assert hit.hit_tokens == 20
    to = {"full": [7, 4, 6, 1, 3], "swa": [None, None, 5, 3, 2], "recurrent": [None] * 4 + [5]}
    for name, chunks in hit.load.items():
        pool[name].copy_to_device([host[name][n] for n in chunks], [to[name][n] for n in chunks])
        for rows in held[name]:
            source = rows.copy()
            for n in chunks:
                rows[to[name][n]] = source[tables[name][n]]
    assert {name: chunks.tolist() for name, chunks in hit.load.items()} == {
        "full": [0, 1, 2, 3, 4],
        "swa": [3, 4],
        "recurrent": [4],
    }
    for group in groups:
        for array, rows in zip(group.arrays().values(), held[group.spec.name], strict=True):
            assert np.array_equal(as_bytes(np.asarray(array)), rows)


def test_the_full_pool_of_a_hybrid_is_found():
    full = mha_pool(mesh_of(1, 1), BF16)
    (group,) = groups_of(SimpleNamespace(page_size=full.page_size, full_kv_pool=full))
    assert [id(array) for array in group.arrays().values()] == [id(array) for array in full.kv_buffer]


def test_a_window_is_given_for_a_pool_that_has_one_and_for_no_other():
    mesh = mesh_of(1, 1)
    with pytest.raises(ValueError, match="has a `swa_kv_pool`, got None"):
        groups_of(swa_pool(mesh))
    with pytest.raises(ValueError, match="has no `swa_kv_pool`, got 9"):
        groups_of(mha_pool(mesh, BF16), window_tokens=9)


def test_memory_for_less_than_a_page_of_each_group_is_refused():
    mesh = mesh_of(1, 1)
    groups = groups_of(mha_pool(mesh, BF16))
    with pytest.raises(ValueError, match="`host_bytes` must hold a page of each group, 2048 bytes, got 2047"):
        MixedHostPool(groups, host_bytes=2047)
    with pytest.raises(ValueError, match=r"`host_bytes` must hold a page of each group, .* bytes, got 2300"):
        MixedHostPool(groups_of(mha_pool(mesh, BF16), state_pool=state_pool(mesh)), host_bytes=2300)


def test_pages_of_all_groups_are_lost_with_the_memory(monkeypatch):
    mesh = mesh_of(1, 1)
    pool = MixedHostPool(groups_of(swa_pool(mesh), window_tokens=WINDOW), host_bytes=200_000)
    pages = {name: group.reserve() for name, group in pool.items()}
    for name, group in pool.items():
        group.copy_into([1], [pages[name]])
    monkeypatch.setattr(pool["full"]._shared, "_failed", True)
    monkeypatch.setattr(pool["full"]._shared._mover, "revive", lambda: True)
    pool["full"].copy_into([1], [pages["full"]])
    pool["full"].stage_load([pages["full"]])
    with pytest.raises(RuntimeError, match="must hold data to be loaded"):
        pool["swa"].stage_load([pages["swa"]])
