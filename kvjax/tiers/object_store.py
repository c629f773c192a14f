"""Entries as objects of a bucket."""

import os
import re
from collections.abc import Iterator
from typing import Any

import tensorstore as ts

from kvjax.tiers.entries import EntryName, folder_of, parse_name
from kvjax.tiers.handover import Handover
from kvjax.tiers.store import STORE_ERRORS, Found, Store, absent, contents, open_store, store_failure

_RETRIES = {"max_retries": 2, "initial_delay": "100ms", "max_delay": "1s"}
_CONTEXT = {
    "s3": {"s3_request_retries": _RETRIES, "aws_credentials": {"type": "environment"}},
    "gcs": {"gcs_request_retries": _RETRIES},
}
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_TOO_SHORT = "OUT_OF_RANGE"
_TOTAL_BYTES = re.compile(r"(?:total size|value of size) ([0-9]{1,15})\b")


class ObjectStore(Store):
    """Entries as objects, through TensorStore's drivers for S3 (and what speaks its protocol) and Google's store, of
    which only the first has been run.

    Credentials come from the environment. A write is a creation (`If-None-Match`) where the server knows that. A
    request that hangs takes one thread until TensorStore ends it, which by itself it never does:
    `TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS` and `TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES` in the environment make it.

    Args:
        url: for messages.
        spec: of TensorStore's driver, `"s3"` or `"gcs"`.

    Raises:
        ValueError: TensorStore refuses the spec, or the environment has no credentials for S3.
    """

    def __init__(self, url: str, spec: dict[str, Any]):
        super().__init__(url)
        missing = [name for name in _CREDENTIALS if spec["driver"] == "s3" and not os.environ.get(name)]
        if missing:  # each request without them would leave a thread of the process stuck
            raise ValueError(f"{url!r} cannot be used: the environment must have {' and '.join(missing)}")
        self._absent = absent()
        try:
            self._values = open_store(spec, _CONTEXT[spec["driver"]])
        except STORE_ERRORS as error:
            raise ValueError(f"{url!r} cannot be used: {store_failure(url, error)}") from None

    def write(self, name: EntryName, frame: memoryview, future: Handover[bool]) -> bool:
        """See `Store.write`."""
        try:
            stamp = future.touch(lambda: self._values.write(name.text, contents(frame), if_equal=self._absent)).result()
        except STORE_ERRORS as error:
            raise store_failure(self.name, error) from None
        return bool(stamp.generation)

    def read(self, name: EntryName, buffer: memoryview, future: Handover[int]) -> int:
        """See `Store.read`. A second request at the same time asks for the byte after the last one."""
        wanted = len(buffer)
        value, beyond = (self._values.read(name.text, byte_range=part) for part in _parts(wanted))
        found, num_bytes = self._value(name, value)
        if num_bytes < wanted:
            found, _ = self._value(name, self._values.read(name.text, byte_range=slice(0, num_bytes)))
        else:
            num_bytes += len(self._value(name, beyond)[0])
        found = found[:wanted]
        future.touch(lambda: buffer[: len(found)].__setitem__(slice(None), found))
        return num_bytes

    def has(self, name: EntryName) -> bool:
        """See `Store.has`."""
        try:
            return self._values.read(name.text, byte_range=slice(0, 0)).result().state == "value"
        except STORE_ERRORS as error:
            raise store_failure(self.name, error) from None

    def delete(self, name: EntryName) -> bool:
        """See `Store.delete`."""
        try:
            self._values.write(name.text, None).result()
        except STORE_ERRORS as error:
            raise store_failure(self.name, error) from None
        return True

    def folders(self, namespace: bytes | None = None) -> Iterator[str]:
        """See `Store.folders`."""
        yield folder_of(namespace)

    def look(self, folder: str) -> Found:
        """See `Store.look`. Bytes are those that the names tell; no object's age is known."""
        try:
            texts = (self._values / folder).list().result()
        except STORE_ERRORS as error:
            raise store_failure(self.name, error) from None
        names = (parse_name(folder + text.decode(errors="replace")) for text in texts)
        return Found([(name, name.num_bytes, 0.0) for name in names if name], [])

    def _value(self, name: EntryName, answer: ts.Future[ts.KvStore.ReadResult]) -> tuple[bytes, int]:
        """Returns a part of an entry and how many bytes that is; nothing, and the bytes of the whole, if it does not
        reach so far.

        Raises:
            KeyError: there is no such entry.
        """
        try:
            result = answer.result()
        except STORE_ERRORS as error:
            text = str(error)
            total = _TOTAL_BYTES.search(text)
            if text.startswith(_TOO_SHORT):
                return b"", int(total[1]) if total else 0
            raise store_failure(self.name, error) from None
        if result.state != "value":
            raise KeyError(name)
        return result.value, len(result.value)


def _parts(num_bytes: int) -> tuple[slice, slice]:
    """Returns an entry's bytes and the one that must not be there."""
    return slice(0, num_bytes), slice(num_bytes, num_bytes + 1)
