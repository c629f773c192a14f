"""The offloader with an engine that knows what every byte must be (see `support.toy_engine`)."""

import numpy as np
import pytest

import kvjax
from kvjax.memory import inplace
from kvjax.memory.direct import DirectTransport
from kvjax.memory.host import HostMemory
from tests.support import layouts
from tests.support.toy_engine import ToyEngine, make_caches

MIB = 2**20


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, 50, length).tolist()


@pytest.fixture(scope="module", params=[(name, how) for name in sorted(layouts.ALL) for how in ("direct", "staged")])
def engine(request):
    """One engine for each mix and transport, with room for every request; its host pool is emptied between tests."""
    name, transfer = request.param
    made = ToyEngine(layouts.ALL[name], 48, host_bytes=MIB, staging_bytes=4096, transfer=transfer)
    yield made
    made.offloader.close()


@pytest.fixture(autouse=True)
def integrity(request):
    yield
    if "engine" in request.fixturenames:
        made = request.getfixturevalue("engine")
        made.offloader.wait()
        made.offloader.check_integrity()
        made.offloader.invalidate()
        assert made.offloader.stats().bytes_held == 0
        assert made.offloader.stats().open_requests == 0
        assert all(len(set(free)) == 48 for free in made.free.values())


class TestRestored:
    def test_a_longer_prompt_resumes_where_the_first_one_ended(self, engine):
        rng = np.random.default_rng(0)
        first = prompt(rng, 67)
        assert engine.start("a", first) == 0
        engine.compute("a", 67, step=16)
        engine.check("a")
        engine.stop("a")
        hit = engine.start("b", first + prompt(rng, 9))
        assert 48 <= hit <= 67
        engine.compute("b", 76, step=5)
        engine.check("b")
        engine.stop("b")

    def test_a_prompt_sent_again_resumes_before_its_last_token(self, engine):
        tokens = prompt(np.random.default_rng(1), 64)
        engine.start("a", tokens)
        engine.compute("a", 64, step=64)
        engine.stop("a")
        hit = engine.start("b", tokens)
        assert 48 <= hit <= 63
        engine.compute("b", 64, step=64)
        engine.stop("b")

    def test_decoded_tokens_are_restored_as_well(self, engine):
        rng = np.random.default_rng(2)
        tokens = prompt(rng, 20)
        engine.start("a", tokens)
        engine.compute("a", 20, step=16)
        for _ in range(30):
            engine.accept("a", prompt(rng, 1))
            engine.compute("a", len(engine.tokens["a"]), step=1)
        longer = [*engine.tokens["a"], *prompt(rng, 3)]
        engine.stop("a")
        assert engine.start("b", longer) >= 40
        engine.drop("b")
        engine.offloader.finish("b")

    def test_forks_share_the_prefix_and_differ_after_it(self, engine):
        rng = np.random.default_rng(3)
        trunk = prompt(rng, 40)
        engine.start("trunk", trunk)
        engine.compute("trunk", 40, step=8)
        engine.stop("trunk")
        for name in ("x", "y"):
            engine.start(name, trunk + prompt(rng, 17))
        for name in ("x", "y"):
            engine.compute(name, 57, step=8)
            engine.check(name)
        for name in ("x", "y"):
            engine.stop(name)
        held = engine.offloader.stats().resident_chunks
        engine.start("again", [*trunk, 99])
        engine.offloader.finish("again")
        engine.drop("again")
        assert engine.offloader.stats().resident_chunks == held

    def test_a_preempted_request_goes_on_from_the_host(self, engine):
        rng = np.random.default_rng(4)
        tokens = prompt(rng, 70)
        engine.start("a", tokens)
        engine.compute("a", 50, step=4)
        engine.store("a", checkpoint=True)
        engine.drop("a")
        engine.offloader.wait()
        hit = engine.start("a", tokens)
        assert 32 <= hit <= 50
        engine.compute("a", 70, step=10)
        engine.check("a")
        engine.stop("a")


