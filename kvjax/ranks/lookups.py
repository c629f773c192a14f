"""What ranks tell each other of a lookup, and what follows when they agree."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import kvjax
from kvjax.handles import Lookup
from kvjax.keys import engine_hashes, token_array
from kvjax.offloader import Offloader
from kvjax.positions import Restorable

# Of what a lookup is asked, this may be each rank's own.
_OWN = ("token_ids", "hashes", "wait_s")


def described(offloader: Offloader) -> dict[str, Any]:
    """What must be the same on all ranks for them to decide alike, by the name of the argument that says it."""
    chunking, ledger = offloader.chunking, offloader.ledger
    groups = [
        [group.name, repr(group.kind), group.tokens_per_block, group.lookahead_tokens, number]
        for group, number in zip(chunking.layout.groups, chunking.blocks_per_chunk, strict=True)
    ]
    return {
        "the version of kvjax": kvjax.__version__,
        "model": ledger.model,
        "layout and blocks_per_chunk": groups,
        "tokens_per_hash": chunking.tokens_per_hash,
        "resume_multiple": ledger.resume_multiple,
        "checkpoint_tokens": ledger.checkpoint_tokens,
        "store_after": ledger.store_after,
        "deadline_s": offloader.deadline_s,
        "tier_wait_s": offloader.tier_wait_s,
    }


def about(request_id: Hashable, options: Mapping[str, Any]) -> str:
    """A fingerprint of what a lookup is asked, the same in every process."""
    digest = hashlib.blake2b(digest_size=8)
    if options.get("token_ids") is not None:
        digest.update(token_array(options["token_ids"]).tobytes())
    if options.get("hashes") is not None:
        digest.update(b"".join(engine_hashes(b"", options["hashes"])))
    rest = {name: value for name, value in sorted(options.items()) if name not in _OWN and value is not None}
    if isinstance(rest.get("device_tokens"), Mapping):
        rest["device_tokens"] = sorted((name, int(tokens)) for name, tokens in rest["device_tokens"].items())
    named = request_id if _is_plain(request_id) else type(request_id).__name__
    digest.update(repr((named, rest)).encode())
    return digest.hexdigest()


def said(found: Lookup) -> list[Any]:
    """What a rank has to say of a lookup of its own."""
    arriving = hashlib.blake2b(digest_size=8)
    for name, blocks in found.arriving.items():
        arriving.update(repr((name, blocks.tolist())).encode())
    return [found.hit_tokens, list(found.checkpoints), found.promised_tokens, arriving.hexdigest()]


def hits_differ(of_ranks: Sequence[Sequence[Any]]) -> bool:
    """Whether the ranks found other hits, by what `said` told of each."""
    return len({hit for hit, *_ in of_ranks}) > 1


def sets_of_others(of_ranks: Sequence[str], rank: int) -> list[Restorable]:
    """Where the other ranks could resume, by the bytes of their sets in hexadecimal digits."""
    return [Restorable.from_bytes(bytes.fromhex(digits)) for of, digits in enumerate(of_ranks) if of != rank]


def agreed(found: Lookup, of_ranks: Sequence[Sequence[Any]]) -> Lookup:
    """What a rank found, as far as all found it.

    Args:
        found: with the hit that all found.
        of_ranks: what `said` told of each rank.
    """
    checkpoints = sorted(set().union(*(words[1] for words in of_ranks)))
    alike = len({words[3] for words in of_ranks}) == 1
    return replace(
        found,
        checkpoints=tuple(checkpoints),
        promised_tokens=min(words[2] for words in of_ranks),
        arriving=found.arriving if alike else {},
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is written alike in every process."""
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in (str, bytes, int)
