"""The host pool under the calls that sglang-jax makes of its own. None of this needs sglang-jax."""

from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest

from kvjax.serving.sglang_jax import HostPool
from tests.support.sglang_jax_calls import LAYERS, PAGES_PER_RANK, HiCache, mesh_of, mha_pool, paged

P = jax.sharding.PartitionSpec
BF16, F8, F8_E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def host_pool(device_pool, num_pages=6, **options):
    """A pool made as sglang-jax's `init_hicache` makes its own."""
    first = device_pool.kv_buffer[0]
    return HostPool(
        device_pool=device_pool,
        pool_size=num_pages,
        page_size=device_pool.page_size,
        layer_num=device_pool.layer_num,
        per_layer_shape=tuple(int(size) for size in first.shape[1:]),
        dtype=first.dtype,
        mesh=first.sharding.mesh,
        partition_spec=first.sharding.spec,
        **options,
    )


@pytest.fixture(scope="module")
def device_pool():
    return mha_pool(mesh_of(1, 1), BF16)


@pytest.fixture
def pool(device_pool):
    made = host_pool(device_pool)
    yield made
    made.check_integrity()


@pytest.mark.parametrize(
    ("mesh", "dtype", "transfer"),
    [
        ((1, 1), BF16, "direct"),
        ((1, 1), F8, "staged"),
        ((2, 1), np.float32, "direct"),
        ((2, 2), F8_E5M2, "direct"),
        ((2, 2), BF16, "staged"),
    ],
)
def test_random_backups_loads_and_evictions_keep_every_byte(mesh, dtype, transfer):
    device = mha_pool(mesh_of(*mesh), dtype)
    with jax.set_mesh(device.kv_buffer[0].sharding.mesh):
        pool = host_pool(device, transfer=transfer)
        calls = HiCache(pool, [device.kv_buffer], num_ranks=mesh[0], seed=sum(mesh))
        pool.precompile_transfers()
        calls.check()
        for _ in range(60):
            what = calls.rng.integers(4)
            if what == 0:
                calls.step()
            elif what == 1:
                assert calls.backup(int(calls.rng.integers(1, 4)))
            elif what == 2:
                calls.load()
            elif calls.nodes:
                calls.evict()
            calls.check()
            assert pool.total_size() - pool.available_size() == len(calls.host)
        calls.close()
        assert pool.total_size() == pool.available_size()


class UnderLock:
    """The books of a pool, which are for one thread at a time: whoever asks them must hold the pool's lock."""

    def __init__(self, pages, lock):
        self._pages, self._lock = pages, lock

    def __getattr__(self, name):
        assert name == "num_pages" or self._lock.locked(), name
        found = getattr(self._pages, name)
        if not callable(found):
            return found

        def call(*args):
            assert self._lock.locked(), name
            return found(*args)

        return call


def test_the_books_are_asked_under_the_lock_and_moves_are_awaited_without(device_pool, monkeypatch):
    """HiCache's controller flushes backups on a thread of its own, beside the scheduler's."""
    pool = host_pool(device_pool)
    lock, wait = pool._shared.lock, pool._shared.wait
    waits = []

    def without(transfer):
        waits.append(transfer)
        assert not lock.locked()
        wait(transfer)

    monkeypatch.setattr(pool, "_pages", UnderLock(pool._pages, lock))
    monkeypatch.setattr(pool._shared, "wait", without)
    pages = [*pool.alloc(3).tolist(), pool.reserve()]
    assert pool.total_size() - pool.available_size() == 4
    pool.inc_lock_ref(pages[0])
    pool.dec_lock_ref(pages[0])
    pool.copy_into([1, 2, 3, 4], pages)
    pool.copy_to_device(pages, [5, 6, 7, 8])
    pool.precompile_transfers()
    pool.free(pages[1:])
    pool.release(pages[0])
    pool.check_integrity()
    assert len(waits) == 2


def test_latents_and_indexer_keys_are_one_page():
    """`MLATokenToKVPool` has arrays of four dimensions, and keys of its indexer in a list of their own, which a
    restored page needs as much as the latents."""
    mesh = mesh_of(2, 1)
    latents = paged(mesh, P("data", None, None, None), (2 * PAGES_PER_RANK, 2, 2, 24), BF16, LAYERS)
    keys = paged(mesh, P("data", None, None, None), (2 * PAGES_PER_RANK, 2, 2, 8), BF16, 1, seed=1)
    device = SimpleNamespace(page_size=4, layer_num=LAYERS, kv_buffer=latents, indexer_key_buffer=keys)
    calls = HiCache(host_pool(device), [latents, keys], num_ranks=2)
    for _ in range(5):
        assert calls.backup(2)
        calls.step()
        calls.load()
        calls.check()
    calls.close()


