import gc
from typing import Any

import pytest

from kvjax.pool import LRU
from tests.benchmarks.pool_manager import PoolManager
from tests.benchmarks.pool_phases import Calls, Manager, collector, measure, request_keys

STORE = ["prepare_store", "complete_store", "finish"]
FULL = ["lookup", "prepare_load", "complete_load", "finish", "touch", "prepare_store", "complete_store"]


class PlainManager:
    """First in, first out, in a dict; notes every call that it gets."""

    peer, policy, has_finish = "plain", "fifo", True

    def __init__(self, num_chunks: int):
        self.num_chunks = num_chunks
        self.ready: dict[bytes, bool] = {}
        self.pinned: set[bytes] = set()
        self.calls: list[tuple[str, list[bytes]]] = []

    def new_request(self, request_id: str, keys: list[bytes]) -> list[bytes]:
        return keys

    def lookup(self, request: list[bytes]) -> int:
        self.calls.append(("lookup", request))
        return sum(self.ready.get(key, False) for key in request)

    def prepare_store(self, request: list[bytes]) -> list[bytes] | None:
        self.calls.append(("prepare_store", request))
        idle = [key for key in self.ready if key not in self.pinned]
        for key in idle[: max(0, len(self.ready) + len(request) - self.num_chunks)]:
            del self.ready[key]
        self.ready.update(dict.fromkeys(request, False))
        return request

    def complete_store(self, request: list[bytes], store: list[bytes]) -> None:
        assert store is request
        self.calls.append(("complete_store", request))
        self.ready.update(dict.fromkeys(request, True))

    def prepare_load(self, request: list[bytes]) -> str:
        self.calls.append(("prepare_load", request))
        assert all(self.ready[key] for key in request), "only what is resident is loaded"
        assert self.pinned.isdisjoint(request)
        self.pinned.update(request)
        return "load"

    def complete_load(self, request: list[bytes], load: str) -> None:
        assert load == "load"
        self.calls.append(("complete_load", request))
        self.pinned.difference_update(request)

    def touch(self, request: list[bytes]) -> None:
        self.calls.append(("touch", request))

    def finish(self, request: list[bytes]) -> None:
        self.calls.append(("finish", request))


class WithoutFinish(PlainManager):
    has_finish = False

    def finish(self, request: list[bytes]) -> None:
        raise AssertionError("a manager that ends no requests is not asked to")


class Refusing(PlainManager):
    def prepare_store(self, request: list[bytes]) -> list[bytes] | None:
        return None if len(self.ready) == self.num_chunks else super().prepare_store(request)


class Forgetful(PlainManager):
    def complete_store(self, request: list[bytes], store: list[bytes]) -> None:
        super().complete_store(request, store)
        del self.ready[request[0]]


def rows_of(manager: Manager, num_chunks: int = 32) -> list[dict[str, Any]]:
    return list(measure(manager, num_chunks, chunks_per_request=4))


def test_every_phase_has_a_row_in_every_state_of_the_pool_and_the_collector():
    rows = rows_of(PlainManager(32))
    found = [(row["pool"], row["gc"], row["phase"]) for row in rows]
    full = [("full", mode, phase) for mode in ("on", "frozen") for phase in FULL]
    pinned = [("half pinned", "on", phase) for phase in STORE]
    assert found == [*(("free", "on", phase) for phase in STORE), *full, *pinned]
    for row in rows:
        assert (row["bench"], row["peer"], row["policy"], row["resident_chunks"]) == ("pool", "plain", "fifo", 32)
        assert 0 < row["us_per_chunk"] * 4 <= row["longest_call_ms"] * 1e3 + 1


def test_a_phase_counts_its_calls():
    rows = {(row["pool"], row["gc"], row["phase"]): row["num_calls"] for row in rows_of(PlainManager(32))}
    assert rows["free", "on", "prepare_store"] == 8, "one a request until the pool is full"
    assert rows["full", "on", "lookup"] == rows["full", "frozen", "touch"] == 4, "half of what is resident"
    assert rows["full", "frozen", "prepare_store"] == 8
    assert rows["full", "on", "finish"] == 12, "of loads and of stores"


