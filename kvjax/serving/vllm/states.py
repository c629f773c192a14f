"""States of recurrent layers, which tpu-inference keeps in slots of its own where vLLM caches no prefixes.

A running request has one slot, which its runner gives it in its first step. A state that is restored before that is
loaded into the null slot, and waits on the device, outside the cache, for the step in which there is a slot for it.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from kvjax.groups import CacheLayout
from kvjax.plan import LoadPlan, StorePlan
from kvjax.serving.vllm.tracked import STATE


class States:
    """Knows the slots of a runner's requests, and holds the states of those that have none yet.

    Args:
        layout: the groups.
        caches: the arrays by leaf name.
        runner: with an `input_batch` as tpu-inference's has it.
        slots: names of the groups whose states are in slots.

    Raises:
        ValueError: there are such groups, and the runner does not tell slots.
    """

    def __init__(self, layout: CacheLayout, caches: Mapping[str, jax.Array], runner: Any, slots: Container[str]):
        self._groups = {g for g, group in enumerate(layout.groups) if group.name in slots}
        self._leaves = [leaf.name for g in sorted(self._groups) for leaf in layout.groups[g].leaves]
        if self._groups and not hasattr(runner.input_batch, "mamba_state_indices_cpu"):
            raise ValueError(
                "the runner must tell the slots of states (`mamba_state_indices_cpu`), got one that does not"
            )
        self._runner = runner
        self._slots: dict[str, int] = {}
        self._held: dict[str, list[jax.Array]] = {}
        leaves = [caches[name] for name in self._leaves]
        if leaves:
            self._read, self._write = _compiled(leaves)

    def note_slots(self) -> None:
        """Notes where the states are that a step wrote: a store of them is issued when the slots may be others'."""
        self._slots = self._slots_now()

    def from_slots(self, request_id: str, plan: StorePlan) -> StorePlan:
        """Returns a plan that stores a request's state from the slot it had in the last step; without the state if it
        had none."""
        slot = self._slots.get(request_id)
        moves = [one for one in plan.moves if one.group_idx not in self._groups]
        if slot is not None:
            moves += [
                replace(one, block_ids=np.where(one.block_ids == STATE, np.int32(slot), one.block_ids))
                for one in plan.moves
                if one.group_idx in self._groups
            ]
        return StorePlan(tuple(moves), plan.num_bytes)

    def hold(self, request_id: str, plan: LoadPlan, caches: Mapping[str, jax.Array]) -> None:
        """Takes a state that a plan loaded out of the null slot."""
        if any(moves.group_idx in self._groups for moves in plan.moves):
            self._held[request_id] = self._read([caches[name] for name in self._leaves], STATE)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forgets states that will not be asked for."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def placed(self, caches: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the caches with the states of requests that have a slot by now; the old ones are donated."""
        slots = self._slots_now() if self._held else {}
        for request_id in [one for one in self._held if one in slots]:
            leaves = [caches[name] for name in self._leaves]
            written = self._write(leaves, self._held.pop(request_id), slots[request_id])
            caches = caches | dict(zip(self._leaves, written, strict=True))
        return caches

    def _slots_now(self) -> dict[str, int]:
        if not self._groups:
            return {}
        batch = self._runner.input_batch
        return {name: int(batch.mamba_state_indices_cpu[i]) for name, i in batch.req_id_to_index.items()}


def _compiled(leaves: list[jax.Array]) -> tuple[Callable[..., list[jax.Array]], Callable[..., list[jax.Array]]]:
    """Returns `_read` and `_written` as programs: no step of a server should have to compile."""
    read = jax.jit(_read).lower(leaves, STATE).compile()
    states = [
        jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding)
        for one, sharding in zip(read.out_info, read.output_shardings, strict=True)
    ]
    write = jax.jit(_written, donate_argnums=0, out_shardings=[leaf.sharding for leaf in leaves])
    return read, write.lower(leaves, states, STATE).compile()


def _read(leaves: list[jax.Array], slot: int) -> list[jax.Array]:
    return [_bits(leaf)[slot] for leaf in leaves]


def _written(leaves: list[jax.Array], states: list[jax.Array], slot: int) -> list[jax.Array]:
    """Returns the leaves with states, as `_read` returns them, in one slot."""
    return [
        jax.lax.bitcast_convert_type(_bits(leaf).at[slot].set(state), leaf.dtype)
        for leaf, state in zip(leaves, states, strict=True)
    ]


def _bits(leaf: jax.Array) -> jax.Array:
    """The elements as integers: programs of some backends do not keep every bit of every float."""
    return jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
