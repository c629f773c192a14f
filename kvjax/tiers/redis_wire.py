"""Commands and replies on a connection to a Redis server, which may say anything.

The readers of the redis package make room for whatever a reply holds and copy it twice. Here a chunk goes straight from
the socket to its place, and all else has a limit.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.tiers.bounded_socket import BoundedSocket
from kvjax.tiers.tier import TierTimeoutError, TierUnavailableError

MOST_REPLY_BYTES = 64 * 2**10  # of a reply that is no chunk and no list of names
_READ_BYTES = 64 * 2**10
_SMALL_BYTES = 16 * 2**10  # arguments that are copied to be sent together
_DEEPEST = 2  # lists in lists

Argument = bytes | memoryview
Reply = Any  # int, bytes, None, ServerError, or a list of these


class ConnectionLostError(TierUnavailableError):
    """The server closed the connection."""


class NonsenseError(TierUnavailableError):
    """The server does not speak as Redis does."""

    def __init__(self, *_: object):
        super().__init__("what answers is no Redis server, or a broken one")


@dataclass(frozen=True, slots=True)
class ServerError:
    """A reply that tells an error: its first word. The rest of its text may hold anything."""

    code: str


class Wire:
    """Commands and replies on one connection. After an error of either kind it is of no more use.

    One thread uses it at a time.

    Args:
        connected: to the server, which expects commands.
        close: closes the connection; any number of calls.
    """

    def __init__(self, connected: BoundedSocket, close: Callable[[], None]):
        self.socket = connected
        self.close = close
        self._view = memoryview(bytearray(_READ_BYTES))
        self._start = self._stop = 0

    def set_deadline(self, deadline: float) -> None:
        """Whatever is under way at the deadline ends with a `TierTimeoutError`."""
        self.socket.deadline = deadline

    def send(self, commands: Iterable[Sequence[Argument]]) -> None:
        """Sends commands one after the other; long arguments as they lie in memory."""
        small = bytearray()
        for arguments in commands:
            small += b"*%d\r\n" % len(arguments)
            for argument in arguments:
                small += b"$%d\r\n" % len(argument)
                if len(argument) > _SMALL_BYTES:
                    self._send(small)
                    self._send(argument)
                    small.clear()
                else:
                    small += argument
                small += b"\r\n"
        self._send(small)

    def reply(self, most_bytes: int = MOST_REPLY_BYTES) -> Reply:
        """Returns the next reply, of so many bytes at most."""
        value, _ = self._reply(most_bytes, _DEEPEST)
        return value

    def chunk_bytes(self, most_bytes: int) -> int | ServerError:
        """Returns how long the text is that comes next: `receive` or `skip` must follow, unless it is an error."""
        line = self._line()
        if line[:1] == b"-":
            return _server_error(line)
        return self._length(line, most_bytes)

    def receive(self, buffer: memoryview) -> None:
        """Reads a text of the buffer's length into it."""
        buffered = min(len(buffer), self._stop - self._start)
        buffer[:buffered] = self._view[self._start : self._start + buffered]
        self._start += buffered
        rest = buffer[buffered:]
        while rest:
            rest = rest[self._receive(rest) :]
        self._end_text()

    def skip(self, num_bytes: int) -> None:
        """Reads a text and forgets it."""
        while num_bytes:
            if self._start == self._stop:
                self._more()
            skipped = min(num_bytes, self._stop - self._start)
            self._start += skipped
            num_bytes -= skipped
        self._end_text()

    def _reply(self, left: int, deeper: int) -> tuple[Reply, int]:
        """A reply, and what it leaves of `left` bytes."""
        line = self._line()
        left -= len(line) + 2
        if left < 0:
            raise NonsenseError
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest, left
        if kind == b":":
            return _integer(rest), left
        if kind == b"-":
            return _server_error(line), left
        if rest == b"-1" and kind in b"$*":
            return None, left
        if kind == b"$":
            text = bytearray(self._length(line, left))
            self.receive(memoryview(text))
            return bytes(text), left - len(text) - 2
        count = _integer(rest)
        if kind != b"*" or not deeper or count < 0:
            raise NonsenseError
        values = []
        for _ in range(count):
            value, left = self._reply(left, deeper - 1)
            values.append(value)
        return values, left

    def _length(self, line: bytes, most_bytes: int) -> int:
        length = _integer(line[1:])
        if line[:1] != b"$" or not 0 <= length <= most_bytes:
            raise NonsenseError
        return length

    def _line(self) -> bytes:
        while (end := self._view.obj.find(b"\r\n", self._start, self._stop)) < 0:  # type: ignore[union-attr]
            self._more()
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _end_text(self) -> None:
        if self._line():
            raise NonsenseError

    def _more(self) -> None:
        """Reads what has come, after what is not used yet."""
        kept = self._stop - self._start
        if kept == _READ_BYTES:
            raise NonsenseError
        if self._start:
            self._view[:kept] = bytes(self._view[self._start : self._stop])
        self._start, self._stop = 0, kept
        self._stop += self._receive(self._view[kept:])

    def _receive(self, view: memoryview) -> int:
        try:
            num_bytes = self.socket.recv_into(view)
        except TimeoutError:
            raise timed_out() from None
        except OSError:
            raise _lost() from None
        if not num_bytes:
            raise _lost()
        return num_bytes

    def _send(self, data: Argument | bytearray) -> None:
        try:
            self.socket.sendall(memoryview(data))
        except TimeoutError:
            raise timed_out() from None
        except OSError:
            raise _lost() from None


def _integer(digits: bytes) -> int:
    if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
        raise NonsenseError
    return int(digits)


def _server_error(line: bytes) -> ServerError:
    return ServerError(line[1:33].split(b" ")[0].decode("ascii", "replace"))


def timed_out() -> TierTimeoutError:
    """The error of a deadline that passed."""
    return TierTimeoutError("the Redis server did not answer by the deadline")


def _lost() -> ConnectionLostError:
    return ConnectionLostError("the Redis server closed the connection")
