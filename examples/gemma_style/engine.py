"""A small paged serving engine: turns of several conversations on one pool of blocks a group."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .blocks import NULL_BLOCK, BlockPool, Session
from .hooks import CacheHook
from .stepper import Stepper


class PoolTooSmallError(ValueError):
    """One conversation alone does not fit the device's pool."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one turn took. Prompt tokens are on the device, restored, recomputed or new.

    Args:
        conversation: whose turn.
        turn: counted from 1.
        prompt_tokens: all earlier tokens and the turn's text.
        device_tokens: prompt tokens found on the device.
        restored_tokens: prompt tokens restored from the host, or from levels below it.
        recomputed_tokens: prompt tokens computed before and computed again.
        ttft_s: seconds to the first token.
        tokens: what was generated.
        logits: `(generated, vocabulary)`.
    """

    conversation: str
    turn: int
    prompt_tokens: int
    device_tokens: int
    restored_tokens: int
    recomputed_tokens: int
    ttft_s: float
    tokens: tuple[int, ...]
    logits: np.ndarray

    @property
    def request_id(self) -> str:
        """How the turn is called."""
        return f"{self.conversation}.{self.turn}"


class Engine:
    """Serves turns. Idle conversations stay on the device until others need their blocks.

    Args:
        stepper: the model's step.
        num_blocks: blocks of the pool, by group.
        on_step: called after every step with the blocks in use, by group.
    """

    def __init__(
        self,
        stepper: Stepper,
        num_blocks: Mapping[str, int],
        on_step: Callable[[Mapping[str, int]], None] = lambda _used: None,
    ):
        self.stepper = stepper
        self.caches = stepper.new_caches(num_blocks)
        self.pools = {group: BlockPool(count) for group, count in num_blocks.items()}
        self._tokens_per_block = {group: kind.tokens_per_block for group, kind in stepper.attention.items()}
        self._sessions: dict[str, Session] = {}  # least recently used first
        self._on_step = on_step

    def turn(self, conversation: str, text: Sequence[int], num_new: int, hook: CacheHook) -> Turn:
        """Serves one turn: the text joins the conversation, and `num_new` tokens are generated greedily.

        Raises:
            PoolTooSmallError: the conversation does not fit the pool even alone.
        """
        started = time.perf_counter()
        session = self._begin(conversation, text)
        prompt, computed = tuple(session.tokens), session.computed_tokens
        request_id = f"{conversation}.{session.num_turns}"
        held = session.cached_tokens
        hit = hook.lookup(request_id, prompt, held)
        if hit > held:
            self._reserve(session, hit, hit)
            self.caches, hit = hook.restore(self.caches, request_id, session.tables)
            session.cached_tokens = hit

        generated, logits = [], []
        ttft = 0.0
        while len(generated) < num_new:
            token, row = self._compute(session, request_id, hook)
            if not generated:
                ttft = time.perf_counter() - started
            generated.append(token)
            logits.append(row)
            session.tokens.append(token)
            hook.accept(request_id, token)
        self.caches = hook.save(self.caches, request_id, session.tables, session.cached_tokens, last=True)
        hook.finish(request_id)
        return Turn(
            conversation=conversation,
            turn=session.num_turns,
            prompt_tokens=len(prompt),
            device_tokens=held,
            restored_tokens=hit - held,
            recomputed_tokens=max(0, computed - hit),
            ttft_s=ttft,
            tokens=tuple(generated),
            logits=np.stack(logits),
        )

    def warm_up(self, hook: CacheHook) -> None:
        """Compiles the steps for this pool; they compute no token."""
        self.caches = hook.warm_up(self.stepper, self.caches)

    def check_integrity(self) -> None:
        """Recounts the blocks of every group."""
        for group, pool in self.pools.items():
            pool.check_integrity(session.tables[group] for session in self._sessions.values())

    def _begin(self, conversation: str, text: Sequence[int]) -> Session:
        session = self._sessions.pop(conversation, None) or Session.empty(
            conversation, {group: self.stepper.table_blocks(group) for group in self.pools}
        )
        self._sessions[conversation] = session  # now the most recently used
        session.tokens.extend(text)
        session.num_turns += 1
        return session

    def _compute(self, session: Session, request_id: str, hook: CacheHook) -> tuple[int, np.ndarray]:
        """Computes all tokens that are not cached yet; returns the next one and its logits."""
        token = logits = None
        while (start := session.cached_tokens) < len(session.tokens):
            stop = self.stepper.last_stop(start, len(session.tokens))
            self._drop_before(session, hook.keep_from(start), request_id, hook)
            self._reserve(session, start, stop)
            tokens = session.tokens[start:stop]
            token, logits, self.caches = hook.compute(
                self.stepper, self.caches, request_id, tokens, start, session.tables
            )
            session.cached_tokens = stop
            session.computed_tokens = max(session.computed_tokens, stop)
            self._on_step({group: pool.num_used for group, pool in self.pools.items()})
        assert token is not None, "a token is computed only after another one"
        return int(token), np.asarray(logits)

    def _reserve(self, session: Session, position: int, stop: int) -> None:
        """Gives the session a block for every token before `stop` that the token at `position` reads."""
        for group, kind in self.stepper.attention.items():
            table, per_block = session.tables[group], kind.tokens_per_block
            for i in range(kind.first_needed(position) // per_block, -(-stop // per_block)):
                if table[i] == NULL_BLOCK:
                    table[i] = self._take(group, session)

    def _take(self, group: str, taker: Session) -> int:
        while (block := self.pools[group].take()) is None:
            idle = (other for other in self._sessions.values() if other is not taker and other.cached_tokens)
            victim = next(idle, None)
            if victim is None:
                raise PoolTooSmallError(
                    f"the device pool of group {group!r} must hold one whole conversation, but its "
                    f"{self.pools[group].num_blocks} blocks ran out at token {taker.cached_tokens}"
                )
            self._evict(victim)
        return block

    def _evict(self, session: Session) -> None:
        session.cached_tokens = 0
        for group, table in session.tables.items():
            self.pools[group].give_back(table[table != NULL_BLOCK].tolist())
            table[:] = NULL_BLOCK

    def _drop_before(self, session: Session, keep_from: Mapping[str, int], request_id: str, hook: CacheHook) -> None:
        """Gives back the blocks that end at or before the tokens to keep."""
        for group, first in keep_from.items():
            table = session.tables[group][: first // self._tokens_per_block[group]]
            dropped = table[table != NULL_BLOCK]
            if len(dropped):
                self.caches = hook.save(self.caches, request_id, session.tables, session.cached_tokens, last=False)
                self.pools[group].give_back(dropped.tolist())
                table[:] = NULL_BLOCK
