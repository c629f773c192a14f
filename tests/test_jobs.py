"""Jobs: deadlines, cancellation, waiting, late ends, and stores that depend on loads."""

import asyncio
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

import kvjax
from kvjax.mover import Part, Transfer
from tests.support import layouts
from tests.support.toy_engine import ToyEngine


class Held:
    """An offloader whose transfers end when the test says so."""

    def __init__(self, monkeypatch, layout=layouts.UNIFORM, **options):
        self.engine = ToyEngine(layout, 64, host_bytes=2**20, **options)
        self.offloader = self.engine.offloader
        self.released = threading.Event()
        self.error: Exception | None = None
        done, wait = Part.done, Part.wait
        monkeypatch.setattr(Part, "done", lambda part: self.released.is_set() and done(part))

        def held_wait(part):
            self.released.wait()
            wait(part)
            part.error = self.error or part.error

        monkeypatch.setattr(Part, "wait", held_wait)
        self.released.set()

    def serve(self, request_id, tokens):
        self.engine.start(request_id, tokens)
        self.engine.compute(request_id, len(tokens), step=len(tokens))
        self.engine.stop(request_id)
        self.offloader.wait()

    def load(self, request_id, tokens, first_block=0, **more):
        self.offloader.lookup(request_id, np.array(tokens))
        tables = {"full": first_block + np.arange(-(-len(tokens) // 4))}
        self.engine.caches, job = self.offloader.load(self.engine.caches, request_id, tables, **more)
        return job

    def store(self, request_id, num_tokens, first_block=0, **more):
        tables = {"full": first_block + np.arange(-(-num_tokens // 4))}
        self.engine.caches, job = self.offloader.store(self.engine.caches, request_id, tables, num_tokens, **more)
        return job

    def close(self):
        self.released.set()
        self.offloader.wait()
        for request_id in list(self.offloader.ledger._requests):
            self.offloader.finish(request_id)
        self.offloader.check_integrity()
        assert self.offloader.stats().given_up_jobs == 0
        assert self.offloader.ledger.pool.open_pins() == set()
        assert self.offloader.ledger.pool.open_reservations() == set()
        self.offloader.close()


@pytest.fixture
def held(monkeypatch):
    made = Held(monkeypatch)
    yield made
    made.released.set()
    made.close()


PROMPT = list(range(40))


class TestDeadlines:
    def test_a_load_that_is_late_is_a_miss_for_its_request_and_its_chunks_stay(self, held):
        held.serve("a", PROMPT)
        held.released.clear()
        job = held.load("b", [*PROMPT, 1], deadline_s=0.02)
        result = held.offloader.wait(job)
        assert (result.ok, result.valid_tokens, result.error) == (False, 0, "not done by its deadline")
        assert held.offloader.stats().given_up_jobs == 1
        assert len(held.offloader.ledger.pool.open_pins()) == 1  # what may still be read stays where it is
        held.offloader.finish("b")
        held.released.set()
        assert held.offloader.lookup("c", np.array([*PROMPT, 1])).hit_tokens == 40
        assert (held.offloader.stats().late_jobs, held.offloader.stats().failed_jobs) == (1, 0)
        held.offloader.finish("c")

    def test_a_store_that_is_late_is_never_found_and_gives_its_units_back_when_it_ends(self, held):
        held.offloader.lookup("a", np.array(PROMPT))
        held.released.clear()
        job = held.store("a", 40, deadline_s=0.01)
        assert held.offloader.wait(job).ok is False
        assert held.offloader.stats().bytes_held > 0  # it may still be written to
        held.released.set()
        assert held.offloader.poll() == []
        assert held.offloader.stats().bytes_held == 0
        job = held.store("a", 40)
        assert held.offloader.wait(job).ok
        held.offloader.finish("a")
        assert held.offloader.lookup("b", np.array([*PROMPT, 1])).hit_tokens == 40

    def test_the_offloaders_deadline_is_that_of_jobs_that_name_none(self, monkeypatch):
        held = Held(monkeypatch, deadline_s=0.01)
        held.offloader.lookup("a", np.array(PROMPT))
        held.released.clear()
        assert held.offloader.wait(held.store("a", 40)).error == "not done by its deadline"
        held.close()

    def test_polling_sees_what_is_late(self, held):
        held.offloader.lookup("a", np.array(PROMPT))
        held.released.clear()
        held.store("a", 40, deadline_s=0.0)
        assert [(result.ok, result.error) for result in held.offloader.poll()] == [(False, "not done by its deadline")]
        assert held.offloader.poll() == []

    @pytest.mark.parametrize("wrong", [-1, "1", True, float("nan"), float("inf"), 10**400])
    def test_wrong_values_are_refused_and_nothing_is_done(self, held, wrong):
        held.offloader.lookup("a", np.array(PROMPT))
        with pytest.raises(ValueError, match="`deadline_s` must be a number of seconds"):
            held.store("a", 40, deadline_s=wrong)
        with pytest.raises(ValueError, match="`timeout_s` must be a number of seconds"):
            held.offloader.wait(timeout_s=wrong)
        assert held.offloader.stats().open_jobs == 0


class TestCancellation:
    def test_a_load_can_be_cancelled_while_it_is_under_way(self, held):
        held.serve("a", PROMPT)
        held.released.clear()
        job = held.load("b", [*PROMPT, 1])
        assert held.offloader.cancel(job)
        assert (job.result.ok, job.result.valid_tokens, job.result.error) == (False, 0, "cancelled")
        assert not held.offloader.cancel(job)
        assert held.offloader.wait(job) is job.result
        held.offloader.finish("b")
        held.released.set()
        held.offloader.poll()
        assert held.offloader.ledger.pool.open_pins() == set()
        assert held.offloader.stats().cancelled_jobs == 1

    def test_a_store_can_be_cancelled_and_is_asked_for_again(self, held):
        held.offloader.lookup("a", np.array(PROMPT))
        held.released.clear()
        job = held.store("a", 40)
        assert held.offloader.cancel(job)
        held.released.set()
        held.offloader.poll()
        assert held.offloader.stats().resident_chunks == 0
        assert held.offloader.wait(held.store("a", 40)).num_chunks == 10

    def test_a_job_that_ended_cannot_be_cancelled(self, held):
        held.offloader.lookup("a", np.array(PROMPT))
        job = held.store("a", 40)
        assert not held.offloader.cancel(job)
        assert held.offloader.wait(job).ok
        assert held.offloader.stats().cancelled_jobs == 0

    def test_jobs_of_others_are_refused(self, held, monkeypatch):
        for wrong in (None, 3, "job"):
            with pytest.raises(ValueError, match="`job` must be one of this offloader"):
                held.offloader.cancel(wrong)


class TestGivenUpLoads:
    def test_its_blocks_are_offered_to_nobody(self, held):
        """Its request was told that nothing is valid, and has given the blocks to others."""
        held.serve("a", PROMPT)
        held.released.clear()
        job = held.load("b", [*PROMPT, 1])
        held.offloader.cancel(job)
        found = held.offloader.lookup("c", np.array([*PROMPT, 2]))
        assert (found.hit_tokens, found.arriving) == (40, {})
        shared = held.load("c", [*PROMPT, 2], share=True)
        assert shared.work.plan.num_chunks == 10

    def test_a_load_that_shares_it_fails_with_it_only_if_it_fails(self, held):
        held.serve("a", PROMPT)
        held.released.clear()
        first = held.load("b", [*PROMPT, 1])
        second = held.load("c", [*PROMPT, 2], share=True)
        assert second.work.plan.num_chunks == 0
        held.offloader.cancel(first)
        assert held.offloader.poll() != []
        assert second.ended is None
        held.released.set()
        assert held.offloader.wait(second).valid_tokens == 40

    def test_what_is_computed_anew_after_it_is_stored_though_it_hangs(self, held):
        held.serve("a", PROMPT)
        held.released.clear()
        job = held.load("b", [*PROMPT, *range(100, 112)])
        held.offloader.cancel(job)
        work = held.offloader.prepare_store("b", {"full": np.arange(13)}, 52)
        assert held.offloader.ledger.may_complete(work)
        held.offloader.ledger.complete_store(work, ok=False)


class TestStoresAfterLoads:
    def tokens_after(self, held, error):
        """A store prepared while the load is under way whose tokens it was computed from; then both end."""
        held.serve("a", PROMPT)
        held.released.clear()
        longer = [*PROMPT, *range(100, 112)]
        load = held.load("b", longer)
        store = held.store("b", 52)
        held.error = error
        held.released.set()
        assert held.offloader.wait(store).ok is (error is None)
        assert load.result is not None
        held.error = None
        held.offloader.finish("b")
        return held.offloader.lookup("c", np.array([*longer, 1])).hit_tokens, store

    def test_what_was_computed_after_a_load_that_failed_is_never_found(self, held):
        hit, store = self.tokens_after(held, RuntimeError("lost"))
        assert hit == 0
        assert not store.result.ok

    def test_it_is_found_if_the_load_went_well(self, held):
        hit, _ = self.tokens_after(held, None)
        assert hit == 52

    @pytest.mark.parametrize("tells", ["wait", "poll", "result"])
    def test_what_is_stored_before_the_failure_was_told_is_not_kept(self, held, tells):
        """The load is seen to fail by a call for something else, and the engine, which does not know, goes on."""
        held.serve("a", PROMPT)
        longer = [*PROMPT, *range(100, 112)]
        held.error = RuntimeError("lost")
        load = held.load("b", longer)
        held.offloader.stats()
        held.error = None
        store = held.store("b", 52)
        assert held.offloader.stats().open_jobs == 0
        assert store.ended is not None
        assert (store.ended.ok, held.offloader.stats().resident_chunks) == (False, 0)
        assert store.ended.error == "a load that its tokens were computed from failed"
        # Now it knows, computes all of it anew and stores it.
        {"wait": held.offloader.wait, "poll": lambda _: held.offloader.poll(), "result": lambda job: job.result}[tells](
            load
        )
        assert held.offloader.wait(held.store("b", 52)).ok
        assert held.offloader.lookup("c", np.array([*longer, 1])).hit_tokens == 52

    def test_the_store_alone_says_why(self, monkeypatch):
        """Only the load fails: the store's own transfer goes well, and it fails all the same."""
        held = Held(monkeypatch)
        held.serve("a", PROMPT)
        offloader, caches = held.offloader, held.engine.caches
        offloader.lookup("b", np.array([*PROMPT, *range(4)]))
        tables = {"full": np.arange(11)}
        work = offloader.prepare_load("b", tables)
        future: Future[None] = Future()
        load = offloader.issued("b", "load", work, Transfer([Part(0, 0, 10, future)]))
        caches, store = offloader.store(caches, "b", tables, 44)
        assert offloader.poll() == []  # the store's transfer is done, and its job waits for the load
        future.set_exception(RuntimeError("lost"))
        assert offloader.wait(store).error == "a load that its tokens were computed from failed"
        assert load.result.error == "RuntimeError: lost"
        assert offloader.stats().failed_jobs == 2
        held.close()


class TestWaiting:
    def test_a_wait_with_a_limit_ends_and_the_job_goes_on(self, held):
        held.offloader.lookup("a", np.array(PROMPT))
        held.released.clear()
        job = held.store("a", 40)
        with pytest.raises(TimeoutError, match=f"job {job.job_id} did not end in time"):
            held.offloader.wait(job, timeout_s=0.02)
        assert job.result is None
        held.released.set()
        assert held.offloader.wait(job, timeout_s=5).ok

    def test_an_event_loop_goes_on_while_jobs_are_awaited(self, held):
        held.serve("a", PROMPT)
        held.released.clear()
        job = held.load("b", [*PROMPT, 1])
        seen = []

        async def others():
            for n in range(3):
                seen.append(n)
                await asyncio.sleep(0.001)
            held.released.set()

        async def main():
            result, _ = await asyncio.gather(held.offloader.wait_async(job), others())
            return result

        result = asyncio.run(main())
        assert (result.ok, result.valid_tokens) == (True, 40)
        assert seen == [0, 1, 2]

    def test_a_task_that_is_cancelled_leaves_the_job_as_it_is(self, held):
        held.offloader.lookup("a", np.array(PROMPT))
        held.released.clear()
        job = held.store("a", 40)

        async def main():
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(held.offloader.wait_async(job), 0.02)
            with pytest.raises(TimeoutError):
                await held.offloader.wait_async(timeout_s=0.01)
            held.released.set()
            return await held.offloader.wait_async()

        assert [result.job_id for result in asyncio.run(main())] == [job.job_id]

    def test_other_threads_may_poll_while_one_waits(self, held):
        held.offloader.lookup("a", np.array(PROMPT))
        held.released.clear()
        job = held.store("a", 40)
        results = []
        waiter = threading.Thread(target=lambda: results.append(held.offloader.wait(job)))
        waiter.start()
        time.sleep(0.02)
        assert held.offloader.stats().open_jobs == 1  # the waiting thread does not keep the lock
        held.released.set()
        waiter.join(10)
        assert [result.ok for result in results] == [True]

    def test_a_close_that_would_wait_for_ever_says_so_and_can_be_repeated(self, monkeypatch):
        held = Held(monkeypatch)
        held.offloader.lookup("a", np.array(PROMPT))
        held.released.clear()
        held.store("a", 40)
        with pytest.raises(TimeoutError, match=r"1 jobs did not end in 0\.02 s"):
            held.offloader.close(timeout_s=0.02)
        with pytest.raises(ValueError, match="must not be used after `close`"):
            held.offloader.poll()
        held.released.set()
        held.offloader.close(timeout_s=5)
        held.offloader.close()
        assert held.offloader.stats().open_jobs == 0


class TestInvalidation:
    def test_chunks_invalidated_between_lookup_and_load_are_not_restored(self, held):
        held.serve("a", PROMPT)
        held.offloader.lookup("b", np.array([*PROMPT, 1]))
        assert held.offloader.invalidate() == 10
        tables = {"full": np.arange(11)}
        before = np.asarray(held.engine.caches["full.k"]).view(np.uint8).copy()
        held.engine.caches, job = held.offloader.load(held.engine.caches, "b", tables)
        result = held.offloader.wait(job)
        assert (result.ok, result.valid_tokens, result.num_chunks) == (False, 0, 0)
        assert result.error == "its chunks were invalidated after the lookup"
        assert np.array_equal(np.asarray(held.engine.caches["full.k"]).view(np.uint8), before)

    def test_a_request_from_before_an_update_of_the_weights_stores_nothing_any_more(self, held):
        """What it computed was computed with the old weights, or with both."""
        held.offloader.lookup("a", np.array(PROMPT))
        held.offloader.update_model("revision 2")
        job = held.store("a", 40, checkpoint=True)
        assert (job.result.ok, job.result.num_chunks) == (True, 0)
        assert held.offloader.stats().outdated_stores == 1
        held.offloader.lookup("a", np.array(PROMPT))
        assert held.offloader.wait(held.store("a", 40)).num_chunks == 10
        assert held.offloader.lookup("b", np.array([*PROMPT, 1])).hit_tokens == 40

    def test_a_store_in_flight_when_the_weights_change_is_never_found(self, held):
        held.offloader.lookup("a", np.array(PROMPT))
        held.released.clear()
        held.store("a", 40)
        held.offloader.update_model("revision 2")
        held.released.set()
        held.offloader.wait()
        assert held.offloader.stats().stale_chunks == 10
        for model in ("revision 2", ""):  # nor if the old weights come back
            held.offloader.update_model(model)
            assert held.offloader.lookup("b", np.array([*PROMPT, 1])).hit_tokens == 0

    def test_one_tenants_chunks_go_and_the_others_stay(self, held):
        for salt in ("x", "y"):
            held.offloader.lookup(salt, np.array(PROMPT), salt=salt)
            held.offloader.wait(held.store(salt, 40))
            held.offloader.finish(salt)
        assert held.offloader.invalidate(held.offloader.namespace("x")) == 10
        assert held.offloader.invalidate(held.offloader.namespace("never seen")) == 0
        hits = [held.offloader.lookup("z", np.array([*PROMPT, 1]), salt=salt).hit_tokens for salt in ("x", "y")]
        assert hits == [0, 40]

    def test_namespaces_that_come_and_go_leave_nothing_behind(self, held):
        for n in range(300):
            held.offloader.lookup("a", np.array(PROMPT), salt=f"image {n}")
            held.offloader.wait(held.store("a", 40))
            held.offloader.finish("a")
            held.offloader.invalidate(held.offloader.namespace(f"image {n}"))
        held.offloader.poll()
        assert held.offloader.ledger.pool.namespaces.in_use <= 1


class TestEvents:
    def test_events_tell_exactly_what_a_lookup_finds(self, monkeypatch):
        events: list[kvjax.KVEvent] = []
        held = Held(monkeypatch, layout=layouts.GEMMA, on_event=events.append)
        for n in range(12):
            held.serve("a", [n, *PROMPT, *range(n)])
        held.offloader.invalidate(held.offloader.namespace())
        held.serve("a", PROMPT)
        resident: set[bytes] = set()
        for event in events:
            assert event.tier == "host"
            assert event.group in ("full", "local")
            for key, (start, stop) in zip(event.keys, event.token_spans, strict=True):
                assert stop - start == {"full": 8, "local": 4}[event.group]
                (resident.add if event.kind == "stored" else resident.remove)(key)
        assert resident == set(held.offloader.ledger.pool.held_keys())
        assert {event.reason for event in events} == {"", "invalidated"}
        held.close()

    def test_a_callback_may_call_the_offloader_and_may_raise(self, monkeypatch, caplog):
        calls = []

        def callback(event):
            calls.append(held.offloader.stats().resident_chunks)
            raise RuntimeError("mine")

        held = Held(monkeypatch, on_event=callback)
        held.serve("a", PROMPT)
        held.serve("b", [*PROMPT, 1, 2, 3, 4])
        assert calls == [10, 11]
        assert len([record for record in caplog.records if "callback" in record.getMessage()]) == 1
        held.close()

    def test_what_is_no_callback_is_refused(self):
        with pytest.raises(ValueError, match="callable"):
            ToyEngine(layouts.UNIFORM, 8, host_bytes=2**20, on_event=3)
