"""A channel over the coordination service that `jax.distributed` starts."""

import itertools
import queue
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import jax
from jax.errors import JaxRuntimeError

from kvjax._checks import integer, shown, text
from kvjax.ranks.channel import RankLostError

_T = TypeVar("_T")

# How long the service may take to answer beyond the time for which ranks wait for each other, in seconds.
_MARGIN_S = 2.0

# All processes make their channels of one name in the same order, so that the same numbers meet.
_MADE: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class CoordinationChannel:
    """Exchanges bytes through the key-value store of `jax.distributed`: three remote calls for any number of ranks.

    No device takes part, so that it cannot wait for one, nor one for it.

    Args:
        name: tells channels apart that a process uses at a time.
        process_ids: the processes whose ranks exchange, each the rank of its place; by default all, in order.

    Raises:
        ValueError: `jax.distributed.initialize` was not called, or this process is not one of `process_ids`.
    """

    def __init__(self, name: str = "kvjax", *, process_ids: Sequence[int] | None = None):
        self._client, here, total = _service()
        if not re.fullmatch(r"[\w.-]+", text(name, "name"), re.ASCII):
            raise ValueError(f"`name` must be of letters, digits, '_', '.' and '-', got {shown(name)}")
        if process_ids is not None and not isinstance(process_ids, Sequence):
            raise ValueError(f"`process_ids` must be a sequence of ints, got {shown(process_ids)}")
        ids = range(total) if process_ids is None else process_ids
        self._processes = [integer(one, "process_ids", at_least=0, below=total) for one in ids]
        if len(set(self._processes)) != len(self._processes) or here not in self._processes:
            raise ValueError(
                f"`process_ids` must be distinct and name this process, {here}, got {list(self._processes)}"
            )
        self.rank = self._processes.index(here)
        self.num_ranks = len(self._processes)
        of = f"kvjax/{name}/{'-'.join(map(str, self._processes))}"
        self._prefix = f"{of}/{next(_MADE[of])}"
        self._count = 0

    def exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Gives `payload` to all ranks, and returns what each of them gave; see `Channel.exchange`."""
        place = f"{self._prefix}/{self._count}"
        try:
            given = within(lambda: self._exchanged(place, payload, timeout_s), timeout_s + _MARGIN_S)
        except (JaxRuntimeError, TimeoutError) as error:
            raise lost(self._came(place), self.num_ranks, timeout_s, str(error)) from error
        self._count += 1
        return [given[rank] for rank in range(self.num_ranks)]

    def _exchanged(self, place: str, payload: bytes, timeout_s: float) -> dict[int, bytes]:
        self._client.key_value_set_bytes(f"{place}/{self.rank}", payload)
        # One barrier for all exchanges: the service never forgets one.
        self._client.wait_at_barrier(f"{self._prefix}/all", max(1, round(timeout_s * 1000)), self._processes)
        given = self._given(place)
        # Whoever is here has read what was given before: it is not needed any more.
        if self._count:
            self._client.key_value_delete(f"{self._prefix}/{self._count - 1}/{self.rank}")
        return given

    def _given(self, place: str) -> dict[int, bytes]:
        return {int(key.rsplit("/", 1)[1]): value for key, value in self._client.key_value_dir_get_bytes(f"{place}/")}

    def _came(self, place: str) -> set[int] | None:
        """The ranks that gave something; `None` if the service does not answer."""
        try:
            return set(within(lambda: self._given(place), _MARGIN_S))
        except (JaxRuntimeError, TimeoutError):
            return None


def within(call: Callable[[], _T], limit_s: float) -> _T:
    """Returns what a call returns, if it does in time.

    The service's own limits are kept by the process in which it runs, and that one may hang: a call then stays in its
    thread, and is waited for no longer.

    Raises:
        TimeoutError: the call goes on after `limit_s`.
        BaseException: what the call raised.
    """
    ended: queue.SimpleQueue[Future[_T]] = queue.SimpleQueue()

    def run() -> None:
        future: Future[_T] = Future()
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is raised where it is waited for
            future.set_exception(error)
        ended.put(future)

    threading.Thread(target=run, name="kvjax-ranks", daemon=True).start()
    try:
        return ended.get(timeout=limit_s).result()
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None


def lost(came: set[int] | None, num_ranks: int, timeout_s: float, reason: str) -> RankLostError:
    """Returns the error that says from whom nothing came.

    Args:
        came: the ranks that gave something; `None` if nobody can tell.
        num_ranks: how many there are.
        timeout_s: how long they were awaited, in seconds.
        reason: what the service says.
    """
    first_line = (reason.splitlines() or [""])[0]
    if came is None:
        return RankLostError((), f"the coordination service did not answer within {timeout_s:g} s: {first_line}")
    missing = tuple(rank for rank in range(num_ranks) if rank not in came)
    if not missing:
        return RankLostError((), f"not all of {num_ranks} ranks came within {timeout_s:g} s: {first_line}")
    who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return RankLostError(missing, f"nothing came from {who} of {num_ranks} within {timeout_s:g} s")


def _service() -> tuple[Any, int, int]:
    """The client of the coordination service, the number of this process, and how many there are."""
    from jax._src import distributed  # JAX has no public way to its key-value store

    client = distributed.global_state.client
    if client is None:
        raise ValueError("`jax.distributed.initialize` must be called before ranks can exchange anything")
    return client, jax.process_index(), jax.process_count()
