"""Every released model, as published and as its class serialises it, gives the groups of `expected.py`."""

import json
from collections import Counter
from fractions import Fraction

import pytest

import kvjax
from tests.models import expected, published

HUB = sorted(path.stem for path in published.HUB.glob("*.json"))
CLASSES = sorted(published.CLASSES)
CASES = [(model, "hub") for model in HUB] + [(model, "to_dict") for model in CLASSES]


def config_of(model, form):
    if form == "hub":
        return published.hub(model)
    pytest.importorskip("transformers")
    return published.to_dict(model)


def row_of(group):
    per_block = Fraction(group.block_bytes, group.num_layers)
    match group.kind:
        case kvjax.FullAttention():
            return "full", None, group.num_layers, per_block / group.tokens_per_block
        case kvjax.SlidingWindow(window_tokens=window):
            return "sliding", window, group.num_layers, per_block / group.tokens_per_block
        case kvjax.ChunkedLocal(chunk_tokens=chunk):
            return "chunked", chunk, group.num_layers, per_block / group.tokens_per_block
        case kvjax.Recurrent():
            return "recurrent", None, group.num_layers, per_block
        case kvjax.Scratch():
            return "scratch", None, group.num_layers, per_block


def layers_by_cache(rows):
    """Returns how many layers hold each (kind, window, bytes), however they are split into groups."""
    found = Counter()
    for kind, window, layers, size in rows:
        found[kind, window, size] += layers
    return found


def settled(wanted, found):
    """Returns the wanted rows with each choice of bytes resolved to the one that was found, if it is acceptable."""
    rows = []
    for kind, window, layers, size in wanted:
        if size is None or isinstance(size, tuple):
            seen = [got for k, w, n, got in found if (k, w, n) == (kind, window, layers)]
            fits = [got for got in seen if size is None or got in size]
            size = fits[0] if fits else size
        rows.append((kind, window, layers, size))
    return rows


@pytest.mark.parametrize(("model", "form"), CASES)
def test_layers_and_bytes_of_each_kind(model, form):
    layout = kvjax.layout_from_config(
        config_of(model, form), dtype="bfloat16", state_dtype="bfloat16" if model in expected.NARROW_STATES else None
    )
    found = [row_of(group) for group in layout.groups]
    assert layers_by_cache(found) == layers_by_cache(settled(expected.rows(model, form), found))


@pytest.mark.parametrize(("model", "form"), [(m, f) for m, f in CASES if f == "to_dict"])
def test_the_dtype_of_the_config_is_used(model, form):
    config = config_of(model, form)
    assert kvjax.layout_from_config(config) == kvjax.layout_from_config(config, dtype="bfloat16")


@pytest.mark.parametrize(("model", "form"), CASES)
def test_the_config_is_left_as_it_was(model, form):
    config = config_of(model, form)
    before = json.dumps(config, sort_keys=True)
    kvjax.layout_from_config(config)
    assert json.dumps(config, sort_keys=True) == before


@pytest.mark.parametrize("model", sorted(published.REFUSED_CLASSES))
def test_a_mechanism_that_no_group_describes_is_refused(model):
    pytest.importorskip("transformers")
    config = published.refused(model)
    with pytest.raises(ValueError, match=REFUSALS[model]):
        kvjax.layout_from_config(config)


REFUSALS = {
    "t5": "is_encoder_decoder",
    "bart": "is_encoder_decoder",
    "whisper": "is_encoder_decoder",
    "mllama": "cross_attention_layers",
    "longformer": "longformer",
    "big_bird": "big_bird|block_sparse",
    "reformer": "reformer|attn_layers",
    "xlnet": "xlnet|mem_len",
    "bert": "bert|is_decoder",
    "gpt2-cross": "add_cross_attention",
    "embedding-gemma": "use_bidirectional_attention",
    "unlimited-ocr": "reference_sliding_attention",
}

LLAMA = published.hub("llama-3.1-8b")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_sink_size", 4),
        ("num_sink_tokens", 4),
        ("is_encoder_decoder", True),
        ("add_cross_attention", True),
        ("layer_types", ["full_attention"] * 31 + ["hashed_attention"]),
        ("layer_types", ["full_attention"] * 31),
        ("model_type", "encoder_decoder"),
        ("num_key_value_heads", 0),
        ("num_hidden_layers", "32"),
    ],
)
def test_a_field_that_changes_the_cache_in_an_unknown_way_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        kvjax.layout_from_config(LLAMA | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("attention_sink_size", None), ("num_sink_tokens", 0), ("mem_len", None), ("is_encoder_decoder", False)],
)
def test_a_mechanism_that_is_off_changes_nothing(field, value):
    assert kvjax.layout_from_config(LLAMA | {field: value}) == kvjax.layout_from_config(LLAMA)


def test_learned_sinks_cache_nothing():
    config = published.hub("mimo-v2-flash")
    assert config["add_swa_attention_sink_bias"]
    without = config | {"add_swa_attention_sink_bias": False}
    assert kvjax.layout_from_config(config) == kvjax.layout_from_config(without)


@pytest.mark.parametrize("model", sorted(expected.GEOMETRIES))
def test_the_table_agrees_with_its_totals(model):
    known = expected.GEOMETRIES[model]
    caches = known["caches"]
    assert sum(r["layers"] * r["bytes"] for r in caches if r["kind"] == "full") == known["growing_kv_bytes_per_token"]
    assert known["windowed_kv_bytes_cap"] == sum(
        row["layers"] * row["bytes"] * row["window"] for row in caches if row["kind"] in ("sliding", "chunked")
    )
    states = [row for row in caches if row["kind"] == "recurrent"]
    assert sum(row["layers"] * row["bytes"] for row in states) == known["fixed_state_bytes"]


def test_every_model_of_either_form_has_an_expectation():
    for model, form in CASES:
        assert expected.rows(model, form), (model, form)
    assert set(expected.GEOMETRIES) <= set(HUB)
    assert set(expected.GEOMETRIES) - set(CLASSES) == {"deepseek-v4.1-flash"}
    assert set(HUB) >= published.DERIVED_FROM_THE_CLASS
