"""What `kv_connector_extra_config` may say."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvjax._checks import integer, one_of, seconds, shown, size, text


@dataclass(frozen=True, slots=True)
class Options:
    """The connector's settings, the same on the scheduler and on the worker.

    Args:
        host_bytes: budget of the host pool, a hard limit.
        blocks_per_chunk: see `kvjax.resolve_chunking`; groups are named by kind and place in vLLM's list: `full0`,
            `sliding1`, `chunked2`, `state3`.
        block_size: tokens per chunk, for models whose groups all have the same tokens per block.
        min_chunk_bytes: what `blocks_per_chunk="auto"` aims for, in bytes.
        checkpoint_tokens: see `kvjax.Ledger`.
        store_after: see `kvjax.Ledger`.
        staging_bytes: see `kvjax.Mover`.
        transfer: see `kvjax.Mover`.
        model: names all that gives the cache its meaning, the weights above all; by default vLLM's model,
            revision, quantization, dtype, `hf_overrides` and `additional_config`.
        tiers: URLs of levels below the host pool, see `kvjax.tiers.open_tier`; only where vLLM runs its worker in the
            scheduler's process.
        tier_ask_s: how long a lookup asks lower tiers at most, in seconds, what they have; vLLM waits meanwhile.
    """

    host_bytes: int
    blocks_per_chunk: int | Mapping[str, int] | str | None = None
    block_size: int | None = None
    min_chunk_bytes: int = 65536
    checkpoint_tokens: int | Literal["auto"] | None = "auto"
    store_after: int = 1
    staging_bytes: int | None = None
    transfer: str = "auto"
    model: str | None = None
    tiers: tuple[str, ...] = ()
    tier_ask_s: float = 0.05

    @property
    def chunking(self) -> dict[str, Any]:
        """The arguments of `kvjax.resolve_chunking`."""
        return {
            "blocks_per_chunk": self.blocks_per_chunk,
            "block_size": self.block_size,
            "min_chunk_bytes": self.min_chunk_bytes,
        }


def options_of(extra: Mapping[str, Any]) -> Options:
    """Returns the settings of a `kv_connector_extra_config`.

    Args:
        extra: sizes are ints, or digits with an optional B, KiB, MiB, GiB or TiB.

    Raises:
        ValueError: an unknown key, no `host_bytes`, or a value that cannot be; the text names the key.

    >>> options_of({"host_bytes": "2MiB"}).host_bytes
    2097152
    """
    known = [field.name for field in fields(Options)]
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise ValueError(f"kv_connector_extra_config must have keys among {', '.join(known)}, got {', '.join(unknown)}")
    if "host_bytes" not in extra:
        raise ValueError("kv_connector_extra_config must have `host_bytes`, such as '64GiB', got none")
    given = dict(extra)
    tiers = given.pop("tiers", ())
    tiers = () if tiers is None else tiers
    if not isinstance(tiers, (list, tuple)) or not all(isinstance(tier, str) for tier in tiers):
        raise ValueError(f"`tiers` must be a list of URLs, from the fastest one down, got {shown(tiers)}")
    for name in ("host_bytes", "min_chunk_bytes", "staging_bytes"):
        value = given.get(name)
        if isinstance(value, str):
            given[name] = size(value, f"`{name}`")
        elif value is not None or name == "host_bytes":
            given[name] = integer(value, name, at_least=1)
    options = Options(**given, tiers=tuple(tiers))
    # The rest is checked where it is used; but what only the books use would be noticed after the first step.
    integer(options.store_after, "store_after", at_least=1)
    if options.checkpoint_tokens not in ("auto", None):
        integer(options.checkpoint_tokens, "checkpoint_tokens", at_least=1)
    one_of(options.transfer, ("auto", "direct", "staged"), "transfer")
    if options.model is not None:
        text(options.model, "model")
    if seconds(options.tier_ask_s, "tier_ask_s") is None:
        raise ValueError("`tier_ask_s` must be a number of seconds, got None")
    return options
