"""What a sequence costs, on the device and on the host."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import CacheLayout, ChunkedLocal, FullAttention, GroupSpec, Recurrent, Scratch, SlidingWindow
from kvjax import resolve_chunking as resolve
from kvjax.accounting import (
    Checkpoints,
    HostAccount,
    bytes_per_token,
    bytes_per_token_growing,
    checkpoint_bytes,
    device_bytes,
    distinct_shards,
    state_bytes,
    window_cap_bytes,
)
from kvjax.checkpoints import fixed_bytes_per_checkpoint, growing_bytes_per_token
from kvjax.chunking import Chunking
from kvjax.packing import cut_into_units, tokens_that_fit
from tests.oracles import accounting_model as model
from tests.oracles.layouts import chunkings

KV = 4096  # bytes of a token in one layer
GEMMA = CacheLayout(
    [
        GroupSpec("full", FullAttention(), 16, block_bytes=16 * 5 * KV, num_layers=5),
        GroupSpec("local", SlidingWindow(1024), 16, block_bytes=16 * 29 * KV, num_layers=29),
    ]
)
ALL_KINDS = CacheLayout(
    [
        GroupSpec("full", FullAttention(), 8, block_bytes=80),
        GroupSpec("local", SlidingWindow(20), 4, block_bytes=40),
        GroupSpec("scout", ChunkedLocal(32), 8, block_bytes=80),
        GroupSpec("state", Recurrent(), 16, block_bytes=1000),
        GroupSpec("ring", Scratch(), 4, block_bytes=7),
    ]
)
UNITS = st.sampled_from([1, 4, 16])


def account(cut: Chunking, rule: str, every: int | None = None, **options) -> HostAccount:
    units = cut_into_units(cut, options.pop("unit_bytes", 1))
    return HostAccount(cut, units, Checkpoints(rule, every if rule == "every" else None), **options)


def test_a_small_gemma_has_the_published_numbers():
    """29 layers of 1,024 tokens of 4,096 B: 121,634,816 B, however long the sequence; 20,480 B for each token."""
    full, local = GEMMA.groups
    assert (bytes_per_token(full), window_cap_bytes(full)) == (20480, None)
    assert (bytes_per_token(local), window_cap_bytes(local)) == (29 * KV, 121_634_816)
    assert bytes_per_token_growing(GEMMA) == 20480
    assert device_bytes(GEMMA, 131_072) == {"full": 131_072 * 20480, "local": 121_634_816}


def test_figures_of_every_kind():
    figures = [(bytes_per_token(g), window_cap_bytes(g), state_bytes(g)) for g in ALL_KINDS.groups]
    assert figures == [(10, None, None), (10, 200, None), (10, 320, None), (None, None, 1000), (None, None, None)]
    assert bytes_per_token(GroupSpec("a", FullAttention(), 3, block_bytes=64)) == Fraction(64, 3)


@given(st.integers(1, 200))
def test_device_blocks_are_those_of_the_tokens_read_and_of_the_last_one(tokens):
    """The last token is at `tokens - 1`; it is written beside what it reads."""
    last = tokens - 1
    first = {"full": 0, "local": max(0, tokens - 20), "scout": last // 32 * 32}
    blocks = {
        name: len({t // size for t in range(first[name], tokens)}) for name, size in zip(first, (8, 4, 8), strict=True)
    }
    expected = {"full": 80 * blocks["full"], "local": 40 * blocks["local"], "scout": 80 * blocks["scout"]}
    assert device_bytes(ALL_KINDS, tokens) == expected | {"state": 1000, "ring": 0}


@settings(max_examples=40, deadline=None)
@given(chunkings(), st.integers(1, 30), st.integers(0, 45), UNITS)
def test_cost_of_one_request_equals_its_chunks_in_whole_units(cut: Chunking, every: int, tokens: int, unit: int):
    names = [cut.layout.names[g] for g in cut.layout.cached]
    sizes = {name: -(-(cut.chunk_bytes[cut.layout.names.index(name)] or 0) // unit) * unit for name in names}
    for rule in ("every", "end"):
        listed = model.checkpoints_of(tokens, every if rule == "every" else None)
        chunks = model.stored_chunks(cut, listed)
        before = model.stored_chunks(cut, listed[:-1])
        cost = account(cut, rule, every, unit_bytes=unit).cost(tokens)
        assert cost.num_bytes == cost.growing_bytes + cost.fixed_bytes == sum(sizes[n] * len(chunks[n]) for n in names)
        for name in names:
            full = isinstance(cut.layout.groups[cut.layout.names.index(name)].kind, FullAttention)
            fixed = 0 if full else sizes[name] * len(chunks[name] - before[name])
            assert (cost.growing[name] + cost.fixed[name], cost.fixed[name]) == (sizes[name] * len(chunks[name]), fixed)
    dense = account(cut, "dense", unit_bytes=unit).cost(tokens)
    assert dense.growing == {
        name: sizes[name] * (tokens // (cut.tokens_per_chunk[cut.layout.names.index(name)] or 1)) for name in names
    }
    assert dense.fixed_bytes == 0


@settings(max_examples=60, deadline=None)
@given(chunkings(), st.integers(1, 30), st.integers(0, 300), st.integers(1, 60))
def test_fewer_checkpoints_never_cost_more(cut: Chunking, every: int, budget: int, tokens: int):
    dense, regular, end = (account(cut, rule, every) for rule in ("dense", "every", "end"))
    assert end.cost(tokens).num_bytes <= regular.cost(tokens).num_bytes <= dense.cost(tokens).num_bytes
    assert end.bytes_per_token() <= regular.bytes_per_token() <= dense.bytes_per_token()
    held = [found if (found := one.longest(budget)) is not None else 2**62 for one in (dense, regular, end)]
    assert held == sorted(held)


@settings(max_examples=60, deadline=None)
@given(chunkings(), st.integers(0, 300), UNITS)
def test_dense_is_the_prefix_whose_chunks_fit(cut: Chunking, budget: int, unit: int):
    units = cut_into_units(cut, unit)
    dense = account(cut, "dense", unit_bytes=unit)
    assert dense.longest(budget) == tokens_that_fit(cut, units, budget)
    assert account(cut, "end", unit_bytes=1).bytes_per_token() == growing_bytes_per_token(cut)


def test_gemma_on_64_gib():
    """The figures of docs/accounting.md."""
    cut = resolve(GEMMA)
    budget = 64 * 2**30
    every = account(cut, "every", 23_760, unit_bytes=65536)
    end = account(cut, "end", unit_bytes=65536)
    assert account(cut, "dense", unit_bytes=65536).longest(budget) == 493_455
    assert (every.longest(budget), end.longest(budget)) == (2_684_319, 3_349_519)
    assert end.cost(32_768).fixed == {"full": 0, "local": 121_634_816}
    assert end.cost(32_768).growing == {"full": 32_768 * 20480, "local": 0}
    assert every.cost(32_768).growing["local"] == 121_634_816
    assert every.bytes_per_token() == 20480 + Fraction(121_634_816, 23_760)
    assert (every.requests(budget, 32_768), end.requests(budget, 32_768)) == (75, 86)
    assert every.cost(32_768).shares()["full"] == pytest.approx(0.734, abs=1e-3)


def test_a_budget_holds_requests_while_their_units_fit():
    cut = resolve(GEMMA)
    end = account(cut, "end", unit_bytes=65536)
    of_one = end.cost(5000).num_bytes
    assert (end.requests(of_one, 5000), end.requests(of_one - 1, 5000), end.requests(7 * of_one, 5000)) == (1, 0, 7)
    assert end.requests(0, 15) is None  # no chunk is complete: nothing is stored


def test_listed_checkpoints_are_those_and_the_end():
    cut = resolve(GEMMA)
    listed = HostAccount(cut, cut_into_units(cut, 65536), Checkpoints("listed", positions=(5000, 1000, 5000)))
    chunks = model_windows(cut, [1000, 5000, 8000])
    assert listed.cost(8000).fixed["local"] == chunks * 29 * 65536
    assert listed.cost(8000).growing == {"full": 8000 * 20480, "local": 0}
    assert listed.cost(4000).fixed["local"] == model_windows(cut, [1000, 4000]) * 29 * 65536
    with pytest.raises(ValueError, match="listed checkpoints belong to a request of a given length"):
        listed.longest(2**30)


def model_windows(cut: Chunking, checkpoints: list[int]) -> int:
    """Chunks of the windows before these checkpoints, all multiples of 8: a window is 1,024 tokens."""
    tokens = {t // 16 for end in checkpoints for t in range(max(0, end // 16 * 16 - 1023), end // 16 * 16)}
    same = {t // 16 for end in checkpoints if end % 16 == 0 for t in range(max(0, end - 1 - 1023), end - 1)}
    return len(tokens | same)


def test_ranks_that_hold_the_same_are_kept_once():
    """Eight ranks, of which two differ in the full group's heads; the latent of the other is the same on all."""
    layout = CacheLayout(
        [
            GroupSpec("heads", FullAttention(), 16, block_bytes=1600),
            GroupSpec("latent", FullAttention(), 16, block_bytes=160),
            GroupSpec("w", SlidingWindow(32), 16, block_bytes=320),
        ]
    )
    cut = resolve(layout)
    units = cut_into_units(cut, 160)
    shards = distinct_shards(layout, 8, {"heads": 2, "latent": 1})
    assert shards == {"heads": 2, "latent": 1, "w": 8}
    whole = HostAccount(cut, units, Checkpoints("end"), shards=shards)
    assert whole.cost(1600).growing == {"heads": 2 * 160_000, "latent": 16_000, "w": 0}
    assert whole.cost(1600).fixed["w"] == 8 * checkpoint_bytes(cut, units, dict.fromkeys(shards, 1))["w"]
    assert bytes_per_token_growing(layout, shards) == 210
    dense = HostAccount(cut, units, Checkpoints("dense"), shards=shards)
    assert dense.longest(160 * (20 + 1 + 16) * 3) == 63


