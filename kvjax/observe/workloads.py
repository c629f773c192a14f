"""Synthetic traces: what three kinds of users, and a mix of them, ask of a cache.

Tokens are drawn, hashed and forgotten. Equal arguments give equal calls.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from kvjax._checks import integer, shown
from kvjax.keys import prefix_hashes
from kvjax.observe.calls import MOST_TOKENS, Call, ExtendCall, FinishCall, LoadCall, LookupCall, StoreCall

KINDS = ("multi-turn", "shared-prefix", "scan", "mixed")
_NAMESPACE = b"kvjax workload.."
_VOCABULARY = 2**20
_SYSTEM, _DOCUMENT = 1, 2  # what the tokens of `_Draws.named` are of


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked.

    `multi-turn`: conversations go on turn by turn, each turn after all that was said. Gaps between the turns of one
    are exponential, and shorter for the popular ones: the n-th takes turns at a rate of `n ** -zipf`. One that would
    pass `most_tokens` ends, and another begins in its place.

    `shared-prefix`: a system prompt, the n-th with a probability of `n ** -zipf`, and a tail of its own.

    `scan`: with a probability of `scan_share` a long document that is never seen again, else one of `documents` of the
    same length, the n-th with a probability of `n ** -zipf`, with a question of its own.

    `mixed`: each of the three with equal probability.

    Args:
        kind: one of `KINDS`.
        requests: how many requests.
        seed: of everything drawn.
        tokens_per_hash: tokens that a hash covers.
        in_flight: requests that are served at a time. A conversation's next turn waits for the one before.
        conversations: how many go on at a time.
        turn_tokens: mean tokens of what a user says, in a turn, a tail or a question.
        reply_tokens: mean tokens of a reply.
        most_tokens: the longest conversation of more than one turn.
        systems: how many system prompts.
        system_tokens: tokens of each.
        documents: how many documents are asked for again.
        document_tokens: tokens of each document.
        scan_share: which share of a scan's requests are for documents never seen again, from 0 to 1.
        zipf: the exponent of popularity, from 0 to 10; 0 makes all equally popular.

    Raises:
        ValueError: an unknown kind, or a value of the wrong type or range.
    """

    kind: str
    requests: int = 1000
    seed: int = 0
    tokens_per_hash: int = 16
    in_flight: int = 8
    conversations: int = 64
    turn_tokens: int = 256
    reply_tokens: int = 256
    most_tokens: int = 16384
    systems: int = 4
    system_tokens: int = 4096
    documents: int = 16
    document_tokens: int = 16384
    scan_share: float = 0.25
    zipf: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, got {shown(self.kind)}")
        for name, value in asdict(self).items():
            if name in _SHARES:
                _real(value, name, _SHARES[name])
            elif name != "kind":
                least, below = _RANGES.get(name, (1, _MOST_OF_ONE))
                integer(value, name, at_least=least, below=below)


# Lengths drawn are at most 8 times their mean: no prompt and reply are together longer than `MOST_TOKENS`.
_MOST_OF_ONE = MOST_TOKENS // 32
_RANGES = {
    "requests": (1, 2**31),
    "seed": (0, 2**63),
}
_SHARES = {"scan_share": 1, "zipf": 10}


