"""An engine that looks up, after each store, every checkpoint that the store passed.

Which positions are checkpoints, and what could be had there, is worked out here slowly and from what the blocks
and the pool truly hold.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from kvjax import FullAttention, next_cut
from kvjax.chunking import Chunking
from tests.oracles import law
from tests.support.decoding_engine import DecodingEngine
from tests.support.fake_engine import Frees

AHEAD = 64  # no chunk and lookahead of a small layout are longer


class WatchedEngine:
    """Serves requests and checks each checkpoint when a store passes it.

    Args:
        chunking: the layout and its chunks.
        frees: see `FakeEngine`; blocks are freed after each store and used again at once.
        every: `checkpoint_tokens`.
        cuts: whether steps end where `next_cut` says.
        lawful: whether each checkpoint must serve what the law says, though others may have lost blocks.
        options: for the ledger.
    """

    def __init__(
        self,
        chunking: Chunking,
        frees: Frees = "never",
        *,
        every: int | None = None,
        cuts: bool = True,
        lawful: bool = False,
        **options: Any,
    ):
        self.engine = DecodingEngine(chunking, frees=frees, checkpoint_tokens=every, **options)
        self.chunking, self.every, self.cuts, self.lawful = chunking, every, cuts, lawful
        self.single: dict[Hashable, set[int]] = {}
        self.to_come: dict[Hashable, int] = {}  # where a request will end, if the engine knows
        self.stored_to: dict[Hashable, int] = {}
        self.num_checked = 0

    def tokens(self, name: Hashable) -> list[int]:
        return self.engine.running[name].tokens

    def position(self, name: Hashable) -> int:
        return self.engine.running[name].position

    def start(self, name: Hashable, tokens: Sequence[int]) -> int:
        """Looks a request up and restores it. Returns where it resumes."""
        engine = self.engine
        hit = engine.start(name, tokens).hit_tokens
        self.single[name] = {len(tokens)}
        shared = self.longest_of_full_groups(name, len(tokens) - 1)
        if shared > hit:
            self.single[name].add(shared)
        engine.end_load(engine.load(name))
        self.stored_to[name] = hit
        return hit

    def longest_of_full_groups(self, name: Hashable, below: int) -> int:
        """How far the full groups alone could restore the request: position by position."""
        full = {group.name for group in self.chunking.layout.groups if isinstance(group.kind, FullAttention)}
        held = law.held_by_chunks(self.chunking, self.engine.held_chunks(name, below))
        able = [p for p in range(below + 1) if not full & set(law.refusing(self.chunking, held, p))]
        return max(able) if full else 0

    def checkpoints(self, name: Hashable) -> list[int]:
        """All of the request's, also some past its last token: those may want what is complete before."""
        periodic = range(self.every, len(self.tokens(name)) + self.every + AHEAD, self.every) if self.every else ()
        return sorted({*self.single[name], *periodic})

    def until(self, name: Hashable, stop: int) -> int:
        """Where a step that would run to `stop` ends."""
        here = self.position(name)
        if not self.cuts:
            return stop
        last = self.to_come.get(name, stop)
        checkpoints = [*self.checkpoints(name), last]
        cut = next_cut(self.chunking, here, checkpoints, resume_multiple=self.engine.multiple)
        return min([stop, *(p for p in (cut, last) if p > here)])

    def prefill_step(self, name: Hashable, num_tokens: int) -> None:
        stop = min(len(self.tokens(name)), self.position(name) + num_tokens)
        self.engine.compute(name, self.until(name, stop))

    def store(self, name: Hashable, *, checkpoint: bool = False) -> list[tuple[int, int, int]]:
        """Stores, checks the checkpoints passed since the last store, frees.

        Returns:
            For each of them, the position, R and S.
        """
        engine, here = self.engine, self.position(name)
        if checkpoint:
            self.single[name].add(here)
        passed = [
            p for p in self.checkpoints(name) if self.stored_to[name] < p <= here or (checkpoint and p == here > 0)
        ]
        could = {p: union(engine.held_chunks(name, p), engine.whole_chunks(name, p)) for p in passed}
        engine.end_store(engine.store(name, checkpoint=checkpoint))
        checked = [(p, *engine.check_checkpoint(name, p, could[p])) for p in passed]
        if self.lawful:
            assert checked == [(p, *law.stored_positions(self.chunking, p, engine.multiple)) for p in passed]
        self.num_checked += len(checked)
        self.stored_to[name] = here
        engine.ledger.check_integrity()
        engine.free(engine.running[name])
        return checked

    def decode_step(self, name: Hashable, drafts: Sequence[int], num_accepted: int, sampled: int) -> None:
        """Computes the last sampled token and the drafts, as far as the step may go."""
        here = self.position(name)
        drafts = drafts[: self.until(name, here + 1 + len(drafts)) - here - 1]
        self.engine.decode(name, drafts, drafts[:num_accepted], sampled)

    def finish(self, name: Hashable) -> None:
        """The request ends: that is a checkpoint."""
        self.store(name, checkpoint=True)
        self.engine.finish(name)


def union(one: dict[str, list[int]], other: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: sorted({*one[name], *other[name]}) for name in one}