class TestBudgets:
    def test_a_pool_of_one_chunk_changes_nothing_but_what_is_found(self):
        largest = max(size for size in kvjax.resolve_chunking(layouts.GEMMA).chunk_bytes if size)
        engine = ToyEngine(layouts.GEMMA, 48, host_bytes=largest)
        tokens = prompt(np.random.default_rng(5), 60)
        for _ in range(3):
            engine.start("a", tokens)
            engine.compute("a", 60, step=16)
            engine.check("a")
            engine.stop("a")
            engine.offloader.check_integrity()
            assert engine.offloader.stats().bytes_held <= largest
        engine.offloader.close()

    def test_a_request_larger_than_the_pool_keeps_a_prefix_that_fits(self):
        engine = ToyEngine(layouts.UNIFORM, 48, host_bytes=8 * layouts.UNIFORM.groups[0].block_bytes)
        tokens = prompt(np.random.default_rng(6), 100)
        engine.start("a", tokens)
        engine.compute("a", 100, step=100)
        engine.stop("a")
        assert engine.start("b", tokens) == 32
        engine.offloader.close()

    def test_a_small_pool_evicts_and_never_restores_a_wrong_byte(self):
        rng = np.random.default_rng(7)
        engine = ToyEngine(layouts.EVERYTHING, 64, host_bytes=6000, staging_bytes=600, seed=7)
        trunks = [prompt(rng, 30) for _ in range(4)]
        for turn in range(24):
            tokens = trunks[turn % 4] + prompt(rng, int(rng.integers(1, 40)))
            engine.start("a", tokens)
            engine.compute("a", len(tokens), step=int(rng.integers(1, 20)))
            engine.check("a")
            engine.stop("a")
            engine.offloader.check_integrity()
        stats = engine.offloader.stats()
        assert stats.evicted_chunks > 0
        assert stats.chunks_loaded > 0
        assert stats.bytes_held <= 6000
        engine.offloader.close()

    def test_an_oversized_step_is_split_and_all_of_it_is_stored(self):
        """Staging for 8 blocks and a store of 12: all 12 arrive, never more than 8 staged."""
        block = layouts.UNIFORM.groups[0].block_bytes
        engine = ToyEngine(layouts.UNIFORM, 48, host_bytes=MIB, staging_bytes=8 * block, transfer="staged")
        tokens = prompt(np.random.default_rng(8), 48)
        engine.start("a", tokens)
        engine.compute("a", 48, step=48)
        engine.stop("a")
        assert engine.start("b", [*tokens, 1]) == 48
        stats = engine.offloader.stats()
        assert (stats.chunks_stored, stats.chunks_loaded) == (12, 12)
        assert 0 < stats.most_staged_bytes <= 8 * block
        engine.offloader.close()


class TestEngineThatFreesAtOnce:
    @pytest.mark.parametrize("name", ["gemma", "llama4"])
    def test_the_end_of_a_prompt_is_stored_as_its_chunks_complete(self, name):
        engine = ToyEngine(layouts.ALL[name], 48, host_bytes=MIB, frees_at_once=True)
        tokens = prompt(np.random.default_rng(9), 90)
        engine.start("a", tokens)
        engine.compute("a", 90, step=8)
        engine.offloader.finish("a")
        engine.drop("a")
        assert engine.start("b", [*tokens, 1]) >= 72
        engine.offloader.close()


class TestEngineThatCoversAll:
    """An engine may give a resumed request blocks for every token. Those that the hit does not need are neither
    loaded nor computed: they hold anything, and must never be stored as if they were whole."""

    LAYOUT = kvjax.CacheLayout(
        [
            kvjax.GroupSpec("full", kvjax.FullAttention(), 4, [kvjax.LeafSpec("full", (4, 3), "uint8")]),
            kvjax.GroupSpec("local", kvjax.SlidingWindow(3), 4, [kvjax.LeafSpec("local", (4, 5), "bfloat16")]),
        ]
    )

    def test_blocks_that_were_never_filled_are_not_stored(self):
        """Resumed at 32, a request reads tokens 30 and 31: of the chunk of tokens 24 to 31, its first block is
        neither loaded nor computed. The host forgets that chunk, and the request's end asks for it again; then
        the full group's tail goes, and a prompt resumes at 28, which would read that first block."""
        engine = ToyEngine(self.LAYOUT, 64, host_bytes=MIB, covers_all=True, blocks_per_chunk={"local": 2})
        tokens = prompt(np.random.default_rng(0), 33)
        engine.start("a", tokens)
        engine.compute("a", 33, step=4)
        engine.stop("a")
        assert engine.start("b", tokens) == 32
        engine.offloader.invalidate()
        engine.compute("b", 33, step=4)
        (tail,) = engine.offloader.ledger._requests["b"].chains[0].keys(np.array([7]))
        engine.stop("b")
        engine.offloader.ledger.pool.invalidate([tail])
        engine.start("c", tokens)
        engine.offloader.close()


