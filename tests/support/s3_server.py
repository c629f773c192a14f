"""A real S3-compatible server, moto's, on loopback, in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from tests.support.entries import LONG_S

BUCKET = "chunks"
SECRET = "s3cr3t-of-the-tests"


class S3Server:
    """Runs until `kill`, and again from `start` on; a new process is empty."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        code = "from moto.server import main; main()"
        command = [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(self.port)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=os.environ | {"PYTHONWARNINGS": "ignore"}, **quiet)
        self._insist(f"/{BUCKET}")

    def url(self, path: str, options: str = "") -> str:
        """The URL of a tier."""
        return f"s3://{BUCKET}/{path}?endpoint={self.endpoint}&region=us-east-1{options}"

    def plant(self, path: str, data: bytes) -> None:
        """Stores an object."""
        self._insist(f"/{BUCKET}/{path}", data)

    def stop(self) -> None:
        """Lets it hang."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._process
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        assert self._process
        self._process.send_signal(number)

    def _insist(self, path: str, data: bytes = b"") -> None:
        assert self._process
        limit = time.monotonic() + LONG_S
        while not self._put(path, data):
            assert time.monotonic() < limit, "the server does not answer"
            assert self._process.poll() is None, "the server ended"
            time.sleep(0.02)

    def _put(self, path: str, data: bytes) -> bool:
        request = urllib.request.Request(self.endpoint + path, data=data, method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=LONG_S / 10) as answer:
                return answer.status == 200
        except urllib.error.HTTPError:
            raise
        except OSError:
            return False
