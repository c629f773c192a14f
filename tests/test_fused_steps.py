"""Loads and stores that ride in a step bring the same bytes as those that move on their own."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax import fused
from kvjax.fused import FusedSteps
from kvjax.memory.direct import DirectTransport
from tests.support import layouts
from tests.support.toy_engine import as_bytes, make_caches, stack

NUM_BLOCKS = 64
NUM_TOKENS = 40


class Engine:
    """Runs steps that restore, write nothing of their own, and collect, leaf by leaf."""

    def __init__(self, layout, *, arriving=(0, 8, 64), leaving=(0, 64), as_words=False, **options):
        self.layout = layout
        self.caches = make_caches(layout, NUM_BLOCKS, seed=11)
        self.offloader = kvjax.Offloader(layout, self.caches, host_bytes=10**5, show_progress=False, **options)
        self.steps = FusedSteps(self.offloader, arriving_buckets=arriving, leaving_buckets=leaving)
        self.compiled = 0
        self._as_words = as_words
        self._step = jax.jit(self._traced, donate_argnums=0)

    def _traced(self, caches, arriving, leaving):
        self.compiled += 1
        caches, rows, x = dict(caches), {}, np.float32(1)
        for g in self.layout.cached:
            group = self.layout.groups[g]
            rows[group.name] = {}
            for leaf in group.leaves:
                one = fused.Arriving(
                    arriving[group.name].rows[leaf.name], arriving[group.name].block_ids, arriving[group.name].count
                )
                layers = range(leaf.layers or 1)
                sent = []
                for layer in layers:
                    where = None if leaf.layers is None else layer
                    x, caches[leaf.name] = fused.restore(x, caches[leaf.name], fused.fetch(one, layer), layer=where)
                    sent.append(
                        fused.collect(caches[leaf.name], leaving[group.name], layer=where, as_words=self._as_words)
                    )
                rows[group.name][leaf.name] = sent[0] if leaf.layers is None else sent
        return caches, rows

    def run(self, caches, arriving, leaving):
        return self._step(caches, arriving, leaving)

    def step(self, request, tables, num_tokens, **how):
        step = self.steps.begin(self.caches, request, tables, num_tokens, **how)
        caches, rows = self.run(step.caches, step.arriving, step.leaving)
        self.caches, jobs = self.steps.end(step, caches, rows)
        return jobs

    def close(self):
        self.steps.close()
        self.offloader.close()


def tables_for(engine, seed):
    """Disjoint blocks for the groups, which may share leaves; a state lies at each block that ends a step."""
    rng = np.random.default_rng(seed)
    order = iter(rng.permutation(NUM_BLOCKS).tolist())
    return {
        engine.layout.groups[g].name: np.array(
            [next(order) for _ in range(-(-(NUM_TOKENS + 1) // engine.layout.groups[g].tokens_per_block))]
        )
        for g in engine.layout.cached
    }


def prompt(seed):
    return np.random.default_rng(seed).integers(0, 1000, NUM_TOKENS)


def store_and_restore(engine):
    """Stores a prompt's cache in one step and restores it elsewhere in the next; checks every byte."""
    tokens, first = prompt(1), tables_for(engine, 1)
    engine.offloader.lookup("a", tokens)
    (stored,) = engine.step("a", first, NUM_TOKENS, checkpoint=True)
    assert engine.offloader.wait(stored).ok
    written = {name: as_bytes(array) for name, array in engine.caches.items()}
    rng = np.random.default_rng(3)
    for name, leaf in engine.layout.leaves.items():
        noise = rng.integers(0, 256, written[name].size, np.uint8).view(leaf.dtype).reshape(engine.caches[name].shape)
        engine.caches[name] = jax.device_put(noise)
    before = {name: as_bytes(array) for name, array in engine.caches.items()}
    look = engine.offloader.lookup("b", [*tokens, 1])
    assert look.hit_tokens > 0
    second = tables_for(engine, 2)
    jobs = engine.step("b", second, look.hit_tokens, load=True)
    assert [engine.offloader.wait(job).ok for job in jobs] == [True, True]
    expected = {name: rows.copy() for name, rows in before.items()}
    per_chunk = dict(zip(engine.layout.names, engine.offloader.ledger.units.units_per_chunk, strict=True))
    units = {name: np.zeros((len(chunks), per_chunk[name] or 1), np.int32) for name, chunks in look.load.items()}
    for g in engine.layout.cached:
        group = engine.layout.groups[g]
        wanted = kvjax.plan_load(
            engine.offloader.chunking,
            kvjax.Hit(look.hit_tokens, look.load, ()),
            {name: np.asarray(table) for name, table in second.items()},
            unit_ids=units,
        )
        for moves in wanted.moves:
            if moves.group_idx != g:
                continue
            target = moves.block_ids[: moves.num_chunks]
            places = {block: place for place, block in enumerate(second[group.name].tolist())}
            for block in target[target >= 0].tolist():
                for leaf in group.leaves:
                    axis = len(stack(leaf))
                    source = first[group.name][places[block]]
                    np.moveaxis(expected[leaf.name], axis, 0)[block] = np.moveaxis(written[leaf.name], axis, 0)[source]
    for name, array in engine.caches.items():
        assert np.array_equal(as_bytes(array), expected[name]), name
    assert any(not np.array_equal(expected[name], before[name]) for name in expected)
    engine.offloader.check_integrity()


