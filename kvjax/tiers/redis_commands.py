"""What is said to a Redis server to write, read, find, count and delete entries. Any part may be said again."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvjax.tiers.answers import Answer
from kvjax.tiers.entries import EntryName
from kvjax.tiers.redis_wire import NonsenseError, Reply, ServerError, Wire
from kvjax.tiers.tier import TierError, TierFullError, TierUnavailableError

KEYS_PER_SEND = 1024
_SCAN_KEYS = 1000
_SCAN_BYTES = 2 * 2**20
# What servers say; any other word may be made up, and is not repeated.
_KNOWN_CODES = frozenset(
    {
        "BUSY",
        "CLUSTERDOWN",
        "ERR",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "MOVED",
        "NOAUTH",
        "NOPERM",
        "NOREPLICAS",
        "READONLY",
        "WRONGTYPE",
    }
)

_REASONS = {
    "LOADING": "still reads its data",
    "NOAUTH": "asks for a password, and none is given",
    "NOPERM": "does not let the user do so",
    "READONLY": "is a replica that takes no writes",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """What a server says of its memory, in bytes; `max_bytes` is `None` if it has no limit."""

    used_bytes: int
    max_bytes: int | None


def put_entries(
    wire: Wire,
    names: Sequence[EntryName],
    views: Sequence[memoryview],
    answers: Sequence[Answer[bool]],
    *,
    ttl_ms: int | None,
    max_bytes: int | None,
) -> None:
    """Writes entries that are not there. Those that are live on for `ttl_ms`, too.

    Args:
        wire: to the server.
        names: of the entries.
        views: parallel to `names`: their frames.
        answers: parallel to `names`: ended here, but for those that are not wanted any more.
        ttl_ms: how long entries live, in milliseconds; `None`: for ever.
        max_bytes: of the server's memory; what would exceed it is not written.

    Raises:
        TierError: the server was lost; answers that have not ended are the caller's.
    """
    wanted = [at for at, answer in enumerate(answers) if answer.begin()]
    if max_bytes is not None:
        wanted = _fitting(wire, wanted, views, answers, max_bytes)
    expiry = [] if ttl_ms is None else [b"PX", b"%d" % ttl_ms]
    commands: list[list[bytes | memoryview]] = []
    for at in wanted:
        text = names[at].text.encode()
        commands.append([b"SET", text, views[at].cast("B"), b"NX", *expiry])
        if ttl_ms is not None:
            commands.append([b"PEXPIRE", text, expiry[1]])
    wire.send(commands)
    for at in wanted:
        reply = wire.reply()
        if ttl_ms is not None:
            wire.reply()
        if isinstance(reply, ServerError):
            answers[at].fail(refusal(reply))
        elif reply in (b"OK", None):
            answers[at].give(reply is not None)
        else:
            raise NonsenseError


def get_entries(
    wire: Wire,
    names: Sequence[EntryName],
    views: Sequence[memoryview],
    answers: Sequence[Answer[int]],
    *,
    ttl_ms: int | None,
) -> None:
    """Reads entries; they live on for `ttl_ms` from now. Args and errors are like those of `put_entries`.

    A value that is no text tells of 0 bytes, as an empty one does, so that whoever asked removes it.
    """
    wanted = [at for at, answer in enumerate(answers) if not answer.done()]
    commands: list[list[bytes]] = []
    for at in wanted:
        text = names[at].text.encode()
        commands.append([b"STRLEN", text])
        commands.append([b"GETRANGE", text, b"0", b"%d" % (views[at].nbytes - 1)])
        commands.append([b"EXISTS", text] if ttl_ms is None else [b"PEXPIRE", text, b"%d" % ttl_ms])
    wire.send(commands)
    for at in wanted:
        _get_entry(wire, names[at], views[at].cast("B"), answers[at])


def _get_entry(wire: Wire, name: EntryName, buffer: memoryview, answer: Answer[int]) -> None:
    stored_bytes = wire.reply()
    read_bytes = wire.chunk_bytes(len(buffer))
    if isinstance(read_bytes, ServerError):
        num_bytes, errors = 0, [read_bytes]
    else:
        if answer.begin():
            wire.receive(buffer[:read_bytes])
        else:
            wire.skip(read_bytes)
        num_bytes, errors = read_bytes, []
    there = wire.reply()
    for reply in (stored_bytes, there):
        if isinstance(reply, ServerError):
            errors.append(reply)
        else:
            _count(reply)
    if any(error.code != "WRONGTYPE" for error in errors):
        answer.fail(refusal(errors[0]))
    elif not there:
        answer.fail(KeyError(name.text))
    elif not errors and num_bytes == len(buffer):
        answer.give(max(num_bytes, stored_bytes))
    else:
        answer.give(num_bytes)  # if the entry changed between the commands, what was read is what counts


def find_entries(wire: Wire, names: Sequence[EntryName]) -> np.ndarray:
    """Returns a mask of the entries that are there."""
    found = np.zeros(len(names), bool)
    for low in range(0, len(names), KEYS_PER_SEND):
        part = names[low : low + KEYS_PER_SEND]
        wire.send([b"EXISTS", name.text.encode()] for name in part)
        for at in range(low, low + len(part)):
            found[at] = _count(wire.reply(), at_most=1)
    return found


def delete_entries(wire: Wire, names: Sequence[EntryName]) -> int:
    """Deletes entries, and returns how many were there."""
    num_deleted = 0
    for low in range(0, len(names), KEYS_PER_SEND):
        part = names[low : low + KEYS_PER_SEND]
        wire.send([[b"UNLINK", *(name.text.encode() for name in part)]])
        num_deleted += _count(wire.reply(), at_most=len(part))
    return num_deleted


def scan(wire: Wire, cursor: bytes, prefix: str) -> tuple[bytes, list[str]]:
    """Returns where to go on, `b"0"` at the end, and some of the names that begin so."""
    wire.send([[b"SCAN", cursor, b"MATCH", f"{prefix}*".encode(), b"COUNT", b"%d" % _SCAN_KEYS]])
    match _checked(wire.reply(_SCAN_BYTES)):
        case [bytes(after), list(texts)] if after.isdigit() and all(isinstance(text, bytes) for text in texts):
            return after, [text.decode("ascii", "replace") for text in texts]
        case _:
            raise NonsenseError


def memory(wire: Wire) -> Memory:
    """Returns what the server says of its memory."""
    wire.send([[b"INFO", b"memory"]])
    reply = _checked(wire.reply())
    if not isinstance(reply, bytes):
        raise NonsenseError
    fields = dict(line.split(b":", 1) for line in reply.split(b"\r\n") if b":" in line)
    used, limit = fields.get(b"used_memory", b""), fields.get(b"maxmemory", b"0")
    if not used.isdigit() or not limit.isdigit():
        raise NonsenseError
    return Memory(int(used), int(limit) or None)


def refusal(error: ServerError) -> TierError:
    """The error that a server's error is to a tier."""
    if error.code == "OOM":
        return TierFullError("the Redis server has reached its memory limit")
    if error.code in _REASONS:
        return TierUnavailableError(f"the Redis server {_REASONS[error.code]} ({error.code})")
    if error.code in _KNOWN_CODES:
        return TierUnavailableError(f"the Redis server refuses: {error.code}")
    return TierUnavailableError("the Redis server refuses")


def _fitting(
    wire: Wire, wanted: list[int], frames: Sequence[memoryview], answers: Sequence[Answer[bool]], max_bytes: int
) -> list[int]:
    """Those of `wanted` for which the server has room; the others are refused."""
    left = max_bytes - memory(wire).used_bytes
    fitting = []
    for at in wanted:
        if frames[at].nbytes <= left:
            left -= frames[at].nbytes
            fitting.append(at)
        else:
            answers[at].fail(TierFullError(f"the Redis server holds as much as `max_bytes` = {max_bytes} allows"))
    return fitting


def _count(reply: Reply, at_most: int | None = None) -> int:
    number = _checked(reply)
    if not isinstance(number, int) or number < 0 or (at_most is not None and number > at_most):
        raise NonsenseError
    return number


def _checked(reply: Reply) -> Reply:
    if isinstance(reply, ServerError):
        raise refusal(reply)
    return reply
