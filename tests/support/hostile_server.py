"""TCP servers on loopback that do not speak as they should."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Speak = Callable[[socket.socket, threading.Event], None]
# What a tier says first; before that, the redis package shakes hands.
_COMMANDS = tuple(b"\r\n%s\r\n" % name for name in (b"SET", b"STRLEN", b"EXISTS", b"UNLINK", b"SCAN", b"INFO"))


@contextmanager
def hostile_server(speak: Speak) -> Iterator[int]:
    """A server for as long as the block; yields its port.

    Args:
        speak: is called in a thread for each connection, with an event that is set at the end.
    """
    ended = threading.Event()
    connections: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            speak(connection, ended)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threads.append(threading.Thread(target=serve, args=(connection,)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            for one in (listener, *connections):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def says_nothing(connection: socket.socket, ended: threading.Event) -> None:
    ended.wait()


def hangs_up(connection: socket.socket, ended: threading.Event) -> None:
    """Closes every connection at once."""


def says_at_once(data: bytes, then: bytes = b"") -> Speak:
    """Says something to whoever connects, then the rest again and again, or nothing."""

    def speak(connection: socket.socket, ended: threading.Event) -> None:
        _say(connection, ended, data, then)

    return speak


def echoes_in_errors(connection: socket.socket, ended: threading.Event) -> None:
    """Repeats everything that it is told as the text of an error."""
    while data := connection.recv(65536):
        connection.sendall(b"-WRONGPASS " + data.replace(b"\r\n", b" ") + b"\r\n")


def answers(data: bytes, then: bytes = b"") -> Speak:
    """Shakes hands, and answers the first command so.

    Args:
        data: is said once.
        then: is said again and again, without an end; empty: nothing more.
    """

    def speak(connection: socket.socket, ended: threading.Event) -> None:
        shake_hands(connection)
        _say(connection, ended, data, then)

    return speak


def drips(data: bytes) -> Speak:
    """Shakes hands, and answers the first command with one byte now and then, without an end."""

    def speak(connection: socket.socket, ended: threading.Event) -> None:
        shake_hands(connection)
        connection.sendall(data)
        while not ended.wait(0.01):
            connection.sendall(b"x")

    return speak


def shake_hands(connection: socket.socket) -> None:
    """Answers all that comes before the first command, and reads that."""
    while said := connection.recv(65536):
        if any(command in said for command in _COMMANDS):
            return
        connection.sendall(b"-ERR unknown command\r\n" if b"SETINFO" in said else b"+OK\r\n")
    raise OSError("the other side hung up")


def _say(connection: socket.socket, ended: threading.Event, data: bytes, then: bytes) -> None:
    connection.sendall(data)
    while then and not ended.is_set():
        connection.sendall(then)
    ended.wait()
