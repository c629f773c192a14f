"""What every tier must do: a class of tests that the tests of each inherit."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvjax.tiers import Tier, TierError, TierTimeoutError, Usage
from kvjax.tiers.entries import EntryName
from tests.support.entries import LONG_S, NAMESPACE, OTHER_NAMESPACE, Entry, entry, later, name_of
from tests.support.machines import machine_settings

Make = Callable[[], Tier]
GUARD_BYTES = 64
GUARD = 0xA5
PAST = -1.0  # of the monotonic clock, long ago


class TierConformance:
    """Tests of a tier. A subclass gives the fixture `make`, and `reopen` if entries outlive the tier."""

    machine_examples = 20

    @pytest.fixture
    def make(self) -> Make:
        """A function that makes an empty tier of its own at each call."""
        raise NotImplementedError

    def reopen(self, tier: Tier) -> Tier | None:
        """Closes the tier and returns another one on what it kept, or `None` if it keeps nothing."""
        return None

    def plant(self, tier: Tier, name: EntryName, data: bytes) -> None:
        """Puts bytes under a name that says something else of them."""
        put(tier, [Entry(name, data)])

    @pytest.fixture
    def tier(self, make):
        made = make()
        yield made
        made.close()

    @pytest.mark.parametrize("payload_bytes", [1, 127, 4096, 65_537, 2**20, 5 * 2**20 + 3])
    def test_what_was_put_comes_back(self, tier, payload_bytes):
        one = entry(1, payload_bytes)
        assert put(tier, [one]) == [True]
        assert get(tier, one.name) == one.frame

    def test_a_batch_comes_back_in_any_order(self, tier):
        entries = [entry(seed, 1 + seed * 997) for seed in range(100)]
        assert put(tier, entries) == [True] * 100
        names = [one.name for one in reversed(entries)]
        assert get_all(tier, names) == [one.frame for one in reversed(entries)]

    def test_empty_batches_are_answered(self, tier):
        assert tier.put([], [], deadline=later()) == []
        assert tier.get([], [], deadline=later()) == []
        mask = result(tier.exists([], deadline=later()))
        assert (mask.dtype, mask.shape) == (bool, (0,))
        assert result(tier.delete([], deadline=later())) == 0

    def test_an_unknown_name_is_a_key_error_and_harms_no_other(self, tier):
        known = [entry(seed) for seed in (1, 2)]
        put(tier, known)
        names = [known[0].name, name_of(3, 1000), known[1].name]
        guarded = [Guarded(name.num_bytes) for name in names]
        futures = tier.get(names, [one.buffer for one in guarded], deadline=later())
        with pytest.raises(KeyError):
            result(futures[1])
        assert [result(futures[0]), result(futures[2])] == [len(one.frame) for one in known]
        assert [guarded[0].read(), guarded[2].read()] == [one.frame for one in known]

    def test_a_second_put_changes_nothing(self, tier):
        one = entry(1)
        assert put(tier, [one]) == [True]
        put(tier, [one])
        assert get(tier, one.name) == one.frame
        assert list(tier.list()) == [one.name]

    def test_equal_hashes_of_other_namespaces_groups_and_sizes_are_other_entries(self, tier):
        entries = [
            entry(1),
            entry(1, namespace=OTHER_NAMESPACE),
            entry(1, group_idx=1),
            entry(1, 1001),
        ]
        put(tier, entries)
        assert get_all(tier, [one.name for one in entries]) == [one.frame for one in entries]

    def test_exists_tells_each(self, tier):
        entries = [entry(seed) for seed in range(10)]
        put(tier, entries[::2])
        names = [one.name for one in entries]
        assert exists(tier, [*names, names[0]]) == [True, False] * 5 + [True]

    def test_deleted_entries_are_gone_and_others_are_not(self, tier):
        entries = [entry(seed) for seed in range(4)]
        put(tier, entries)
        gone = [entries[0].name, entries[2].name]
        assert delete(tier, [*gone, name_of(99, 5)]) == 2
        assert delete(tier, gone) == 0
        assert exists(tier, [one.name for one in entries]) == [False, True] * 2
        with pytest.raises(KeyError):
            get(tier, gone[0])
        assert get(tier, entries[1].name) == entries[1].frame
        assert put(tier, [entries[0]]) == [True]
        assert get(tier, entries[0].name) == entries[0].frame

    def test_lists_name_all_entries_or_those_of_a_namespace(self, tier):
        here = [entry(seed, 1 + seed) for seed in range(5)]
        there = [entry(seed, 1 + seed, namespace=OTHER_NAMESPACE) for seed in range(3)]
        assert list(tier.list()) == []
        put(tier, [*here, *there])
        assert sorted(tier.list()) == sorted(one.name for one in [*here, *there])
        assert sorted(tier.list(NAMESPACE)) == sorted(one.name for one in here)
        assert sorted(tier.list(OTHER_NAMESPACE)) == sorted(one.name for one in there)
        assert list(tier.list(bytes(16))) == []

    def test_usage_counts_what_is_there_or_says_nothing(self, tier):
        entries = [entry(seed, 10_000) for seed in range(5)]
        put(tier, entries)
        usage = tier.usage()
        assert isinstance(usage, Usage)
        assert usage.num_entries in (None, 5)
        assert usage.num_bytes is None or usage.num_bytes >= sum(len(one.frame) for one in entries)
        assert usage.max_bytes is None or usage.max_bytes > 0

    @pytest.mark.parametrize("extra_bytes", [1, 3 * 2**20])
    def test_an_entry_that_is_too_large_never_overruns_its_buffer(self, tier, extra_bytes):
        one = entry(1)
        self.plant(tier, one.name, one.frame + b"x" * extra_bytes)
        guarded = Guarded(one.name.num_bytes)
        (future,) = tier.get([one.name], [guarded.buffer], deadline=later())
        assert result(future) > one.name.num_bytes
        assert guarded.read() == one.frame

    @pytest.mark.parametrize("kept_bytes", [1, 500])
    def test_an_entry_that_is_too_small_tells_so(self, tier, kept_bytes):
        one = entry(1)
        self.plant(tier, one.name, one.frame[:kept_bytes])
        guarded = Guarded(one.name.num_bytes)
        (future,) = tier.get([one.name], [guarded.buffer], deadline=later())
        assert result(future) == kept_bytes
        assert guarded.read()[:kept_bytes] == one.frame[:kept_bytes]

    def test_bad_entries_between_good_ones_harm_no_other(self, tier):
        entries = [entry(seed) for seed in range(5)]
        put(tier, entries[::2])
        self.plant(tier, entries[1].name, entries[1].frame * 3)
        self.plant(tier, entries[3].name, entries[3].frame[:7])
        guarded = [Guarded(one.name.num_bytes) for one in entries]
        futures = tier.get([one.name for one in entries], [one.buffer for one in guarded], deadline=later())
        told = [result(future) for future in futures]
        assert told[::2] == [len(entries[0].frame)] * 3
        assert told[1] > len(entries[1].frame)
        assert told[3] == 7
        assert [guarded[at].read() for at in (0, 2, 4)] == [one.frame for one in entries[::2]]

    def test_a_deadline_that_is_past_ends_everything(self, tier):
        there, other = entry(1), entry(2)
        put(tier, [there])
        guarded = Guarded(there.name.num_bytes)
        futures: list[Future] = [
            *tier.put([other.name], [memoryview(other.frame)], deadline=PAST),
            *tier.get([there.name], [guarded.buffer], deadline=PAST),
            tier.exists([there.name], deadline=PAST),
            tier.delete([there.name], deadline=PAST),
        ]
        for future in futures:
            with pytest.raises(TierTimeoutError):
                result(future)
        assert exists(tier, [there.name, other.name]) == [True, False]
        assert guarded.untouched()

    def test_a_buffer_is_not_touched_after_its_future_was_cancelled(self, tier):
        entries = [entry(seed, 200_000) for seed in range(32)]
        put(tier, entries)
        guarded = [Guarded(one.name.num_bytes) for one in entries]
        futures = tier.get([one.name for one in entries], [one.buffer for one in guarded], deadline=later())
        cancelled = []
        for future, buffer in zip(reversed(futures), reversed(guarded), strict=True):
            cancelled.insert(0, buffer.whole() if future.cancel() else None)
        assert get_all(tier, [one.name for one in entries]) == [one.frame for one in entries]
        for one, future, buffer, then in zip(entries, futures, guarded, cancelled, strict=True):
            if then is not None:
                assert future.cancelled()
                assert buffer.whole() == then
            else:
                assert result(future) == len(one.frame)
                assert buffer.read() == one.frame

    def test_a_cancelled_put_leaves_nothing_or_the_whole_entry(self, tier):
        entries = [entry(seed, 200_000) for seed in range(32)]
        frames = [bytearray(one.frame) for one in entries]
        futures = tier.put([one.name for one in entries], [memoryview(one) for one in frames], deadline=later())
        for future, frame in zip(reversed(futures), reversed(frames), strict=True):
            if future.cancel():
                frame[:] = bytes(len(frame))
        assert not wait(futures, LONG_S).not_done
        for one, future, there in zip(entries, futures, exists(tier, [one.name for one in entries]), strict=True):
            assert there or future.cancelled()
            assert not there or get(tier, one.name) == one.frame

    def test_a_closed_tier_refuses(self, make):
        tier, one = make(), entry(1)
        put(tier, [one])
        tier.close()
        tier.close()
        buffer = memoryview(bytearray(one.name.num_bytes))
        for call in (
            lambda: result(tier.put([one.name], [memoryview(one.frame)], deadline=later())[0]),
            lambda: result(tier.get([one.name], [buffer], deadline=later())[0]),
            lambda: result(tier.exists([one.name], deadline=later())),
            lambda: result(tier.delete([one.name], deadline=later())),
            lambda: list(tier.list()),
            tier.usage,
        ):
            with pytest.raises(TierError):
                call()

    def test_what_is_under_way_ends_when_the_tier_is_closed(self, make):
        tier = make()
        entries = [entry(seed, 200_000) for seed in range(32)]
        puts = tier.put([one.name for one in entries], [memoryview(one.frame) for one in entries], deadline=later())
        guarded = [Guarded(one.name.num_bytes) for one in entries]
        gets = tier.get([one.name for one in entries], [one.buffer for one in guarded], deadline=later())
        tier.close()
        assert not wait([*puts, *gets], LONG_S).not_done
        for one, future, buffer in zip(entries, gets, guarded, strict=True):
            if future.exception() is None:
                assert buffer.read() == one.frame

    def test_entries_outlive_the_tier(self, make):
        tier, one = make(), entry(1, 50_000)
        put(tier, [one])
        again = self.reopen(tier)
        if again is None:
            tier.close()
            pytest.skip("this tier keeps nothing once it is closed")
        try:
            assert list(again.list()) == [one.name]
            assert get(again, one.name) == one.frame
        finally:
            again.close()

    def test_threads_that_put_get_and_delete_see_whole_entries_or_none(self, tier):
        entries = [entry(seed, 30_000) for seed in range(8)]
        wrong: list[Any] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(60):
                one = entries[rng.integers(len(entries))]
                try:
                    match rng.integers(3):
                        case 0:
                            put(tier, [one])
                        case 1:
                            delete(tier, [one.name])
                        case _ if get(tier, one.name) != one.frame:
                            wrong.append(one.name)
                except KeyError:
                    pass
                except Exception as error:  # noqa: BLE001 - the test tells it
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_whatever_is_done_nothing_comes_back_but_what_was_stored(self, make):
        settings = machine_settings(self.machine_examples, 20)
        run_state_machine_as_test(lambda: TierMachine(make()), settings=settings)  # pyright: ignore[reportArgumentType]


class Guarded:
    """A buffer between bytes that must stay as they are."""

    def __init__(self, num_bytes: int):
        self._memory = np.full(num_bytes + 2 * GUARD_BYTES, GUARD, np.uint8)
        self.buffer = memoryview(self._memory)[GUARD_BYTES : GUARD_BYTES + num_bytes]

    def read(self) -> bytes:
        """The buffer's bytes, if those around it are untouched."""
        outside = np.concatenate([self._memory[:GUARD_BYTES], self._memory[-GUARD_BYTES:]])
        assert (outside == GUARD).all(), "bytes outside the buffer were written"
        return bytes(self.buffer)

    def whole(self) -> bytes:
        """The buffer's bytes and those around it."""
        return self._memory.tobytes()

    def untouched(self) -> bool:
        return bool((self._memory == GUARD).all())


