"""What a sequence costs: bytes per token, window caps, states, and bytes on the host by choice of checkpoints.

Three figures of a model add up to what a sequence of any length takes: what grows with every token (full groups),
what grows up to a cap (windows and attention chunks), and what is there from the first token on (states). What a
request leaves on the host is something else: it depends on where its checkpoints are. Chunks are counted in
`kvjax.capacity`; here they become bytes, padded to whole units, over the ranks of a host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kvjax._checks import integer, shown
from kvjax.capacity import StoredChunks
from kvjax.checkpoints import fixed_bytes_per_checkpoint
from kvjax.chunking import Chunking
from kvjax.coverage import chunk_tokens_of, needed
from kvjax.groups import CacheLayout, ChunkedLocal, FullAttention, GroupSpec, Recurrent, SlidingWindow
from kvjax.packing import Units, tokens_that_fit

# --- on the device ------------------------------------------------------------------------------------


def bytes_per_token(group: GroupSpec) -> Fraction | None:
    """Returns the bytes of one token in all layers of a group, `None` where tokens have none: states, scratch.

    >>> from kvjax import FullAttention
    >>> bytes_per_token(GroupSpec("full", FullAttention(), 16, block_bytes=65536))
    Fraction(4096, 1)
    """
    if isinstance(group.kind, Recurrent) or not group.is_cached:
        return None
    return Fraction(group.block_bytes, group.tokens_per_block)


def bytes_per_token_growing(layout: CacheLayout, shards: Mapping[str, int] | None = None) -> Fraction:
    """Returns the bytes that every further token adds: those of the full groups.

    Args:
        layout: the groups, as one rank has them.
        shards: by group, how many ranks' bytes count; see `distinct_shards`. 1 by default.
    """
    full = [group for group in layout.groups if isinstance(group.kind, FullAttention)]
    counted = {group.name: 1 for group in full} if shards is None else shards
    per_token = (Fraction(group.block_bytes * counted[group.name], group.tokens_per_block) for group in full)
    return sum(per_token, Fraction(0))


def window_cap_bytes(group: GroupSpec) -> Fraction | None:
    """Returns what a group's window or attention chunk holds when it is full, `None` for the other kinds.

    >>> from kvjax import SlidingWindow
    >>> window_cap_bytes(GroupSpec("local", SlidingWindow(1024), 16, block_bytes=16 * 29 * 4096))
    Fraction(121634816, 1)
    """
    match group.kind:
        case SlidingWindow(tokens) | ChunkedLocal(tokens):
            return tokens * Fraction(group.block_bytes, group.tokens_per_block)
    return None


def state_bytes(group: GroupSpec) -> int | None:
    """Returns the bytes of a sequence's state in a recurrent group, `None` for the other kinds."""
    return group.block_bytes if isinstance(group.kind, Recurrent) else None


def device_bytes(layout: CacheLayout, num_tokens: int) -> dict[str, int]:
    """Returns, for every group, the bytes of the blocks that one sequence holds while its last token is computed.

    Those are the blocks of the tokens that this token reads and of itself, or one state. Scratch groups have 0.

    Raises:
        ValueError: `num_tokens` is not a positive int.
    """
    last = integer(num_tokens, "num_tokens", at_least=1) - 1
    held = {}
    for group in layout.groups:
        first = needed(group.kind, last)[0] // group.tokens_per_block
        blocks = 1 if isinstance(group.kind, Recurrent) else last // group.tokens_per_block - first + 1
        held[group.name] = blocks * group.block_bytes if group.is_cached else 0
    return held


