"""Compiles programs for a CUDA GPU on a machine without one.

Lowering takes plain jaxlib. Compiling to machine code takes the CUDA plugin of jax's version, `ptxas` and
libdevice. What compiles runs as a `tests.aot.children.Child`.
"""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.experimental import topologies
from jax.sharding import Mesh

from tests.aot.compiled import Program, copies, instructions
from tests.aot.tpu import AXIS

# Public facts of the H200, as `xla/backends/gpu/target_config/specs/h200.txtpb` in openxla/xla spells them.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" name: "NVIDIA H200" driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0" device_address_bits: 64
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def missing() -> str | None:
    """What is not installed that compiling to machine code takes; `None` if all is there."""
    if not _folders("jax_plugins", "xla_cuda1*"):
        return "the CUDA plugin of jax, which holds the compiler, is not installed: `.[aot-gpu]` has it"
    if not (shutil.which("ptxas") or _folders("nvidia", "*/bin/ptxas")):
        return "ptxas, which turns the compiler's output into machine code, is not installed: `.[aot-gpu]` has it"
    return None


def _folders(package: str, pattern: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [path for place in (spec and spec.submodule_search_locations) or () for path in Path(place).glob(pattern)]


def mesh_of(num_devices: int) -> Mesh:
    """A mesh of one axis, `AXIS`, of CPU devices that stand for GPUs; `jax_num_cpu_devices` says how many there are."""
    return Mesh(np.array(jax.devices("cpu")[:num_devices]), (AXIS,))


def lower_for_gpu(function: Callable[..., Any], *args: Any, debug_info: bool = False, **jit_arguments: Any) -> str:
    """Lowers `function` to StableHLO for CUDA.

    A `ShapeDtypeStruct` in host memory would be traced as if it lay in device memory, unlike an array there.

    Args:
        function: what to lower.
        *args: of `tests.aot.tpu.abstract`, or trees of such.
        debug_info: keep named scopes, for the metadata of what is compiled from it.
        **jit_arguments: of `jax.jit`, such as `donate_argnums` and `out_shardings`.
    """
    avals = jax.tree.map(lambda array: ShapedArray(array.shape, array.dtype, memory_space=_space(array)), args)
    shardings = jax.tree.map(lambda array: array.sharding, args)
    traced = jax.jit(function, in_shardings=shardings, **jit_arguments).trace(*avals)
    return traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=debug_info)


def executable(stablehlo: str, num_devices: int = 1) -> Any:
    """Compiles StableHLO to sm_90a code for H200s, and returns the compiler's own object."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=_H200, topology=f"1x1x{num_devices}"
    )
    devices = tuple(topology.devices)
    options = compiler.get_compile_options(num_replicas=1, num_partitions=num_devices)
    with mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        devices_list = xla_client.DeviceList(devices)
        client: Any = devices[0].client
        return client.compile(module, executable_devices=devices_list, compile_options=options)


def compile_for_gpu(stablehlo: str, num_devices: int = 1, *, large_bytes: int = 2**20) -> tuple[Program, list[str]]:
    """Compiles StableHLO to sm_90a code for H200s.

    Returns:
        What the program does, and the opcodes of all its instructions that make an array of over `large_bytes`.
    """
    compiled = executable(stablehlo, num_devices)
    memory, lines = compiled.get_compiled_memory_stats(), instructions(compiled.hlo_modules()[0].to_string())
    program = Program(
        alias_bytes=memory.alias_size_in_bytes,
        host_alias_bytes=memory.host_alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        host_output_bytes=memory.host_output_size_in_bytes,
        copies=copies(lines),
        opcodes=tuple(line.opcode for line in lines if line.in_entry),
    )
    large = {line.opcode for line in lines if any(made.num_bytes > large_bytes for made in line.results)}
    return program, sorted(large)


def _space(array: jax.ShapeDtypeStruct) -> Any:
    assert array.sharding is not None
    host = array.sharding.memory_kind == "pinned_host"
    return jax.memory.Space.Host if host else jax.memory.Space.Device