class TestJobs:
    def test_store_and_load_return_before_their_jobs_are_seen_to_end(self, engine):
        tokens = prompt(np.random.default_rng(10), 40)
        engine.start("a", tokens)
        engine.compute("a", 40, step=40)
        engine.caches, job = engine.offloader.store(engine.caches, "a", engine.tables["a"], 40, checkpoint=True)
        result = engine.offloader.wait(job)
        assert result.ok
        assert result.operation == "store"
        assert engine.offloader.wait(job) is result
        assert result not in engine.offloader.poll()
        engine.offloader.finish("a")
        engine.drop("a")

    def test_every_result_is_told_once(self, engine):
        engine.offloader.wait()
        engine.start("a", prompt(np.random.default_rng(11), 30))
        engine.compute("a", 30, step=30)
        engine.offloader.finish("a")
        engine.drop("a")
        told = []
        while engine.offloader.stats().open_jobs:
            told += engine.offloader.poll()
        told += engine.offloader.poll()
        assert len({result.job_id for result in told}) == len(told) > 0
        assert engine.offloader.poll() == []

    def test_a_store_reads_the_version_of_the_caches_it_is_given(self, engine):
        """The blocks are spoilt right after `store` returns; what is restored is what was there before."""
        rng = np.random.default_rng(12)
        for _ in range(10):
            tokens = prompt(rng, 33)
            engine.start("a", tokens)
            engine.compute("a", 33, step=33)
            engine.stop("a")
            engine.start("b", [*tokens, 1])
            engine.offloader.finish("b")
            engine.drop("b")


class TestPaddedUnits:
    LAYOUT = kvjax.CacheLayout(
        [
            kvjax.GroupSpec("a", kvjax.FullAttention(), 4, [kvjax.LeafSpec("a", (4, 4096), "float32")]),
            kvjax.GroupSpec("b", kvjax.SlidingWindow(8), 4, [kvjax.LeafSpec("b", (4, 10240), "float32")]),
        ]
    )

    def test_a_budget_of_exactly_one_chunk_is_enough_where_units_pad_chunks(self):
        """Chunks of 64 and 160 KiB get units of 55,700 bytes: a chunk of 163,840 bytes takes three."""
        engine = ToyEngine(self.LAYOUT, 12, host_bytes=163840)
        assert engine.offloader.ledger.units.padding_bytes[1] == 3 * 55700 - 163840
        for _ in range(2):
            assert engine.start("a", list(range(20))) == 0
            engine.compute("a", 20, step=8)
            engine.stop("a")
        engine.offloader.check_integrity()
        engine.offloader.close()

    def test_padded_chunks_come_back(self):
        engine = ToyEngine(self.LAYOUT, 12, host_bytes=8 * MIB)
        engine.start("a", list(range(20)))
        engine.compute("a", 20, step=8)
        engine.stop("a")
        assert engine.start("b", list(range(21))) == 20
        engine.offloader.close()