def test_a_full_pool_gives_nothing_until_pages_are_freed(pool):
    assert pool.total_size() == pool.available_size() == 6
    taken = pool.alloc(4)
    assert len(set(taken.tolist())) == 4
    assert pool.alloc(3) is None
    assert pool.available_size() == 2
    last = [pool.reserve(), pool.reserve()]
    assert pool.reserve() is None
    assert {*taken.tolist(), *last} == set(range(6))
    pool.free(taken)
    pool.release(last[0])
    assert pool.available_size() == 5
    assert pool.alloc(5) is not None


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_alloc_takes_a_positive_number(pool, number):
    with pytest.raises(ValueError, match="`need_pages` must be a positive int"):
        pool.alloc(number)


def test_pages_are_freed_once_and_all_or_none(pool):
    first, second = pool.alloc(2).tolist()
    pool.free([first, first])
    assert pool.available_size() == 5
    with pytest.raises(RuntimeError, match=f"host page {first} must be allocated, it is free"):
        pool.free([second, first])
    with pytest.raises(ValueError, match="host page ids must be from 0 to 5, got 6"):
        pool.free([second, 6])
    assert pool.available_size() == 5
    pool.release(second)
    with pytest.raises(RuntimeError, match="must be allocated"):
        pool.release(second)


def test_a_locked_page_is_not_freed(pool):
    page, other = pool.alloc(2).tolist()
    pool.inc_lock_ref(page)
    pool.inc_lock_ref(page)
    pool.dec_lock_ref(page)
    with pytest.raises(RuntimeError, match=f"host page {page} must not be freed while it has locks: 1"):
        pool.free([other, page])
    assert pool.available_size() == 4
    pool.dec_lock_ref(page)
    with pytest.raises(RuntimeError, match="must have a lock to be unlocked"):
        pool.dec_lock_ref(page)
    pool.free([other, page])
    with pytest.raises(RuntimeError, match="must be allocated"):
        pool.inc_lock_ref(page)
    with pytest.raises(ValueError, match="from 0 to 5, got 99"):
        pool.inc_lock_ref(99)


def test_a_locked_page_is_backed_up_and_loaded(pool):
    page = pool.reserve()
    pool.inc_lock_ref(page)
    pool.copy_into([1], [page])
    pool.copy_to_device([page], [2])
    pool.dec_lock_ref(page)
    pool.release(page)


@pytest.mark.parametrize("page", [-1, PAGES_PER_RANK])
def test_device_pages_out_of_range_are_refused(pool, page):
    host = pool.reserve()
    for call in (lambda: pool.stage_backup([page], [host]), lambda: pool.flush_load([host], [page])):
        with pytest.raises(ValueError, match=f"`device_indices` must be from 0 to {PAGES_PER_RANK - 1}, got {page}"):
            call()
    pool.release(host)


def test_device_pages_are_those_that_all_arrays_have():
    mesh = mesh_of(1, 1)
    long, short = (paged(mesh, P("data", None, None, None), (pages, 4, 2, 8), BF16, 1) for pages in (8, 6))
    pool = host_pool(SimpleNamespace(page_size=4, layer_num=1, kv_buffer=long, indexer_key_buffer=short))
    page = pool.reserve()
    pool.copy_into([5], [page])
    with pytest.raises(ValueError, match="`device_indices` must be from 0 to 5, got 6"):
        pool.copy_into([6], [page])


def test_ids_must_be_distinct_and_as_many(pool):
    first, second = pool.alloc(2).tolist()
    with pytest.raises(ValueError, match="must be as many, got 2 and 1"):
        pool.stage_backup([1, 2], [first])
    with pytest.raises(ValueError, match="must name each host page once"):
        pool.stage_backup([1, 2], [first, first])
    pool.copy_into([1, 2], [first, second])
    pool.stage_load([first, second])
    with pytest.raises(ValueError, match="must name each device page once"):
        pool.flush_load([first, second], [3, 3])
    pool.flush_load([first, second], [3, 4])
    pool.free([first, second])


@pytest.mark.parametrize("ids", [[1.7], ["1"], [True], [[1]], 3])
def test_ids_that_are_no_integers_are_refused(pool, ids):
    page = pool.reserve()
    for call in (pool.free, pool.stage_load, pool.flush_backup):
        with pytest.raises(ValueError, match="host page ids must be a 1-d sequence of ints"):
            call(ids)
    with pytest.raises(ValueError, match="`device_indices` must be a 1-d sequence of ints"):
        pool.stage_backup(ids, [page])
    for call in (pool.inc_lock_ref, pool.dec_lock_ref):
        with pytest.raises(ValueError, match="`buffer_id` must be a non-negative int"):
            call(ids[0] if isinstance(ids, list) else None)
    pool.release(page)


