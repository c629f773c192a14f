"""What `kvjax doctor` asks JAX: the devices, and which transports a small cache can take."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from kvjax.chunking import resolve_chunking
from kvjax.groups import CacheLayout, FullAttention, GroupSpec, LeafSpec, Recurrent, cache_dtype
from kvjax.memory.registration import register
from kvjax.memory.transports import auto_refusal, granule_bytes, refusal
from kvjax.mover import Mover
from kvjax.packing import blocks_in_chunk, cut_into_units, unit_bytes
from kvjax.plan import GroupMoves, LoadPlan, StorePlan

_NUM_BLOCKS = 10
_NUM_CHUNKS = 2
_SPARE_UNITS = 3
_LONGEST_ERROR = 400  # characters; compilers put whole programs into theirs


@dataclass(frozen=True, slots=True)
class Trial:
    """How it went to move chunks with a transport.

    Args:
        refused: why it could not be made here; `None` if it could.
        result: `"ok"` if all bytes are as they must be, else what went wrong; `None` if it could not be made.
    """

    refused: str | None
    result: str | None


def local_devices(runtimes: Sequence[str]) -> list[Any]:
    """Returns the devices of JAX's default backend that this process drives.

    Args:
        runtimes: which packages for accelerators are installed, for the message.

    Raises:
        ValueError: JAX cannot start a backend.
    """
    try:
        return jax.local_devices()
    except Exception as error:  # the backends' errors have no common type
        asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        wanted = f" of JAX_PLATFORMS={asked!r}" if asked else ""
        installed = ", ".join(runtimes) or "none"
        raise ValueError(
            f"JAX cannot start the backend{wanted}: {one_line(error)}; packages for accelerators installed: {installed}"
        ) from error


def describe_devices(devices: list[Any]) -> list[dict[str, Any]]:
    """Returns the kinds of devices, how many there are of each, and the kinds of memory that each can address."""
    kinds: dict[str, list[Any]] = {}
    for device in devices:
        kinds.setdefault(device.device_kind, []).append(device)
    return [
        {
            "device_kind": kind,
            "platform": alike[0].platform,
            "num_devices": len(alike),
            "memory_kinds": [memory.kind for memory in alike[0].addressable_memories()],
        }
        for kind, alike in kinds.items()
    ]


class Probe:
    """A small cache of random bytes on one device, in two groups of different blocks and kinds.

    Args:
        device: a `jax.Device`.
    """

    def __init__(self, device: Any):
        keys_values = LeafSpec("keys_values", (16, 4, 128), cache_dtype("bfloat16"))
        state = LeafSpec("state", (6, 8, 128), cache_dtype("float32"))
        layout = CacheLayout(
            [
                GroupSpec("full", FullAttention(), 16, (keys_values,)),
                GroupSpec("state", Recurrent(), 32, (state,)),
            ]
        )
        rng = np.random.default_rng(0)
        self._device = device
        self._chunking = resolve_chunking(layout, blocks_per_chunk={"full": 2})
        self._bytes = {
            leaf.name: rng.integers(0, 256, (_NUM_BLOCKS, leaf.row_bytes), np.uint8) for leaf in (keys_values, state)
        }
        self._caches = register(layout, self._arrays())
        self.platform = self._caches.platform
        self.granule_bytes = granule_bytes(self._caches)
        self._units = cut_into_units(self._chunking, unit_bytes(self._chunking, self.granule_bytes))
        self._num_units = _NUM_CHUNKS * sum(n or 0 for n in self._units.units_per_chunk) + _SPARE_UNITS
        self._source, self._target = self._moves(rng)

    def refusal(self) -> str | None:
        """Returns why the direct transport cannot be taken, or `None`."""
        return refusal(self._caches, self._units, self._num_units)

    def auto_refusal(self) -> str | None:
        """Returns why `"auto"` passes the direct transport over, or `None`."""
        return auto_refusal(self._caches, self._units, self._num_units)

    def tried(self, transfer: str) -> Trial:
        """Stores chunks with a transport, loads them into other blocks, and compares every byte of the caches."""
        try:
            mover = Mover(
                self._chunking,
                self._units,
                self._arrays(),
                num_units=self._num_units,
                transfer=transfer,
                show_progress=False,
            )
        except ValueError as error:
            return Trial(str(error).partition(" here: ")[2] or str(error), None)
        except Exception as error:  # noqa: BLE001  # whatever goes wrong is what the trial is to tell
            return Trial(None, one_line(error))
        try:
            with closing(mover):
                wrong = self._wrong_bytes(mover)
        except Exception as error:  # noqa: BLE001
            return Trial(None, one_line(error))
        return Trial(None, wrong or "ok")

    def _wrong_bytes(self, mover: Mover) -> str | None:
        """Moves the chunks there and back, and says which blocks have bytes that they must not have."""
        caches, stored = mover.store(self._arrays(), StorePlan(self._source, 0))
        stored.wait()
        caches, loaded = mover.load(caches, LoadPlan(self._target, 0))
        loaded.wait()
        for g, name in enumerate(self._bytes):
            expected = self._bytes[name].copy()
            expected[self._target[g].block_ids] = self._bytes[name][self._source[g].block_ids]
            found = np.array(caches[name]).reshape(_NUM_BLOCKS, -1).view(np.uint8)
            wrong = np.flatnonzero((found != expected).any(axis=1)).tolist()
            if wrong:
                moved = np.sort(self._target[g].block_ids, axis=None).tolist()
                return f"wrong bytes in blocks {wrong} of leaf {name!r}, of which {moved} were loaded"
        return None

    def _arrays(self) -> dict[str, jax.Array]:
        leaves = self._chunking.layout.leaves
        return {
            name: jax.device_put(
                rows.view(leaves[name].dtype).reshape(_NUM_BLOCKS, *leaves[name].block_shape),
                self._device,
                may_alias=False,
            )
            for name, rows in self._bytes.items()
        }

    def _moves(self, rng: np.random.Generator) -> tuple[tuple[GroupMoves, ...], tuple[GroupMoves, ...]]:
        """Chunks at random places, and the same ones at others: of the device, not of the pool."""
        places, taken = rng.permutation(self._num_units).astype(np.int32), 0
        moves: tuple[list[GroupMoves], list[GroupMoves]] = ([], [])
        for g in self._chunking.layout.cached:
            width = self._units.units_per_chunk[g] or 0
            units = places[taken : taken + _NUM_CHUNKS * width].reshape(_NUM_CHUNKS, width)
            taken += units.size
            shape = (2, _NUM_CHUNKS, blocks_in_chunk(self._chunking, g))
            blocks = rng.permutation(_NUM_BLOCKS)[: np.prod(shape)].astype(np.int32).reshape(shape)
            for found, ids in zip(moves, blocks, strict=True):
                found.append(GroupMoves(g, _NUM_CHUNKS, np.arange(_NUM_CHUNKS, dtype=np.int32), ids, units))
        return tuple(moves[0]), tuple(moves[1])


def probe_of(device: Any) -> Probe:
    """Returns a cache on a device.

    Raises:
        ValueError: the device cannot hold one.
    """
    try:
        return Probe(device)
    except Exception as error:  # the runtimes' errors have no common type
        raise ValueError(f"JAX cannot put a small cache on {device}: {one_line(error)}") from error


def describe_transports(
    probe: Probe, *, test: bool, done: Callable[[float], None] = lambda _steps: None
) -> list[dict[str, Any]]:
    """Returns for each transport if it can be taken and why not, if `"auto"` takes it, and how its trial went.

    Args:
        probe: the cache to ask about.
        test: move chunks.
        done: called after each transport.
    """
    found = [_describe(probe, transfer, test=test, done=done) for transfer in ("direct", "staged")]
    direct, staged = found
    passed_over = probe.auto_refusal()
    direct["auto"] = direct["available"] and passed_over is None
    staged["auto"] = not direct["auto"]
    if direct["available"]:
        direct["reason"] = passed_over
    return found


def works(transport: Mapping[str, Any]) -> bool:
    """True of a transport that can be taken and did not fail its trial."""
    return transport["available"] and transport["tested"] in ("ok", None)


def one_line(error: Exception) -> str:
    """Returns what an error says, on one line and not too long."""
    text = str(error)
    return textwrap.shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__, _LONGEST_ERROR)


def _describe(probe: Probe, transfer: str, *, test: bool, done: Callable[[float], None]) -> dict[str, Any]:
    reason = probe.refusal() if transfer == "direct" else None
    trial = probe.tried(transfer) if test and reason is None else Trial(reason, None)
    done(1)
    return {
        "transfer": transfer,
        "available": trial.refused is None,
        "reason": trial.refused,
        "auto": False,
        "tested": trial.result,
    }