@pytest.mark.parametrize("name", sorted(layouts.ALL))
@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_what_leaves_in_a_step_arrives_in_another(name, transfer):
    engine = Engine(layouts.ALL[name], transfer=transfer)
    store_and_restore(engine)
    engine.close()


@pytest.mark.parametrize(("arriving", "leaving"), [((0, 1), (0, 64)), ((0, 64), (0, 1)), ((0,), (0,))])
def test_what_no_bucket_holds_moves_on_its_own(arriving, leaving):
    engine = Engine(layouts.GEMMA, arriving=arriving, leaving=leaving)
    store_and_restore(engine)
    engine.close()


def test_rows_may_be_words_of_the_elements_width():
    engine = Engine(layouts.EVERYTHING, as_words=True)
    store_and_restore(engine)
    engine.close()


def test_nothing_compiles_after_warm_up(compilations):
    engine = Engine(layouts.GEMMA, arriving=(0, 4, 64), leaving=(0, 64))
    before = {name: as_bytes(array) for name, array in engine.caches.items()}
    engine.caches = engine.steps.warm_up(engine.caches, lambda *given: engine.run(*given)[0])
    assert all(np.array_equal(as_bytes(array), before[name]) for name, array in engine.caches.items())
    assert engine.compiled == 6
    compilations.clear()
    tokens = prompt(1)
    engine.offloader.lookup("a", tokens)
    for stop in (8, 20, 40):
        engine.step("a", tables_for(engine, 1), stop, checkpoint=True)
    engine.offloader.wait()
    for length in (10, 22, 40):
        hit = engine.offloader.lookup("b", [*tokens[:length], 1]).hit_tokens
        engine.step("b", tables_for(engine, 2), hit, load=True)
        engine.offloader.finish("b")
    assert compilations == []
    assert engine.compiled == 6
    engine.close()


def test_a_step_that_was_abandoned_leaves_no_trace():
    engine = Engine(layouts.GEMMA)
    tokens, tables = prompt(1), tables_for(engine, 1)
    engine.offloader.lookup("a", tokens)
    step = engine.steps.begin(engine.caches, "a", tables, NUM_TOKENS, checkpoint=True)
    engine.steps.abandon(step)
    assert engine.offloader.lookup("b", tokens).hit_tokens == 0
    with pytest.raises(ValueError, match="`step` must not be ended twice"):
        engine.steps.abandon(step)
    with pytest.raises(ValueError, match="`step` must not be ended twice"):
        engine.steps.end(step, engine.caches, {})
    step = engine.steps.begin(engine.caches, "a", tables, NUM_TOKENS, checkpoint=True)
    caches, rows = engine.run(step.caches, step.arriving, step.leaving)
    engine.caches, (stored,) = engine.steps.end(step, caches, rows)
    with pytest.raises(ValueError, match="`step` must not be ended twice"):
        engine.steps.end(step, engine.caches, rows)
    assert engine.offloader.wait(stored).ok
    hit = engine.offloader.lookup("c", [*tokens, 1]).hit_tokens
    assert hit
    step = engine.steps.begin(engine.caches, "c", tables_for(engine, 2), hit, load=True)
    engine.steps.abandon(step)
    engine.offloader.check_integrity()
    assert engine.offloader.lookup("d", [*tokens, 1]).hit_tokens == hit
    engine.close()


def test_a_step_stores_the_bytes_that_a_store_does_padding_too():
    held = []
    for fused_steps in (False, True):
        engine = Engine(layouts.HYBRID)
        tables = tables_for(engine, 1)
        engine.offloader.mover.host_memory.bytes[:] = 0xAB
        engine.offloader.lookup("a", prompt(1))
        if fused_steps:
            engine.step("a", tables, NUM_TOKENS, checkpoint=True)
        else:
            engine.caches, _ = engine.offloader.store(engine.caches, "a", tables, NUM_TOKENS, checkpoint=True)
        engine.offloader.wait()
        held.append(engine.offloader.mover.host_memory.bytes.copy())
        assert sum(count or 0 for count in engine.offloader.ledger.units.padding_bytes) > 0
        engine.close()
    assert np.array_equal(*held)


