"""Ranks that keep chunks of their own: they resume at one position, and a load is good on all of them or on none."""

import threading
import time
import uuid

import numpy as np
import pytest

from kvjax.ranks import RankedOffloader, RankLostError, RanksDifferError, RanksError
from tests.support import layouts
from tests.support.faults import Fault, FaultsAt, FaultsInOrder
from tests.support.ranked_engine import RankedEngine, on_ranks
from tests.support.ranks import Hub, run_ranks
from tests.support.serving_engine import Served

PROMPT = np.arange(40)


def no_memory(*_, **__):
    raise MemoryError("no room")


class TestLookups:
    @pytest.mark.parametrize("name", ["gemma", "hybrid", "llama4", "uniform"])
    def test_what_all_ranks_stored_all_of_them_restore(self, name):
        def script(engine):
            engine.serve("first", PROMPT, step=7)
            return engine.serve("again", PROMPT)

        hits = on_ranks(3, layouts.ALL[name], script)
        assert len(set(hits)) == 1
        assert hits[0] >= 32

    def test_what_one_rank_lost_is_a_miss_for_all(self):
        def script(engine):
            engine.serve("first", PROMPT)
            if engine.rank == 1:
                engine.local.invalidate()
            return engine.serve("again", PROMPT), engine.serve("third", PROMPT)

        outcomes = on_ranks(3, layouts.GEMMA, script)
        assert outcomes == [(0, 39)] * 3

    def test_states_that_ranks_have_at_other_places_meet_where_all_have_one(self):
        """A minimum of the hits would resume where one rank has no state."""

        def script(engine):
            for stop in (9, 25 if engine.rank else 17):
                engine.serve_alone(stop, PROMPT[:stop])
            alone = engine.local.restorable(PROMPT).largest()
            return alone, engine.serve("all", PROMPT)

        assert on_ranks(2, layouts.HYBRID, script) == [(16, 8), (24, 8)]

    def test_a_lookup_on_which_ranks_agree_takes_one_exchange_and_others_two_more(self):
        def script(engine):
            engine.serve("first", PROMPT)
            taken = [engine.channel.count]
            engine.look_up(Served("a", PROMPT))
            taken.append(engine.channel.count)
            if engine.rank == 1:
                engine.local.invalidate()
            engine.look_up(Served("b", PROMPT))
            taken.append(engine.channel.count)
            return np.diff(taken).tolist()

        assert on_ranks(2, layouts.GEMMA, script)[0] == [1, 3]

    def test_several_requests_are_looked_up_together(self):
        def script(engine):
            engine.serve("first", PROMPT)
            if engine.rank == 1:
                engine.serve_alone("own", np.arange(100, 140))
            before = engine.channel.count
            found = engine.ranked.lookup_all(
                {
                    "a": {"token_ids": PROMPT},
                    "b": {"token_ids": np.arange(100, 140)},
                    "c": {"token_ids": PROMPT, "salt": b"other"},
                }
            )
            return [one.hit_tokens for one in found.values()], engine.channel.count - before

        assert on_ranks(2, layouts.GEMMA, script) == [([39, 0, 0], 3)] * 2

    def test_a_rank_that_may_load_less_limits_the_others(self):
        def script(engine):
            engine.serve("first", PROMPT)
            return engine.ranked.lookup("a", PROMPT, restore="never" if engine.rank else "always").hit_tokens

        with pytest.raises(RanksDifferError, match="must call 'lookup' with the same"):
            on_ranks(2, layouts.GEMMA, script)

    def test_ranks_that_lose_chunks_while_they_decide_restore_nothing(self):
        """As often as they look again, one of them has less than the sets say."""

        def script(engine):
            engine.serve("first", PROMPT)
            if engine.rank == 1:
                engine.local.invalidate()
                engine.serve_alone("part", PROMPT[:24])
                looks = engine.local.look_again
                limits = [16, 8]

                def look_again(request_id, *, ranks, max_load_tokens):
                    return looks(request_id, ranks=ranks, max_load_tokens=limits.pop(0) if limits else max_load_tokens)

                engine.local.look_again = look_again
            before = engine.channel.count
            request = Served("again", PROMPT)
            hit_tokens = engine.look_up(request).hit_tokens
            taken = engine.channel.count - before
            engine.finish(request)
            return hit_tokens, taken

        assert on_ranks(2, layouts.ALL["uniform"], script) == [(0, 7), (0, 7)]

    def test_checkpoints_are_those_of_all_ranks(self):
        """A junction that one rank alone knows of is one for all: all of them must end a step there."""

        def script(engine):
            engine.serve_alone("first", PROMPT)
            if engine.rank:
                engine.serve_alone("other", [*PROMPT[:20], *range(200, 220)])
            request = Served("again", np.array([*PROMPT[:24], *range(300, 320)]))
            found = engine.look_up(request)
            cuts = [engine.ranked.next_cut("again", here) for here in (0, 8, 16)]
            engine.restore(request)
            engine.finish(request)
            return found.checkpoints, cuts

        one, two = on_ranks(2, layouts.HYBRID, script, checkpoint_tokens=None)
        assert one == two

    def test_arguments_that_no_rank_may_give_change_nothing(self):
        def script(engine):
            engine.serve("first", PROMPT)
            with pytest.raises(ValueError, match="`token_ids` must"):
                engine.ranked.lookup_all({"a": {"token_ids": PROMPT}, "b": {"token_ids": "text"}})
            with pytest.raises(ValueError, match="`request_id` must be one that was looked up"):
                engine.ranked.finish("a")
            with pytest.raises(ValueError, match="`ranks` must not be given"):
                engine.ranked.lookup("a", PROMPT, ranks=[])
            return engine.serve("again", PROMPT)

        assert on_ranks(2, layouts.GEMMA, script) == [39, 39]


