"""Compiles programs for real TPUs on a machine without one, with the compiler that libtpu holds.

What compiles runs as a `tests.aot.children.Child`.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.aot.compiled import Program, program

TARGETS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
AXIS = "model"
NO_LIBTPU = (
    None if importlib.util.find_spec("libtpu") else "libtpu, the TPU compiler, is not installed: `.[aot]` has it"
)


def mesh_of(target: str, num_devices: int = 1) -> Mesh:
    """The first devices of a target as a mesh of one axis, `AXIS`."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=target).devices
    return Mesh(np.array(devices[:num_devices]), (AXIS,))


def abstract(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *spec: Any, kind: str = "device") -> jax.ShapeDtypeStruct:
    """An array to compile for: shape, dtype, how its dimensions are split over the mesh, memory kind."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compile_for_tpu(function: Callable[..., Any], *args: Any, **jit_arguments: Any) -> Program:
    """Compiles `function` for the devices that the shardings of `args` name, and reads the result.

    Args:
        function: what to compile.
        *args: of `abstract`, or trees of such.
        **jit_arguments: of `jax.jit`, such as `donate_argnums` and `out_shardings`.
    """
    traced = jax.jit(function, **jit_arguments).trace(*args)
    return program(traced.lower(lowering_platforms=("tpu",)).compile())
