"""A list of accesses, the oldest first: what policies of recency are made of."""

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

_NOT_HERE = 0  # the block of a slot that is in none
# Arrays by slot begin with so many entries; pages that are never touched take no memory. From 4 MiB on NumPy asks for
# huge pages, and the call that first touches one waits until it is cleared.
FIRST_SLOTS = 2**20 - 1
_BLOCK_ENTRIES = 256  # a block takes one more access while it has fewer
_MOST_ENTRIES = 8 * _BLOCK_ENTRIES  # late parts of old accesses make a block grow until it is split
_MOST_BLOCKS = 32  # that are read at a time
_SPARSE = _BLOCK_ENTRIES // 4  # entries of a block at which it is joined with the next
_PARTS = 20  # bits of a key below the number of the access: those appended between two numbers


class _Block:
    """Entries of consecutive accesses. Slots that left, or came again elsewhere, stay listed until it is packed."""

    __slots__ = ("is_sorted", "keys", "last_key", "most_entries", "num_entries", "num_live", "ranks", "sets", "slots")

    def __init__(self, capacity: int):
        self.keys = np.empty(capacity, np.int64)
        self.ranks = np.empty(capacity, np.int64)
        self.slots = np.empty(capacity, np.int64)
        self.num_entries = 0
        self.num_live = 0
        self.last_key = 0  # no entry has a larger one, and all of the next block do
        self.most_entries = _MOST_ENTRIES  # with more it is split
        self.is_sorted = True  # by key, and the highest rank first
        self.sets: np.ndarray | None = None  # once it is packed: entries that leave at once, numbered from 0 on

    def append(self, keys: np.ndarray | int, slots: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Adds entries at the end and returns their places."""
        start, stop = self.num_entries, self.num_entries + len(slots)
        if stop > len(self.slots):
            for name in ("keys", "ranks", "slots"):
                longer = np.empty(max(stop, 2 * len(self.slots)), np.int64)
                longer[:start] = getattr(self, name)[:start]
                setattr(self, name, longer)
        self.keys[start:stop], self.slots[start:stop], self.ranks[start:stop] = keys, slots, ranks
        self.num_entries = stop
        self.num_live += len(slots)
        self.sets = None
        return np.arange(start, stop)


class RecencyList:
    """Slots by accesses. A call costs a few array operations on what it names, and on a block of entries or two,
    whatever the list holds.

    Each slot is in the access that named it last. Accesses lie in blocks, ordered by their numbers, and no access is
    in two blocks: so many small ones are read as fast as a large one, and a late part of an old one finds its place.
    """

    def __init__(self):
        self._blocks: dict[int, _Block] = {}
        self._order: list[int] = []  # block ids, the oldest first
        self._last_keys: list[int] = []  # parallel to `_order`
        self._free_ids: list[int] = []
        self._newest_key = 0
        self._block_of = np.zeros(FIRST_SLOTS, np.int32)  # by slot
        self._place = np.zeros(FIRST_SLOTS, np.int32)  # by slot, in its block
        self._most_slots = 0  # no slot from here on was ever here
        self.num_slots = 0

    def add(self, number: int, slots: np.ndarray, ranks: np.ndarray) -> None:
        """Puts slots into the access of this number, beside those that it has here."""
        self._put(number << _PARTS, slots, ranks)

    def append(self, slots: np.ndarray, ranks: np.ndarray) -> None:
        """Puts slots into an access of their own that is newer than all others."""
        self._put(self._newest_key + 1, slots, ranks)

    def remove(self, slots: np.ndarray) -> None:
        """Forgets slots; those that are not here are ignored."""
        blocks = self._blocks_of(slots)
        here = blocks != _NOT_HERE
        num_here = int(np.count_nonzero(here))
        if not num_here:
            return
        if num_here < len(slots):
            slots, blocks = slots[here], blocks[here]
        self._block_of[slots] = _NOT_HERE
        self.num_slots -= num_here
        if np.count_nonzero(blocks == blocks[0]) == num_here:
            left = {int(blocks[0]): num_here}
        else:
            counts = np.bincount(blocks)
            left = {block_id: int(counts[block_id]) for block_id in np.flatnonzero(counts).tolist()}
        for block_id, count in left.items():
            self._blocks[block_id].num_live -= count
        for block_id in left:
            if block_id in self._blocks:  # not joined with a neighbour meanwhile
                self._tidy(block_id)

    def holds(self, slots: np.ndarray) -> np.ndarray:
        """Returns a mask of the slots that are here."""
        return self._blocks_of(slots) != _NOT_HERE

    def has_access(self, number: int) -> bool:
        """Whether an access of this number has slots here."""
        at = bisect_left(self._last_keys, number << _PARTS)
        if at == len(self._order):
            return False
        block_id = self._order[at]
        block = self._blocks[block_id]
        ours = np.flatnonzero(block.keys[: block.num_entries] == number << _PARTS)
        return bool(self._is_live(block_id, block, ours).any())

    def oldest_first(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields pairs `(slots, ranks)` in the order in which they leave; only slots of one access and one rank have
        equal ranks there. The list must not change meanwhile.

        The first pair is small, as it mostly suffices; later ones grow, so that much that must stay is soon passed.
        """
        at, num_blocks = 0, 1
        while at < len(self._order):
            blocks = [self._packed(block_id) for block_id in self._order[at : at + num_blocks]]
            sets, first = [], 0
            for block in blocks:
                of_block = _sets_of(block)
                sets.append(of_block + first)
                first += int(of_block[-1]) + 1
            yield np.concatenate([block.slots[: block.num_entries] for block in blocks]), np.concatenate(sets)
            at, num_blocks = at + num_blocks, min(2 * num_blocks, _MOST_BLOCKS)

    def take_oldest(self) -> tuple[np.ndarray, np.ndarray]:
        """Removes the oldest access and returns its slots and ranks; requires that there is one."""
        block = self._packed(self._order[0])
        stop = int(np.searchsorted(block.keys[: block.num_entries], block.keys[0], "right"))
        slots, ranks = block.slots[:stop].copy(), block.ranks[:stop].copy()
        self.remove(slots)
        return slots, ranks

    def slots(self) -> np.ndarray:
        """Returns all slots that are here."""
        return np.flatnonzero(self._block_of[: self._most_slots] != _NOT_HERE)

    def _blocks_of(self, slots: np.ndarray) -> np.ndarray:
        """The block of each slot, 0 where it is in none: the last entry, of no slot, answers for all beyond."""
        return self._block_of.take(slots, mode="clip")

    def _put(self, key: int, slots: np.ndarray, ranks: np.ndarray) -> None:
        if not len(slots):
            return
        self._reserve(int(slots.max()) + 1)
        self.remove(slots)
        block_id = self._block_for(key)
        block = self._blocks[block_id]
        order = np.argsort(-ranks, kind="stable")
        slots = slots[order]
        if block.num_entries and key <= block.keys[block.num_entries - 1]:
            block.is_sorted = False
        self._block_of[slots] = block_id
        self._place[slots] = block.append(key, slots, ranks[order])
        self.num_slots += len(slots)
        self._newest_key = max(self._newest_key, key)
        if block.num_entries > block.most_entries:
            self._split(block_id)

    def _block_for(self, key: int) -> int:
        """The block that an access belongs to; a new one if it is the newest and the last block is full."""
        at = bisect_left(self._last_keys, key)
        if at < len(self._order):
            return self._order[at]
        if self._order:
            last = self._blocks[self._order[-1]]
            if 2 * last.num_live < _BLOCK_ENTRIES <= last.num_entries:
                last = self._packed(self._order[-1])
            if last.num_entries < _BLOCK_ENTRIES:
                self._last_keys[-1] = last.last_key = key
                return self._order[-1]
        return self._new_block(at, key)

    def _new_block(self, at: int, last_key: int) -> int:
        block_id = self._free_ids.pop() if self._free_ids else len(self._blocks) + 1
        self._blocks[block_id] = block = _Block(2 * _BLOCK_ENTRIES)
        block.last_key = last_key
        self._order.insert(at, block_id)
        self._last_keys.insert(at, last_key)
        return block_id

    def _split(self, block_id: int) -> None:
        """Halves a block between two accesses. One that is a single access may grow twice as large first."""
        block = self._packed(block_id)
        keys, num_entries = block.keys[: block.num_entries], block.num_entries
        middle = keys[num_entries // 2]
        cut = int(np.searchsorted(keys, middle)) or int(np.searchsorted(keys, middle, "right"))
        block.most_entries = _MOST_ENTRIES if cut < num_entries else 2 * num_entries
        if cut == num_entries or num_entries <= _MOST_ENTRIES:
            return
        self._move(block, cut, self._new_block(bisect_left(self._last_keys, block.last_key), int(keys[cut - 1])))
        for array in (block.keys, block.ranks, block.slots):
            array[: num_entries - cut] = array[cut:num_entries]
        block.num_entries = block.num_live = num_entries - cut
        block.sets = None
        self._place[block.slots[: block.num_entries]] = np.arange(block.num_entries)

    def _move(self, block: _Block, num_entries: int, into_id: int) -> None:
        """Puts the first entries of a block that is packed into another one."""
        first, into = slice(num_entries), self._blocks[into_id]
        into.is_sorted = into.is_sorted and not into.num_entries
        self._block_of[block.slots[first]] = into_id
        self._place[block.slots[first]] = into.append(block.keys[first], block.slots[first], block.ranks[first])

    def _tidy(self, block_id: int) -> None:
        """Drops a block that became empty; of what became small, neighbours are joined."""
        block = self._blocks[block_id]
        if block.num_live >= _SPARSE:
            return
        at = bisect_left(self._last_keys, block.last_key)
        if not block.num_live:
            self._drop(at)
            return
        for lower in (at, at - 1):
            if 0 <= lower < len(self._order) - 1:
                older, newer = self._order[lower], self._order[lower + 1]
                if self._blocks[older].num_live + self._blocks[newer].num_live <= _BLOCK_ENTRIES:
                    packed = self._packed(older)
                    self._move(packed, packed.num_entries, newer)
                    self._drop(lower)

    def _drop(self, at: int) -> None:
        block_id = self._order.pop(at)
        del self._blocks[block_id], self._last_keys[at]
        self._free_ids.append(block_id)

    def _packed(self, block_id: int) -> _Block:
        """The block, with only the slots that are in it, in their order."""
        block = self._blocks[block_id]
        if block.num_live == block.num_entries and block.is_sorted:
            return block
        places = np.arange(block.num_entries)
        kept = places[self._is_live(block_id, block, places)]
        if not block.is_sorted:
            kept = kept[np.lexsort((-block.ranks[kept], block.keys[kept]))]
        for array in (block.keys, block.ranks, block.slots):
            array[: len(kept)] = array[kept]
        block.num_entries = len(kept)
        block.is_sorted = True
        block.sets = None
        self._place[block.slots[: len(kept)]] = np.arange(len(kept))
        return block

    def _is_live(self, block_id: int, block: _Block, places: np.ndarray) -> np.ndarray:
        """A mask of the places of a block whose slots have not left it."""
        slots = block.slots[places]
        return (self._block_of[slots] == block_id) & (self._place[slots] == places)

    def _reserve(self, num_slots: int) -> None:
        self._most_slots = max(self._most_slots, num_slots)
        self._block_of = longer(self._block_of, num_slots)
        self._place = longer(self._place, num_slots)


def _sets_of(block: _Block) -> np.ndarray:
    """The sets of a block that is packed."""
    if block.sets is None:
        keys, ranks = block.keys[: block.num_entries], block.ranks[: block.num_entries]
        begins = (keys[1:] != keys[:-1]) | (ranks[1:] != ranks[:-1])
        block.sets = np.concatenate([[0], np.cumsum(begins)])
    return block.sets


def longer(by_slot: np.ndarray, num_slots: int) -> np.ndarray:
    """Returns the array if it has more entries than there are slots, else a longer one, zeros at its end."""
    if num_slots < len(by_slot):
        return by_slot
    grown = np.zeros(2 * num_slots, by_slot.dtype)
    grown[: len(by_slot)] = by_slot
    return grown
