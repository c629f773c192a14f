"""Puts the host pool into the sglang-jax of this process."""

import importlib
import inspect
from functools import partial
from types import ModuleType

from kvjax._checks import integer, one_of
from kvjax.memory.transports import TRANSFERS
from kvjax.serving.sglang_jax.host_pool import HostPool

_MODULE = "sgl_jax.srt.mem_cache.host_kv_pool"
_CLASS = "LRUHostKVPool"
_REPLACED = "_kvjax_replaced"  # where the module keeps its own class meanwhile
# What HiCache calls of its pool. A later sglang-jax that has other parameters is refused, not guessed at.
_METHODS = {
    "reserve": [],
    "release": ["buffer_id"],
    "alloc": ["need_pages"],
    "free": ["host_page_ids"],
    "available_size": [],
    "total_size": [],
    "inc_lock_ref": ["buffer_id"],
    "dec_lock_ref": ["buffer_id"],
    "stage_backup": ["device_indices", "host_buffer_ids"],
    "flush_backup": ["host_buffer_ids"],
    "stage_load": ["host_buffer_ids"],
    "flush_load": ["host_buffer_ids", "device_indices"],
    "copy_into": ["device_indices", "host_buffer_ids"],
    "copy_to_device": ["host_buffer_ids", "device_indices"],
    "precompile_transfers": ["max_pages"],
}


def install(*, transfer: str = "auto", staging_bytes: int | None = None) -> None:
    """Makes HiCache use `HostPool` for every engine that this process makes from now on.

    sglang-jax starts its scheduler as a new process that imports the main module again: call this at the top level
    of that module, outside of `if __name__ == "__main__":`. A second call replaces the options of the first.

    Args:
        transfer: how bytes cross the memory spaces, see `kvjax.memory.transports`.
        staging_bytes: see `kvjax.Mover`.

    Raises:
        ImportError: sglang-jax is not installed, or has no HiCache.
        ValueError: an argument of the wrong type or range.
        RuntimeError: its host pool is called in another way than this adapter knows.
    """
    one_of(transfer, TRANSFERS, "transfer")
    if staging_bytes is not None:
        integer(staging_bytes, "staging_bytes", at_least=1)
    module = _host_pool_module()
    theirs = getattr(module, _REPLACED, None) or getattr(module, _CLASS)
    _check_methods(theirs)
    module.HostKVPool.register(HostPool)
    setattr(module, _REPLACED, theirs)
    setattr(module, _CLASS, partial(HostPool, transfer=transfer, staging_bytes=staging_bytes))


def uninstall() -> None:
    """Makes HiCache use its own host pool again. Engines that were made meanwhile keep theirs."""
    module = _host_pool_module()
    theirs = module.__dict__.pop(_REPLACED, None)
    if theirs is not None:
        setattr(module, _CLASS, theirs)


def _host_pool_module() -> ModuleType:
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        raise ImportError(f"`{_MODULE}` must be importable, as sglang-jax at its main has it: {error}") from error
    for name in ("HostKVPool", _CLASS):
        if not hasattr(module, name):
            raise ImportError(f"`{_MODULE}` must have `{name}`, the installed sglang-jax has another host pool")
    return module


def _check_methods(theirs: type) -> None:
    wanted = {**_METHODS, "__init__": list(inspect.signature(HostPool.__init__).parameters)[1:-2]}
    for name, parameters in wanted.items():
        method = getattr(theirs, name, None)
        found = None if method is None else list(inspect.signature(method).parameters)[1:]
        if found != parameters:
            raise RuntimeError(
                f"`{_CLASS}.{name}` of the installed sglang-jax must take ({', '.join(parameters)}), "
                f"got {'no such method' if found is None else '(' + ', '.join(found) + ')'}"
            )
