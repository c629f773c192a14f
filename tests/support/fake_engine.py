"""An engine whose device and host memory are dictionaries: what was written where is a tuple of tokens.

It carries out the ledger's plans and checks on the way that every block and unit holds what it must: the
source of a store, the units that a load reads (when it is planned and when it ends), and every block that
the law says a token reads.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kvjax import Ledger, Lookup, next_cut, retained_from
from kvjax.chunking import Chunking
from kvjax.coverage import needed
from kvjax.groups import ChunkedLocal, FullAttention, Recurrent, SlidingWindow
from kvjax.ledger import Load, Store
from kvjax.packing import cut_into_units
from kvjax.plan import GroupMoves

Frees = Literal["never", "retained", "at once"]
GARBAGE = ("garbage",)


@dataclass(eq=False)
class Running:
    tokens: list[int]
    salt: bytes
    position: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)
    hit_tokens: int = 0


class FakeEngine:
    """Serves requests of a few tokens.

    Args:
        chunking: the layout and its chunks.
        num_units: units of one byte in the host pool.
        frees: which blocks are freed after a store: none; those that no later store wants; or all that
            left the window.
        options: for the ledger.
    """

    def __init__(self, chunking: Chunking, num_units: int = 10**6, frees: Frees = "never", **options: Any):
        self.chunking = chunking
        self.ledger = Ledger(chunking, cut_into_units(chunking, 1), host_bytes=num_units, **options)
        self.frees = frees
        self.multiple = options.get("resume_multiple", 1)
        self.running: dict[Hashable, Running] = {}
        self.device: dict[tuple[int, int], tuple] = {}
        self.host: dict[int, tuple] = {}
        self.free_blocks: list[int] = []
        self.num_blocks = 0
        self.loads: list[Load] = []
        self.stores: list[tuple[Store, list[tuple[np.ndarray, tuple]]]] = []

    # --- what must be where

    def block(self, request: Running, g: int, block_idx: int) -> tuple:
        """What the block at a place of the request holds once its last token was computed."""
        end = (block_idx + 1) * self.chunking.layout.groups[g].tokens_per_block
        return (request.salt, g, *request.tokens[:end])

    def chunk(self, request: Running, g: int, chunk_idx: int) -> tuple:
        per_chunk = self.chunking.blocks_per_chunk[g] or 0
        places = range(chunk_idx * per_chunk, (chunk_idx + 1) * per_chunk)
        places = places[-1:] if self.is_recurrent(g) else places
        return tuple(self.block(request, g, place) for place in places)

    def is_recurrent(self, g: int) -> bool:
        return isinstance(self.chunking.layout.groups[g].kind, Recurrent)

    def places_needed(self, g: int, position: int) -> list[int]:
        """Places of the blocks that a token at `position` reads."""
        start, stop = needed(self.chunking.layout.groups[g].kind, position)
        per_block = self.chunking.layout.groups[g].tokens_per_block
        return list(range(start // per_block, -(-stop // per_block)))

    # --- a request

    def start(self, name: Hashable, tokens: Sequence[int], *, salt: bytes = b"", on_device: int = 0) -> Lookup:
        """Looks a request up, `on_device` tokens of which the device holds already."""
        found = self.ledger.lookup(name, list(tokens), salt=salt, device_tokens=on_device)
        if name in self.running:
            self.free_all(self.running[name])
        request = self.running[name] = Running(list(tokens), salt, hit_tokens=found.hit_tokens)
        request.tables = {g: [] for g in self.chunking.layout.cached}
        request.position = on_device
        for g in self.chunking.layout.cached:
            for place in self.places_needed(g, on_device):
                self.allocate(request, g, place)
                self.write(request, g, place, on_device)
        return found

    def load(self, name: Hashable) -> Load:
        request = self.running[name]
        for g in self.chunking.layout.cached:
            for place in self.places_needed(g, request.hit_tokens):
                self.allocate(request, g, place)
        load = self.ledger.prepare_load(name, self.tables(request))
        self.loads.append(load)
        for moves in load.plan.moves:
            self.check_units(request, moves)
        return load

    def end_load(self, load: Load, ok: bool = True) -> None:
        self.loads.remove(load)
        request = self.running.get(load.request_id)
        for moves in load.plan.moves if ok and request is not None else ():
            self.check_units(request, moves)
            for _, blocks, units in rows(moves):
                content = self.host[units[0]][0]
                for block_id, of_block in zip(blocks, content, strict=True):
                    if block_id >= 0:
                        self.device[moves.group_idx, block_id] = of_block
        if ok and request is not None:
            request.position = load.hit_tokens
        self.ledger.complete_load(load, ok=ok)

    def check_units(self, request: Running, moves: GroupMoves) -> None:
        for chunk_idx, _, units in rows(moves):
            expected = self.chunk(request, moves.group_idx, chunk_idx)
            assert [self.host[unit] for unit in units] == [(expected, i) for i in range(len(units))]

    def compute(self, name: Hashable, stop: int) -> None:
        """Computes tokens up to `stop`: reads what the law says, and writes."""
        request = self.running[name]
        for g, group in enumerate(self.chunking.layout.groups):
            if not group.is_cached or request.position == stop:
                continue
            for place in self.places_needed(g, request.position):
                if not self.is_recurrent(g):
                    last = min(request.position, (place + 1) * group.tokens_per_block)
                    held = self.device[g, request.tables[g][place]]
                    assert held[: last + 2] == (request.salt, g, *request.tokens[:last]), "a token reads wrong bytes"
            if self.is_recurrent(g):
                request.tables[g] = [-1] * len(request.tables[g]) if self.frees != "never" else request.tables[g]
                if stop % group.tokens_per_block:
                    continue
                places = [stop // group.tokens_per_block - 1]
            else:
                places = range(request.position // group.tokens_per_block, -(-stop // group.tokens_per_block))
            for place in places:
                self.allocate(request, g, place)
                self.write(request, g, place, stop)
        request.position = stop

    def prefill(self, name: Hashable, stop: int, step: int, *, checkpoint: bool = False, every: bool = True) -> None:
        """Computes up to `stop` in steps that end where `next_cut` says, and stores after each or after the last."""
        request = self.running[name]
        while request.position < stop:
            cuts = [next_cut(self.chunking, request.position, [c], resume_multiple=self.multiple) for c in (stop, step)]
            cuts = [cut for cut in (cuts[0], request.position + step, stop) if cut > request.position]
            self.compute(name, min(cuts))
            if every or request.position == stop:
                self.end_store(self.store(name, checkpoint=checkpoint and request.position == stop))
            self.free(request)

    def store(self, name: Hashable, *, checkpoint: bool = False) -> Store:
        """Plans a store and reads its source, as the real one does before it returns."""
        request = self.running[name]
        busy = {u for load in self.loads for moves in load.plan.moves for *_, units in rows(moves) for u in units}
        busy |= {unit for _, parts in self.stores for units, _ in parts for unit in units}
        store = self.ledger.prepare_store(name, self.tables(request), request.position, checkpoint=checkpoint)
        parts = []
        for moves in store.plan.moves:
            g = moves.group_idx
            for chunk_idx, blocks, units in rows(moves):
                content = tuple(self.device[g, block_id] for block_id in blocks)
                assert content == self.chunk(request, g, chunk_idx), "a chunk is stored under the key of another"
                assert not busy & set(units), "units that are being read or written were handed out"
                self.host |= dict.fromkeys(units, GARBAGE)
                parts.append((units, content))
        self.stores.append((store, parts))
        return store

    def end_store(self, store: Store, ok: bool = True) -> None:
        (found,) = [pair for pair in self.stores if pair[0] is store]
        self.stores.remove(found)
        for units, content in found[1] if ok else ():
            self.host |= {unit: (content, i) for i, unit in enumerate(units)}
        self.ledger.complete_store(store, ok=ok)

    def accept(self, name: Hashable, tokens: Sequence[int]) -> None:
        self.ledger.extend(name, list(tokens))
        self.running[name].tokens += tokens

    def finish(self, name: Hashable) -> None:
        self.ledger.finish(name)
        self.free_all(self.running.pop(name))

    def served(self, name: Hashable, tokens: Sequence[int], step: int = 64, **more: Any) -> Lookup:
        """A whole request: looked up, loaded, computed with a store after each step, finished."""
        found = self.start(name, tokens, **more)
        self.end_load(self.load(name))
        self.prefill(name, len(tokens), step)
        self.finish(name)
        return found

    # --- blocks

    def tables(self, request: Running) -> dict[str, list[int]]:
        """The request's block tables, long enough for its position."""
        tables = {}
        for g in self.chunking.layout.cached:
            group = self.chunking.layout.groups[g]
            table = request.tables[g]
            table += [-1] * (-(-request.position // group.tokens_per_block) - len(table))
            tables[group.name] = list(table)
        return tables

    def allocate(self, request: Running, g: int, place: int) -> None:
        table = request.tables[g]
        table += [-1] * (place + 1 - len(table))
        if table[place] < 0:
            if not self.free_blocks:
                self.free_blocks.append(self.num_blocks)
                self.num_blocks += 1
            table[place] = self.free_blocks.pop()
            self.device[g, table[place]] = GARBAGE

    def write(self, request: Running, g: int, place: int, stop: int) -> None:
        self.device[g, request.tables[g][place]] = self.block(request, g, place)[: stop + 2]

    def free(self, request: Running) -> None:
        """Frees what the mode says, to be used again at once."""
        kept = retained_from(self.chunking, request.position, resume_multiple=self.multiple)
        for g in self.chunking.layout.cached:
            group = self.chunking.layout.groups[g]
            first = {"never": 0, "retained": kept[group.name], "at once": needed(group.kind, request.position)[0]}
            for place in range(min(len(request.tables[g]), first[self.frees] // group.tokens_per_block)):
                self.free_block(request, g, place)

    def free_block(self, request: Running, g: int, place: int) -> None:
        if request.tables[g][place] >= 0:
            self.device[g, request.tables[g][place]] = GARBAGE
            self.free_blocks.append(request.tables[g][place])
            request.tables[g][place] = -1

    def free_all(self, request: Running) -> None:
        for g, table in request.tables.items():
            for place in range(len(table)):
                self.free_block(request, g, place)


def rows(moves: GroupMoves) -> list[tuple[int, list[int], list[int]]]:
    """The real rows of a group's moves."""
    columns = (moves.chunk_idx, moves.block_ids, moves.unit_ids)
    return list(zip(*(column[: moves.num_chunks].tolist() for column in columns), strict=True))


def completes_though_freed_at_once(chunking: Chunking) -> bool:
    """Whether an engine that frees blocks as they leave the window still completes every chunk."""
    for g in chunking.layout.cached:
        tokens = chunking.tokens_per_chunk[g] or 0
        match chunking.layout.groups[g].kind:
            case SlidingWindow(window_tokens) if tokens > window_tokens:
                return False
            case ChunkedLocal(chunk_tokens) if chunk_tokens % tokens:
                return False
            case FullAttention() | Recurrent() | SlidingWindow() | ChunkedLocal():
                pass
    return True
