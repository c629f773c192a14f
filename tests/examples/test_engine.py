"""The example's engine on a toy geometry whose window is short enough to slide."""

import jax.numpy as jnp
import numpy as np
import pytest
from gemma_style.blocks import NULL_BLOCK, BlockPool
from gemma_style.engine import Engine, PoolTooSmallError, Turn
from gemma_style.hooks import FusedOffload, NoOffload, Offload
from gemma_style.presets import FULL, LOCAL, Attention, ModelShape, Preset
from gemma_style.stepper import Stepper

import kvjax
from kvjax.fused import FusedSteps

TOY = Preset(
    query_heads=2,
    local=Attention(kv_heads=2, head_dim=8, tokens_per_block=4, rope_base=1e4, window_tokens=24),
    full=Attention(kv_heads=1, head_dim=16, tokens_per_block=8, rope_base=1e6, keys_are_values=True),
    pattern=3,
)
ROWS, NEW, MAX_TOKENS = 4, 4, 120
AMPLE = {FULL: 45, LOCAL: 90}
SMALL = {FULL: 20, LOCAL: 16}
TEXTS = {
    name: [list(rng.integers(0, 256, 26)) for _ in range(4)]
    for name, rng in ((name, np.random.default_rng(seed)) for seed, name in enumerate("abc"))
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def stepper(request: pytest.FixtureRequest) -> Stepper:
    shape = ModelShape(TOY, num_layers=3, width=32, vocabulary=256, cache_dtype=jnp.dtype(request.param))
    return Stepper(shape, seed=0, rows=ROWS, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def reference(stepper: Stepper) -> list[Turn]:
    return serve(Engine(stepper, AMPLE), NoOffload(stepper.attention))


def serve(engine: Engine, hook) -> list[Turn]:
    turns = []
    for t in range(4):
        for name in sorted(TEXTS, reverse=bool(t % 2)):
            turns.append(engine.turn(name, TEXTS[name][t], NEW, hook))
            engine.check_integrity()
    return turns


def offloader_of(engine: Engine, host_bytes: int = 1 << 20) -> kvjax.Offloader:
    layout = engine.stepper.shape.layout()
    return kvjax.Offloader(
        layout, engine.caches, host_bytes=host_bytes, blocks_per_chunk={FULL: 1, LOCAL: 2}, show_progress=False
    )


def assert_same(turns: list[Turn], reference: list[Turn]) -> None:
    for turn, expected in zip(turns, reference, strict=True):
        assert (turn.conversation, turn.tokens) == (expected.conversation, expected.tokens)
        np.testing.assert_array_equal(turn.logits.view(np.uint32), expected.logits.view(np.uint32))


def test_answers_vary(reference: list[Turn]):
    assert len({token for turn in reference for token in turn.tokens}) > 12


def test_a_small_pool_recomputes_the_same_bits(stepper: Stepper, reference: list[Turn]):
    turns = serve(Engine(stepper, SMALL), NoOffload(stepper.attention))
    assert_same(turns, reference)
    assert sum(turn.recomputed_tokens for turn in turns) > 100
    assert sum(turn.device_tokens for turn in turns) > 0


def test_a_small_pool_restores_the_same_bits(stepper: Stepper, reference: list[Turn]):
    engine = Engine(stepper, SMALL)
    with offloader_of(engine) as offloader:
        turns = serve(engine, Offload(offloader))
        offloader.check_integrity()
        stats = offloader.stats()
    assert_same(turns, reference)
    assert sum(turn.restored_tokens for turn in turns) > 200
    assert stats.bytes_loaded > 0
    assert stats.failed_jobs == stats.open_requests == 0
    # All that is computed again is what no whole chunk of 8 tokens holds.
    assert max(turn.recomputed_tokens for turn in turns) < 8


def test_a_host_budget_of_one_chunk_changes_no_bit(stepper: Stepper, reference: list[Turn]):
    engine = Engine(stepper, SMALL)
    chunking = kvjax.resolve_chunking(stepper.shape.layout(), blocks_per_chunk={FULL: 1, LOCAL: 2})
    one = max(size for size in chunking.chunk_bytes if size is not None)
    with offloader_of(engine, host_bytes=one) as offloader:
        assert_same(serve(engine, Offload(offloader)), reference)
        offloader.check_integrity()


def test_restored_bytes_matter(stepper: Stepper, reference: list[Turn]):
    """The comparison would notice: other bytes in the restored blocks give other logits."""

    class Corrupting(Offload):
        def restore(self, caches, request_id, tables):
            caches, valid = super().restore(caches, request_id, tables)
            return {name: cache + 1 for name, cache in caches.items()}, valid

    engine = Engine(stepper, SMALL)
    with offloader_of(engine) as offloader:
        turns = serve(engine, Corrupting(offloader))
    with pytest.raises(AssertionError):
        assert_same(turns, reference)


def test_what_a_failed_load_did_not_bring_is_computed(stepper: Stepper, reference: list[Turn]):
    class Failing(Offload):
        def restore(self, caches, request_id, tables):
            return caches, 0

    engine = Engine(stepper, SMALL)
    with offloader_of(engine) as offloader:
        turns = serve(engine, Failing(offloader))
    assert_same(turns, reference)
    assert sum(turn.restored_tokens for turn in turns) == 0


def test_left_over_bytes_are_never_read(stepper: Stepper, reference: list[Turn]):
    """A free block may hold anything, NaN included."""
    engine = Engine(stepper, AMPLE)
    engine.caches = {name: jnp.full_like(cache, jnp.nan) for name, cache in engine.caches.items()}
    assert_same(serve(engine, NoOffload(stepper.attention)), reference)


def test_how_a_prompt_is_cut_into_steps_changes_no_bit(stepper: Stepper):
    tokens = np.random.default_rng(3).integers(0, 256, 70).tolist()
    tables = {group: np.arange(stepper.table_blocks(group)) for group in stepper.attention}

    def logits_of_last(cuts: list[int]) -> np.ndarray:
        caches = stepper.new_caches({group: len(table) for group, table in tables.items()})
        logits = None
        for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            _, logits, caches, _ = stepper(caches, tokens[start:stop], start, tables)
        return np.asarray(logits)

    steps = list(range(ROWS, len(tokens), ROWS))
    expected = logits_of_last(steps)
    np.testing.assert_array_equal(logits_of_last(list(range(1, len(tokens)))), expected)
    np.testing.assert_array_equal(logits_of_last(sorted({*steps, 5, 10, 33, 69})), expected)


def test_blocks_out_of_the_window_are_given_back(stepper: Stepper):
    engine = Engine(stepper, AMPLE)
    turn = engine.turn("long", list(range(100)), NEW, NoOffload(stepper.attention))
    assert turn.prompt_tokens == 100
    # A window of 24 tokens and a step of 4 touch at most 8 blocks of 4 tokens.
    assert engine.pools[LOCAL].num_used <= 8
    assert engine.pools[FULL].num_used == -(-(100 + NEW - 1) // 8)
    engine.check_integrity()


def test_the_idle_conversation_used_longest_ago_is_evicted(stepper: Stepper):
    engine, hook = Engine(stepper, SMALL), NoOffload(stepper.attention)
    for name in ("old", "middle"):
        engine.turn(name, list(range(40)), NEW, hook)
    engine.turn("new", list(range(60)), NEW, hook)
    assert engine.turn("new", [1], NEW, hook).device_tokens > 0
    assert engine.turn("old", [1], NEW, hook).device_tokens == 0
    engine.check_integrity()


def test_a_conversation_that_does_not_fit_is_refused(stepper: Stepper):
    engine = Engine(stepper, {FULL: 4, LOCAL: 20})
    with pytest.raises(PoolTooSmallError, match=r"group 'full' must hold one whole conversation, but its 4 blocks"):
        engine.turn("long", list(range(60)), NEW, NoOffload(stepper.attention))


def test_a_pool_notices_a_lost_block_and_a_second_owner():
    pool = BlockPool(3)
    taken = [pool.take(), pool.take()]
    assert pool.num_used == 2
    pool.check_integrity([np.array([*taken, NULL_BLOCK])])
    with pytest.raises(AssertionError, match="two owners"):
        pool.check_integrity([np.array(taken[:1])])
    with pytest.raises(AssertionError, match="two owners"):
        pool.check_integrity([np.array(taken), np.array(taken[:1])])
    pool.give_back(taken)
    assert pool.num_used == 0
    assert sorted([pool.take(), pool.take(), pool.take()]) == [0, 1, 2]
    assert pool.take() is None


@pytest.mark.parametrize("fused", [False, True])
def test_a_served_turn_compiles_nothing(stepper: Stepper, compilations: list[str], fused: bool):
    """A load returns caches of the kind that the step was compiled for."""
    engine = Engine(stepper, SMALL)
    with offloader_of(engine) as offloader, FusedSteps(offloader) as steps:
        hook = FusedOffload(offloader, steps) if fused else Offload(offloader)
        engine.warm_up(hook)
        compilations.clear()
        turns = serve(engine, hook)
        assert compilations == []
    assert sum(turn.restored_tokens for turn in turns) > 0