class TestLoads:
    @pytest.mark.parametrize("fault", [Fault.FAIL, Fault.RAISE, Fault.SHORT])
    def test_a_load_that_fails_on_one_rank_is_bad_on_all(self, fault):
        def script(engine):
            engine.serve("first", PROMPT)
            request = Served("again", PROMPT)
            hit = engine.look_up(request).hit_tokens
            if engine.rank == 1:
                engine.faults.choose = FaultsAt({("load", 0): fault})
            result = engine.restore(request)
            engine.finish(request)
            return hit, result.ok, result.valid_tokens, result.error.startswith("rank 1: "), engine.serve("3", PROMPT)

        assert on_ranks(3, layouts.GEMMA, script) == [(39, False, 0, True, 39)] * 3

    def test_a_load_that_goes_on_on_one_rank_has_no_result_on_any(self):
        def script(engine):
            engine.serve("first", PROMPT)
            request = Served("again", PROMPT)
            engine.look_up(request)
            if engine.rank == 1:
                engine.faults.choose = FaultsAt({("load", 0): Fault.HANG})
            job = engine.load(request)
            seen = [engine.ranked.poll(), job.result]
            with pytest.raises(TimeoutError, match="loads did not end on all ranks in"):
                engine.ranked.wait(job, timeout_s=0.05)
            engine.faults.release()
            result = engine.ranked.wait(job)
            engine.loaded(request, result)
            engine.finish(request)
            return seen, result.ok

        assert on_ranks(2, layouts.GEMMA, script) == [([[], None], True)] * 2

    def test_a_load_that_is_late_on_one_rank_is_given_up_on_all(self):
        def script(engine):
            engine.serve("first", PROMPT)
            request = Served("again", PROMPT)
            engine.look_up(request)
            if engine.rank == 1:
                engine.faults.choose = FaultsAt({("load", 0): Fault.HANG})
            began = time.monotonic()
            result = engine.ranked.wait(engine.load(request, deadline_s=0.1))
            took = time.monotonic() - began
            engine.faults.release()
            engine.loaded(request, result)
            engine.finish(request)
            return result.ok, result.error, took < 5

        assert on_ranks(2, layouts.GEMMA, script) == [(False, "rank 1: not done by its deadline", True)] * 2

    def test_a_deadline_of_the_offloader_holds_for_loads_that_name_none(self):
        def script(engine):
            engine.serve("first", PROMPT)
            request = Served("again", PROMPT)
            engine.look_up(request)
            if engine.rank == 1:
                engine.faults.choose = FaultsAt({("load", 0): Fault.HANG})
            result = engine.ranked.wait(engine.load(request), timeout_s=10)
            engine.faults.release()
            engine.loaded(request, result)
            engine.finish(request)
            return result.error

        assert on_ranks(2, layouts.GEMMA, script, deadline_s=0.2) == ["rank 1: not done by its deadline"] * 2

    def test_waiting_for_a_load_waits_for_those_whose_blocks_it_shares(self):
        def script(engine):
            engine.serve("first", PROMPT)
            first, second = Served("a", PROMPT), Served("b", PROMPT)
            engine.look_up(first)
            if engine.rank == 1:
                engine.faults.choose = FaultsAt({("load", 0): Fault.HANG})
                threading.Timer(0.2, engine.faults.release).start()
            engine.load(first)
            engine.look_up(second)
            waited = engine.ranked.wait(engine.load(second, share=True))
            told = engine.ranked.poll()
            engine.loaded(first, told[0])
            engine.loaded(second, waited)
            for request in (first, second):
                engine.finish(request)
            return waited.ok, [result.request_id for result in told]

        assert on_ranks(2, layouts.GEMMA, script) == [(True, ["a"])] * 2

    def test_a_load_of_nothing_exchanges_nothing(self):
        def script(engine):
            request = Served("first", PROMPT)
            engine.look_up(request)
            before = engine.channel.count
            job = engine.load(request)
            results = [engine.ranked.wait(job), *engine.ranked.poll()]
            engine.loaded(request, results[0])
            engine.finish(request)
            return [(result.ok, result.valid_tokens) for result in results], engine.channel.count - before

        assert on_ranks(2, layouts.GEMMA, script) == [([(True, 0)], 0)] * 2

    def test_what_is_computed_before_the_ranks_agree_is_stored_only_if_they_do(self):
        """Ranks compute each layer together: garbage on one of them is garbage on all."""

        def script(engine):
            engine.serve("first", PROMPT)
            request = Served("again", np.arange(60))
            engine.look_up(request)
            if engine.rank == 1:
                engine.faults.choose = FaultsInOrder([Fault.FAIL])
            job = engine.load(request)
            request.spoilt = True
            while request.written < 60:
                engine.compute(request, 60)
                engine.store(request, frees=False)
            result = engine.ranked.wait(job)
            engine.ranked.wait()
            held = engine.local.restorable(np.arange(60)).largest()
            engine.loaded(request, result)
            engine.finish(request)
            return result.ok, held

        assert [ok for ok, _ in on_ranks(2, layouts.GEMMA, script)] == [False, False]
        assert max(held for _, held in on_ranks(2, layouts.GEMMA, script)) <= 40

    def test_a_load_that_shares_a_bad_ones_blocks_is_bad_on_all(self):
        def script(engine):
            engine.serve("first", PROMPT)
            first, second = Served("a", PROMPT), Served("b", PROMPT)
            engine.look_up(first)
            if engine.rank == 1:
                engine.faults.choose = FaultsAt({("load", 0): Fault.LATE, ("load", 1): Fault.FAIL})
            jobs = [engine.load(first)]
            found = engine.look_up(second)
            jobs.append(engine.load(second, share=True))
            results = []
            while len(results) < 2:
                results += engine.ranked.poll()
            for request, result in zip((first, second), results, strict=True):
                engine.loaded(request, result)
                engine.finish(request)
            shared = [bool((blocks >= 0).any()) for blocks in found.arriving.values()]
            return [(result.ok, result.valid_tokens) for result in results], shared

        assert on_ranks(2, layouts.GEMMA, script) == [([(False, 0), (False, 0)], [True, True])] * 2

    def test_a_load_can_be_cancelled_and_the_request_looked_up_again(self):
        def script(engine):
            engine.serve("first", PROMPT)
            request = Served("again", PROMPT)
            engine.look_up(request)
            if engine.rank:
                engine.faults.choose = FaultsAt({("load", 0): Fault.LATE})
            job = engine.load(request)
            given_up = engine.ranked.cancel(job)
            engine.loaded(request, job.result)
            hit = engine.look_up(request).hit_tokens
            engine.restore(request)
            engine.finish(request)
            return given_up, job.result.ok, engine.ranked.cancel(job), hit

        assert on_ranks(2, layouts.GEMMA, script) == [(True, False, False, 39)] * 2

    def test_without_loads_under_way_polling_exchanges_nothing(self):
        def script(engine):
            engine.serve("first", PROMPT)
            before = engine.channel.count
            assert engine.ranked.poll() == []
            assert engine.ranked.wait() == []
            return engine.channel.count - before

        assert on_ranks(2, layouts.GEMMA, script)[0] == 0


