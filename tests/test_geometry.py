"""The geometry file: every field lands where it belongs, and every mistake is named."""

from copy import deepcopy

import pytest
from hypothesis import given, settings

from kvjax.geometry import geometry_of, is_model_config, kind_fields, layout_from_geometry
from kvjax.groups import CacheLayout, ChunkedLocal, FullAttention, GroupSpec, Recurrent, Scratch, SlidingWindow
from tests.cli.command import DESIGN, full
from tests.oracles.layouts import chunkings


def test_the_five_kinds_and_their_fields():
    assert layout_from_geometry(DESIGN) == CacheLayout(
        [
            GroupSpec("global", FullAttention(), 16, block_bytes=65536, num_layers=10),
            GroupSpec("local", SlidingWindow(1024), 16, block_bytes=65536, num_layers=50),
            GroupSpec("scout", ChunkedLocal(8192), 16, block_bytes=65536),
            GroupSpec("state", Recurrent(), 528, block_bytes=2146304),
            GroupSpec("ring", Scratch(), 4, block_bytes=2048),
            GroupSpec("draft", FullAttention(), 16, block_bytes=4096, lookahead_tokens=16),
        ]
    )


def test_a_layout_is_written_as_the_file_that_it_is_read_from():
    assert geometry_of(layout_from_geometry(DESIGN)) == {
        "tokens_per_hash": None,
        "groups": [{"num_layers": 1, "lookahead_tokens": 0} | group for group in DESIGN["groups"]],
    }


@pytest.mark.parametrize("unit", [None, 8])
def test_the_hash_unit_may_be_given(unit):
    assert layout_from_geometry({"tokens_per_hash": unit, "groups": [full("a", 16)]}).tokens_per_hash == unit


@settings(max_examples=200, deadline=None)
@given(chunkings())
def test_a_layout_written_as_a_geometry_reads_back_equal(cut):
    assert layout_from_geometry(geometry_of(cut.layout)) == cut.layout


def test_a_document_is_not_changed():
    before = deepcopy(DESIGN)
    layout_from_geometry(DESIGN)
    assert before == DESIGN


def test_kind_fields_name_the_kind_and_its_parameter():
    assert kind_fields(SlidingWindow(8)) == {"kind": "sliding", "window_tokens": 8}
    assert kind_fields(ChunkedLocal(8)) == {"kind": "chunked", "chunk_tokens": 8}
    assert kind_fields(FullAttention()) == {"kind": "full"}
    assert kind_fields(Recurrent()) == {"kind": "recurrent"}
    assert kind_fields(Scratch()) == {"kind": "scratch"}


def test_a_config_is_told_from_a_geometry():
    assert is_model_config({"model_type": "llama"})
    assert not is_model_config({"groups": [], "model_type": "llama"})
    assert not is_model_config({})
    assert not is_model_config([{"model_type": "llama"}])


