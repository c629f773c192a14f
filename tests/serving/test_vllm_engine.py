"""The connector under a small vLLM: every byte that a request reads is what its tokens make it."""

import importlib

import numpy as np
import pytest

from kvjax.groups import ChunkedLocal, FullAttention, SlidingWindow
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
