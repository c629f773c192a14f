"""How fast the books of a full pool are beside those of vLLM's CPU offloading, on the same keys, in one run.

    tar -xf vllm-0.33.0.tar.gz    # its source distribution on PyPI; a checkout does, too, but states no version
    python tests/benchmarks/peer_pool.py --peer vllm-0.33.0 [--chunks 131072,524288] [--policies lru,arc] [--json]

Needs only the files of `vllm/v1/kv_offload`, NumPy and typing_extensions: nothing of vLLM is built, and what those
files import beside themselves is replaced by empty classes (see `_EMPTY`). What runs is `CPUOffloadingManager`
(`vllm/v1/kv_offload/cpu/manager.py`) with its policies `lru` and `arc`, called as its scheduler calls it: keys with
their positions, one `lookup` a key, sets of keys where a transfer ends. Its events are off, as by default.

Each row is a phase, see `tests.benchmarks.pool_phases.measure`; a call is all chunks of one request of 256.
"""

import argparse
import importlib
import json
import platform
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.cli.options import integer
from kvjax.observe.progress import progress_bar
from kvjax.pool import POLICIES
from tests.benchmarks.pool_manager import PoolManager
from tests.benchmarks.pool_phases import Manager, measure

# What vLLM's files import from outside `vllm/v1/kv_offload` and only name: in annotations, or in `get_stats`, which
# is not called. `vllm.utils.math_utils` and `vllm.v1.metrics.cache_hit_source` are its own files.
_EMPTY = {
    "torch": ("Tensor",),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": ("OffloadingConnectorStats",),
    "vllm.v1.kv_hints": ("KvHintsEnvelope",),
}
# Packages whose `__init__` would start the engine; their files are found, their `__init__` does not run.
_PACKAGES = ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.metrics")


@dataclass(frozen=True, slots=True)
class Peer:
    """The modules that are measured.

    Args:
        version: `vllm` and its version.
        base: `vllm.v1.kv_offload.base`.
        manager: `vllm.v1.kv_offload.cpu.manager`.
    """

    version: str
    base: Any
    manager: Any


def load_peer(path: Path) -> Peer:
    """Imports vLLM's manager from an unpacked source distribution or a checkout.

    Raises:
        ValueError: there is no such file under `path`, or it needs more than the replaced modules.
    """
    if not (path / "vllm/v1/kv_offload/cpu/manager.py").is_file():
        raise ValueError(f"`--peer` must be a folder with vllm/v1/kv_offload/cpu/manager.py, got {path}")
    for name in _PACKAGES:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(path.joinpath(*name.split(".")))]
    for name, classes in _EMPTY.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update({one: type(one, (), {}) for one in classes})
    sys.modules["vllm.logger"] = types.ModuleType("vllm.logger")
    vars(sys.modules["vllm.logger"])["init_logger"] = lambda _name: None
    try:
        base = importlib.import_module("vllm.v1.kv_offload.base")
        manager = importlib.import_module("vllm.v1.kv_offload.cpu.manager")
    except ImportError as error:
        raise ValueError(f"`--peer` must be a version whose manager imports no more than 0.33.0's: {error}") from error
    return Peer(peer_version(path), base, manager)


def peer_version(path: Path) -> str:
    """Returns `vllm` and the version that the source distribution states; a checkout states none."""
    metadata = path / "PKG-INFO"
    lines = metadata.read_text(encoding="utf-8").splitlines() if metadata.is_file() else []
    stated = [line.removeprefix("Version: ") for line in lines if line.startswith("Version: ")]
    return f"vllm {stated[0]}" if stated else "vllm of a checkout"


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """What vLLM's scheduler keeps of a request.

    Args:
        keys: of its chunks, in the order of their tokens.
        of_transfer: the same keys as a transfer keeps them.
        context: vLLM's `ReqContext`, which knows the keys' positions.
    """

    keys: list[bytes]
    of_transfer: set[bytes]
    context: Any


class PeerManager:
    """vLLM's `CPUOffloadingManager`; see `tests.benchmarks.pool_phases.Manager`."""

    has_finish = True

    def __init__(self, peer: Peer, num_chunks: int, policy: str):
        self.peer, self.policy = peer.version, policy
        self._manager = peer.manager.CPUOffloadingManager(num_chunks, cache_policy=policy)
        self._context = peer.base.ReqContext
        self._hit = peer.base.LookupResult.HIT

    def new_request(self, request_id: str, keys: list[bytes]) -> PeerRequest:
        context = self._context(req_id=request_id)
        for place, key in enumerate(keys, start=1):
            context.set_offload_key_position(key, place * 16)
        self._manager.on_new_request(context)
        return PeerRequest(keys, set(keys), context)

    def lookup(self, request: PeerRequest) -> int:
        lookup, context, hit = self._manager.lookup, request.context, self._hit
        return sum(lookup(key, context) is hit for key in request.keys)

    def prepare_store(self, request: PeerRequest) -> Any:
        return self._manager.prepare_store(request.keys, request.context)

    def complete_store(self, request: PeerRequest, store: Any) -> None:
        del store
        self._manager.complete_store(request.of_transfer, request.context)

    def prepare_load(self, request: PeerRequest) -> Any:
        return self._manager.prepare_load(request.keys, request.context)

    def complete_load(self, request: PeerRequest, load: Any) -> None:
        del load
        self._manager.complete_load(request.of_transfer, request.context)

    def touch(self, request: PeerRequest) -> None:
        self._manager.touch(request.keys, request.context)

    def finish(self, request: PeerRequest) -> None:
        self._manager.on_request_finished(request.context)


def managers(peer: Peer, policies: list[str]) -> list[Callable[[int], Manager]]:
    """Returns what makes each manager of so many chunks: vLLM's and kvjax's with each policy."""
    theirs = [lambda num_chunks, policy=policy: PeerManager(peer, num_chunks, policy) for policy in policies]
    ours = [
        lambda num_chunks, policy=policy: PoolManager(num_chunks, POLICIES[policy](), policy)
        for policy in policies
        if policy in POLICIES
    ]
    return [*theirs, *ours]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer", type=Path, required=True, help="an unpacked source distribution of vLLM, or a checkout"
    )
    parser.add_argument(
        "--chunks", type=lambda text: [integer(part) for part in text.split(",")], default=[131072, 524288]
    )
    parser.add_argument("--policies", type=lambda text: text.split(","), default=["lru", "arc"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        makers = managers(load_peer(arguments.peer), arguments.policies)
        rows = []
        with progress_bar("peer pool", len(arguments.chunks) * len(makers)) as advance:
            for num_chunks in arguments.chunks:
                for make in makers:
                    rows += measure(make(num_chunks), num_chunks)
                    advance(1)
    except ValueError as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps({"bench": "pool", "python": platform.python_version(), "rows": rows}))
        return
    columns = [name for name in rows[0] if name != "bench"]
    widths = [max(len(name), *(len(str(row[name])) for row in rows)) for name in columns]
    for line in (columns, *([row[name] for name in columns] for row in rows)):
        print("  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
