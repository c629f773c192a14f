"""One thread loads and stores, others do everything else: every result is told once, events tell the truth, and
nothing locks up. All restored bytes are compared."""

import asyncio
import faulthandler
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from kvjax.jobs import Job, JobResult
from kvjax.observe.events import KVEvent
from tests.support import layouts
from tests.support.faults import Fault, FaultsAt, RandomFaults, inject
from tests.support.served import check_nothing_is_left, end, restored, serve
from tests.support.serving_engine import Served, ServingEngine

LOCKED_UP_S = 120  # after which the threads' stacks are printed and the process ends
BOTH = ["direct", "staged"]
PROMPT = np.arange(32)


@pytest.fixture(autouse=True)
def switches_often():
    """Threads take turns a thousand times more often than usual; a dead-lock ends the process and shows where."""
    faulthandler.dump_traceback_later(LOCKED_UP_S, exit=True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)
    faulthandler.cancel_dump_traceback_later()


class Others:
    """Threads that do things again and again until they are stopped. What one of them raises is raised then."""

    def __init__(self, *actions: Callable[[], object]):
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(len(actions))
        self._under_way = [self._threads.submit(self._repeat, action) for action in actions]

    def _repeat(self, action: Callable[[], object]) -> int:
        turns = 0
        while not self._stop.is_set():
            action()
            turns += 1
        return turns

    def __enter__(self) -> list[Future[int]]:
        return self._under_way

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._threads.shutdown()
        for one in self._under_way:
            assert one.result() > 0, "it had its turn"


class Events:
    """What is resident by the events alone."""

    def __init__(self):
        self.resident: set[bytes] = set()
        self.wrong: list[KVEvent] = []
        self.call: Callable[[], object] = lambda: None

    def __call__(self, event: KVEvent) -> None:
        keys = set(event.keys)
        if keys & self.resident if event.kind == "stored" else keys - self.resident:
            self.wrong.append(event)
        (self.resident.update if event.kind == "stored" else self.resident.difference_update)(keys)
        self.call()


def made(transfer: str, events: Events | None = None, layout=layouts.GEMMA, host_bytes: int = 4096):
    engine = ServingEngine(layout, 96, host_bytes=host_bytes, transfer=transfer, on_event=events)
    return engine, inject(engine.offloader)


def resident_keys(engine: ServingEngine) -> set[bytes]:
    """Keys of the chunks that a lookup finds."""
    pool = engine.offloader.ledger.pool
    held = pool.held_keys()
    return {key for key, slot in zip(held, pool.find(held).tolist(), strict=True) if slot >= 0}


def settle(engine: ServingEngine, num_polls: int) -> list[JobResult]:
    """Lets all jobs end, and what was invalidated be cleared away. Returns the results not told before."""
    results = engine.offloader.wait()
    for _ in range(num_polls + 1 + engine.offloader.ledger.pool.num_units):
        engine.offloader.see_ended()
    return results + engine.offloader.poll()


@pytest.mark.parametrize("transfer", BOTH)
def test_everything_at_once(transfer):
    events = Events()
    engine, faulty = made(transfer, events)
    offloader = engine.offloader
    faulty.choose = RandomFaults(0, {Fault.FAIL: 0.02, Fault.LATE: 0.2, Fault.SHORT: 0.01, Fault.RAISE: 0.01})
    rng = np.random.default_rng(0)
    trunks = [rng.integers(0, 50, 40) for _ in range(3)]
    jobs: list[Job] = []
    polled: list[JobResult] = []
    totals: list[tuple[int, ...]] = [(0,) * 6]
    names = iter(range(10**9))

    def reads_stats():
        stats = offloader.stats()
        now = (
            *(stats.chunks_stored, stats.chunks_loaded, stats.evicted_chunks),
            *(stats.failed_jobs, stats.cancelled_jobs, stats.lookups),
        )
        assert all(a <= b for a, b in zip(totals[-1], now, strict=True)), "no count falls"
        assert stats.bytes_held == sum(group.bytes_held for group in stats.groups) <= stats.budget_bytes
        totals[-1] = now

    def cancels():
        if len(jobs) % 5 == 0 and jobs:
            offloader.cancel(jobs[-1])

    def looks_up_and_finishes():
        name = f"other {next(names)}"
        offloader.lookup(name, trunks[0])
        offloader.check_integrity()
        offloader.finish(name)

    def invalidates():
        if len(jobs) % 30 == 29:
            offloader.invalidate()

    events.call = offloader.stats
    others = [lambda: polled.extend(offloader.poll()), reads_stats, cancels, looks_up_and_finishes, invalidates]
    waited: list[JobResult] = []
    with Others(*others):
        for turn in range(25):
            tokens = np.append(trunks[turn % 3][: int(rng.integers(8, 41))], rng.integers(0, 50, 9))
            request = Served(turn, tokens)
            engine.look_up(request)
            jobs.append(engine.load(request))
            waited.append(offloader.wait(jobs[-1]))
            engine.loaded(request, waited[-1])
            while request.written < len(tokens):
                engine.compute(request, request.written + 12)
                jobs.append(engine.store(request))
            end(engine, request)
    polled += settle(engine, faulty.num_polls)
    told = [result.job_id for result in polled]
    assert len(told) == len(set(told)), "poll tells each result once"
    assert {*told, *(result.job_id for result in waited)} == {job.job_id for job in jobs}, "no result is lost"
    assert events.wrong == []
    assert events.resident == resident_keys(engine)
    assert any(result.ok for result in waited)
    assert not all(result.ok for result in (*waited, *polled))
    check_nothing_is_left(engine, faulty)
    assert events.resident == set()
    offloader.close()