def _real(value: float, name: str, at_most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= at_most:
        raise ValueError(f"`{name}` must be a number from 0 to {at_most}, got {shown(value)}")


@dataclass(slots=True, eq=False)
class _Served:
    """A request that is served: its prompt, its reply, and what it belongs to."""

    prompt: np.ndarray
    reply: np.ndarray
    conversation: int | None = None


class _Draws:
    """Everything that is drawn for a workload."""

    def __init__(self, workload: Workload):
        self._seed = workload.seed
        self._random = np.random.default_rng(workload.seed)
        self._zipf = workload.zipf

    def tokens(self, count: int) -> np.ndarray:
        return self._random.integers(_VOCABULARY, size=count)

    def named(self, name: int, place: int, count: int) -> np.ndarray:
        """The tokens of something that comes again, the same each time."""
        return np.random.default_rng([self._seed, name, place]).integers(_VOCABULARY, size=count)

    def about(self, mean: int) -> np.ndarray:
        """Tokens of exponential number, from 1 to 8 times the mean."""
        return self.tokens(min(8 * mean, 1 + int(self._random.exponential(mean))))

    def rates(self, count: int) -> np.ndarray:
        rates = np.arange(1, count + 1) ** -self._zipf
        return rates / rates.sum()

    def one_of(self, rates: np.ndarray) -> int:
        return int(self._random.choice(len(rates), p=rates))

    def gap(self, rate: float) -> float:
        return float(self._random.exponential(1 / rate))

    def happens(self, share: float) -> bool:
        return bool(self._random.random() < share)


def workload_calls(workload: Workload) -> Iterator[Call]:
    """Yields the calls of a workload: of each request a lookup, a load, a store at the prompt's end, its reply, a store
    as a checkpoint, and its end. Up to `in_flight` requests are between their two stores at a time."""
    waiting: deque[tuple[str, int | None, list[Call]]] = deque()
    for number, served in enumerate(itertools.islice(_requests(workload), workload.requests)):
        while any(served.conversation is not None and other == served.conversation for _, other, _ in waiting):
            yield from waiting.popleft()[2]
        before, after = _calls(str(number), served, workload.tokens_per_hash)
        yield from before
        waiting.append((str(number), served.conversation, after))
        if len(waiting) >= workload.in_flight:
            yield from waiting.popleft()[2]
    for _, _, after in waiting:
        yield from after


def _calls(request: str, served: _Served, unit: int) -> tuple[list[Call], list[Call]]:
    """The calls of a request up to its prompt's end, and those after."""
    prompt, whole = len(served.prompt), len(served.prompt) + len(served.reply)
    hashes = prefix_hashes(_NAMESPACE, np.concatenate([served.prompt, served.reply]), unit)
    known = prompt // unit
    before: list[Call] = [
        LookupCall(request, _NAMESPACE, prompt, b"".join(hashes[:known])),
        LoadCall(request),
        StoreCall(request, prompt),
    ]
    after: list[Call] = [
        ExtendCall(request, whole, b"".join(hashes[known:])),
        StoreCall(request, whole, checkpoint=True),
        FinishCall(request),
    ]
    return before, after


def _requests(workload: Workload) -> Iterator[_Served]:
    """The requests of a workload, without end."""
    draws = _Draws(workload)
    kinds = {"multi-turn": _turns, "shared-prefix": _tails, "scan": _scans}
    if workload.kind != "mixed":
        yield from kinds[workload.kind](workload, draws)
        return
    parts = [made(workload, draws) for made in kinds.values()]
    equal = np.full(len(parts), 1 / len(parts))
    while True:
        yield next(parts[draws.one_of(equal)])


def _turns(workload: Workload, draws: _Draws) -> Iterator[_Served]:
    rates = draws.rates(workload.conversations)
    due = np.array([draws.gap(rate) for rate in rates])  # when the next turn of each begins
    said = [np.empty(0, np.int64)] * workload.conversations
    while True:
        n = int(due.argmin())
        due[n] += draws.gap(rates[n])
        turn, reply = draws.about(workload.turn_tokens), draws.about(workload.reply_tokens)
        if len(said[n]) + len(turn) + len(reply) > workload.most_tokens:
            said[n] = np.empty(0, np.int64)
        prompt = np.concatenate([said[n], turn])
        said[n] = np.concatenate([prompt, reply])
        yield _Served(prompt, reply, conversation=n)


def _tails(workload: Workload, draws: _Draws) -> Iterator[_Served]:
    rates = draws.rates(workload.systems)
    while True:
        system = draws.named(_SYSTEM, draws.one_of(rates), workload.system_tokens)
        prompt = np.concatenate([system, draws.about(workload.turn_tokens)])
        yield _Served(prompt, draws.about(workload.reply_tokens))


def _scans(workload: Workload, draws: _Draws) -> Iterator[_Served]:
    rates = draws.rates(workload.documents)
    while True:
        if draws.happens(workload.scan_share):
            document = draws.tokens(workload.document_tokens)
        else:
            document = draws.named(_DOCUMENT, draws.one_of(rates), workload.document_tokens)
        prompt = np.concatenate([document, draws.about(workload.turn_tokens)])
        yield _Served(prompt, draws.about(workload.reply_tokens))
