"""Whether the GPU kernels move every bit, in place, and how fast, beside pinned cuMemcpyAsync in the same run.

    python tests/benchmarks/gpu_moves.py [--mebibytes 256] [--json] [--dry-run]

Every stage is a process of its own, so that a kernel that dies takes no other with it; together they take less than
three minutes on one H200. `exact`: all bytes, moved and untouched, were compared. `in_place`: the donated array kept
its address from call to call. A stage that fails prints why. With `--dry-run` the plain JAX implementation runs on the
CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from driver_copies import HostMemcpy, PinnedMemcpy, seconds
from jax.sharding import SingleDeviceSharding

from pallas_kernels import block_copy, pack, unpack

BLOCK_BYTES = (4096, 65536, 2**20, 4 * 2**20)
BUDGET_S = 170.0
STAGE_S = 60.0
Row = dict[str, Any]


class Machine:
    """Where the stages run: the device, its memories, the implementation and the sizes.

    Args:
        num_bytes: bytes that each case moves.
        dry_run: whether to run on the CPU.
    """

    def __init__(self, num_bytes: int, dry_run: bool):
        self.num_bytes = num_bytes
        self.block_bytes = [size for size in BLOCK_BYTES if size <= num_bytes]
        self.device = jax.devices()[0]
        self.kernels: dict[str, Any] = {"implementation": "reference" if dry_run else "mosaic_gpu"}
        self._rng = np.random.default_rng(0)

    def memory(self, kind: str) -> SingleDeviceSharding:
        """A memory of the device."""
        return SingleDeviceSharding(self.device, memory_kind=kind)

    def random(self, shape: tuple[int, ...]) -> np.ndarray:
        """Random words."""
        return self._rng.integers(0, 2**32, shape, np.uint32)

    def ids(self, num_blocks: int, length: int) -> np.ndarray:
        """Different ids in any order."""
        return self._rng.permutation(num_blocks)[:length].astype(np.int32)

    def put(self, array: np.ndarray, kind: str = "device") -> jax.Array:
        """The array in a memory of the device, in a buffer of its own."""
        return jax.block_until_ready(jax.device_put(array.copy(), self.memory(kind)))

    def same(self, array: jax.Array, expected: np.ndarray) -> bool:
        """Compares all bytes, through a copy on the device: a NumPy view of host memory would forbid its donation."""
        moved = jax.device_put(array, self.memory("device")) + jnp.zeros((), array.dtype)
        return np.array_equal(np.asarray(moved), expected)

    def measure(self, name: str, block_bytes: int, step: Callable[[Any], Any], state: jax.Array, want: Any) -> Row:
        """Runs `step`, which donates the state it is given and returns the next one, and checks the last one."""
        box, addresses = [state], []

        def run() -> None:
            box[0] = jax.block_until_ready(step(box[0]))
            addresses.append(box[0].unsafe_buffer_pointer())

        taken = seconds(run)
        return {
            "bench": "gpu_moves",
            "name": name,
            "block_bytes": block_bytes,
            "bytes": self.num_bytes,
            "gb_per_s": round(self.num_bytes / taken / 1e9, 2),
            "exact": self.same(box[0], want),
            "in_place": len(set(addresses)) == 1,
        }


def copied(machine: Machine, of: str, to: str, block_bytes: int) -> Iterator[Row]:
    """`block_copy` from one memory to another, in place."""
    words, length = block_bytes // 4, machine.num_bytes // block_bytes
    source, target = machine.random((2 * length, words)), machine.random((2 * length, words))
    here, there = machine.ids(2 * length, length), machine.ids(2 * length, length)
    want = target.copy()
    want[there] = source[here]
    step = jax.jit(
        lambda dst, src, here, there: block_copy([src], here, [dst], there, length, **machine.kernels)[0],
        donate_argnums=0,
        out_shardings=machine.memory(to),
    )
    args = machine.put(source, of), machine.put(here), machine.put(there)
    name = f"block_copy {of} to {to}"
    yield machine.measure(name, block_bytes, lambda dst: step(dst, *args), machine.put(target, to), want)


def packed(machine: Machine, memory: str, block_bytes: int) -> Iterator[Row]:
    """`pack` to and `unpack` from a staging in a memory, of four leaves, in place."""
    words, length = block_bytes // 16, machine.num_bytes // block_bytes
    leaves, ids = [machine.random((2 * length, words)) for _ in range(4)], machine.ids(2 * length, length)
    want = np.concatenate([leaf[ids] for leaf in leaves], axis=1)
    on_device, device_ids = [machine.put(leaf) for leaf in leaves], machine.put(ids[:, None])
    store = jax.jit(
        lambda staging: pack(on_device, device_ids, length, staging, **machine.kernels),
        donate_argnums=0,
        out_shardings=machine.memory(memory),
    )
    empty = machine.put(np.zeros_like(want), memory)
    yield machine.measure(f"pack to {memory}", block_bytes, store, empty, want)
    load = jax.jit(
        lambda leaf, rest, staging: unpack(staging, [leaf, *rest], device_ids, length, **machine.kernels),
        donate_argnums=(0, 1),
    )
    first, rest, staging = leaves[0].copy(), [[machine.put(leaf) for leaf in leaves[1:]]], machine.put(want, memory)
    first[ids] = 0

    def restore(leaf: jax.Array) -> jax.Array:
        leaf, *rest[0] = load(leaf, rest[0], staging)
        return leaf

    row = machine.measure(f"unpack from {memory}", block_bytes, restore, machine.put(first), leaves[0])
    yield row | {"exact": row["exact"] and all(map(machine.same, rest[0], leaves[1:]))}


def transferred(machine: Machine, memcpy: Any, of: str, to: str, direction: str) -> Iterator[Row]:
    """`device_put` of one array, and the driver's copies block by block."""
    array = machine.random((machine.num_bytes // 4,))
    source, target = machine.put(array, of), machine.memory(to)
    taken = seconds(lambda: jax.block_until_ready(jax.device_put(source, target)))
    speed, exact = round(machine.num_bytes / taken / 1e9, 2), machine.same(jax.device_put(source, target), array)
    row = {"bench": "gpu_moves", "bytes": machine.num_bytes}
    yield row | {"name": f"device_put {of} to {to}", "gb_per_s": speed, "exact": exact}
    for block_bytes in machine.block_bytes:
        speed = round(memcpy.gb_per_s(direction, block_bytes), 2)
        yield row | {"name": f"memcpy {of} to {to}", "block_bytes": block_bytes, "gb_per_s": speed}


def of_each_size(function: Callable[..., Iterator[Row]], *args: Any) -> Callable[[Machine, Any], Iterator[Row]]:
    """A stage that measures blocks of each size."""
    return lambda machine, _: (row for size in machine.block_bytes for row in function(machine, *args, size))


STAGES: dict[str, Callable[[Machine, Any], Iterator[Row]]] = {
    "transfer to the host": lambda machine, memcpy: transferred(machine, memcpy, "device", "pinned_host", "store"),
    "transfer from the host": lambda machine, memcpy: transferred(machine, memcpy, "pinned_host", "device", "load"),
    "block_copy on the device": of_each_size(copied, "device", "device"),
    "block_copy to the host": of_each_size(copied, "device", "pinned_host"),
    "block_copy from the host": of_each_size(copied, "pinned_host", "device"),
    "packing on the device": of_each_size(packed, "device"),
    "packing to and from the host": of_each_size(packed, "pinned_host"),
}


def run_stage(name: str, num_bytes: int, dry_run: bool) -> None:
    """Prints the rows of a stage, each as a line of JSON, with the ratio to one copy of the driver's."""
    machine = Machine(num_bytes, dry_run)
    memcpy = (HostMemcpy if dry_run else PinnedMemcpy)(num_bytes)
    limits = {direction: memcpy.gb_per_s(direction, num_bytes) for direction in ("store", "load")}
    for row in STAGES[name](machine, memcpy):
        to_device = "to device" in row["name"] or "unpack" in row["name"]
        limit = limits["load" if to_device else "store"]
        if "pinned_host" in row["name"]:
            row |= {"memcpy_gb_per_s": round(limit, 2), "ratio": round(row["gb_per_s"] / limit, 2)}
        print(json.dumps(row | {"device": machine.device.device_kind, "jax": jax.__version__}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        run_stage(arguments.stage, arguments.mebibytes << 20, arguments.dry_run)
        return
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    asks = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    found = subprocess.run(asks, env=environment, capture_output=True, text=True, check=False).stdout.strip()
    if found != "gpu" and not arguments.dry_run:
        raise SystemExit(
            f"gpu_moves needs a GPU, or --dry-run for the CPU; the backend of JAX here is {found or 'none'}"
        )
    if arguments.dry_run:
        environment["JAX_PLATFORMS"] = "cpu"
    ends = time.monotonic() + BUDGET_S
    for stage in STAGES:
        left = min(STAGE_S, ends - time.monotonic())
        command = [sys.executable, __file__, *sys.argv[1:], "--stage", stage]
        try:
            ran = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=max(left, 1), check=False
            )
            output, failure = ran.stdout, ran.stderr[-2000:] if ran.returncode else ""
        except subprocess.TimeoutExpired as late:
            output, failure = (late.stdout or b"").decode(), f"no end after {left:.0f} s"
        for line in output.splitlines():
            row = json.loads(line)
            print(line if arguments.json else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if failure:
            print(f"stage {stage} failed: {failure}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
