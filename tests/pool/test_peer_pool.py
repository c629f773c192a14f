"""The parts of `tests/benchmarks/peer_pool.py` that need no vLLM."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks import peer_pool

BASE = """
from enum import Enum
import torch
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.utils.math_utils import cdiv

class ReqContext:
    def __init__(self, req_id):
        self.positions = {}
    def set_offload_key_position(self, key, position):
        self.positions[key] = position

LookupResult = Enum("LookupResult", "MISS HIT")
"""
# Never full, and keeps to the calls of vLLM 0.33.0: one key a lookup, sets of keys where a transfer ends.
MANAGER = """
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult

class CPUOffloadingManager:
    def __init__(self, num_chunks, cache_policy):
        self.ready = []
        self.calls = []
    def on_new_request(self, context):
        self.calls.append("on_new_request")
    def lookup(self, key, context):
        return LookupResult.HIT if key in self.ready else LookupResult.MISS
    def prepare_store(self, keys, context):
        self.calls.append(("prepare_store", [context.positions[key] for key in keys]))
        return keys
    def complete_store(self, keys, context):
        assert isinstance(keys, set)
        self.ready += keys
    def prepare_load(self, keys, context):
        assert isinstance(keys, list)
        return keys
    def complete_load(self, keys, context):
        assert isinstance(keys, set)
    def touch(self, keys, context):
        self.calls.append("touch")
    def on_request_finished(self, context):
        self.calls.append("on_request_finished")
"""
FILES = {
    "vllm/__init__.py": "raise ImportError('starts the engine')",
    "vllm/utils/__init__.py": "raise ImportError('starts the engine')",
    "vllm/utils/math_utils.py": "cdiv = divmod",
    "vllm/v1/kv_offload/__init__.py": "",
    "vllm/v1/kv_offload/base.py": BASE,
    "vllm/v1/kv_offload/cpu/__init__.py": "",
    "vllm/v1/kv_offload/cpu/manager.py": MANAGER,
}


@pytest.fixture
def checkout(tmp_path) -> Iterator[Path]:
    """A folder with files named as vLLM's; the modules that they become are forgotten when the test ends."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = {name: module for name, module in sys.modules.items() if is_replaced(name)}
    yield tmp_path
    for name in [name for name in sys.modules if is_replaced(name)]:
        del sys.modules[name]
    sys.modules.update(before)


def is_replaced(module: str) -> bool:
    return module.split(".")[0] in ("torch", "vllm")


def test_the_manager_is_loaded_without_the_engine_and_called_as_its_scheduler_does(checkout):
    manager = peer_pool.PeerManager(peer_pool.load_peer(checkout), 4, "lru")
    request = manager.new_request("a", [b"1", b"2"])
    assert manager.lookup(request) == 0
    manager.complete_store(request, manager.prepare_store(request))
    assert manager.lookup(request) == 2
    manager.complete_load(request, manager.prepare_load(request))
    manager.touch(request)
    manager.finish(request)
    calls = manager._manager.calls
    assert calls == ["on_new_request", ("prepare_store", [16, 32]), "touch", "on_request_finished"]
    assert (manager.peer, manager.policy) == ("vllm of a checkout", "lru")


def test_the_version_is_that_of_the_source_distribution(checkout):
    (checkout / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 1.2.3\n")
    assert peer_pool.load_peer(checkout).version == "vllm 1.2.3"


def test_a_folder_without_the_manager_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`--peer` must be a folder with vllm/v1/kv_offload/cpu/manager\.py, got"):
        peer_pool.load_peer(tmp_path)


def test_a_version_that_needs_more_modules_is_refused_by_what_it_needs(checkout):
    (checkout / "vllm/v1/kv_offload/base.py").write_text("import vllm.engine")
    with pytest.raises(ValueError, match=r"`--peer` must be a version .*: No module named 'vllm.engine'"):
        peer_pool.load_peer(checkout)
