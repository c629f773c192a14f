"""The ways across the memory spaces, which of them a machine can take, and the choice.

* `"direct"`: blocks reach their units without a copy in between that the host makes. On the CPU backend they are
  copied where they lie; on a GPU or a TPU they are packed on the device and one kernel moves them between the
  staging and the pool, which is pinned memory.
* `"staged"`: pack, one bulk transfer, and a copy on the host. It works on every backend.
* `"auto"`: the first of these that can be taken and is known to be no slower. What is passed over is logged.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from kvjax._checks import shown
from kvjax.chunking import Chunking
from kvjax.memory import direct
from kvjax.memory.direct import DirectTransport
from kvjax.memory.host import HostMemory
from kvjax.memory.inplace import InPlaceTransport, donation_refusal
from kvjax.memory.registration import RegisteredCaches
from kvjax.memory.staged import StagedTransport
from kvjax.packing import GRANULE_BYTES, Units
from kvjax.plan import GroupMoves

TRANSFERS = ("auto", "direct", "staged")

_LOG = logging.getLogger(__name__)


class Transport(Protocol):
    """Owns the host pool's bytes and moves chunks of one group at a time.

    `store` and `load` issue all JAX work on the caller's thread. What they return or yield ends when the move
    it stands for is over; a generator must be run to its end. After a `store`, the blocks may be overwritten
    at once; a `load` donates the group's arrays and replaces them in the mapping it is given.
    """

    name: str
    most_staged_units: int

    @property
    def memory(self) -> HostMemory | None:
        """The pool, if it is in the process's own memory."""
        ...

    def store(self, caches: Mapping[str, jax.Array], moves: GroupMoves) -> Iterable[Any]:
        """Moves chunks from the caches to the pool."""
        ...

    def load(self, caches: dict[str, jax.Array], moves: GroupMoves) -> Iterable[Any]:
        """Moves chunks from the pool to the caches."""
        ...

    def read(self, group_idx: int, unit_ids: np.ndarray) -> np.ndarray:
        """Returns a copy of chunks, `uint8` `(num_chunks, units_per_chunk * unit_bytes)`."""
        ...

    def write(self, group_idx: int, unit_ids: np.ndarray, chunks: np.ndarray) -> None:
        """Puts chunks, as `read` returns them, into units that nothing reads or writes."""
        ...

    def revive(self) -> bool:
        """Makes the pool anew if it was lost, and tells whether it was."""
        ...

    def close(self) -> None:
        """Waits for the moves under way."""
        ...


def granule_bytes(caches: RegisteredCaches) -> int:
    """Returns what the bytes of a unit must be a multiple of.

    On accelerators each device of a mesh keeps an equal part of every unit, aligned as its transport needs it.
    """
    if caches.platform == "cpu":
        return GRANULE_BYTES["cpu"]
    of_device = GRANULE_BYTES["tpu" if caches.platform == "tpu" else "gpu"]
    return of_device if direct.split_refusal(caches) else of_device * len(caches.devices)


def refusal(caches: RegisteredCaches, units: Units, num_units: int) -> str | None:
    """Returns why the direct transport cannot be taken, or `None` if it can, as far as is known without compiling."""
    if caches.platform == "cpu":
        return donation_refusal(caches.devices[0])
    return direct.refusal(caches, units, num_units)


def auto_refusal(caches: RegisteredCaches, units: Units, num_units: int) -> str | None:
    """Returns why `"auto"` passes the direct transport over, or `None` if it tries it first."""
    reason = refusal(caches, units, num_units)
    if reason is None and caches.platform == "tpu":
        return "it has not been shown to be faster on a TPU"
    return reason


def make_transport(
    transfer: str,
    caches: RegisteredCaches,
    chunking: Chunking,
    units: Units,
    *,
    num_units: int,
    staging_units: int,
    show_progress: bool | None = None,
) -> Transport:
    """Makes the transport that `transfer` asks for.

    Args:
        transfer: one of `TRANSFERS`.
        caches: the registered arrays.
        chunking: the layout and its chunks.
        units: how chunks are cut into units.
        num_units: units of the host pool.
        staging_units: units that are staged at most at a time on each device.
        show_progress: see `progress_bar`.

    Raises:
        ValueError: an unknown `transfer`; `"direct"` where it cannot be taken; or a budget above the limit of
            pinned memory.
        MemoryError: the machine does not have so much memory for the pool.
    """
    if transfer not in TRANSFERS:
        raise ValueError(f"`transfer` must be one of {', '.join(map(repr, TRANSFERS))}, got {shown(transfer)}")
    if transfer != "staged":
        reason = (auto_refusal if transfer == "auto" else refusal)(caches, units, num_units)
        if reason is None:
            made = _direct(transfer, caches, chunking, units, num_units, staging_units, show_progress)
            if made is not None:
                return made
        elif transfer == "direct":
            raise ValueError(f"`transfer` must not be 'direct' here: {reason}")
        else:
            _LOG.info("`transfer` is 'staged', as 'direct' was not taken: %s", reason)
    memory = HostMemory(num_units, units.unit_bytes, show_progress=show_progress)
    return StagedTransport(caches, chunking, units, memory, staging_units=staging_units, show_progress=show_progress)


def _direct(
    transfer: str,
    caches: RegisteredCaches,
    chunking: Chunking,
    units: Units,
    num_units: int,
    staging_units: int,
    show_progress: bool | None,
) -> Transport | None:
    """The direct transport, or `None` if `"auto"` has to do without, as its programs do not compile or run."""
    if caches.platform == "cpu":
        memory = HostMemory(num_units, units.unit_bytes, show_progress=show_progress)
        return InPlaceTransport(caches, chunking, units, memory, show_progress=show_progress)
    direct.check_budget(caches.platform, num_units * units.unit_bytes)
    try:
        return DirectTransport(
            caches, chunking, units, num_units=num_units, staging_units=staging_units, show_progress=show_progress
        )
    except MemoryError:
        raise
    except Exception as error:  # the compilers' and runtimes' errors have no common type
        reason = " ".join(str(error).split())
        if transfer == "direct":
            raise ValueError(f"`transfer` must not be 'direct' here: {reason}") from error
        _LOG.warning("`transfer` is 'staged', as 'direct' failed to start: %s", reason)
        return None
