"""Where the three modes differ: what becomes of keys and values that the device cannot keep."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

import kvjax
from kvjax.fused import FusedSteps

from .model import Caches
from .presets import Attention
from .stepper import Stepper

Tables = Mapping[str, np.ndarray]


class CacheHook(Protocol):
    """What the engine asks during a turn. Caches go in and come out."""

    def lookup(self, request_id: str, prompt: Sequence[int], device_tokens: int) -> int:
        """Begins a request. Returns how long a prefix of the prompt the device holds or can be given."""
        ...

    def restore(self, caches: Caches, request_id: str, tables: Tables) -> tuple[Caches, int]:
        """Gives the device the prefix that `lookup` promised; returns how much of it is there."""
        ...

    def compute(
        self, stepper: Stepper, caches: Caches, request_id: str, tokens: Sequence[int], start: int, tables: Tables
    ) -> tuple[jax.Array, jax.Array, Caches]:
        """Runs a step, and returns what `Stepper` does but for what leaves."""
        ...

    def warm_up(self, stepper: Stepper, caches: Caches) -> Caches:
        """Compiles the steps that `compute` will run."""
        ...

    def accept(self, request_id: str, token: int) -> None:
        """Tells of a generated token."""
        ...

    def save(self, caches: Caches, request_id: str, tables: Tables, num_tokens: int, *, last: bool) -> Caches:
        """May copy what the device holds, `num_tokens` tokens; `last` for the request's end."""
        ...

    def keep_from(self, position: int) -> Mapping[str, int]:
        """Returns the first token, by group, that must stay on the device once `position` tokens are cached."""
        ...

    def finish(self, request_id: str) -> None:
        """Ends a request."""
        ...


class PlainSteps:
    """Steps that move no block."""

    def compute(
        self, stepper: Stepper, caches: Caches, request_id: str, tokens: Sequence[int], start: int, tables: Tables
    ) -> tuple[jax.Array, jax.Array, Caches]:
        """Runs the step."""
        del request_id
        token, logits, caches, _ = stepper(caches, tokens, start, tables)
        return token, logits, caches

    def warm_up(self, stepper: Stepper, caches: Caches) -> Caches:
        """Compiles the step."""
        _, logits, caches, _ = stepper(caches, (), 0, _no_tables(stepper))
        logits.block_until_ready()
        return caches


class NoOffload(PlainSteps):
    """What the device loses is computed again.

    Args:
        attention: the kind of each group.
    """

    def __init__(self, attention: Mapping[str, Attention]):
        self._attention = attention

    def lookup(self, request_id: str, prompt: Sequence[int], device_tokens: int) -> int:
        """The device has what it has."""
        del request_id, prompt
        return device_tokens

    def restore(self, caches: Caches, request_id: str, tables: Tables) -> tuple[Caches, int]:
        """Never promised anything."""
        del caches, tables
        raise AssertionError(f"request {request_id!r} has nothing to restore")

    def accept(self, request_id: str, token: int) -> None:
        """Needs no tokens."""

    def save(self, caches: Caches, request_id: str, tables: Tables, num_tokens: int, *, last: bool) -> Caches:
        """Saves nothing."""
        del request_id, tables, num_tokens, last
        return caches

    def keep_from(self, position: int) -> Mapping[str, int]:
        """The windows, no more."""
        return {group: kind.first_needed(position) for group, kind in self._attention.items()}

    def finish(self, request_id: str) -> None:
        """Nothing to release."""


class Offload(PlainSteps):
    """What the device loses is restored by kvjax, from host memory and the levels below it.

    Args:
        offloader: made for the engine's caches.
    """

    def __init__(self, offloader: kvjax.Offloader):
        self._offloader = offloader
        self.sources: dict[str, str] = {}  # by request, the lowest level that its prefix came from

    def lookup(self, request_id: str, prompt: Sequence[int], device_tokens: int) -> int:
        """The longest prefix that the device and all levels below it hold together."""
        found = self._offloader.lookup(request_id, prompt, device_tokens=device_tokens)
        if found.hit_tokens > device_tokens:
            self.sources[request_id] = "host" if found.decision is None else found.decision.chosen.source
        return found.hit_tokens

    def restore(self, caches: Caches, request_id: str, tables: Tables) -> tuple[Caches, int]:
        """Loads from the host. Whatever a failed load did not bring is computed again."""
        caches, job = self._offloader.load(caches, request_id, tables)
        result = self._offloader.wait(job)
        assert isinstance(result, kvjax.JobResult), "waiting for one job returns one result"
        return caches, result.valid_tokens or 0

    def accept(self, request_id: str, token: int) -> None:
        """A greedy token is final: its chunk may be keyed."""
        self._offloader.extend(request_id, [token])

    def save(self, caches: Caches, request_id: str, tables: Tables, num_tokens: int, *, last: bool) -> Caches:
        """Stores on the host what a later request will want."""
        caches, _ = self._offloader.store(caches, request_id, tables, num_tokens, checkpoint=last)
        return caches

    def keep_from(self, position: int) -> Mapping[str, int]:
        """The windows, and what a later store will want whole."""
        return kvjax.retained_from(self._offloader.chunking, position)

    def finish(self, request_id: str) -> None:
        """Releases what the lookup pinned."""
        self._offloader.finish(request_id)


class FusedOffload(Offload):
    """As `Offload`, but blocks are restored and stored by the steps themselves, layer by layer.

    Args:
        offloader: made for the engine's caches.
        steps: of that offloader.
    """

    def __init__(self, offloader: kvjax.Offloader, steps: FusedSteps):
        super().__init__(offloader)
        self._steps = steps
        self._hits: dict[str, int] = {}
        self._to_load: set[str] = set()

    def lookup(self, request_id: str, prompt: Sequence[int], device_tokens: int) -> int:
        """The longest prefix that the device and all levels below it hold together."""
        self._hits[request_id] = super().lookup(request_id, prompt, device_tokens)
        return self._hits[request_id]

    def restore(self, caches: Caches, request_id: str, tables: Tables) -> tuple[Caches, int]:
        """Leaves it to the next step."""
        del tables
        self._to_load.add(request_id)
        return caches, self._hits[request_id]

    def compute(
        self, stepper: Stepper, caches: Caches, request_id: str, tokens: Sequence[int], start: int, tables: Tables
    ) -> tuple[jax.Array, jax.Array, Caches]:
        """Runs the step with what arrives and what leaves in it."""
        load = request_id in self._to_load
        self._to_load.discard(request_id)
        step = self._steps.begin(caches, request_id, tables, start + len(tokens), load=load)
        try:
            token, logits, caches, rows = stepper(step.caches, tokens, start, tables, step.arriving, step.leaving)
        except BaseException:
            self._steps.abandon(step)
            raise
        caches, _ = self._steps.end(step, caches, rows)
        return token, logits, caches

    def finish(self, request_id: str) -> None:
        """Releases what the lookup pinned."""
        super().finish(request_id)
        del self._hits[request_id]

    def warm_up(self, stepper: Stepper, caches: Caches) -> Caches:
        """Compiles the step for every pair of buckets."""

        def run(caches: Mapping[str, jax.Array], arriving: Mapping[str, Any], leaving: Mapping[str, Any]) -> Caches:
            return stepper(dict(caches), (), 0, _no_tables(stepper), arriving, leaving)[2]

        return dict(self._steps.warm_up(caches, run))


def _no_tables(stepper: Stepper) -> Tables:
    return {group: np.empty(0, np.int64) for group in stepper.attention}
