"""From a model's `config.json`, a file or its content, to the layout of its cache."""

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from kvjax._checks import shown
from kvjax._files import read_json
from kvjax.groups import CacheLayout
from kvjax.models import model_cache


def layout_from_config(
    config: Mapping[str, Any] | str | PathLike[str],
    *,
    tokens_per_block: int | Mapping[str, int] = 16,
    dtype: Any = None,
    tensor_parallel: int = 1,
    state_dtype: Any = None,
    draft_layers: int = 0,
    draft_tokens: int = 0,
    latent_multiple: int = 1,
    latent_bytes: int | None = None,
    index_bytes: int | None = None,
    equalize: str | None = None,
    align_tokens: int | None = None,
) -> CacheLayout:
    """Returns the cache of a model, on one rank, with a leaf for each array of each layer.

    Layers of one kind, window, tokens per state and shape form a group. What had to be assumed, and which
    ranks hold copies, is in `kvjax.models.model_cache` and in the output of `kvjax plan`.

    Args:
        config: a Hugging Face `config.json`, as published or as `transformers` writes it back: its content,
            or the path of the file or of its folder. The decoder of a multimodal config is taken.
        tokens_per_block: tokens of one block; or a mapping by group name (missing names: 16). Rounded up to
            whole states where one state stands for several tokens.
        dtype: of keys, values and latents, such as `"bfloat16"` or `"fp8"`; by default the config's own.
        tensor_parallel: ranks that share the model. Heads of keys and values are split, or held more than
            once where there are fewer than ranks; latents and keys of indexers are whole on every rank;
            recurrent states are split.
        state_dtype: of recurrent states, where the config does not say it; else float32.
        draft_layers: how many of the config's multi-token-prediction layers to count, in groups of their
            own with as many lookahead tokens.
        draft_tokens: tokens that a draft may propose in one step: convolution states keep so many more
            columns, and rings of scratch grow.
        latent_multiple: latents are padded to a multiple of this width (128 for many kernels).
        latent_bytes: bytes of one latent as an engine packs it (656 for an fp8 latent with scales, say).
        index_bytes: bytes of one key of an indexer; by default its width in 8 bits and a float32 scale.
        equalize: `"bytes"` for engines whose groups share one pool of blocks: attention gets so many tokens
            per block that blocks of one layer have equal bytes, the largest state's included, and layers are
            dealt into groups of equal width. What is left empty is in `kvjax plan`, never in `block_bytes`.
        align_tokens: with `equalize`, tokens per block are multiples of this; `tokens_per_block` by default.

    Raises:
        ValueError: the file is missing or no JSON; a field is missing, of the wrong type, contradicts
            another, or names a mechanism that is not understood; heads or states do not divide over the
            ranks; or an option is out of range. The text names the field or option.

    >>> config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256,
    ...           "num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "bfloat16"}
    >>> layout_from_config(config).groups[0].block_bytes
    16384
    """
    return model_cache(
        config_document(config),
        tokens_per_block=tokens_per_block,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        state_dtype=state_dtype,
        draft_layers=draft_layers,
        draft_tokens=draft_tokens,
        latent_multiple=latent_multiple,
        latent_bytes=latent_bytes,
        index_bytes=index_bytes,
        equalize=equalize,
        align_tokens=align_tokens,
    ).layout


def config_document(config: Any, *, may_hold_constants: Callable[[Any], bool] = lambda _document: True) -> Any:
    """Returns the content of a config: itself, or what is in the file or folder that it names.

    Args:
        config: the content, or a path.
        may_hold_constants: see `kvjax._files.read_json`.

    Raises:
        ValueError: the file is missing, or no JSON.
    """
    if not isinstance(config, (str, PathLike)):
        return config
    path = fspath(config)
    if not isinstance(path, str):
        raise ValueError(f"`config` must be a mapping or the path of a config.json, got {shown(config)}")
    if not path:
        raise ValueError("`config` must be a mapping or the path of a config.json, got ''")
    if Path(path).is_dir():
        path = str(Path(path) / "config.json")
    return read_json(path, may_hold_constants=may_hold_constants)