def test_a_checkpoint_costs_whole_units_of_what_it_requires():
    cut = resolve(ALL_KINDS)
    exact = checkpoint_bytes(cut, cut_into_units(cut, 1), distinct_shards(ALL_KINDS, 1, None))
    assert exact == fixed_bytes_per_checkpoint(cut)
    padded = checkpoint_bytes(cut, cut_into_units(cut, 64), distinct_shards(ALL_KINDS, 3, {"state": 2}))
    assert padded == {
        "full": 0,
        "local": exact["local"] // 40 * 64 * 3,
        "scout": exact["scout"] // 80 * 128 * 3,
        "state": exact["state"] // 1000 * 1024 * 2,
        "ring": 0,
    }


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Checkpoints("often"), r"`rule` must be 'dense', 'every', 'end' or 'listed', got 'often'"),
        (lambda: Checkpoints("every"), r"`checkpoint_tokens` must be given for the rule 'every' and for no other"),
        (lambda: Checkpoints("end", 16), r"`checkpoint_tokens` must be given for the rule 'every' and for no other"),
        (lambda: Checkpoints("every", 0), r"`checkpoint_tokens` must be a positive int, got 0"),
        (lambda: Checkpoints("every", -16), r"`checkpoint_tokens` must be a positive int, got -16"),
        (lambda: Checkpoints("listed"), r"`positions` must be given for the rule 'listed'"),
        (lambda: Checkpoints("end", positions=(1,)), r"`positions` must be given for the rule 'listed'"),
        (lambda: Checkpoints("listed", positions=(5, 0)), r"`checkpoints` must be a positive int, got 0"),
        (lambda: Checkpoints("listed", positions=(5, -1)), r"`checkpoints` must be a positive int, got -1"),
        (
            lambda: Checkpoints("listed", positions=(5, 101)).check_within(100),
            r"`checkpoints` must lie within the request of 100 tokens, got 101, past its end",
        ),
        (lambda: distinct_shards(GEMMA, 0, None), r"`ranks` must be a positive int, got 0"),
        (lambda: distinct_shards(GEMMA, 2, {"full": 3}), r"`distinct` of group 'full' must be at most the 2 ranks"),
        (lambda: distinct_shards(GEMMA, 2, {"full": 0}), r"`distinct` of group 'full' must be a positive int, got 0"),
        (lambda: distinct_shards(GEMMA, 2, {"other": 1}), r"`distinct` must name groups of the layout .* got 'other'"),
        (lambda: device_bytes(GEMMA, 0), r"`num_tokens` must be a positive int, got 0"),
        (lambda: account(resolve(GEMMA), "end").cost(-1), r"`num_tokens` must be a non-negative int, got -1"),
        (lambda: account(resolve(GEMMA), "end").longest(-1), r"`budget_bytes` must be a non-negative int, got -1"),
        (lambda: account(resolve(GEMMA), "dense").longest(1.5), r"`budget_bytes` must be a non-negative int, got 1.5"),
        (lambda: account(resolve(GEMMA), "end").requests(2**63, 5), r"`budget_bytes` must be below"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_checkpoint_at_the_end_is_within():
    Checkpoints("listed", positions=(100, 1, 100)).check_within(100)


def test_costs_of_100_million_tokens_are_exact():
    """Counts are whole numbers far past what floats hold."""
    cut = resolve(GEMMA)
    end = account(cut, "end")
    tokens = 10**8 + 16
    assert end.cost(tokens).growing_bytes == 20480 * tokens // 16 * 16
    assert end.longest(end.cost(tokens).num_bytes) in range(tokens, tokens + 16)
    assert isinstance(end.longest(2**50), int)
    assert not isinstance(end.cost(tokens).num_bytes, np.integer)
