"""What one request leaves on the host and what that costs, chunk by chunk. Nothing is shared with `kvjax.accounting`
and `kvjax.capacity`; the store sets are those of the literal law."""

from collections.abc import Iterable, Sequence

from kvjax.chunking import Chunking
from tests.oracles import law


def checkpoints_of(num_tokens: int, checkpoint_tokens: int | None) -> list[int]:
    """The positions up to `num_tokens` at which a request is stored: every so many tokens, and its end."""
    return [*(range(checkpoint_tokens, num_tokens + 1, checkpoint_tokens) if checkpoint_tokens else ()), num_tokens]


def stored_chunks(chunking: Chunking, checkpoints: Iterable[int]) -> dict[str, set[int]]:
    """The distinct chunks of the store sets of all checkpoints."""
    chunks: dict[str, set[int]] = {name: set() for name in chunking.layout.names}
    for checkpoint in checkpoints:
        for name, stored in law.store_set(chunking, checkpoint).items():
            chunks[name].update(stored)
    return chunks


def units_by_length(
    chunking: Chunking, units_per_chunk: Sequence[int | None], checkpoint_tokens: int | None, most_tokens: int
) -> list[int]:
    """Units that a request of 0, 1, … `most_tokens` tokens leaves on the host."""
    cost = dict(zip(chunking.layout.names, units_per_chunk, strict=True))
    return [
        sum(
            (cost[name] or 0) * len(chunks)
            for name, chunks in stored_chunks(chunking, checkpoints_of(tokens, checkpoint_tokens)).items()
        )
        for tokens in range(most_tokens + 1)
    ]
