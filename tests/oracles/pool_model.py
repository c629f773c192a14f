"""The host pool as a list of chunks: every question is answered by looking at all of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Chunk:
    """One chunk that holds units: found or not, written or not, read so many times."""

    key: bytes
    cost: int
    last_access: int = 0
    rank: int = 0
    found: bool = True
    writing: bool = True
    readers: int = 0

    @property
    def in_use(self) -> bool:
        return self.writing or self.readers > 0


class PoolModel:
    """Evicts by the last access, in it from the highest rank down, all of one rank at once."""

    def __init__(self, num_units: int, units_per_chunk: Sequence[int | None]):
        self.num_units = num_units
        self.units_per_chunk = units_per_chunk
        self.chunks: list[Chunk] = []
        self.num_accesses = 0

    @property
    def num_free(self) -> int:
        return self.num_units - sum(chunk.cost for chunk in self.chunks)

    def held(self) -> set[bytes]:
        """Keys of the chunks that are found or will be."""
        return {chunk.key for chunk in self.chunks if chunk.found}

    def resident(self) -> set[bytes]:
        """Keys of the chunks that a lookup finds."""
        return {chunk.key for chunk in self.chunks if chunk.found and not chunk.writing}

    def chunk(self, key: bytes) -> Chunk:
        """The chunk of a key that is held."""
        (one,) = [chunk for chunk in self.chunks if chunk.found and chunk.key == key]
        return one

    def touch(self, keys: Iterable[bytes], ranks: Iterable[int]) -> None:
        self.num_accesses += 1
        for key, rank in zip(keys, ranks, strict=True):
            if key in self.held():
                self.chunk(key).last_access, self.chunk(key).rank = self.num_accesses, rank

    def prepare_store(
        self, keys: Sequence[bytes], group_idxs: Sequence[int], ranks: Sequence[int], kept: Iterable[bytes] | None
    ) -> list[Chunk] | None:
        costs = [self.units_per_chunk[group_idx] or 0 for group_idx in group_idxs]
        new = [Chunk(key, cost) for key, cost in zip(keys, costs, strict=True) if key not in self.held()]
        protected = set(keys if kept is None else kept)
        missing = sum(chunk.cost for chunk in new) - self.num_free
        victims: list[Chunk] = []
        for together in self.eviction_order():
            if sum(victim.cost for victim in victims) < missing:
                victims += [chunk for chunk in together if not chunk.in_use and chunk.key not in protected]
        if sum(victim.cost for victim in victims) < missing:
            return None
        self.drop(lambda chunk: chunk in victims)
        self.chunks += new
        if new:
            self.touch(keys, ranks)
        return new

    def eviction_order(self) -> list[list[Chunk]]:
        """The chunks that are found, in the sets that leave at once."""
        found = [chunk for chunk in self.chunks if chunk.found]
        places = sorted({(chunk.last_access, -chunk.rank) for chunk in found})
        return [[chunk for chunk in found if (chunk.last_access, -chunk.rank) == place] for place in places]

    def complete_store(self, chunks: Iterable[Chunk], ok: bool) -> list[bytes]:
        published = []
        for chunk in chunks:
            chunk.writing = False
            chunk.found = chunk.found and ok
            published += [chunk.key] if chunk.found else []
        self.forget_unused()
        return published

    def pin(self, keys: Iterable[bytes]) -> list[Chunk]:
        chunks = [self.chunk(key) for key in keys]
        for chunk in chunks:
            chunk.readers += 1
        return chunks

    def unpin(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            chunk.readers -= 1
        self.forget_unused()

    def invalidate(self, keys: Iterable[bytes] | None = None) -> int:
        gone = self.held() if keys is None else self.held() & set(keys)
        self.drop(lambda chunk: chunk.found and chunk.key in gone)
        return len(gone)

    def drop(self, which: Callable[[Chunk], bool]) -> None:
        for chunk in self.chunks:
            chunk.found = chunk.found and not which(chunk)
        self.forget_unused()

    def forget_unused(self) -> None:
        self.chunks = [chunk for chunk in self.chunks if chunk.found or chunk.in_use]
