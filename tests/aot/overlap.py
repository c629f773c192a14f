"""What runs beside what in a compiled step, read off the final schedule in its text.

The step's layers are named scopes `layer0_`, `layer1_`, …; the metadata of instructions tells which one they are of.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

from tests.aot.compiled import HOST, Instruction, instructions

_LAYER = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = .*op_name="[^"]*\blayer(\d+)_')
_CALLS = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*calls=%?([\w.\-]+)")
_LIBRARY_PRODUCT = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = .*custom_call_target="__cublas')
_PRODUCTS = ("convolution", "dot")
_COPIES = ("copy", "copy-start", "convert", "bitcast-convert", "transpose", "reshape", "concatenate", "pad")
TO_DEVICE, TO_HOST = "to device", "to host"


@dataclass(frozen=True, slots=True)
class Transfer:
    """An asynchronous transfer between host and device.

    Args:
        direction: `TO_DEVICE` or `TO_HOST`.
        layer: that reads what arrives, or wrote what leaves.
        start: its place in the schedule.
        done: place of the instruction that waits for it.
        products_before: matrix products scheduled before its start, of the whole step.
        products_beside: matrix products scheduled between start and done.
    """

    direction: str
    layer: int
    start: int
    done: int
    products_before: int
    products_beside: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Transfers of a step, and the matrix products of its layers.

    Args:
        transfers: in the order of their starts.
        products: by layer, how many of the step's matrix products come before it and how many are its own.
        large_copies: opcodes of instructions that write at least as much as one cache without need.
        synchronous: opcodes of instructions that cross between host and device and are not asynchronous.
    """

    transfers: tuple[Transfer, ...]
    products: tuple[tuple[int, int], ...]
    large_copies: tuple[str, ...]
    synchronous: tuple[str, ...]

    def of(self, direction: str, layer: int) -> list[Transfer]:
        """The transfers of one layer in one direction."""
        return [one for one in self.transfers if one.direction == direction and one.layer == layer]

    def to_json(self) -> dict[str, Any]:
        """The schedule as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Schedule":
        """The inverse of `to_json`."""
        return cls(
            transfers=tuple(Transfer(**one) for one in data["transfers"]),
            products=tuple((before, own) for before, own in data["products"]),
            large_copies=tuple(data["large_copies"]),
            synchronous=tuple(data["synchronous"]),
        )


def schedule(text: str, *, num_layers: int, cache_bytes: int) -> Schedule:
    """Reads the text of a compiled step.

    Args:
        text: of the program, after scheduling.
        num_layers: layers of the step.
        cache_bytes: of the smallest cache, on one device.
    """
    lines = instructions(text)
    entry = [line for line in lines if line.in_entry]
    place = {line.name: i for i, line in enumerate(entry)}
    layer = {found[1]: int(found[2]) for found in map(_LAYER.match, text.splitlines()) if found}
    products = [line.name for line in entry if line.name in _products(lines, text)]
    product_places = [place[name] for name in products]
    transfers, synchronous = [], []
    for line in entry:
        direction = _direction(line, entry, place)
        if direction is None:
            continue
        done = next((one for one in entry if one.opcode.endswith("-done") and line.name in one.operands[:1]), None)
        if done is None:
            synchronous.append(line.opcode)
            continue
        first, last = place[line.name], place[done.name]
        owner = _reader(done, entry, layer) if direction == TO_DEVICE else _writer(line, entry, place, layer)
        before = sum(one < first for one in product_places)
        beside = sum(first < one < last for one in product_places)
        transfers.append(Transfer(direction, owner, first, last, before, beside))
    own = [sum(layer.get(name) == i for name in products) for i in range(num_layers)]
    return Schedule(
        transfers=tuple(transfers),
        products=tuple((sum(own[:i]), own[i]) for i in range(num_layers)),
        large_copies=tuple(
            line.opcode for line in lines if line.opcode in _COPIES and line.results[0].num_bytes >= cache_bytes
        ),
        synchronous=tuple(synchronous),
    )


def _products(lines: list[Instruction], text: str) -> set[str]:
    """Names of the instructions that multiply matrices, themselves or in what they call."""
    inside = {line.computation for line in lines if line.opcode in _PRODUCTS}
    calling = {found[1] for found in map(_CALLS.match, text.splitlines()) if found and found[2] in inside}
    library = {found[1] for found in map(_LIBRARY_PRODUCT.match, text.splitlines()) if found}
    return calling | library | {line.name for line in lines if line.opcode in _PRODUCTS}


def _direction(line: Instruction, entry: list[Instruction], place: dict[str, int]) -> str | None:
    """Which way an instruction crosses; `None` if it reads and writes in one memory, or moves nothing."""
    if line.opcode in ("parameter", "tuple", "get-tuple-element", "bitcast") or line.opcode.endswith("-done"):
        return None
    sources = [entry[place[name]] for name in line.operands if name in place]
    from_host = any(source.results and source.results[0].space == HOST for source in sources)
    to_host = bool(line.results) and line.results[0].space == HOST and not from_host
    if from_host:
        return TO_DEVICE
    return TO_HOST if to_host else None


def _reader(done: Instruction, entry: list[Instruction], layer: dict[str, int]) -> int:
    """The layer of the first instruction that reads what arrived."""
    names = {done.name}
    for line in entry:
        if names & set(line.operands):
            if line.name in layer:
                return layer[line.name]
            names.add(line.name)
    return -1


def _writer(start: Instruction, entry: list[Instruction], place: dict[str, int], layer: dict[str, int]) -> int:
    """The layer of the instruction that made what leaves."""
    line = start
    while line.name not in layer and line.operands and line.operands[0] in place:
        line = entry[place[line.operands[0]]]
    return layer.get(line.name, -1)


def faults(schedule: Schedule, *, leaves_per_layer: int) -> list[str]:
    """What keeps transfers from running beside the layers; empty if nothing does.

    For each transfer to the device but those of layer 0: a whole layer's matrix products or more lie between its
    start and the wait for it, and none of an earlier layer comes after the wait. For each transfer to the host but
    those of the last three layers: it starts before the second layer after its own, and a whole layer's products or
    more lie beside it; for the last three, at least one product does.
    """
    found = [f"{opcode} crosses between the memories synchronously" for opcode in schedule.synchronous]
    last = len(schedule.products) - 1
    for i, (before, own) in enumerate(schedule.products):
        arriving, leaving = schedule.of(TO_DEVICE, i), schedule.of(TO_HOST, i)
        for name, transfers in ((TO_DEVICE, arriving), (TO_HOST, leaving)):
            if len(transfers) != leaves_per_layer:
                found.append(f"layer {i} has {len(transfers)} transfers {name}")
        for one in arriving if i else ():
            if one.products_beside < own:
                found.append(f"layer {i}: {one.products_beside} products beside a transfer to the device")
            if one.products_before + one.products_beside < before:
                found.append(f"layer {i}: a transfer to the device is waited for before the layers ahead of it")
        for one in leaving:
            if one.products_beside < (own if i < last - 2 else 1):
                found.append(f"layer {i}: {one.products_beside} products beside a transfer to the host")
            if i < last - 2 and one.products_before > schedule.products[i + 2][0]:
                found.append(f"layer {i}: a transfer to the host starts late")
    return found
