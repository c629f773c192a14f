"""A slow and obvious model of a replay on one group of full attention with one unit a chunk and the policy LRU.

A chunk is the tuple of all tokens up to its end. It leaves by the last access of a request to it, and within one access
from the tail.
"""

from collections.abc import Sequence


class ModelPool:
    """A pool of `num_chunks` chunks of `chunk_tokens` tokens."""

    def __init__(self, num_chunks: int, chunk_tokens: int):
        self.num_chunks = num_chunks
        self.chunk_tokens = chunk_tokens
        self.held: dict[tuple[int, ...], int] = {}  # chunk -> its last access
        self.accesses = 0
        self.stored = self.evicted = 0

    def chunks(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        ends = range(self.chunk_tokens, len(tokens) + 1, self.chunk_tokens)
        return [tuple(tokens[:end]) for end in ends]

    def access(self, tokens: Sequence[int]) -> None:
        self.accesses += 1
        self.held |= {chunk: self.accesses for chunk in self.chunks(tokens) if chunk in self.held}

    def lookup(self, tokens: Sequence[int]) -> int:
        """Returns the hit: whole chunks from the start, up to the last token but one."""
        hit = 0
        for chunk in self.chunks(tokens):
            if chunk not in self.held:
                break
            hit = len(chunk)
        self.access(tokens)
        return min(hit, len(tokens) - 1)

    def store(self, tokens: Sequence[int]) -> None:
        """Stores what of the prefix a pool of this size can hold."""
        wanted = self.chunks(tokens)[: self.num_chunks]
        new = [chunk for chunk in wanted if chunk not in self.held]
        others = sorted((chunk for chunk in self.held if chunk not in wanted), key=lambda c: (self.held[c], -len(c)))
        for chunk in others[: max(0, len(self.held) + len(new) - self.num_chunks)]:
            del self.held[chunk]
            self.evicted += 1
        self.held |= dict.fromkeys(new, 0)
        self.stored += len(new)
        if new:
            self.access(tokens)