# --- on the host --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Which positions of a request are stored. Its end always is.

    Args:
        rule: `"dense"`: every chunk of every group, wherever it lies; `"every"`: the store sets of every
            `checkpoint_tokens`; `"end"`: that of the end only; `"listed"`: those of `positions`.
        checkpoint_tokens: for `"every"`.
        positions: for `"listed"`.

    Raises:
        ValueError: an unknown rule, or a value that is no positive int or belongs to another rule.
    """

    rule: str
    checkpoint_tokens: int | None = None
    positions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.rule not in ("dense", "every", "end", "listed"):
            raise ValueError(f"`rule` must be 'dense', 'every', 'end' or 'listed', got {shown(self.rule)}")
        if (self.rule == "every") != (self.checkpoint_tokens is not None):
            raise ValueError(
                f"`checkpoint_tokens` must be given for the rule 'every' and for no other, got "
                f"{self.checkpoint_tokens!r} for {self.rule!r}"
            )
        if self.checkpoint_tokens is not None:
            integer(self.checkpoint_tokens, "checkpoint_tokens", at_least=1)
        if (self.rule == "listed") != bool(self.positions):
            raise ValueError(
                f"`positions` must be given for the rule 'listed' and for no other, got {shown(self.positions)} for "
                f"{self.rule!r}"
            )
        for position in self.positions:
            integer(position, "checkpoints", at_least=1)

    def check_within(self, num_tokens: int) -> None:
        """Checks that all the listed positions lie within a request of `num_tokens` tokens.

        Raises:
            ValueError: one lies past its end.
        """
        for position in self.positions:
            if position > num_tokens:
                raise ValueError(
                    f"`checkpoints` must lie within the request of {num_tokens} tokens, got {position}, past its end"
                )


@dataclass(frozen=True, slots=True)
class HostCost:
    """Bytes that one request leaves on the host, in whole units, over all ranks. By name of each cached group.

    Args:
        growing: what grows with its length: full groups, and the windows and states of regular checkpoints.
        fixed: what does not: windows and states that only its end wants, or checkpoints that were listed.
    """

    growing: dict[str, int]
    fixed: dict[str, int]

    @property
    def growing_bytes(self) -> int:
        """Sum of `growing`."""
        return sum(self.growing.values())

    @property
    def fixed_bytes(self) -> int:
        """Sum of `fixed`."""
        return sum(self.fixed.values())

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.growing_bytes + self.fixed_bytes

    def shares(self) -> dict[str, float]:
        """Returns each group's part of the whole, from 0 to 1; empty where nothing is left on the host."""
        total = self.num_bytes
        return {name: (self.growing[name] + self.fixed[name]) / total for name in self.growing} if total else {}


def distinct_shards(layout: CacheLayout, ranks: int, distinct: Mapping[str, int] | None) -> dict[str, int]:
    """Returns, for every group, how many different shards the ranks of a host have of it.

    Args:
        layout: the groups, as one rank has them.
        ranks: ranks on the host.
        distinct: where it is fewer than `ranks`, because ranks hold the same content, which is kept once.

    Raises:
        ValueError: an unknown group, or a number that is not from 1 to `ranks`.
    """
    most = integer(ranks, "ranks", at_least=1)
    shards = dict.fromkeys(layout.names, most)
    for name, given in (distinct or {}).items():
        if name not in shards:
            raise ValueError(f"`distinct` must name groups of the layout {list(layout.names)}, got {shown(name)}")
        shards[name] = integer(given, f"distinct of group {name!r}", at_least=1)
        if shards[name] > most:
            raise ValueError(f"`distinct` of group {name!r} must be at most the {most} ranks, got {given}")
    return shards


