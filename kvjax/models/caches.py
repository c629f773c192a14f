"""What one layer keeps: the words in which the rules of `attention` and `states` answer."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kvjax.groups import Kind, Recurrent


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a layer, on one rank.

    Args:
        name: last part of the leaf's name, such as `k`.
        shape: of one state: one token of a plain cache, r tokens of a compressed one, the whole state of a
            recurrent layer.
        dtype: element type.
        padding: elements of the last axis that hold nothing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    padding: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, padding included."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes of one state that hold nothing."""
        return math.prod(self.shape[:-1]) * self.padding * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One cache of one layer, on one rank.

    Args:
        layer: index of the layer that owns it.
        role: what a group of such caches is called.
        kind: which tokens it must hold.
        arrays: its arrays.
        tokens_per_state: tokens that one state stands for (not for recurrent caches).
        distinct_ranks: ranks whose content differs; the others hold copies.
        lookahead_tokens: of the group, see `kvjax.GroupSpec`.
        block_tokens: tokens per block where the mechanism fixes them.
    """

    layer: int
    role: str
    kind: Kind
    arrays: tuple[Array, ...]
    tokens_per_state: int = 1
    distinct_ranks: int = 1
    lookahead_tokens: int = 0
    block_tokens: int | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of one state over all arrays."""
        return sum(array.state_bytes for array in self.arrays)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes per token; of a recurrent cache, 0."""
        return Fraction(0) if isinstance(self.kind, Recurrent) else Fraction(self.state_bytes, self.tokens_per_state)

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for caches that may share a group."""
        return (
            self.role,
            self.kind,
            tuple((array.name, array.shape, array.dtype.name, array.padding) for array in self.arrays),
            self.tokens_per_state,
            self.distinct_ranks,
            self.lookahead_tokens,
            self.block_tokens,
        )


@dataclass(frozen=True, slots=True)
class Ranks:
    """How a model is cut over the ranks of a tensor-parallel group.

    Args:
        tensor_parallel: number of ranks.
    """

    tensor_parallel: int

    def heads(self, count: int, field: str) -> tuple[int, int]:
        """Returns the heads on one rank, and how many ranks differ: each rank has some, or several share one.

        Raises:
            ValueError: neither divides the other.
        """
        ranks = self.tensor_parallel
        if count % ranks == 0:
            return count // ranks, ranks
        if ranks % count == 0:
            return 1, count
        raise self._error(count, field, "a multiple or a divisor")

    def split(self, count: int, field: str) -> int:
        """Returns one rank's part of what cannot be held twice.

        Raises:
            ValueError: it does not divide.
        """
        if count % self.tensor_parallel:
            raise self._error(count, field, "a divisor")
        return count // self.tensor_parallel

    def _error(self, count: int, field: str, rule: str) -> ValueError:
        return ValueError(
            f"`tensor_parallel` must be {rule} of `{field}`, which is {count}, got {self.tensor_parallel}"
        )


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller chooses about the caches of a model.

    Args:
        dtype: of keys, values and latents.
        model_dtype: of what no option changes, such as convolution states.
        state_dtype: of recurrent states.
        ranks: how the model is cut.
        draft_tokens: tokens that a draft may propose in one step.
        latent_multiple: the width of latents is rounded up to a multiple of this.
        latent_bytes: bytes of one latent state in an engine's packed form, or `None`.
        index_bytes: bytes of one key of an indexer, its scale included.
    """

    dtype: np.dtype
    model_dtype: np.dtype
    state_dtype: np.dtype
    ranks: Ranks
    draft_tokens: int
    latent_multiple: int
    latent_bytes: int | None
    index_bytes: int | None
