"""Prefix hashes of one hash unit made from those of another, for replays on other geometries."""

import hashlib

from kvjax.keys import HASH_BYTES
from kvjax.observe.calls import CallOrder, ExtendCall, LookupCall, Trace


def check_units(trace_unit: int, unit: int) -> None:
    """Checks that hashes of units of `trace_unit` tokens can stand for units of `unit` tokens.

    Raises:
        ValueError: neither is a multiple of the other.
    """
    if unit % trace_unit and trace_unit % unit:
        raise ValueError(
            f"the geometry's `tokens_per_hash`, {unit}, must be a multiple of the trace's or divide it: "
            f"the trace has a hash for every {trace_unit} tokens"
        )


def whole_chains(trace: Trace) -> list[bytes]:
    """Returns for each lookup, in order, the hashes that its request will have had when it ends, in one piece.

    Raises:
        ValueError: calls do not follow on each other, see `CallOrder`. The text names the place of the first such call.
    """
    order = CallOrder(trace.tokens_per_hash)
    chains: list[list[bytes]] = []
    of_request: dict[str, list[bytes]] = {}
    for place, call in enumerate(trace.calls):
        try:
            order.check(call)
        except ValueError as error:
            raise ValueError(
                f"`trace` must hold calls that follow on each other, call {place} does not: {error}"
            ) from None
        if isinstance(call, LookupCall):
            of_request[call.request] = [call.hashes]
            chains.append(of_request[call.request])
        elif isinstance(call, ExtendCall):
            of_request[call.request].append(call.hashes)
    return [b"".join(parts) for parts in chains]


def unit_hashes(chain: bytes, trace_unit: int, unit: int, first: int, stop: int, own: bytes) -> list[bytes]:
    """Returns the hashes of a request's units `first` to `stop - 1`, of `unit` tokens each.

    Where `unit` is a multiple of the trace's, they are every n-th hash of the trace. Where it divides it they are
    derived from the hash of the trace's unit that covers them: prompts that part within that unit share nothing of it.
    Units past the last hash of the trace are the request's own.

    Args:
        chain: the request's hashes, as `whole_chains` returns them.
        trace_unit: tokens that one of those covers.
        unit: tokens that a returned hash covers.
        first: the first unit.
        stop: the unit after the last one.
        own: what no other request has, for units that the chain does not cover.

    >>> chain = bytes(range(64))  # four hashes
    >>> unit_hashes(chain, 16, 32, 0, 2, b"") == [chain[16:32], chain[48:64]]
    True
    """
    if unit % trace_unit == 0:
        every = unit // trace_unit
        return [_hash_at(chain, (place + 1) * every - 1) for place in range(first, stop)]
    parts = trace_unit // unit
    return [_part(_hash_at(chain, place // parts) or own, place) for place in range(first, stop)]


def _hash_at(chain: bytes, place: int) -> bytes:
    return chain[place * HASH_BYTES : (place + 1) * HASH_BYTES]


def _part(covering: bytes, place: int) -> bytes:
    return hashlib.blake2b(place.to_bytes(8, "little"), digest_size=HASH_BYTES, key=covering).digest()
