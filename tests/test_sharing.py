"""Requests that wait for the same chunks: one load for all, and what becomes of it."""

import numpy as np
import pytest

from kvjax import FullAttention, Ledger, SlidingWindow
from kvjax.mover import Part
from kvjax.packing import cut_into_units
from tests.oracles.layouts import cut, group
from tests.support import layouts
from tests.support.ledgers import MIXED, UNIFORM, engine, prompt
from tests.support.toy_engine import ToyEngine

LONG = cut(group("full", FullAttention(), 16), group("window", SlidingWindow(256), 16))


def shared_tables(found, own):
    """The tables of a request that shares what arrives, and has blocks of its own elsewhere."""
    tables = {name: np.array(table) for name, table in own.items()}
    for name, blocks in found.arriving.items():
        chunks = found.load[name]
        tables[name][chunks] = np.where(blocks[:, 0] >= 0, blocks[:, 0], tables[name][chunks])
    return tables


class TestOneLoadForAll:
    def test_fifty_requests_that_share_a_prefix_of_10000_tokens_load_it_once(self):
        ledger = Ledger(LONG, cut_into_units(LONG, 64), host_bytes=10**6)
        tokens = list(range(10_000))
        first = {"full": np.arange(700), "window": np.arange(700)}
        ledger.lookup("writer", tokens)
        ledger.complete_store(ledger.prepare_store("writer", first, 10_000), ok=True)
        ledger.finish("writer")
        loads = []
        for n in range(50):
            found = ledger.lookup(n, [*tokens, n, n])
            assert found.hit_tokens == 10_000
            own = {name: 1000 + 700 * n + np.arange(700) for name in first}
            tables = shared_tables(found, own)
            assert bool(found.arriving) == (n > 0)
            loads.append(ledger.prepare_load(n, tables, share=True))
        assert [load.plan.num_chunks > 0 for load in loads] == [True] + [False] * 49
        assert ledger.counts.loads_shared == 49
        ledger.check_integrity()
        assert [ledger.complete_load(load, ok=True) for load in loads] == [10_000] * 50
        assert ledger.counts.chunks_loaded == 625 + 16
        assert ledger.counts.bytes_loaded == 641 * 64
        # Nobody waits whose blocks are on the device.
        found = ledger.lookup("late", [*tokens, 1], device_tokens=10_000)
        assert (found.hit_tokens, found.arriving) == (10_000, {})
        assert ledger.prepare_load("late", first).plan.num_chunks == 0

    def test_what_only_one_of_them_needs_is_loaded_by_that_one(self):
        """The second prompt leaves the first one's path at token 12: its window lies elsewhere."""
        served = engine(MIXED)
        served.served("a", prompt(16), step=4)
        served.served("b", [*prompt(8), *prompt(8, 90)], step=4)
        served.start("a again", prompt(17))
        first = served.load("a again")
        found = served.start("c", [*prompt(8), 0])
        assert found.hit_tokens == 8
        assert {name: (blocks >= 0).ravel().tolist() for name, blocks in found.arriving.items()} == {
            "full": [True, True],
            "window": [False, False],
        }
        second = served.load("c", share=True)
        assert {moves.group_idx: moves.num_chunks for moves in second.plan.moves} == {2: 2}
        served.end_load(first)
        served.end_load(second)
        served.compute("c", 9)

    def test_without_consent_every_block_is_the_requests_own(self):
        """A block may come to the same place of another request by chance, after it was freed."""
        served = engine(UNIFORM)
        served.served("a", prompt(16))
        served.start("b", prompt(17))
        served.load("b")
        found = served.ledger.lookup("c", prompt(17))
        assert (found.arriving["full"] >= 0).all()
        load = served.ledger.prepare_load("c", {"full": found.arriving["full"][:, 0]})
        assert (load.plan.num_chunks, load.after) == (4, ())

    def test_blocks_of_a_request_that_is_gone_are_not_shared(self):
        served = engine(UNIFORM)
        served.served("a", prompt(16))
        served.start("b", prompt(17))
        blocks = list(served.running["b"].tables[0])
        served.load("b")
        blocks = list(served.running["b"].tables[0])
        served.finish("b")
        found = served.ledger.lookup("c", prompt(17))
        assert found.arriving == {}
        assert served.ledger.prepare_load("c", {"full": blocks}, share=True).plan.num_chunks == 4

    def test_a_block_that_a_newer_load_writes_is_not_the_older_ones(self):
        """The first load's block was freed and given to a third request, whose load writes something else to it."""
        served = engine(UNIFORM)
        served.served("a", prompt(16))
        served.served("z", prompt(16, 100))
        ledger = served.ledger
        ledger.lookup("b", prompt(17))
        ledger.prepare_load("b", {"full": [0, 1, 2, 3]})
        ledger.lookup("c", prompt(17, 100))
        ledger.prepare_load("c", {"full": [9, 1, 8, 7]})
        ledger.lookup("d", prompt(17))
        load = ledger.prepare_load("d", {"full": [0, 1, 2, 3]}, share=True)
        assert [moves.chunk_idx[: moves.num_chunks].tolist() for moves in load.plan.moves] == [[1]]


