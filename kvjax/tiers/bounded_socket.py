"""A socket whose every operation ends by a deadline."""

import socket
import time
from contextlib import suppress


class BoundedSocket:
    """A connected socket whose every operation ends by a deadline. To the redis package it is a socket.

    Args:
        sock: to be owned.
        deadline: by the monotonic clock, in seconds; it may be changed.
        allowance: bytes that `recv` may return in all.

    Raises:
        TimeoutError: from every operation, once the deadline has passed.
        OSError: as of any socket, and if the allowance is used up.
    """

    def __init__(self, sock: socket.socket, deadline: float, allowance: int):
        self._sock = sock
        self.deadline = deadline
        self._allowance = allowance

    def recv(self, num_bytes: int) -> bytes:
        """Returns some bytes, none at the end."""
        self._set_timeout()
        data = self._sock.recv(min(num_bytes, self._allowance + 1))
        self._allowance -= len(data)
        if self._allowance < 0:
            raise OSError("too many bytes before the first command")
        return data

    def recv_into(self, view: memoryview) -> int:
        """Reads some bytes into the view, and returns how many; 0 at the end."""
        self._set_timeout()
        return self._sock.recv_into(view)

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all of it."""
        rest = memoryview(data)
        while rest:
            self._set_timeout()
            rest = rest[self._sock.send(rest) :]

    def settimeout(self, timeout: float | None) -> None:
        """Does nothing: the deadline rules."""

    def shutdown(self, how: int) -> None:
        """Ends what any thread waits for; TLS without its goodbye, for which it might wait."""
        socket.socket.shutdown(self._sock, how)

    def abort(self) -> None:
        """Ends whatever a thread waits for on the socket; any thread may call it."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket."""
        self._sock.close()

    def _set_timeout(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
