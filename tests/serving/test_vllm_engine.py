"""The connector under a small vLLM: every byte that a request reads is what its tokens make it."""

import importlib
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.groups import ChunkedLocal, FullAttention, Recurrent, SlidingWindow
from kvjax.mover import Transfer
from tests.serving import vllm_interface
from tests.serving.vllm_engine import Engine, Group, Request, config_of, vllm_config_of

MIXED = [Group(FullAttention(), 16, (0,)), Group(SlidingWindow(20), 8, (1, 2)), Group(ChunkedLocal(32), 16, (3,))]


@pytest.fixture
def connector(monkeypatch):
    vllm_interface.install(monkeypatch)
    return importlib.import_module("kvjax.serving.vllm").KvjaxConnector


def engine_of(connector, groups, *, num_blocks=120, host_bytes=2**20, **options):
    widths = {place: 4 + 2 * place for group in groups for place in group.places}
    extra = {"host_bytes": host_bytes, **options.pop("extra", {})}
    return Engine(
        connector, vllm_interface.KVConnectorRole, groups, num_blocks=num_blocks, extra=extra, widths=widths, **options
    )


def request_of(engine, name, tokens, max_tokens=4):
    rng = np.random.default_rng(len(tokens))
    truth = [*tokens, *rng.integers(0, 1000, max_tokens + 2).tolist()]
    return Request(name, truth, len(tokens), max_tokens, engine.unit)


def test_a_prompt_that_comes_again_is_restored(connector):
    engine = engine_of(connector, MIXED)
    tokens = list(range(100))
    engine.add(request_of(engine, "warm-up", list(range(500, 520))))
    engine.run()
    for name in ("first", "again"):
        engine.add(request_of(engine, name, tokens))
        engine.run()
    assert engine.restored_tokens == 96


STATES = [Group(FullAttention(), 16, (0, 1)), Group(SlidingWindow(20), 8, (2,)), Group(Recurrent(), 4096, (3, 4))]


def test_states_are_restored_where_steps_ended_and_checkpoints_want_them(connector):
    """The figures of docs/serving/vllm.md."""
    restored = []
    for extra in ({}, {"checkpoint_tokens": 64}):
        for num_tokens in (150, 160):
            engine = engine_of(connector, STATES, budget=64, extra=extra)
            for name in ("first", "again"):
                engine.add(request_of(engine, name, list(range(num_tokens)), max_tokens=40))
                engine.run()
            restored.append(engine.restored_tokens)
    assert restored == [0, 0, 128, 128]


@pytest.mark.parametrize("transfer", ["direct", "staged"])
@pytest.mark.parametrize("groups", [MIXED, STATES], ids=["attention", "states"])
def test_no_step_compiles_anything(connector, compilations, monkeypatch, groups, transfer):
    """tpu-inference compiles all programs when it starts, and can refuse those that come later."""
    engine = engine_of(connector, groups, extra={"checkpoint_tokens": 32, "transfer": transfer})
    compiled = []

    def counting(call):
        def counted(*args):
            compilations.clear()
            result = call(*args)
            compiled.extend(compilations)
            return result

        return counted

    for name in ("bind_connector_metadata", "start_load_kv", "wait_for_save", "get_transfer_results"):
        monkeypatch.setattr(engine.worker, name, counting(getattr(engine.worker, name)))
    for name, num_tokens in (("first", 100), ("again", 150), ("once more", 97)):
        engine.add(request_of(engine, name, list(range(num_tokens))))
        engine.run()
    assert engine.restored_tokens
    assert compiled == []


def test_the_end_of_a_request_is_a_checkpoint_with_its_state(connector):
    """Its slot is another request's, or nobody's, when the state is stored. (With scheduling ahead, a step more was
    computed by then, and there is no state of the end.)"""
    engine = engine_of(connector, STATES, extra={"checkpoint_tokens": None})
    engine.add(request_of(engine, "warm-up", list(range(500, 520))))
    engine.run()
    first = request_of(engine, "first", list(range(30)), max_tokens=19)
    engine.add(first)
    engine.run()
    engine.add(request_of(engine, "more", [*first.truth[:49], *range(800, 815)]))
    engine.run()
    assert engine.restored_tokens == 48


