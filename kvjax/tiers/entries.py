"""Names of what lower tiers hold. They are made of digests and numbers alone, so that none can lead anywhere else."""

import re
from dataclasses import dataclass

from kvjax.keys import HASH_BYTES, NAMESPACE_BYTES, ChunkKey, chunk_key, key_group, key_hash

# Entries of other formats lie elsewhere, and are never looked at.
ROOT = "kvjax-1"
# A chunk may have so many bytes at most; what says it has more is refused before memory is taken for it.
MOST_ENTRY_BYTES = 2**40

_HASH = f"[0-9a-f]{{{2 * HASH_BYTES}}}"
_FOLDER = re.compile(rf"{ROOT}/{_HASH}(/(0|[1-9][0-9]{{0,9}})-[1-9][0-9]{{0,12}}(/[0-9a-f]{{2}})?)?")
_TEXT = re.compile(rf"{ROOT}/({_HASH})/(0|[1-9][0-9]{{0,9}})-([1-9][0-9]{{0,12}})/([0-9a-f]{{2}})/({_HASH})")


@dataclass(frozen=True, slots=True, order=True)
class EntryName:
    """Which chunk an entry is, and how many bytes it has.

    Args:
        namespace: of the chunk, `HASH_BYTES` long; it carries the model, the layout, dtypes and the shard.
        key: of the chunk, with its group and the start of its namespace.
        num_bytes: of the whole entry, frame and all.
    """

    namespace: bytes
    key: ChunkKey
    num_bytes: int

    @property
    def group_idx(self) -> int:
        """The chunk's group."""
        return key_group(self.key)

    @property
    def text(self) -> str:
        """The name as a path below the tier's root: the namespace, the group with the entries' bytes, the hash."""
        digest = key_hash(self.key).hex()
        return f"{folder_of(self.namespace)}{self.group_idx}-{self.num_bytes}/{digest[:2]}/{digest}"


def folder_of(namespace: bytes | None) -> str:
    """Returns the beginning of the names of a namespace's entries, or, for `None`, of all."""
    return f"{ROOT}/" if namespace is None else f"{ROOT}/{namespace.hex()}/"


def is_folder(text: str) -> bool:
    """Whether `text` is the beginning of the names of entries, up to a `/`, below `ROOT`."""
    return _FOLDER.fullmatch(text) is not None


def parse_name(text: str) -> EntryName | None:
    """Returns the name that `text` spells, or `None` if it is not exactly that of an entry."""
    match = _TEXT.fullmatch(text)
    if match is None or match[4] != match[5][:2]:
        return None
    namespace, group_idx, num_bytes = bytes.fromhex(match[1]), int(match[2]), int(match[3])
    if group_idx >= 2**32 or num_bytes > MOST_ENTRY_BYTES:
        return None
    return EntryName(namespace, chunk_key(bytes.fromhex(match[5]), group_idx, namespace[:NAMESPACE_BYTES]), num_bytes)
