"""The host pool that takes the place of sglang-jax's `LRUHostKVPool`."""

import logging
from typing import Any

from kvjax._checks import integer, shown
from kvjax.groups import FullAttention
from kvjax.serving.sglang_jax.device_groups import device_group
from kvjax.serving.sglang_jax.group_pool import GroupPool
from kvjax.serving.sglang_jax.shared import SharedUnits, cut

_LOG = logging.getLogger(__name__)


class HostPool(GroupPool):
    """Host pages of a device pool with one group, made as sglang-jax makes its own.

    Args:
        device_pool: `MHATokenToKVPool` or `MLATokenToKVPool`; its indexer keys, if it has any, are part of a page.
        pool_size: host pages.
        page_size: tokens of a page.
        layer_num: arrays in the device pool's `kv_buffer`.
        per_layer_shape: not used, as the arrays say it; so are the next three.
        dtype: not used.
        mesh: not used.
        partition_spec: not used.
        pool_name: names the pool in the log.
        transfer: how bytes cross the memory spaces, see `kvjax.memory.transports`.
        staging_bytes: see `kvjax.Mover`.

    Raises:
        ValueError: a number that is not a positive int, `layer_num` is not that of the arrays, or the arrays cannot be
            moved.
        MemoryError: the machine does not have so much memory.
    """

    def __init__(
        self,
        device_pool: Any,
        pool_size: int,
        page_size: int,
        layer_num: int,
        per_layer_shape: Any,  # noqa: ARG002  # this and the next three are sglang-jax's signature
        dtype: Any,  # noqa: ARG002
        mesh: Any,  # noqa: ARG002
        partition_spec: Any,  # noqa: ARG002
        *,
        pool_name: str = "hicache",
        transfer: str = "auto",
        staging_bytes: int | None = None,
    ):
        num_pages = integer(pool_size, "pool_size", at_least=1)
        group = device_group("full", FullAttention(), integer(page_size, "page_size", at_least=1), device_pool)
        if layer_num != len(device_pool.kv_buffer):
            held = len(device_pool.kv_buffer)
            raise ValueError(f"`layer_num` must be the number of arrays in `kv_buffer`, {held}, got {shown(layer_num)}")
        chunking, units = cut([group])
        num_units = num_pages * (units.units_per_chunk[0] or 0)
        shared = SharedUnits(
            [group], chunking, units, num_units=num_units, transfer=transfer, staging_bytes=staging_bytes
        )
        super().__init__(shared, 0)
        _LOG.info("host pool %s: %d pages, %d bytes, %s", pool_name, num_pages, shared.num_bytes, shared.transfer)