class HostAccount:
    """What requests cost on the host under one choice of checkpoints.

    Args:
        chunking: the groups, as one rank has them, and their chunks.
        units: how chunks are cut into units.
        checkpoints: which positions are stored.
        shards: by group, how many ranks' chunks the host keeps; see `distinct_shards`. 1 by default.

    Raises:
        UncountableError: see `kvjax.capacity.StoredChunks`.
    """

    def __init__(
        self,
        chunking: Chunking,
        units: Units,
        checkpoints: Checkpoints,
        *,
        shards: Mapping[str, int] | None = None,
    ):
        names = chunking.layout.names
        self._chunking = chunking
        self._checkpoints = checkpoints
        self._unit_bytes = units.unit_bytes
        self._names = [names[g] for g in chunking.layout.cached]
        kept = [1 if shards is None else shards[name] for name in names]
        weights = [None if n is None else n * k for n, k in zip(units.units_per_chunk, kept, strict=True)]
        self._per_host = Units(units.unit_bytes, tuple(weights), units.padding_bytes)
        self._weights = [weight for weight in weights if weight is not None]
        self._full = [isinstance(chunking.layout.groups[g].kind, FullAttention) for g in chunking.layout.cached]
        self._stored = None
        if checkpoints.rule != "dense":
            self._stored = StoredChunks(chunking, checkpoints.checkpoint_tokens)

    def cost(self, num_tokens: int) -> HostCost:
        """Returns what one request of `num_tokens` tokens leaves on the host. Checkpoints that were listed and that
        it does not reach do not count.

        Raises:
            ValueError: `num_tokens` is not a non-negative int.
        """
        most = 2**62 if self._stored else 2**256
        tokens = integer(num_tokens, "num_tokens", at_least=0, below=most)
        all_chunks, growing = self._chunks(tokens)
        parts = [
            {
                name: count * weight * self._unit_bytes
                for name, count, weight in zip(self._names, counts, self._weights, strict=True)
            }
            for counts in (growing, [a - b for a, b in zip(all_chunks, growing, strict=True)])
        ]
        return HostCost(*parts)

    def bytes_per_token(self) -> Fraction:
        """Returns what each further token adds in the long run, in whole units."""
        if self._stored is not None:
            tokens, counts = self._stored.per_period()
            units = sum(n * weight for n, weight in zip(counts, self._weights, strict=True))
            return Fraction(units * self._unit_bytes, tokens)
        per_chunk = [chunk_tokens_of(self._chunking, g) for g in self._chunking.layout.cached]
        terms = zip(self._weights, per_chunk, strict=True)
        return sum((Fraction(weight * self._unit_bytes, tokens) for weight, tokens in terms), Fraction(0))

    def longest(self, budget_bytes: int) -> int | None:
        """Returns the tokens of the longest request that a budget holds; `None` where there is no longest.

        A slightly shorter one may need more: its end may lie worse in the chunks.

        Raises:
            ValueError: `budget_bytes` is not a non-negative int, or the checkpoints are listed.
        """
        if self._checkpoints.rule == "dense":
            return tokens_that_fit(self._chunking, self._per_host, budget_bytes)
        if self._checkpoints.rule == "listed":
            raise ValueError("listed checkpoints belong to a request of a given length: there is no longest")
        assert self._stored is not None, "all other rules count store sets"
        budget = integer(budget_bytes, "budget_bytes", at_least=0, below=2**63)
        return self._stored.longest(self._weights, budget // self._unit_bytes)

    def requests(self, budget_bytes: int, num_tokens: int) -> int | None:
        """Returns how many requests of `num_tokens` tokens, no two alike, a budget holds; `None` for any number, as
        nothing of them is stored.

        Raises:
            ValueError: an argument out of range.
        """
        budget = integer(budget_bytes, "budget_bytes", at_least=0, below=2**63)
        of_one = self.cost(num_tokens).num_bytes // self._unit_bytes
        return budget // self._unit_bytes // of_one if of_one else None

    def _chunks(self, tokens: int) -> tuple[list[int], list[int]]:
        """The chunks of each cached group that a request leaves, and those of them that grow with its length."""
        if self._stored is None:
            counts = [tokens // chunk_tokens_of(self._chunking, g) for g in self._chunking.layout.cached]
            return counts, counts
        if self._checkpoints.rule == "listed":
            reached = [position for position in self._checkpoints.positions if position <= tokens]
            counts = self._stored.of_checkpoints([*reached, tokens])
            regular = [0] * len(counts)
        else:
            at = np.array([tokens], np.int64)
            counts, regular = (self._stored.counts(at, with_end=end)[0].tolist() for end in (True, False))
        return counts, [n if full else r for n, r, full in zip(counts, regular, self._full, strict=True)]


def checkpoint_bytes(chunking: Chunking, units: Units, shards: Mapping[str, int]) -> dict[str, int]:
    """Returns, for every group, what one checkpoint far from others costs on the host: the windows and states that
    it requires, in whole units, over all ranks. Full and scratch groups have 0; see `fixed_bytes_per_checkpoint`.
    """
    cost = {}
    for g, (name, num_bytes) in enumerate(fixed_bytes_per_checkpoint(chunking).items()):
        chunks = num_bytes // (chunking.chunk_bytes[g] or 1)
        cost[name] = chunks * (units.units_per_chunk[g] or 0) * units.unit_bytes * shards[name]
    return cost
