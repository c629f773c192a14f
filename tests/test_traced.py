"""The twins equal the NumPy ones and the literal model on the same inputs, and a decode loop under `scan` uses them."""

import doctest
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import ChunkedLocal, FullAttention, Recurrent, SlidingWindow, coverage, plan, traced
from kvjax.chunking import Chunking
from kvjax.retention import retained_from
from tests.oracles import law
from tests.oracles.layouts import chunkings, cut, group
from tests.oracles.plan_model import blocks_of_chunk
from tests.support import scanned_decode
from tests.support.ledgers import picks

POSITIONS = np.arange(61)
MIXED = cut(
    group("full", FullAttention(), 4),
    group("local", SlidingWindow(6), 2),
    group("state", Recurrent(), 4),
    group("chunked", ChunkedLocal(10), 2),
    blocks={"local": 2},
)


def pairs(found: tuple[jax.Array, jax.Array]) -> list[tuple[int, int]]:
    first, second = (np.asarray(one) for one in found)
    assert first.dtype == second.dtype == np.int32
    return list(zip(first.tolist(), second.tolist(), strict=True))


def lists(found: dict[str, jax.Array]) -> dict[str, list[int]]:
    assert {array.dtype for array in found.values()} == {jnp.dtype("int32")}
    return {name: array.tolist() for name, array in found.items()}


class TestLaw:
    @settings(max_examples=150)
    @given(chunkings())
    def test_needed_and_required_equal_the_law(self, chunking):
        for spec in chunking.layout.groups:
            kind = spec.kind
            assert pairs(traced.needed(kind, POSITIONS)) == [coverage.needed(kind, int(p)) for p in POSITIONS]
            assert pairs(traced.required(spec, POSITIONS)) == [coverage.required(spec, int(p)) for p in POSITIONS]

    @settings(max_examples=400)
    @given(chunkings(), st.integers(1, 8))
    def test_stored_positions_equal_the_search_and_brute_force(self, chunking, multiple):
        found = pairs(traced.stored_positions(chunking, POSITIONS, resume_multiple=multiple))
        searched = [coverage.stored_positions(chunking, int(p), resume_multiple=multiple) for p in POSITIONS]
        assert found == searched
        for p in (7, 30, 60):
            assert found[p] == law.stored_positions(chunking, p, multiple)[::-1]

    def test_stored_positions_with_several_attention_chunks_equal_the_search(self):
        """Positions past one group's complete chunks divide it, positions past both divide both."""
        for spans in ((3, 4), (6, 10), (2, 5), (4, 12)):
            chunking = cut(
                group("a", ChunkedLocal(spans[0]), 6),
                group("b", ChunkedLocal(spans[1]), 9),
                group("window", SlidingWindow(1), 3),
            )
            found = pairs(traced.stored_positions(chunking, POSITIONS))
            assert found == [coverage.stored_positions(chunking, int(p)) for p in POSITIONS]

    @settings(max_examples=150)
    @given(chunkings(), st.integers(1, 5))
    def test_what_is_retained_equals_the_numpy_one(self, chunking, multiple):
        found = lists(traced.retained_from(chunking, POSITIONS, resume_multiple=multiple))
        expected = [retained_from(chunking, int(p), resume_multiple=multiple) for p in POSITIONS]
        assert found == {name: [one[name] for one in expected] for name in chunking.layout.names}

    @settings(max_examples=150)
    @given(chunkings())
    def test_chunks_needed_and_required_equal_the_numpy_ones(self, chunking):
        for g in chunking.layout.cached:
            for twin, original in (
                (traced.chunks_needed, coverage.chunks_needed),
                (traced.chunks_required, coverage.chunks_required),
            ):
                found = pairs(twin(chunking, g, POSITIONS))
                assert [list(range(*span)) for span in found] == [
                    original(chunking, g, int(p)).tolist() for p in POSITIONS
                ]


def completed(chunking: Chunking, g: int, start: int, stop: int) -> list[int]:
    """The chunks whose last token is in the step; of a recurrent group one that ends where the step does."""
    tokens = chunking.tokens_per_chunk[g] or 0
    ends = {i: (i + 1) * tokens for i in range(stop)}
    if isinstance(chunking.layout.groups[g].kind, Recurrent):
        return [i for i in ends if start < ends[i] == stop]
    return [i for i in ends if start < ends[i] <= stop]


