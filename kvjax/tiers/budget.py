"""The books of a tier with a byte budget: which entries it holds, in the order of their use, and what may go."""

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum

from kvjax.tiers.entries import EntryName


class Room(Enum):
    """What came of asking for room."""

    RESERVED = "the entry may be written"
    THERE = "the entry is held already"
    BUSY = "the entry is being written or deleted"
    SHORT = "the budget leaves too little room"
    NEVER = "the entry is larger than the budget"


class Budget:
    """Counts entries that are held, being written, or being deleted; all of these take room until they are gone.

    Nothing here blocks, and nothing is locked: the caller lets one thread in at a time.

    Args:
        max_bytes: that the entries may have together.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._held: OrderedDict[EntryName, None] = OrderedDict()  # the one used longest ago is first
        self._writing: set[EntryName] = set()
        self._leaving: set[EntryName] = set()
        self._readers: dict[EntryName, int] = {}
        self._changed: set[EntryName] = set()  # written or deleted since a read of them began that has not ended
        self._num_bytes = 0
        self._new: set[EntryName] | None = None  # held since a scan began; `None` while there is none
        self._lost: set[EntryName] = set()  # gone since then

    @property
    def num_entries(self) -> int:
        """Entries that are held."""
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Bytes of all that takes room."""
        return self._num_bytes

    def __contains__(self, name: EntryName) -> bool:
        return name in self._held

    def use(self, name: EntryName) -> None:
        """Makes an entry, if it is held, the last one to go."""
        if name in self._held:
            self._held.move_to_end(name)

    def begin_read(self, name: EntryName) -> None:
        """Keeps an entry from being evicted until `end_read`, which must be called as often."""
        self._readers[name] = self._readers.get(name, 0) + 1
        self.use(name)

    def end_read(self, name: EntryName) -> None:
        """Takes back one `begin_read`."""
        self._readers[name] -= 1
        if not self._readers[name]:
            del self._readers[name]
            self._changed.discard(name)

    def is_busy(self, name: EntryName) -> bool:
        """Whether an entry is being written or deleted."""
        return name in self._writing or name in self._leaving

    def reserve(self, name: EntryName) -> Room:
        """Asks for room to write an entry; after `RESERVED`, `publish` or `drop` must follow. Nothing else is changed,
        but an entry that is there counts as used."""
        if name in self._held:
            self.use(name)
            return Room.THERE
        if self.is_busy(name):
            return Room.BUSY
        if name.num_bytes > self.max_bytes:
            return Room.NEVER
        if self.shortage(name) > 0:
            return Room.SHORT
        self._writing.add(name)
        self._num_bytes += name.num_bytes
        return Room.RESERVED

    def shortage(self, name: EntryName | None = None) -> int:
        """Returns how many bytes must go before there is room for an entry, or, without one, to be within the budget;
        bytes that are on their way out are not asked for twice."""
        wanted = name.num_bytes if name else 0
        return self._num_bytes + wanted - self.max_bytes

    def publish(self, name: EntryName) -> None:
        """Holds an entry that has been written."""
        self._writing.remove(name)
        self._hold(name)

    def drop(self, name: EntryName) -> None:
        """Gives back the room of an entry that has not been written."""
        self._writing.remove(name)
        self._num_bytes -= name.num_bytes

    def found(self, name: EntryName) -> None:
        """Holds an entry that a read, which has not ended, has found, if there is room and it is not known."""
        if name not in self._changed and self.reserve(name) is Room.RESERVED:
            self.publish(name)

    def missed(self, name: EntryName) -> None:
        """Forgets an entry that a read, which has not ended, has not found, unless it was written meanwhile."""
        if name not in self._changed and self.leave(name):
            self.gone(name)

    def evict(self, num_bytes: int) -> list[EntryName]:
        """Begins to delete the entries used longest ago that nobody reads, until `num_bytes` are on their way out, and
        returns them; `gone` or `stay` must follow for each."""
        leaving = sum(name.num_bytes for name in self._leaving)
        victims: list[EntryName] = []
        for name in self._held:
            if leaving >= num_bytes:
                break
            if name not in self._readers:
                victims.append(name)
                leaving += name.num_bytes
        for name in victims:
            self.leave(name)
        return victims

    def leave(self, name: EntryName) -> bool:
        """Begins to delete an entry, and tells whether it is held; if it is, `gone` or `stay` must follow."""
        if name not in self._held:
            return False
        del self._held[name]
        self._leaving.add(name)
        return True

    def gone(self, name: EntryName) -> None:
        """Gives back the room of an entry that has been deleted."""
        self._leaving.remove(name)
        self._num_bytes -= name.num_bytes
        self._note_change(name)
        if self._new is not None:
            self._new.discard(name)
            self._lost.add(name)

    def stay(self, name: EntryName) -> None:
        """Holds an entry that could not be deleted."""
        self._leaving.remove(name)
        self._hold(name)

    def begin_scan(self) -> None:
        """Remembers from now on what changes, for `end_scan`."""
        self._new = set()
        self._lost.clear()

    def end_scan(self, found: Iterable[EntryName] | None) -> None:
        """Holds what a scan has found, and what became held since it began; forgets all else.

        Args:
            found: names, the one used longest ago first; those that are new here count as used before all others.
                `None` if the scan failed: nothing changes.
        """
        new, lost, self._new = self._new or set(), set(self._lost), None
        self._lost.clear()
        if found is None:
            return
        there = dict.fromkeys(name for name in found if name not in lost)
        for name in [name for name in self._held if name not in there and name not in new]:
            del self._held[name]
            self._num_bytes -= name.num_bytes
        strangers = [name for name in there if name not in self._held and not self.is_busy(name)]
        for name in reversed(strangers):
            self._held[name] = None
            self._held.move_to_end(name, last=False)
            self._num_bytes += name.num_bytes

    def check_integrity(self) -> None:
        """Recounts everything.

        Raises:
            AssertionError: the books contradict themselves.
        """
        states = (set(self._held), self._writing, self._leaving)
        together = set().union(*states)
        assert len(together) == sum(map(len, states)), "an entry has two states"
        assert self._num_bytes == sum(name.num_bytes for name in together), "bytes are miscounted"
        assert all(count > 0 for count in self._readers.values()), "a reader is miscounted"
        assert self._changed <= self._readers.keys(), "a read that has ended is remembered"
        assert self._new is not None or not self._lost, "changes are remembered without a scan"

    def _note_change(self, name: EntryName) -> None:
        if name in self._readers:
            self._changed.add(name)

    def _hold(self, name: EntryName) -> None:
        self._held[name] = None
        self._note_change(name)
        if self._new is not None:
            self._new.add(name)
            self._lost.discard(name)
