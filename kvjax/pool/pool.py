"""The host pool's books: which chunk holds which units, who writes it and who reads it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvjax.pool.lru import LRU
from kvjax.pool.policy import Policy
from kvjax.pool.units import UnitAllocator

_ABSENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Chunks that are being written. One `complete_store` ends it.

    Args:
        keys: of the chunks, in the order asked for; those resident already are left out.
        slots: parallel to `keys`.
        epochs: parallel to `keys`: the slot's epoch when it was reserved.
        units: parallel to `keys`: the `int32` unit ids of each chunk.
    """

    keys: tuple[bytes, ...]
    slots: np.ndarray
    epochs: np.ndarray
    units: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pins:
    """Chunks that are being read and stay where they are until `unpin`.

    Args:
        slots: the chunks.
        keys: parallel to `slots`.
        units: parallel to `slots`: the `int32` unit ids of each chunk.
    """

    slots: np.ndarray
    keys: tuple[bytes, ...]
    units: tuple[np.ndarray, ...]


@dataclass(slots=True, eq=False)
class _Slot:
    key: bytes
    units: np.ndarray
    epoch: int
    group_idx: int
    indexed: bool = True  # lookups find it; a chunk that was invalidated while in use is not indexed
    writing: bool = True
    pins: int = 0


@dataclass(slots=True)
class PoolCounts:
    """What the pool did so far, in chunks."""

    stored: int = 0
    evicted: int = 0
    refused: int = 0
    failed: int = 0
    stale: int = 0
    by_group_units: dict[int, int] = field(default_factory=dict)