def test_stores_of_a_full_pool_are_of_new_keys_and_turn_it_over():
    manager = PlainManager(32)
    rows_of(manager)
    stored = [key for name, keys in manager.calls if name == "prepare_store" for key in keys]
    assert len(set(stored)) == len(stored) == 3 * 32 + 4
    assert sorted(manager.ready) == sorted(stored[-36:-20] + stored[-16:]), "the oldest half was pinned, the rest aged"


def test_what_was_pinned_is_released():
    manager = PlainManager(32)
    rows_of(manager)
    assert not manager.pinned
    assert [name for name, _ in manager.calls].count("complete_load") == 2 * 4 + 4


def test_a_manager_without_an_end_of_requests_has_no_such_row():
    assert "finish" not in {row["phase"] for row in rows_of(WithoutFinish(32))}


def test_a_refused_store_ends_the_measurement():
    with pytest.raises(RuntimeError, match="plain refused to store request 8 although nothing is in use"):
        rows_of(Refusing(32))


def test_a_manager_that_loses_chunks_is_not_measured():
    with pytest.raises(RuntimeError, match=r"plain must hold 32 chunks, but 24 are found"):
        rows_of(Forgetful(32))


@pytest.mark.parametrize(
    ("num_chunks", "chunks_per_request", "message"),
    [
        (33, 4, "`num_chunks` must be a multiple of 4, got 33"),
        (4, 4, "`num_chunks` must be an int of at least 8, got 4"),
        (32, 0, "`chunks_per_request` must be a positive int, got 0"),
        (32.0, 4, "`num_chunks` must be an int of at least 8, got 32.0"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused_before_anything_runs(num_chunks, chunks_per_request, message):
    manager = PlainManager(32)
    with pytest.raises(ValueError, match=message):
        measure(manager, num_chunks, chunks_per_request=chunks_per_request)
    assert manager.calls == []


def test_kvjax_keeps_its_books_while_it_is_measured():
    manager = PoolManager(32, LRU(), "lru")
    rows = rows_of(manager)
    assert {row["phase"] for row in rows} == {*FULL} - {"finish"}
    assert manager._pool.num_resident == 32
    assert manager._pool.counts.evicted == 2 * 32 + 4
    assert not manager._pool.open_pins()
    assert not manager._pool.open_reservations()
    manager._pool.check_integrity()


def test_median_mean_and_longest_are_of_one_phase():
    calls = Calls({"lookup": [1e-6, 2e-6, 9e-6], "touch": [1.0]})
    assert list(calls.rows(2)) == [
        {"phase": "lookup", "num_calls": 3, "us_per_chunk": 1.0, "mean_us_per_chunk": 2.0, "longest_call_ms": 0.009},
        {"phase": "touch", "num_calls": 1, "us_per_chunk": 5e5, "mean_us_per_chunk": 5e5, "longest_call_ms": 1e3},
    ]


def test_keys_are_equal_objects_of_their_own_and_differ_between_requests():
    one, again, other = request_keys(1, 3), request_keys(1, 3), request_keys(2, 3)
    assert one == again
    assert all(a is not b for a, b in zip(one, again, strict=True))
    assert not set(one) & set(other)


@pytest.mark.parametrize("mode", ["on", "frozen"])
def test_the_collector_runs_and_sees_old_objects_only_if_not_frozen(mode):
    gc.collect()  # freezes immortal objects since Python 3.12
    before = gc.get_freeze_count()
    with collector(mode):
        assert gc.isenabled()
        assert (gc.get_freeze_count() > before) == (mode == "frozen")
    assert gc.get_freeze_count() <= before


def test_a_failed_measurement_leaves_nothing_frozen():
    before = gc.get_freeze_count()
    with pytest.raises(RuntimeError, match="failed"), collector("frozen"):
        raise RuntimeError("failed")
    assert gc.get_freeze_count() <= before
