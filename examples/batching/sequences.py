"""Requests as the loop sees them, and the blocks that they hold."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

import kvjax

from .model import FULL, LOCAL, STATE, TOKENS_PER_BLOCK, WINDOW_TOKENS

NULL_BLOCK = -1


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"
    ABORTED = "aborted"


@dataclass(eq=False)
class Sequence:
    """A request.

    Args:
        name: names it.
        tokens: the prompt, and what was generated.
        num_new: tokens to generate.
        tables: block ids by place, by group; -1 where there is none.
        slot: the block that its states are in.
        computed: tokens whose cache is written.
        phase: where it is.
        job: its load, while that is under way.
        prompt_tokens: length of the prompt.
        restored_tokens: tokens that it did not have to compute, over all its admissions.
        computed_tokens: rows that it took, over all its admissions.
        num_preemptions: how often its blocks were taken away.
    """

    name: str
    tokens: list[int]
    num_new: int
    tables: dict[str, list[int]] = field(default_factory=lambda: {FULL: [], LOCAL: []})
    slot: int = NULL_BLOCK
    computed: int = 0
    phase: Phase = Phase.WAITING
    job: "kvjax.Job | None" = None
    prompt_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def is_complete(self) -> bool:
        """Whether all its tokens were generated."""
        return len(self.tokens) == self.prompt_tokens + self.num_new

    def block_tables(self, position: int) -> dict[str, np.ndarray]:
        """The tables for kvjax. A state is told at the block that ends where it stands, and nowhere else."""
        places = {name: -(-position // tokens) for name, tokens in TOKENS_PER_BLOCK.items()}
        states = np.full(places[STATE], NULL_BLOCK)
        if position and position % TOKENS_PER_BLOCK[STATE] == 0:
            states[-1] = self.slot
        tables = {name: np.full(max(places[name], len(table)), NULL_BLOCK) for name, table in self.tables.items()}
        for name, table in self.tables.items():
            tables[name][: len(table)] = table
        return {**tables, STATE: states}


class Blocks:
    """The free blocks of the device, by group.

    Args:
        num_blocks: how many there are, by group.
    """

    def __init__(self, num_blocks: Mapping[str, int]):
        self.num_blocks = dict(num_blocks)
        self._free = {name: list(range(count)) for name, count in num_blocks.items()}

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a sequence that holds nothing could be computed up to its next token."""
        wanted = {name: len(_places(name, 0, len(sequence.tokens) + 1)) for name in (FULL, LOCAL)} | {STATE: 1}
        return all(len(self._free[name]) >= count for name, count in wanted.items())

    def could_hold(self, num_tokens: int) -> bool:
        """Whether there are blocks enough, if nobody else has any, for a request of so many tokens."""
        most = {FULL: num_tokens, LOCAL: num_tokens, STATE: 1}
        return all(self.num_blocks[name] >= -(-tokens // TOKENS_PER_BLOCK[name]) for name, tokens in most.items())

    def reserve(self, sequence: Sequence, start: int, stop: int, load: Mapping[str, range] | None = None) -> bool:
        """Gives a sequence a slot, and a block for each token before `stop` that the token at `start` reads.

        Args:
            sequence: who gets them.
            start: position of the first token to compute.
            stop: the one after the last one.
            load: by group, places of more blocks, which a load is to fill.

        Returns:
            Whether there were enough. If not, nothing changed.
        """
        missing = {}
        for name, table in sequence.tables.items():
            table += [NULL_BLOCK] * (-(-stop // TOKENS_PER_BLOCK[name]) - len(table))
            places = {*_places(name, start, stop), *(load or {}).get(name, ())}
            missing[name] = [place for place in sorted(places) if table[place] == NULL_BLOCK]
        missing[STATE] = [0] if sequence.slot == NULL_BLOCK else []
        if any(len(places) > len(self._free[name]) for name, places in missing.items()):
            return False
        for name, places in missing.items():
            for place in places:
                block = self._free[name].pop()
                if name == STATE:
                    sequence.slot = block
                else:
                    sequence.tables[name][place] = block
        return True

    def drop_before(self, sequence: Sequence, first: Mapping[str, int]) -> None:
        """Takes back the blocks that end at or before a token, by group."""
        for name, table in sequence.tables.items():
            gone = min(first[name] // TOKENS_PER_BLOCK[name], len(table))
            self._give_back(name, table[:gone])
            table[:gone] = [NULL_BLOCK] * gone

    def drop_all(self, sequence: Sequence) -> None:
        """Takes back all that a sequence holds."""
        for name, table in sequence.tables.items():
            self._give_back(name, table)
            sequence.tables[name] = []
        self._give_back(STATE, [sequence.slot])
        sequence.slot, sequence.computed = NULL_BLOCK, 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recounts: every block is free, or held once."""
        held: dict[str, list[int]] = {name: list(free) for name, free in self._free.items()}
        for sequence in sequences:
            held[STATE].append(sequence.slot)
            for name, table in sequence.tables.items():
                held[name] += table
        for name, blocks in held.items():
            found = sorted(block for block in blocks if block != NULL_BLOCK)
            assert found == list(range(self.num_blocks[name])), f"{name}: a block is lost, or has two owners"

    def _give_back(self, name: str, blocks: Iterable[int]) -> None:
        self._free[name] += [block for block in blocks if block != NULL_BLOCK]


def _places(name: str, start: int, stop: int) -> range:
    """Places of the blocks with the tokens before `stop` that the token at `start` reads."""
    first = max(0, start - WINDOW_TOKENS + 1) if name == LOCAL else 0
    return range(first // TOKENS_PER_BLOCK[name], -(-stop // TOKENS_PER_BLOCK[name]))
