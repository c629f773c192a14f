"""The law end to end: what is stored at a checkpoint is what later requests hit, over random layouts."""

from dataclasses import dataclass

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvjax import FullAttention, Recurrent
from kvjax.coverage import stored_positions
from kvjax.storing import sound_from
from tests.oracles import law
from tests.oracles.layouts import cut, group, random_chunking
from tests.support.fake_engine import FakeEngine, Frees, completes_though_freed_at_once
from tests.support.ledgers import picks


def check_hits(engine: FakeEngine, tokens: list[int], checkpoint: int) -> None:
    """A prompt one token longer hits R, the same prompt S, and what is loaded is right."""
    expected = law.stored_positions(engine.chunking, checkpoint, engine.multiple)
    assert expected == stored_positions(engine.chunking, checkpoint, resume_multiple=engine.multiple)[::-1]
    for name, prompt, position in (("longer", [*tokens[:checkpoint], -1], 0), ("same", tokens[:checkpoint], 1)):
        assert engine.start(name, prompt).hit_tokens == expected[position], name
        engine.end_load(engine.load(name))
        engine.compute(name, len(prompt))
        engine.finish(name)
    engine.ledger.check_integrity()


@dataclass
class Case:
    prompt_tokens: int
    checkpoint: int
    step: int


cases = st.builds(Case, st.integers(1, 40), st.integers(1, 40), st.integers(1, 20))


@settings(max_examples=80, deadline=None)
@given(picks(), cases, st.sampled_from(["never", "retained"]), st.booleans())
def test_any_checkpoint_serves_later_requests(pick, case, frees, every):
    """An engine that keeps what `retained_from` says may store after each step, or only at the checkpoint, which may
    be anywhere past the prompt."""
    chunking = random_chunking(pick)
    engine = FakeEngine(chunking, frees=frees, resume_multiple=pick(1, 3))
    assume(every or frees == "never")
    tokens = list(range(case.prompt_tokens + case.checkpoint))
    found = engine.start("first", tokens[: case.prompt_tokens])
    # Positions that need nothing are hit in an empty pool.
    assume(not any(sound_from(chunking, [found.hit_tokens]).values()))
    engine.prefill("first", case.prompt_tokens, case.step, every=every, to_come=[len(tokens)])
    engine.accept("first", tokens[case.prompt_tokens :])
    engine.prefill("first", len(tokens), case.step, every=every, checkpoint=True)
    check_hits(engine, tokens, len(tokens))
    check_hits(engine, tokens, case.prompt_tokens)
    assert engine.ledger.counts.chunks_dropped == 0


@settings(max_examples=80, deadline=None)
@given(picks(), cases)
def test_the_end_of_a_prompt_serves_though_blocks_are_freed_as_they_leave_the_window(pick, case):
    """Every step is followed by a store, and no chunk is longer than a window."""
    chunking = random_chunking(pick)
    assume(completes_though_freed_at_once(chunking))
    frees: Frees = "at once"
    engine = FakeEngine(chunking, frees=frees, resume_multiple=pick(1, 3))
    tokens = list(range(case.prompt_tokens + case.checkpoint))
    engine.start("first", tokens[: case.prompt_tokens])
    engine.prefill("first", case.prompt_tokens, case.step)
    engine.accept("first", tokens[case.prompt_tokens :])
    engine.prefill("first", len(tokens), 1)
    check_hits(engine, tokens, case.prompt_tokens)
    assert engine.ledger.counts.chunks_dropped == 0


@settings(max_examples=80, deadline=None)
@given(picks(), cases, st.integers(0, 39))
def test_a_checkpoint_serves_a_request_that_was_itself_restored(pick, case, shared):
    """A second request shares a part of the first one, is restored as far as possible and goes on from there: its own
    end serves as if it had been computed from the start."""
    chunking = random_chunking(pick)
    assume(completes_though_freed_at_once(chunking))
    engine = FakeEngine(chunking, frees="retained", resume_multiple=pick(1, 3))
    first = list(range(case.prompt_tokens))
    engine.served("first", first, case.step)
    second = [*first[:shared], *range(100, 100 + case.checkpoint)]
    engine.served("second", second, case.step)
    check_hits(engine, second, len(second))


@settings(max_examples=80, deadline=None)
@given(picks(), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 30)), min_size=2, max_size=4))
def test_restored_requests_store_nothing_that_they_do_not_hold_whole(pick, prompts):
    """Each request shares a part of the one before; the device holds some of it, the host some. Whatever the layout,
    every source of a store, every load and every token read is checked by the engine."""
    engine = FakeEngine(random_chunking(pick), frees="retained", fills=bool(pick(0, 1)), resume_multiple=pick(1, 3))
    tokens: list[int] = []
    for number, (shared, more, on_device) in enumerate(prompts):
        tokens = [*tokens[:shared], *(number * 100 + i for i in range(more))]
        engine.served(number, tokens, 8, on_device=min(on_device, len(tokens) - 1))
        engine.ledger.check_integrity()


def test_a_state_that_failed_to_load_is_not_stored_from_the_place_it_was_to_have():
    """A request whose load fails is computed again, and need not end a step where the state was: its table may still
    name the block, which holds anything."""
    layout = cut(group("full", FullAttention(), 2), group("state", Recurrent(), 4))
    for end in ("failed", "taken back"):
        served = FakeEngine(layout, num_units=4 * 64, frees="never")
        served.served("whole", [0] * 8, 40)
        assert served.start("a", [0] * 40).hit_tokens == 4
        served.accept("a", [0])
        load = served.load("a")
        if end == "failed":
            served.end_load(load, ok=False)
        else:
            served.loads.remove(load)
            served.ledger.cancel_load(load)
        served.compute("a", 36)
        served.end_store(served.store("a"))  # the engine compares every stored byte
