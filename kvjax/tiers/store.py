"""Where a `KVStoreTier` keeps its entries, and how errors of such places are told."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from typing import Any, cast

import tensorstore as ts

from kvjax.tiers.entries import EntryName
from kvjax.tiers.handover import Handover
from kvjax.tiers.tier import TierError, TierFullError, TierUnavailableError

# What TensorStore raises; which one depends on the status word that its text begins with.
STORE_ERRORS = (ValueError, RuntimeError, NotImplementedError, KeyError, IndexError, OSError, MemoryError)

_OS_ERROR = re.compile(r"\[os_error_code='([0-9]{1,4})'")
_STATUS = re.compile(r"([A-Z]{2,20}(?:_[A-Z]{2,20}){0,3}): ")
_CURL_ERROR = re.compile(r"\[curl_code='([0-9]{1,3})'\]")
_CURL_REASONS = {
    "6": "the host name is not known",
    "7": "the connection is refused",
    "28": "it does not answer in time",
    "35": "TLS fails",
    "60": "its certificate is not trusted",
}
_HTTP_STATUS = re.compile(r"\[http_response_code='([0-9]{3})'\]")
_NO_BUCKET = "NoSuchBucket"
_UNREACHABLE = {"ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED", "NOT_FOUND"}


@dataclass(frozen=True, slots=True)
class Found:
    """What is in one folder of a store.

    Args:
        entries: for each file or object with the name of an entry: the name, its bytes as far as the store tells them
            without asking for each, and when it was last used, in seconds of the store's clock.
        strays: what interrupted writers may have left behind, as `Store.remove_stray` takes it.
    """

    entries: list[tuple[EntryName, int, float]]
    strays: list[str]


class Store(ABC):
    """Keeps bytes by name. Methods may wait for ever, raise `TierError`, and may be called from several threads.

    Args:
        name: of the tier, for messages.
    """

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def write(self, name: EntryName, frame: memoryview, future: Handover[bool]) -> bool:
        """Writes an entry as a whole, unless there is one, and returns whether it did. `frame` is touched through
        `future` only."""

    @abstractmethod
    def read(self, name: EntryName, buffer: memoryview, future: Handover[int]) -> int:
        """Reads as much of an entry as fits, and returns how many bytes it has, or any number above `len(buffer)`.
        `buffer` is touched through `future` only.

        Raises:
            KeyError: there is none.
        """

    @abstractmethod
    def has(self, name: EntryName) -> bool:
        """Whether there is an entry."""

    @abstractmethod
    def delete(self, name: EntryName) -> bool:
        """Deletes an entry, and returns whether there was one; true, too, if the store does not tell."""

    def use(self, name: EntryName) -> None:  # noqa: B027  # most stores keep no such thing
        """Notes with an entry that it is used, if the store keeps when that was. Whatever fails, nothing is raised."""

    @abstractmethod
    def folders(self, namespace: bytes | None = None) -> Iterator[str]:
        """Yields the parts in which a store can be looked through, of one namespace or of all."""

    @abstractmethod
    def look(self, folder: str) -> Found:
        """Returns what is in a part; if it is gone, nothing."""

    def remove_stray(self, stray: str) -> bool:
        """Removes what an interrupted writer left behind, and returns whether it did; what a writer holds stays."""
        raise NotImplementedError(stray)

    def remove_empty(self, folder: str) -> None:  # noqa: B027  # most stores have no folders
        """Removes a part and those above it that are empty, where they are something. Whatever fails, nothing is
        raised."""


def os_failure(tier: str, number: int | None) -> TierError:
    """Returns the error of a tier that stands for one of the operating system."""
    text = f"{tier}: {os.strerror(number) if number else 'an unknown error of the operating system'}"
    failure = (TierFullError if number in (ENOSPC, EDQUOT) else TierError)(text)
    failure.errno = number
    return failure


def store_failure(tier: str, error: BaseException) -> TierError:
    """Returns the error of a tier that stands for one of TensorStore. Nothing of its text is passed on but a word of
    TensorStore's own: a server may have written the rest."""
    text = str(error)
    if number := _OS_ERROR.search(text):
        return os_failure(tier, int(number[1]))
    status = _STATUS.match(text)
    word = status[1] if status else type(error).__name__
    reason = _reason(text, word)
    told = f"{reason} ({word})" if reason else word
    return (TierUnavailableError if word in _UNREACHABLE else TierError)(f"{tier}: {told}")


def _reason(text: str, word: str) -> str | None:
    """Why TensorStore failed, in words of our own, as far as its text tells."""
    curl, http = _CURL_ERROR.search(text), _HTTP_STATUS.search(text)
    if curl and curl[1] in _CURL_REASONS:
        return _CURL_REASONS[curl[1]]
    if _NO_BUCKET in text:
        return "there is no such bucket"
    if word in ("PERMISSION_DENIED", "UNAUTHENTICATED") or (http and http[1] in ("401", "403")):
        return "access is refused: see the credentials"
    return None


def open_store(spec: dict[str, Any], context: dict[str, Any]) -> ts.KvStore:
    """Returns a key-value store; no server is asked.

    Raises:
        ValueError: TensorStore refuses the spec.
    """
    return ts.KvStore.open(spec, context=ts.Context(context)).result()


def absent() -> bytes:
    """Returns the generation that stands for no value, which makes a write a creation."""
    return open_store({"driver": "memory"}, {}).read("").result().stamp.generation


def contents(frame: memoryview) -> bytes:
    """Returns the bytes of a frame as TensorStore takes them: the object behind it (a `bytearray` will do) where the
    frame is all of that, else a copy."""
    whole = frame.obj
    if isinstance(whole, (bytes, bytearray)) and frame.contiguous and frame.nbytes == len(whole):
        return cast(bytes, whole)
    return bytes(frame)
