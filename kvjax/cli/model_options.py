"""The options of a model's `config.json`, and the groups of whatever file a command is given."""

import argparse
from typing import Any

from kvjax.cli.options import integer, one_or_by_group
from kvjax.configs import config_document
from kvjax.geometry import is_model_config, layout_from_geometry
from kvjax.groups import CacheLayout
from kvjax.models import ModelCache, model_cache

# option: the argument of `layout_from_config` that it gives
_OPTIONS = {
    "--tokens-per-block": "tokens_per_block",
    "--tp": "tensor_parallel",
    "--dtype": "dtype",
    "--state-dtype": "state_dtype",
    "--draft-layers": "draft_layers",
    "--draft-tokens": "draft_tokens",
    "--latent-multiple": "latent_multiple",
    "--latent-bytes": "latent_bytes",
    "--index-bytes": "index_bytes",
    "--equalize": "equalize",
    "--align-tokens": "align_tokens",
}


def tokens_per_block(text: str) -> int | dict[str, int]:
    """Returns what `--tokens-per-block` says: an int, or a mapping by group name.

    Raises:
        argparse.ArgumentTypeError: it is neither, or names a group twice.

    >>> tokens_per_block("full=64,sliding=16")
    {'full': 64, 'sliding': 16}
    """
    return one_or_by_group(text, "N or name=N,…")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the options that a geometry file has no use for."""
    group = parser.add_argument_group("for a model's config.json only")
    group.add_argument(
        "--tokens-per-block", type=tokens_per_block, metavar="N|NAME=N,...", help="tokens of one block (default 16)"
    )
    group.add_argument("--tp", type=integer, metavar="N", help="ranks that share the model (default 1)")
    group.add_argument("--dtype", metavar="D", help="of keys, values and latents (default the config's own)")
    group.add_argument(
        "--state-dtype", metavar="D", help="of recurrent states where the config is silent (default float32)"
    )
    group.add_argument("--draft-layers", type=integer, metavar="N", help="multi-token-prediction layers to count")
    group.add_argument("--draft-tokens", type=integer, metavar="N", help="tokens that a draft may propose in a step")
    group.add_argument("--latent-multiple", type=integer, metavar="N", help="pad latents to a multiple of this width")
    group.add_argument("--latent-bytes", type=integer, metavar="N", help="bytes of a latent in an engine's packed form")
    group.add_argument("--index-bytes", type=integer, metavar="N", help="bytes of one key of an indexer")
    group.add_argument(
        "--equalize", choices=["bytes"], help="equal block bytes across groups that share one pool of blocks"
    )
    group.add_argument("--align-tokens", type=integer, metavar="N", help="blocks to be multiples of this (--equalize)")


def read_cache(args: argparse.Namespace) -> tuple[CacheLayout, ModelCache | None]:
    """Returns the layout of the geometry file or `config.json` that the arguments name, and of a config all
    else that is known.

    Raises:
        ValueError: the file cannot be read, is neither, or an option does not suit it.
    """
    if not args.geometry:
        raise ValueError("GEOMETRY must be the path of a file, got ''")
    document: Any = config_document(args.geometry, may_hold_constants=is_model_config)
    given = {name: _value(args, option) for option, name in _OPTIONS.items() if _value(args, option) is not None}
    try:
        if is_model_config(document):
            cache = model_cache(document, **given)
            return cache.layout, cache
        layout = layout_from_geometry(document)
    except ValueError as error:
        raise ValueError(f"{args.geometry!r}: {_with_options(str(error))}") from error
    for option, name in _OPTIONS.items():
        if name in given:
            raise ValueError(f"{option} is for a model's config.json, and {args.geometry!r} is a geometry file")
    return layout, None


def ranks_of_host(asked: int | None, cache: ModelCache | None) -> tuple[int, dict[str, int] | None]:
    """Returns how many ranks a host has, and by group how many of those differ in content.

    Args:
        asked: what `--ranks-per-host` says, or `None`.
        cache: what is known of the model, where the groups come from its config.

    Raises:
        ValueError: more ranks than the model is cut for.
    """
    if asked is not None and not 1 <= asked < 2**20:
        raise ValueError(f"`--ranks-per-host` must be a positive int below {2**20}, got {asked}")
    if cache is None:
        return (1 if asked is None else asked), None
    ranks = cache.tensor_parallel if asked is None else asked
    if ranks > cache.tensor_parallel:
        raise ValueError(f"`--ranks-per-host` must be at most `--tp`, {cache.tensor_parallel}, got {ranks}")
    # Ranks that hold the same heads are neighbours.
    return ranks, {name: -(-ranks * n // cache.tensor_parallel) for name, n in cache.distinct_ranks.items()}


def describe_model(cache: ModelCache) -> dict[str, Any]:
    """Returns what is known of a model as the JSON object that `kvjax plan` prints."""
    pool = None
    if cache.page_bytes is not None and cache.page_width is not None:
        pool = {
            "page_bytes": cache.page_bytes,
            "layers_per_group": cache.page_width,
            "block_bytes": cache.page_bytes * cache.page_width,
        }
    return {
        "model_type": cache.model_type,
        "tensor_parallel": cache.tensor_parallel,
        "distinct_ranks": cache.distinct_ranks,
        "shared_layers": cache.shared_layers,
        "padding_bytes": cache.padding_bytes,
        "pool": pool,
        "assumed": list(cache.assumed),
        "notes": list(cache.notes),
    }


def _value(args: argparse.Namespace, option: str) -> Any:
    return getattr(args, option[2:].replace("-", "_"))


def _with_options(text: str) -> str:
    """An error's text with the names that the command line has for the arguments."""
    for option, name in _OPTIONS.items():
        if text.startswith(f"`{name}`"):
            return f"`{option}`" + text[len(name) + 2 :]
    return text
