"""Requests that are looked up: their keys, what of them is in the pool, and the hit."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.admission import AskedSketch
from kvjax.chain import Chain, ReadyChunks
from kvjax.chunking import Chunking
from kvjax.coverage import Asked, asked, hit_of
from kvjax.pool import ChunkPool, fingerprints
from kvjax.positions import Restorable
from kvjax.requests import Limits, Request
from kvjax.retention import junction, of_use, ranks_above
from kvjax.storing import StoreChooser, sound_from

# Chunks below a hit, not needed for it, that a later call looks for at most.
_LOOKED_AT_A_TIME = 2048


class Lookups:
    """Makes requests and finds what the pool has of them.

    Args:
        chunking: the layout and its chunks.
        pool: where chunks are looked for.
        chooser: names the chunks of a request to the pool.
        resume_multiple: see `Ledger`.
        checkpoint_tokens: see `Ledger`; `None` for none.
        store_after: see `Ledger`.
    """

    def __init__(
        self,
        chunking: Chunking,
        pool: ChunkPool,
        chooser: StoreChooser,
        *,
        resume_multiple: int,
        checkpoint_tokens: int | None,
        store_after: int,
    ):
        self.chunking = chunking
        self.pool = pool
        self.resume_multiple = resume_multiple
        self.checkpoint_tokens = checkpoint_tokens
        self.store_after = store_after
        self._chooser = chooser
        self._asked = AskedSketch() if store_after > 1 else None

    def new_request(
        self,
        name: bytes,
        token_ids: Any,
        hashes: Sequence[Any] | None,
        num_tokens: int | None,
        limits: Limits,
    ) -> Request:
        """Returns a request with its keys, whose handle of its namespace is open.

        Raises:
            ValueError: see `Ledger.lookup`. Then no handle is open.
        """
        own: list[bytes] = []
        chains = {g: Chain(self.pool, self.chunking, g, name, own) for g in self.chunking.layout.cached}
        request = Request(name, 0, 0, chains, limits, hashes=own)
        request.extend(self.chunking, token_ids, hashes, num_tokens)
        if not request.num_tokens:
            raise ValueError("`token_ids` must hold at least one token, got none")
        request.space = self.pool.namespaces.open(name)
        request.generation = int(self.pool.namespaces.generation[request.space])
        return request

    def forget(self, request: Request) -> None:
        """Releases what a request keeps in the pool; its handle is closed."""
        if request.pins is not None:
            self.pool.unpin(request.pins)
        request.pins = request.hit = None
        self.pool.namespaces.close(request.space)

    def asked_for(self, request: Request, device_tokens: int | Mapping[str, int]) -> Asked:
        """Returns the lookup, of which the chunks are looked for where they are asked for.

        Raises:
            ValueError: see `Ledger.lookup`.
        """
        ready = {g: ReadyChunks(chain, self.pool) for g, chain in request.chains.items()}
        return asked(self.chunking, request.num_tokens, ready, device_tokens, self.resume_multiple)

    def find(self, request: Request, device_tokens: int | Mapping[str, int], ranks: Sequence[Restorable]) -> None:
        """Finds the hit of a request, and notes it there with the checkpoints that follow.

        Raises:
            ValueError: see `Ledger.lookup`.
        """
        looked = self.asked_for(request, device_tokens)
        floor = looked.floor if looked.floor else self._alone(looked)
        most = None if request.limits.load_tokens is None else floor + request.limits.load_tokens
        hit = hit_of(looked, ranks, most)
        request.hit, request.hit_tokens, request.fallback = hit, hit.hit_tokens, floor
        request.device_tokens = dict(device_tokens) if isinstance(device_tokens, Mapping) else int(device_tokens)
        request.sound_from = sound_from(self.chunking, [hit.hit_tokens, floor])
        ready = {g: ReadyChunks(chain, self.pool) for g, chain in request.chains.items()}
        request.checkpoints = {request.num_tokens}
        shared = junction(self.chunking, request.num_tokens, ready)
        if shared > hit.hit_tokens:
            request.checkpoints.add(shared)
        request.add_checkpoints(self.checkpoint_tokens, hit.hit_tokens)
        request.most_on_device = max(looked.device.values())

    def _alone(self, asked_for: Asked) -> int:
        """The position from which a request goes on if nothing is loaded, where the groups' device prefixes differ."""
        held = {self.chunking.layout.groups[g].name: tokens for g, tokens in asked_for.device.items()}
        if not any(held.values()):
            return 0
        return hit_of(asked(self.chunking, asked_for.total, {}, held, self.resume_multiple)).hit_tokens

    def take_over(self, request: Request, before: Request) -> bool:
        """Whether a request that is looked up again goes on with what it was; then what it asked for is known."""
        units = min(len(request.hashes), len(before.hashes))
        if units and request.hashes[units - 1] != before.hashes[units - 1]:
            return False
        request.counted_tokens, request.counted_hit = before.counted_tokens, before.counted_hit
        request.num_asked = {g: min(number, len(request.chains[g])) for g, number in before.num_asked.items()}
        request.num_admitted = {g: min(number, len(request.chains[g])) for g, number in before.num_admitted.items()}
        for g, chain in request.chains.items():
            chain.asked_like(before.chains[g], min(len(chain), len(before.chains[g])))
        return True

    def register(self, request: Request) -> None:
        """Counts the prompt's chunks as asked for, keeps in the pool what the hit needs, and names what is there."""
        if self._asked is not None:
            self._ask(request, self._asked)
        names, hit = self.chunking.layout.names, request.hit
        assert hit is not None, "the request has its hit"
        needed = [chain.slots(hit.load[names[g]]) for g, chain in request.chains.items()]
        request.pins = self.pool.pin(np.concatenate(needed))
        request.access = self.pool.new_access()
        self._name_all(request)

    def _name_all(self, request: Request) -> None:
        """One access of the request to those of its chunks that are known to be resident and of use to it. What serves
        no position any more stays as old as it is."""
        chunks = {}
        for g, chain in request.chains.items():
            held = np.flatnonzero(chain.held())
            chunks[g] = held[self.pool.ready(chain.slots(held))]
        request.num_touched = sum(map(len, chunks.values()))
        request.unlooked = request.hit_tokens
        if request.num_touched:
            named, request.ranked_to = ranks_above(self.chunking, chunks, 0)
            useful = {g: of_use(self.chunking, g, *ranked) for g, ranked in named.items()}
            self._chooser.touch(request, {g: (c[useful[g]], ranks[useful[g]]) for g, (c, ranks) in named.items()})

    def look_further(self, request: Request) -> None:
        """Looks for some of the chunks below the hit that the hit did not need. Once all are known, the next store
        names them with the others."""
        most = _LOOKED_AT_A_TIME
        for g, chain in request.chains.items() if request.unlooked else ():
            below = min(len(chain), request.unlooked // (self.chunking.tokens_per_chunk[g] or 1))
            unknown = chain.not_looked(0, below)[:most]
            chain.look(unknown)
            most -= len(unknown)
        if most and request.unlooked:
            request.access = 0 if most < _LOOKED_AT_A_TIME else request.access
            request.unlooked = 0

    def _ask(self, request: Request, asked_before: AskedSketch) -> None:
        """Counts the prompt's chunks as asked for, but for those that the request asked for before, and notes how many
        of them, from the first one on, were asked for often enough to be stored."""
        for g, chain in request.chains.items():
            known = request.num_asked.get(g, 0)
            new = np.arange(known, len(chain))
            if not len(new):
                continue
            # Keys of groups differ at their end alone, which a fingerprint does not see.
            counts = asked_before.ask(fingerprints(chain.keys(new)) + np.uint64(g))
            rare = np.flatnonzero(counts < self.store_after)
            if request.num_admitted.get(g, 0) == known:
                request.num_admitted[g] = known + (int(rare[0]) if len(rare) else len(counts))
            request.num_asked[g] = len(chain)
