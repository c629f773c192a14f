"""`kvjax bench miss`: what it prints, that its steps do what they say, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cli import bench_miss_model as model
from kvjax.cli import bench_miss_run
from kvjax.cli.bench_miss_run import Decoding
from tests.cli.command import document, kvjax, refusal

SMALL = ("bench", "miss", "--steps", 2, "--layers", 6, "--width", 40, "--prompt-tokens", 40)
BLOCK_BYTES = 6 * 16 * 2 * 256 * 4  # of six layers


def test_one_document_holds_every_figure():
    found = document(*SMALL)
    assert list(found) == [
        *("bench", "steps", "backend", "device", "jax"),
        *("ms_per_step_off", "ms_per_step_on", "cost_percent", "calls_ms_per_step", "calls_percent"),
        *("ms_per_step_store", "store_cost_percent", "store_bytes", "lookup_ms", "lookup_percent"),
        *("layers", "width", "prompt_tokens", "store_tokens", "machine", "num_cpus"),
    ]
    assert (found["bench"], found["steps"], found["jax"]) == ("miss", 2, jax.__version__)
    assert (found["layers"], found["width"], found["prompt_tokens"], found["store_tokens"]) == (6, 40, 40, 16)
    assert found["store_bytes"] == BLOCK_BYTES
    for figure, milliseconds in (
        ("cost_percent", found["ms_per_step_on"] - found["ms_per_step_off"]),
        ("calls_percent", found["calls_ms_per_step"]),
        ("store_cost_percent", found["ms_per_step_store"] - found["ms_per_step_off"]),
        ("lookup_percent", found["lookup_ms"]),
    ):
        assert found[figure] == pytest.approx(100 * milliseconds / found["ms_per_step_off"], rel=0.01, abs=0.1)


def test_a_larger_store_moves_the_chunks_of_more_tokens():
    assert document(*SMALL, "--store-tokens", 40)["store_bytes"] == 2 * BLOCK_BYTES


def test_people_get_a_row_per_figure():
    ran = kvjax(*SMALL)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"cpu (cpu), jax {jax.__version__}, 6 layers of width 40, medians of 2 steps"
    assert [line.split("  ")[0] for line in lines[3:]] == [
        "decode step, no offloader",
        "decode step, offloader without a hit",
        "of it inside the offloader's calls",
        "decode step, store of 192 KiB under way",
        "lookup of 40 tokens, a miss",
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--steps", 0), "`--steps` must be a positive int, got 0"),
        (("--layers", 5), "`--layers` must be an int of at least 6, got 5"),
        (("--width", 0), "`--width` must be an int of at least 5, got 0"),
        (("--prompt-tokens", -3), "`--prompt-tokens` must be a positive int, got -3"),
        (("--store-tokens", 15), "`--store-tokens` must be an int of at least 16, got 15"),
        (
            ("--store-tokens", 48, "--prompt-tokens", 40),
            "`--store-tokens` must be at most `--prompt-tokens`, 40, got 48",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(argv, words):
    assert refusal("bench", "miss", *argv) == f"kvjax bench: error: {words}"


@pytest.fixture
def decoding():
    made = Decoding(6, 40, prompt_tokens=40, store_tokens=32, max_steps=4)
    with made.offloader:
        yield made


def test_a_step_with_the_offloader_stores_nothing_and_never_hits(decoding):
    before = decoding.offloader.stats()
    for position in (40, 41, 42):
        assert decoding._position == position
        step, calls = decoding.step_with_offloader()
        assert 0 < calls < step
    decoding.lookup()
    after = decoding.offloader.stats()
    assert after.chunks_stored == before.chunks_stored
    assert (after.lookups, after.hit_tokens, after.open_requests) == (before.lookups + 1, 0, 1)


def test_a_step_beside_a_store_stores_the_prefix(decoding):
    before = decoding.offloader.stats()
    _, result = decoding.step_beside_store()
    after = decoding.offloader.stats()
    assert (result.ok, result.num_bytes) == (True, 2 * BLOCK_BYTES)
    assert after.bytes_stored == before.bytes_stored + 2 * BLOCK_BYTES
    assert after.open_requests == 1


def test_a_store_that_moves_nothing_stops_the_benchmark(decoding):
    decoding._store_tokens = 8  # no chunk is complete
    with pytest.raises(RuntimeError, match="a store of 8 tokens must move bytes, got JobResult"):
        decoding.step_beside_store()


def test_a_hit_stops_the_benchmark(decoding):
    decoding._rng = Same()
    decoding._begin("first", 40)
    decoding._caches, job = decoding.offloader.store(decoding._caches, "first", decoding._tables, 40)
    decoding.offloader.wait(job)
    with pytest.raises(RuntimeError, match="a lookup of random tokens must miss, got 32 tokens"):
        decoding.lookup()


class Same:
    """A generator that always draws the same tokens."""

    def integers(self, _low, _high, count):
        return np.zeros(count, int)


def decoded(table: np.ndarray, num_steps: int) -> list[int]:
    """Greedy tokens of a small model from position 0, with the sequence's blocks at the places of `table`."""
    layout = model.layout_of(6)
    weights = model.random_weights(jax.random.key(1), 6, 40)
    caches = model.new_caches(layout, len(table), jax.devices()[0])
    step = model.decode_step()
    tokens = [7]
    for position in range(num_steps):
        token, caches = step(weights, caches, np.int32(tokens[-1]), np.int32(position), jnp.asarray(table))
        tokens.append(int(token))
    return tokens


