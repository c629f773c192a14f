"""What the ledger knows of a request: its tokens as keys, its checkpoints, the hit it may still load."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._checks import integer, shown
from kvjax.chain import Chain
from kvjax.chunking import Chunking
from kvjax.coverage import Hit
from kvjax.keys import engine_hashes, prefix_hashes, token_array
from kvjax.pool import Pins

if TYPE_CHECKING:
    from kvjax.handles import Load


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may move, in tokens; `None` is no limit.

    Args:
        store_tokens: only of the first so many tokens chunks are stored.
        load_tokens: at most so many tokens beyond those that the device holds are restored.

    Raises:
        ValueError: a limit that is no non-negative int.
    """

    store_tokens: int | None = None
    load_tokens: int | None = None

    @classmethod
    def of(cls, max_store_tokens: int | None, max_load_tokens: int | None, skip: bool) -> "Limits":
        """Returns the limits that the arguments of `Ledger.lookup` of these names mean."""
        if not isinstance(skip, bool):
            raise ValueError(f"`skip` must be True or False, got {shown(skip)}")
        limits = [
            value if value is None else integer(value, name, at_least=0)
            for value, name in ((max_store_tokens, "max_store_tokens"), (max_load_tokens, "max_load_tokens"))
        ]
        return cls(0, 0) if skip else cls(*limits)

    def at_most(self, others: "Limits") -> "Limits":
        """Returns the smaller one of each limit."""
        return Limits(_smaller(self.store_tokens, others.store_tokens), _smaller(self.load_tokens, others.load_tokens))


def _smaller(limit: int | None, other: int | None) -> int | None:
    return min((one for one in (limit, other) if one is not None), default=None)


@dataclass(slots=True, eq=False)
class Request:
    """A request that was looked up and not finished.

    Args:
        namespace: under which its chunks are keyed.
        space: the pool's id of that namespace.
        generation: of the namespace when the request was looked up.
        chains: its complete chunks, by `group_idx`.
        limits: what it may store and load.
        num_tokens: accepted tokens.
        hashes: one for each whole hash unit.
        from_engine: whether the engine handed in the hashes.
        tail: the tokens of the unfinished hash unit.
        checkpoints: positions to store for that were not passed yet.
        lag: the most tokens between a position and where all that it requires is complete.
        stored_at: position up to which all that was wanted is taken care of.
        sound_from: the first token that is surely in the request's blocks, by `group_idx`.
        dropped: chunks that were wanted and lost a block before they could be stored, by `group_idx`.
        hit: of the last lookup, until it is loaded.
        hit_tokens: of the last lookup.
        counted_tokens: what of its tokens is in the counts.
        counted_hit: what of its hits is.
        device_tokens: of the last lookup.
        most_on_device: the longest of them where groups differ.
        fallback: the position from which the request goes on if nothing is loaded.
        pins: what a load of the hit would read.
        loads: loads under way on which what the request computes depends.
        unlooked: tokens of the hit below which there may be chunks that were not looked for.
        access: the number of its access to the pool.
        num_touched: chunks of the access when all of them were last named.
        ranked_to: the largest position that its chunks in the pool could restore when they were last ranked.
        num_asked: the first so many chunks that were counted as asked for, by `group_idx`, where that is counted.
        num_admitted: the first so many of them that were asked for often enough to be stored.
        declined: chunks below these were counted as not to be stored, by `group_idx`.
    """

    namespace: bytes
    space: int
    generation: int
    chains: dict[int, Chain]
    limits: Limits = Limits()
    num_tokens: int = 0
    hashes: list[bytes] = field(default_factory=list)
    from_engine: bool = False
    tail: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    checkpoints: set[int] = field(default_factory=set)
    lag: int = 1
    stored_at: int = 0
    sound_from: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, set[int]] = field(default_factory=dict)
    hit: Hit | None = None
    hit_tokens: int = 0
    counted_tokens: int = 0
    counted_hit: int = 0
    device_tokens: int | dict[str, int] = 0
    most_on_device: int = 0
    fallback: int = 0
    pins: Pins | None = None
    loads: "list[Load]" = field(default_factory=list)
    unlooked: int = 0
    access: int = 0
    num_touched: int = 0
    ranked_to: int = 0
    num_asked: dict[int, int] = field(default_factory=dict)
    num_admitted: dict[int, int] = field(default_factory=dict)
    declined: dict[int, int] = field(default_factory=dict)

    def extend(self, chunking: Chunking, token_ids: Any, hashes: Sequence[Any] | None, num_tokens: int | None) -> None:
        """Adds tokens, or the engine's hashes, and the chunk keys that they complete.

        Raises:
            ValueError: see `Ledger.lookup`. Then nothing changed.
        """
        if (token_ids is None) == (hashes is None):
            raise ValueError("exactly one of `token_ids` and `hashes` must be given")
        from_engine = hashes is not None
        if self.num_tokens and from_engine != self.from_engine:
            raise ValueError("a request must be given either `token_ids` or `hashes` all along, got both in turn")
        unit = chunking.tokens_per_hash
        if hashes is not None:
            if num_tokens is None:
                raise ValueError("`num_tokens` must be given with `hashes`, got None")
            total = integer(num_tokens, "num_tokens", at_least=self.num_tokens)
            new = engine_hashes(self.namespace, hashes)
            if len(self.hashes) + len(new) != total // unit:
                raise ValueError(
                    f"`hashes` must hold one hash for each whole unit of {unit} tokens, {total // unit} for {total} "
                    f"tokens, got {len(self.hashes) + len(new)}"
                )
        else:
            if num_tokens is not None:
                raise ValueError(f"`num_tokens` must not be given with `token_ids`, got {shown(num_tokens)}")
            tokens = token_array(token_ids)
            total = self.num_tokens + len(tokens)
            tokens = np.concatenate([self.tail, tokens])
            previous = self.hashes[-1] if self.hashes else None
            new = prefix_hashes(self.namespace, tokens, unit, previous=previous)
            self.tail = tokens[len(new) * unit :]
        self.num_tokens, self.from_engine = total, from_engine
        self.hashes += new
        for g, chain in self.chains.items():
            chain.extend()
            self.lag = max(self.lag, (chunking.tokens_per_chunk[g] or 0) + chunking.layout.groups[g].lookahead_tokens)

    def add_checkpoints(self, every: int | None, after: int) -> None:
        """Adds the multiples of `every` past `after`, up to the first one that may want what the last token completes.

        That one lies up to `lag` tokens further on. A state, or a block that leaves a window, cannot wait for it.
        """
        if every is not None:
            last = -(-(self.num_tokens + self.lag) // every) * every
            self.checkpoints.update(range((after // every + 1) * every, last + 1, every))