def test_rows_that_do_not_fit_are_refused_and_the_step_stays_open():
    engine = Engine(layouts.GEMMA)
    engine.offloader.lookup("a", prompt(1))
    step = engine.steps.begin(engine.caches, "a", tables_for(engine, 1), NUM_TOKENS, checkpoint=True)
    caches, rows = engine.run(step.caches, step.arriving, step.leaving)
    with pytest.raises(ValueError, match=r"`rows` must hold group 'full', of which blocks leave, got \[\]"):
        engine.steps.end(step, caches, {})
    with pytest.raises(ValueError, match=r"`rows` of group 'full' must hold leaf 'full.v', got 'full.k'"):
        engine.steps.end(step, caches, rows | {"full": {"full.k": rows["full"]["full.k"]}})
    short = {name: array[:3] for name, array in rows["full"].items()}
    with pytest.raises(ValueError, match=r"`rows` of leaf 'full.k' must be 1 layers of float32\[64, 8, 1, 4\], as "):
        engine.steps.end(step, caches, rows | {"full": short})
    _, (stored,) = engine.steps.end(step, caches, rows)
    assert engine.offloader.wait(stored).ok
    engine.close()


def test_a_step_that_fails_on_the_way_to_the_pool_stores_nothing(monkeypatch):
    engine = Engine(layouts.GEMMA)
    tokens = prompt(1)
    engine.offloader.lookup("a", tokens)
    for rows in engine.steps._rows.values():
        monkeypatch.setattr(rows, "to_pool", lambda *_: 1 / 0)
    (stored,) = engine.step("a", tables_for(engine, 1), NUM_TOKENS, checkpoint=True)
    assert engine.offloader.wait(stored).ok is False
    assert engine.offloader.lookup("b", tokens).hit_tokens == 0
    engine.close()


def test_bad_arguments_change_nothing():
    engine = Engine(layouts.GEMMA)
    engine.offloader.lookup("a", prompt(1))
    with pytest.raises(ValueError, match=r"`num_tokens` must be at most the 40 tokens that request 'a' has, got 41"):
        engine.steps.begin(engine.caches, "a", tables_for(engine, 1), 41)
    with pytest.raises(ValueError, match="must cover 40 tokens"):
        engine.steps.begin(engine.caches, "a", {"full": [1], "local": [1]}, 40, load=True)
    engine.offloader.check_integrity()
    for buckets in ((8,), (0, 8, 8), (0, -1), (0, 1.5), ()):
        with pytest.raises(ValueError, match=r"`arriving_buckets`"):
            FusedSteps(engine.offloader, arriving_buckets=buckets)
    engine.close()


def test_a_pinned_pool_is_refused():
    engine = Engine(layouts.UNIFORM)
    mover = engine.offloader.mover
    mover._transport = DirectTransport(
        mover.caches, engine.offloader.chunking, engine.offloader.ledger.units, num_units=100, staging_units=64
    )
    with pytest.raises(ValueError, match=r"`offloader` must have been made with `transfer='staged'`"):
        FusedSteps(engine.offloader)
    engine.close()


def test_steps_of_others_and_closed_ones_are_refused():
    one, other = Engine(layouts.GEMMA), Engine(layouts.GEMMA)
    for engine in (one, other):
        engine.offloader.lookup("a", prompt(1))
    step = one.steps.begin(one.caches, "a", tables_for(one, 1), NUM_TOKENS, checkpoint=True)
    caches, rows = one.run(step.caches, step.arriving, step.leaving)
    before = other.offloader.mover.host_memory.bytes.copy()
    for refused in (other.steps.abandon, lambda step: other.steps.end(step, caches, rows)):
        with pytest.raises(ValueError, match="`step` must be one that `begin` of these fused steps returned"):
            refused(step)
    assert np.array_equal(other.offloader.mover.host_memory.bytes, before)
    one.steps.close()
    for refused in (
        lambda: one.steps.end(step, caches, rows),
        lambda: one.steps.begin(caches, "a", tables_for(one, 1), NUM_TOKENS),
    ):
        with pytest.raises(ValueError, match="fused steps must not be used after `close`"):
            refused()
    one.steps.abandon(step)
    one.offloader.finish("a")
    assert one.offloader.stats().bytes_held == 0
    one.close()
    with pytest.raises(ValueError, match="an offloader must not be used after `close`"):
        one.steps.begin(caches, "a", tables_for(one, 1), NUM_TOKENS)
    other.close()


@pytest.mark.parametrize("rows", [None, 3, {}, {"full": {}}, {"full": {"full.k": [], "full.v": []}}, {"full": None}])
def test_rows_of_the_wrong_kind_are_refused_in_one_sentence(rows):
    engine = Engine(layouts.GEMMA)
    engine.offloader.lookup("a", prompt(1))
    step = engine.steps.begin(engine.caches, "a", tables_for(engine, 1), NUM_TOKENS, checkpoint=True)
    with pytest.raises(ValueError, match=r"^`rows` [^\n]*, got [^\n]+$"):
        engine.steps.end(step, engine.caches, rows)
    engine.steps.abandon(step)
    engine.close()


@pytest.mark.parametrize("buckets", [None, 5, "08"])
def test_buckets_must_be_a_sequence(buckets):
    engine = Engine(layouts.UNIFORM)
    with pytest.raises(ValueError, match=r"`leaving_buckets` must be a list or tuple of numbers of blocks, got "):
        FusedSteps(engine.offloader, leaving_buckets=buckets)
    engine.close()