class TestRanksThatFail:
    def test_a_rank_that_is_gone_is_named_and_nothing_hangs(self):
        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16, timeout_s=0.3)
            engine.serve("first", PROMPT)
            if rank == 1:
                engine.local.close()
                return None
            began = time.monotonic()
            with pytest.raises(RankLostError) as lost:
                engine.ranked.lookup("again", PROMPT)
            assert time.monotonic() - began < 5
            for call in (lambda: engine.ranked.lookup("b", PROMPT), engine.ranked.poll, engine.ranked.wait):
                with pytest.raises(RanksError, match="must be made anew after an error: nothing came from"):
                    call()
            engine.ranked.close()
            engine.ranked.close()
            return lost.value.ranks

        assert run_ranks(3, work) == [(1,), None, (1,)]

    def test_a_group_that_lost_a_rank_with_a_load_under_way_closes(self):
        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16, timeout_s=0.3)
            engine.serve("first", PROMPT)
            request = Served("again", PROMPT)
            engine.look_up(request)
            job = engine.load(request)
            if rank == 1:
                engine.local.cancel(job)
                return None
            with pytest.raises(RankLostError):
                engine.ranked.wait(job)
            engine.ranked.close(timeout_s=5)
            return job.result

        first, _ = run_ranks(2, work)
        assert (first.ok, first.error) == (False, "cancelled")

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (lambda engine: engine.ranked.lookup("again", PROMPT + 1), "must call 'lookup' with the same"),
            (lambda engine: engine.ranked.lookup("other", PROMPT), "must call 'lookup' with the same"),
            (lambda engine: engine.ranked.lookup("again", PROMPT, max_load_tokens=8), "must call 'lookup' with the"),
            (lambda engine: engine.ranked.lookup("again", "text"), "rank 1 failed in 'lookup': ValueError: `token_id"),
        ],
    )
    def test_ranks_that_ask_for_other_things_are_told(self, other, message):
        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16)
            try:
                if rank:
                    other(engine)
                else:
                    engine.ranked.lookup("again", PROMPT)
            finally:
                engine.ranked.close()

        one, two = run_ranks(2, work)
        assert isinstance(one, RanksDifferError), one
        assert message in str(one)
        assert isinstance(two, (RanksDifferError, ValueError)), two

    def test_ranks_in_other_calls_are_told(self):
        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16)
            engine.serve("first", PROMPT)
            request = Served("a", PROMPT)
            engine.look_up(request)
            job = engine.load(request) if rank else None
            try:
                engine.ranked.wait(job) if rank else engine.ranked.lookup("b", PROMPT)
            finally:
                engine.ranked.close()

        outcomes = run_ranks(2, work)
        assert [type(one) for one in outcomes] == [RanksDifferError] * 2
        assert "must make the same calls in the same order, got 'lookup' on rank 0 and 'wait' on rank 1" in str(
            outcomes[0]
        )

    @pytest.mark.parametrize("prompt", [PROMPT + 1, "text"], ids=["differs", "fails"])
    def test_after_ranks_differed_nothing_but_closing_goes(self, prompt):
        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16)
            with pytest.raises((RanksDifferError, ValueError)):
                engine.ranked.lookup("a", prompt if rank else PROMPT)
            with pytest.raises(RanksError, match="must be made anew after an error"):
                engine.ranked.lookup("b", PROMPT)
            with pytest.raises(RanksError, match="must be made anew after an error"):
                engine.ranked.finish("a")
            engine.ranked.close()

        assert run_ranks(2, work) == [None, None]

    def test_ranks_of_other_versions_are_told(self):
        def work(rank, hub):
            if rank:
                return hub.channel(rank).exchange(b'[0,"start",null,null,""]', 20.0)
            return RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16)

        one, _ = run_ranks(2, work)
        assert isinstance(one, RanksDifferError)
        assert "rank 1 must speak version 1 of the messages" in str(one)

    def test_a_call_that_one_rank_left_out_is_found_out_at_the_next_exchange(self):
        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16)
            try:
                engine.ranked.lookup("a", PROMPT)
                engine.ranked.lookup("b", PROMPT)
                if rank == 0:
                    engine.ranked.finish("a")
                engine.ranked.lookup("c", PROMPT)
            finally:
                engine.ranked.close()

        assert [type(one) for one in run_ranks(2, work)] == [RanksDifferError] * 2

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("blocks_per_chunk", (1, 2)),
            ("checkpoint_tokens", (None, 16)),
            ("store_after", (1, 2)),
            ("model", "ab"),
            ("deadline_s", (None, 9.0)),
        ],
    )
    def test_ranks_with_other_options_are_refused_at_the_start(self, name, values):
        def work(rank, hub):
            engine = RankedEngine(
                rank, hub, layouts.GEMMA, **{"host_bytes": 1 << 16, "checkpoint_tokens": None, name: values[rank]}
            )
            engine.ranked.close()

        outcomes = run_ranks(2, work)
        assert [type(one) for one in outcomes] == [RanksDifferError] * 2
        assert "must call 'start' with the same" in str(outcomes[0])

    def test_a_load_that_a_rank_gave_up_by_itself_ends_the_group(self):
        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16, timeout_s=0.5)
            engine.serve("first", PROMPT)
            request = Served("again", PROMPT)
            engine.look_up(request)
            job = engine.load(request)
            if rank:
                engine.local.cancel(job)
            try:
                engine.ranked.wait(job)
                engine.ranked.lookup("b", PROMPT)
            finally:
                engine.ranked.close()

        one, two = run_ranks(2, work)
        assert isinstance(one, RankLostError)
        assert isinstance(two, RanksDifferError)
        assert "a load of 'again' ended otherwise on rank 1" in str(two)

    @pytest.mark.parametrize("ahead", [None, "poll", "wait", "lookup"])
    def test_a_load_that_raises_on_one_rank_ends_the_group_and_its_cause_is_told(self, ahead):
        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16)
            engine.serve("first", PROMPT)
            request = Served("again", PROMPT)
            engine.look_up(request)
            if rank:
                engine.local.start_load = no_memory
            calls = {"poll": engine.ranked.poll, "wait": engine.ranked.wait, "lookup": lambda: engine.look_up(request)}
            try:
                if rank:
                    with pytest.raises(MemoryError):
                        engine.load(request)
                else:
                    engine.load(request)
                calls[ahead or "poll"]()
            finally:
                engine.ranked.close()

        for one in run_ranks(2, work):
            assert isinstance(one, RanksDifferError), one
            assert "on rank 1, the load of 'again' raised MemoryError: no room" in str(one)

    def test_loads_that_fail_crosswise_are_not_taken_for_each_other(self):
        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16)
            engine.serve("first", PROMPT)
            start = engine.local.start_load
            try:
                for n, name in enumerate(("a", "b")):
                    request = Served(name, PROMPT)
                    engine.look_up(request)
                    engine.local.start_load = start if n == rank else no_memory
                    try:
                        engine.load(request)
                    except MemoryError:
                        engine.drop_blocks(request)
                engine.ranked.wait()
            finally:
                engine.ranked.close()

        assert [type(one) for one in run_ranks(2, work)] == [RanksDifferError] * 2

    def test_a_load_that_raises_on_all_ranks_changes_nothing(self):
        def script(engine):
            engine.serve("first", PROMPT)
            engine.ranked.lookup("again", PROMPT)
            with pytest.raises(ValueError, match="`block_tables` must"):
                engine.ranked.load(engine.caches, "again", {})
            assert engine.ranked.poll() == []
            engine.ranked.finish("again")
            return engine.serve("third", PROMPT)

        assert on_ranks(2, layouts.GEMMA, script) == [39, 39]

    def test_a_deadline_is_that_of_all_ranks(self):
        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16)
            engine.serve("first", PROMPT)
            request = Served("again", PROMPT)
            engine.look_up(request)
            try:
                engine.ranked.wait(engine.load(request, deadline_s=20.0 + rank))
            finally:
                engine.ranked.close()

        assert [type(one) for one in run_ranks(2, work)] == [RanksDifferError] * 2

    def test_requests_are_told_apart_whatever_their_ids_are(self):
        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16)
            engine.serve("first", PROMPT)
            ids = [uuid.UUID(int=n + 10 * rank) for n in range(2)]
            requests = [Served(one, PROMPT) for one in ids]
            try:
                for request in requests:
                    engine.look_up(request)
                engine.load(requests[rank])
                engine.ranked.wait()
            finally:
                engine.ranked.close()

        assert [type(one) for one in run_ranks(2, work)] == [RanksDifferError] * 2

    def test_ids_that_are_written_otherwise_in_each_process_are_no_difference(self):
        def script(engine):
            first = engine.serve(("a", object()), PROMPT), engine.serve(object(), PROMPT)
            return first, engine.serve(uuid.uuid4(), PROMPT)

        assert on_ranks(2, layouts.GEMMA, script) == [((0, 39), 39)] * 2

    def test_a_load_may_take_longer_than_a_rank_waits_for_an_answer(self):
        """Ranks that have ended theirs hear that another's goes on."""

        def work(rank, hub):
            engine = RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16, timeout_s=0.4)
            engine.serve("first", PROMPT)
            request = Served("again", PROMPT)
            engine.look_up(request)
            if rank:
                engine.faults.choose = FaultsAt({("load", 0): Fault.HANG})
                threading.Timer(1.5, engine.faults.release).start()
            result = engine.ranked.wait(engine.load(request))
            engine.ranked.close()
            return result.ok

        assert run_ranks(2, work) == [True, True]

    @pytest.mark.parametrize("timeout_s", [None, 0, -1, "1"])
    def test_ranks_wait_for_each_other_for_some_time(self, timeout_s):
        def work(rank, hub):
            with pytest.raises(ValueError, match="`timeout_s` must"):
                RankedEngine(rank, hub, layouts.GEMMA, host_bytes=1 << 16, timeout_s=timeout_s)

        assert run_ranks(1, work) == [None]

    @pytest.mark.parametrize("requests", [[1], {"a": 3}])
    def test_requests_are_arguments_by_id(self, requests):
        def script(engine):
            with pytest.raises(ValueError, match="`requests` must hold the arguments of `lookup` by request id"):
                engine.ranked.lookup_all(requests)
            with pytest.raises(ValueError, match="`job` must be one of this offloader, got None"):
                engine.ranked.cancel(None)

        on_ranks(1, layouts.GEMMA, script)

    def test_what_is_no_offloader_is_refused(self):
        with pytest.raises(ValueError, match="`offloader` must be an Offloader, got 3"):
            RankedOffloader(3, Hub(1).channel(0))  # pyright: ignore[reportArgumentType]
