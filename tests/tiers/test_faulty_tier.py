"""The tier that goes wrong does so as its faults say."""

import time
from concurrent.futures import CancelledError

import pytest

from kvjax.tiers import TierError, TierFullError, TierTimeoutError, TierUnavailableError
from kvjax.tiers.frame import BadFrameError, verify
from tests.support.entries import entry, later
from tests.support.tier_faults import OF_BYTES, FaultsAt, FaultsOf, RandomFaults
from tests.support.tiers import Fault, FaultyTier, MemoryTier
from tests.tiers.conformance import Guarded, TierConformance, delete, exists, get, put, result

ONE, OTHER = entry(1), entry(2)


@pytest.fixture
def tier():
    made = FaultyTier(MemoryTier())
    yield made
    made.close()


class TestWithoutFaults(TierConformance):
    @pytest.fixture
    def make(self):
        return lambda: FaultyTier(MemoryTier())

    def reopen(self, tier):
        tier.close()
        return FaultyTier(MemoryTier(entries=tier.inner.entries))


def read(tier, name) -> tuple[int, bytes]:
    guarded = Guarded(name.num_bytes)
    told = result(tier.get([name], [guarded.buffer], deadline=later())[0])
    return told, guarded.read()


def accepted(told: int, data: bytes) -> bool:
    if told != len(data):
        return False
    try:
        verify(memoryview(data), ONE.name)
    except BadFrameError:
        return False
    return True


@pytest.mark.parametrize("fault", sorted(OF_BYTES))
def test_bytes_read_wrong_are_not_accepted_and_right_once_it_is_over(tier, fault):
    put(tier, [ONE, OTHER])
    tier.choose = FaultsOf({"get": fault}, [ONE.name])
    assert not accepted(*read(tier, ONE.name))
    assert accepted(*read(tier, OTHER.name)) is False  # of another name
    assert tier.counts == {("get", fault): 1}
    tier.choose = FaultsOf({})
    assert accepted(*read(tier, ONE.name))


@pytest.mark.parametrize("fault", sorted(OF_BYTES - {Fault.HUGE}))
def test_bytes_written_wrong_stay_wrong(tier, fault):
    put(tier, [OTHER])
    tier.choose = FaultsAt({("put", 0): fault})
    assert put(tier, [ONE]) == [True]
    assert not accepted(*read(tier, ONE.name))


@pytest.mark.parametrize(
    ("fault", "reason"), [(Fault.STALE_LAYOUT, "namespace"), (Fault.WRONG_KEY, "key"), (Fault.SWAP, "key")]
)
def test_sound_frames_of_others_are_refused_for_what_they_are(tier, fault, reason):
    put(tier, [ONE, OTHER])
    tier.choose = FaultsOf({"get": fault})
    _, data = read(tier, ONE.name)
    with pytest.raises(BadFrameError, match=reason):
        verify(memoryview(data), ONE.name)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.IO_ERROR, TierError),
        (Fault.PERMISSION, TierError),
        (Fault.UNAVAILABLE, TierUnavailableError),
    ],
)
def test_errors_are_told_and_nothing_is_done(tier, fault, error):
    put(tier, [ONE])
    tier.choose = FaultsOf(dict.fromkeys(["put", "get", "exists", "delete", "list", "usage"], fault))
    for call in (
        lambda: put(tier, [OTHER]),
        lambda: get(tier, ONE.name),
        lambda: exists(tier, [ONE.name]),
        lambda: delete(tier, [ONE.name]),
        tier.list,
        tier.usage,
    ):
        with pytest.raises(error, match="injected"):
            call()
    tier.choose = FaultsOf({})
    assert exists(tier, [ONE.name, OTHER.name]) == [True, False]


def test_a_full_tier_writes_nothing(tier):
    tier.choose = FaultsAt({("put", 1): Fault.FULL})
    futures = tier.put([ONE.name, OTHER.name], [memoryview(ONE.frame), memoryview(OTHER.frame)], deadline=later())
    assert result(futures[0])
    with pytest.raises(TierFullError):
        result(futures[1])
    assert exists(tier, [ONE.name, OTHER.name]) == [True, False]


def hanging(tier, deadline):
    guarded = Guarded(ONE.name.num_bytes)
    return guarded, [
        *tier.put([OTHER.name], [memoryview(OTHER.frame)], deadline=deadline),
        *tier.get([ONE.name], [guarded.buffer], deadline=deadline),
        tier.exists([ONE.name], deadline=deadline),
        tier.delete([ONE.name], deadline=deadline),
    ]


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.LATE])
def test_what_hangs_ends_at_the_deadline_and_touches_no_buffer(tier, fault):
    put(tier, [ONE])
    tier.choose = FaultsOf(dict.fromkeys(["put", "get", "exists", "delete"], fault))
    guarded, futures = hanging(tier, time.monotonic() + 0.05)
    for future in futures:
        with pytest.raises(TierTimeoutError):
            result(future)
    tier.settle()
    assert guarded.untouched()
    done = [True, False] if fault is Fault.HANG else [False, True]
    assert exists(tier.inner, [ONE.name, OTHER.name]) == done


def test_what_hangs_can_be_cancelled(tier):
    put(tier, [ONE])
    tier.choose = FaultsOf(dict.fromkeys(["put", "get", "exists", "delete"], Fault.HANG))
    guarded, futures = hanging(tier, later())
    assert [future.cancel() for future in futures] == [True] * 4
    with pytest.raises(CancelledError):
        futures[0].result()
    assert guarded.untouched()


def test_lost_answers_are_of_things_done(tier):
    put(tier, [ONE])
    tier.choose = FaultsOf({"put": Fault.LOST, "delete": Fault.LOST})
    for call in (lambda: put(tier, [OTHER]), lambda: delete(tier, [ONE.name])):
        with pytest.raises(TierUnavailableError, match="before the answer"):
            call()
    assert exists(tier, [ONE.name, OTHER.name]) == [False, True]


def test_dropped_writes_and_deletions_are_of_things_not_done(tier):
    put(tier, [ONE])
    tier.choose = FaultsOf({"put": Fault.DROP, "delete": Fault.DROP})
    assert put(tier, [OTHER]) == [True]
    assert delete(tier, [ONE.name]) == 1
    assert exists(tier, [ONE.name, OTHER.name]) == [True, False]


@pytest.mark.parametrize("operation", ["put", "get", "exists"])
def test_entries_are_evicted_behind_our_back(tier, operation):
    tier.choose = FaultsOf({operation: Fault.EVICT})
    assert put(tier, [ONE]) == [True]
    if operation == "exists":
        assert exists(tier, [ONE.name]) == [False]
    with pytest.raises(KeyError):
        get(tier, ONE.name)


def test_exists_lies_both_ways(tier):
    put(tier, [ONE])
    tier.choose = FaultsOf({"exists": Fault.LIE})
    assert exists(tier, [ONE.name, OTHER.name]) == [False, True]


def test_equal_seeds_meet_equal_faults():
    def faults(seed):
        choose = RandomFaults(seed, {Fault.FLIP: 0.3, Fault.FULL: 0.3}, ["put", "get"])
        return [choose(operation, ONE.name) for operation in ["put", "get", "delete"] * 50]

    assert faults(1) == faults(1) != faults(2)
    assert set(faults(1)[::3]) == {None, Fault.FLIP, Fault.FULL}
    assert set(faults(1)[1::3]) == {None, Fault.FLIP}
    assert set(faults(1)[2::3]) == {None}