def test_a_token_does_not_depend_on_where_blocks_lie():
    found = decoded(np.arange(4), 50)
    assert found == decoded(np.array([2, 0, 3, 1]), 50)
    assert len(set(found)) > 3


@pytest.mark.parametrize(("group", "first_read"), [(model.LOCAL, 700 - model.WINDOW_TOKENS + 1), (model.FULL, 0)])
def test_attention_reads_the_window_and_nothing_else(group, first_read):
    num_blocks = 48
    rng = np.random.default_rng(0)
    layer = model.random_weights(jax.random.key(0), 6, 40).layers[0]
    cache = rng.normal(size=(num_blocks, 16, 2, 256)).astype(np.float32)
    x = jnp.asarray(rng.normal(size=40), jnp.float32)

    def mixed(changed: int) -> np.ndarray:
        content = cache.copy()
        content.reshape(-1, 2, 256)[changed] += 9
        out, updated = model._attend(layer, x, jnp.int32(700), jnp.asarray(content), jnp.arange(num_blocks), group)
        written = np.flatnonzero((np.asarray(updated) != content).reshape(-1, 512).any(axis=1))
        assert written.tolist() == [700]
        return np.asarray(out)

    same = mixed(767)  # after the token
    for changed in (first_read - 1, 700, 701):
        if changed >= 0:
            assert np.array_equal(mixed(changed), same)
    for changed in (first_read, first_read + 1, 699):
        assert not np.array_equal(mixed(changed), same)


def test_every_sixth_layer_is_full():
    layout = model.layout_of(13)
    assert [(group.name, group.num_layers, [leaf.name for leaf in group.leaves]) for group in layout.groups] == [
        ("full", 2, ["layer5", "layer11"]),
        ("local", 11, [f"layer{i}" for i in range(13) if i % 6 != 5]),
    ]


def test_figures_leave_the_round_that_warms_up_out(monkeypatch):
    """The first round compiles: its times are a thousand seconds here."""
    rounds = {"off": iter([1000.0, 2.0, 4.0, 6.0]), "on": iter([1000.0, 5.0, 4.4, 3.0])}

    monkeypatch.setattr(Decoding, "step", lambda _: next(rounds["off"]))
    monkeypatch.setattr(Decoding, "step_with_offloader", lambda _: (next(rounds["on"]), 0.2))
    found = bench_miss_run.figures(6, 40, steps=3, prompt_tokens=16, store_tokens=16)
    assert (found["ms_per_step_off"], found["ms_per_step_on"], found["cost_percent"]) == (4000.0, 4400.0, 10.0)
    assert (found["calls_ms_per_step"], found["calls_percent"]) == (200.0, 5.0)
