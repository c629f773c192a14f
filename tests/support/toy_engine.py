"""An engine without a model: what a token leaves in a cache is a hash of the prefix that ends with it.

Every resumed request is checked byte by byte: each token that the law says it reads must hold what that
very prefix wrote. Blocks are handed out at random and filled with garbage when they are taken, so that a
stale or forgotten byte shows.
"""

import hashlib
from collections.abc import Mapping

import jax
import numpy as np

import kvjax
from kvjax.coverage import needed
from kvjax.groups import CacheLayout, LeafSpec, Recurrent


class OutOfBlocksError(Exception):
    """The device pool is too small for the request."""


def make_caches(layout: CacheLayout, num_blocks: int, seed: int = 0) -> dict[str, jax.Array]:
    """Caches full of random bytes, one array per leaf."""
    rng = np.random.default_rng(seed)
    return {
        name: jax.device_put(random_rows(rng, (*stack(leaf), num_blocks, *leaf.block_shape), leaf))
        for name, leaf in layout.leaves.items()
    }


def stack(leaf: LeafSpec) -> tuple[int, ...]:
    return () if leaf.layers is None else (leaf.layers,)


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], leaf: LeafSpec) -> np.ndarray:
    data = rng.integers(0, 256, int(np.prod(shape)) * leaf.dtype.itemsize, np.uint8)
    return data.view(leaf.dtype).reshape(shape)


def as_bytes(array: jax.Array | np.ndarray) -> np.ndarray:
    """The array's bytes, copied, as `(…, bytes of the last dimension)`."""
    host = np.ascontiguousarray(np.asarray(array))
    return host.view(np.uint8).copy()


