"""The host pool: which chunk holds which units, who writes it and who reads it."""

from collections.abc import Callable, Sequence

import numpy as np

from kvjax._checks import shown
from kvjax.pool.books import Books
from kvjax.pool.chunks import distinct
from kvjax.pool.index import fingerprints
from kvjax.pool.integrity import check_books
from kvjax.pool.lru import LRU
from kvjax.pool.namespaces import DEFAULT, Namespaces
from kvjax.pool.policy import Access, Policy
from kvjax.pool.records import Change, Pins, PoolCounts, Reservation


class ChunkPool:
    """One pool of equal units for the chunks of all groups. Not thread-safe; no bytes are touched.

    Calls take arrays of chunks and cost some array operations, whose time depends on the chunks named and not on
    how many are resident.

    Args:
        num_units: units of the pool.
        units_per_chunk: in layout order, `None` for scratch groups.
        policy: the order of eviction, new and for this pool alone; an `LRU` by default. If it ever raises when it
            is told something, an `LRU` takes its place.

    Raises:
        ValueError: `policy` lacks a method of `Policy`, or knows slots already.
    """

    def __init__(self, num_units: int, units_per_chunk: Sequence[int | None], policy: Policy | None = None):
        self.units_per_chunk = tuple(units_per_chunk)
        self._books = Books(num_units, units_per_chunk, LRU() if policy is None else policy)
        self._chunks = self._books.chunks
        self._access = 0
        self._reservations: set[Reservation] = set()
        self._pins: set[Pins] = set()

    # --- asking ---------------------------------------------------------------------------------------

    @property
    def num_units(self) -> int:
        """Units of the pool."""
        return self._chunks.num_units

    @property
    def num_free_units(self) -> int:
        """Units that no chunk holds. Those of chunks that were invalidated come back by and by."""
        return self._chunks.num_free_units

    @property
    def num_resident(self) -> int:
        """Chunks that a lookup finds, those still being written not counted."""
        return int(self.namespaces.resident.sum())

    @property
    def counts(self) -> PoolCounts:
        """What the pool did so far."""
        return self._books.counts

    @property
    def namespaces(self) -> Namespaces:
        """The namespaces of the chunks: `open` and `close` them there."""
        return self._books.namespaces

    @property
    def policy_error(self) -> Exception | None:
        """What the policy raised when it was told something, if it did; an `LRU` has taken its place then."""
        return self._books.policy.error

    @property
    def on_change(self) -> Callable[[Change], None] | None:
        """Is called with every change of what lookups find, while the pool is busy: it must not raise, and may ask the
        pool of the slots that it is told of, but change nothing."""
        return self._books.on_change

    @on_change.setter
    def on_change(self, call: Callable[[Change], None] | None) -> None:
        self._books.on_change = call

    def resident_by_group(self) -> np.ndarray:
        """Returns how many chunks of each group a lookup finds."""
        return self.namespaces.resident.sum(axis=0)

    def units_by_group(self) -> np.ndarray:
        """Returns how many units the chunks of each group hold, whether a lookup finds them or not."""
        return self.namespaces.existing.sum(axis=0) * self._chunks.widths

    def find(self, keys: Sequence[bytes]) -> np.ndarray:
        """Returns the slot of each key's chunk, `int64`, or -1 where it is absent or still being written."""
        slots = self.held(keys)
        slots[self._chunks.writing[slots]] = -1  # whatever the last slot says of those that are absent
        return slots

    def held(self, keys: Sequence[bytes]) -> np.ndarray:
        """Returns the slot of each key's chunk, `int64`, being written or not, or -1 where it is absent."""
        return self._books.current(self._books.index.get(keys, fingerprints(keys)))

    def epochs(self, slots: np.ndarray) -> np.ndarray:
        """Returns the epochs of the chunks in `slots`. With its epoch a slot stands for one chunk for ever."""
        return self._chunks.epoch[slots]

    def still_held(self, slots: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Returns a mask of the slots that hold the chunks that they held, found by their keys or being written.
        Slots below 0 hold none."""
        chunks = self._chunks
        held = (slots >= 0) & (chunks.epoch[slots] == epochs) & chunks.indexed[slots]
        if self._books.num_stale:
            held &= self._books.current(slots.copy()) >= 0
        return held

    def accesses(self, slots: np.ndarray) -> np.ndarray:
        """Returns the numbers of the last accesses to the chunks in `slots`."""
        return self._chunks.access[slots]

    def ready(self, slots: np.ndarray) -> np.ndarray:
        """Returns a mask of the slots, all of chunks that are held, that are not being written."""
        return ~self._chunks.writing[slots]

    def units(self, slots: np.ndarray) -> np.ndarray:
        """Returns `(len(slots), units_per_chunk)` `int32` unit ids of chunks of one group."""
        return self._chunks.units(slots)

    def keys(self, slots: np.ndarray) -> tuple[bytes, ...]:
        """Returns the keys of chunks."""
        return self._books.keys(slots)

    def groups(self, slots: np.ndarray) -> np.ndarray:
        """Returns the `group_idx` of chunks."""
        return self._chunks.group_idx[slots]

    def chunk_idxs(self, slots: np.ndarray) -> np.ndarray:
        """Returns the places of chunks in their sequences."""
        return self._chunks.chunk_idx[slots]

    def names(self, slots: np.ndarray) -> list[bytes | None]:
        """Returns the names of the namespaces of chunks; the default one has none."""
        return [self.namespaces.name(namespace) for namespace in self._chunks.namespace[slots].tolist()]

    def resident_slots(self) -> np.ndarray:
        """Returns the slots of the chunks that a lookup finds, those of small numbers first."""
        chunks = self._chunks
        found = np.flatnonzero(chunks.indexed[: chunks.most_slots] & ~chunks.writing[: chunks.most_slots])
        found = self._books.current(found)
        return found[found >= 0]

    @property
    def num_slots(self) -> int:
        """Slots of the pool; their numbers are below."""
        return len(self._chunks.epoch)

    def held_keys(self) -> list[bytes]:
        """Returns the keys of all chunks held, those being written among them, in no order."""
        slots = self._books.current(np.flatnonzero(self._chunks.indexed))
        return list(self.keys(slots[slots >= 0]))

    def open_pins(self) -> set[Pins]:
        """Returns the pins not released yet."""
        return set(self._pins)

    def open_reservations(self) -> set[Reservation]:
        """Returns the reservations not completed yet."""
        return set(self._reservations)

    # --- accesses -------------------------------------------------------------------------------------

    def new_access(self) -> int:
        """Returns the number of an access that is more recent than all before."""
        self._access += 1
        return self._access

    def touch(self, slots: np.ndarray, ranks: np.ndarray, *, access: int, counted: np.ndarray | bool = True) -> None:
        """Tells the policy of one access, or a part of it, to chunks that are held; see `Access`.

        Chunks still being written are not counted, as nobody can have read them. Chunks that a more recent access
        named stay with that one: its request wants them, too, and what follows them there must leave before them.
        Chunks that were invalidated meanwhile are left out.

        Args:
            slots: distinct slots of chunks that are held, or read.
            ranks: parallel to `slots`.
            access: from `new_access`.
            counted: parallel to `slots`, or one for all.
        """
        chunks = self._chunks
        read = counted & self.ready(slots)
        ranks = np.array(ranks)
        ours = (chunks.access[slots] <= access) & chunks.indexed[slots]
        if np.count_nonzero(ours) == len(slots):
            slots = slots.copy()
        else:
            slots, ranks, read = slots[ours], ranks[ours], read[ours]
        if len(slots):
            chunks.access[slots] = access
            self._books.policy.touch(Access(access, slots, ranks, read, chunks.fingerprint[slots]))

    # --- stores ---------------------------------------------------------------------------------------

    def prepare_store(
        self,
        keys: Sequence[bytes],
        group_idxs: Sequence[int] | np.ndarray,
        ranks: np.ndarray | None = None,
        *,
        access: int | None = None,
        kept: np.ndarray | None = None,
        chunk_idxs: np.ndarray | None = None,
        namespace: int = DEFAULT,
        trial: bool = False,
    ) -> Reservation | None:
        """Reserves units for those of a request's chunks that are not held yet, evicting others if it must.

        If there is anything to store, it is an access to all of `keys`, or a part of one.

        Args:
            keys: of the chunks, in any order, those held already among them.
            group_idxs: parallel to `keys`.
            ranks: parallel to `keys`, see `Access`; their order by default, the last one highest.
            access: from `new_access`; a new one by default.
            kept: slots that are not evicted to make room; those of `keys` that are held by default.
            chunk_idxs: parallel to `keys`, places in the sequence, for those who watch `on_change`.
            namespace: to which the new chunks belong, see `Namespaces`.
            trial: a refusal is not counted, as the caller will ask for less.

        Returns:
            The reservation, possibly of no chunk; or `None` if there is no room, and then nothing changed.

        Raises:
            ValueError: a group without chunks; or a policy that raises, names a slot without a chunk, or one twice.
                Then nothing changed.
        """
        books = self._books
        groups = np.asarray(group_idxs, np.int64)
        self._check_groups(groups)
        books.sweep()
        prints = fingerprints(keys)
        found = books.index.get(keys, prints)
        if books.num_stale:
            books.drop_stale(distinct(found))
            found[~self._chunks.indexed[found]] = -1
        first = _first_places(keys, prints)
        absent = found < 0
        places = np.flatnonzero(absent) if first is None else first[absent[first]]
        missing = int(self._chunks.widths[groups[places]].sum()) - self.num_free_units
        if missing > 0:
            before = self.num_free_units
            books.sweep(missing=missing)
            missing -= self.num_free_units - before
        victims = books.policy.choose(missing, found[~absent] if kept is None else kept)
        if victims is None:
            books.counts.refused += not trial
            return None
        if len(victims):
            books.evict(victims)
            found[~self._chunks.indexed[found]] = -1
        new_keys = list(keys) if len(places) == len(keys) else [keys[place] for place in places.tolist()]
        idxs = np.zeros(len(places), np.int64) if chunk_idxs is None else np.asarray(chunk_idxs)[places]
        slots = books.fill(new_keys, prints[places], groups[places], idxs, namespace)
        if len(slots):
            found[places] = slots
            order = np.arange(len(keys)) if ranks is None else np.asarray(ranks)
            named = np.flatnonzero(found >= 0) if first is None else first[found[first] >= 0]
            number = self.new_access() if access is None else access
            self.touch(found[named], order[named], access=number, counted=False)
        reservation = Reservation(tuple(new_keys), places, slots, self._chunks.epoch[slots])
        self._reservations.add(reservation)
        return reservation

    def complete_store(self, reservation: Reservation, *, ok: bool | np.ndarray) -> np.ndarray:
        """Publishes the chunks of a reservation, or rolls them back.

        Args:
            reservation: as `prepare_store` returned it.
            ok: whether the chunks were written: one for all, or a mask parallel to its keys.

        Returns:
            A mask, parallel to the keys, of the chunks that became resident: those written and not invalidated
            meanwhile.

        Raises:
            ValueError: the reservation is not one of this pool, or was completed before; or `ok` is neither a bool
                nor such a mask. Then nothing changed.
        """
        if reservation not in self._reservations:
            raise ValueError("`reservation` must be one that was prepared here and not completed yet")
        slots, chunks, books = reservation.slots, self._chunks, self._books
        written = _mask(ok, len(slots))
        assert (chunks.epoch[slots] == reservation.epochs).all(), "a slot is not used again while it is being written"
        self._reservations.remove(reservation)
        if books.num_stale:
            books.drop_stale(slots[chunks.indexed[slots]])
        indexed = chunks.indexed[slots]
        published = indexed & written
        failed = slots[indexed & ~written]
        books.counts.failed += len(failed)
        books.counts.stale += len(slots) - int(np.count_nonzero(indexed))
        books.hide(failed, "invalidated")
        chunks.writing[slots] = False
        if published.all():
            books.publish(slots)
        else:
            books.free(slots[~published])
            books.publish(slots[published])
        return published

    # --- loads ----------------------------------------------------------------------------------------

    def pin(self, slots: np.ndarray) -> Pins:
        """Keeps resident chunks in place until `unpin`.

        Raises:
            ValueError: a slot that holds no chunk, one still being written or invalidated. Then nothing changed.
        """
        chunks = self._chunks
        inside = (slots >= 0) & (slots < len(chunks.epoch))
        at = slots if inside.all() else np.where(inside, slots, 0)
        ready = inside & chunks.indexed[at] & ~chunks.writing[at]
        if self._books.num_stale:
            ready &= self._books.current(at.copy()) >= 0
        if not ready.all():
            raise ValueError(f"`slots` must be of resident chunks, got {slots[~ready][0]}")
        np.add.at(chunks.pins, slots, 1)
        pins = Pins(slots.copy(), chunks.epoch[slots])
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
        chunks = self._chunks
        np.subtract.at(chunks.pins, pins.slots, 1)
        gone = ~chunks.indexed[pins.slots]
        if gone.any():
            self._books.free(distinct(pins.slots[gone]))

    # --- invalidation ---------------------------------------------------------------------------------

    def invalidate(self, keys: Sequence[bytes] | None = None) -> int:
        """Makes chunks misses at once: those of `keys`, or all. What is being read or written gives its
        units back when that ends.

        To drop all takes no longer than to drop one: the chunks belong to a past generation from now on, and
        later calls clear them away.

        Returns:
            How many chunks were held.
        """
        if keys is None:
            return self.invalidate_namespace(None)
        slots = self.held(keys)
        return self.invalidate_slots(distinct(slots[slots >= 0]))

    def invalidate_slots(self, slots: np.ndarray) -> int:
        """Makes the chunks of distinct slots that are held misses at once, and returns how many they are."""
        self.counts.invalidated += len(slots)
        self._books.hide(slots, "invalidated")
        self._books.free(slots)
        return len(slots)

    def invalidate_namespace(self, namespace: int | None) -> int:
        """Makes the chunks of a namespace misses at once, or all of them; see `invalidate`."""
        held = self._books.invalidate(namespace)
        self.counts.invalidated += held
        self._books.sweep()
        return held

    def clear_away(self) -> None:
        """Gives back the units of some chunks that were invalidated all at once, as other calls do by the way; for
        whoever is idle. Returns soon, whatever is left."""
        self._books.sweep()

    # --- integrity ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Recounts everything.

        Raises:
            AssertionError: the books contradict each other.
        """
        check_books(self._books, self._reservations, self._pins)

    def _check_groups(self, groups: np.ndarray) -> None:
        wrong = (groups < 0) | (groups >= len(self.units_per_chunk))
        if not wrong.any():
            wrong = self._chunks.widths[groups] == 0
        if wrong.any():
            raise ValueError(f"`group_idxs` must be of groups that are cached, got {groups[wrong][0]}")


def _mask(ok: bool | np.ndarray, length: int) -> np.ndarray:
    mask = np.asarray(ok)
    if mask.dtype != bool or mask.shape not in ((), (length,)):
        raise ValueError(f"`ok` must be a bool or one for each of {length} keys, got {shown(ok)}")
    return np.broadcast_to(mask, (length,))


def _first_places(keys: Sequence[bytes], prints: np.ndarray) -> np.ndarray | None:
    """The places at which each key stands first, ascending; `None` if no key is there twice."""
    ordered = np.sort(prints)
    if not np.count_nonzero(ordered[1:] == ordered[:-1]):
        return None
    first: dict[bytes, int] = {}
    for place, key in enumerate(keys):
        first.setdefault(key, place)
    return np.fromiter(first.values(), np.int64, len(first))
