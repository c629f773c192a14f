"""An engine whose device and host memory are dictionaries: what a token left somewhere is a hash of its prefix.

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
from kvjax.handles import Load, Store
from kvjax.packing import cut_into_units
from kvjax.plan import GroupMoves

Frees = Literal["never", "retained", "at once"]
GARBAGE = 0


@dataclass(eq=False)
class Running:
    tokens: list[int]
    salt: bytes
    found: Lookup
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
        fills: whether attention groups get blocks for all places before a hit, needed or not, as engines do that
            know of no null block; what is not needed holds garbage.
        options: for the ledger.
    """

    def __init__(
        self,
        chunking: Chunking,
        num_units: int = 10**6,
        frees: Frees = "never",
        fills: bool = False,
        **options: Any,
    ):
        self.chunking = chunking
        options.setdefault("checkpoint_tokens", None)  # the prompts' ends and what a test asks for, and no more
        self.ledger = Ledger(chunking, cut_into_units(chunking, 1), host_bytes=num_units, **options)
        self.frees = frees
        self.fills = fills
        self.multiple = options.get("resume_multiple", 1)
        self.running: dict[Hashable, Running] = {}
        self.device: dict[tuple[int, int], list[int]] = {}
        self.host: dict[int, Any] = {}
        self.free_blocks: list[int] = []
        self.holders: list[int] = []  # of each block
        self.before: list[dict[Load, list[int]]] = []  # what a block held before each load since it was allocated
        self.num_blocks = 0
        self.loads: list[Load] = []
        self.stores: list[tuple[Store, list[tuple[list[int], list[list[int]]]]]] = []

    # --- what must be where

    def mark(self, request: Running, g: int, token: int) -> int:
        """What a token of the request, or for a recurrent group the state after it, leaves in a group."""
        return hash((request.salt, g, *request.tokens[: token + 1]))

    def tokens_of(self, g: int, place: int) -> range:
        """The tokens of which a block holds something: all of them, or the last one for a state."""
        per_block = self.chunking.layout.groups[g].tokens_per_block
        tokens = range(place * per_block, (place + 1) * per_block)
        return tokens[-1:] if self.is_recurrent(g) else tokens

    def block(self, request: Running, g: int, place: int) -> list[int]:
        """What the block at a place of the request must hold."""
        return [self.mark(request, g, token) for token in self.tokens_of(g, place)]

    def chunk(self, request: Running, g: int, chunk_idx: int) -> list[list[int]]:
        per_chunk = self.chunking.blocks_per_chunk[g] or 0
        places = range(chunk_idx * per_chunk, (chunk_idx + 1) * per_chunk)
        places = places[-1:] if self.is_recurrent(g) else places
        return [self.block(request, g, place) for place in places]

    def is_recurrent(self, g: int) -> bool:
        return isinstance(self.chunking.layout.groups[g].kind, Recurrent)

    def places_needed(self, g: int, position: int) -> list[int]:
        """Places of the blocks that a token at `position` reads."""
        start, stop = needed(self.chunking.layout.groups[g].kind, position)
        per_block = self.chunking.layout.groups[g].tokens_per_block
        if self.is_recurrent(g) and position % per_block:
            return []  # a state inside a block has no place in the table
        return list(range(start // per_block, -(-stop // per_block))) if start < stop else []

    # --- a request

    def start(
        self, name: Hashable, tokens: Sequence[int], *, salt: bytes = b"", on_device: int = 0, **limits: Any
    ) -> Lookup:
        """Looks a request up, `on_device` tokens of which the device holds already."""
        found = self.ledger.lookup(name, list(tokens), salt=salt, device_tokens=on_device, **limits)
        if name in self.running:
            self.free_all(self.running[name])
        request = self.running[name] = Running(list(tokens), salt, found, hit_tokens=found.hit_tokens)
        request.tables = {g: [] for g in self.chunking.layout.cached}
        request.position = on_device
        for g in self.chunking.layout.cached:
            for place in self.places_needed(g, on_device):
                self.allocate(request, g, place)
                self.write(request, g, place, 0, on_device)
        return found

    def load(self, name: Hashable, *, share: bool = False) -> Load:
        """Plans a load and writes its blocks, as the real one has them written before any later step. What fails is
        known when the load ends."""
        request = self.running[name]
        for g in self.chunking.layout.cached:
            places = self.places_needed(g, request.hit_tokens)
            if self.fills and not self.is_recurrent(g):
                places = range(-(-request.hit_tokens // self.chunking.layout.groups[g].tokens_per_block))
            if share:
                self.share(request, g)
            for place in places:
                self.allocate(request, g, place)
        load = self.ledger.prepare_load(name, self.tables(request), share=share)
        self.loads.append(load)
        for moves in load.plan.moves:
            self.check_units(request, moves)
            for _, blocks, units in rows(moves):
                content = self.host[units[0]][0]
                for block_id, of_block in zip(blocks, content, strict=True):
                    if block_id >= 0:
                        self.before[block_id][load] = self.device[moves.group_idx, block_id]
                        self.device[moves.group_idx, block_id] = list(of_block)
        return load

    def share(self, request: Running, g: int) -> None:
        """Takes the blocks into which others load the same chunks, but for those that the request will write to."""
        group = self.chunking.layout.groups[g]
        arriving = request.found.arriving.get(group.name)
        if arriving is None or self.is_recurrent(g):
            return
        for chunk_idx, blocks in zip(request.found.load[group.name].tolist(), arriving.tolist(), strict=True):
            for i, block_id in enumerate(blocks):
                place = chunk_idx * (self.chunking.blocks_per_chunk[g] or 0) + i
                table = request.tables[g]
                table += [-1] * (place + 1 - len(table))
                whole = (place + 1) * group.tokens_per_block <= request.hit_tokens
                if block_id >= 0 and whole and table[place] < 0:
                    table[place] = block_id
                    self.holders[block_id] += 1

    def end_load(self, load: Load, ok: bool | dict[int, np.ndarray] = True) -> None:
        """Ends a load of which perhaps only some rows were written."""
        self.loads.remove(load)
        request = self.running.get(load.request_id)
        for moves in load.plan.moves:
            mask = np.full(moves.num_chunks, ok) if isinstance(ok, bool) else ok[moves.group_idx]
            if request is not None and mask.all():
                self.check_units(request, moves)
            for written, (_, blocks, _) in zip(mask.tolist(), rows(moves), strict=True):
                for block_id in blocks if not written else ():
                    if block_id >= 0 and self.holders[block_id] and load in self.before[block_id]:
                        self.device[moves.group_idx, block_id] = self.before[block_id][load]
        valid = self.ledger.complete_load(load, ok=ok)
        if request is not None:
            request.position = valid

    def take_back(self, load: Load) -> None:
        """Takes a load back that nothing was done of."""
        self.loads.remove(load)
        for moves in load.plan.moves:
            for _, blocks, _ in rows(moves):
                for block_id in blocks:
                    if block_id >= 0:
                        self.device[moves.group_idx, block_id] = self.before[block_id][load]
        self.ledger.cancel_load(load)

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
            start, read_to = needed(group.kind, request.position)
            for place in self.places_needed(g, request.position) if not self.is_recurrent(g) else ():
                held = self.device[g, request.tables[g][place]]
                for token, mark in zip(self.tokens_of(g, place), held, strict=True):
                    if start <= token < read_to:
                        assert mark == self.mark(request, g, token), "a token reads wrong bytes"
            if self.is_recurrent(g):
                request.tables[g] = [-1] * len(request.tables[g]) if self.frees == "at once" else request.tables[g]
                if stop % group.tokens_per_block:
                    continue
                places = [stop // group.tokens_per_block - 1]
            else:
                places = range(request.position // group.tokens_per_block, -(-stop // group.tokens_per_block))
            for place in places:
                self.allocate(request, g, place)
                self.write(request, g, place, request.position, stop)
        request.position = stop

    def prefill(
        self,
        name: Hashable,
        stop: int,
        step: int,
        *,
        checkpoint: bool = False,
        every: bool = True,
        to_come: Sequence[int] = (),
    ) -> None:
        """Computes up to `stop` and stores after each step, or after the last one.

        Steps also end where a state must be stored for `stop`, or for a checkpoint `to_come`.
        """
        request = self.running[name]
        while request.position < stop:
            cut = next_cut(self.chunking, request.position, [stop, *to_come], resume_multiple=self.multiple)
            cuts = [c for c in (cut, request.position + step, stop) if c > request.position]
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
                content = [list(self.device[g, block_id]) for block_id in blocks]
                assert content == self.chunk(request, g, chunk_idx), "a chunk is stored under the key of another"
                assert not busy & set(units), "units that are being read or written were handed out"
                self.host |= dict.fromkeys(units, GARBAGE)
                parts.append((units, content))
        self.stores.append((store, parts))
        return store

    def end_store(self, store: Store, ok: bool | dict[int, np.ndarray] = True) -> None:
        """Ends a store of which perhaps only some rows were written."""
        (found,) = [pair for pair in self.stores if pair[0] is store]
        self.stores.remove(found)
        masks = [
            np.full(moves.num_chunks, ok) if isinstance(ok, bool) else ok[moves.group_idx] for moves in store.plan.moves
        ]
        for written, (units, content) in zip(np.concatenate([*masks, []]).tolist(), found[1], strict=True):
            if written:
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
                self.holders.append(0)
                self.before.append({})
            table[place] = self.free_blocks.pop()
            self.holders[table[place]], self.before[table[place]] = 1, {}
            self.device[g, table[place]] = [GARBAGE] * len(self.tokens_of(g, place))

    def write(self, request: Running, g: int, place: int, start: int, stop: int) -> None:
        held = self.device[g, request.tables[g][place]]
        for i, token in enumerate(self.tokens_of(g, place)):
            if start <= token < stop:
                held[i] = self.mark(request, g, token)

    def free(self, request: Running) -> None:
        """Frees what the mode says, to be used again at once."""
        kept = retained_from(self.chunking, request.position, resume_multiple=self.multiple)
        for g in self.chunking.layout.cached:
            group = self.chunking.layout.groups[g]
            first = {"never": 0, "retained": kept[group.name], "at once": needed(group.kind, request.position)[0]}
            for place in range(min(len(request.tables[g]), first[self.frees] // group.tokens_per_block)):
                self.free_block(request, g, place)

    def free_block(self, request: Running, g: int, place: int) -> None:
        block_id = request.tables[g][place]
        if block_id >= 0:
            self.holders[block_id] -= 1
            if not self.holders[block_id]:
                self.free_blocks.append(block_id)
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