def test_more_memory_than_there_is_is_refused_at_once(device_pool):
    with pytest.raises(MemoryError, match="needs more memory than the"):
        host_pool(device_pool, num_pages=10**12)


def test_nothing_is_done_for_no_pages(pool):
    pool.stage_backup([], [])
    pool.flush_backup([])
    pool.stage_load([])
    pool.flush_load([], [])
    pool.free([])


def test_a_transfer_is_staged_before_it_is_flushed(pool):
    page = pool.reserve()
    with pytest.raises(RuntimeError, match=f"`stage_backup` must be called for host page {page}"):
        pool.flush_backup([page])
    with pytest.raises(RuntimeError, match="must hold data to be loaded"):
        pool.stage_load([page])
    with pytest.raises(RuntimeError, match="`stage_load` must be called"):
        pool.flush_load([page], [1])
    pool.stage_backup([1], [page])
    with pytest.raises(RuntimeError, match="must hold data to be loaded"):
        pool.stage_load([page])
    pool.flush_backup([page])
    pool.stage_load([page])
    pool.flush_load([page], [2])
    with pytest.raises(RuntimeError, match="`stage_load` must be called"):
        pool.flush_load([page], [2])
    pool.release(page)


def test_free_pages_are_no_place_for_a_transfer(pool):
    for call in (lambda: pool.stage_backup([1], [0]), lambda: pool.stage_load([0])):
        with pytest.raises(RuntimeError, match="host page 0 must be allocated"):
            call()


def test_what_was_staged_ends_with_the_page(pool):
    page = pool.reserve()
    pool.stage_backup([1], [page])
    pool.release(page)
    with pytest.raises(RuntimeError, match="`stage_backup` must be called"):
        pool.flush_backup([page])
    page = pool.reserve()
    pool.copy_into([1], [page])
    pool.stage_load([page])
    pool.release(page)
    again = pool.reserve()
    assert again == page
    with pytest.raises(RuntimeError, match="`stage_load` must be called"):
        pool.flush_load([page], [2])
    with pytest.raises(RuntimeError, match="must hold data to be loaded"):
        pool.stage_load([page])
    pool.release(page)


def test_a_page_written_anew_is_not_loaded_as_it_was_staged(pool):
    page = pool.reserve()
    pool.copy_into([1], [page])
    pool.stage_load([page])
    pool.stage_backup([2], [page])
    with pytest.raises(RuntimeError, match="`stage_load` must be called"):
        pool.flush_load([page], [3])
    with pytest.raises(RuntimeError, match="must hold data to be loaded"):
        pool.stage_load([page])
    pool.flush_backup([page])
    pool.release(page)


@pytest.mark.parametrize("when", ["during", "after"])
def test_a_page_that_changes_hands_during_its_flush_stays_empty(device_pool, monkeypatch, when):
    """The worker waited for a backup while the page was freed, and given to another node then or later: that node's
    page must not count as filled with the first one's data."""
    pool = host_pool(device_pool, num_pages=1)
    page = pool.reserve()
    pool.stage_backup([1], [page])
    wait = pool._shared.wait

    def change_hands(transfer):
        wait(transfer)
        pool.release(page)
        if when == "during":
            assert pool.reserve() == page

    with monkeypatch.context() as patch:
        patch.setattr(pool._shared, "wait", change_hands)
        pool.flush_backup([page])
    pool.check_integrity()
    if when == "after":
        assert pool.reserve() == page
    with pytest.raises(RuntimeError, match="must hold data to be loaded"):
        pool.stage_load([page])
    pool.release(page)


def test_a_page_written_anew_during_its_flush_is_not_filled_by_it(pool, monkeypatch):
    """The worker waited for a backup while another one to the same page was started, which is still under way."""
    page = pool.reserve()
    pool.stage_backup([1], [page])
    wait = pool._shared.wait

    def stage_again(transfer):
        wait(transfer)
        pool.stage_backup([2], [page])

    with monkeypatch.context() as patch:
        patch.setattr(pool._shared, "wait", stage_again)
        pool.flush_backup([page])
    with pytest.raises(RuntimeError, match="must hold data to be loaded"):
        pool.stage_load([page])
    pool.flush_backup([page])
    pool.copy_to_device([page], [3])
    pool.release(page)


def test_a_backup_that_is_refused_leaves_a_page_as_it_was(pool, device_pool, monkeypatch):
    page = pool.reserve()
    pool.copy_into([1], [page])
    pool.stage_load([page])
    with monkeypatch.context() as patch:
        patch.setattr(device_pool, "kv_buffer", [array[:-1] for array in device_pool.kv_buffer])
        with pytest.raises(ValueError, match="`caches`"):
            pool.stage_backup([2], [page])
    pool.flush_load([page], [3])
    pool.release(page)


