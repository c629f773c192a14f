"""The frame around a chunk's bytes below the host pool: what it is, and a checksum that tells whether it still is.

A header of 128 bytes, little-endian, then the chunk's bytes without padding (see `kvjax.packing`):

| bytes | field |
|---|---|
| 0-3 | `KVJX` |
| 4-5 | version, 1 |
| 6-7 | bytes of the header, 128 |
| 8-11 | `group_idx` |
| 12-15 | tokens per chunk |
| 16-23 | `chunk_idx` |
| 24-31 | bytes of the chunk |
| 32-47 | namespace |
| 48-75 | key |
| 76-103 | name of the group, UTF-8, cut to 28 bytes and filled up with zeros |
| 104-119 | XXH3 (128 bits) of the chunk's bytes |
| 120-127 | XXH3 (64 bits) of the header up to here |

The checksums find accidents. Whoever can write to a tier can forge an entry: protect it as you protect the model.
"""

import struct
from dataclasses import dataclass

import xxhash

from kvjax.keys import HASH_BYTES, key_group
from kvjax.tiers.entries import EntryName

MAGIC = b"KVJX"
VERSION = 1
HEADER_BYTES = 128

_NAME_BYTES = 28
_FIELDS = struct.Struct(f"<4sHHIIQQ{HASH_BYTES}s28s{_NAME_BYTES}s16s")
_CHECK = struct.Struct("<Q")
assert _FIELDS.size + _CHECK.size == HEADER_BYTES


class BadFrameError(Exception):
    """An entry is not what its name says. `reason` is a word or two for counters."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Header:
    """What a frame says of itself.

    Args:
        group_idx: the chunk's group.
        group_name: its name, perhaps cut short.
        chunk_idx: the chunk's place in its sequence.
        tokens_per_chunk: tokens that a chunk of the group covers.
        payload_bytes: bytes of the chunk, without padding.
        namespace: of the chunk.
        key: of the chunk.
        checksum: XXH3, 128 bits, of the chunk's bytes.
    """

    group_idx: int
    group_name: str
    chunk_idx: int
    tokens_per_chunk: int
    payload_bytes: int
    namespace: bytes
    key: bytes
    checksum: bytes

    @property
    def token_span(self) -> tuple[int, int]:
        """The tokens that the chunk covers, as `[start, stop)`."""
        start = self.chunk_idx * self.tokens_per_chunk
        return start, start + self.tokens_per_chunk


def entry_bytes(payload_bytes: int) -> int:
    """Returns the bytes of the entry of a chunk."""
    return HEADER_BYTES + payload_bytes


def write_header(frame: memoryview, name: EntryName, *, group_name: str, chunk_idx: int, tokens_per_chunk: int) -> None:
    """Writes the header into the first bytes of a frame whose other bytes are the chunk's."""
    payload = frame[HEADER_BYTES:]
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        name.group_idx,
        tokens_per_chunk,
        chunk_idx,
        len(payload),
        name.namespace,
        name.key,
        group_name.encode()[:_NAME_BYTES],
        xxhash.xxh3_128_digest(payload),
    )
    frame[:HEADER_BYTES] = fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def read_header(frame: bytes | memoryview) -> Header:
    """Returns what the first `HEADER_BYTES` bytes of an entry say.

    Raises:
        BadFrameError: they are no header of this version, or not as they were written.
    """
    raw = bytes(frame[:HEADER_BYTES])
    if len(raw) < HEADER_BYTES:
        raise BadFrameError("length")
    if raw[:4] != MAGIC:
        raise BadFrameError("magic")
    _, version, header_bytes, group_idx, tokens, chunk_idx, payload_bytes, namespace, key, group, checksum = (
        _FIELDS.unpack_from(raw)
    )
    if version != VERSION:
        raise BadFrameError("version")
    if header_bytes != HEADER_BYTES or _CHECK.unpack_from(raw, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(
        raw[: _FIELDS.size]
    ):
        raise BadFrameError("header")
    group_name = group.rstrip(b"\0").decode(errors="replace")
    return Header(group_idx, group_name, chunk_idx, tokens, payload_bytes, namespace, key, checksum)


def header_of(frame: bytes | memoryview, name: EntryName) -> Header:
    """Returns the header of an entry, which says what the entry's name does.

    Args:
        frame: the entry's first `HEADER_BYTES` bytes, or more.
        name: under which it was found.

    Raises:
        BadFrameError: it is no header of this version, not as it was written, or that of another entry.
    """
    header = read_header(frame)
    if header.namespace != name.namespace:
        raise BadFrameError("namespace")
    if header.key != name.key or header.group_idx != key_group(name.key):
        raise BadFrameError("key")
    if entry_bytes(header.payload_bytes) != name.num_bytes:
        raise BadFrameError("length")
    return header


def verify(frame: memoryview, name: EntryName) -> memoryview:
    """Returns the chunk's bytes of an entry that is, to the last byte, what its name says.

    Args:
        frame: the whole entry.
        name: under which it was found.

    Raises:
        BadFrameError: it is anything else.
    """
    if len(frame) != name.num_bytes:
        raise BadFrameError("length")
    header = header_of(frame, name)
    payload = frame[HEADER_BYTES:]
    if xxhash.xxh3_128_digest(payload) != header.checksum:
        raise BadFrameError("checksum")
    return payload
