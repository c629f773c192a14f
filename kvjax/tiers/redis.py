"""A tier on a Redis server, or anything that speaks like one: hot, and shared by processes and hosts."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvjax._checks import integer, seconds, shown
from kvjax.tiers import redis_commands as commands
from kvjax.tiers.answers import Answer, fail_all
from kvjax.tiers.bounded_socket import BoundedSocket
from kvjax.tiers.deadlines import Deadlines
from kvjax.tiers.entries import EntryName, folder_of, parse_name
from kvjax.tiers.redis_connect import connect
from kvjax.tiers.redis_url import RedisAddress, parse_redis_url
from kvjax.tiers.redis_wire import ConnectionLostError, Wire
from kvjax.tiers.tier import Tier, TierError, Usage

DEFAULT_CONNECTIONS = 2
_MOST_CONNECTIONS = 64
_BATCH_BYTES = 2**20  # of entries that one connection writes or reads at a time
_BATCH_ENTRIES = 256
_ABORTED_S = 1.0  # for threads whose connection was closed to notice

Talk = Callable[[Wire], None]
T = TypeVar("T")


def open_redis(url: str) -> "RedisTier":
    """Returns the tier that a URL names. Nothing is connected before the first operation.

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://` for TLS, or `redis+unix:///path/to/socket`; with
            options `?name=value&…`: those of `RedisTier`; `db` of a socket; of TLS, `tls_ca`, `tls_cert` and
            `tls_key` (files) and `tls_verify` (`true` or `false`). A user and a password that are not in the URL are
            taken from the environment, `KVJAX_REDIS_USERNAME` and `KVJAX_REDIS_PASSWORD`.

    Raises:
        ValueError: the URL or one of its options is not as it must be. The text repeats no credentials.
    """
    address, options = parse_redis_url(url)
    return RedisTier(address, **options)


class RedisTier(Tier):
    """Entries as values of a Redis server, under their names' texts.

    The server evicts as it likes. Its clock ends entries after `ttl_s` without a read or a write. A lost connection is
    made anew by the next operation; one that was idle is made anew once within an operation.

    Args:
        address: of the server.
        name: for people and metrics; by default, the address without credentials.
        connections: how many, with a thread each, are used at the same time.
        ttl_s: how long an entry lives after it was last written or read, in seconds; `None`: for ever.
        max_bytes: of all the server's memory (`used_memory`): entries that would exceed it are refused with a
            `TierFullError`. Writers that look at the same time may exceed it by what they write at a time, 1 MiB or
            one entry for each connection. `None`: as much as the server takes.
        options: of every tier.

    Raises:
        ValueError: a value of the wrong type or range.
    """

    def __init__(
        self,
        address: RedisAddress,
        *,
        name: str | None = None,
        connections: int = DEFAULT_CONNECTIONS,
        ttl_s: float | None = None,
        max_bytes: int | None = None,
        **options: Any,
    ):
        super().__init__(address.text if name is None else name, **options)
        self.connections = integer(connections, "connections", at_least=1, below=_MOST_CONNECTIONS + 1)
        self.ttl_s = seconds(ttl_s, "ttl_s")
        if self.ttl_s is not None and self.ttl_s < 1e-3:
            raise ValueError(f"`ttl_s` must be at least 0.001 seconds, got {shown(ttl_s)}")
        self.max_bytes = None if max_bytes is None else integer(max_bytes, "max_bytes", at_least=1)
        self._address = address
        self._ttl_ms = None if self.ttl_s is None else round(self.ttl_s * 1000)
        self._lock = threading.Lock()
        self._closed = False  # takes nothing more
        self._ended = False  # connections are cut
        self._under_way: set[Future] = set()
        self._sockets = weakref.WeakSet[BoundedSocket]()
        self._own = threading.local()  # `wire`: of the thread
        self._threads = ThreadPoolExecutor(self.connections, thread_name_prefix="kvjax-redis")
        self._deadlines = Deadlines(self.name)

    def put(self, names: Sequence[EntryName], frames: Sequence[memoryview], *, deadline: float) -> list[Future[bool]]:
        """Writes entries, see `Tier`. Several connections share them."""
        put_some = partial(commands.put_entries, ttl_ms=self._ttl_ms, max_bytes=self.max_bytes)
        return self._start_each(put_some, names, frames, deadline)

    def get(self, names: Sequence[EntryName], buffers: Sequence[memoryview], *, deadline: float) -> list[Future[int]]:
        """Reads entries, see `Tier`. Several connections share them."""
        return self._start_each(partial(commands.get_entries, ttl_ms=self._ttl_ms), names, buffers, deadline)

    def exists(self, names: Sequence[EntryName], *, deadline: float) -> Future[np.ndarray]:
        """Looks entries up, see `Tier`."""
        return self._start(lambda wire: commands.find_entries(wire, names), deadline)

    def delete(self, names: Sequence[EntryName], *, deadline: float) -> Future[int]:
        """Deletes entries, see `Tier`."""
        return self._start(lambda wire: commands.delete_entries(wire, names), deadline)

    def usage(self) -> Usage:
        """Returns the bytes of all the server's memory in use, whoever uses it; entries it cannot tell."""
        memory = self._start(commands.memory, self._next_deadline()).result()
        return Usage(None, memory.used_bytes, self.max_bytes or memory.max_bytes)

    def close(self) -> None:
        """Ends what is under way, see `Tier`, and closes the connections."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            under_way = list(self._under_way)
        wait(under_way, self.timeout_s)
        self._deadlines.close(_closed_error())
        self._threads.shutdown(wait=False)
        with self._lock:
            self._ended = True
            connected = list(self._sockets)
        for one in connected:
            one.abort()
        still_busy = wait(under_way, _ABORTED_S).not_done
        for one in connected:
            one.close()
        self._threads.shutdown(wait=not still_busy)

    def _start_each(
        self, talk: Callable, names: Sequence[EntryName], views: Sequence[memoryview], deadline: float
    ) -> list[Future]:
        """Starts an operation on entries, in batches, and returns a future for each."""
        answers: list[Answer] = [Answer() for _ in names]
        self._deadlines.watch(answers, deadline)
        for batch in batches([view.nbytes for view in views]):
            some = answers[batch]
            self._submit(partial(talk, names=names[batch], views=views[batch], answers=some), some, deadline)
        return [*answers]

    def _start(self, talk: Callable[[Wire], T], deadline: float) -> Future[T]:
        """Starts an operation that is one answer."""
        answer: Answer[T] = Answer()
        self._deadlines.watch([answer], deadline)

        def answered(wire: Wire) -> None:
            if answer.begin():
                answer.give(talk(wire))

        self._submit(answered, [answer], deadline)
        return answer

    def _submit(self, talk: Talk, answers: Sequence[Answer], deadline: float) -> None:
        with self._lock:
            task = None if self._closed else self._threads.submit(self._run, talk, answers, deadline)
            if task is not None:
                self._under_way.add(task)
        if task is None:
            fail_all(answers, _closed_error())
        else:
            task.add_done_callback(self._forget)  # at once and here, if it is done

    def _forget(self, task: Future) -> None:
        with self._lock:
            self._under_way.discard(task)

    def _run(self, talk: Talk, answers: Sequence[Answer], deadline: float) -> None:
        """Has a conversation in a thread of this tier; answers that it does not end, end with its error."""
        if all(answer.done() for answer in answers):
            return
        try:
            self._converse(talk, deadline)
        except TierError as error:
            fail_all(answers, error)
        except Exception as bug:  # noqa: BLE001 - the edge of a job: no future may be left alone
            fail_all(answers, TierError(f"an operation failed: {type(bug).__name__}"))

    def _converse(self, talk: Talk, deadline: float) -> None:
        wire: Wire | None = getattr(self._own, "wire", None)
        if wire is not None:
            wire.set_deadline(deadline)
            try:
                return self._say(talk, wire)
            except ConnectionLostError:
                pass  # while it was idle, perhaps; whatever was said may be said again
        wire = self._own.wire = connect(self._address, min(deadline, self._next_deadline()), self._watch)
        wire.set_deadline(deadline)
        return self._say(talk, wire)

    def _watch(self, connected: BoundedSocket) -> None:
        with self._lock:
            self._sockets.add(connected)
            ended = self._ended
        if ended:
            connected.abort()

    def _say(self, talk: Talk, wire: Wire) -> None:
        try:
            talk(wire)
        except BaseException:
            self._own.wire = None
            wire.close()
            raise

    def _next_deadline(self) -> float:
        return time.monotonic() + self.timeout_s

    def list(self, namespace: bytes | None = None) -> Iterator[EntryName]:
        """Yields the names of all entries, or of those of a namespace, each once."""
        cursor, seen = b"0", set[EntryName]()
        while True:
            scan = partial(commands.scan, cursor=cursor, prefix=folder_of(namespace))
            cursor, texts = self._start(scan, self._next_deadline()).result()
            new = {name for text in texts if (name := parse_name(text)) is not None} - seen
            seen |= new
            yield from new
            if cursor == b"0":
                return


def batches(sizes: Sequence[int]) -> Iterator[slice]:
    """Yields runs of entries that one connection takes at a time.

    Args:
        sizes: bytes of the entries.

    >>> [(batch.start, batch.stop) for batch in batches([3, 2**20, 5, 5])]
    [(0, 1), (1, 2), (2, 4)]
    """
    low = num_bytes = 0
    for at, size in enumerate(sizes):
        if at > low and (num_bytes + size > _BATCH_BYTES or at - low == _BATCH_ENTRIES):
            yield slice(low, at)
            low, num_bytes = at, 0
        num_bytes += size
    if low < len(sizes):
        yield slice(low, len(sizes))


def _closed_error() -> TierError:
    return TierError("the tier is closed")