SHARED = [Group(FullAttention(), 8, (0, 1)), Group(SlidingWindow(20), 8, (0, 1)), Group(SlidingWindow(20), 8, (0,))]
BLOCKS = {1: 40, 3: 75}  # in the device pool, by the number of groups
UNIFORM = [Group(FullAttention(), 8, (0, 1, 2))]
SLIDING = [Group(SlidingWindow(20), 8, (0, 1, 2))]


def conversations(engine, rng, *, turns=3, many=5):
    """Conversations that share a beginning, each turn with what was said before."""
    start = rng.integers(0, 1000, rng.integers(1, 60)).tolist()
    said = [[*start, *rng.integers(0, 1000, rng.integers(1, 70)).tolist()] for _ in range(many)]
    for turn in range(turns):
        names = []
        for i in rng.permutation(many):
            request = Request(
                f"{turn}.{i}",
                [*said[i], *rng.integers(0, 1000, 40).tolist()],
                len(said[i]),
                int(rng.integers(1, 20)),
                engine.unit,
            )
            said[i] = [*request.truth[: len(said[i]) + request.max_tokens], int(rng.integers(0, 1000))]
            engine.add(request)
            names.append(request.request_id)
            for _ in range(rng.integers(0, 4)):
                engine.short_of_blocks = bool(rng.random() < 0.2)
                engine.step()
            if rng.random() < 0.2 and engine.requests:
                engine.abort(
                    str(rng.choice(sorted(r for r in engine.requests if engine.requests[r].status != "FINISHED")))
                )
        engine.run()