class TestWhatFails:
    def loads(self):
        served = engine(UNIFORM)
        served.served("a", prompt(16))
        served.start("b", prompt(17))
        first = served.load("b")
        served.start("c", prompt(17))
        return served, first, served.load("c", share=True)

    def test_a_shared_load_that_fails_fails_for_all(self):
        served, first, second = self.loads()
        assert served.ledger.complete_load(first, ok=False) == 0
        assert served.ledger.complete_load(second, ok=True) == 0
        assert served.ledger.counts.loads_failed == 2
        assert served.ledger.lookup("d", prompt(17)).hit_tokens == 0
        served.ledger.check_integrity()

    def test_the_good_part_of_a_shared_load_is_good_for_all(self):
        served, first, second = self.loads()
        ok = {0: np.array([True, True, False, True])}
        assert served.ledger.complete_load(first, ok=ok) == 8
        assert served.ledger.complete_load(second, ok=True) == 8
        found = served.ledger.lookup("d", prompt(17))
        assert found.hit_tokens == 8
        served.ledger.check_integrity()

    def test_a_load_ends_after_those_that_it_shares(self):
        served, first, second = self.loads()
        assert not served.ledger.may_complete(second)
        with pytest.raises(ValueError, match="must be completed after their loads"):
            served.ledger.complete_load(second, ok=True)
        with pytest.raises(ValueError, match="a load whose blocks another one shares must be completed"):
            served.ledger.cancel_load(first)
        served.ledger.complete_load(first, ok=True)
        assert served.ledger.complete_load(second, ok=True) == 16
        served.ledger.check_integrity()

    def test_a_load_that_failed_need_not_wait_for_others_and_leaves_them_theirs(self):
        served, first, second = self.loads()
        assert served.ledger.complete_load(second, ok=False) == 0
        assert served.ledger.complete_load(first, ok=True) == 16
        assert served.ledger.lookup("d", prompt(17)).hit_tokens == 16
        served.ledger.check_integrity()

    def test_a_request_that_ends_with_its_load_in_flight_leaves_the_others_theirs(self):
        served, first, second = self.loads()
        served.finish("b")
        served.end_load(first)
        served.end_load(second)
        served.compute("c", 17)
        served.finish("c")
        served.ledger.check_integrity()
        assert served.ledger.pool.open_pins() == set()


@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_restored_blocks_that_two_requests_share_hold_what_both_need(monkeypatch, transfer):
    engine = ToyEngine(layouts.UNIFORM, 48, host_bytes=2**20, transfer=transfer)
    tokens = np.random.default_rng(3).integers(0, 50, 40).tolist()
    engine.start("a", tokens)
    engine.compute("a", 40, step=40)
    engine.stop("a")
    offloader = engine.offloader
    offloader.wait()
    own = {"full": np.arange(11)}
    with monkeypatch.context() as patch:
        patch.setattr(Part, "done", lambda self: False)  # as if the first load took its time
        offloader.lookup("b", [*tokens, 1])
        engine.caches, first = offloader.load(engine.caches, "b", own)
        found = offloader.lookup("c", [*tokens, 2])
        assert found.arriving["full"][:, 0].tolist() == list(range(10))
        engine.caches, second = offloader.load(engine.caches, "c", own, share=True)
        assert offloader.poll() == []
    assert [result.job_id for result in offloader.wait()] == [first.job_id, second.job_id]
    assert (first.result.ok, first.result.num_chunks, first.result.valid_tokens) == (True, 10, 40)
    assert (second.result.ok, second.result.num_chunks, second.result.valid_tokens) == (True, 0, 40)
    stats = offloader.stats()
    assert (stats.chunks_loaded, stats.shared_loads) == (10, 1)
    engine.tables["c"], engine.tokens["c"], engine.written["c"] = {"full": list(range(11))}, [*tokens, 2], 40
    engine.check("c")
    offloader.close()
