"""The host pool that a worker owns."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from kvjax.chunking import resolve_chunking
from kvjax.groups import CacheLayout
from kvjax.ledger import pool_units
from kvjax.memory.host import check_available
from kvjax.memory.registration import register
from kvjax.memory.transports import granule_bytes
from kvjax.mover import Mover
from kvjax.offloader import Offloader
from kvjax.packing import cut_into_units, unit_bytes
from kvjax.serving.vllm.messages import Geometry
from kvjax.serving.vllm.options import Options


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """A host pool, and what moves chunks to it and from it.

    Args:
        geometry: what a scheduler has to know of it.
        mover: owns its bytes.
        offloader: keeps its books, where there are lower tiers; else a scheduler keeps them.
    """

    geometry: Geometry
    mover: Mover
    offloader: Offloader | None

    def close(self) -> None:
        """Waits for what was issued; lower tiers get what they lack."""
        if self.offloader is not None:
            self.offloader.close()
        else:
            self.mover.close()


def host_of(
    options: Options, layout: CacheLayout, caches: Mapping[str, jax.Array], *, model: str, resume_multiple: int
) -> Host:
    """Makes the host pool.

    Args:
        options: the connector's settings.
        layout: the groups.
        caches: the device caches by leaf name.
        model: see `kvjax.Offloader`.
        resume_multiple: see `kvjax.Offloader`.

    Raises:
        ValueError: layout, arrays or settings that do not go together, or arrays of several processes.
        MemoryError: the machine does not have so much memory for the pool.
    """
    if jax.process_count() > 1:
        raise ValueError(f"kvjax must be used with one process that holds all devices, got {jax.process_count()}")
    chunking = resolve_chunking(layout, **options.chunking)
    units = cut_into_units(chunking, unit_bytes(chunking, granule_bytes(register(layout, caches))))
    if options.tiers:
        offloader = Offloader(
            layout,
            caches,
            host_bytes=options.host_bytes,
            **options.chunking,
            model=model,
            resume_multiple=resume_multiple,
            checkpoint_tokens=options.checkpoint_tokens,
            store_after=options.store_after,
            staging_bytes=options.staging_bytes,
            transfer=options.transfer,
            tiers=options.tiers,
            tier_ask_s=options.tier_ask_s,
        )
        mover = offloader.mover
    else:
        check_available(options.host_bytes)
        offloader = None
        mover = Mover(
            chunking,
            units,
            caches,
            num_units=pool_units(chunking, units, options.host_bytes),
            staging_bytes=options.staging_bytes,
            transfer=options.transfer,
        )
    num_blocks = {layout.groups[g].name: mover.caches.num_blocks(g) for g in layout.cached}
    return Host(Geometry(layout, units.unit_bytes, num_blocks), mover, offloader)
