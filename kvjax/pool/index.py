"""Which slot holds the chunk of a key: a hash table of arrays, looked up for many keys at once."""

from collections.abc import Iterator, Sequence

import numpy as np

ABSENT = -1
_WAYS = 8  # entries of a bucket, whose tags share a cache line
_FREE = np.uint32(0)  # the tag of an entry without a key
_BUCKETS_PER_SLOT = 4 / _WAYS  # a quarter of the entries is in use at most
_MOST_WORDS = 64  # of a key that its fingerprint depends on; longer keys that agree in them still differ
_MULTIPLIERS = np.random.default_rng(0).integers(0, 2**63, _MOST_WORDS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def fingerprints(keys: Sequence[bytes]) -> np.ndarray:
    """Returns a `uint64` for each key that is equal for equal keys and hardly ever for others.

    Of keys that are hashes already it mixes 32-bit words: their sum, each times an odd constant.
    """
    if not len(keys):
        return np.empty(0, np.uint64)
    lengths = set(map(len, keys))
    num_words = max(1, -(-max(lengths) // 4))
    if lengths != {4 * num_words}:
        keys = [key.ljust(4 * num_words, b"\0") for key in keys]
    words = np.frombuffer(b"".join(keys), "<u4").reshape(len(keys), num_words)[:, :_MOST_WORDS].astype(np.uint64)
    return words @ _MULTIPLIERS[: words.shape[1]]


class KeyIndex:
    """A map from keys to slots that never grows, so that no call pauses to move its entries.

    The upper bits of a key's fingerprint say in which bucket it is, the lower ones are its tag there; the key itself
    is compared with that of the slot. The few that find their bucket full, or their tag in it, go to a dictionary.
    Calls take and return parallel arrays.

    Args:
        keys: the key of each slot that is in use, kept up to date by the owner: before `insert` and until after
            `remove`.
    """

    def __init__(self, keys: np.ndarray):
        bits = max(1, (int(len(keys) * _BUCKETS_PER_SLOT) - 1).bit_length())
        self._keys = keys
        self._shift = np.uint64(64 - bits)
        # Filled now: the kernel would clear pages when they are first touched, a few hundred in one call.
        self._tags = np.full(_WAYS << bits, _FREE, np.uint32)
        self._slots = np.full(_WAYS << bits, 0, np.int32)
        self._entry = np.full(len(keys), ABSENT, np.int64)  # by slot
        self._has_others = np.zeros(1 << bits, bool)  # by bucket: some keys of it were put into `_others`
        self._others: dict[bytes, int] = {}
        self._num_entries = 0

    def get(self, keys: Sequence[bytes], prints: np.ndarray) -> np.ndarray:
        """Returns the slot of each key, `int64`, -1 where there is none.

        Args:
            keys: to look for.
            prints: their `fingerprints`.
        """
        if not len(keys):
            return np.empty(0, np.int64)
        buckets, tags = self._places(prints)
        # The entry with the tag, or any other of the bucket if none has it.
        entries = buckets * _WAYS + (self._rows(buckets) == tags[:, None]).argmax(axis=1)
        same = self._tags[entries] == tags
        slots = np.where(same, self._slots[entries], ABSENT).astype(np.int64)
        candidates = np.flatnonzero(same)
        asked = keys if len(candidates) == len(keys) else [keys[place] for place in candidates.tolist()]
        stored = self._keys[slots[candidates]].tolist()
        if stored != (asked if isinstance(asked, list) else list(asked)):
            for place, key, other in zip(candidates.tolist(), asked, stored, strict=True):
                if key != other:
                    slots[place] = ABSENT
        if self._others:
            for place in np.flatnonzero((slots < 0) & self._has_others[buckets]).tolist():
                slots[place] = self._others.get(keys[place], ABSENT)
        return slots

    def insert(self, keys: Sequence[bytes], prints: np.ndarray, slots: np.ndarray) -> None:
        """Adds distinct keys that are not there."""
        left = np.arange(len(keys))
        while len(left):
            of = slots[left]
            buckets, tags = self._places(prints[left])
            rows = self._rows(buckets)
            entries = buckets * _WAYS + (rows == _FREE).argmax(axis=1)
            like = buckets * _WAYS + (rows == tags[:, None]).argmax(axis=1)
            fits = (self._tags[entries] == _FREE) & (self._tags[like] != tags)
            self._slots[entries[fits]] = of[fits]
            # Of several that want one entry the last one has it; the others try again.
            placed = fits & (self._slots[entries] == of)
            self._tags[entries[placed]] = tags[placed]
            self._entry[of[placed]] = entries[placed]
            num_placed = int(np.count_nonzero(placed))
            self._num_entries += num_placed
            if num_placed == len(left):
                return
            for place in left[~fits].tolist():
                self._others[keys[place]] = int(slots[place])
            self._has_others[buckets[~fits]] = True
            left = left[fits & ~placed]

    def remove(self, slots: np.ndarray) -> None:
        """Removes the keys of distinct slots that are there."""
        entries = self._entry[slots]
        inside = entries >= 0
        self._tags[entries[inside]] = _FREE
        self._entry[slots] = ABSENT
        num_inside = int(np.count_nonzero(inside))
        self._num_entries -= num_inside
        if num_inside < len(slots):
            for key in self._keys[slots[~inside]].tolist():
                del self._others[key]
            if not self._others:
                self._has_others[:] = False

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Yields all keys with their slots, in no order."""
        slots = self._slots[self._tags != _FREE]
        yield from zip(self._keys[slots].tolist(), slots.tolist(), strict=True)
        yield from self._others.items()

    def __len__(self) -> int:
        return self._num_entries + len(self._others)

    def _places(self, prints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The buckets of fingerprints, and their tags."""
        tags = prints.astype(np.uint32)
        return (prints >> self._shift).view(np.int64), tags + (tags == _FREE)

    def _rows(self, buckets: np.ndarray) -> np.ndarray:
        """The tags in each bucket."""
        return self._tags.reshape(-1, _WAYS).take(buckets, axis=0)