class TestChunks:
    @settings(max_examples=100)
    @given(chunkings(), st.lists(st.tuples(st.integers(0, 60), st.integers(-2, 40)), min_size=4, max_size=4))
    def test_completed_chunks_are_those_that_end_in_the_step(self, chunking, steps):
        starts = np.array([start for start, _ in steps])
        stops = np.maximum(0, starts + [more for _, more in steps])
        for g in chunking.layout.cached:
            found = pairs(traced.chunks_completed(chunking, g, starts, stops))
            assert [list(range(*span)) for span in found] == [
                completed(chunking, g, int(a), int(b)) for a, b in zip(starts, stops, strict=True)
            ]

    @settings(max_examples=100)
    @given(chunkings(), st.lists(st.integers(-1, 9), min_size=12, max_size=12), st.lists(st.integers(0, 4), min_size=3))
    def test_block_ids_equal_the_plans(self, chunking, table, chunks):
        for g in chunking.layout.cached:
            long = np.append(table, [plan.NULL_BLOCK] * 100)
            expected = plan.chunk_blocks(chunking, g, np.array(chunks[:3]), long)
            found = traced.chunk_blocks(chunking, g, chunks[:3], jnp.array(table, jnp.int32))
            assert found.dtype == jnp.int32
            assert found.tolist() == expected.tolist()

    def test_no_chunk_has_no_blocks(self):
        table = jnp.arange(8, dtype=jnp.int32)
        assert traced.chunk_blocks(MIXED, 1, [-1, 2, 4], table).tolist() == [[-1, -1], [4, 5], [-1, -1]]
        assert traced.chunk_blocks(MIXED, 2, [-1, 2, 8], table).tolist() == [[-1], [2], [-1]]