@pytest.mark.parametrize("transfer", BOTH)
def test_a_callback_may_do_all_that_other_threads_may(transfer):
    events = Events()
    engine, faulty = made(transfer, events)
    offloader, results = engine.offloader, []

    def calls_back():
        results.extend(offloader.poll())
        offloader.lookup("in the callback", PROMPT)
        offloader.stats()
        offloader.check_integrity()
        offloader.finish("in the callback")

    events.call = calls_back
    with Others(lambda: results.extend(offloader.poll()), lambda: offloader.invalidate()):
        for turn in range(10):
            request = Served(turn, np.append(PROMPT, turn))
            engine.look_up(request)
            engine.loaded(request, offloader.wait(engine.load(request)))
            engine.compute(request, 33)
            engine.store(request)
            end(engine, request)
    results += settle(engine, 0)
    assert len({result.job_id for result in results}) == len(results)
    assert events.wrong == []
    assert events.resident == resident_keys(engine)
    check_nothing_is_left(engine, faulty)
    offloader.close()


@pytest.fixture(params=BOTH)
def hanging(request):
    """An engine with a load that hangs."""
    engine, faulty = made(request.param, layout=layouts.UNIFORM)
    serve(engine, "first", PROMPT)
    faulty.choose = FaultsAt({("load", 0): Fault.HANG})
    request = Served("a", np.append(PROMPT, 1))
    engine.look_up(request)
    job = engine.load(request)
    yield engine, faulty, request, job
    check_nothing_is_left(engine, faulty)
    engine.offloader.close()


class TestOneJob:
    def test_of_many_who_cancel_it_one_succeeds_and_its_result_is_told_once(self, hanging):
        engine, _, request, job = hanging
        together = threading.Barrier(4)
        told: list[JobResult] = []

        def cancel() -> bool:
            together.wait()
            cancelled = engine.offloader.cancel(job)
            told.extend(engine.offloader.poll())
            return cancelled

        with ThreadPoolExecutor(4) as threads:
            cancelled = [one.result() for one in [threads.submit(cancel) for _ in range(4)]]
        assert sorted(cancelled) == [False, False, False, True]
        assert [result.error for result in told if result.job_id == job.job_id] == ["cancelled"]
        end(engine, request)

    def test_all_who_wait_for_it_get_the_same_result(self, hanging):
        engine, faulty, request, job = hanging
        waiting = threading.Barrier(4)

        def wait() -> JobResult:
            waiting.wait()
            return engine.offloader.wait(job)

        with ThreadPoolExecutor(3) as threads:
            waits = [threads.submit(wait) for _ in range(3)]
            waiting.wait()
            assert engine.offloader.stats().open_jobs == 1, "others may call while some wait"
            faulty.release()
            results = [one.result() for one in waits]
        assert results[0].ok
        assert all(result is results[0] for result in results)
        engine.loaded(request, results[0])
        end(engine, request)

    def test_a_request_may_be_finished_by_another_thread_while_it_loads(self, hanging):
        engine, faulty, request, job = hanging
        with ThreadPoolExecutor(1) as threads:
            threads.submit(engine.offloader.finish, "a").result()
        engine.drop_blocks(request)
        assert engine.offloader.ledger.pool.open_pins(), "the load still reads its chunks"
        faulty.release()
        assert engine.offloader.wait(job).ok
        assert engine.offloader.ledger.pool.open_pins() == set()
        assert restored(engine, PROMPT) == 32

    def test_an_event_loop_of_another_thread_may_wait_for_it(self, hanging):
        engine, faulty, request, job = hanging
        with ThreadPoolExecutor(1) as threads:
            awaited = threads.submit(lambda: asyncio.run(engine.offloader.wait_async(job)))
            hit = serve(engine, "meanwhile", PROMPT[:20])
            faulty.release()
            result = awaited.result()
        assert hit == 19
        engine.loaded(request, result)
        end(engine, request)

    def test_a_weight_update_of_another_thread_makes_its_chunks_misses_at_once(self, hanging):
        engine, faulty, request, job = hanging
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(engine.offloader.invalidate).result() == 8
        assert restored(engine, PROMPT) == 0
        faulty.release()
        assert engine.offloader.wait(job).ok, "it reads what it was given, and that is still there"
        end(engine, request)
        assert restored(engine, PROMPT) == 0
