"""A policy that one long scan does not flush: ARC (Megiddo and Modha, FAST 2003), for chunks of prefixes."""

from collections.abc import Iterator

import numpy as np

from kvjax._checks import integer
from kvjax.pool.ghosts import Ghosts
from kvjax.pool.policy import Access
from kvjax.pool.recency import FIRST_SLOTS, RecencyList, longer

_GHOST_PLACES = 2**18
_MOST_MOVED = 4  # requests that change the list in one call, so that no call pauses where the shares change at once


class ARC:
    """Keeps what was asked for once and what was asked for again in two lists, both by requests as in `LRU`.

    What was asked for once leaves first. The share of the pool that it may fill adapts: it grows when a chunk
    comes back that left from there, and shrinks when one comes back that left from the other list.

    In one respect it is not the ARC of the paper: where the list of what was asked for again is to shrink, its
    oldest request moves to the newest end of the other list instead of leaving at once. A prefix is asked for
    at least as often and as lately as what follows it, so that it always leaves after it.

    Args:
        ghost_places: chunks that left and are remembered at most; a power of two.

    Raises:
        ValueError: `ghost_places` is no power of two below 2**32.
    """

    def __init__(self, ghost_places: int = _GHOST_PLACES):
        places = integer(ghost_places, "ghost_places", at_least=1, below=2**32)
        if places & (places - 1):
            raise ValueError(f"`ghost_places` must be a power of two, got {places}")
        self._once = RecencyList()
        self._again = RecencyList()
        self._ghosts = Ghosts(places)
        self._fingerprints = np.full(FIRST_SLOTS, 0, np.uint64)  # by slot; filled, as `Ghosts` is
        self._target = 0.0  # slots that `_once` may keep for itself

    def touch(self, access: Access) -> None:
        """See `Policy.touch`."""
        slots, ranks = access.slots, access.ranks
        if not len(slots):
            return
        self._fingerprints = longer(self._fingerprints, int(slots.max()) + 1)
        self._fingerprints[slots] = access.fingerprints
        again, once = self._again.holds(slots), self._once.holds(slots)
        deserving = again | (once & access.counted)
        new = np.flatnonzero(~(again | once))
        if len(new):
            deserving[new] = self._came_back(access.fingerprints[new])
        if not np.count_nonzero(deserving):
            self._once.add(access.number, slots, ranks)
        else:
            self._place(access, self._promoted(access, deserving, again, new))
        self._balance()

    def remove(self, slots: np.ndarray, *, evicted: bool) -> None:
        """See `Policy.remove`."""
        for left, held in enumerate((self._once, self._again)):
            is_here = held.holds(slots)
            here = slots[is_here]
            if len(here):
                held.remove(here)
                if evicted:
                    self._ghosts.put(self._fingerprints[here], left)
                slots = slots[~is_here]

    def victims(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `Policy.victims`."""
        yield from self._once.oldest_first()
        yield from self._again.oldest_first()

    def slots(self) -> np.ndarray:
        """See `Policy.slots`."""
        return np.concatenate([self._once.slots(), self._again.slots()])

    @property
    def _num_slots(self) -> int:
        return self._once.num_slots + self._again.num_slots

    def _promoted(self, access: Access, deserving: np.ndarray, again: np.ndarray, new: np.ndarray) -> np.ndarray:
        """A mask of what goes to the list of what was asked for again."""
        if np.count_nonzero(deserving) == len(deserving):
            goes = deserving
        else:  # what a prefix lacks, what follows it must not have
            goes = access.ranks < access.ranks[~deserving].min()
        if not again.any() and self._once.has_access(access.number):
            goes[new] = False  # the access goes on with what it did not ask for
        return goes

    def _place(self, access: Access, goes: np.ndarray) -> None:
        slots, ranks = access.slots, access.ranks
        for some, into, out_of in ((goes, self._again, self._once), (~goes, self._once, self._again)):
            if some.any():
                out_of.remove(slots[some])
                into.add(access.number, slots[some], ranks[some])

    def _came_back(self, fingerprints: np.ndarray) -> np.ndarray:
        """Which of some new chunks left lately; the target moves towards the list that they left."""
        capacity = max(1, self._num_slots)
        sizes = self._ghosts.size(0, capacity), self._ghosts.size(1, capacity)
        from_once, from_again = self._ghosts.take(fingerprints, capacity)
        came_back = from_once | from_again
        if not np.count_nonzero(came_back):
            return came_back
        up = np.count_nonzero(from_once) * max(1.0, sizes[1] / max(1, sizes[0]))
        down = np.count_nonzero(from_again) * max(1.0, sizes[0] / max(1, sizes[1]))
        self._target = min(max(0.0, self._target + up - down), float(capacity))
        return came_back

    def _balance(self) -> None:
        """Shrinks the list of what was asked for again to its share, by a few requests at a time."""
        most = max(0.0, self._num_slots - self._target)
        for _ in range(_MOST_MOVED):
            if self._again.num_slots <= most:
                return
            self._once.append(*self._again.take_oldest())
