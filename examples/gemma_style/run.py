"""Serves the conversations in three modes and compares them."""

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.fused import FusedSteps
from kvjax.packing import GRANULE_BYTES, cut_into_units, unit_bytes

from .conversations import cut, read_text
from .engine import Engine, Turn
from .hooks import CacheHook, FusedOffload, NoOffload, Offload
from .options import ONE_CHUNK, Options
from .presets import PRESETS, ModelShape
from .stepper import Stepper

UNLIMITED, OFFLOAD, RECOMPUTE = MODES = ("unlimited", "offload", "recompute")
COMPILING = "compiling"
_SMALL_POOL_CONVERSATIONS = 1.5
_ARRIVING_BUCKETS, _LEAVING_BUCKETS = (0, 64), (0, 4)  # blocks of a group in one step with `--fused`


@dataclass(eq=False)
class Served:
    """What one mode did.

    Args:
        num_blocks: blocks of its pool, by group.
        turns: in the order served.
        pool_use: used part of each group's pool after every step.
        seconds: wall time of all turns.
    """

    num_blocks: dict[str, int]
    turns: list[Turn] = field(default_factory=list)
    pool_use: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0

    def note_use(self, used: Mapping[str, int]) -> None:
        """Notes the blocks in use after a step."""
        for group, count in used.items():
            self.pool_use.setdefault(group, []).append(count / self.num_blocks[group])

    def total(self, name: str) -> int:
        """Returns the sum of one count over the turns."""
        return sum(getattr(turn, name) for turn in self.turns)

    def ttft_ms(self) -> float | None:
        """Returns the median time to first token of the resumed turns, `None` if there is none."""
        resumed = [turn.ttft_s for turn in self.turns if turn.turn > 1]
        return float(np.median(resumed) * 1000) if resumed else None

    def digest(self) -> str:
        """Returns a digest of all generated tokens."""
        tokens = np.array([turn.tokens for turn in self.turns], "<i4")
        return hashlib.sha256(tokens.tobytes()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Outcome:
    """The three modes side by side.

    Args:
        options: what was asked for.
        shape: the model.
        chunking: the groups and their chunks.
        host_bytes: budget in host memory.
        served: by mode.
        offload_stats: what the offloader did.
        sources: by turn with restored tokens, the lowest level that they came from.
        seconds: wall time of everything, compiling included.
    """

    options: Options
    shape: ModelShape
    chunking: kvjax.Chunking
    host_bytes: int
    served: Mapping[str, Served]
    offload_stats: kvjax.Stats
    sources: Mapping[str, str]
    seconds: float

    def tokens_identical(self) -> bool:
        """Returns whether all tokens are equal in all modes."""
        return len({served.digest() for served in self.served.values()}) == 1

    def max_abs_logit_diff(self) -> float:
        """Returns the largest difference between the logits of offload and unlimited."""
        pairs = zip(self.served[UNLIMITED].turns, self.served[OFFLOAD].turns, strict=True)
        return max(float(np.abs(one.logits - other.logits).max()) for one, other in pairs)


class Bench:
    """All that the modes share: model, conversations and pool sizes.

    Args:
        options: what was asked for.

    Raises:
        ValueError: the text, the chunks or the pool do not allow it.
    """

    def __init__(self, options: Options):
        self.options = options
        self.shape = ModelShape(
            PRESETS[options.preset],
            options.layers,
            options.width,
            options.vocabulary,
            jnp.dtype(options.cache_dtype),
        )
        self.conversations = cut(
            read_text(options.text),
            num_conversations=options.conversations,
            num_turns=options.turns,
            opening_tokens=options.opening_tokens,
            first_tokens=options.first_tokens,
            turn_tokens=options.turn_tokens,
        )
        self.max_tokens = max(c.max_tokens(options.new_tokens) for c in self.conversations)
        self.chunking = kvjax.resolve_chunking(self.shape.layout(), blocks_per_chunk=options.blocks_per_chunk)
        self.host_bytes = self._one_chunk() if options.host_bytes == ONE_CHUNK else int(options.host_bytes)
        self.needed_blocks = self._blocks_of_one()
        self.small_pool = self._small_pool()
        self.model = self._model()
        self.stepper = Stepper(self.shape, seed=options.seed, rows=options.rows, max_tokens=self.max_tokens)

    def num_blocks(self, mode: str) -> dict[str, int]:
        """Returns the blocks of a mode's pool, by group."""
        if mode == UNLIMITED:
            return {group: count * len(self.conversations) for group, count in self.needed_blocks.items()}
        return self.small_pool

    def _model(self) -> str:
        """Returns the model's name for lower tiers: whatever the bits of its caches depend on, as sums depend on their
        order. Chunks of a run that differs in any of it are misses."""
        options = self.options
        return (
            f"{options.preset} {options.layers}x{options.width}x{options.vocabulary} seed {options.seed} "
            f"rows {options.rows} tokens {self.max_tokens} jax {jax.__version__} {jax.default_backend()}"
            f"{' fused' if options.fused else ''}"
        )

    def _one_chunk(self) -> int:
        """Returns the bytes of one chunk of the largest group, in whole units of the host pool."""
        unit = unit_bytes(self.chunking, GRANULE_BYTES[jax.default_backend()])
        per_chunk = cut_into_units(self.chunking, unit).units_per_chunk
        return max(count for count in per_chunk if count is not None) * unit

    def _blocks_of_one(self) -> dict[str, int]:
        """Returns how many blocks of each group the longest conversation may hold at once."""
        most = dict.fromkeys((group.name for group in self.chunking.layout.groups), 0)
        for start in range(self.max_tokens):
            stop = min(self.max_tokens, (start // self.options.rows + 1) * self.options.rows)
            for group, first in kvjax.retained_from(self.chunking, start).items():
                per_block = self.shape.preset.attention(group).tokens_per_block
                most[group] = max(most[group], -(-stop // per_block) - first // per_block)
        return most

    def _small_pool(self) -> dict[str, int]:
        given = self.options.device_blocks
        if isinstance(given, int):
            given = dict.fromkeys(self.needed_blocks, given)
        pool = {group: int(_SMALL_POOL_CONVERSATIONS * count) for group, count in self.needed_blocks.items()}
        pool.update(given or {})
        for group, needed in self.needed_blocks.items():
            if pool[group] < needed:
                raise ValueError(
                    f"--device-blocks of group {group!r} must be at least {needed}, "
                    f"the blocks of one conversation of {self.max_tokens} tokens, got {pool[group]}"
                )
        return pool

    def serve(self, engine: Engine, hook: CacheHook, on_turn: Callable[[Turn], None]) -> list[Turn]:
        """Serves every turn, round by round. Every other round runs backwards, so that some conversations
        come back soon and others late."""
        turns = []
        for t in range(self.options.turns):
            for conversation in self.conversations[:: 1 if t % 2 == 0 else -1]:
                turns.append(engine.turn(conversation.name, conversation.turns[t], self.options.new_tokens, hook))
                on_turn(turns[-1])
        return turns


def run(options: Options, on_turn: Callable[[str, Turn | None], None] = lambda _mode, _turn: None) -> Outcome:
    """Runs the three modes.

    Args:
        options: what was asked for.
        on_turn: called with a mode and `None` when its turns begin, and after each turn; first of all, once
            the options are known to allow a run, with `COMPILING` and `None`.

    Raises:
        ValueError: the options do not allow a run.
    """
    started = time.perf_counter()
    bench = Bench(options)
    served = {mode: Served(bench.num_blocks(mode)) for mode in MODES}
    engines = {mode: Engine(bench.stepper, served[mode].num_blocks, served[mode].note_use) for mode in MODES}
    with ExitStack() as closing:
        offloader = closing.enter_context(
            kvjax.Offloader(
                bench.chunking.layout,
                engines[OFFLOAD].caches,
                host_bytes=bench.host_bytes,
                blocks_per_chunk=options.blocks_per_chunk,
                model=bench.model,
                tiers=options.tiers,
            )
        )
        no_offload = NoOffload(bench.stepper.attention)
        offload = Offload(offloader)
        if options.fused:
            steps = FusedSteps(offloader, arriving_buckets=_ARRIVING_BUCKETS, leaving_buckets=_LEAVING_BUCKETS)
            closing.callback(steps.close)
            offload = FusedOffload(offloader, steps)
        hooks: dict[str, CacheHook] = {UNLIMITED: no_offload, OFFLOAD: offload, RECOMPUTE: no_offload}
        on_turn(COMPILING, None)
        for mode, engine in engines.items():
            engine.warm_up(hooks[mode])  # the offloader compiled its programs when it was made
        for mode in MODES:
            on_turn(mode, None)
            begun = time.perf_counter()
            served[mode].turns = bench.serve(engines[mode], hooks[mode], lambda turn, mode=mode: on_turn(mode, turn))
            offloader.wait()
            served[mode].seconds = time.perf_counter() - begun
        offloader.flush()  # so that the counts are those of all that is kept
        stats = offloader.stats()
    return Outcome(
        options=options,
        shape=bench.shape,
        chunking=bench.chunking,
        host_bytes=bench.host_bytes,
        served=served,
        offload_stats=stats,
        sources=offload.sources,
        seconds=time.perf_counter() - started,
    )
