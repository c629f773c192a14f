"""What one more checkpoint costs, counted chunk by chunk, and how far apart the default puts them."""

import doctest
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings

from kvjax import ChunkedLocal, FullAttention, GroupSpec, Recurrent, Scratch, SlidingWindow, checkpoints, store_set
from kvjax.checkpoints import default_checkpoint_tokens, fixed_bytes_per_checkpoint, growing_bytes_per_token
from kvjax.chunking import Chunking, resolve_chunking
from kvjax.groups import CacheLayout
from kvjax.ledger import Ledger
from kvjax.packing import cut_into_units
from tests.oracles import law
from tests.oracles.layouts import chunkings, cut, group

GEMMA = [
    GroupSpec("global", FullAttention(), 16, block_bytes=10),
    GroupSpec("local", SlidingWindow(1024), 16, block_bytes=50),
]
HYBRID = [
    GroupSpec("full", FullAttention(), 528, block_bytes=100),
    GroupSpec("state", Recurrent(), 528, block_bytes=300),
]


def chunked(groups: list[GroupSpec], blocks: int | dict[str, int] | None = None) -> Chunking:
    return resolve_chunking(CacheLayout(groups), blocks_per_chunk=blocks)


def step_of(chunking: Chunking) -> int:
    return math.lcm(*(tokens for tokens in chunking.tokens_per_chunk if tokens))


