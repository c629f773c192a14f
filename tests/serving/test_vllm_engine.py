"""The connector under a small vLLM: every byte that a request reads is what its tokens make it."""

import importlib

import numpy as np
import pytest

from kvjax.groups import ChunkedLocal, FullAttention, Recurrent, SlidingWindow
from tests.serving import vllm_interface
from tests.serving.vllm_engine import Engine, Group, Request

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
SHARED = [Group(FullAttention(), 8, (0, 1)), Group(SlidingWindow(20), 8, (0, 1)), Group(SlidingWindow(20), 8, (0,))]
BLOCKS = {1: 40, 3: 75}  # in the device pool, by the number of groups
UNIFORM = [Group(FullAttention(), 8, (0, 1, 2))]


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
    print(restored, preemptions)
    assert restored > 0
    assert preemptions > 0
