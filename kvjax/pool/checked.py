"""Between the pool and a policy, which may be a user's: what it answers is checked, what it raises does no harm."""

import reprlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvjax._checks import shown
from kvjax.pool.chunks import NO_SLOTS, ChunkTable
from kvjax.pool.lru import LRU
from kvjax.pool.policy import Access, Policy, PolicyError

_METHODS = ("touch", "remove", "victims", "slots")
_END = object()


class CheckedPolicy:
    """Asks a policy for victims and tells it what happened.

    A policy that raises when it is told something is no longer asked: a new `LRU` takes its place.

    Args:
        policy: new, for this pool alone.
        chunks: what answers are checked against.

    Raises:
        ValueError: `policy` is no object with the methods of `Policy`, or knows slots already.
    """

    def __init__(self, policy: Policy, chunks: ChunkTable):
        _check_methods(policy)
        self.error: Exception | None = None  # why the policy was replaced
        self._policy = policy
        self._chunks = chunks
        self._kept = np.zeros(len(chunks.key), bool)  # what a call protects; all false between calls

    def touch(self, access: Access) -> None:
        """See `Policy.touch`; the slots are of chunks that keys lead to."""
        try:
            self._policy.touch(access)
        except Exception as error:  # noqa: BLE001  # the edge to a user's code
            self._replace(error)

    def remove(self, slots: np.ndarray, *, evicted: bool) -> None:
        """See `Policy.remove`; no key leads to these chunks any more."""
        try:
            self._policy.remove(slots.copy(), evicted=evicted)
        except Exception as error:  # noqa: BLE001  # the edge to a user's code
            self._replace(error)

    def slots(self) -> np.ndarray:
        """See `Policy.slots`."""
        return self._policy.slots()

    def choose(self, missing: int, kept: np.ndarray) -> np.ndarray | None:
        """Returns the slots to evict for `missing` units, or `None` if that cannot be had.

        Chunks that are read, written or in `kept` are passed over. The last ones that go are all of one rank.

        Raises:
            ValueError: the policy raised, or named what is no known slot, or one slot twice.
        """
        if missing <= 0:
            return NO_SLOTS
        self._kept[kept] = True
        try:
            return self._choose(missing)
        finally:
            self._kept[kept] = False

    def _choose(self, missing: int) -> np.ndarray | None:
        chunks, chosen, num_named = self._chunks, [], 0
        for slots, ranks in self._named():
            num_named += len(slots)
            if num_named > chunks.most_slots:
                raise PolicyError("a policy must name each slot once, got more slots than there are chunks")
            may_go = chunks.pins[slots] == 0
            if not may_go.any():
                continue
            may_go &= ~(chunks.writing[slots] | self._kept[slots])
            units = np.cumsum(np.where(may_go, chunks.widths[chunks.group_idx[slots]], 0))
            enough = int(np.searchsorted(units, missing))
            if enough < len(slots):
                of_next_rank = np.flatnonzero(ranks[enough + 1 :] != ranks[enough])
                end = enough + 1 + int(of_next_rank[0]) if len(of_next_rank) else len(slots)
                return _distinct(np.concatenate([*chosen, slots[:end][may_go[:end]]]))
            chosen.append(slots[may_go])
            missing -= int(units[-1])
        return None

    def _named(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What the policy names, checked but for slots named twice."""
        try:
            pairs = iter(self._policy.victims())
        except Exception as error:  # the edge to a user's code
            raise PolicyError(f"a policy's `victims` must return an iterator, it raised {error!r}") from error
        while True:
            try:
                pair = next(pairs, _END)
            except Exception as error:  # the edge to a user's code
                raise PolicyError(f"a policy's `victims` must name slots, it raised {error!r}") from error
            if pair is _END:
                return
            yield self._checked(pair)

    def _checked(self, pair: Any) -> tuple[np.ndarray, np.ndarray]:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_integers, pair))):
            raise PolicyError(f"a policy must name victims as pairs of arrays of integers, got {_shown(pair)}")
        slots, ranks = pair
        if len(slots) != len(ranks) or not len(slots):
            raise PolicyError(f"a policy must name victims with one rank for each, got {len(slots)} and {len(ranks)}")
        indexed = self._chunks.indexed
        known = (slots >= 0) & (slots < len(indexed))
        known &= indexed[slots if np.count_nonzero(known) == len(slots) else np.where(known, slots, 0)]
        if np.count_nonzero(known) < len(slots):
            raise PolicyError(f"a policy must name slots of chunks that it was told of, got {slots[~known][0]}")
        return slots, ranks

    def _replace(self, error: Exception) -> None:
        """A new LRU is told of all chunks, access by access; of one access those that were stored last go first."""
        self.error = self.error or error
        chunks = self._chunks
        self._policy = LRU()
        live = np.flatnonzero(chunks.indexed)
        if not len(live):
            return
        live = live[np.argsort(chunks.access[live], kind="stable")]
        numbers, starts = np.unique(chunks.access[live], return_index=True)
        for number, slots in zip(numbers.tolist(), np.split(live, starts[1:]), strict=True):
            not_counted = np.zeros(len(slots), bool)
            self._policy.touch(Access(number, slots, chunks.epoch[slots], not_counted, chunks.fingerprint[slots]))


def _check_methods(policy: Any) -> None:
    missing = [f"`{name}`" for name in _METHODS if not callable(getattr(policy, name, None))]
    if missing or isinstance(policy, type):
        lacking = "a class" if isinstance(policy, type) else f"one without {', '.join(missing)}"
        raise ValueError(
            f"`policy` must be an object with the methods of `kvjax.pool.Policy`, got {shown(policy)}, {lacking}"
        )
    try:
        num_known = len(policy.slots())
    except Exception as error:  # the edge to a user's code
        raise ValueError(f"`policy` must know no slots yet, its `slots` raised {error!r}") from error
    if num_known:
        raise ValueError(f"`policy` must be new, for one pool alone, got one that knows {num_known} slots")


def _distinct(slots: np.ndarray) -> np.ndarray:
    ordered = np.sort(slots)
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        raise PolicyError(f"a policy must name each slot once, got {ordered[1:][twice][0]} twice")
    return slots.astype(np.int64, copy=False)


def _is_integers(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iu"


def _shown(pair: Any) -> str:
    if isinstance(pair, tuple):
        kinds = (
            f"an array of {p.dtype}, shape {p.shape}" if isinstance(p, np.ndarray) else reprlib.repr(p) for p in pair
        )
        return " and ".join(kinds) or "()"
    return reprlib.repr(pair)
