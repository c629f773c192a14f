"""Conversations cut from a text: byte tokens, several turns, one common opening."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHIPPED_TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
_SPREAD = (0.0, 0.17, -0.13, 0.08, -0.19)  # so that turns do not all end at the same place of a block


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user says.

    Args:
        name: names the conversation.
        turns: the text of each turn, byte tokens.
    """

    name: str
    turns: tuple[tuple[int, ...], ...]

    def max_tokens(self, new_tokens: int) -> int:
        """Returns the conversation's tokens at its end, `new_tokens` answered in every turn."""
        return sum(len(text) + new_tokens for text in self.turns)


def read_text(path: Path) -> bytes:
    """Returns the bytes of a text file, whatever its encoding.

    Raises:
        ValueError: it cannot be read, or is empty.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the text file '{path}': {error.strerror}") from error
    if not data.strip():
        raise ValueError(f"the text file '{path}' must hold some text, but it is empty")
    return data


def cut(
    text: bytes, *, num_conversations: int, num_turns: int, opening_tokens: int, first_tokens: int, turn_tokens: int
) -> list[Conversation]:
    """Returns conversations, each from its own part of the text.

    All begin with the same `opening_tokens` tokens, as with a system prompt. About `first_tokens` tokens
    follow in the first turn, as with a document, and about `turn_tokens` in each further one. A short text
    is read round and round.

    >>> sizes = dict(num_conversations=2, num_turns=2, opening_tokens=1, first_tokens=2, turn_tokens=1)
    >>> [tuple(map(bytes, c.turns)) for c in cut(b"abcdefgh", **sizes)]
    [(b'abc', b'd'), (b'aef', b'g')]
    """
    opening = _take(text, 0, opening_tokens)
    at = opening_tokens
    conversations = []
    for c in range(num_conversations):
        turns = []
        for t in range(num_turns):
            about = turn_tokens if t else first_tokens
            count = about + int(about * _SPREAD[(c * num_turns + t) % len(_SPREAD)])
            turns.append(_take(text, at, count))
            at += count
        turns[0] = opening + turns[0]
        conversations.append(Conversation(f"c{c + 1}", tuple(turns)))
    return conversations


def spell(tokens: Sequence[int]) -> str:
    """Returns byte tokens as text; a byte that is not printable ASCII has a letter of its own.

    >>> spell([72, 105, 10, 300])
    'HiĊ·'
    """
    return "".join(chr(token) if 32 <= token < 127 else chr(0x100 + token) if token < 256 else "·" for token in tokens)


def _take(text: bytes, start: int, count: int) -> tuple[int, ...]:
    return tuple(text[(start + i) % len(text)] for i in range(count))
