"""Namespaces of chunks: how many chunks each has, and which of them were invalidated, in constant time."""

import numpy as np

DEFAULT = 0


class Namespaces:
    """Small ids for namespaces, each with a generation. A chunk belongs to the generation in which it was
    made; `invalidate` begins the next one, and all chunks of those before are stale at once.

    An id is given back when nobody refers to it: no open handle, no chunk. So namespaces that come and go,
    one for each image, say, take no memory. Id 0 is always there, for pools that need no namespaces.

    Args:
        num_groups: groups of the layout.
    """

    def __init__(self, num_groups: int):
        self._ids: dict[bytes, int] = {}
        self._names: list[bytes | None] = [None]
        self._free: list[int] = []
        self._handles = np.ones(1, np.int64)
        self._chunks = np.zeros(1, np.int64)  # that exist, stale ones among them
        self.generation = np.zeros(1, np.int64)  # by id; rises and is never reset, also where an id is used again
        self.resident = np.zeros((1, num_groups), np.int64)  # chunks of the present generation that a lookup finds
        self.held = np.zeros((1, num_groups), np.int64)  # … and those being written

    def open(self, name: bytes) -> int:
        """Returns the id of a namespace, for the holder of the handle to `close`."""
        known = self._ids.get(name)
        if known is None:
            known = self._ids[name] = self._new_id()
            self._names[known] = name
        self._handles[known] += 1
        return known

    def close(self, namespace: int) -> None:
        """Ends one `open`."""
        self._handles[namespace] -= 1
        self._recycle(np.array([namespace]))

    def find(self, name: bytes) -> int | None:
        """Returns the id of a namespace that is in use, or `None`."""
        return self._ids.get(name)

    def count(self, namespaces: np.ndarray, change: int) -> None:
        """Notes that chunks of these namespaces, one entry for each chunk, came to exist or are gone."""
        if len(namespaces) == 0:
            return
        if (namespaces == namespaces[0]).all():
            self._chunks[namespaces[0]] += change * len(namespaces)
            namespaces = namespaces[:1]
        else:
            np.add.at(self._chunks, namespaces, change)
        if change < 0:
            self._recycle(namespaces)

    def invalidate(self, namespace: int | None) -> np.ndarray:
        """Begins a new generation of one namespace, or of all.

        Returns:
            How many chunks of each group were held until now.
        """
        which = slice(None) if namespace is None else slice(namespace, namespace + 1)
        self.generation[which] += 1
        held = self.held[which].sum(axis=0)
        self.held[which] = self.resident[which] = 0
        return held

    @property
    def in_use(self) -> int:
        """Namespaces that someone refers to, the default one not counted."""
        return len(self._ids)

    def check_integrity(self, namespaces: np.ndarray) -> None:
        """Raises an `AssertionError` if the chunks, given by their namespaces, are not those counted."""
        recounted = np.bincount(namespaces, minlength=len(self._chunks))
        assert np.array_equal(recounted, self._chunks), "every namespace knows its chunks"
        assert all(self._names[known] == name for name, known in self._ids.items())
        used = {*self._ids.values(), DEFAULT}
        assert not used & set(self._free), "an id in use is not free"
        assert not self._handles[self._free].any(), "an id with open handles is in use"

    def _new_id(self) -> int:
        if self._free:
            return self._free.pop()
        new = len(self._names)
        self._names.append(None)
        if new == len(self.generation):
            for name in ("_handles", "_chunks", "generation", "resident", "held"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        return new

    def _recycle(self, namespaces: np.ndarray) -> None:
        unused = (self._handles[namespaces] == 0) & (self._chunks[namespaces] == 0)
        for namespace in set(namespaces[unused].tolist()) if unused.any() else ():
            name = self._names[namespace]
            if name is not None:
                del self._ids[name]
                self._names[namespace] = None
                self._free.append(namespace)
