"""Whether a host pool of a budget can be made on this machine."""

from typing import Any

from kvjax.chunking import Chunking
from kvjax.ledger import pool_units
from kvjax.memory.direct import check_budget
from kvjax.memory.host import check_available
from kvjax.packing import cut_into_units, unit_bytes


def describe_budget(
    host_bytes: int, cut: Chunking | None, platform: str, granule_bytes: int, transfer: str
) -> dict[str, Any]:
    """Returns what a budget comes to and what keeps a pool of it from being made.

    Args:
        host_bytes: budget of one process's host pool.
        cut: the groups and their chunks, if they are known.
        platform: the platform of the devices.
        granule_bytes: what the bytes of a unit must be a multiple of.
        transfer: the transport that is to own the pool.
    """
    problems: list[str] = []
    num_units, of_unit, pool_bytes = None, None, host_bytes
    if cut is not None:
        units = cut_into_units(cut, unit_bytes(cut, granule_bytes))
        of_unit = units.unit_bytes
        num_units = host_bytes // of_unit
        pool_bytes = num_units * of_unit
        try:
            pool_units(cut, units, host_bytes)
        except ValueError as error:
            problems.append(str(error))
    try:
        check_available(host_bytes)
    except MemoryError as error:
        problems.append(str(error))
    if transfer == "direct":
        try:
            check_budget(platform, pool_bytes)
        except ValueError as error:
            problems.append(str(error))
    return {
        "host_bytes": host_bytes,
        "unit_bytes": of_unit,
        "num_units": num_units,
        "pool_bytes": pool_bytes,
        "fits": not problems,
        "problems": problems,
    }
