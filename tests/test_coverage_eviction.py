"""Ranks of eviction, blocks of a load and junctions, against the literal model."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvjax import coverage, retention
from kvjax.chunking import Chunking
from kvjax.groups import FullAttention, Recurrent, SlidingWindow
from tests.oracles import law
from tests.oracles.layouts import chunkings, cut, group, instances

# --- eviction


@st.composite
def resident_prefixes(draw: st.DrawFn) -> tuple[Chunking, dict[int, np.ndarray]]:
    """A request's resident chunks by group index, ascending, with holes."""
    instance = draw(instances())
    layout = instance.chunking.layout
    return instance.chunking, {
        g: np.array(sorted(set(instance.present.get(layout.groups[g].name, []))), np.int64) for g in layout.cached
    }


def restorable(chunking: Chunking, chunks: dict[int, np.ndarray], below: int) -> list[int]:
    named = {chunking.layout.groups[g].name: indices.tolist() for g, indices in chunks.items()}
    return law.restorable(chunking, law.held_by_chunks(chunking, named), below)


def searched_rank(chunking: Chunking, g: int, chunk_idx: int, positions: list[int]) -> int:
    """The smallest restorable position that requires the chunk or lies above its first token or at its state."""
    spec = chunking.layout.groups[g]
    held = law.held_by_chunk(spec.kind, chunking.tokens_per_chunk[g] or 0, chunk_idx)
    wanting = [
        p for p in positions if p and (p > min(held) or law.required(spec.kind, spec.lookahead_tokens, p) & held)
    ]
    return min(wanting, default=np.iinfo(np.int64).max)


def end_of(chunking: Chunking, chunks: dict[int, np.ndarray]) -> int:
    """The token after the last one that any chunk covers."""
    return max((int(i[-1] + 1) * (chunking.tokens_per_chunk[g] or 0) for g, i in chunks.items() if len(i)), default=0)


@settings(max_examples=700, deadline=None)
@given(resident_prefixes())
def test_ranks_equal_a_search(prefix):
    chunking, chunks = prefix
    positions = restorable(chunking, chunks, end_of(chunking, chunks) + 1)
    for g, ranks in retention.eviction_ranks(chunking, chunks).items():
        assert ranks.tolist() == [searched_rank(chunking, g, int(i), positions) for i in chunks[g]]


@settings(max_examples=700, deadline=None)
@given(resident_prefixes())
@example((cut(group("state", Recurrent(), 16), blocks=3), {0: np.arange(3)}))
def test_evicting_from_the_highest_rank_down_leaves_every_position_below_it(prefix):
    """After each step the positions below the evicted rank are those of the start, no other has come, and each chunk
    that is left is below or part of one of them."""
    chunking, chunks = prefix
    end = end_of(chunking, chunks) + 1
    before = restorable(chunking, chunks, end)
    ranks = retention.eviction_ranks(chunking, chunks)
    for rank in sorted({int(r) for of_group in ranks.values() for r in of_group}, reverse=True):
        left = {g: indices[ranks[g] < rank] for g, indices in chunks.items()}
        after = restorable(chunking, left, end)
        assert [p for p in after if p < rank] == [p for p in before if p < rank]
        assert set(after) <= set(before)
        usable = [p for p in before if p < rank]
        assert all(searched_rank(chunking, g, int(i), usable) < rank for g, kept in left.items() for i in kept)


@settings(max_examples=400, deadline=None)
@given(resident_prefixes())
def test_a_chunk_is_of_use_if_some_position_requires_it(prefix):
    """And of no use if none does, but for chunks whose rank is a position that requires nothing."""
    chunking, chunks = prefix
    positions = [p for p in restorable(chunking, chunks, end_of(chunking, chunks) + 1) if p]
    for g, ranks in retention.eviction_ranks(chunking, chunks).items():
        spec = chunking.layout.groups[g]
        useful = retention.of_use(chunking, g, chunks[g], ranks).tolist()
        for chunk_idx, rank, found in zip(chunks[g].tolist(), ranks.tolist(), useful, strict=True):
            held = law.held_by_chunk(spec.kind, chunking.tokens_per_chunk[g] or 0, chunk_idx)
            wanted = any(law.required(spec.kind, spec.lookahead_tokens, p) & held for p in positions)
            nothing = rank < retention.UNRANKED and not law.required(spec.kind, spec.lookahead_tokens, rank)
            assert found == wanted or (found and nothing)


def test_the_tail_of_a_prefix_goes_first_down_to_the_state_that_still_serves():
    """Full blocks 0 to 5 of 4 tokens and states at 8 and 16: the two blocks past 16 are useless, then everything past 8
    goes at once, then the rest."""
    chunking = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 8))
    ranks = retention.eviction_ranks(chunking, {0: np.arange(6), 1: np.arange(2)})
    nothing = np.iinfo(np.int64).max
    assert ranks[0].tolist() == [8, 8, 16, 16, nothing, nothing]
    assert ranks[1].tolist() == [8, 16]


# --- blocks, and junctions


@settings(max_examples=700, deadline=None)
@given(chunkings(), st.integers(0, 40), st.integers(0, 40))
def test_blocks_to_load_hold_a_needed_token_that_the_device_lacks(chunking, position, on_device):
    for g in chunking.layout.cached:
        spec, blocks_per_chunk = chunking.layout.groups[g], chunking.blocks_per_chunk[g] or 0
        chunks = coverage.chunks_needed(chunking, g, position)
        wanted = law.needed(spec.kind, position)
        assert chunks.tolist() == law.chunks_with(wanted, spec.kind, chunking.tokens_per_chunk[g] or 0)
        found = coverage.blocks_to_load(chunking, g, position, on_device, chunks)
        if isinstance(spec.kind, Recurrent):
            assert found.tolist() == [[True]] * len(chunks)
            continue
        missing = wanted - law.needed(spec.kind, on_device)
        for row, chunk_idx in zip(found.tolist(), chunks.tolist(), strict=True):
            first = chunk_idx * blocks_per_chunk
            tokens = [
                range(b * spec.tokens_per_block, (b + 1) * spec.tokens_per_block)
                for b in range(first, first + blocks_per_chunk)
            ]
            assert row == [not missing.isdisjoint(block) for block in tokens]


def test_a_block_that_the_device_holds_whole_is_not_loaded_with_its_chunk():
    """Blocks of 8 tokens, two per chunk, a window of 5. The device stands at 8 and holds tokens 4 to 7; a hit at 10
    needs 6 to 9: block 1 is loaded, and block 0, which may be shared, is not touched."""
    chunking = cut(group("window", SlidingWindow(5), 8), blocks=2)
    assert coverage.blocks_to_load(chunking, 0, 10, 8, np.array([0])).tolist() == [[False, True]]


@settings(max_examples=500, deadline=None)
@given(resident_prefixes(), st.integers(1, 60))
def test_a_junction_is_the_hit_of_the_full_groups_alone(prefix, num_tokens):
    chunking, chunks = prefix
    named = {chunking.layout.groups[g].name: indices.tolist() for g, indices in chunks.items()}
    resident = law.held_by_chunks(chunking, named)
    full = {spec.name for spec, _ in law.cached_groups(chunking) if isinstance(spec.kind, FullAttention)}
    expected = [p for p in range(num_tokens) if not full & set(law.refusing(chunking, resident, p))] if full else [0]
    assert retention.junction(chunking, num_tokens, chunks) == expected[-1]