class TierMachine(RuleBasedStateMachine):
    """A tier beside a dictionary: it may lose entries, but gives no other bytes and invents none."""

    seeds = st.integers(0, 5)

    def __init__(self, tier: Tier):
        super().__init__()
        self.tier = tier
        self.entries = [entry(seed, 1 + seed * 700) for seed in range(6)]
        self.stored: dict[EntryName, bytes] = {}

    @rule(seeds=st.lists(seeds, min_size=1, max_size=6, unique=True))
    def put(self, seeds):
        chosen = [self.entries[seed] for seed in seeds]
        put(self.tier, chosen)
        self.stored |= {one.name: one.frame for one in chosen}

    @rule(seeds=st.lists(seeds, min_size=1, max_size=6))
    def get(self, seeds):
        names = [self.entries[seed].name for seed in seeds]
        guarded = [Guarded(name.num_bytes) for name in names]
        futures = self.tier.get(names, [one.buffer for one in guarded], deadline=later())
        for name, buffer, future in zip(names, guarded, futures, strict=True):
            try:
                assert result(future) == name.num_bytes
            except KeyError:
                self.stored.pop(name, None)
            else:
                assert buffer.read() == self.stored[name]

    @rule(seeds=st.lists(seeds, min_size=1, max_size=6))
    def exists(self, seeds):
        names = [self.entries[seed].name for seed in seeds]
        there = {name for name, known in zip(names, exists(self.tier, names), strict=True) if known}
        assert there <= self.stored.keys()

    @rule(seeds=st.lists(seeds, max_size=6, unique=True))
    def delete(self, seeds):
        names = {self.entries[seed].name for seed in seeds}
        assert delete(self.tier, list(names)) <= len(names & self.stored.keys())
        for name in names:
            self.stored.pop(name, None)

    @invariant()
    def lists_nothing_else(self):
        assert set(self.tier.list()) <= self.stored.keys()

    def teardown(self):
        self.tier.close()


def result(future: Future) -> Any:
    """The result of a future that must end."""
    return future.result(LONG_S)


def put(tier: Tier, entries: Sequence[Entry]) -> list[bool]:
    """Writes entries and tells which were written."""
    frames = [memoryview(one.frame) for one in entries]
    return [result(future) for future in tier.put([one.name for one in entries], frames, deadline=later())]


def get(tier: Tier, name: EntryName) -> bytes:
    """Reads an entry of the size that its name says."""
    return get_all(tier, [name])[0]


def get_all(tier: Tier, names: Sequence[EntryName]) -> list[bytes]:
    """Reads entries of the sizes that their names say."""
    guarded = [Guarded(name.num_bytes) for name in names]
    futures = tier.get(names, [one.buffer for one in guarded], deadline=later())
    for name, future in zip(names, futures, strict=True):
        assert result(future) == name.num_bytes
    return [one.read() for one in guarded]


def exists(tier: Tier, names: Sequence[EntryName]) -> list[bool]:
    """Which entries are there."""
    return result(tier.exists(names, deadline=later())).tolist()


def delete(tier: Tier, names: Sequence[EntryName]) -> int:
    """Deletes entries and tells how many were there."""
    return result(tier.delete(names, deadline=later()))
