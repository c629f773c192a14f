"""Namespaces of chunks: how many chunks each has, and which of them were invalidated, in constant time."""

from collections.abc import Iterable

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
        self._num_groups = num_groups
        self._ids: dict[bytes, int] = {}
        self._names: list[bytes | None] = [None]
        self._free: list[int] = []
        self._handles = np.ones(1, np.int64)
        self._num_closed = 0  # names without an open handle that chunks still refer to
        self.generation = np.zeros(1, np.int64)  # by id; rises and is never reset, also where an id is used again
        self.resident = np.zeros((1, num_groups), np.int64)  # chunks of the present generation that a lookup finds
        self.held = np.zeros((1, num_groups), np.int64)  # … and those being written
        self.existing = np.zeros((1, num_groups), np.int64)  # … and all others that have units

    def open(self, name: bytes) -> int:
        """Returns the id of a namespace, for the holder of the handle to `close`."""
        known = self._ids.get(name)
        if known is None:
            known = self._ids[name] = self._new_id()
            self._names[known] = name
        elif not self._handles[known]:
            self._num_closed -= 1
        self._handles[known] += 1
        return known

    def close(self, namespace: int) -> None:
        """Ends one `open`."""
        self._handles[namespace] -= 1
        if not self._handles[namespace]:
            self._num_closed += 1
            self.recycle(np.array([namespace]))

    def find(self, name: bytes) -> int | None:
        """Returns the id of a namespace that is in use, or `None`."""
        return self._ids.get(name)

    def name(self, namespace: int) -> bytes | None:
        """Returns the name of a namespace that is in use; the default one has none."""
        return self._names[namespace]

    def count(self, tables: Iterable[np.ndarray], namespaces: np.ndarray, groups: np.ndarray, change: int) -> None:
        """Adds `change` to some of the tables for each chunk, given by its namespace and its group."""
        cells = namespaces * self._num_groups + groups
        for table in tables:
            np.add.at(table.reshape(-1), cells, change)

    def recycle(self, namespaces: np.ndarray) -> None:
        """Gives back the ids of those to which nobody refers any more."""
        if not self._num_closed:
            return
        unused = (self._handles[namespaces] == 0) & ~self.existing[namespaces].any(axis=1)
        for namespace in set(namespaces[unused].tolist()):
            name = self._names[namespace]
            if name is not None:
                del self._ids[name]
                self._names[namespace] = None
                self._free.append(namespace)
                self._num_closed -= 1

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

    def check_integrity(self) -> None:
        """Raises an `AssertionError` if names, ids and handles contradict each other."""
        assert all(self._names[known] == name for name, known in self._ids.items())
        used = {*self._ids.values(), DEFAULT}
        assert not used & set(self._free), "an id in use is not free"
        assert not self._handles[self._free].any(), "an id with open handles is in use"
        closed = [known for known in self._ids.values() if not self._handles[known]]
        assert len(closed) == self._num_closed, "names without handles are counted"
        assert self.existing[closed].any(axis=1).all(), "a name that nobody refers to is forgotten"

    def _new_id(self) -> int:
        if self._free:
            return self._free.pop()
        new = len(self._names)
        self._names.append(None)
        if new == len(self.generation):
            for name in ("_handles", "generation", "resident", "held", "existing"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        return new
