"""The host pool as a list of chunks: every question is answered by looking at all of them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Chunk:
    """One chunk that holds units: found or not, written or not, read so many times."""

    key: bytes
    group_idx: int
    cost: int
    space: str | None
    access: int = 0
    rank: int = 0
    found: bool = True
    writing: bool = True
    readers: int = 0

    @property
    def in_use(self) -> bool:
        return self.writing or self.readers > 0

    @property
    def resident(self) -> bool:
        return self.found and not self.writing


@dataclass
class PoolModel:
    """Takes the order of eviction as given: sets of chunks that leave at once.

    Namespaces are names; `None` is the one that is always there.
    """

    num_units: int
    units_per_chunk: Sequence[int | None]
    chunks: list[Chunk] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    handles: Counter[str] = field(default_factory=Counter)

    @property
    def num_free(self) -> int:
        return self.num_units - sum(chunk.cost for chunk in self.chunks)

    def held(self) -> set[bytes]:
        """Keys of the chunks that are found or will be."""
        return {chunk.key for chunk in self.chunks if chunk.found}

    def resident(self) -> set[bytes]:
        """Keys of the chunks that a lookup finds."""
        return {chunk.key for chunk in self.chunks if chunk.resident}

    def num_resident(self, group_idx: int) -> int:
        return sum(chunk.resident for chunk in self.chunks if chunk.group_idx == group_idx)

    def units(self, group_idx: int) -> int:
        return sum(chunk.cost for chunk in self.chunks if chunk.group_idx == group_idx)

    def spaces(self) -> set[str]:
        """Namespaces with an open handle or a chunk."""
        open_ones = {space for space, handles in self.handles.items() if handles}
        return open_ones | {chunk.space for chunk in self.chunks if chunk.space is not None}

    def chunk(self, key: bytes) -> Chunk:
        """The chunk of a key that is held."""
        (one,) = [chunk for chunk in self.chunks if chunk.found and chunk.key == key]
        return one

    def touch(self, access: int, ranks: Iterable[tuple[bytes, int]]) -> None:
        """Of a key named twice the first rank counts; a chunk stays with the most recent access to it."""
        done = set()
        for key, rank in ranks:
            if key in self.held() and key not in done and self.chunk(key).access <= access:
                self.chunk(key).access, self.chunk(key).rank = access, rank
            done.add(key)

    def prepare_store(
        self,
        wanted: Sequence[tuple[bytes, int]],
        space: str | None,
        kept: Collection[bytes] | None,
        eviction_order: Sequence[Collection[Chunk]],
    ) -> list[Chunk] | None:
        """The chunks that are written now; `wanted` has keys with their groups. `touch` is to follow."""
        held, new = self.held(), {}
        for key, group_idx in wanted:
            if key not in held and key not in new:
                new[key] = Chunk(key, group_idx, self.units_per_chunk[group_idx] or 0, space)
        protected = {key for key, _ in wanted} if kept is None else set(kept)
        missing = sum(chunk.cost for chunk in new.values()) - self.num_free
        victims: list[Chunk] = []
        for together in eviction_order:
            if sum(victim.cost for victim in victims) < missing:
                victims += [chunk for chunk in together if not chunk.in_use and chunk.key not in protected]
        if sum(victim.cost for victim in victims) < missing:
            self.counts["refused"] += 1
            return None
        self.counts["evicted"] += len(victims)
        for victim in victims:
            self.counts[f"evicted {victim.group_idx}"] += 1
        self.drop(lambda chunk: chunk in victims)
        self.chunks += new.values()
        return list(new.values())

    def lru_order(self) -> list[list[Chunk]]:
        """The sets that leave at once, by the last access, in it from the highest rank down."""
        found = [chunk for chunk in self.chunks if chunk.found]
        places = sorted({(chunk.access, -chunk.rank) for chunk in found})
        return [[chunk for chunk in found if (chunk.access, -chunk.rank) == place] for place in places]

    def complete_store(self, chunks: Sequence[Chunk], ok: Sequence[bool]) -> list[bool]:
        for chunk, written in zip(chunks, ok, strict=True):
            outcome = "stored" if chunk.found and written else "failed" if chunk.found else "stale"
            self.counts[outcome] += 1
            self.counts[f"{outcome} {chunk.group_idx}"] += 1
            chunk.writing = False
            chunk.found = outcome == "stored"
        published = [chunk.found for chunk in chunks]
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

    def invalidate(self, which: Callable[[Chunk], bool]) -> int:
        gone = [chunk for chunk in self.chunks if chunk.found and which(chunk)]
        self.counts["invalidated"] += len(gone)
        self.drop(lambda chunk: chunk in gone)
        return len(gone)

    def drop(self, which: Callable[[Chunk], bool]) -> None:
        for chunk in self.chunks:
            chunk.found = chunk.found and not which(chunk)
        self.forget_unused()

    def forget_unused(self) -> None:
        self.chunks = [chunk for chunk in self.chunks if chunk.found or chunk.in_use]
