"""Real Redis servers on loopback, each with a temporary folder of its own."""

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import pytest
import redis

BINARY = shutil.which("redis-server")
NEEDS_REDIS = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")
NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
READY = "eady to accept connections"  # of ports, and of a socket
_ATTEMPTS = 5  # another process may take the port that was free


class RedisServer:
    """A server that runs, and what may happen to it.

    Args:
        folder: for its socket and certificates.
        unix: listens to a socket in the folder, and to no port.
        tls: speaks TLS with the certificates that `make_certificates` wrote into the folder.
        config: more of its options, such as `["--maxmemory", "10mb"]`.
    """

    def __init__(self, folder: Path, *, unix: bool = False, tls: bool = False, config: Sequence[str] = ()):
        self.folder, self.unix, self.tls, self.config = folder, unix, tls, list(config)
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def socket_path(self) -> str:
        return str(self.folder / "redis.sock")

    def url(self, query: str = "", *, credentials: str = "") -> str:
        """The URL of its first database, with options and `user:password`."""
        user, _, password = credentials.partition(":")
        at = f"{quote(user, safe='')}:{quote(password, safe='')}@" if credentials else ""
        options = f"?{query}" if query else ""
        if self.unix:
            return f"redis+unix://{at}{self.socket_path}{options}"
        return f"redis{'s' if self.tls else ''}://{at}127.0.0.1:{self.port}/0{options}"

    def client(self, **options: Any) -> redis.Redis:
        """A client of the test's own."""
        if self.unix:
            return redis.Redis(unix_socket_path=self.socket_path, **options)
        if self.tls:
            options |= {"ssl": True, "ssl_ca_certs": str(self.folder / "ca.pem")}
        return redis.Redis(host="127.0.0.1", port=self.port, **options)

    def start(self) -> None:
        """Starts it, empty, where it was before; waits until it takes connections."""
        for _ in range(_ATTEMPTS if not self.port else 1):
            port = self.port or free_port()
            self._process = subprocess.Popen(
                [*self._command(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            said = list(self._says_until_ready())
            if said and READY in said[-1]:
                self.port = port
                return
            self.kill()
        raise RuntimeError(f"redis-server did not start: {said[-3:]}")

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()  # type: ignore[union-attr]
            self._process = None

    def freeze(self) -> None:
        """Stops it: connections stand, and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]

    def thaw(self) -> None:
        """Lets it go on."""
        self._process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]

    def _command(self, port: int) -> list[str]:
        command = [str(BINARY), "--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        if self.unix:
            command += ["--port", "0", "--unixsocket", self.socket_path]
        elif self.tls:
            command += ["--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1"]
            for option, file in (("cert-file", "server.pem"), ("key-file", "server.key"), ("ca-cert-file", "ca.pem")):
                command += [f"--tls-{option}", str(self.folder / file)]
        else:
            command += ["--port", str(port), "--bind", "127.0.0.1"]
        return command + self.config

    def _says_until_ready(self) -> Iterator[str]:
        for line in self._process.stdout:  # type: ignore[union-attr]
            yield line.strip()
            if READY in line:
                return


@contextmanager
def redis_server(**options) -> Iterator[RedisServer]:
    """A server for as long as the block."""
    with TemporaryDirectory(prefix="kvjax-redis-") as name:
        if options.get("tls"):
            make_certificates(Path(name))
        server = RedisServer(Path(name), **options)
        try:
            yield server
        finally:
            server.kill()


def free_port() -> int:
    """A port of loopback that nobody listens to."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def make_certificates(folder: Path) -> None:
    """Writes `ca.pem`, and `NAME.pem` and `NAME.key` that it signed for the server, for a client and for a server of
    another host."""
    # Python 3.13 verifies strictly (RFC 5280): an authority says what its key is for, and a certificate by whose key.
    _openssl(
        folder,
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem "
        "-addext keyUsage=critical,keyCertSign,cRLSign",
    )
    for name, host in (("server", "IP:127.0.0.1"), ("client", "DNS:client"), ("other", "DNS:elsewhere.example")):
        _openssl(folder, f"req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr")
        (folder / f"{name}.ext").write_text(
            f"subjectAltName={host}\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n", encoding="utf-8"
        )
        _openssl(
            folder,
            f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile {name}.ext "
            f"-out {name}.pem",
        )


def _openssl(folder: Path, arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)
