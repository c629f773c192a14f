"""Connections to Redis servers: the redis package finds the host, encrypts, tells the user and chooses the database."""

import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import redis
from redis._parsers import _RESP2Parser
from redis.exceptions import NoPermissionError

from kvjax.tiers.bounded_socket import BoundedSocket
from kvjax.tiers.redis_url import RedisAddress
from kvjax.tiers.redis_wire import Wire, timed_out
from kvjax.tiers.tier import TierUnavailableError

Watch = Callable[[BoundedSocket], None]
_MOST_CAUSES = 8
_NO_DATABASE = "DB index is out of range"
_FULL = "max number of clients"
_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (redis.AuthenticationError, "refuses the user or the password"),
    (NoPermissionError, "does not let the user do so"),
    (socket.gaierror, "cannot be reached: its host name is not known"),
    (ConnectionRefusedError, "cannot be reached: the connection is refused"),
    (ssl.SSLCertVerificationError, "cannot be reached: its certificate is not trusted"),
    (ssl.SSLError, "cannot be reached: TLS fails"),
)
_HANDSHAKE_BYTES = 64 * 2**10  # that a server may say before the first command


class _Bounds:
    """A mixin of the redis package's connections, which puts bounds around their sockets."""

    deadline = 0.0
    watch: Watch
    bounded: BoundedSocket

    def _connect(self) -> Any:
        connected = super()._connect()  # type: ignore[misc]
        self.bounded = BoundedSocket(connected, self.deadline, _HANDSHAKE_BYTES)
        self.watch(self.bounded)
        return self.bounded


class _Tcp(_Bounds, redis.Connection):
    pass


class _Tls(_Bounds, redis.SSLConnection):
    pass


class _Unix(_Bounds, redis.UnixDomainSocketConnection):
    pass


def connect(address: RedisAddress, deadline: float, watch: Watch) -> Wire:
    """Returns a new connection, with the user known and the database chosen.

    Args:
        address: of the server.
        deadline: by the monotonic clock, in seconds.
        watch: is called with the socket before anything is said, so that whoever must can end what waits for it.

    Raises:
        TierTimeoutError: the deadline passed.
        TierUnavailableError: the server cannot be reached, or refuses.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise timed_out()
    connection = _connection(address, left)
    connection.deadline, connection.watch = deadline, watch
    try:
        _shake_hands(connection, address)
    except BaseException:
        connection.disconnect()
        raise
    return Wire(connection.bounded, connection.disconnect)


def _shake_hands(connection: Any, address: RedisAddress) -> None:
    try:
        connection.connect()
    except (redis.TimeoutError, TimeoutError):
        raise timed_out() from None
    except (redis.RedisError, OSError, ValueError, RecursionError) as error:
        raise TierUnavailableError(f"{address.text} {reason_of(error)}") from None


def reason_of(error: BaseException) -> str:
    """Returns why a server could not be used, in words of our own: what it says may repeat anything.

    >>> reason_of(ConnectionRefusedError(111, "whatever"))
    'cannot be reached: the connection is refused'
    """
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < _MOST_CAUSES:
        chain.append(cause)
    for kind, words in _REASONS:
        if any(isinstance(one, kind) for one in chain):
            return words
    if isinstance(error, redis.ResponseError):
        return "refuses the database" if _NO_DATABASE in str(error) else "refuses what a connection begins with"
    if _FULL in str(error):
        return "refuses: it has as many clients as it takes"
    numbers = [one.errno for one in chain if isinstance(one, OSError) and one.errno]
    return f"cannot be reached: {os.strerror(numbers[-1])}" if numbers else "cannot be reached, or is no Redis server"


def _connection(address: RedisAddress, timeout_s: float) -> Any:
    options: dict[str, Any] = {
        "db": address.db,
        "username": address.username,
        "password": address.password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,
        "parser_class": _RESP2Parser,  # not that of hiredis, which makes room for what a reply claims
    }
    if address.socket_path is not None:
        return _Unix(path=address.socket_path, **options)
    options |= {"host": address.host, "port": address.port}
    if address.tls is None:
        return _Tcp(**options)
    return _Tls(
        ssl_ca_certs=address.tls.ca,
        ssl_certfile=address.tls.cert,
        ssl_keyfile=address.tls.key,
        ssl_cert_reqs="required" if address.tls.verify else "none",
        ssl_check_hostname=address.tls.verify,
        **options,
    )
