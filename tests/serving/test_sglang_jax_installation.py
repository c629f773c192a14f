"""Putting the host pool into a sglang-jax, or saying why it cannot be. A stand-in of its module is enough."""

import abc
import inspect
import os
import subprocess
import sys
from types import ModuleType

import ml_dtypes
import pytest

from kvjax.serving.sglang_jax import HostPool, install, uninstall
from tests.support.sglang_jax_calls import mesh_of, mha_pool

NAME = "sgl_jax.srt.mem_cache.host_kv_pool"


class HostKVPool(abc.ABC):
    @abc.abstractmethod
    def reserve(self): ...


class LRUHostKVPool(HostKVPool):
    def __init__(
        self,
        device_pool,
        pool_size,
        page_size,
        layer_num,
        per_layer_shape,
        dtype,
        mesh,
        partition_spec,
        *,
        pool_name="",
    ): ...
    def reserve(self): ...
    def release(self, buffer_id): ...
    def alloc(self, need_pages): ...
    def free(self, host_page_ids): ...
    def available_size(self): ...
    def total_size(self): ...
    def inc_lock_ref(self, buffer_id): ...
    def dec_lock_ref(self, buffer_id): ...
    def stage_backup(self, device_indices, host_buffer_ids): ...
    def flush_backup(self, host_buffer_ids): ...
    def stage_load(self, host_buffer_ids): ...
    def flush_load(self, host_buffer_ids, device_indices): ...
    def copy_into(self, device_indices, host_buffer_ids): ...
    def copy_to_device(self, host_buffer_ids, device_indices): ...
    def precompile_transfers(self, max_pages=None): ...


@pytest.fixture
def module(monkeypatch):
    """The module that HiCache takes its pool from."""
    parts = NAME.split(".")
    for count in range(1, len(parts)):
        package = ModuleType(".".join(parts[:count]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    module = ModuleType(NAME)
    module.HostKVPool, module.LRUHostKVPool = HostKVPool, LRUHostKVPool
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def test_the_pool_is_replaced_and_put_back(module):
    install(transfer="staged")
    install(transfer="direct")
    device = mha_pool(mesh_of(1, 1), ml_dtypes.bfloat16)
    pool = module.LRUHostKVPool(
        device_pool=device,
        pool_size=2,
        page_size=4,
        layer_num=2,
        per_layer_shape=(),
        dtype=None,
        mesh=None,
        partition_spec=None,
    )
    assert isinstance(pool, HostPool)
    assert isinstance(pool, HostKVPool)
    assert pool.transfer == "direct"
    uninstall()
    assert module.LRUHostKVPool is LRUHostKVPool
    uninstall()
    assert module.LRUHostKVPool is LRUHostKVPool


def test_without_sglang_jax_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_jax", None)
    with pytest.raises(ImportError, match=f"`{NAME}` must be importable, as sglang-jax at its main has it"):
        install()


@pytest.mark.parametrize("name", ["HostKVPool", "LRUHostKVPool"])
def test_one_without_hicache_is_refused(module, name):
    delattr(module, name)
    with pytest.raises(ImportError, match=f"must have `{name}`, the installed sglang-jax has another host pool"):
        install()


def test_one_that_lacks_a_method_is_refused_and_left_alone(module):
    class Older(LRUHostKVPool):
        flush_load = None

    module.LRUHostKVPool = Older
    with pytest.raises(
        RuntimeError, match=r"`LRUHostKVPool.flush_load` .* must take \(host_buffer_ids, device_indices\), got no such"
    ):
        install()
    assert module.LRUHostKVPool is Older


def test_one_that_calls_a_method_otherwise_is_refused(module):
    class Newer(LRUHostKVPool):
        def alloc(self, need_pages, priority=0): ...

    module.LRUHostKVPool = Newer
    with pytest.raises(RuntimeError, match=r"`.*alloc` .* must take \(need_pages\), got \(need_pages, priority\)"):
        install()


def test_one_that_makes_its_pool_otherwise_is_refused(module):
    class Newer(LRUHostKVPool):
        def __init__(self, device_pool, pool_size, *, pool_name=""): ...

    module.LRUHostKVPool = Newer
    with pytest.raises(
        RuntimeError, match=r"`.*__init__` .* must take \(device_pool, .*, got \(device_pool, pool_size"
    ):
        install()


def test_the_adapter_is_imported_without_sglang_jax():
    code = "import sys, kvjax.serving.sglang_jax; sys.exit('sgl_jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_sglang_jax_the_server_says_so_in_one_line():
    code = "import sys, runpy; sys.modules['sgl_jax'] = None; "
    code += "runpy.run_module('kvjax.serving.sglang_jax.server', run_name='__main__')"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert told.stderr.startswith("kvjax: `sgl_jax.srt.mem_cache.host_kv_pool` must be importable")
    assert told.stderr.count("\n") == 1


def test_the_server_has_it_in_the_processes_that_it_starts(tmp_path):
    folder = tmp_path.joinpath(*NAME.split(".")[:-1])
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, tmp_path / "sgl_jax"):
        (package / "__init__.py").touch()
    classes = [inspect.getsource(one) for one in (HostKVPool, LRUHostKVPool)]
    (folder / "host_kv_pool.py").write_text("import abc\n" + "\n".join(classes), encoding="utf-8")
    (tmp_path / "sgl_jax" / "launch_server.py").write_text(
        "import multiprocessing\n"
        f"from {NAME.rpartition('.')[0]} import host_kv_pool\n"
        "def tell():\n"
        "    print(host_kv_pool.LRUHostKVPool.func.__module__)\n"
        "def main():\n"
        "    process = multiprocessing.get_context('spawn').Process(target=tell)\n"
        "    process.start()\n"
        "    process.join()\n",
        encoding="utf-8",
    )
    paths = [str(tmp_path), *sys.path]
    told = subprocess.run(
        [sys.executable, "-m", "kvjax.serving.sglang_jax.server"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.stdout.split() == ["kvjax.serving.sglang_jax.host_pool"], told.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transfer": "dma"}, "`transfer` must be one of 'auto', 'direct', 'staged', got 'dma'"),
        ({"staging_bytes": "1GiB"}, "`staging_bytes` must be a positive int, got '1GiB'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_replaced(module, options, text):
    """The pool is made later, in another process."""
    with pytest.raises(ValueError, match=text):
        install(**options)
    assert module.LRUHostKVPool is LRUHostKVPool
