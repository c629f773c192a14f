"""An engine without a model that serves many requests: real JAX caches, blocks with reference counts, exact bytes.

What a token leaves in a cache is a function of the weights, the tenant and the prefix that ends with it. The engine
keeps a copy of what every byte of every cache must be. A load may change the blocks it restores, to what their tokens
must have written, and no others.
"""

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvjax
from kvjax.coverage import needed
from kvjax.groups import CacheLayout
from kvjax.jobs import Job, JobResult
from tests.support.exact_caches import ExactCaches, marks_of, same_blocks


@dataclass(eq=False)
class Served:
    """A request: its tokens, its blocks and what they must hold."""

    request_id: Hashable
    tokens: np.ndarray
    salt: bytes = b""
    seed: int = 0  # of the weights and the tenant when it was looked up
    marks: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    tables: dict[int, list[int]] = field(default_factory=dict)
    written: int = 0
    found: kvjax.Lookup | None = None
    hit_tokens: int = 0  # of the last load
    on_device: int = 0  # tokens that it kept when it was looked up
    stale: bool = False  # what it is to load was invalidated before
    spoilt: bool = False  # what it loaded is not all there, so that what it computes is garbage


class ServingEngine(ExactCaches):
    """Serves requests over paged caches with an `Offloader`.

    Args:
        layout: the groups; no two share a leaf. A block of an attention group has its tokens in the first dimension
            of each leaf's block shape; one of a recurrent group is one state.
        num_blocks: of every cache.
        seed: of block ids and garbage.
        offload: for the offloader.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, *, seed: int = 0, **offload: Any):
        super().__init__(layout, num_blocks, seed)
        self.offloader = kvjax.Offloader(layout, self.caches, show_progress=False, **offload)
        self.chunking = self.offloader.chunking
        self.weights = 0
        self.of_tenant: dict[bytes, int] = {}
        self.bytes_compared = 0  # of restored blocks

    # --- what must be where

    def places_read(self, g: int, position: int) -> range:
        """Places of the blocks that a token at `position` reads."""
        group = self.layout.groups[g]
        start, stop = needed(group.kind, position)
        if start == stop or (self.is_recurrent(g) and position % group.tokens_per_block):
            return range(0)  # a state inside a block is the engine's own and has no place in the table
        return range(start // group.tokens_per_block, -(-stop // group.tokens_per_block))

    def wrong(self, request: Served, position: int) -> str:
        """Says which token that the one at `position` reads does not hold what its prefix wrote; empty if all do."""
        for g in self.layout.cached:
            group = self.layout.groups[g]
            if not self.places_read(g, position) or (self.is_recurrent(g) and position == request.on_device):
                continue
            tokens = np.arange(*needed(group.kind, position))
            blocks = np.array(request.tables[g], np.int64)[tokens // group.tokens_per_block]
            if (blocks < 0).any():
                return f"{group.name}: a block read at {position} is missing"
            for leaf in group.leaves:
                inside = 0 if self.is_recurrent(g) else tokens % group.tokens_per_block
                found = self.must_be[leaf.name][blocks, :, inside]
                if not np.array_equal(found, self.content(g, leaf, request.marks[tokens])):
                    return f"{group.name}, {leaf.name}: a token read at {position} is wrong"
        return ""

    def check_blocks(self, requests: list[Served]) -> None:
        """Every block is free, or held as often as the tables say."""
        for g in self.layout.cached:
            counted = np.zeros(self.num_blocks, np.int64)
            for request in requests:
                np.add.at(counted, [block for block in request.tables.get(g, ()) if block >= 0], 1)
            self.check_held(g, counted)

    # --- a request

    def seed_of(self, salt: bytes) -> int:
        """Tells the weights and the tenant of a request apart."""
        name = f"{self.weights}/{self.of_tenant.get(salt, 0)}/".encode() + salt
        return int.from_bytes(hashlib.sha256(name).digest()[:7])

    def look_up(self, request: Served, *, on_device: bool = False, **limits: Any) -> kvjax.Lookup:
        """Looks a request up, again perhaps. What it had computed is given up unless the device is to keep it."""
        seed = self.seed_of(request.salt)
        kept = on_device and seed == request.seed and 0 < request.written < len(request.tokens)
        if not kept:
            self.drop_blocks(request)
        request.on_device = request.written if kept else 0
        request.found = self.offloader.lookup(
            request.request_id, request.tokens, device_tokens=request.on_device, salt=request.salt, **limits
        )
        request.seed, request.marks, request.spoilt = seed, marks_of(request.tokens, seed), False
        return request.found

    def load(self, request: Served, *, share: bool = False, fills: bool = False, **options: Any) -> Job:
        """Loads the hit. Afterwards each of its blocks is as it was or restored, and no other block has changed.

        Args:
            request: which was looked up.
            share: take the blocks into which others load the same.
            fills: give it blocks for all its tokens, needed or not, as engines do that know of no null block.
            options: for `Offloader.load`.

        Raises:
            OutOfBlocksError: the request must give up what it has.
        """
        assert request.found is not None, "it was looked up"
        hit = request.found.hit_tokens
        own: dict[int, np.ndarray] = {}
        for g in self.layout.cached:
            shared = self._share(request, g) if share else set()
            places = [place for place in self.places_read(g, hit) if place not in shared and hit > request.on_device]
            filled = range(places[0]) if fills and places and not self.is_recurrent(g) else ()
            for place in (*places, *(place for place in filled if self._is_free(request, g, place))):
                self._own_block(request, g, place)
            own[g] = np.array(places, np.int64)
        self.flush()
        self.caches, job = self.offloader.load(
            self.caches, request.request_id, self._named(request), share=share, **options
        )
        self._see_load(request, own)
        request.stale = self.seed_of(request.salt) != request.seed and hit > request.on_device
        request.written, request.hit_tokens, request.found = hit, hit, None
        request.spoilt = bool(self.wrong(request, hit))
        return job

    def loaded(self, request: Served, result: JobResult, *, keeps: bool = False) -> None:
        """Goes on where a load that ended lets the request go on, and checks what it has.

        Args:
            request: which computed nothing since.
            result: of its load.
            keeps: keep the blocks past that position, whatever they hold.
        """
        if result.ok:
            assert not request.spoilt, "a load that did not restore all is not told to be well"
            assert not request.stale, "what was invalidated before the load is not restored"
        elif not keeps:
            self._cut_back(request, result.valid_tokens or 0)
        request.written, request.spoilt = result.valid_tokens or 0, False
        wrong = self.wrong(request, request.written)
        assert not wrong, wrong

    def compute(self, request: Served, stop: int) -> int:
        """Runs a step up to `stop`, or to where a state must be stored. Returns where it ended.

        Raises:
            OutOfBlocksError: nothing was computed.
        """
        here = request.written
        cut = self.offloader.next_cut(request.request_id, here)
        stop = min(stop, cut if cut is not None else stop, len(request.tokens))
        places = {}
        for g in self.layout.cached:
            tokens_per_block = self.layout.groups[g].tokens_per_block
            table = request.tables.setdefault(g, [])
            last = -(-stop // tokens_per_block)
            table += [-1] * (last - len(table))
            places[g] = range(here // tokens_per_block, last)
            if self.is_recurrent(g):
                places[g] = range(0) if stop % tokens_per_block else range(last - 1, last)
            for place in places[g]:
                self._own_block(request, g, place)
        seed = int(self.rng.integers(2**62)) if request.spoilt else self.seed_of(request.salt)
        request.marks[here:stop] = marks_of(request.tokens, seed)[here:stop]
        for g in self.layout.cached:
            self._write(request, g, np.array(places[g], np.int64), here, stop)
        request.written = stop
        return stop

    def store(self, request: Served, *, checkpoint: bool = False, frees: bool = True, **options: Any) -> Job:
        """Stores, frees what no later store wants, and overwrites what it freed at once. Of a request whose load is
        under way nothing may be freed, as others may be told to share it."""
        self.flush()
        self.caches, job = self.offloader.store(
            self.caches, request.request_id, self._named(request), request.written, checkpoint=checkpoint, **options
        )
        kept = kvjax.retained_from(self.chunking, request.written)
        for g in self.layout.cached if frees else ():
            group = self.layout.groups[g]
            for place in range(min(kept[group.name] // group.tokens_per_block, len(request.tables.get(g, ())))):
                self._release(request, g, place)
        self.flush()
        return job

    def accept(self, request: Served, tokens: np.ndarray) -> None:
        """Adds tokens."""
        request.tokens = np.concatenate([request.tokens, tokens])
        marks = marks_of(request.tokens, request.seed)
        marks[: len(request.marks)] = request.marks
        request.marks = marks
        self.offloader.extend(request.request_id, tokens)

    def invalidate(self, salt: bytes | None = None) -> None:
        """Says that what was stored is worth nothing any more: all of it, or what a tenant has. What is computed from
        now on differs."""
        if salt is None:
            self.weights += 1
            self.offloader.invalidate()
        else:
            self.of_tenant[salt] = self.of_tenant.get(salt, 0) + 1
            self.offloader.invalidate(self.offloader.namespace(salt))

    def update_model(self) -> None:
        """Changes the weights, and says so."""
        self.weights += 1
        self.offloader.update_model(f"weights {self.weights}")

    def drop_blocks(self, request: Served) -> None:
        """Gives all blocks of a request back."""
        for g, table in request.tables.items():
            for place in range(len(table)):
                self._release(request, g, place)
        request.tables, request.written = {g: [] for g in self.layout.cached}, 0

    # --- parts

    def _named(self, request: Served) -> dict[str, list[int]]:
        """The block tables by group name, long enough for what is written."""
        tables = {}
        for g in self.layout.cached:
            group = self.layout.groups[g]
            table = request.tables.setdefault(g, [])
            tables[group.name] = table + [-1] * (-(-request.written // group.tokens_per_block) - len(table))
        return tables

    def _share(self, request: Served, g: int) -> set[int]:
        """Takes the blocks into which others load the same chunks, but for those that the request will write to.
        Returns their places."""
        group, found = self.layout.groups[g], request.found
        assert found is not None, "it was looked up"
        arriving = found.arriving.get(group.name)
        table, shared = request.tables[g], set()
        if arriving is None or self.is_recurrent(g):
            return shared
        read = self.places_read(g, found.hit_tokens)
        for chunk_idx, blocks in zip(found.load[group.name].tolist(), arriving.tolist(), strict=True):
            for i, block_id in enumerate(blocks):
                place = chunk_idx * (self.chunking.blocks_per_chunk[g] or 0) + i
                whole = (place + 1) * group.tokens_per_block <= found.hit_tokens
                table += [-1] * (place + 1 - len(table))
                if block_id >= 0 and whole and place in read and table[place] < 0:
                    table[place] = block_id
                    self.hold(g, block_id)
                    shared.add(place)
        return shared

    def _is_free(self, request: Served, g: int, place: int) -> bool:
        """Whether a place of the request has no block."""
        table = request.tables[g]
        return place >= len(table) or table[place] < 0

    def _own_block(self, request: Served, g: int, place: int) -> None:
        """Makes sure that a place has a block that no other request has; one that others have is copied."""
        table = request.tables.setdefault(g, [])
        table += [-1] * (place + 1 - len(table))
        before = table[place]
        if before >= 0 and self.refs[g][before] == 1:
            return
        table[place] = self.take(g, like=before)
        if before >= 0:
            self.release(g, before)

    def _release(self, request: Served, g: int, place: int) -> None:
        block, request.tables[g][place] = request.tables[g][place], -1
        if block >= 0:
            self.release(g, block)

    def _write(self, request: Served, g: int, places: np.ndarray, start: int, stop: int) -> None:
        """Writes what the tokens `[start, stop)` leave in blocks."""
        group = self.layout.groups[g]
        tokens = places * group.tokens_per_block + group.tokens_per_block - 1
        inside: Any = np.zeros(len(tokens), np.int64)
        if not self.is_recurrent(g):
            tokens = np.arange(start, stop)
            inside = tokens % group.tokens_per_block
        blocks = np.array(request.tables[g], np.int64)[tokens // group.tokens_per_block]
        self.write(g, blocks, inside, request.marks[tokens])

    def _see_load(self, request: Served, own: Mapping[int, np.ndarray]) -> None:
        """Compares all caches with what they were and with what the load must have made of the request's blocks."""
        actual = self.read()
        for g, places in own.items():
            blocks = np.array(request.tables[g], np.int64)[places]
            for leaf in self.layout.groups[g].leaves:
                before, after = self.must_be[leaf.name], actual[leaf.name]
                right = self.block(g, leaf, request.marks, places)
                restored = same_blocks(after[blocks], right)
                left = same_blocks(after[blocks], before[blocks])
                assert (restored | left).all(), f"{leaf.name}: a load wrote what its tokens never wrote"
                changed = np.flatnonzero(~same_blocks(after, before))
                assert np.isin(changed, blocks).all(), f"{leaf.name}: a load wrote blocks that are not its own"
                self.bytes_compared += right[restored].nbytes
        self.must_be = actual

    def _cut_back(self, request: Served, position: int) -> None:
        """Gives up the blocks past a position."""
        for g, table in request.tables.items():
            kept = self.places_read(g, position)
            for place in range(len(table)):
                if place not in kept:
                    self._release(request, g, place)
            del table[-(-position // self.layout.groups[g].tokens_per_block) :]
