"""Namespaces and chunk keys: the same in every process and on every machine.

Prefix hashes are chained over hash units: each is the BLAKE2b digest (128 bits) of the one before and of
the unit's token ids; the first is seeded by a namespace that fingerprints all that gives the bytes of a
chunk their meaning. A chunk's key is the prefix hash at its last token, with its group.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import add
from typing import Any

import numpy as np

from kvjax._checks import integer, integers, shown
from kvjax.chunking import Chunking

ChunkKey = bytes

HASH_BYTES = 16
NAMESPACE_BYTES = 8
_GROUP_BYTES = 4


def namespace_of(chunking: Chunking, *, model: str = "", shard: str = "", salt: str | bytes = b"") -> bytes:
    """Returns the 128-bit fingerprint under which chunks of equal tokens are the same chunks.

    Args:
        chunking: groups, leaves, dtypes, shapes and chunk sizes all become part of it.
        model: which weights wrote the cache; a name and revision, say.
        shard: which part of the model this process holds.
        salt: anything else that tells equal tokens apart: a tenant, an adapter, image keys.

    Raises:
        ValueError: `model` or `shard` is not a string, or `salt` neither a string nor bytes.
    """
    if not isinstance(salt, (str, bytes)):
        raise ValueError(f"`salt` must be a string or bytes, got {shown(salt)}")
    for name, value in (("model", model), ("shard", shard)):
        if not isinstance(value, str):
            raise ValueError(f"`{name}` must be a string, got {shown(value)}")
    parts: list[Any] = ["kvjax/1", model, shard, salt, chunking.tokens_per_hash]
    for g, group in enumerate(chunking.layout.groups):
        parts += [group.name, repr(group.kind), group.tokens_per_block, group.block_bytes]
        parts += [group.lookahead_tokens, chunking.blocks_per_chunk[g], len(group.leaves)]
        for leaf in group.leaves:
            parts += [leaf.name, leaf.dtype.name, leaf.layers, len(leaf.block_shape), *leaf.block_shape]
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        tagged = f"{type(part).__name__}:".encode() + (part if isinstance(part, bytes) else str(part).encode())
        digest.update(len(tagged).to_bytes(8, "little") + tagged)
    return digest.digest()


def prefix_hashes(
    namespace: bytes, token_ids: Any, tokens_per_hash: int, *, previous: bytes | None = None
) -> list[bytes]:
    """Returns one chained hash for every whole unit of `tokens_per_hash` tokens; the rest is ignored.

    Args:
        namespace: as `namespace_of` returns it.
        token_ids: 1-d, integers.
        tokens_per_hash: tokens a hash covers.
        previous: the hash of the unit before the first one given, where `token_ids` continue a prefix.

    Raises:
        ValueError: `token_ids` is not one-dimensional or not of integers.
    """
    tokens = token_array(token_ids)
    unit = integer(tokens_per_hash, "tokens_per_hash", at_least=1)
    data = tokens[: len(tokens) // unit * unit].astype("<i8", copy=False).tobytes()
    chain = namespace if previous is None else previous
    blake2b = hashlib.blake2b
    return [
        chain := blake2b(tokens_of_unit, digest_size=HASH_BYTES, key=chain).digest()
        for (tokens_of_unit,) in struct.iter_unpack(f"{8 * unit}s", data)
    ]


def token_array(token_ids: Any) -> np.ndarray:
    """Returns `token_ids` as a 1-d array of integers.

    Raises:
        ValueError: they are not one-dimensional or not integers.
    """
    return integers(token_ids, "`token_ids` must be a 1-d sequence of ints")


def engine_hashes(namespace: bytes, hashes: Iterable[Any]) -> list[bytes]:
    """Returns an engine's own prefix hashes bound to the namespace, one per hash unit.

    Args:
        namespace: as `namespace_of` returns it.
        hashes: bytes of any length, or ints; each must stand for the whole prefix that ends there.

    Raises:
        ValueError: a hash is neither bytes nor an int, or the same as another: then it does not stand for a prefix.
    """
    bound = []
    if isinstance(hashes, (str, bytes)) or not isinstance(hashes, Iterable):
        raise ValueError(f"`hashes` must be a sequence of bytes or ints, got {shown(hashes)}")
    for value in hashes:
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            number = int(value)
            raw = b"i" + number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
        elif isinstance(value, (bytes, bytearray)):
            raw = b"b" + bytes(value)
        else:
            raise ValueError(f"`hashes` must hold bytes or ints, got {shown(value)}")
        bound.append(hashlib.blake2b(raw, digest_size=HASH_BYTES, key=namespace).digest())
    if len(set(bound)) < len(bound):
        raise ValueError("`hashes` must each stand for the whole prefix that ends there, got the same one twice")
    return bound


def chunk_keys(
    chunking: Chunking,
    group_idx: int,
    hashes: Sequence[bytes],
    namespace: bytes,
    *,
    first_chunk: int = 0,
    stop_chunk: int | None = None,
) -> list[ChunkKey]:
    """Returns the keys of a group's chunks `[first_chunk, stop_chunk)`, in order; by default of all from the first one
    on that the hashes cover.

    A key is the prefix hash at the chunk's last token, the group, and the start of the namespace (which
    the hash covers already: it is repeated so that a namespace can be found again).
    """
    per_chunk = chunking.hashes_per_chunk[group_idx]
    assert per_chunk is not None, "scratch groups have no keys"
    tag = _group_tag(group_idx, namespace)
    stop = None if stop_chunk is None else stop_chunk * per_chunk
    return list(map(add, hashes[(first_chunk + 1) * per_chunk - 1 : stop : per_chunk], repeat(tag)))


def chunk_key(prefix_hash: bytes, group_idx: int, namespace: bytes) -> ChunkKey:
    """Returns the key of the chunk of a group that ends where a prefix hash does.

    Args:
        prefix_hash: `HASH_BYTES` long.
        group_idx: the group.
        namespace: of the request, or its first `NAMESPACE_BYTES` bytes.
    """
    return prefix_hash + _group_tag(group_idx, namespace)


def key_hash(key: ChunkKey) -> bytes:
    """Returns the prefix hash that a chunk key carries, `HASH_BYTES` long."""
    return key[:HASH_BYTES]


def key_group(key: ChunkKey) -> int:
    """Returns the `group_idx` that a chunk key carries."""
    return int.from_bytes(key[HASH_BYTES : HASH_BYTES + _GROUP_BYTES], "little")


def _group_tag(group_idx: int, namespace: bytes) -> bytes:
    return group_idx.to_bytes(_GROUP_BYTES, "little") + namespace[:NAMESPACE_BYTES]
