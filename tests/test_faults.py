"""Every kind of fault, at each step of each kind of job: who is told what, what survives, and that nothing leaks.

A prompt of 8 chunks goes in 4 pieces of 2. The engine compares every byte that is restored with what its prefix
wrote, and every other byte with what it was (`tests.support.serving_engine`).
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.memory import inplace
from tests.benchmarks.soak import LAYOUT as MIXED
from tests.support import layouts
from tests.support.faults import Fault, FaultsAt, FaultyTransport, inject
from tests.support.served import check_nothing_is_left, end, restored, serve
from tests.support.serving_engine import Served, ServingEngine

PROMPT = np.arange(100, 132)
ASKED = np.append(PROMPT, [7, 8, 9, 10, 11, 12])  # its hit is the whole prompt
CHUNKS = 8
TOKENS_PER_CHUNK = 4
BLOCK_BYTES = layouts.UNIFORM.groups[0].block_bytes
STEPS = [0, 2, 3]
LATE_S = 0.02  # a deadline that what hangs does not meet
BOTH = ["direct", "staged"]


def made(layout, transfer, **options):
    engine = ServingEngine(layout, 64, host_bytes=64 * 1024, transfer=transfer, checkpoint_tokens=None, **options)
    return engine, inject(engine.offloader)


@pytest.fixture(scope="module", params=BOTH)
def parts(request):
    engine, faulty = made(layouts.UNIFORM, request.param)
    yield engine, faulty
    engine.offloader.close()


@pytest.fixture(scope="module", params=BOTH)
def mixed_parts(request):
    engine, faulty = made(MIXED, request.param, blocks_per_chunk={"full": 2})
    yield engine, faulty
    engine.offloader.close()


@pytest.fixture
def held(parts):
    """An engine whose host pool holds the prompt. Afterwards nothing is left."""
    engine, faulty = parts
    serve(engine, "first", PROMPT)
    yield engine, faulty
    check_nothing_is_left(engine, faulty)


@pytest.fixture
def empty(parts):
    yield parts
    check_nothing_is_left(*parts)


@pytest.fixture
def mixed(mixed_parts):
    yield mixed_parts
    check_nothing_is_left(*mixed_parts)


def good_chunks(fault: Fault, step: int) -> list[int]:
    """The chunks that are moved all the same when a piece goes wrong."""
    first = 2 * step
    return {
        Fault.RAISE: [*range(first)],
        Fault.FAIL: [*range(first), *range(first + 2, CHUNKS)],
        Fault.HANG: [],
        Fault.LATE: [*range(CHUNKS)],
        Fault.SHORT: [*range(first + 1)],
    }[fault]


def prefix(chunks: list[int]) -> int:
    """Tokens of the longest prefix that chunks hold."""
    return TOKENS_PER_CHUNK * next(i for i in range(CHUNKS + 1) if i not in chunks)


ERRORS = {
    Fault.RAISE: "InjectedError: a {} could not be issued",
    Fault.FAIL: "InjectedError: a piece failed on its way",
    Fault.HANG: "not done by its deadline",
    Fault.LATE: "",
    Fault.SHORT: "RuntimeError: only {} of 8 chunks of group 0 were moved",
}


def error(fault: Fault, operation: str, step: int) -> str:
    return ERRORS[fault].format(2 * step + 1 if fault is Fault.SHORT else operation)


class Before:
    """What the statistics have gained since."""

    def __init__(self, engine: ServingEngine):
        self._offloader = engine.offloader
        self._before = engine.offloader.stats()

    def __getattr__(self, name: str) -> int:
        return getattr(self._offloader.stats(), name) - getattr(self._before, name)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", list(Fault))
class TestLoads:
    def test_the_good_prefix_is_told_and_what_was_not_restored_is_a_miss(self, held, fault, step):
        engine, faulty = held
        faulty.choose, gained = FaultsAt({("load", step): fault}), Before(engine)
        request = Served("a", ASKED)
        assert engine.look_up(request).hit_tokens == 32
        job = engine.load(request, deadline_s=LATE_S if fault is Fault.HANG else None)
        result = engine.offloader.wait(job)
        good = good_chunks(fault, step)
        assert (result.ok, result.error) == (fault is Fault.LATE, error(fault, "load", step))
        assert result.valid_tokens == prefix(good)
        engine.loaded(request, result)
        assert (gained.chunks_loaded, gained.bytes_loaded) == (len(good), len(good) * BLOCK_BYTES)
        assert gained.failed_jobs == (fault in (Fault.RAISE, Fault.FAIL, Fault.SHORT))
        assert gained.late_jobs == (fault is Fault.HANG)
        engine.offloader.check_integrity()
        end(engine, request)
        faulty.release()  # what hung is there: it is no miss
        survive = range(CHUNKS) if fault is Fault.HANG else good
        assert restored(engine, PROMPT) == prefix([*survive])
        assert engine.offloader.stats().resident_chunks == len(survive)

    def test_the_request_goes_on_from_there_and_stores_what_was_lost_again(self, held, fault, step):
        engine, faulty = held
        faulty.choose = FaultsAt({("load", step): fault})
        request = Served("a", ASKED)
        engine.look_up(request)
        job = engine.load(request, deadline_s=LATE_S if fault is Fault.HANG else None)
        engine.loaded(request, engine.offloader.wait(job))
        faulty.release()
        engine.compute(request, len(ASKED))
        assert engine.offloader.wait(engine.store(request)).ok
        end(engine, request)
        assert restored(engine, ASKED) == 36


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", list(Fault))
class TestStores:
    def test_what_was_written_is_found_and_the_next_store_brings_the_rest(self, empty, fault, step):
        engine, faulty = empty
        faulty.choose, gained = FaultsAt({("store", step): fault}), Before(engine)
        request = Served("a", PROMPT)
        engine.look_up(request)
        engine.loaded(request, engine.offloader.wait(engine.load(request)))
        engine.compute(request, len(PROMPT))
        job = engine.store(request, deadline_s=LATE_S if fault is Fault.HANG else None)
        result = engine.offloader.wait(job)
        good = good_chunks(fault, step)
        assert (result.ok, result.error) == (fault is Fault.LATE, error(fault, "store", step))
        assert (gained.chunks_stored, gained.bytes_stored) == (len(good), len(good) * BLOCK_BYTES)
        assert gained.failed_jobs == (fault in (Fault.RAISE, Fault.FAIL, Fault.SHORT))
        assert gained.late_jobs == (fault is Fault.HANG)
        engine.offloader.check_integrity()
        assert engine.offloader.stats().resident_chunks == len(good)
        assert restored(engine, PROMPT) == prefix(good)
        faulty.release()
        assert restored(engine, PROMPT) == prefix(good), "a store that was late is never found"
        assert engine.offloader.wait(engine.store(request)).ok
        end(engine, request)
        assert restored(engine, PROMPT) == 32
        assert gained.chunks_stored == CHUNKS

    def test_the_blocks_may_be_overwritten_at_once(self, empty, fault, step):
        """The request gives its blocks back, which are filled with garbage, before the store has ended."""
        engine, faulty = empty
        faulty.choose = FaultsAt({("store", step): fault})
        request = Served("a", PROMPT)
        engine.look_up(request)
        engine.loaded(request, engine.offloader.wait(engine.load(request)))
        engine.compute(request, len(PROMPT))
        engine.store(request)
        end(engine, request)
        engine.check_caches()
        faulty.release()
        engine.offloader.wait()
        good = range(CHUNKS) if fault is Fault.HANG else good_chunks(fault, step)
        assert restored(engine, PROMPT) == prefix([*good])


# What raises, or falls short, is known at once unless a piece before it is still under way.
SHARED = [(fault, step) for fault in Fault for step in (1, 2, 3)]


@pytest.mark.parametrize(("fault", "step"), SHARED)
class TestSharedLoads:
    def both(self, engine: ServingEngine, faulty: FaultyTransport, fault: Fault, step: int, **options):
        faulty.num_polls = 20
        faulty.choose = FaultsAt({("load", 0): Fault.LATE, ("load", step): fault})
        requests = [Served("a", ASKED), Served("b", np.append(PROMPT, [1, 2]))]
        jobs = []
        for request in requests:
            engine.look_up(request)
            jobs.append(engine.load(request, share=True, **options))
        assert jobs[1].work.plan.num_chunks == 0
        return requests, jobs

    def test_both_requests_are_told_the_same(self, held, fault, step):
        engine, faulty = held
        gained = Before(engine)
        options = {"deadline_s": LATE_S} if fault is Fault.HANG else {}
        requests, jobs = self.both(engine, faulty, fault, step, **options)
        good = good_chunks(fault, step)
        for request, job in zip(requests, jobs, strict=True):
            result = engine.offloader.wait(job)
            assert (result.ok, result.valid_tokens) == (fault is Fault.LATE, prefix(good))
            engine.loaded(request, result)
        engine.check_blocks(requests)
        assert gained.shared_loads == 1
        assert gained.chunks_loaded == len(good)
        for request in requests:
            end(engine, request)
        faulty.release()
        assert restored(engine, PROMPT) == (32 if fault is Fault.HANG else prefix(good))

    def test_the_first_request_may_end_meanwhile(self, held, fault, step):
        engine, faulty = held
        requests, jobs = self.both(engine, faulty, fault, step)
        end(engine, requests[0])
        faulty.release()
        result = engine.offloader.wait(jobs[1])
        good = range(CHUNKS) if fault is Fault.HANG else good_chunks(fault, step)
        assert result.valid_tokens == prefix([*good])
        engine.loaded(requests[1], result)
        end(engine, requests[1])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", list(Fault))
class TestStoresAfterLoads:
    @pytest.mark.parametrize("seen", ["after the store", "before the store"])
    def test_what_was_computed_on_top_of_a_load_is_kept_only_if_that_went_well(self, held, fault, step, seen):
        """The engine goes on as soon as `load` returns, perhaps with garbage."""
        engine, faulty = held
        faulty.num_polls = 20 if seen == "after the store" else 0
        faulty.choose = FaultsAt({("load", step): fault})
        tokens = np.append(PROMPT, np.arange(500, 517))
        request = Served("a", tokens)
        assert engine.look_up(request).hit_tokens == 32
        options = {"deadline_s": LATE_S} if fault is Fault.HANG else {}
        load = engine.load(request, **options)
        if seen == "before the store":
            engine.offloader.see_ended()
        engine.compute(request, len(tokens))
        store = engine.store(request, frees=False, **options)
        stored, loaded = engine.offloader.wait(store), engine.offloader.wait(load)
        assert loaded.ok == stored.ok == (fault is Fault.LATE)
        assert stored.num_chunks > 0
        end(engine, request)
        faulty.release()
        good = range(CHUNKS) if fault is Fault.HANG else good_chunks(fault, step)
        assert restored(engine, tokens) == (48 if fault is Fault.LATE else prefix([*good]))


class TestMixedGroups:
    """Full, sliding window and recurrent groups with different chunks: what survives is whatever it is, and exact."""

    @pytest.mark.parametrize("fault", list(Fault))
    @pytest.mark.parametrize("operation", ["store", "load"])
    def test_no_fault_at_any_piece_brings_a_wrong_byte(self, mixed, operation, fault):
        engine, faulty = mixed
        tokens = np.arange(72)
        for step in range(8):
            name = f"{operation} {step}"
            faulty.choose = FaultsAt({(operation, step): fault})
            if operation == "load":
                serve(engine, "first", tokens)
            request = Served(name, np.append(tokens, step))
            hit = engine.look_up(request).hit_tokens
            job = engine.load(request, deadline_s=LATE_S if fault is Fault.HANG else None)
            result = engine.offloader.wait(job)
            assert result.valid_tokens is not None
            assert result.valid_tokens == hit if result.ok else result.valid_tokens < hit
            engine.loaded(request, result)
            while request.written < len(request.tokens):
                engine.compute(request, len(request.tokens))
            engine.offloader.wait(engine.store(request, deadline_s=LATE_S if fault is Fault.HANG else None))
            faulty.release()
            end(engine, request)
            engine.offloader.check_integrity()
            restored(engine, tokens)
            engine.offloader.invalidate()
        assert faulty.counts[operation, fault] > 1


class TestReleases:
    def test_what_was_looked_up_and_never_loaded_is_released_at_the_end(self, held):
        """E7: the chunks of a hit are pinned; the request ends without a load, and all of them can be evicted."""
        engine, _ = held
        request = Served("a", ASKED)
        assert engine.look_up(request).hit_tokens == 32
        pool = engine.offloader.ledger.pool
        assert [len(pins.slots) for pins in pool.open_pins()] == [CHUNKS]
        end(engine, request)
        assert pool.open_pins() == set()

    def test_nothing_is_released_twice(self, held):
        """E8: an error at the second call, and nothing changes."""
        engine, faulty = held
        offloader = engine.offloader
        faulty.choose = FaultsAt({("load", 1): Fault.FAIL})
        request = Served("a", ASKED)
        engine.look_up(request)
        job = engine.load(request)
        engine.loaded(request, offloader.wait(job))
        end(engine, request)
        with pytest.raises(ValueError, match="must be one that was looked up and not finished, got 'a'"):
            offloader.finish("a")
        with pytest.raises(ValueError, match="must be one that was prepared here and not completed yet"):
            offloader.ledger.complete_load(job.work, ok=False)
        with pytest.raises(ValueError, match="must be ones that were taken here and not released yet"):
            offloader.ledger.pool.unpin(job.work.pins)
        offloader.check_integrity()
        assert not offloader.ledger.pool.open_pins()

    def test_a_request_that_is_preempted_and_admitted_again_ignores_its_old_jobs(self, held):
        """G4: with a load and a store that hang. The load's result concerns nobody any more; what was computed from it
        is kept once it has gone well all the same."""
        engine, faulty = held
        offloader = engine.offloader
        faulty.choose = FaultsAt({("load", 0): Fault.HANG, ("store", 0): Fault.HANG})
        tokens = np.append(PROMPT, np.arange(600, 620))
        request = Served("a", tokens)
        engine.look_up(request)
        load = engine.load(request)
        engine.compute(request, len(tokens))
        store = engine.store(request, checkpoint=True, frees=False)
        assert offloader.cancel(load)
        engine.drop_blocks(request)
        engine.look_up(request)
        again = engine.load(request)
        result = offloader.wait(again)
        assert result.ok
        engine.loaded(request, result)
        engine.compute(request, len(tokens))
        assert offloader.stats().given_up_jobs == 1
        faulty.release()
        assert offloader.wait(store).ok
        offloader.wait(engine.store(request))
        end(engine, request)
        assert restored(engine, tokens) == 52

    def test_counters_tell_real_moves_once(self, empty):
        """K2: 3 chunks stored, 2 loaded, 50 decode steps and a preemption: 3, 2 and one hit of 8 tokens."""
        engine, _ = empty
        gained = Before(engine)
        serve(engine, "first", PROMPT[:12])
        request = Served("a", PROMPT[:12])
        limits = {"max_store_tokens": 12, "max_load_tokens": 8}
        assert engine.look_up(request, **limits).hit_tokens == 8
        engine.loaded(request, engine.offloader.wait(engine.load(request)))
        for token in range(50):
            engine.compute(request, len(request.tokens))
            engine.offloader.wait(engine.store(request))
            engine.accept(request, np.array([token]))
        assert (gained.chunks_stored, gained.bytes_stored) == (3, 3 * BLOCK_BYTES)
        assert (gained.chunks_loaded, gained.bytes_loaded) == (2, 2 * BLOCK_BYTES)
        assert engine.look_up(request, **limits).hit_tokens == 8
        assert (gained.lookups, gained.hit_tokens) == (2, 8)
        end(engine, request)


class ReadsLate:
    """A transport that breaks the rule: a store reads the blocks when it is carried out, not when it is called."""

    def __init__(self, inner, engine: ServingEngine, worker: ThreadPoolExecutor):
        self._inner, self._engine, self._worker = inner, engine, worker

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def store(self, caches, moves):
        def late() -> None:
            for _, under_way in self._inner.store(self._engine.caches, moves):
                if under_way is not None:
                    under_way.result()

        yield moves.num_chunks, self._worker.submit(late)


class TestOrder:
    def stored_while_overwritten(self, engine: ServingEngine, worker: ThreadPoolExecutor) -> int:
        """A request stores and gives its blocks back, which are overwritten in place while the worker is held back.
        What then comes back is compared with what was there when the store was called."""
        held_back, started = threading.Event(), threading.Event()
        worker.submit(lambda: (started.set(), held_back.wait(60)))
        assert started.wait(60)
        request = Served("a", PROMPT)
        engine.look_up(request)
        engine.loaded(request, engine.offloader.wait(engine.load(request)))
        engine.compute(request, len(PROMPT))
        job = engine.store(request)
        end(engine, request)
        engine.check_caches()  # the blocks are overwritten by now
        assert engine.offloader.poll() == [], "the store has not ended"
        held_back.set()
        assert engine.offloader.wait(job).ok
        return restored(engine, PROMPT)

    def test_blocks_that_are_overwritten_while_the_worker_is_held_back_are_stored_as_they_were(self):
        """G1: order comes from the arrays that a store was given, not from luck."""
        engine = ServingEngine(layouts.UNIFORM, 64, host_bytes=64 * 1024, transfer="staged")
        transport: Any = engine.offloader.mover._transport
        assert self.stored_while_overwritten(engine, transport._worker) == 32
        engine.offloader.close()

    @pytest.mark.parametrize("transfer", BOTH)
    def test_a_transport_that_reads_late_would_be_noticed(self, transfer):
        engine = ServingEngine(layouts.UNIFORM, 64, host_bytes=64 * 1024, transfer=transfer)
        mover: Any = engine.offloader.mover
        with ThreadPoolExecutor(1) as worker:
            mover._transport = ReadsLate(mover._transport, engine, worker)
            with pytest.raises(AssertionError, match="a load wrote what its tokens never wrote"):
                self.stored_while_overwritten(engine, worker)
        engine.offloader.close()

    @pytest.mark.parametrize("transfer", BOTH)
    def test_a_store_right_after_an_update_stores_what_the_update_wrote(self, transfer):
        """G2: 150 rounds of an update in place and a store at once."""
        engine = ServingEngine(layouts.UNIFORM, 64, host_bytes=64 * 1024, transfer=transfer)
        for turn in range(150):
            tokens = np.arange(turn, turn + 8) * 7
            request = Served("a", tokens)
            engine.look_up(request)
            engine.load(request)
            engine.compute(request, 8)
            engine.store(request)
            end(engine, request)
            engine.offloader.wait()
            assert restored(engine, tokens) == 8
        engine.offloader.close()

    @pytest.mark.parametrize("transfer", BOTH)
    def test_a_store_waits_for_an_update_that_is_still_being_computed(self, transfer):
        assert self.stored_after_a_slow_update(transfer) == {NEW}

    def test_a_direct_store_that_did_not_wait_would_be_noticed(self, monkeypatch):
        monkeypatch.setattr(inplace.jax, "block_until_ready", lambda arrays: arrays)
        assert OLD in self.stored_after_a_slow_update("direct")

    def stored_after_a_slow_update(self, transfer: str) -> set[int]:
        """The words in the host pool after a store that is called while the update of its cache goes on."""
        caches = {"kv": jnp.full((16, 4, 8), OLD, jnp.uint32)}
        slowly(jnp.array(caches["kv"])).block_until_ready()
        with kvjax.Offloader(WORDS, caches, host_bytes=2**16, transfer=transfer, show_progress=False) as offloader:
            offloader.lookup("a", range(17))
            caches, job = offloader.store({"kv": slowly(caches["kv"])}, "a", {"full": range(5)}, 17)
            assert offloader.wait(job).ok
            pool = offloader.ledger.pool
            units = pool.units(pool.find(pool.held_keys()))
            return set(offloader.mover.read_chunks(0, units).view(np.uint32).ravel().tolist())


OLD, NEW = 1, 7
WORDS = kvjax.CacheLayout([kvjax.GroupSpec("full", kvjax.FullAttention(), 4, [kvjax.LeafSpec("kv", (4, 8), "uint32")])])


@partial(jax.jit, donate_argnums=0)
def slowly(words: jax.Array) -> jax.Array:
    """Overwrites an array with `NEW`, in place, after some 0.1 s of computing."""
    busy = jax.lax.fori_loop(0, 150, lambda _, x: jnp.sin(x) + 1.0, jnp.full((200_000,), 1.5))
    return words * 0 + NEW + (busy.sum() < 0).astype(words.dtype)
