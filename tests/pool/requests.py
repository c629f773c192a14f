"""Requests that share prefixes and use a pool as the ledger does; after each eviction what survived is judged by the
literal law."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvjax.chunking import Chunking
from kvjax.coverage import store_set
from kvjax.pool import ChunkPool, Pins, Policy, Reservation
from kvjax.retention import eviction_ranks
from tests.oracles import law

Tokens = tuple[int, ...]
ChunkId = tuple[int, int, bytes]  # group_idx, chunk_idx, key


@dataclass(eq=False)
class Request:
    """One request under way."""

    tokens: Tokens
    access: int
    pins: Pins | None


class Requests:
    """A pool, the requests that use it, and all token sequences so far.

    Args:
        chunking: every chunk takes one unit.
        policy: of the pool.
        num_units: of the pool.
    """

    def __init__(self, chunking: Chunking, policy: Policy, num_units: int):
        self.chunking = chunking
        self.policy = policy
        self.pool = ChunkPool(num_units, [1] * len(chunking.layout.groups), policy)
        self.sequences: list[Tokens] = [()]
        self.running: list[Request] = []
        self.writes: list[tuple[Reservation, set[bytes]]] = []  # with all that the store named
        self.doubtful: set[bytes] = set()  # passed over, or named for the sake of a chunk whose store failed

    def ask(self, base: int, shared: int, new: int, pinned: bool) -> None:
        """A request comes that shares the first tokens of an earlier one. What it has in the pool and can use is one
        access; the rest stays with those who can."""
        tokens = self.sequences[base % len(self.sequences)][:shared]
        tokens += tuple(len(self.sequences) * 100 + i for i in range(new))
        self.sequences.append(tokens)
        request = Request(tokens, self.pool.new_access(), None)
        held, slots = self._held(tokens)
        useful = self._usable_of(tokens, {key for _, _, key in held})
        of_use = np.array([key in useful for _, _, key in held], bool)
        slots, ranks = slots[of_use], self._ranks(chunk for chunk in held if chunk[2] in useful)
        self.pool.touch(slots, ranks, access=request.access, counted=True)
        self.doubtful -= useful
        if pinned:
            request.pins = self.pool.pin(slots[self.pool.ready(slots)])
        self.running.append(request)

    def store(self, which: int, at_once: bool) -> None:
        """A request stores what its tokens so far want, and names all that it has."""
        if not self.running:
            return
        request = self.running[which % len(self.running)]
        held, slots = self._held(request.tokens)
        wanted = [] if not request.tokens else self._chunks(request.tokens, self._store_set(len(request.tokens)))
        named = sorted({*held, *wanted})
        useful = self._usable_of(request.tokens, {key for _, _, key in named})
        named = [chunk for chunk in named if chunk[2] in useful]
        if not (self.pool.accesses(slots) == request.access).any():
            request.access = self.pool.new_access()
        before, order = self._all_held(), self._order()
        protected = {key for _, _, key in named} | self._in_use()
        reservation = self.pool.prepare_store(
            [key for _, _, key in named],
            [g for g, _, _ in named],
            self._ranks(named),
            access=request.access,
        )
        if reservation is None:
            return
        after = self._all_held()
        self.judge(before & after, before, after, protected)
        self.doubtful |= {
            key for key in order if key in after and any(k not in after for k in order[order.index(key) :])
        }
        self.doubtful -= useful
        if at_once:
            self.pool.complete_store(reservation, ok=True)
        else:
            self.writes.append((reservation, {key for _, _, key in named}))

    def complete(self, which: int, ok: bool) -> None:
        """The bytes of a store have arrived, or its last chunk has not."""
        if self.writes:
            reservation, named = self.writes.pop(which % len(self.writes))
            published = self.pool.complete_store(reservation, ok=ok or reservation.slots != reservation.slots[-1:])
            if not published.all():
                self.doubtful |= named

    def finish(self, which: int) -> None:
        """A request ends."""
        if self.running:
            request = self.running.pop(which % len(self.running))
            if request.pins is not None:
                self.pool.unpin(request.pins)

    def judge(self, survivors: set[bytes], before: set[bytes], after: set[bytes], protected: set[bytes]) -> None:
        """What could be used before some chunks made room, and stayed, can be used still.

        What was passed over earlier as it was read, written or protected is not judged until it is named again: what
        it belongs to may have gone then.
        """
        spoilt = (survivors & self._usable(before)) - self._usable(after) - protected - self.doubtful
        assert not spoilt, "a chunk stayed of which a part of its prefix made room"

    def _usable(self, keys: set[bytes]) -> set[bytes]:
        """The chunks of use to any sequence."""
        return set().union(*(self._usable_of(tokens, keys) for tokens in self.sequences))

    def _usable_of(self, tokens: Tokens, keys: set[bytes]) -> set[bytes]:
        """The chunks of a sequence that a position requires that can be restored."""
        chunks = [c for c in self._chunks(tokens, law.complete_chunks(self.chunking, len(tokens))) if c[2] in keys]
        layout = self.chunking.layout
        present = {name: [i for g, i, _ in chunks if layout.names[g] == name] for name in layout.names}
        positions = law.restorable(self.chunking, law.held_by_chunks(self.chunking, present), len(tokens) + 1)
        usable = set()
        for g, chunk_idx, key in chunks:
            spec = layout.groups[g]
            holds = law.held_by_chunk(spec.kind, self.chunking.tokens_per_chunk[g] or 0, chunk_idx)
            if any(law.required(spec.kind, spec.lookahead_tokens, position) & holds for position in positions):
                usable.add(key)
        return usable

    def _store_set(self, checkpoint: int) -> dict[str, list[int]]:
        return {name: chunks.tolist() for name, chunks in store_set(self.chunking, checkpoint).items()}

    def _chunks(self, tokens: Tokens, chunks: dict[str, list[int]]) -> list[ChunkId]:
        found = []
        for g, name in enumerate(self.chunking.layout.names):
            per_chunk = self.chunking.tokens_per_chunk[g] or 0
            for chunk_idx in chunks[name]:
                content = repr((g, tokens[: (chunk_idx + 1) * per_chunk])).encode()
                found.append((g, chunk_idx, hashlib.blake2b(content, digest_size=16).digest()))
        return found

    def _held(self, tokens: Tokens) -> tuple[list[ChunkId], np.ndarray]:
        """What the pool has of a sequence, sorted, with the slots."""
        chunks = sorted(self._chunks(tokens, law.complete_chunks(self.chunking, len(tokens))))
        slots = self.pool.held([key for _, _, key in chunks])
        there = np.flatnonzero(slots >= 0)
        return [chunks[place] for place in there.tolist()], slots[there]

    def _ranks(self, chunks: Iterable[ChunkId]) -> np.ndarray:
        """Parallel to sorted chunks."""
        chunks = list(chunks)
        by_group = {g: np.array([i for h, i, _ in chunks if h == g], np.int64) for g in self.chunking.layout.cached}
        ranks = eviction_ranks(self.chunking, by_group)
        return np.concatenate([ranks[g] for g in self.chunking.layout.cached])

    def _all_held(self) -> set[bytes]:
        return set(self.pool.held_keys())

    def _order(self) -> list[bytes]:
        """The keys in the order in which they would leave."""
        return [key for slots, _ in self.policy.victims() for key in self.pool.keys(slots)]

    def _in_use(self) -> set[bytes]:
        chunks = self.pool._chunks
        return set(self.pool.keys(np.flatnonzero(chunks.indexed & (chunks.writing | (chunks.pins > 0)))))
