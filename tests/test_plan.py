"""Plans against a model that goes block by block and token by token, and the text of every refusal."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import (
    CacheLayout,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    LeafSpec,
    LoadPlan,
    Recurrent,
    SlidingWindow,
    StorePlan,
    longest_hit,
    plan_load,
    plan_store,
    resolve_chunking,
    store_set,
)
from kvjax.chunking import Chunking
from kvjax.groups import Scratch
from tests.oracles import plan_model
from tests.oracles.layouts import cut, group, random_chunking, random_instance


def ids(rng: np.random.Generator, count: int, limit: int = 1000) -> np.ndarray:
    return rng.choice(limit, count, replace=False).astype(np.int32)


def tables_for(chunking: Chunking, num_tokens: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Block tables over `num_tokens` tokens and some more, of blocks all over the place."""
    return {g.name: ids(rng, num_tokens // g.tokens_per_block + 4) for g in chunking.layout.groups}


def units_for(chunks: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Units for the chunks of each group, another number per chunk in each."""
    pool, units = list(rng.permutation(20_000)), {}
    for width, (name, listed) in enumerate(chunks.items(), start=1):
        units[name] = np.array([[pool.pop() for _ in range(width)] for _ in listed]).reshape(-1, width)
    return units


def rows_of(plan: StorePlan | LoadPlan) -> plan_model.Rows:
    """The real rows of a plan, by group; its padding and its flags are checked on the way."""
    assert [moves.group_idx for moves in plan.moves] == sorted({moves.group_idx for moves in plan.moves})
    rows = {}
    for moves in plan.moves:
        count = moves.num_chunks
        for array in (moves.chunk_idx, moves.block_ids, moves.unit_ids):
            assert array.dtype == np.int32
            assert not array.flags.writeable
            assert len(array) >= count > len(array) // 2  # the next power of two, and none is empty
            assert len(array) & (len(array) - 1) == 0
            assert (array[count:] == -1).all()
        columns = (moves.chunk_idx, moves.block_ids, moves.unit_ids)
        rows[moves.group_idx] = list(zip(*(column[:count].tolist() for column in columns), strict=True))
    return rows


@st.composite
def seeds(draw: st.DrawFn):
    return lambda low, high: draw(st.integers(low, high))


@settings(max_examples=300, deadline=None)
@given(seeds(), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_a_store_moves_every_block_of_every_chunk(pick, checkpoint, seed):
    chunking, rng = random_chunking(pick), np.random.default_rng(seed)
    every = store_set(chunking, checkpoint)
    chunks = {
        name: rng.permutation(every[name]) for g in chunking.layout.cached for name in chunking.layout.names[g:][:1]
    }
    tables, units = tables_for(chunking, checkpoint, rng), units_for(chunks, rng)
    plan = plan_store(chunking, chunks, tables, units)
    assert rows_of(plan) == plan_model.store_rows(chunking, chunks, tables, units)
    assert plan.num_chunks == sum(map(len, chunks.values()))
    sizes = {name: chunking.chunk_bytes[g] for g, name in enumerate(chunking.layout.names)}
    assert plan.num_bytes == sum(len(listed) * sizes[name] for name, listed in chunks.items())


@settings(max_examples=500, deadline=None)
@given(seeds(), st.integers(0, 2**32 - 1))
def test_a_load_writes_the_blocks_with_a_needed_token_that_the_device_lacks(pick, seed):
    """Any layout, any presence; the device holds one prefix, or another one in each group."""
    case, rng = random_instance(pick), np.random.default_rng(seed)
    hit = longest_hit(
        case.chunking,
        case.num_tokens,
        case.present,
        device_tokens=case.device_tokens,
        resume_multiple=case.resume_multiple,
    )
    tables, units = tables_for(case.chunking, case.num_tokens + 12, rng), units_for(hit.load, rng)
    expected = plan_model.load_rows(case.chunking, hit.hit_tokens, case.device_tokens, hit.load, tables, units)
    # Where nothing is written, the null block will do, and the table may end.
    for g, name in enumerate(case.chunking.layout.names):
        used = {block for _, blocks, _ in expected.get(g, []) for block in blocks}
        tables[name] = np.where(np.isin(tables[name], list(used)), tables[name], -1)
        last = np.flatnonzero(tables[name] >= 0).max(initial=-1)
        tables[name] = tables[name][: last + 1]
    plan = plan_load(case.chunking, hit, tables, units, device_tokens=case.device_tokens)
    assert rows_of(plan) == expected
    sizes = {name: case.chunking.chunk_bytes[g] or 0 for g, name in enumerate(case.chunking.layout.names)}
    assert plan.num_bytes == sum(len(listed) * sizes[name] for name, listed in hit.load.items())


class TestLoad:
    def test_a_chunk_that_the_device_holds_in_part_is_loaded_in_part(self):
        """The device holds 8 tokens, two of the four blocks of chunk 0, which other requests may share: they are no
        destination."""
        chunking = cut(group("full", FullAttention(), 4), blocks=4)
        hit = longest_hit(chunking, 20, {"full": [0]}, device_tokens=8)
        plan = plan_load(chunking, hit, {"full": [5, 6, 7, 8]}, {"full": [[3]]}, device_tokens=8)
        assert rows_of(plan) == {0: [(0, [-1, -1, 7, 8], [3])]}

    def test_a_block_that_the_device_holds_in_part_is_loaded_whole(self):
        chunking = cut(group("full", FullAttention(), 4), blocks=4)
        hit = longest_hit(chunking, 20, {"full": [0]}, device_tokens=6)
        plan = plan_load(chunking, hit, {"full": [5, 6, 7, 8]}, {"full": [[3]]}, device_tokens=6)
        assert rows_of(plan) == {0: [(0, [-1, 6, 7, 8], [3])]}

    def test_the_last_chunk_of_a_hit_may_be_used_in_part(self):
        """36 tokens in chunks of 12 and 32 in chunks of 16 hit 32: of chunk 2 (blocks 6 to 8 of 4 tokens), the last
        block holds nothing that is needed, and the table need not have it."""
        chunking = cut(group("a", FullAttention(), 4), group("b", FullAttention(), 16), blocks={"a": 3})
        hit = longest_hit(chunking, 40, {"a": range(3), "b": range(2)})
        units = {"a": [[0], [1], [2]], "b": [[3], [4]]}
        plan = plan_load(chunking, hit, {"a": range(8), "b": [0, 1]}, units)
        assert rows_of(plan)[0][-1] == (2, [6, 7, -1], [2])

    def test_a_window_needs_no_block_before_it(self):
        """The places before the window hold the null block, as an engine leaves them."""
        chunking = cut(group("window", SlidingWindow(6), 4), blocks=2)
        hit = longest_hit(chunking, 17, {"window": range(2)})
        plan = plan_load(chunking, hit, {"window": [-1, -1, 9, 4]}, {"window": [[7]]})
        assert rows_of(plan) == {0: [(1, [9, 4], [7])]}

    def test_a_recurrent_group_writes_the_state_at_the_end_of_its_chunk(self):
        """A3: states every 2 blocks of 8 tokens; the hit at 32 lies in block column 3, whatever other groups do."""
        chunking = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 8), blocks={"state": 2})
        hit = longest_hit(chunking, 40, {"full": range(9), "state": [0, 1]})
        tables = {"full": range(8), "state": [-1, -1, -1, 5]}
        plan = plan_load(chunking, hit, tables, {"full": np.arange(8)[:, None], "state": [[8]]})
        assert rows_of(plan)[1] == [(1, [5], [8])]

    def test_nothing_to_load_is_an_empty_plan(self):
        chunking = cut(group("full", FullAttention(), 4))
        hit = longest_hit(chunking, 20, {"full": [0]}, device_tokens=8)
        plan = plan_load(chunking, hit, {}, {})
        assert (plan.moves, plan.num_bytes, plan.num_chunks) == ((), 0, 0)

    def test_stacked_leaves_are_addressed_by_block_and_counted_whole(self):
        leaf = LeafSpec("kv", (4, 3), np.dtype(np.int8), layers=5)
        chunking = resolve_chunking(CacheLayout([GroupSpec("full", FullAttention(), 4, [leaf])]), blocks_per_chunk=2)
        hit = longest_hit(chunking, 9, {"full": [0]})
        plan = plan_load(chunking, hit, {"full": [2, 1]}, {"full": [[0]]})
        assert rows_of(plan) == {0: [(0, [2, 1], [0])]}
        assert plan.num_bytes == 2 * 5 * 12

    def test_a_scratch_group_keeps_its_index_and_has_no_moves(self):
        chunking = cut(group("ring", Scratch(), 2), group("full", FullAttention(), 4))
        hit = longest_hit(chunking, 9, {"full": [0, 1]})
        plan = plan_load(chunking, hit, {"full": [3, 4]}, {"full": [[0], [1]]})
        assert [moves.group_idx for moves in plan.moves] == [1]


def one(chunks: Any = (0, 1), table: Any = (0, 1), units: Any = ((0,), (1,)), **more: Any) -> StorePlan:
    chunking = cut(group("full", FullAttention(), 4), group("ring", Scratch(), 2))
    return plan_store(chunking, {"full": chunks}, {"full": table}, {"full": units}, **more)


class TestRefusedStores:
    def test_groups_unknown_or_scratch(self):
        chunking = cut(group("full", FullAttention(), 4), group("ring", Scratch(), 2))
        with pytest.raises(ValueError, match=r"`chunks` must name groups of the layout .*, got 'other'"):
            plan_store(chunking, {"other": [0]}, {}, {})
        with pytest.raises(ValueError, match="`chunks` must name groups that are cached, got the scratch group 'ring'"):
            plan_store(chunking, {"ring": [0]}, {}, {})

    @pytest.mark.parametrize(
        ("table", "text"),
        [
            ([0, -1], r"`block_tables` of group 'full' must hold every block .* got the null block in chunk 1"),
            ([0], "`block_tables` of group 'full' must cover 2 blocks, got 1"),
            ([0, -2], "`block_tables` of group 'full' must hold ids of at least -1, got -2"),
            ([0.0, 1.0], "`block_tables` of group 'full' must be a 1-d sequence of block ids, got a 1-d one of float"),
            ([True, False], "must be a 1-d sequence of block ids, got a 1-d one of bool"),
            ([[0, 1]], "must be a 1-d sequence of block ids, got a 2-d one of int64"),
        ],
    )
    def test_tables_that_do_not_hold_the_chunks(self, table, text):
        with pytest.raises(ValueError, match=text):
            one(table=table)

    def test_a_table_that_is_missing(self):
        chunking = cut(group("full", FullAttention(), 4))
        with pytest.raises(ValueError, match=r"`block_tables` must hold a table for group 'full', got \['other'\]"):
            plan_store(chunking, {"full": [0]}, {"other": [0]}, {"full": [[0]]})
        with pytest.raises(ValueError, match=r"`block_tables` must hold a table for group 'full', got \[\[0\]\]"):
            plan_store(chunking, {"full": [0]}, [[0]], {"full": [[0]]})  # pyright: ignore

    def test_ids_past_the_cache(self):
        one(table=[0, 9], num_blocks={"full": 10})
        with pytest.raises(ValueError, match=r"`block_tables` of group 'full' must hold ids below 9, .* got 9"):
            one(table=[0, 9], num_blocks={"full": 9})

    @pytest.mark.parametrize(
        ("chunks", "text"),
        [
            ([0, 0], "`chunks` of group 'full' must be distinct non-negative chunk indices, got 0 twice"),
            ([0, -1], "`chunks` of group 'full' must be distinct non-negative chunk indices, got -1"),
            ([0.0, 1.0], "`chunks` of group 'full' must be a 1-d sequence of chunk indices, got a 1-d one of float64"),
            (1, "`chunks` of group 'full' must be a 1-d sequence of chunk indices, got int"),
        ],
    )
    def test_chunks_that_are_none(self, chunks, text):
        """A negative index would read the table from its end, a float would be cut off."""
        with pytest.raises(ValueError, match=text):
            one(chunks=chunks)

    @pytest.mark.parametrize(
        ("units", "text"),
        [
            ([[0]], r"`unit_ids` of group 'full' must be ints .* for each of 2 chunks, got int64 of shape \(1, 1\)"),
            ([0, 1], r"got int64 of shape \(2,\)"),
            ([[0.0], [1.0]], r"got float64 of shape \(2, 1\)"),
            ([[0], [-1]], "`unit_ids` of group 'full' must be non-negative, got -1"),
            ([[4], [4]], "`unit_ids` must name each unit of a store once, got unit 4 twice"),
        ],
    )
    def test_units_that_do_not_hold_the_chunks(self, units, text):
        with pytest.raises(ValueError, match=text):
            one(units=units)

    def test_units_that_are_missing_or_taken_by_two_groups(self):
        chunking = cut(group("a", FullAttention(), 4), group("b", FullAttention(), 4))
        chunks, tables = {"a": [0], "b": [0]}, {"a": [0], "b": [0]}
        with pytest.raises(ValueError, match=r"`unit_ids` must hold the units of group 'b', got \['a'\]"):
            plan_store(chunking, chunks, tables, {"a": [[0]]})
        with pytest.raises(ValueError, match="`unit_ids` must name each unit of a store once, got unit 6 twice"):
            plan_store(chunking, chunks, tables, {"a": [[6]], "b": [[6]]})


class TestRefusedLoads:
    def load(self, table: Any, units: Any = ((0,), (1,)), **more: Any) -> LoadPlan:
        chunking = cut(group("full", FullAttention(), 4))
        return plan_load(chunking, longest_hit(chunking, 9, {"full": [0, 1]}), {"full": table}, {"full": units}, **more)

    @pytest.mark.parametrize(
        ("table", "text"),
        [
            ([3, -1], "`block_tables` of group 'full' must hold a block wherever one is restored, got the null block"),
            ([3], "`block_tables` of group 'full' must cover 2 blocks, got 1"),
            ([3, 3], "`block_tables` of group 'full' must name each restored block once, got block 3 twice"),
            ([3, 8], "`block_tables` of group 'full' must hold ids below 8, the blocks of its cache, got 8"),
            ([3, -5], "`block_tables` of group 'full' must hold ids of at least -1, got -5"),
        ],
    )
    def test_tables_that_do_not_hold_the_hit(self, table, text):
        with pytest.raises(ValueError, match=text):
            self.load(table, num_blocks={"full": 8})

    def test_units_that_do_not_fit(self):
        with pytest.raises(ValueError, match=r"`unit_ids` of group 'full' .* 2 chunks, got int64 of shape \(1, 1\)"):
            self.load([0, 1], [[0]])

    def test_a_table_that_is_missing(self):
        chunking = cut(group("full", FullAttention(), 4))
        hit = longest_hit(chunking, 9, {"full": [0, 1]})
        with pytest.raises(ValueError, match=r"`block_tables` must hold a table for group 'full', got \[\]"):
            plan_load(chunking, hit, {}, {})

    def test_groups_that_share_a_leaf_restore_into_disjoint_blocks(self):
        """Two groups hold blocks of one array: the same id in both would be written twice."""
        leaf = LeafSpec("shared", (4, 2), np.dtype(np.float32))
        own = LeafSpec("own", (4, 2), np.dtype(np.float32))
        layout = CacheLayout(
            [
                GroupSpec("window", SlidingWindow(8), 4, [leaf]),
                GroupSpec("chunked", ChunkedLocal(8), 4, [leaf, own]),
                GroupSpec("alone", FullAttention(), 4, [LeafSpec("other", (4, 2), np.dtype(np.float32))]),
            ]
        )
        chunking = resolve_chunking(layout)
        hit = longest_hit(chunking, 6, {name: [0] for name in layout.names})
        units = {"window": [[0]], "chunked": [[1]], "alone": [[2]]}
        plan = plan_load(chunking, hit, {"window": [3], "chunked": [4], "alone": [3]}, units)
        assert rows_of(plan) == {0: [(0, [3], [0])], 1: [(0, [4], [1])], 2: [(0, [3], [2])]}
        with pytest.raises(
            ValueError,
            match="groups 'window' and 'chunked' must name disjoint blocks of the leaf 'shared' that they share, "
            "got block 3 in both",
        ):
            plan_load(chunking, hit, {"window": [3], "chunked": [3], "alone": [4]}, units)