SLIDING = {"kind": "sliding", "window_tokens": 8}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens_per_blok": 4}, "group 'a' has the unknown key 'tokens_per_blok'; known are name, kind, "),
        ({"leaves": []}, "group 'a' has the unknown key 'leaves'"),
        (
            {"kind": "fulll"},
            "`kind` of group 'a' must be one of full, sliding, chunked, recurrent, scratch, got 'f",
        ),
        ({"kind": "Full"}, "got 'Full'"),
        ({"kind": None}, "`kind` of group 'a' must be one of .*, got None"),
        ({"kind": 3}, "got 3"),
        ({"kind": ["full"]}, "`kind` of group 'a' must be a plain value, got a list"),
        ({"window_tokens": 8}, "`window_tokens` of group 'a' belongs to the kind sliding, not to full"),
        ({"chunk_tokens": 8}, "`chunk_tokens` of group 'a' belongs to the kind chunked, not to full"),
        ({"chunk_tokens": None}, "`chunk_tokens` of group 'a' belongs to the kind chunked, not to full"),
        ({"kind": "recurrent", "window_tokens": 8}, "belongs to the kind sliding, not to recurrent"),
        ({"kind": "scratch", "chunk_tokens": 8}, "belongs to the kind chunked, not to scratch"),
        ({**SLIDING, "chunk_tokens": 8}, "`chunk_tokens` of group 'a' belongs to the kind chunked, not to sliding"),
        (
            {"kind": "chunked", "window_tokens": 8},
            "`window_tokens` of group 'a' belongs to the kind sliding, not to",
        ),
        ({"kind": "sliding"}, "group 'a' must have the key 'window_tokens', as its kind is sliding"),
        ({"kind": "chunked"}, "group 'a' must have the key 'chunk_tokens', as its kind is chunked"),
        ({**SLIDING, "window_tokens": 0}, "group 'a': `window_tokens` must be a positive int, got 0"),
        ({**SLIDING, "window_tokens": "8"}, "group 'a': `window_tokens` must be a positive int, got '8'"),
        ({"tokens_per_block": 0}, "`tokens_per_block` of group 'a' must be a positive int, got 0"),
        ({"tokens_per_block": -16}, "must be a positive int, got -16"),
        ({"tokens_per_block": 16.0}, "must be a positive int, got 16.0"),
        ({"tokens_per_block": True}, "must be a positive int, got True"),
        ({"tokens_per_block": "16"}, "must be a positive int, got '16'"),
        ({"tokens_per_block": None}, "must be a positive int, got None"),
        ({"tokens_per_block": [16]}, "`tokens_per_block` of group 'a' must be a plain value, got a list"),
        ({"block_bytes": None}, "`block_bytes` of group 'a' must be a positive int, got None"),
        ({"block_bytes": 0}, "`block_bytes` of group 'a' must be a positive int, got 0"),
        ({"block_bytes": {}}, "`block_bytes` of group 'a' must be a plain value, got an object"),
        ({"block_bytes": 2**60}, "`block_bytes` of group 'a' must be below"),
        ({"num_layers": -1}, "`num_layers` of group 'a' must be a non-negative int, got -1"),
        ({"num_layers": None}, "`num_layers` of group 'a' must be a non-negative int, got None"),
        ({"lookahead_tokens": -1}, "`lookahead_tokens` of group 'a' must be a non-negative int, got -1"),
        ({"kind": "recurrent", "lookahead_tokens": 4}, "only full and sliding attention have a lookahead, got 4"),
        ({"name": ""}, "must be a non-empty string, got ''"),
        ({"name": 7}, "`name` of the group at place 0 must be a non-empty string, got 7"),
    ],
)
def test_a_mistake_in_a_group_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        layout_from_geometry({"groups": [full("a", 16) | change]})


@pytest.mark.parametrize("key", ["name", "kind", "tokens_per_block", "block_bytes"])
def test_a_missing_key_is_named(key):
    group = full("a", 16)
    del group[key]
    label = "the group at place 1" if key == "name" else "group 'a'"
    with pytest.raises(ValueError, match=f"^{label} must have the key '{key}'$"):
        layout_from_geometry({"groups": [full("first", 16), group]})


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        ([], "a geometry must be an object with the key `groups`, got a list"),
        (None, "got null"),
        ({}, "the geometry must have the key 'groups'"),
        (
            {"groups": [full("a", 4)], "hash": 4},
            "the geometry has the unknown key 'hash'; known are groups, ",
        ),
        ({"groups": "a"}, "`groups` must be a list of groups, got a string"),
        ({"groups": [full("a", 4), 3]}, "`groups` must hold objects, got an int at place 1"),
        ({"groups": [full("a", 4), full("a", 4)]}, "`groups` must have distinct names, got 'a' twice"),
        ({"groups": [full("a", 4) | {"kind": "scratch"}]}, "at least one group that is not scratch"),
        ({"groups": [full("a", 4)], "tokens_per_hash": 0}, "`tokens_per_hash` must be a positive int, got 0"),
        ({"groups": [full("a", 4)], "tokens_per_hash": True}, "`tokens_per_hash` must be a positive int, got True"),
        ({"groups": [full("a", 4)], "tokens_per_hash": [4]}, "`tokens_per_hash` must be a positive int or null, got a"),
    ],
)
def test_a_mistake_in_the_document_is_named(geometry, words):
    with pytest.raises(ValueError, match=words):
        layout_from_geometry(geometry)
