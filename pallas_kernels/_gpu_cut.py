"""How Mosaic GPU kernels see rows of bytes: as lanes, and in pieces that thread blocks move side by side.

A *lane* is an unsigned integer of 32 bits where rows are whole words, else of 16 or 8. A piece is what the 128
threads of a thread block move at once, each up to eight vectors of 16 bytes: 16 KiB that are under way together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

_THREADS = 128
_VECTOR_BYTES = 16
_VECTORS_PER_THREAD = 8
_MAX_INDEX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Cut:
    """How a row is cut into pieces that no two thread blocks share a lane of.

    Args:
        row_lanes: lanes of the row.
        vector_lanes: lanes that a thread moves at once; 0 if the row has fewer lanes than a thread block has
            threads, and is moved lane by lane, in one piece.
        piece_lanes: lanes of a whole piece.
        whole_pieces: pieces at the start of the row.
        tail: what is left after them, one more piece: runs of lanes as `(first lane, lanes)`, of which the second
            may overlap the first.
    """

    row_lanes: int
    vector_lanes: int
    piece_lanes: int
    whole_pieces: int
    tail: tuple[tuple[int, int], ...]

    @property
    def num_pieces(self) -> int:
        """Pieces of the row."""
        return self.whole_pieces + bool(self.tail)


def cut_row(row_lanes: int, lane: Any, alignment: int) -> Cut:
    """Cuts a row into pieces.

    Args:
        row_lanes: lanes of the row, at least 1.
        lane: dtype of a lane.
        alignment: in every array, rows start at lanes that are multiples of gcd(`alignment`, `row_lanes`).

    Returns:
        The cut. Its vectors are the longest, of up to 16 bytes, at multiples of which every run of lanes starts and
        ends.

    >>> cut_row(8192, jnp.uint32, 0)
    Cut(row_lanes=8192, vector_lanes=4, piece_lanes=4096, whole_pieces=2, tail=())
    >>> cut_row(4700, jnp.uint32, 0)
    Cut(row_lanes=4700, vector_lanes=4, piece_lanes=2560, whole_pieces=1, tail=((2560, 2048), (4188, 512)))
    >>> cut_row(16, jnp.uint32, 0)
    Cut(row_lanes=16, vector_lanes=0, piece_lanes=16, whole_pieces=1, tail=())
    """
    vector = math.gcd(row_lanes, alignment, _VECTOR_BYTES // jnp.dtype(lane).itemsize)
    while vector > 1 and row_lanes < vector * _THREADS:
        vector //= 2
    step = vector * _THREADS
    steps, rest = divmod(row_lanes, step)
    if not steps:
        return Cut(row_lanes, 0, row_lanes, 1, ())
    steps_per_piece = -(-steps // -(-steps // _VECTORS_PER_THREAD))
    whole, left = divmod(steps, steps_per_piece)
    if rest and not left:  # the step that ends with the row overlaps the last piece, so both are one piece
        whole, left = whole - 1, steps_per_piece
    piece = steps_per_piece * step
    tail = [(whole * piece, left * step)] * bool(left) + [(row_lanes - step, step)] * bool(rest)
    return Cut(row_lanes, vector, piece, whole, tuple(tail))


def lane_dtype(row_bytes: Sequence[int]) -> Any:
    """The widest lane of which every row is a whole number.

    >>> lane_dtype([65536, 4]), lane_dtype([6, 8])
    (dtype('uint32'), dtype('uint16'))
    """
    return jnp.dtype(f"uint{8 * math.gcd(4, *row_bytes)}")


def check_index(name: str, number: int) -> None:
    """Refuses what an int32 cannot count.

    Args:
        name: what is counted.
        number: how many there are.

    Raises:
        NotImplementedError: there are 2³¹ or more.
    """
    if number > _MAX_INDEX:
        raise NotImplementedError(f"{name} must be at most {_MAX_INDEX}, got {number}")
