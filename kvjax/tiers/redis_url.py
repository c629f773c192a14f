"""Where a Redis server is, and how to talk to it, from a URL. No error repeats what may hold credentials."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvjax._checks import shown

USERNAME_VARIABLE = "KVJAX_REDIS_USERNAME"
PASSWORD_VARIABLE = "KVJAX_REDIS_PASSWORD"
DEFAULT_PORT = 6379

_SCHEMES = ("redis", "rediss", "redis+unix")
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"([0-9]{1,15})(B|KiB|MiB|GiB|TiB)?")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_OPTION_NAME = re.compile(r"[a-z_]{1,32}")


@dataclass(frozen=True, slots=True)
class Tls:
    """How a connection is encrypted.

    Args:
        ca: file of certificates that are trusted; `None`: those of the system.
        cert: file of the certificate that this side shows; `None`: none.
        key: file of its key; `None`: in the file of the certificate.
        verify: whether the server's certificate must be valid and of its host.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    verify: bool = True


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Which database of which server, and as whom. Its text and `repr` hold no credentials.

    Args:
        host: name or address; empty if there is a socket.
        port: of the host.
        socket_path: of a unix socket; `None`: TCP.
        db: number of the database.
        username: `None`: the default user.
        password: `None`: the server asks for none.
        tls: `None`: not encrypted.
    """

    host: str = ""
    port: int = DEFAULT_PORT
    socket_path: str | None = None
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    @property
    def text(self) -> str:
        """A URL without credentials and options."""
        if self.socket_path is not None:
            return f"redis+unix://{self.socket_path}" + (f"?db={self.db}" if self.db else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.tls else ''}://{host}:{self.port}/{self.db}"


def parse_redis_url(url: str, environ: Mapping[str, str] | None = None) -> tuple[RedisAddress, dict[str, Any]]:
    """Returns the address that a URL tells, and the options of a `RedisTier` in its query.

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://` for TLS, or `redis+unix:///path/to/socket`.
            Special characters in credentials are percent-encoded.
        environ: gives the user and the password that the URL does not, as `KVJAX_REDIS_USERNAME` and
            `KVJAX_REDIS_PASSWORD`; by default, the process's environment.

    Raises:
        ValueError: the URL is not of these forms, or an option is unknown, doubled or has a value that it cannot have.
    """
    if not isinstance(url, str):
        raise ValueError(f"`url` must be a string, got a {type(url).__name__}")
    if not url.startswith(tuple(f"{scheme}://" for scheme in _SCHEMES)):
        raise ValueError(f"`url` must begin with {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")
    parts = _split(url)
    if parts is None:
        raise ValueError("`url` must be a URL: its host cannot be read")
    if parts.fragment or "@" in parts.path + parts.query:
        raise ValueError("`url` must have `/`, `?`, `#` and `@` percent-encoded in a user, password or path")
    options = _options(parts.query)
    tls = {name: options.pop(f"tls_{name}") for name in ("ca", "cert", "key", "verify") if f"tls_{name}" in options}
    if tls and parts.scheme != "rediss":
        raise ValueError(f"`tls_{next(iter(tls))}` in `url` must go with rediss://, got {parts.scheme}://")
    if "key" in tls and "cert" not in tls:
        raise ValueError("`tls_key` in `url` must go with `tls_cert`, got it alone")
    db = options.pop("db", None)
    username, password = _credentials(parts, os.environ if environ is None else environ)
    if parts.scheme == "redis+unix":
        if _port(parts) is not None or parts.hostname or not parts.path.strip("/"):
            raise ValueError("`url` of a unix socket must be redis+unix:///path/to/socket")
        address = RedisAddress(socket_path=unquote(parts.path), db=db or 0, username=username, password=password)
        return address, options
    if db is not None:
        raise ValueError(f"`db` in `url` must stand after the host, as in {parts.scheme}://host/1")
    address = RedisAddress(
        _host(parts),
        _port(parts) or DEFAULT_PORT,
        db=_path_db(parts.path),
        username=username,
        password=password,
        tls=Tls(**tls) if parts.scheme == "rediss" else None,
    )
    return address, options


def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url)
    except ValueError:  # whose text may repeat anything
        return None


def _credentials(parts: SplitResult, environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    username = unquote(parts.username or "") or environ.get(USERNAME_VARIABLE) or None
    password = unquote(parts.password or "") or environ.get(PASSWORD_VARIABLE) or None
    if username and not password:
        raise ValueError(f"`url` must have a password beside the user, or {PASSWORD_VARIABLE} must be set")
    return username, password


def _host(parts: SplitResult) -> str:
    if not parts.hostname:
        raise ValueError(f"`url` must name a host, as in {parts.scheme}://localhost:{DEFAULT_PORT}")
    return parts.hostname


def _port(parts: SplitResult) -> int | None:
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:  # outside the handler: the error in it repeats a part of the URL
        raise ValueError("`url` must have a port from 1 to 65535, or none; `:` in a password is percent-encoded")
    return port


def _path_db(path: str) -> int:
    number = path.removeprefix("/")
    return _number("db")(number) if number else 0


def _options(query: str) -> dict[str, Any]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options: dict[str, Any] = {}
    for name, value in pairs:
        if name not in READERS:
            came = repr(name) if _OPTION_NAME.fullmatch(name) else "something else"
            raise ValueError(f"options in `url` must be of {', '.join(sorted(READERS))}, got {came}")
        if name in options:
            raise ValueError(f"`{name}` in `url` must be given once, got it twice")
        options[name] = READERS[name](value)
    return options


def _number(name: str) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", value):
            raise ValueError(f"`{name}` in `url` must be a whole number, got {shown(value)}")
        return int(value)

    return read


def _duration(name: str) -> Callable[[str], float]:
    def read(value: str) -> float:
        if not _SECONDS.fullmatch(value) or float(value) < 1e-3:
            raise ValueError(f"`{name}` in `url` must be a number of seconds of at least 0.001, got {shown(value)}")
        return float(value)

    return read


def _size(name: str) -> Callable[[str], int]:
    def read(value: str) -> int:
        match = _SIZE.fullmatch(value)
        if match is None or not int(match[1]):
            raise ValueError(f"`{name}` in `url` must be a positive size such as 10GiB, got {shown(value)}")
        return int(match[1]) * _UNITS[match[2] or ""]

    return read


def _file(name: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if not os.path.isfile(value):
            raise ValueError(f"`{name}` in `url` must be a file that is there, got {shown(value)}")
        return value

    return read


def _verify(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError(f"`tls_verify` in `url` must be true or false, got {shown(value)}")
    return value == "true"


READERS: dict[str, Callable[[str], Any]] = {
    "connections": _number("connections"),
    "db": _number("db"),
    "max_bytes": _size("max_bytes"),
    "max_pending_bytes": _size("max_pending_bytes"),
    "timeout_s": _duration("timeout_s"),
    "tls_ca": _file("tls_ca"),
    "tls_cert": _file("tls_cert"),
    "tls_key": _file("tls_key"),
    "tls_verify": _verify,
    "ttl_s": _duration("ttl_s"),
    "write": str,
}
