"""The loop: admit, load, compute a batch, store, and preempt where blocks run out."""

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import kvjax

from .model import FULL, LOCAL, TOKENS_PER_BLOCK, Batch, Caches, layout, new_caches, step
from .sequences import Blocks, Phase, Sequence


@dataclass(slots=True)
class Counts:
    """What a loop did.

    Args:
        iterations: steps of the model.
        preemptions: sequences whose blocks were taken away.
        failed_loads: loads that did not bring all.
    """

    iterations: int = 0
    preemptions: int = 0
    failed_loads: int = 0


class Loop:
    """Serves requests, as many at a time as there are seats and blocks.

    Args:
        weights: of the model.
        num_blocks: blocks of the device's caches, by group.
        offload: makes the `kvjax.Offloader`, or the `kvjax.RankedOffloader`, for the caches; `None` serves without one.
        seats: requests at a time.
        rows: tokens of one step.
        max_tokens: of the longest request.
        mesh: over which heads and states are split; by default all is on one device.
    """

    def __init__(
        self,
        weights: Mapping[str, jax.Array],
        num_blocks: Mapping[str, int],
        *,
        offload: Callable[[kvjax.CacheLayout, Caches], Any] | None,
        seats: int,
        rows: int,
        max_tokens: int,
        mesh: Mesh | None = None,
    ):
        groups = layout()
        self.caches, places = new_caches(groups, num_blocks, mesh)
        self.offloader = None if offload is None else offload(groups, self.caches)
        self.chunking = kvjax.resolve_chunking(groups) if self.offloader is None else self.offloader.chunking
        self.blocks = Blocks(num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.admitted: list[Sequence] = []  # in the order of their admission
        self.counts = Counts()
        self._rows, self._seats, self._max_tokens = rows, seats, max_tokens
        self._table_blocks = {name: -(-max_tokens // TOKENS_PER_BLOCK[name]) for name in (FULL, LOCAL)}
        self._step = jax.jit(lambda caches, batch: step(weights, caches, batch), donate_argnums=0, out_shardings=places)

    # --- from outside

    def submit(self, sequence: Sequence) -> None:
        """Takes a request on.

        Raises:
            ValueError: it has more tokens than was said, or than an empty device could hold.
        """
        num_tokens = sequence.prompt_tokens + sequence.num_new
        if num_tokens > self._max_tokens:
            raise ValueError(f"`sequence` must have at most {self._max_tokens} tokens in the end, got {num_tokens}")
        if not self.blocks.could_hold(num_tokens):
            raise ValueError(
                f"`sequence` must fit an empty device, with {self.blocks.num_blocks} blocks, got {num_tokens} tokens"
            )
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Ends a request wherever it is; one that is done stays so."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.admitted:
            self._give_up_load(sequence)
            self._release(sequence)
        else:
            return
        sequence.phase = Phase.ABORTED

    def preempt(self, sequence: Sequence) -> None:
        """Takes the blocks of an admitted request away. It is admitted again, and goes on where its chunks allow."""
        if sequence not in self.admitted:
            return
        if sequence.job is None:
            self._store(sequence, checkpoint=True)
        self._give_up_load(sequence)
        self._release(sequence)
        sequence.phase = Phase.WAITING
        sequence.num_preemptions += 1
        self.counts.preemptions += 1
        self.waiting.appendleft(sequence)

    def iterate(self) -> None:
        """One iteration: what ended, who comes in, one step, what is kept, who is done."""
        self._see_loads()
        self._admit()
        batch = self._next_batch()
        if batch:
            self._compute(batch)
        elif any(sequence.job is not None for sequence in self.admitted) and self.offloader is not None:
            self.offloader.wait(next(one.job for one in self.admitted if one.job is not None))
        self.counts.iterations += 1

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing left to serve."""
        return not self.waiting and not self.admitted

    # --- coming in

    def _admit(self) -> None:
        """Admits requests in order, as long as there is a seat, and blocks to reach their next token."""
        while self.waiting and len(self.admitted) < self._seats and self.blocks.has_room(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.admitted.append(sequence)
            sequence.phase = Phase.RUNNING
            if self.offloader is None:
                continue
            found = self.offloader.lookup(sequence.name, sequence.tokens)
            if found.hit_tokens:
                self._load(self.offloader, sequence, found)

    def _load(self, offloader: Any, sequence: Sequence, found: kvjax.Lookup) -> None:
        """Starts to restore what was found. The request computes once the load has ended."""
        hit = found.hit_tokens
        wanted = {}
        for g, name in enumerate(self.chunking.layout.names):
            chunks, blocks = found.load[name], self.chunking.blocks_per_chunk[g] or 0
            last = -(-hit // TOKENS_PER_BLOCK[name])
            wanted[name] = range(int(chunks[0]) * blocks, last) if len(chunks) else range(0)
        if not self.blocks.reserve(sequence, hit, hit, wanted):
            return  # there was room for all of it: it is computed instead
        self.caches, sequence.job = offloader.load(self.caches, sequence.name, sequence.block_tables(hit))
        sequence.phase = Phase.LOADING

    def _see_loads(self) -> None:
        """Lets the requests go on whose loads have ended. What a load did not bring is computed."""
        if self.offloader is None:
            return
        self.offloader.poll()
        for sequence in self.admitted:
            result = None if sequence.job is None else sequence.job.result
            if result is not None:
                sequence.computed = result.valid_tokens or 0
                sequence.restored_tokens += sequence.computed
                sequence.phase, sequence.job = Phase.RUNNING, None
                self.counts.failed_loads += not result.ok

    # --- computing

    def _next_batch(self) -> list[tuple[Sequence, int]]:
        """Who computes in this step, and up to where: one row for those that decode, then parts of prompts."""
        running = [one for one in self.admitted if one.phase is Phase.RUNNING]
        # Those that decode have one token to compute; after them whoever came first, so that nobody waits for ever.
        running.sort(key=lambda one: len(one.tokens) - one.computed > 1)
        batch: list[tuple[Sequence, int]] = []
        rows = self._rows
        for sequence in running:
            if sequence.phase is not Phase.RUNNING or not rows:
                continue
            stop = min(len(sequence.tokens), sequence.computed + rows, self._cut(sequence))
            while not self.blocks.reserve(sequence, sequence.computed, stop):
                victim = next(
                    (one for one in reversed(self.admitted) if one.phase is Phase.RUNNING and one is not sequence), None
                )
                if victim is None:
                    break
                batch = [(one, end) for one, end in batch if one is not victim]
                self.preempt(victim)
            else:
                batch.append((sequence, stop))
                rows = self._rows - sum(end - one.computed for one, end in batch)
        return batch

    def _cut(self, sequence: Sequence) -> int:
        """Where the request must end a step, so that its states can be stored."""
        cut = None if self.offloader is None else self.offloader.next_cut(sequence.name, sequence.computed)
        return len(sequence.tokens) if cut is None else cut

    def _compute(self, batch: ListOf[tuple[Sequence, int]]) -> None:
        following, self.caches = self._step(self.caches, self._rows_of(batch))
        following = np.asarray(following)
        row = 0
        for sequence, stop in batch:
            row += stop - sequence.computed
            sequence.computed_tokens += stop - sequence.computed
            sequence.computed = stop
            if stop == len(sequence.tokens):
                self._accept(sequence, int(following[row - 1]))
            self._store(sequence, checkpoint=sequence.is_complete)
            if sequence.is_complete:
                self._release(sequence)
                sequence.phase = Phase.DONE

    def _accept(self, sequence: Sequence, token: int) -> None:
        sequence.tokens.append(token)
        if self.offloader is not None:
            self.offloader.extend(sequence.name, [token])

    def _rows_of(self, batch: ListOf[tuple[Sequence, int]]) -> Batch:
        tokens, positions, seats = np.zeros(self._rows, np.int32), np.full(self._rows, -1, np.int32), [0] * self._rows
        tables = {name: np.full((self._seats, count), -1, np.int32) for name, count in self._table_blocks.items()}
        slots = np.zeros(self._seats, np.int32)
        row = 0
        for seat, (sequence, stop) in enumerate(batch):
            rows = slice(row, row + stop - sequence.computed)
            tokens[rows] = sequence.tokens[sequence.computed : stop]
            positions[rows] = np.arange(sequence.computed, stop)
            seats[rows] = [seat] * (rows.stop - rows.start)
            for name, table in sequence.tables.items():
                tables[name][seat, : len(table)] = table
            slots[seat] = sequence.slot
            row = rows.stop
        return Batch(tokens, positions, np.array(seats), tables[FULL], tables[LOCAL], slots)  # pyright: ignore[reportArgumentType]

    # --- keeping

    def _store(self, sequence: Sequence, *, checkpoint: bool) -> None:
        """Stores what later requests will want, and frees the blocks that neither they nor this one need."""
        if self.offloader is not None:
            self.caches, _ = self.offloader.store(
                self.caches,
                sequence.name,
                sequence.block_tables(sequence.computed),
                sequence.computed,
                checkpoint=checkpoint,
            )
        self.blocks.drop_before(sequence, kvjax.retained_from(self.chunking, sequence.computed))

    def _give_up_load(self, sequence: Sequence) -> None:
        """Cancels the load of a request. What it still writes, it writes before the next step: the blocks can go to
        others at once."""
        if sequence.job is not None and self.offloader is not None:
            self.offloader.cancel(sequence.job)
        sequence.job = None

    def _release(self, sequence: Sequence) -> None:
        """Ends an admission: its blocks go to others at once, whatever is still being stored from them."""
        if self.offloader is not None:
            self.offloader.finish(sequence.name)
        self.blocks.drop_all(sequence)
        self.admitted.remove(sequence)