class ToyEngine:
    """Serves requests over paged caches; with an `Offloader`, or without one.

    A block of an attention group has its tokens in the first dimension of each leaf's block shape; a
    block of a recurrent group is one state.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        *,
        seed: int = 0,
        frees_at_once: bool = False,
        covers_all: bool = False,
        **offload,
    ):
        self.layout = layout
        self.rng = np.random.default_rng(seed)
        self.caches = make_caches(layout, num_blocks, seed)
        self.offloader = kvjax.Offloader(layout, self.caches, show_progress=False, **offload)
        self.chunking = self.offloader.chunking
        self.frees_at_once = frees_at_once
        self.covers_all = covers_all  # gives a resumed request blocks for all its tokens, needed or not
        # Groups that share a leaf draw from one set of blocks.
        pools: dict[str, list[int]] = {}
        self.free: dict[str, list[int]] = {}
        for g in layout.cached:
            group = layout.groups[g]
            shared = next((pools[leaf.name] for leaf in group.leaves if leaf.name in pools), None)
            self.free[group.name] = list(range(num_blocks)) if shared is None else shared
            for leaf in group.leaves:
                pools[leaf.name] = self.free[group.name]
        self.tables: dict[str, dict[str, list[int]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.written: dict[str, int] = {}

    # --- serving --------------------------------------------------------------------------------------

    def start(self, request_id: str, tokens: list[int]) -> int:
        """Looks a request up, restores what can be had and checks it. Returns the hit."""
        look = self.offloader.lookup(request_id, np.array(tokens, np.int64))
        hit = look.hit_tokens
        self.tokens[request_id] = list(tokens)
        self.tables[request_id] = {self.layout.groups[g].name: [] for g in self.layout.cached}
        for g in self.layout.cached:
            self._cover(request_id, g, hit, first=0 if self.covers_all else needed(self.layout.groups[g].kind, hit)[0])
        before = {name: as_bytes(array) for name, array in self.caches.items()}
        self.caches, job = self.offloader.load(self.caches, request_id, self.tables[request_id])
        self.written[request_id] = hit
        self.check(request_id)
        self._check_untouched(request_id, before)
        assert self.offloader.wait(job).ok
        return hit

    def compute(self, request_id: str, upto: int, step: int) -> None:
        """Runs steps up to token `upto`, storing after each; steps end where states must be kept."""
        tokens = self.tokens[request_id]
        while self.written[request_id] < upto:
            here = self.written[request_id]
            cut = kvjax.next_cut(self.chunking, here, [len(tokens)])
            stop = min(here + step, upto, cut if cut > here else upto)
            for g in self.layout.cached:
                self._cover(request_id, g, stop, first=here)
                self._write(request_id, g, here, stop)
            self.written[request_id] = stop
            self.store(request_id)
            self._give_back(request_id)

    def accept(self, request_id: str, tokens: list[int]) -> None:
        self.tokens[request_id] += tokens
        self.offloader.extend(request_id, np.array(tokens, np.int64))

    def store(self, request_id: str, *, checkpoint: bool = False) -> None:
        """Stores, and overwrites a block at once that a careless store would still have to read."""
        self.caches, _ = self.offloader.store(
            self.caches, request_id, self.tables[request_id], self.written[request_id], checkpoint=checkpoint
        )

    def stop(self, request_id: str) -> None:
        """Makes the request resumable, gives all its blocks back and spoils them."""
        self.store(request_id, checkpoint=True)
        self.offloader.finish(request_id)
        self.drop(request_id)
        self.offloader.wait()

    def drop(self, request_id: str) -> None:
        for name, table in self.tables.pop(request_id).items():
            self._release(name, [block for block in table if block >= 0])
        del self.tokens[request_id], self.written[request_id]

    # --- checking -------------------------------------------------------------------------------------

    def check(self, request_id: str) -> None:
        """Every token that the next one reads holds what this prefix wrote."""
        position = self.written[request_id]
        if position == 0:
            return
        for g in self.layout.cached:
            group = self.layout.groups[g]
            if isinstance(group.kind, Recurrent) and position % group.tokens_per_block:
                continue  # the running state is the engine's own and lies in no block
            table = self.tables[request_id][group.name]
            for leaf in group.leaves:
                rows = as_bytes(self.caches[leaf.name])
                for token in range(*needed(group.kind, position)):
                    block = table[token // group.tokens_per_block]
                    assert block >= 0, f"{group.name}: the block of token {token} is there at {position}"
                    inside = () if isinstance(group.kind, Recurrent) else (token % group.tokens_per_block,)
                    for layer, at in enumerate([(n,) for n in range(leaf.layers)] if leaf.layers else [()]):
                        found = rows[(*at, block, *inside)]
                        wanted = self._content(request_id, g, token, leaf, layer, found.shape)
                        assert np.array_equal(found, wanted), f"{group.name}, {leaf.name}: token {token} at {position}"

    def _check_untouched(self, request_id: str, before: Mapping[str, np.ndarray]) -> None:
        """A load wrote no block but the request's own."""
        for name, leaf in self.layout.leaves.items():
            mine = {
                block
                for g in self.layout.cached
                if leaf in self.layout.groups[g].leaves
                for block in self.tables[request_id][self.layout.groups[g].name]
            }
            axis = len(stack(leaf))
            after = as_bytes(self.caches[name])
            others = [block for block in range(after.shape[axis]) if block not in mine]
            assert np.array_equal(after.take(others, axis), before[name].take(others, axis)), name

    # --- parts ----------------------------------------------------------------------------------------

    def _content(
        self, request_id: str, g: int, token: int, leaf: LeafSpec, layer: int, shape: tuple[int, ...]
    ) -> np.ndarray:
        prefix = np.array(self.tokens[request_id][: token + 1], np.int64).tobytes()
        seed = hashlib.sha256(prefix + f"/{g}/{leaf.name}/{layer}".encode()).digest()
        count = int(np.prod(shape))
        return np.frombuffer(hashlib.shake_128(seed).digest(count), np.uint8).reshape(shape)

    def _cover(self, request_id: str, g: int, position: int, *, first: int) -> None:
        """Gives the request a block wherever a token in `[first, position)` lies; null blocks before."""
        group = self.layout.groups[g]
        table = self.tables[request_id][group.name]
        last = -(-position // group.tokens_per_block)
        for place in range(len(table), last):
            end = (place + 1) * group.tokens_per_block
            useful = end == position if isinstance(group.kind, Recurrent) else end > first
            table.append(self._take(group.name) if useful else -1)
        state_ends_here = isinstance(group.kind, Recurrent) and position and position % group.tokens_per_block == 0
        if state_ends_here and table[last - 1] < 0:  # an earlier step ended inside this block
            table[last - 1] = self._take(group.name)

    def _write(self, request_id: str, g: int, start: int, stop: int) -> None:
        group = self.layout.groups[g]
        table = self.tables[request_id][group.name]
        recurrent = isinstance(group.kind, Recurrent)
        tokens = [stop - 1] if recurrent and stop % group.tokens_per_block == 0 else range(start, stop)
        for leaf in group.leaves:
            rows = np.array(self.caches[leaf.name])
            raw = rows.view(np.uint8)
            for token in () if recurrent and stop % group.tokens_per_block else tokens:
                block = table[token // group.tokens_per_block]
                inside = () if recurrent else (token % group.tokens_per_block,)
                for layer, at in enumerate([(n,) for n in range(leaf.layers)] if leaf.layers else [()]):
                    place = (*at, block, *inside)
                    raw[place] = self._content(request_id, g, token, leaf, layer, raw[place].shape)
            self.caches[leaf.name] = jax.device_put(rows)

    def _give_back(self, request_id: str) -> None:
        """Frees the blocks that no later token reads; all that may be freed, or what a store may still want kept."""
        position = self.written[request_id]
        kept = kvjax.retained_from(self.chunking, position)
        for g in self.layout.cached:
            group = self.layout.groups[g]
            first = needed(group.kind, position)[0] if self.frees_at_once else kept[group.name]
            table = self.tables[request_id][group.name]
            gone = [
                place
                for place, block in enumerate(table)
                if block >= 0 and (place + 1) * group.tokens_per_block <= first
            ]
            self._release(group.name, [table[place] for place in gone])
            for place in gone:
                table[place] = -1

    def _take(self, name: str) -> int:
        if not self.free[name]:
            raise OutOfBlocksError(name)
        return self.free[name].pop(int(self.rng.integers(len(self.free[name]))))

    def _release(self, name: str, blocks: list[int]) -> None:
        """Takes blocks back and fills them with garbage at once: nobody may read them any more."""
        self.free[name] += blocks
        group = next(group for group in self.layout.groups if group.name == name)
        for leaf in group.leaves:
            rows = np.array(self.caches[leaf.name])
            by_block = np.moveaxis(rows, len(stack(leaf)), 0)
            for block in blocks:
                by_block[block] = random_rows(self.rng, by_block[block].shape, leaf)
            self.caches[leaf.name] = jax.device_put(rows)