class TestFailures:
    def test_a_load_that_fails_between_pieces_leaves_the_caller_with_caches_to_go_on(self, monkeypatch):
        block = layouts.UNIFORM.groups[0].block_bytes
        engine = ToyEngine(layouts.UNIFORM, 48, host_bytes=MIB, staging_bytes=block, transfer="staged")
        tokens = prompt(np.random.default_rng(20), 40)
        engine.start("a", tokens)
        engine.compute("a", 40, step=40)
        engine.stop("a")
        offloader = engine.offloader
        programs, calls = offloader.mover._transport._unpack, []
        move = programs[0]

        def failing(*arguments):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("out of memory")
            return move(*arguments)

        monkeypatch.setitem(programs, 0, failing)
        offloader.lookup("b", tokens)
        caches, job = offloader.load(engine.caches, "b", {"full": np.arange(10)})
        result = offloader.wait(job)
        assert (result.ok, result.valid_tokens, result.error) == (False, 8, "RuntimeError: out of memory")
        offloader.check_integrity()
        assert offloader.lookup("b", tokens).hit_tokens == 8
        caches, job = offloader.store(caches, "b", {"full": np.arange(10)}, 40)
        assert offloader.wait(job).ok
        offloader.close()

    @pytest.mark.parametrize("transfer", ["direct", "staged"])
    def test_a_store_that_failed_is_asked_for_again_by_the_next(self, monkeypatch, transfer):
        engine = ToyEngine(layouts.UNIFORM, 48, host_bytes=MIB, transfer=transfer)
        tokens = prompt(np.random.default_rng(21), 40)
        with monkeypatch.context() as patch:
            patch.setattr(HostMemory, "write", lambda *_: 1 / 0)
            patch.setattr(inplace, "copy_rows", lambda *_, **__: 1 / 0)
            engine.start("a", tokens)
            engine.compute("a", 40, step=40)
            assert [result.ok for result in engine.offloader.wait()][-1] is False
        assert engine.offloader.stats().failed_jobs == 1
        engine.stop("a")
        assert engine.start("b", [*tokens, 1]) == 40
        engine.offloader.close()

    def test_a_pool_that_died_with_a_program_is_made_anew_and_holds_nothing(self):
        engine = ToyEngine(layouts.UNIFORM, 48, host_bytes=MIB)
        offloader = engine.offloader
        mover = offloader.mover
        mover._transport = DirectTransport(
            mover.caches, offloader.chunking, offloader.ledger.units, num_units=mover._num_units, staging_units=64
        )
        tokens = prompt(np.random.default_rng(23), 40)
        engine.start("a", tokens)
        engine.compute("a", 40, step=40)
        engine.stop("a")
        assert offloader.stats().resident_chunks == 10
        mover._transport._pool.delete()  # as a program that fails after its launch takes donated arrays along
        engine.start("b", prompt(np.random.default_rng(24), 8))
        engine.compute("b", 8, step=8)
        assert engine.start("c", [*tokens, 1]) == 0
        assert offloader.stats().failed_jobs == 1
        engine.compute("c", 41, step=41)
        engine.stop("c")
        assert engine.start("d", [*tokens, 1]) == 40
        offloader.check_integrity()
        offloader.close()

    def test_a_block_named_twice_is_stored_for_its_last_place_only(self):
        """An engine re-used block 5 for a later place and did not write -1 into the earlier one."""
        caches = make_caches(layouts.UNIFORM, 16)
        with kvjax.Offloader(layouts.UNIFORM, caches, host_bytes=MIB) as offloader:
            offloader.lookup("a", range(12))
            caches, job = offloader.store(caches, "a", {"full": [5, 5, 6]}, 12, checkpoint=True)
            assert offloader.wait(job).num_chunks == 0
            assert offloader.stats().dropped_chunks == 1
            offloader.finish("a")
            assert offloader.lookup("b", range(13)).hit_tokens == 0