class TestCosts:
    @settings(max_examples=200)
    @given(chunkings())
    def test_they_are_the_required_chunks_of_a_checkpoint_far_from_the_start(self, chunking):
        """The literal law, at a position where all chunks and attention chunks end, beyond every window."""
        spans = [spec.kind.chunk_tokens for spec in chunking.layout.groups if isinstance(spec.kind, ChunkedLocal)]
        step = math.lcm(step_of(chunking), *spans)
        position = -(-(2 * step_of(chunking) + 60) // step) * step
        if position > 4000:
            return
        served = law.stored_positions(chunking, position)
        for spec, tokens in law.cached_groups(chunking):
            things = frozenset().union(*(law.required(spec.kind, spec.lookahead_tokens, p) for p in served))
            cost = chunking.chunk_bytes[chunking.layout.names.index(spec.name)] or 0
            expected = 0 if spec.kind == FullAttention() else cost * len(law.chunks_with(things, spec.kind, tokens))
            assert fixed_bytes_per_checkpoint(chunking)[spec.name] == expected, spec

    def test_what_a_second_checkpoint_adds_is_its_growth_and_its_fixed_part(self):
        for groups in (GEMMA, HYBRID):
            chunking = chunked(groups)
            every = 8 * step_of(chunking) * 64
            near, far = (store_set(chunking, n * every) for n in (1, 2))
            added = sum(
                len({*far[name].tolist()} - {*near[name].tolist()}) * (size or 0)
                for name, size in zip(chunking.layout.names, chunking.chunk_bytes, strict=True)
            )
            fixed = sum(fixed_bytes_per_checkpoint(chunking).values())
            assert added == fixed + every * growing_bytes_per_token(chunking)

    def test_every_group_is_listed_and_only_windows_and_states_cost(self):
        chunking = cut(
            group("full", FullAttention(), 4, 3),
            group("ring", Scratch(), 2),
            group("window", SlidingWindow(8), 4),
            group("chunked", ChunkedLocal(16), 4),
            group("state", Recurrent(), 8),
        )
        # A lookahead of 3 lets a checkpoint at 16n serve R = S = 16n - 8: one state, and half an attention chunk.
        assert fixed_bytes_per_checkpoint(chunking) == {
            "full": 0, "ring": 0, "window": 2 * 64, "chunked": 2 * 64, "state": 64,
        }  # fmt: skip
        assert growing_bytes_per_token(chunking) == 16

    def test_blocks_per_chunk_round_a_window_up(self):
        assert fixed_bytes_per_checkpoint(chunked(GEMMA))["local"] == 64 * 50
        assert fixed_bytes_per_checkpoint(chunked(GEMMA, {"local": 48}))["local"] == 2 * 48 * 50

    def test_bytes_per_token_are_exact(self):
        groups = [*HYBRID, GroupSpec("draft", FullAttention(), 48, block_bytes=7)]
        assert growing_bytes_per_token(chunked(groups, {"full": 3})) == Fraction(100, 528) + Fraction(7, 48)

    def test_a_layout_whose_chunks_never_end_together_is_counted_as_well(self):
        primes = [GroupSpec(f"g{n}", FullAttention(), n, block_bytes=1) for n in (99991, 99989, 99971, 65537)]
        chunking = chunked([*primes, GroupSpec("window", SlidingWindow(65537), 65537, block_bytes=5)])
        assert fixed_bytes_per_checkpoint(chunking)["window"] == 10
        assert default_checkpoint_tokens(chunking) is None


class TestDefault:
    @settings(max_examples=200)
    @given(chunkings())
    def test_it_is_the_smallest_distance_over_which_the_fixed_part_is_a_quarter(self, chunking):
        found = default_checkpoint_tokens(chunking)
        fixed, growing = sum(fixed_bytes_per_checkpoint(chunking).values()), growing_bytes_per_token(chunking)
        if found is None:
            assert not fixed
            return
        step = step_of(chunking)
        assert found % step == 0
        if not growing:
            assert found - step < 4096 <= found
            return
        assert 4 * fixed <= found * growing
        assert found == step or 4 * fixed > (found - step) * growing

    @pytest.mark.parametrize(
        ("groups", "tokens"),
        [
            (GEMMA, 20480),  # 5 local layers to a global one, a window of 1024
            ([GEMMA[0], GroupSpec("local", SlidingWindow(128), 16, block_bytes=10)], 512),  # one to one, 128
            (HYBRID, 24 * 528),  # R and S each have a state of three full blocks
            ([GEMMA[0], GroupSpec("local", ChunkedLocal(8192), 16, block_bytes=30)], 98304),  # 3 to 1, 8192
        ],
    )
    def test_it_is_what_one_would_work_out(self, groups, tokens):
        assert default_checkpoint_tokens(chunked(groups)) == tokens

    @pytest.mark.parametrize(
        "groups",
        [
            [GEMMA[0]],
            [GEMMA[0], GroupSpec("one", SlidingWindow(1), 16, block_bytes=50)],
            [GEMMA[0], GroupSpec("ring", Scratch(), 4, block_bytes=50)],
        ],
    )
    def test_there_is_none_where_nothing_is_fixed(self, groups):
        assert default_checkpoint_tokens(chunked(groups)) is None

    @pytest.mark.parametrize(("groups", "tokens"), [([GEMMA[1]], 4096), ([HYBRID[1]], 8 * 528)])
    def test_without_a_full_group_it_is_some_thousand_tokens(self, groups, tokens):
        assert default_checkpoint_tokens(chunked(groups)) == tokens

    def test_a_ledger_takes_it_unless_told_otherwise(self):
        chunking = chunked(GEMMA)
        units = cut_into_units(chunking, 160)
        spacing = [
            Ledger(chunking, units, host_bytes=2**20, **options).checkpoint_tokens
            for options in ({}, {"checkpoint_tokens": "auto"}, {"checkpoint_tokens": None}, {"checkpoint_tokens": 48})
        ]
        assert spacing == [20480, 20480, None, 48]
        with pytest.raises(ValueError, match="`checkpoint_tokens` must be a positive int, 'auto' or None, got '3'"):
            Ledger(chunking, units, host_bytes=2**20, checkpoint_tokens="3")


def test_wrong_arguments_are_refused():
    for function in (fixed_bytes_per_checkpoint, growing_bytes_per_token, default_checkpoint_tokens):
        with pytest.raises(ValueError, match="`chunking` must be a Chunking"):
            function(CacheLayout(GEMMA))


def test_the_examples_are_true():
    assert doctest.testmod(checkpoints).failed == 0