def step_model(chunking: Chunking, g: int, tables: Any, starts: Any, stops: Any, most: int, capacity: int) -> Any:
    """The rows, and how many chunks are dropped and over, request by request and chunk by chunk."""
    rows, dropped, over = [], 0, 0
    for r, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        used = tables[r][: -(-stop // chunking.layout.groups[g].tokens_per_block)]
        chunks = completed(chunking, g, start, stop)
        over += len(chunks[most:])
        for chunk_idx in chunks[:most]:
            places = blocks_of_chunk(chunking, g, chunk_idx)
            blocks = [used[place] if place < len(used) else -1 for place in places]
            reused = any(block in used[place + 1 :] for block, place in zip(blocks, places, strict=True))
            if -1 in blocks or reused:
                dropped += 1
            elif len(rows) == capacity:
                over += 1
            else:
                rows.append((r, chunk_idx, blocks))
    return rows, dropped, over


class TestSteps:
    @settings(max_examples=100)
    @given(chunkings(), picks())
    def test_moves_of_a_step_equal_the_model(self, chunking, pick):
        requests, width, step_tokens = 3, 12, pick(1, 20)
        starts = [pick(0, 40) for _ in range(requests)]
        stops = [start + pick(0, pick(1, step_tokens + 3)) for start in starts]
        tables = [[pick(0, 3 * width) if pick(0, 9) else -1 for _ in range(width)] for _ in range(requests)]
        for g in chunking.layout.cached:
            most = -(-step_tokens // (chunking.tokens_per_chunk[g] or 1))
            most = 1 if isinstance(chunking.layout.groups[g].kind, Recurrent) else most
            capacity = pick(1, 4) if pick(0, 1) else None
            moves = traced.completed_chunks(
                chunking, g, jnp.array(tables, jnp.int32), starts, stops, step_tokens=step_tokens, capacity=capacity
            )
            capacity = capacity or requests * most
            rows, dropped, over = step_model(chunking, g, tables, starts, stops, most, capacity)
            assert (int(moves.count), int(moves.num_dropped), int(moves.num_over)) == (len(rows), dropped, over)
            columns = (moves.request_idx, moves.chunk_idx, moves.block_ids)
            assert {array.dtype for array in jax.tree.leaves(moves)} == {jnp.dtype("int32")}
            found = [column.tolist() for column in columns]
            assert list(zip(*(column[: len(rows)] for column in found), strict=True)) == rows
            assert all(np.all(np.array(column[len(rows) :]) == -1) for column in found)
            assert all(len(column) == capacity for column in found)

    def test_padding_that_names_block_0_re_uses_nothing(self):
        """Engines pad block tables with what they like. Only places that hold tokens count."""
        tables = jnp.array([[0, 3, 0, 0, 0, 0]], jnp.int32)
        moves = traced.completed_chunks(MIXED, 1, tables, 3, 4)
        assert (moves.block_ids.tolist(), int(moves.count)) == ([[0, 3]], 1)
        moves = traced.completed_chunks(MIXED, 1, tables, 3, 5, step_tokens=2)
        assert (int(moves.count), int(moves.num_dropped)) == (0, 1)

    def test_a_row_without_a_request_completes_nothing(self):
        moves = traced.completed_chunks(MIXED, 0, jnp.zeros((2, 4), jnp.int32), [4, 4], [4, 4])
        assert [int(n) for n in (moves.count, moves.num_dropped, moves.num_over)] == [0, 0, 0]

    def test_chunks_that_find_no_row_are_counted(self):
        """Two requests complete a chunk, and there is room for one. Then a step is longer than was said: it completes
        three chunks, of which one has a row, and another request's has none either."""
        tables = jnp.arange(60, dtype=jnp.int32).reshape(3, 20)
        moves = traced.completed_chunks(MIXED, 1, tables, 0, [4, 3, 7], step_tokens=8, capacity=1)
        assert (moves.request_idx.tolist(), int(moves.count), int(moves.num_over)) == ([0], 1, 1)
        moves = traced.completed_chunks(MIXED, 1, tables, [3, 0, 0], [12, 0, 4], step_tokens=4, capacity=1)
        assert (moves.chunk_idx.tolist(), int(moves.count), int(moves.num_over)) == ([0], 1, 3)
        assert int(moves.num_dropped) == 0

    def test_nothing_compiles_again_when_positions_and_tables_change(self):
        traces = []

        @jax.jit
        def step(positions: jax.Array, tables: jax.Array) -> Any:
            traces.append(1)
            moves = {
                g: traced.completed_chunks(MIXED, g, tables, positions, positions + 1) for g in MIXED.layout.cached
            }
            return moves, traced.retained_from(MIXED, positions), traced.stored_positions(MIXED, positions)

        rng = np.random.default_rng(0)
        for _ in range(5):
            positions = rng.integers(0, 16, 3, np.int32)
            tables = rng.permutation(60).astype(np.int32).reshape(3, 20)
            moves, kept, _ = step(positions, tables)
            expected = {g: step_model(MIXED, g, tables.tolist(), positions, positions + 1, 1, 3) for g in moves}
            assert {g: int(one.count) for g, one in moves.items()} == {g: len(rows[0]) for g, rows in expected.items()}
            assert kept["local"].shape == (3,)
        assert traces == [1]

    def test_they_can_be_mapped(self):
        """One batch for each of four ranks, positions of any shape."""
        rng = np.random.default_rng(1)
        tables = rng.integers(-1, 99, (4, 3, 20)).astype(np.int32)
        starts = rng.integers(0, 12, (4, 3)).astype(np.int32)
        step = functools.partial(traced.completed_chunks, MIXED, 1, step_tokens=5, capacity=4)
        mapped = jax.jit(jax.vmap(step))(tables, starts, starts + 5)
        for rank in range(4):
            alone = step(jnp.asarray(tables[rank]), starts[rank], starts[rank] + 5)
            jax.tree.map(lambda all_, one, rank=rank: np.testing.assert_array_equal(all_[rank], one), mapped, alone)
        kept = traced.retained_from(MIXED, starts)
        one_by_one = jax.vmap(jax.vmap(lambda p: traced.retained_from(MIXED, p)))(starts)
        jax.tree.map(np.testing.assert_array_equal, one_by_one, kept)


class TestLoop:
    def test_a_scanned_decode_loop_stores_every_chunk_it_completes(self):
        """Three groups, requests that join at steps 0, 3 and never. Every byte of the pools is compared."""
        joins, num_steps = [0, 3, 99], 29
        state, given = scanned_decode.start(np.random.default_rng(7), len(joins), num_steps)
        before = [np.asarray(pool) for pool in state["pools"]]
        end = scanned_decode.decode(state, given, jnp.array(joins, jnp.int32), jnp.arange(num_steps, dtype=jnp.int32))
        assert int(end["dropped"]) == 0
        for g, tokens in enumerate(scanned_decode.CHUNKING.tokens_per_chunk):
            used, log, pool = int(end["used"][g]), np.asarray(end["logs"][g]), np.asarray(end["pools"][g])
            expected = {
                (r, c) for r, join in enumerate(joins) for c in range(max(0, num_steps - join) // (tokens or 0))
            }
            rows = [(int(r), int(c)) for r, c in log[:used]]
            assert len(rows) == used
            assert set(rows) == expected
            for row, (r, c) in zip(pool, rows, strict=False):
                held = scanned_decode.chunk_bytes(g, np.asarray(given["values"][g]), r, c)
                assert np.array_equal(row.view(np.uint8), held)
            assert np.array_equal(pool[used:], before[g][used:])
        assert any(int(table.max()) < 0 for table in np.asarray(end["tables"][1])[:, :3].T), "blocks were freed"

    def test_a_while_loop_may_run_to_a_position_that_is_traced(self):
        table = jnp.arange(8, dtype=jnp.int32)[None]

        @jax.jit
        def count(stop: jax.Array) -> jax.Array:
            def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                position, found = carry
                moves = traced.completed_chunks(MIXED, 1, table, position, position + 1)
                return position + 1, found + moves.count

            return jax.lax.while_loop(lambda carry: carry[0] < stop, body, (jnp.int32(0), jnp.int32(0)))[1]

        assert [int(count(jnp.int32(stop))) for stop in (3, 4, 15, 16)] == [0, 1, 3, 4]


class TestArguments:
    def test_sizes_and_positions_that_are_known_must_be_small(self):
        wide = cut(group("full", FullAttention(), 2**31))
        huge = jax.ShapeDtypeStruct((2**28 + 1,), jnp.int32)
        for call in (
            lambda: traced.stored_positions(wide, 1),
            lambda: traced.chunks_completed(wide, 0, 0, 1),
            lambda: traced.needed(SlidingWindow(2**31), 1),
            lambda: traced.needed(FullAttention(), 2**30 + 1),
            lambda: traced.needed(FullAttention(), np.array([3, 2**31])),
            lambda: jax.eval_shape(functools.partial(traced.chunk_blocks, MIXED, 0, [0]), huge),
        ):
            with pytest.raises(ValueError, match="must be below 536870913, got"):
                call()
        with pytest.raises(ValueError, match="`position` must be a non-negative int, got"):
            traced.needed(FullAttention(), -1)
        with pytest.raises(ValueError, match=r"least common multiple .* at most 536870912, got 2147483648"):
            traced.stored_positions(MIXED, 1, resume_multiple=2**31)

    def test_the_largest_position_does_not_wrap(self):
        chunking = cut(
            group("full", FullAttention(), 3, 2**29 - 1),
            group("local", SlidingWindow(2**29), 5),
            group("s", Recurrent(), 7),
        )
        at = traced.MAX_TOKENS
        assert tuple(map(int, traced.stored_positions(chunking, at))) == coverage.stored_positions(chunking, at)
        found = {name: int(first) for name, first in traced.retained_from(chunking, at).items()}
        assert found == retained_from(chunking, at)
        assert tuple(map(int, traced.required(chunking.layout.groups[0], at))) == (0, 2**30 - 1)

    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (lambda: traced.needed(FullAttention(), 1.0), "`position` must be integers, got float32 of shape"),
            (lambda: traced.needed(FullAttention(), True), "`position` must be integers, got bool of shape"),
            (lambda: traced.chunk_blocks(MIXED, 0, [0], np.zeros(3)), "must be int32 of shape .*got float64 of shape"),
            (lambda: traced.chunk_blocks(MIXED, 0, [0], [1, 2]), r"must be int32 of shape .*got \[1, 2\]"),
            (lambda: traced.chunk_blocks(MIXED, 0, [0], jnp.zeros(0, jnp.int32)), "without a zero, got int32"),
            (
                lambda: traced.completed_chunks(MIXED, 0, jnp.zeros(3, jnp.int32), 0, 1),
                r"`block_tables` must be int32 of shape \(requests, max_blocks\), got int32 of shape \(3,\)",
            ),
            (
                lambda: traced.completed_chunks(MIXED, 0, jnp.zeros((2, 3), jnp.int32), 0, 1, step_tokens=0),
                "`step_tokens` must be a positive int, got 0",
            ),
            (
                lambda: traced.completed_chunks(MIXED, 0, jnp.zeros((2, 3), jnp.int32), 0, 1, capacity=0),
                "`capacity` must be a positive int, got 0",
            ),
        ],
    )
    def test_wrong_arguments_are_refused(self, call, text):
        with pytest.raises(ValueError, match=text):
            call()

    def test_the_example_is_true(self):
        assert doctest.testmod(traced).failed == 0