class TestRefusals:
    @pytest.fixture
    def small(self):
        caches = make_caches(layouts.GEMMA, 16)
        with kvjax.Offloader(layouts.GEMMA, caches, host_bytes=MIB) as offloader:
            yield offloader, caches

    def test_a_request_finished_twice_or_unknown_is_refused(self, small):
        offloader, _ = small
        offloader.lookup("a", [1, 2, 3])
        offloader.finish("a")
        for request_id in ("a", "never"):
            with pytest.raises(ValueError, match=rf"`request_id` must be one that was looked up .* got '{request_id}'"):
                offloader.finish(request_id)

    def test_tokens_that_are_not_accepted_are_refused(self, small):
        offloader, caches = small
        offloader.lookup("a", [1, 2, 3])
        tables = {"full": [0], "local": [0, 1]}
        with pytest.raises(ValueError, match=r"`num_tokens` must be at most the 3 tokens that request 'a' has, got 5"):
            offloader.store(caches, "a", tables, 5)

    @pytest.mark.parametrize(
        ("tables", "text"),
        [
            ({"full": [0, 1]}, r"`block_tables` must hold a table for group 'local', got \['full'\]"),
            ({"full": [0], "local": range(4)}, r"'full' must cover 16 tokens with 2 blocks, got 1"),
            ({"full": [0, 16], "local": range(4)}, r"'full' must hold ids below 16, .* got 16"),
            ({"full": [0, -2], "local": range(4)}, r"'full' must hold ids of at least -1, got -2"),
            ({"full": [0.0, 1.0], "local": range(4)}, r"'full' must be a 1-d sequence of block ids"),
        ],
    )
    def test_block_tables_that_do_not_fit_are_refused_and_nothing_changes(self, small, tables, text):
        offloader, caches = small
        offloader.lookup("a", list(range(20)))
        before = offloader.stats()
        with pytest.raises(ValueError, match=text):
            offloader.store(caches, "a", {k: np.array(v) for k, v in tables.items()}, 16, checkpoint=True)
        assert offloader.stats() == before
        offloader.check_integrity()

    def test_a_load_into_one_block_twice_is_refused_and_can_be_tried_again(self, small):
        offloader, caches = small
        offloader.lookup("a", list(range(20)))
        good = {"full": np.arange(3), "local": np.arange(5)}
        caches, _ = offloader.store(caches, "a", good, 20, checkpoint=True)
        offloader.wait()
        offloader.finish("a")
        assert offloader.lookup("b", list(range(20))).hit_tokens == 16
        with pytest.raises(ValueError, match=r"'full' must name each restored block once, got block 3 twice"):
            offloader.load(caches, "b", good | {"full": np.array([3, 3, 4])})
        caches, job = offloader.load(caches, "b", good)
        assert offloader.wait(job).ok
        with pytest.raises(ValueError, match=r"request 'b' must be looked up before it is loaded"):
            offloader.load(caches, "b", good)

    def test_caches_unlike_the_layout_are_refused(self):
        caches = make_caches(layouts.GEMMA, 16)
        wrong = {
            r"must hold the 6 leaves of the layout, got none called 'l1.v'": {
                name: array for name, array in caches.items() if name != "l1.v"
            },
            r"must hold only the 6 leaves of the layout, got also 'more'": caches | {"more": caches["l1.v"]},
            r"leaf 'l1.v' must be of float32, got int32": caches | {"l1.v": caches["l1.v"].view(np.int32)},
            r"leaf 'l1.v' must have shape \(num_blocks, 4, 2, 2\), got \(16, 4, 4\)": caches
            | {"l1.v": caches["l1.v"].reshape(16, 4, 4)},
            r"leaf 'l1.v' must be a JAX array, got ndarray": caches | {"l1.v": np.asarray(caches["l1.v"])},
        }
        for text, given in wrong.items():
            with pytest.raises(ValueError, match=text):
                kvjax.Offloader(layouts.GEMMA, given, host_bytes=MIB)

    def test_later_caches_unlike_the_registered_ones_are_refused(self, small):
        offloader, _ = small
        offloader.lookup("a", [1, 2, 3])
        tables = {"full": [0], "local": [0, 1]}
        other = make_caches(layouts.GEMMA, 17)
        with pytest.raises(ValueError, match=r"must have shape \(16, 8, 1, 4\) as registered, got \(17, 8, 1, 4\)"):
            offloader.store(other, "a", tables, 3)

    def test_budgets_below_one_chunk_are_refused(self):
        caches = make_caches(layouts.GEMMA, 16)
        with pytest.raises(
            ValueError, match=r"`host_bytes` must hold at least one chunk of the largest group, .* got 255"
        ):
            kvjax.Offloader(layouts.GEMMA, caches, host_bytes=255)
        kvjax.Offloader(layouts.GEMMA, caches, host_bytes=256).close()
        with pytest.raises(ValueError, match=r"`staging_bytes` must hold at least one chunk of the largest group"):
            kvjax.Offloader(layouts.GEMMA, caches, host_bytes=MIB, staging_bytes=255)

    def test_a_closed_offloader_is_refused(self, small):
        offloader, _ = small
        offloader.close()
        offloader.close()
        with pytest.raises(ValueError, match="must not be used after `close`"):
            offloader.lookup("a", [1])
