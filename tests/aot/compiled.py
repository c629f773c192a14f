"""What a compiled program does, read off its text and its memory figures.

A `Program` is plain data, so that a child process can send it to the test as JSON.
"""

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

import jax

HOST = 5  # the memory space of host memory in the text of TPU programs; HBM is 0, VMEM 1, SMEM 2

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.+)$")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .+ \{$")
_BUFFER = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_OPCODE = re.compile(r"(?P<opcode>[a-z][\w\-]*)\((?P<operands>[^)]*)\)")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array of a program: element type as XLA spells it, dimensions, memory space."""

    dtype: str
    shape: tuple[int, ...]
    space: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, without padding of the layout."""
        if self.dtype == "pred":
            return math.prod(self.shape)
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * int(bits.group()) // 8 if bits else 0


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a program.

    Args:
        computation: name of the computation that it belongs to.
        in_entry: whether that is the entry; there, lines come in the order of the schedule.
        name: of the instruction.
        opcode: such as `"copy-start"`.
        results: what it makes; several if it makes a tuple.
        operands: names of the instructions that it reads.
    """

    computation: str
    in_entry: bool
    name: str
    opcode: str
    results: tuple[Buffer, ...]
    operands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of an array, at once (`copy`) or in the background (`copy-start` … `copy-done`).

    Args:
        opcode: `"copy"` or `"copy-start"`.
        name: of the instruction.
        source: what is read.
        target: what is written.
        start: place of the instruction among those of its computation.
        done: place of its `copy-done`; `start` if it has none.
        in_entry: whether it is scheduled in the entry computation.
    """

    opcode: str
    name: str
    source: Buffer
    target: Buffer
    start: int
    done: int
    in_entry: bool


@dataclass(frozen=True, slots=True)
class Program:
    """Memory figures in bytes and the copies of one compiled program, on one of its devices."""

    alias_bytes: int
    host_alias_bytes: int
    temp_bytes: int
    host_temp_bytes: int
    output_bytes: int
    host_output_bytes: int
    copies: tuple[Copy, ...]
    opcodes: tuple[str, ...]

    def copies_of(self, least_bytes: int) -> list[Copy]:
        """The copies of arrays of at least so many bytes."""
        return [copy for copy in self.copies if copy.target.num_bytes >= least_bytes]

    def to_json(self) -> dict[str, Any]:
        """The program as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Program":
        """The inverse of `to_json`."""
        copies = tuple(
            Copy(**(copy | {"source": _buffer(copy["source"]), "target": _buffer(copy["target"])}))
            for copy in data["copies"]
        )
        return cls(**(data | {"copies": copies, "opcodes": tuple(data["opcodes"])}))


def program(compiled: jax.stages.Compiled) -> Program:
    """Reads a compiled program; `opcodes` are those of the entry, in the order of the schedule."""
    memory: Any = compiled.memory_analysis()
    lines = instructions(compiled.as_text() or "")
    return Program(
        alias_bytes=memory.alias_size_in_bytes,
        host_alias_bytes=memory.host_alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        host_output_bytes=memory.host_output_size_in_bytes,
        copies=copies(lines),
        opcodes=tuple(line.opcode for line in lines if line.in_entry),
    )


def instructions(text: str) -> list[Instruction]:
    """All instructions of a program's text, those of fusions and loops too, in the order of the text."""
    found, computation, in_entry = [], "", False
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation, in_entry = header["name"], bool(header["entry"])
        elif instruction := _INSTRUCTION.match(line):
            made, opcode, operands = _split(instruction["rest"])
            found.append(Instruction(computation, in_entry, instruction["name"], opcode, made, operands))
    return found


def copies(lines: list[Instruction]) -> tuple[Copy, ...]:
    """The copies among the instructions of a program."""
    by_computation: dict[str, list[Instruction]] = {}
    for line in lines:
        by_computation.setdefault(line.computation, []).append(line)
    found = []
    for body in by_computation.values():
        made = {line.name: line for line in body}
        done = {line.operands[0]: place for place, line in enumerate(body) if line.opcode == "copy-done"}
        for place, line in enumerate(body):
            if line.opcode in ("copy", "copy-start"):
                source = made[line.operands[0]].results[0]
                ends = done.get(line.name, place)
                found.append(Copy(line.opcode, line.name, source, line.results[0], place, ends, line.in_entry))
    return tuple(found)


def _split(rest: str) -> tuple[tuple[Buffer, ...], str, tuple[str, ...]]:
    """Results, opcode and operands of the part of a line after the equals sign."""
    end = _end_of_type(rest)
    call = _OPCODE.match(rest, end + 1)
    if call is None:
        raise ValueError(f"`rest` must be a type and a call, got {rest[:80]!r}")
    made = tuple(
        Buffer(
            buffer["dtype"],
            tuple(int(dim) for dim in buffer["dims"].split(",") if dim),
            int(space.group(1)) if (space := _SPACE.search(buffer["layout"] or "")) else 0,
        )
        for buffer in _BUFFER.finditer(rest, 0, end)
    )
    return made, call["opcode"], tuple(_OPERAND.findall(call["operands"]))


def _end_of_type(rest: str) -> int:
    """Where the first space outside of brackets is."""
    depth = 0
    for place, sign in enumerate(rest):
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == " " and depth == 0:
            return place
    return len(rest)


def _buffer(data: dict[str, Any]) -> Buffer:
    return Buffer(data["dtype"], tuple(data["shape"]), data["space"])
