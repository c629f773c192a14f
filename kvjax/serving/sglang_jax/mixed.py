"""Host pages of several groups in one memory."""

from collections.abc import Iterator, Mapping, Sequence

from kvjax._checks import integer
from kvjax.chunking import Chunking
from kvjax.serving.sglang_jax.device_groups import DeviceGroup
from kvjax.serving.sglang_jax.group_pool import GroupPool as GroupPool
from kvjax.serving.sglang_jax.shared import SharedUnits, cut


class MixedHostPool(Mapping[str, GroupPool]):
    """A `GroupPool` for each group, by name; they share the memory, so each may take as much of it as is free.

    Which pages a resumed request needs of each group is asked of `kvjax.longest_hit(pool.chunking, …)` and
    `kvjax.store_set(pool.chunking, …)`, in which a page is a chunk.

    Args:
        groups: what the device holds, see `groups_of`.
        host_bytes: memory for the pages of all groups.
        transfer: how bytes cross the memory spaces, see `kvjax.memory.transports`.
        staging_bytes: see `kvjax.Mover`.

    Raises:
        ValueError: `host_bytes` is less than a page of the largest group, or arrays that cannot be moved.
        MemoryError: the machine does not have so much memory.
    """

    def __init__(
        self,
        groups: Sequence[DeviceGroup],
        *,
        host_bytes: int,
        transfer: str = "auto",
        staging_bytes: int | None = None,
    ):
        chunking, units = cut(groups)
        per_page = [count or 0 for count in units.units_per_chunk]
        num_units = integer(host_bytes, "host_bytes", at_least=1) // units.unit_bytes
        if num_units < max(per_page):
            least = max(per_page) * units.unit_bytes
            raise ValueError(f"`host_bytes` must hold a page of each group, {least} bytes, got {host_bytes}")
        self._shared = SharedUnits(
            groups, chunking, units, num_units=num_units, transfer=transfer, staging_bytes=staging_bytes
        )
        self._pools = {group.spec.name: GroupPool(self._shared, g) for g, group in enumerate(groups)}

    @property
    def chunking(self) -> Chunking:
        """The groups, with a page as a chunk."""
        return self._shared.chunking

    def close(self) -> None:
        """Waits for the moves under way."""
        self._shared.close()

    def __getitem__(self, name: str) -> GroupPool:
        return self._pools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)