@pytest.mark.parametrize("late", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("groups", [MIXED, STATES, SHARED, UNIFORM], ids=["mixed", "states", "shared", "uniform"])
def test_conversations_read_what_they_wrote(connector, groups, late):
    restored = preemptions = 0
    for seed in range(3):
        engine = engine_of(connector, groups, num_blocks=BLOCKS[len(groups)], late=late)
        conversations(engine, np.random.default_rng(seed))
        engine.books().check_integrity()
        assert engine.books().num_requests == 0
        restored += engine.restored_tokens
        preemptions += engine.preemptions
    assert restored > 0
    assert preemptions > 0


@pytest.mark.parametrize("groups", [STATES, UNIFORM], ids=["states", "uniform"])
@pytest.mark.parametrize("chunking", [{"blocks_per_chunk": 2}, {"blocks_per_chunk": "auto", "min_chunk_bytes": 2048}])
def test_chunks_of_several_blocks_read_what_was_written(connector, groups, chunking):
    engine = engine_of(connector, groups, num_blocks=BLOCKS[len(groups)], late=True, extra=chunking)
    conversations(engine, np.random.default_rng(0))
    engine.add(request_of(engine, "first", list(range(100))))
    engine.run()
    engine.add(request_of(engine, "again", list(range(100))))
    engine.run()
    assert max(count or 0 for count in engine.books().chunking.blocks_per_chunk) > 1
    assert engine.books().counts.loaded_by_group.sum() > 0
    engine.books().check_integrity()


@pytest.mark.parametrize("late", [False, True], ids=["in step", "ahead"])
def test_states_of_many_checkpoints_are_those_of_their_tokens(connector, late):
    restored = 0
    for seed in range(3):
        extra = {"checkpoint_tokens": 16}
        engine = engine_of(connector, STATES, num_blocks=BLOCKS[3], late=late, extra=extra)
        conversations(engine, np.random.default_rng(seed))
        restored += engine.restored_tokens
    assert restored > 0


class Slow:
    """A transfer that ends some polls later."""

    def __init__(self, transfer, polls):
        self.transfer, self.polls = transfer, polls
        self.settle, self.moved = transfer.settle, transfer.moved

    def done(self):
        self.polls -= 1
        return self.polls < 0 and self.transfer.done()


class Unreliable:
    """A mover whose moves take a while, and of which some fail; loads that fail leave garbage where they were to."""

    def __init__(self, mover, rng, *, fails):
        self.mover, self.rng, self.fails = mover, rng, fails
        self.revive, self.close = mover.revive, mover.close

    def store(self, caches, plan):
        if self.rng.random() < self.fails / 2:
            raise RuntimeError("planted: cannot be issued")
        caches, transfer = self.mover.store(caches, plan)
        return caches, self._maybe(transfer)

    def load(self, caches, plan):
        caches, transfer = self.mover.load(caches, plan)
        result = self._maybe(transfer)
        if isinstance(result, Transfer):
            for moves in plan.moves:
                ids = moves.block_ids[moves.block_ids > 0]
                for leaf in self.mover.caches.group_leaves[moves.group_idx]:
                    array = np.array(caches[leaf])
                    array[ids] = 7
                    caches[leaf] = jnp.asarray(array)
        return caches, result

    def _maybe(self, transfer):
        if self.rng.random() < self.fails:
            transfer.settle()
            return Transfer([], RuntimeError("planted: the move failed"))
        return Slow(transfer, int(self.rng.integers(0, 4)))


@pytest.mark.parametrize("late", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize(
    "groups", [STATES, SHARED, UNIFORM, SLIDING], ids=["states", "shared", "uniform", "sliding alone"]
)
def test_loads_and_stores_that_fail_cost_computing_and_nothing_else(connector, groups, late, caplog):
    rng = np.random.default_rng(7)
    engine = engine_of(connector, groups, num_blocks=BLOCKS[len(groups)], late=late)
    engine.worker._worker.mover = Unreliable(engine.worker._worker.mover, rng, fails=0.3)
    conversations(engine, rng, turns=5)
    engine.books().check_integrity()
    assert engine.failed_loads > 0
    assert engine.restored_tokens > 0
    assert "planted" in caplog.text


@pytest.mark.parametrize("groups", [STATES, UNIFORM], ids=["states", "uniform"])
def test_a_request_whose_load_failed_is_not_restored_again(connector, groups):
    """Not even when it is preempted later; and a state that was to be restored is not kept for its first step."""
    engine = engine_of(connector, groups, extra={"checkpoint_tokens": 32})
    tokens = list(range(128))
    engine.add(request_of(engine, "first", tokens, max_tokens=33))
    engine.run()
    side = engine.worker._worker
    side.mover, mover = Unreliable(side.mover, np.random.default_rng(0), fails=1), side.mover
    engine.add(request_of(engine, "again", [*tokens, 1], max_tokens=40))
    engine.step()
    assert engine.restored_tokens > 0
    assert not side._states._held
    side.mover = mover
    while engine.requests["again"].num_known < 140:
        engine.step()
    engine._preempt(engine.running.pop())
    engine.restored_tokens = 0
    engine.run()
    assert engine.restored_tokens == 0
    assert engine.failed_loads == 1
    engine.add(request_of(engine, "next", [*tokens, 1], max_tokens=2))
    engine.run()
    assert engine.restored_tokens > 0


@pytest.mark.parametrize("groups", [MIXED, UNIFORM], ids=["mixed", "uniform"])
def test_a_load_that_fails_in_part_is_computed(connector, groups):
    engine = engine_of(connector, groups)
    engine.add(request_of(engine, "first", list(range(100))))
    engine.run()
    side = engine.worker._worker
    load = side.mover.load

    def in_part(caches, plan):
        caches, transfer = load(caches, plan)
        moved = transfer.moved

        def all_but_one(plan):
            masks = {group_idx: mask.copy() for group_idx, mask in moved(plan).items()}
            masks[min(masks)][0] = False
            return masks

        transfer.moved = all_but_one
        ids = plan.moves[0].block_ids
        for leaf in side.mover.caches.group_leaves[plan.moves[0].group_idx]:
            array = np.array(caches[leaf])
            array[ids[0][ids[0] > 0]] = 7
            caches[leaf] = jnp.asarray(array)
        return caches, transfer

    side.mover = SimpleNamespace(
        store=side.mover.store, load=in_part, revive=side.mover.revive, caches=side.mover.caches, close=side.mover.close
    )
    engine.add(request_of(engine, "again", list(range(100))))
    engine.run()
    assert engine.restored_tokens > 0
    assert engine.failed_loads == 1


@pytest.mark.parametrize("groups", [STATES, UNIFORM], ids=["states", "uniform"])
def test_a_pool_that_is_full_evicts_or_declines(connector, groups):
    rng = np.random.default_rng(3)
    engine = engine_of(connector, groups, num_blocks=BLOCKS[len(groups)], host_bytes=12 * 1024)
    conversations(engine, rng, turns=4)
    engine.books().check_integrity()
    assert engine.books().pool.counts.evicted_by_group.sum() > 0


def test_a_pool_smaller_than_a_prompt_is_told_once(connector, caplog):
    engine = engine_of(connector, UNIFORM, host_bytes=12 * 1024)
    for name in ("first", "again", "thrice"):
        engine.add(request_of(engine, name, list(range(250))))
        engine.run()
    assert engine.restored_tokens > 0
    assert [one for one in caplog.messages if "too small" in one] == [engine.books().too_small]


@pytest.mark.parametrize("late", [False, True], ids=["in step", "ahead"])
def test_a_turn_after_a_pause_is_restored_whatever_the_steps_before_could_tell(connector, late):
    """vLLM makes no step while it has no request: what the last stores came to is heard when the next one is there."""
    engine = engine_of(connector, MIXED, late=late)
    engine.add(request_of(engine, "warm-up", list(range(500, 520))))
    engine.run()
    side = engine.worker._worker
    store = side.mover.store

    def slow(caches, plan):
        caches, transfer = store(caches, plan)
        return caches, Slow(transfer, 4)

    side.mover = SimpleNamespace(
        store=slow, load=side.mover.load, revive=side.mover.revive, caches=side.mover.caches, close=side.mover.close
    )
    for name in ("first", "again"):
        engine.add(request_of(engine, name, list(range(97)), max_tokens=1))
        engine.run()
    assert engine.restored_tokens == 96
    assert engine.books().num_requests == 0


def test_a_prompt_does_not_wait_for_stores_while_others_run(connector):
    engine = engine_of(connector, MIXED)
    engine.add(request_of(engine, "a", list(range(100)), max_tokens=60))
    while engine.requests["a"].num_known < 110:
        engine.step()
    engine.worker._worker.mover = Unreliable(engine.worker._worker.mover, np.random.default_rng(1), fails=0)
    engine.worker._worker.mover._maybe = lambda transfer: Slow(transfer, 10**6)
    while not engine.scheduler._books._open:
        engine.step()
    engine.add(request_of(engine, "b", list(range(300, 340)), max_tokens=1))
    engine.step()
    assert engine.requests["b"].status == "RUNNING"


def test_requests_that_share_a_prefix_in_flight_end_up_with_one_copy_each_way(connector):
    engine = engine_of(connector, MIXED)
    engine.worker._worker.mover = Unreliable(engine.worker._worker.mover, np.random.default_rng(1), fails=0)
    tokens = list(range(90))
    for _ in range(2):
        for name in ("a", "b", "c"):
            engine.add(request_of(engine, name, [*tokens, ord(name)]))
        engine.run()
    stored = engine.books().counts.chunks_stored
    engine.add(request_of(engine, "d", [*tokens, 5]))
    engine.run()
    assert engine.restored_tokens >= 4 * 80
    assert engine.books().counts.chunks_stored - stored <= 3
    engine.books().check_integrity()


def test_an_abort_while_a_load_is_under_way_frees_the_blocks_when_it_has_ended(connector):
    engine = engine_of(connector, STATES)
    tokens = list(range(100))
    engine.add(request_of(engine, "first", tokens, max_tokens=30))
    engine.run()
    engine.worker._worker.mover = Unreliable(engine.worker._worker.mover, np.random.default_rng(1), fails=0)
    free = len(engine.free)
    engine.add(request_of(engine, "again", [*tokens, 1, 2, 3]))
    engine.step()
    assert engine.loading
    engine.abort("again")
    assert len(engine.free) < free
    for _ in range(8):
        engine.step()
    assert len(engine.free) == free
    assert engine.books().num_requests == 0
    engine.books().check_integrity()
    assert not engine.worker._worker._states._held


@pytest.mark.parametrize("late", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("groups", [STATES, MIXED], ids=["states", "mixed"])
def test_an_id_that_comes_again_at_once_is_another_request(connector, groups, late):
    """As clients that name requests themselves do. The last stores of the first one, and the word that it ended, come
    when the second one is there; it is restored, preempted and restored again."""
    engine = engine_of(connector, groups, late=late, extra={"checkpoint_tokens": 16})
    engine.worker._worker.mover = Unreliable(engine.worker._worker.mover, np.random.default_rng(0), fails=0)
    for length in (100, 97, 120, 97):
        engine.add(request_of(engine, "a", list(range(length)), max_tokens=12))
        engine.runner.known.clear()
        steps = 0
        while "a" in engine.requests:
            engine.step()
            steps += 1
            if steps == 14 and engine.running:
                engine._preempt(engine.running.pop())
            assert steps < 200, engine.scheduler._books._requests
    engine.run()
    assert engine.restored_tokens > 0
    assert engine.books().num_requests == 0
    assert not engine.worker._worker._states._held


def test_a_preempted_request_waits_for_what_it_computed_and_is_restored(connector):
    engine = engine_of(connector, MIXED)
    engine.worker._worker.mover = Unreliable(engine.worker._worker.mover, np.random.default_rng(3), fails=0)
    engine.add(request_of(engine, "a", list(range(100)), max_tokens=40))
    while engine.requests["a"].num_known < 130:
        engine.step()
    engine._preempt(engine.running.pop())
    engine.run()
    assert engine.restored_tokens == 128
    engine.books().check_integrity()


@pytest.mark.parametrize("groups", [MIXED, STATES], ids=["mixed", "states"])
def test_nothing_of_old_weights_is_restored_after_a_reset(connector, groups):
    """As vLLM resets for new weights: what runs is preempted, then all caches are told to forget."""
    engine = engine_of(connector, groups)
    for name in ("a", "b"):
        engine.add(request_of(engine, name, [ord(name), *range(150)], max_tokens=20))
    while not all(request.num_known > 152 for request in engine.requests.values()):
        engine.step()
    for request in reversed(engine.running):
        engine._preempt(request)
    engine.running.clear()
    assert engine.scheduler.reset_cache() is True
    engine.runner.weights = b"new"
    engine.run()
    assert engine.restored_tokens == 0
    for name in ("again", "thrice"):
        engine.add(request_of(engine, name, [ord("a"), *range(150)]))
        engine.run()
    assert engine.restored_tokens > 0
    engine.books().check_integrity()


@pytest.mark.parametrize("preempted", [False, True], ids=["running", "preempted"])
def test_a_request_that_began_before_the_books_and_a_reset_stores_nothing(connector, preempted):
    """The scheduler's side has books from the first report on; what runs by then is unknown to them."""
    engine = engine_of(connector, MIXED, late=True)
    engine.add(request_of(engine, "a", list(range(32)), max_tokens=20))
    engine.step()
    assert engine.scheduler._books.books is None
    if preempted:
        engine._preempt(engine.running.pop())
    assert engine.scheduler.reset_cache() is True
    engine.process(*engine.pending.pop())
    stored = engine.scheduler._books.books.ledger.counts
    engine.step()
    assert not engine.scheduler._books._open
    engine.run()
    assert (stored.chunks_stored > 0) is preempted, "what it computed anew is good"


def test_a_request_that_runs_through_a_reset_stores_nothing(connector):
    engine = engine_of(connector, MIXED)
    engine.add(request_of(engine, "a", list(range(150)), max_tokens=20))
    while engine.requests["a"].num_known < 152:
        engine.step()
    assert engine.scheduler.reset_cache() is True
    engine.run()
    engine.add(request_of(engine, "again", list(range(150)), max_tokens=20))
    engine.run()
    assert engine.restored_tokens == 0
    engine.add(request_of(engine, "thrice", list(range(150)), max_tokens=20))
    engine.run()
    assert engine.restored_tokens > 0


def test_a_request_that_loads_through_a_reset_stores_nothing(connector):
    engine = engine_of(connector, MIXED)
    engine.add(request_of(engine, "a", list(range(150))))
    engine.run()
    engine.worker._worker.mover = Unreliable(engine.worker._worker.mover, np.random.default_rng(1), fails=0)
    engine.add(request_of(engine, "again", list(range(150))))
    engine.step()
    assert engine.loading
    assert engine.scheduler.reset_cache() is True
    engine.run()
    restored = engine.restored_tokens
    engine.add(request_of(engine, "thrice", list(range(150))))
    engine.run()
    assert engine.restored_tokens == restored, "what stood on the old chunks was not stored"


def test_a_pool_that_dies_costs_computing_and_nothing_else(connector, monkeypatch):
    engine = engine_of(connector, MIXED)
    first, other = list(range(100)), list(range(500, 600))
    for name, tokens in (("first", first), ("other", other)):
        engine.add(request_of(engine, name, tokens))
        engine.run()
    mover = engine.worker._worker.mover

    def dies(caches, plan):
        raise RuntimeError("planted: the program took the pool with it")

    with monkeypatch.context() as broken:
        broken.setattr(mover, "load", dies)
        broken.setattr(mover, "revive", lambda: True)
        engine.add(request_of(engine, "first again", first))
        engine.run()
    restored = [engine.restored_tokens]
    for name in ("other again", "other a third time"):
        engine.add(request_of(engine, name, other))
        engine.run()
        restored.append(engine.restored_tokens)
    assert engine.failed_loads == 1
    assert restored == [96, 96, 192], "one that fails, one that finds nothing, one that is restored"
    engine.books().check_integrity()


@pytest.mark.parametrize("groups", [STATES, UNIFORM], ids=["states", "uniform"])
def test_a_tier_keeps_conversations_over_a_restart(connector, groups, tmp_path):
    restored = []
    for _ in range(2):
        engine = engine_of(connector, groups, extra={"tiers": [f"file://{tmp_path}/tier"], "host_bytes": 64 * 1024})
        for name in ("a", "b"):
            engine.add(request_of(engine, name, [ord(name), *range(100)]))
            engine.run()
        restored.append(engine.restored_tokens)
        engine.books().check_integrity()
        engine.worker.shutdown()
    assert restored == [0, 192]


@pytest.mark.parametrize("late", [False, True], ids=["in step", "ahead"])
def test_conversations_under_a_small_pool_come_back_from_a_tier(connector, late, tmp_path):
    rng = np.random.default_rng(5)
    engine = engine_of(
        connector,
        STATES,
        num_blocks=BLOCKS[3],
        late=late,
        host_bytes=16 * 1024,
        extra={"tiers": [f"file://{tmp_path}/tier?write=through"]},
    )
    engine.worker._worker.mover = Unreliable(engine.worker._worker.mover, rng, fails=0.1)
    conversations(engine, rng, turns=4)
    engine.books().check_integrity()
    assert engine.books().promoted_by_group.sum() > 0
    engine.worker.shutdown()


def test_tiers_without_a_worker_in_the_process_are_refused(connector, tmp_path):
    extra = {"tiers": [f"file://{tmp_path}/tier"], "host_bytes": 2**20}
    config = config_of(UNIFORM, 40, 8)
    with pytest.raises(ValueError, match="`tiers` must be used where vLLM runs its worker in the scheduler's process"):
        connector(vllm_config_of(extra), vllm_interface.KVConnectorRole.SCHEDULER, config)
