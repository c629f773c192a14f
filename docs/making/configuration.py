"""The page of all settings, from signatures, docstrings and the tables of options in the code."""

import inspect
import json
from collections.abc import Callable

from kvjax.chunking import resolve_chunking
from kvjax.configs import layout_from_config
from kvjax.fused import FusedSteps
from kvjax.groups import CacheLayout, ChunkedLocal, GroupSpec, LeafSpec, SlidingWindow
from kvjax.ledger import Ledger
from kvjax.mover import Mover
from kvjax.observe.events import JSONLinesEvents
from kvjax.observe.metrics import register_metrics
from kvjax.offloader import Offloader
from kvjax.pool import ARC
from kvjax.ranks import CoordinationChannel, RankedOffloader
from kvjax.serving.sglang_jax import MixedHostPool, groups_of, install
from kvjax.serving.vllm.options import Options
from kvjax.tiers import redis_url, urls
from kvjax.tiers.kvstore import KVStoreTier
from kvjax.tiers.redis import RedisTier
from kvjax.tiers.tier import Tier

from .docstrings import arguments, table

_HEAD = """# Configuration

Every setting, as the code has it: what is given when something is made, and with each request. This page is made by
`python docs/make.py`, and a test compares the two. Of the environment kvjax reads credentials alone
([below](#options-of-tiers)), and how much memory XLA lets a GPU's process pin
([transfers](../transfers.md#kvjax-doctor)). Starting takes as long as touching `host_bytes` of memory does
([start-up](../install.md#start-up)).
"""
_TIERS_HEAD = """## Options of tiers

`Offloader(tiers=["file:///var/cache/kvjax?max_bytes=100GiB&write=back"])`: options follow a `?`, joined by `&`. Sizes
are digits with an optional B, KiB, MiB, GiB or TiB. [Tiers](../tiers.md) tells what they are for.

Credentials come from the environment: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN` for objects,
`{username}` and `{password}` for Redis where its URL has none.
"""
_CALLS: tuple[tuple[str, Callable[..., object] | type], ...] = (
    ("Offloader", Offloader),
    ("Offloader.lookup", Offloader.lookup),
    ("Offloader.load", Offloader.load),
    ("Offloader.store", Offloader.store),
    ("RankedOffloader", RankedOffloader),
    ("ranks.CoordinationChannel", CoordinationChannel),
    ("fused.FusedSteps", FusedSteps),
    ("Ledger", Ledger),
    ("Mover", Mover),
    ("CacheLayout", CacheLayout),
    ("GroupSpec", GroupSpec),
    ("LeafSpec", LeafSpec),
    ("SlidingWindow", SlidingWindow),
    ("ChunkedLocal", ChunkedLocal),
    ("resolve_chunking", resolve_chunking),
    ("layout_from_config", layout_from_config),
    ("register_metrics", register_metrics),
    ("JSONLinesEvents", JSONLinesEvents),
    ("pool.ARC", ARC),
)
_VLLM_HEAD = """## vLLM

The keys of `kv_connector_extra_config` ([vLLM](../serving/vllm.md#options)). Sizes are bytes, or digits with B, KiB,
MiB, GiB or TiB.
"""
_SGLANG_JAX_HEAD = """## sglang-jax

The memory of the server's host pool is what sglang-jax's own `--hicache-ratio` asks for; all other settings of kvjax
are arguments of `install`, see [sglang-jax](../serving/sglang-jax.md).
"""
_SGLANG_JAX: tuple[tuple[str, Callable[..., object] | type], ...] = (
    ("install", install),
    ("groups_of", groups_of),
    ("MixedHostPool", MixedHostPool),
)
# What a URL says other than the argument of the same name.
_OF_URLS = {
    "db": ("0", "number of the database"),
    "endpoint": ("AWS", "the server, such as `http://127.0.0.1:9000`"),
    "region": ("AWS is asked; with an endpoint `us-east-1`", "such as `eu-west-1`"),
    "tls_ca": ("those of the system", "file of certificates that are trusted"),
    "tls_cert": ("none", "file of the certificate that this side shows"),
    "tls_key": ("in the file of `tls_cert`", "file of its key"),
    "tls_verify": ("true", "whether the server's certificate must be valid and of its host"),
}


def page() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for name, call in _CALLS:
        parts.append(f"## `{name}`\n")
        parts.append(_table(call))
    parts.append(_TIERS_HEAD.format(username=redis_url.USERNAME_VARIABLE, password=redis_url.PASSWORD_VARIABLE))
    for schemes, names, tier in _tiers():
        parts.append(f"### {schemes}\n")
        parts.append(table(("option", "default", "meaning"), [_option(name, tier) for name in names]))
    parts.append(_VLLM_HEAD)
    parts.append(table(("key", "default", "meaning"), [_as_json(row, Options) for row in _arguments(Options)]))
    parts.append(_SGLANG_JAX_HEAD)
    for name, call in _SGLANG_JAX:
        parts.append(f"### `{name}`\n")
        parts.append(_table(call))
    return "\n".join(parts)


def _table(call: Callable[..., object] | type) -> str:
    return table(("argument", "default", "meaning"), _arguments(call))


def _as_json(row: tuple[str, ...], call: type) -> tuple[str, ...]:
    """A row of `_arguments` with the default as JSON has it."""
    name, default, told = row
    if default != "required":
        default = f"`{json.dumps(inspect.signature(call).parameters[name.strip('`')].default)}`"
    return name, default, told


def _arguments(call: Callable[..., object] | type) -> list[tuple[str, ...]]:
    told = arguments(call)
    parameters = inspect.signature(call).parameters
    missing = [name for name in parameters if name != "self" and name not in told]
    if missing:
        raise ValueError(f"the docstring of {call!r} must tell of all arguments, got none of {', '.join(missing)}")
    return [(f"`{name}`", _default(parameters[name]), told[name]) for name in parameters if name != "self"]


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "required"
    if callable(parameter.default):
        return "its own"
    return f"`{parameter.default!r}`".replace('b""', "b''")


def _tiers() -> list[tuple[str, tuple[str, ...], type[Tier]]]:
    """The URLs of a kind, the options that they take, and the tier that they open."""
    kinds: list[tuple[str, tuple[str, ...], type[Tier]]] = [
        (f"`{scheme}://`", names, KVStoreTier) for scheme, names in urls.OPTIONS.items()
    ]
    return [*kinds, ("`redis://`, `rediss://`, `redis+unix://`", tuple(sorted(redis_url.READERS)), RedisTier)]


def _option(name: str, tier: type[Tier]) -> tuple[str, ...]:
    if name in _OF_URLS:
        return (f"`{name}`", *_OF_URLS[name])
    for owner in (tier, Tier):
        parameter = inspect.signature(owner).parameters.get(name)
        told = arguments(owner).get(name, "")
        if parameter is not None and not told.startswith("see "):
            return f"`{name}`", _of_url(name, tier, parameter), told
    raise ValueError(f"the option {name!r} must be an argument of {tier.__name__}, with a docstring")


def _of_url(name: str, tier: type[Tier], parameter: inspect.Parameter) -> str:
    default = urls.DEFAULT_MAX_BYTES if (name, tier) == ("max_bytes", KVStoreTier) else parameter.default
    if default is None:
        return "none"
    if name.endswith("_bytes"):
        return _size(default)
    return f"`{default}`"


def _size(num_bytes: int) -> str:
    """Returns bytes as a URL writes them."""
    for unit, in_bytes in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes % in_bytes == 0:
            return f"`{num_bytes // in_bytes}{unit}`"
    return f"`{num_bytes}`"
