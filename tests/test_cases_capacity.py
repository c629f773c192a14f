"""Capacity, as others got it wrong: the inputs of their reports, and the right answers.

Each docstring tells what happened elsewhere."""

import numpy as np
import pytest

from kvjax import CacheLayout, FullAttention, GroupSpec, LeafSpec, SlidingWindow, resolve_chunking
from kvjax.accounting import Checkpoints, HostAccount, bytes_per_token, bytes_per_token_growing, distinct_shards
from kvjax.cli.plan import describe
from kvjax.ledger import Ledger
from kvjax.memory.registration import register
from kvjax.mover import Mover
from kvjax.packing import cut_into_units, tokens_that_fit, unit_bytes
from kvjax.plan import GroupMoves, LoadPlan, StorePlan
from kvjax.pool import ChunkPool
from tests.support import layouts
from tests.support.toy_engine import OutOfBlocksError, ToyEngine, as_bytes, make_caches

KIB, MIB = 2**10, 2**20


class TestOnePoolOfUnits:
    """Elsewhere every (hash, group) key reserved a row as wide as all groups together: of three groups of 100, 20 and
    20 bytes per chunk, 1,400 bytes held 10 keys. They hold 10 chunks of *each* group, 30 keys."""

    LAYOUT = CacheLayout(
        [
            GroupSpec("wide", FullAttention(), 4, block_bytes=100),
            GroupSpec("thin", FullAttention(), 4, block_bytes=20),
            GroupSpec("other", FullAttention(), 4, block_bytes=20),
        ]
    )
    UNITS = (5, 1, 1)

    def test_the_account(self):
        cut = resolve_chunking(self.LAYOUT)
        units = cut_into_units(cut, 20)
        assert units.units_per_chunk == self.UNITS
        assert tokens_that_fit(cut, units, 1400) == 43  # 10 chunks of 4 tokens, and a begun one
        assert tokens_that_fit(cut, units, 1399) == 39
        assert HostAccount(cut, units, Checkpoints("end")).longest(1400) == 43

    def test_the_pool(self):
        pool = ChunkPool(1400 // 20, self.UNITS)
        keys = [f"{c}{g}".encode() for c in range(10) for g in range(3)]
        groups = [g for _ in range(10) for g in range(3)]
        stored = pool.prepare_store(keys, groups, np.repeat(np.arange(10), 3))
        assert stored is not None
        pool.complete_store(stored, ok=True)
        assert (pool.num_resident, pool.num_free_units, pool.counts.evicted) == (30, 0, 0)
        assert (pool.find(keys) >= 0).all()
        pool.check_integrity()

    def test_the_ledger(self):
        cut = resolve_chunking(self.LAYOUT)
        ledger = Ledger(cut, cut_into_units(cut, 20), host_bytes=1400)
        ledger.lookup("a", list(range(41)))
        tables = {name: list(range(11)) for name in self.LAYOUT.names}
        ledger.complete_store(ledger.prepare_store("a", tables, 41), ok=True)
        ledger.finish("a")
        assert ledger.pool.num_resident == 30
        assert ledger.lookup("b", list(range(41))).hit_tokens == 40

    def test_no_group_takes_the_place_of_another(self):
        """As reported: five groups of small pages beside one of large; what fits is the sum of what each takes."""
        groups = [GroupSpec(f"g{n}", FullAttention(), 32, block_bytes=64 * KIB) for n in range(7)]
        groups.append(GroupSpec("g7", FullAttention(), 64, block_bytes=64 * KIB))
        cut = resolve_chunking(CacheLayout(groups))
        held = tokens_that_fit(cut, cut_into_units(cut, 64 * KIB), 500 * 2**30)
        per_64_tokens = 7 * 2 + 1
        assert held // 64 == 500 * 2**30 // (64 * KIB) // per_64_tokens


def test_the_block_count_is_that_of_the_registered_array():
    """A pool of 100 blocks; caches of 64 KiB and of 32 KiB pages, elsewhere both seen as rows of 32 KiB: the count read
    back from the shape of the first was 200."""
    row = 32 * KIB
    large, small = LeafSpec("large", (2, row), "uint8"), LeafSpec("small", (row,), "uint8")
    layout = CacheLayout([GroupSpec("a", FullAttention(), 16, [large]), GroupSpec("b", SlidingWindow(64), 16, [small])])
    caches = make_caches(layout, 100)
    registered = register(layout, caches)
    assert [registered.num_blocks(g) for g in range(2)] == [100, 100]
    as_rows = caches | {"large": caches["large"].reshape(200, row)}
    with pytest.raises(ValueError, match=r"leaf 'large' must have shape \(num_blocks, 2, 32768\), got \(200, 32768\)"):
        register(layout, as_rows)


@pytest.mark.parametrize(
    ("planned", "blocks", "real", "fit"),
    [(524_288, 76_268, 2_097_152, 19_067), (262_144, 8_676, 524_288, 4_338)],
)
def test_pages_are_counted_at_the_bytes_they_really_take(planned, blocks, real, fit):
    """A kernel pads its pages; memory was planned with the page before padding. With the real bytes the count is
    right: 19,067, neither 76,268 nor 9,533."""
    for page, expected in ((planned, blocks), (real, fit)):
        cut = resolve_chunking(CacheLayout([GroupSpec("kv", FullAttention(), 16, block_bytes=page)]))
        plan = describe(cut, 8192, planned * blocks)
        assert plan["host"]["tokens"] // 16 == expected
        assert plan["groups"][0]["padding_bytes"] == 0


def test_a_rank_has_its_part_of_a_block_and_only_layers_with_a_cache_count():
    """2,621,440 bytes per block over 8 ranks are 327,680 on each; of the model's 93 layers 24 have a cache. A formula
    elsewhere forgot the ranks and multiplied by 93."""
    layout = CacheLayout([GroupSpec("kv", FullAttention(), 16, block_bytes=327_680, num_layers=24)])
    plan = describe(resolve_chunking(layout), 256, 8 * 327_680 * 10, ranks=8)
    (group,) = plan["groups"]
    assert group["block_bytes"] == 327_680
    assert group["bytes_per_token"] == plan["per_rank"]["bytes_per_token_growing"] == 20_480
    assert group["bytes_per_token_per_layer"] == pytest.approx(20_480 / 24, rel=1e-15)
    assert plan["per_host"]["bytes_per_token_growing"] * 16 == 2_621_440
    assert plan["host_by_checkpoints"]["dense"]["tokens"] == 10 * 16 + 15
    replicated = bytes_per_token_growing(layout, distinct_shards(layout, 8, {"kv": 2}))
    assert replicated == 2 * bytes_per_token(layout.groups[0])


class TestNoBlockIsReserved:
    """An engine reserved block 0 as the null block, and planned for the full count: memory that was just enough for the
    longest request was not. Here the null block is -1 and takes no memory: just enough is enough."""

    BLOCK = layouts.UNIFORM.groups[0].block_bytes

    def test_on_the_device(self):
        tokens = list(range(48))
        engine = ToyEngine(layouts.UNIFORM, 12, host_bytes=MIB)
        engine.start("a", tokens)
        engine.compute("a", 48, step=48)
        engine.check("a")
        assert sorted(engine.tables["a"]["full"]) == list(range(12))  # block 0 is one like all others
        engine.stop("a")
        assert engine.start("b", tokens) == 47
        engine.compute("b", 48, step=4)
        engine.check("b")
        engine.offloader.close()

    def test_one_block_less_is_too_few(self):
        engine = ToyEngine(layouts.UNIFORM, 11, host_bytes=MIB)
        engine.start("a", list(range(48)))
        with pytest.raises(OutOfBlocksError):
            engine.compute("a", 48, step=48)
        engine.offloader.close()

    def test_on_the_host(self):
        for budget, hit in ((12 * self.BLOCK, 48), (12 * self.BLOCK - 1, 44)):
            engine = ToyEngine(layouts.UNIFORM, 16, host_bytes=budget)
            engine.start("a", list(range(48)))
            engine.compute("a", 48, step=48)
            engine.stop("a")
            assert engine.start("b", list(range(49))) == hit
            engine.offloader.close()
        cut = resolve_chunking(layouts.UNIFORM)
        units = cut_into_units(cut, self.BLOCK)
        assert tokens_that_fit(cut, units, 12 * self.BLOCK) == 51


def test_twelve_blocks_through_a_staging_of_eight_go_in_several_goes():
    """Elsewhere a save of 12 blocks through a staging of 8 saved 8 and dropped 4. All 12 arrive, and come back, never
    more than 8 at a time."""
    chunking = resolve_chunking(layouts.UNIFORM)
    block = layouts.UNIFORM.groups[0].block_bytes
    units = cut_into_units(chunking, unit_bytes(chunking, 4))
    caches = make_caches(layouts.UNIFORM, 24, seed=5)
    mover = Mover(
        chunking, units, caches, num_units=200, staging_bytes=8 * block, transfer="staged", show_progress=False
    )
    before = {name: as_bytes(array) for name, array in caches.items()}
    places = np.arange(12, dtype=np.int32)
    held = np.arange(12 * units.units_per_chunk[0], dtype=np.int32).reshape(12, -1)
    caches, stored = mover.store(caches, StorePlan((GroupMoves(0, 12, places, places[:, None], held),), 0))
    stored.wait()
    assert 0 < mover.most_staged_bytes <= 8 * block
    elsewhere = places[:, None] + 12
    caches, loaded = mover.load(caches, LoadPlan((GroupMoves(0, 12, places, elsewhere, held),), 0))
    loaded.wait()
    assert 0 < mover.most_staged_bytes <= 8 * block
    for name, array in caches.items():
        assert np.array_equal(as_bytes(array)[12:], before[name][:12])
        assert np.array_equal(as_bytes(array)[:12], before[name][:12])
    mover.close()


class TestOnePoolInsteadOfTwo:
    """Two host pools were sized by a ratio of tokens, 10 window tokens to 100 full ones: 2,048,000 bytes each of
    4,096,000. One pool holds just that for a request of 100 tokens with a window of 10, and any other mix, too."""

    LAYOUT = CacheLayout(
        [
            GroupSpec("full", FullAttention(), 1, block_bytes=20_480),
            GroupSpec("window", SlidingWindow(10), 1, block_bytes=204_800),
        ]
    )

    def account(self, rule: str) -> HostAccount:
        cut = resolve_chunking(self.LAYOUT)
        return HostAccount(cut, cut_into_units(cut, 20_480), Checkpoints(rule))

    def test_the_account(self):
        cost = self.account("end").cost(100)
        assert cost.growing == {"full": 2_048_000, "window": 0}
        assert cost.fixed == {"full": 0, "window": 2_048_000}
        assert self.account("end").longest(4_096_000) == 100
        assert self.account("end").longest(4_096_000 - 1) == 99
        assert self.account("end").requests(4_096_000, 100) == 1

    def test_short_requests_strand_nothing(self):
        """Of 10 tokens each: 2,252,800 bytes. Two fit in twice that; two pools of half of it would hold one."""
        assert self.account("end").cost(10).num_bytes == 10 * (20_480 + 204_800)
        assert self.account("end").requests(2 * 2_252_800, 10) == 2
        assert self.account("dense").longest(4_096_000) == 4_096_000 // (20_480 + 204_800)

    def test_the_ledger(self):
        cut = resolve_chunking(self.LAYOUT)
        ledger = Ledger(cut, cut_into_units(cut, 20_480), host_bytes=4_096_000)
        tables = {"full": list(range(100)), "window": list(range(100))}
        ledger.lookup("a", list(range(100)))
        ledger.complete_store(ledger.prepare_store("a", tables, 100), ok=True)
        ledger.finish("a")
        assert (ledger.pool.num_resident, ledger.pool.num_free_units) == (110, 0)
        assert ledger.lookup("longer", list(range(101))).hit_tokens == 100
        assert ledger.lookup("same", list(range(100))).hit_tokens == 99


def held_after(layout: CacheLayout, every: int | None, tokens: int) -> tuple[int, list[int]]:
    """Bytes that one request of so many tokens leaves in the pool, and what the plan says of it and of a dense one."""
    engine = ToyEngine(layout, 200, host_bytes=MIB, checkpoint_tokens=every)
    units = cut_into_units(engine.chunking, unit_bytes(engine.chunking, 4))
    engine.start("a", list(range(tokens)))
    engine.compute("a", tokens, step=1)  # a state after every token
    engine.offloader.finish("a")
    held = engine.offloader.stats().bytes_held
    engine.offloader.close()
    rules = [Checkpoints("end") if every is None else Checkpoints("every", every), Checkpoints("dense")]
    return held, [HostAccount(engine.chunking, units, rule).cost(tokens).num_bytes for rule in rules]


@pytest.mark.parametrize("name", sorted(layouts.ALL))
@pytest.mark.parametrize(("every", "tokens"), [(None, 100), (24, 96)])
def test_the_account_is_what_a_request_takes_in_the_pool(name, every, tokens):
    """Whatever the mix: a request that was served holds the bytes that the plan says, no more and no fewer."""
    held, (planned, _) = held_after(layouts.ALL[name], every, tokens)
    assert held == planned


@pytest.mark.parametrize("name", sorted(layouts.ALL))
def test_on_the_way_to_a_checkpoint_a_request_also_holds_what_is_complete_of_it(name):
    """At 100 tokens, chunks may be there for the checkpoint at 120, which the plan does not count: never more than a
    dense store."""
    held, (planned, dense) = held_after(layouts.ALL[name], 24, 100)
    assert planned <= held <= dense