class ChunkPool:
    """One pool of equal units for the chunks of all groups. Not thread-safe; no bytes are touched.

    Args:
        num_units: units of the pool.
        units_per_chunk: in layout order, `None` for scratch groups.
        policy: the order of eviction; a new `LRU` by default.
    """

    def __init__(self, num_units: int, units_per_chunk: Sequence[int | None], policy: Policy | None = None):
        self.units_per_chunk = tuple(units_per_chunk)
        self.counts = PoolCounts()
        self._units = UnitAllocator(num_units)
        self._policy: Policy = LRU() if policy is None else policy
        self._index: dict[bytes, int] = {}
        self._slots: list[_Slot | None] = []
        self._free_slots: list[int] = []
        self._epoch = 0
        self._reservations: set[Reservation] = set()
        self._pins: set[Pins] = set()

    @property
    def num_units(self) -> int:
        """Units of the pool."""
        return self._units.num_units

    @property
    def num_free_units(self) -> int:
        """Units that no chunk holds."""
        return self._units.num_free

    @property
    def num_resident(self) -> int:
        """Chunks that a lookup finds, those still being written not counted."""
        return sum(not self._at(slot).writing for slot in self._index.values())

    def find(self, keys: Iterable[bytes]) -> np.ndarray:
        """Returns the slot of each key's chunk, `int64`, or -1 where it is absent or still being written."""
        index, slots = self._index, self._slots
        found = [index.get(key, _ABSENT) for key in keys]
        return np.array([s if s >= 0 and not slots[s].writing else _ABSENT for s in found], np.int64)  # pyright: ignore[reportOptionalMemberAccess]

    def held(self, keys: Iterable[bytes]) -> np.ndarray:
        """Returns the slot of each key's chunk, `int64`, being written or not, or -1 where it is absent."""
        index = self._index
        return np.array([index.get(key, _ABSENT) for key in keys], np.int64)

    def touch(self, keys: Sequence[bytes], ranks: np.ndarray) -> None:
        """Tells the policy of one access of one request to those of `keys` that are held; see `Policy.touch`."""
        slots = self.held(keys)
        distinct, first = np.unique(slots, return_index=True)
        first = first[distinct >= 0]
        self._policy.touch(slots[first], np.asarray(ranks)[first])

    def prepare_store(
        self,
        keys: Sequence[bytes],
        group_idxs: Sequence[int],
        ranks: np.ndarray | None = None,
        *,
        kept: Iterable[bytes] | None = None,
        trial: bool = False,
    ) -> Reservation | None:
        """Reserves units for those of a request's chunks that are not held yet, evicting others if it must.

        One access of the request to all of `keys`, if there is anything to store.

        Args:
            keys: of the chunks, in any order, those held already among them.
            group_idxs: parallel to `keys`.
            ranks: parallel to `keys`, see `Policy.touch`; their order by default, the last one highest.
            kept: what is not evicted to make room; all of `keys` by default.
            trial: a refusal is not counted, as the caller will ask for less.

        Returns:
            The reservation, possibly of no chunk; or `None` if there is no room, and then nothing changed.

        Raises:
            ValueError: a group without chunks.
        """
        for group_idx in group_idxs:
            if not 0 <= group_idx < len(self.units_per_chunk) or self.units_per_chunk[group_idx] is None:
                raise ValueError(f"`group_idxs` must be of groups that are cached, got {group_idx}")
        protected = set(self.held(keys if kept is None else kept).tolist())
        new = {key: g for key, g in zip(keys, group_idxs, strict=True) if key not in self._index}
        wanted = sum(self._cost(group_idx) for group_idx in new.values())
        victims = self._victims(wanted - self._units.num_free, protected)
        if victims is None:
            self.counts.refused += not trial
            return None
        for slot in victims:
            self._hide(slot)
            self._release(slot)
        self.counts.evicted += len(victims)
        slots = [self._fill(key, group_idx) for key, group_idx in new.items()]
        if new:
            self.touch(keys, np.arange(len(keys)) if ranks is None else ranks)
        reservation = Reservation(
            keys=tuple(new),
            slots=np.array(slots, np.int64),
            epochs=np.array([self._at(slot).epoch for slot in slots], np.int64),
            units=tuple(self._at(slot).units for slot in slots),
        )
        self._reservations.add(reservation)
        return reservation

    def complete_store(self, reservation: Reservation, *, ok: bool) -> list[bytes]:
        """Publishes the chunks of a reservation, or rolls them back.

        Returns:
            The keys of the chunks that became resident: none if `ok` is false; those invalidated since are
            dropped.

        Raises:
            ValueError: the reservation is not one of this pool, or was completed before.
        """
        if reservation not in self._reservations:
            raise ValueError("`reservation` must be one that was prepared here and not completed yet")
        self._reservations.remove(reservation)
        published: list[bytes] = []
        for slot, epoch in zip(reservation.slots.tolist(), reservation.epochs.tolist(), strict=True):
            chunk = self._at(slot)
            assert chunk.epoch == epoch, "a slot is not reused while it is being written"
            chunk.writing = False
            if ok and chunk.indexed:
                published.append(chunk.key)
                continue
            if chunk.indexed:
                self.counts.failed += 1
                self._hide(slot)
            else:
                self.counts.stale += 1
            self._release(slot)
        self.counts.stored += len(published)
        return published

    def pin(self, slots: np.ndarray) -> Pins:
        """Keeps resident chunks in place until `unpin`.

        Raises:
            ValueError: a slot that holds no chunk, one still being written or invalidated. Then nothing changed.
        """
        for slot in slots.tolist():
            chunk = self._slots[slot] if 0 <= slot < len(self._slots) else None
            if chunk is None or chunk.writing or not chunk.indexed:
                raise ValueError(f"`slots` must be of resident chunks, got {slot}")
        for slot in slots.tolist():
            self._at(slot).pins += 1
        chunks = [self._at(slot) for slot in slots.tolist()]
        pins = Pins(slots.copy(), tuple(chunk.key for chunk in chunks), tuple(chunk.units for chunk in chunks))
        self._pins.add(pins)
        return pins

    def unpin(self, pins: Pins) -> None:
        """Ends one `pin`.

        Raises:
            ValueError: the pins are not of this pool, or were released before.
        """
        if pins not in self._pins:
            raise ValueError("`pins` must be ones that were taken here and not released yet")
        self._pins.remove(pins)
        for slot in pins.slots.tolist():
            self._at(slot).pins -= 1
            self._release(slot)

    def invalidate(self, keys: Iterable[bytes] | None = None) -> int:
        """Makes chunks misses at once: those of `keys`, or all. What is being read or written gives its
        units back when that ends.

        Returns:
            How many chunks were held.
        """
        slots = list(self._index.values()) if keys is None else [s for s in self.held(keys).tolist() if s >= 0]
        for slot in dict.fromkeys(slots):
            self._hide(slot)
            self._release(slot)
        return len(set(slots))

    def held_keys(self) -> list[bytes]:
        """Returns the keys of all chunks held, those being written among them."""
        return list(self._index)

    def open_pins(self) -> set[Pins]:
        """Returns the pins not released yet."""
        return set(self._pins)

    def open_reservations(self) -> set[Reservation]:
        """Returns the reservations not completed yet."""
        return set(self._reservations)

    def check_integrity(self) -> None:
        """Recounts everything.

        Raises:
            AssertionError: the books contradict each other.
        """
        live = {slot: chunk for slot, chunk in enumerate(self._slots) if chunk is not None}
        units = [self._units.free_units(), *(chunk.units for chunk in live.values())]
        counted = np.sort(np.concatenate(units))
        assert np.array_equal(counted, np.arange(self.num_units)), "every unit is free or held exactly once"
        assert sorted(self._free_slots) == [s for s, c in enumerate(self._slots) if c is None]
        indexed = {chunk.key: slot for slot, chunk in live.items() if chunk.indexed}
        assert indexed == self._index, "lookups find exactly the chunks that are indexed"
        assert sorted(indexed.values()) == self._policy.slots().tolist(), "the policy orders what is indexed"
        writing = sorted(slot for reservation in self._reservations for slot in reservation.slots.tolist())
        assert writing == sorted(slot for slot, chunk in live.items() if chunk.writing)
        pins = np.zeros(len(self._slots), np.int64)
        for held in self._pins:
            np.add.at(pins, held.slots, 1)
        by_group: dict[int, int] = {}
        for slot, chunk in live.items():
            assert chunk.pins == pins[slot], "every pin belongs to one holder"
            assert len(chunk.units) == self._cost(chunk.group_idx)
            assert chunk.indexed or chunk.writing or chunk.pins, "what is out of use gave its units back"
            by_group[chunk.group_idx] = by_group.get(chunk.group_idx, 0) + len(chunk.units)
        assert by_group == {g: n for g, n in self.counts.by_group_units.items() if n}

    def _at(self, slot: int) -> _Slot:
        chunk = self._slots[slot]
        assert chunk is not None, "the slot holds a chunk"
        return chunk

    def _cost(self, group_idx: int) -> int:
        cost = self.units_per_chunk[group_idx]
        assert cost is not None, "scratch groups have no chunks"
        return cost

    def _victims(self, missing: int, protected: set[int]) -> list[int] | None:
        """The slots to evict for `missing` units, or `None` if that cannot be had."""
        chosen: list[int] = []
        if missing <= 0:
            return chosen
        for together in self._policy.victims():
            for slot in together.tolist():
                chunk = self._at(slot)
                if chunk.pins == 0 and not chunk.writing and slot not in protected:
                    chosen.append(slot)
                    missing -= len(chunk.units)
            if missing <= 0:
                return chosen
        return None

    def _fill(self, key: bytes, group_idx: int) -> int:
        cost = self._cost(group_idx)
        self._epoch += 1
        chunk = _Slot(key, self._units.take(cost), self._epoch, group_idx)
        if self._free_slots:
            slot = self._free_slots.pop()
            self._slots[slot] = chunk
        else:
            slot = len(self._slots)
            self._slots.append(chunk)
        self._index[key] = slot
        self.counts.by_group_units[group_idx] = self.counts.by_group_units.get(group_idx, 0) + cost
        return slot

    def _hide(self, slot: int) -> None:
        """Lookups find the chunk no more."""
        chunk = self._at(slot)
        chunk.indexed = False
        del self._index[chunk.key]
        self._policy.remove(np.array([slot], np.int64))

    def _release(self, slot: int) -> None:
        """Gives the units back if nobody finds, writes or reads the chunk."""
        chunk = self._at(slot)
        if chunk.indexed or chunk.writing or chunk.pins:
            return
        self._units.give(chunk.units)
        self.counts.by_group_units[chunk.group_idx] -= len(chunk.units)
        self._slots[slot] = None
        self._free_slots.append(slot)