class Failed:
    """A transfer that failed on its way, or of which nothing was started."""

    def wait(self):
        raise OSError("the link is down")

    def moved(self, plan):
        return {moves.group_idx: np.zeros(moves.num_chunks, bool) for moves in plan.moves}


def test_a_backup_that_fails_is_told_by_its_flush_and_leaves_the_page_empty(pool, monkeypatch):
    page, kept = pool.alloc(2).tolist()
    pool.copy_into([1], [kept])
    with monkeypatch.context() as patch:
        patch.setattr(pool._shared._mover, "store", lambda caches, plan: (caches, Failed()))
        pool.stage_backup([1], [page])
    with pytest.raises(OSError, match="the link is down"):
        pool.flush_backup([page])
    with pytest.raises(RuntimeError, match="must hold data to be loaded"):
        pool.stage_load([page])
    pool.copy_into([1], [page])  # the pool's memory is as it was
    pool.copy_to_device([page, kept], [2, 3])
    pool.free([page, kept])


def test_a_flush_waits_for_all_that_was_staged(pool, monkeypatch):
    first, second = pool.alloc(2).tolist()
    pool.stage_backup([1], [first])
    with monkeypatch.context() as patch:
        patch.setattr(pool._shared._mover, "store", lambda caches, plan: (caches, Failed()))
        pool.stage_backup([2], [second])
    with pytest.raises(OSError, match="the link is down"):
        pool.flush_backup([first, second])
    for page in (first, second):
        with pytest.raises(RuntimeError, match="must hold data to be loaded"):
            pool.stage_load([page])
    pool.free([first, second])


def test_pages_lost_with_the_memory_hold_no_data_any_more(pool, monkeypatch):
    """On accelerators a program that dies takes the pinned memory, which was donated to it, along."""
    page, lost, unflushed = pool.alloc(3).tolist()
    pool.copy_into([1], [lost])
    pool.stage_load([lost])
    pool.stage_backup([1], [unflushed])
    with monkeypatch.context() as patch:
        patch.setattr(pool._shared._mover, "store", lambda caches, plan: (caches, Failed()))
        pool.stage_backup([1], [page])
        with pytest.raises(OSError, match="the link is down"):
            pool.flush_backup([page])
    monkeypatch.setattr(pool._shared._mover, "revive", lambda: True)
    pool.copy_into([1], [page])
    pool.copy_to_device([page], [2])
    pool.flush_backup([unflushed])
    with pytest.raises(RuntimeError, match=f"host page {lost} must hold data"):
        pool.flush_load([lost], [3])
    for each in (lost, unflushed):
        with pytest.raises(RuntimeError, match=f"host page {each} must hold data"):
            pool.stage_load([each])
    pool.free([page, lost, unflushed])


def test_a_load_that_cannot_be_started_raises(pool, monkeypatch):
    page = pool.reserve()
    pool.copy_into([1], [page])
    with monkeypatch.context() as patch:
        patch.setattr(pool._shared._mover, "load", lambda caches, plan: (caches, Failed()))
        with pytest.raises(OSError, match="the link is down"):
            pool.copy_to_device([page], [2])
    pool.copy_to_device([page], [2])
    pool.release(page)


@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_precompile_takes_no_page_and_nothing_is_compiled_later(device_pool, compilations, transfer):
    pool = host_pool(device_pool, transfer=transfer)
    compilations.clear()
    pool.precompile_transfers(max_pages=2)
    assert pool.available_size() == pool.total_size()
    pages = pool.alloc(6).tolist()
    pool.precompile_transfers()
    for count in range(1, 7):
        pool.copy_into(range(1, count + 1), pages[:count])
        pool.copy_to_device(pages[:count], range(1, count + 1))
    assert not compilations


def test_arrays_are_not_handed_over(pool):
    with pytest.raises(NotImplementedError, match="use `copy_into`"):
        pool.copy_from_device([], 0)


def test_a_pool_that_does_not_fit_the_device_pool_is_refused(device_pool):
    with pytest.raises(ValueError, match="`pool_size` must be a positive int, got 0"):
        host_pool(device_pool, num_pages=0)
    with pytest.raises(ValueError, match="`layer_num` must be the number of arrays in `kv_buffer`, 2, got 3"):
        host_pool(SimpleNamespace(page_size=4, layer_num=3, kv_buffer=device_pool.kv_buffer))
    with pytest.raises(
        ValueError, match="must keep a list of arrays in `kv_buffer` for the group 'full', got a Simple"
    ):
        HostPool(SimpleNamespace(), 4, 4, 2, (), BF16, None, None)
    with pytest.raises(ValueError, match="`transfer` must be one of 'auto', 'direct', 'staged', got 'dma'"):
        host_pool(device_pool, transfer="dma")
