"""A user's own policy: one that is right, and all the ways in which one can be wrong."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvjax.pool import ARC, LRU, Access, ChunkPool, Policy
from tests.pool.conformance import FULL, PolicyConformance, order, play
from tests.pool.test_pool import keys, prepare, put, resident, slots_of, snapshot, touch


class Plain:
    """The last access of each slot and its rank there, sorted when victims are asked for."""

    def __init__(self):
        self._known: dict[int, tuple[int, int]] = {}

    def touch(self, access: Access) -> None:
        for slot, rank in zip(access.slots.tolist(), access.ranks.tolist(), strict=True):
            self._known[slot] = (access.number, -rank)

    def remove(self, slots: np.ndarray, *, evicted: bool) -> None:
        for slot in slots.tolist():
            self._known.pop(slot, None)

    def victims(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        places = {place: at for at, place in enumerate(sorted(set(self._known.values())))}
        pairs = sorted((places[place], slot) for slot, place in self._known.items())
        if pairs:
            ranks, slots = np.array(pairs).T
            yield slots, ranks

    def slots(self) -> np.ndarray:
        return np.array(list(self._known), np.int64)


class FirstIn(Plain):
    """What was stored first leaves first, whatever follows it in later requests: this spoils prefixes."""

    def touch(self, access: Access) -> None:
        for slot, rank in zip(access.slots.tolist(), access.ranks.tolist(), strict=True):
            self._known.setdefault(slot, (access.number, -rank))


class TestPlain(PolicyConformance):
    def make_policy(self) -> Plain:
        return Plain()


def test_a_policy_that_lets_a_prefix_go_before_what_follows_it_is_found_out():
    """A request stores two chunks, the next one a third behind them; a third request needs room."""
    steps = [
        ("ask", 0, 0, 4, False),
        ("store", 0, True),
        ("finish", 0),
        ("ask", 1, 4, 4, False),
        ("store", 0, True),
        ("finish", 0),
        ("ask", 0, 0, 4, False),
        ("store", 0, True),
    ]
    play(FULL, Plain(), 8, steps)
    with pytest.raises(AssertionError, match="a part of its prefix made room"):
        play(FULL, FirstIn(), 8, steps)


class Wrong(LRU):
    """An LRU of which one method does something else when it is told to."""

    def __init__(self, name: str, instead: Callable):
        super().__init__()
        self.is_wrong = False
        right = getattr(self, name)

        def method(*args, **kwargs):
            return instead(*args, **kwargs) if self.is_wrong else right(*args, **kwargs)

        setattr(self, name, method)


def full_pool(policy: Policy) -> ChunkPool:
    """Four units; chunks "a" to "c" are there, "c" is being read, "d" is being written."""
    pool = ChunkPool(4, [1], policy)
    put(pool, "a", "b", "c")
    assert prepare(pool, "d") is not None
    pool.pin(pool.find(keys("c")))
    return pool


def pair(slots, ranks=None) -> tuple[np.ndarray, np.ndarray]:
    slots = np.array(slots)
    return slots, np.arange(len(slots)) if ranks is None else np.array(ranks)


def endless() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield pair([2])


def raises(*_, **__):
    raise ZeroDivisionError("of a user")


def raises_later() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield pair([2])
    raise KeyError("of a user")


@pytest.mark.parametrize(
    ("victims", "words"),
    [
        (lambda: iter([pair([99])]), "a policy must name slots of chunks that it was told of, got 99"),
        (lambda: iter([pair([-1])]), "a policy must name slots of chunks that it was told of, got -1"),
        (lambda: iter([pair([0, 4])]), "a policy must name slots of chunks that it was told of, got 4"),
        (lambda: iter([pair([0, 0])]), "a policy must name each slot once, got 0 twice"),
        (lambda: iter([pair([0]), pair([0])]), "a policy must name each slot once, got 0 twice"),
        (endless, "a policy must name each slot once, got more slots than there are chunks"),
        (lambda: iter([pair([0, 1], [1])]), "a policy must name victims with one rank for each, got 2 and 1"),
        (lambda: iter([(np.empty(0, int),) * 2]), "a policy must name victims with one rank for each, got 0 and 0"),
        (lambda: iter([pair([0.0, 1.0])]), r"pairs of arrays of integers, got an array of float64, shape \(2,\) and "),
        (lambda: iter([pair([0, 1], [0.5, 1.5])]), "pairs of arrays of integers, got an array of int64"),
        (lambda: iter([pair([[0, 1]])]), r"pairs of arrays of integers, got an array of int64, shape \(1, 2\)"),
        (lambda: iter([([0, 1], [0, 1])]), r"pairs of arrays of integers, got \[0, 1\] and \[0, 1\]"),
        (lambda: iter([np.arange(2)]), r"pairs of arrays of integers, got array\(\[0, 1\]\)"),
        (lambda: iter([None]), "pairs of arrays of integers, got None"),
        (lambda: 7, r"a policy's `victims` must return an iterator, it raised TypeError"),
        (lambda: None, r"a policy's `victims` must return an iterator, it raised TypeError"),
        (raises, r"a policy's `victims` must return an iterator, it raised ZeroDivisionError\('of a user'\)"),
        (raises_later, r"a policy's `victims` must name slots, it raised KeyError\('of a user'\)"),
    ],
)
def test_a_wrong_answer_is_an_error_that_changes_nothing(victims, words):
    policy = Wrong("victims", victims)
    pool = full_pool(policy)
    before = snapshot(pool)
    policy.is_wrong = True
    with pytest.raises(ValueError, match=words):
        prepare(pool, "x", "y")
    policy.is_wrong = False
    assert snapshot(pool) == before
    assert pool.policy_error is None
    pool.check_integrity()
    assert prepare(pool, "x", "y") is not None


def test_a_policy_may_name_less_than_all():
    policy = Wrong("victims", lambda: iter([pair([1])]))
    pool = full_pool(policy)
    policy.is_wrong = True
    assert prepare(pool, "x", "y") is None
    put(pool, "x")
    assert resident(pool, "a", "b", "c", "x") == [True, False, True, True]


def fail(policy: Wrong, pool: ChunkPool, name: str) -> None:
    policy.is_wrong = True
    if name == "touch":
        touch(pool, "a", "b")
    else:
        pool.invalidate(keys("a"))


@pytest.mark.parametrize("name", ["touch", "remove"])
def test_a_policy_that_raises_when_it_is_told_something_is_replaced(name):
    policy = Wrong(name, raises)
    pool = full_pool(policy)
    assert pool.policy_error is None
    fail(policy, pool, name)
    assert isinstance(pool.policy_error, ZeroDivisionError)
    pool.check_integrity()
    for reservation in pool.open_reservations():
        pool.complete_store(reservation, ok=True)
    for pins in pool.open_pins():
        pool.unpin(pins)
    put(pool, *"wxyz")
    assert resident(pool, *"abcdwxyz") == [False] * 4 + [True] * 4
    pool.check_integrity()


@pytest.mark.parametrize("how", ["evicted", "failed", "dropped"])
def test_a_policy_that_raises_as_the_last_chunk_leaves_is_replaced_by_one_that_knows_nothing(how):
    policy = Wrong("remove", raises)
    pool = ChunkPool(1, [1], policy)
    if how == "failed":
        reservation = prepare(pool, "a")
        policy.is_wrong = True
        pool.complete_store(reservation, ok=False)
    else:
        put(pool, "a")
        policy.is_wrong = True
        pool.invalidate(keys("a")) if how == "dropped" else put(pool, "b")
    assert isinstance(pool.policy_error, ZeroDivisionError)
    pool.check_integrity()
    put(pool, "c")
    assert resident(pool, "a", "b", "c") == [False, False, True]


@pytest.mark.parametrize("name", ["touch", "remove"])
def test_a_store_goes_through_when_the_policy_raises_in_it(name):
    policy = Wrong(name, raises)
    pool = full_pool(policy)
    policy.is_wrong = True
    reservation = prepare(pool, "x", "y")
    assert reservation.keys == tuple(keys("x", "y"))
    assert pool.complete_store(reservation, ok=True).all()
    assert resident(pool, "a", "b", "c", "x", "y") == [False, False, True, True, True]
    assert isinstance(pool.policy_error, ZeroDivisionError)
    pool.check_integrity()


def test_the_new_policy_goes_by_the_accesses_so_far_and_in_each_by_what_was_stored_last():
    policy = Wrong("remove", raises)
    pool = ChunkPool(6, [1], policy)
    put(pool, "old 0", "old 1")
    put(pool, "mid 0", "mid 1")
    put(pool, "new")
    touch(pool, "old 0")
    policy.is_wrong = True
    pool.invalidate(keys("new"))
    assert pool.policy_error is not None
    assert order(pool._books.policy._policy) == [[s] for s in slots_of(pool, "old 1", "mid 1", "mid 0", "old 0")]


@pytest.mark.parametrize("method", ["touch", "remove", "victims", "slots"])
def test_an_object_without_a_method_is_no_policy(method):
    policy = LRU()
    setattr(policy, method, None)
    with pytest.raises(ValueError, match=rf"`policy` must be an object with the methods .*, one without `{method}`"):
        ChunkPool(4, [1], policy)


@pytest.mark.parametrize("wrong", ["lru", object(), 7, LRU])
def test_what_is_no_object_with_the_methods_is_refused(wrong):
    with pytest.raises(ValueError, match=r"`policy` must be an object with the methods of `kvjax\.pool\.Policy`, got "):
        ChunkPool(4, [1], wrong)


@pytest.mark.parametrize("policy", [LRU(), ARC(), Plain()])
def test_a_policy_of_another_pool_is_refused(policy):
    put(ChunkPool(4, [1], policy), "a", "b")
    with pytest.raises(ValueError, match="`policy` must be new, for one pool alone, got one that knows 2 slots"):
        ChunkPool(4, [1], policy)


def test_what_a_policy_does_to_its_arrays_harms_nobody():
    class Scribbler(LRU):
        def touch(self, access: Access) -> None:
            super().touch(access)
            for array in (access.slots, access.ranks, access.counted, access.fingerprints):
                array[:] = 1

        def remove(self, slots: np.ndarray, *, evicted: bool) -> None:
            super().remove(slots, evicted=evicted)
            slots[:] = 1

    pool = ChunkPool(4, [1], Scribbler())
    put(pool, "a", "b", "c")
    slots, ranks = slots_of(pool, "c", "a"), np.array([0, 1])
    pool.touch(slots, ranks, access=pool.new_access())
    assert (slots.tolist(), ranks.tolist()) == ([2, 0], [0, 1])
    put(pool, "x", "y")
    pool.invalidate(keys("x"))
    pool.check_integrity()
    assert resident(pool, "a", "b", "c", "x", "y") == [True, False, True, False, True]


class Recorder(LRU):
    """Remembers what it was told."""

    def __init__(self):
        super().__init__()
        self.named: list[list[int]] = []
        self.removed: list[tuple[list[int], bool]] = []

    def touch(self, access: Access) -> None:
        self.named.append(access.slots.tolist())
        super().touch(access)

    def remove(self, slots: np.ndarray, *, evicted: bool) -> None:
        self.removed.append((slots.tolist(), evicted))
        super().remove(slots, evicted=evicted)


def test_a_policy_hears_what_made_room_and_what_was_dropped():
    policy = Recorder()
    pool = ChunkPool(2, [1], policy)
    put(pool, "a", "b")
    put(pool, "c")
    pool.invalidate(keys("c"))
    assert policy.removed == [([1], True), ([1], False)]


def test_an_access_names_no_slot_twice_where_a_chunk_of_the_request_made_room_for_another():
    policy = Recorder()
    pool = ChunkPool(2, [1], policy)
    put(pool, "old", "a")
    prepare(pool, "old", "a", "new", ranks=np.array([2, 0, 1]), kept=slots_of(pool, "a"))
    assert policy.named[-1] == [1, 0]
    pool.check_integrity()
