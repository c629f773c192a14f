"""`kvjax hit`: the hit, its load set and its limits from files, and one line for whatever is wrong."""

import pytest

from kvjax.geometry import geometry_of
from tests.cli.command import DESIGN, document, full, kvjax, refusal, saved, sliding
from tests.oracles import law
from tests.oracles.layouts import random_instance, seeded


@pytest.fixture
def hit(tmp_path):
    """Runs the command on a geometry and a presence given as data."""

    def run(groups, present, *options):
        geometry = saved(tmp_path, {"groups": groups})
        return document("hit", geometry, "--present", saved(tmp_path, present, "present.json"), *options)

    return run


def recurrent(name, tokens_per_block):
    return full(name, tokens_per_block) | {"kind": "recurrent"}


def test_a_hit_ends_where_the_shorter_group_ends(hit):
    """36 tokens in one full group, 32 in the other: the last chunk of the first is used in part."""
    present = {"a": [0, 1, 2], "b": [0, 1]}
    assert hit([full("a", 12), full("b", 16)], present, "--num-tokens", 49) == {
        "hit_tokens": 32,
        "load": {"a": [0, 1, 2], "b": [0, 1]},
        "limited_by": ["b"],
    }


def test_a_recurrent_state_limits_the_hit_of_a_fully_stored_prompt(hit):
    present = {"full": list(range(7)), "state": [0]}
    found = hit([full("full", 4), recurrent("state", 16)], present, "--num-tokens", 28)
    assert found == {"hit_tokens": 16, "load": {"full": [0, 1, 2, 3], "state": [0]}, "limited_by": []}


def test_no_state_is_loaded_from_beyond_the_hit(hit):
    """Full: 20 tokens of 4 per chunk; states at 16 and 32. Iterating to a fixed point answers 20."""
    present = {"full": list(range(5)), "state": [0, 1]}
    found = hit([full("full", 4), recurrent("state", 16)], present, "--num-tokens", 40)
    assert found == {"hit_tokens": 16, "load": {"full": [0, 1, 2, 3], "state": [0]}, "limited_by": ["full"]}


def test_what_the_device_holds_is_not_loaded(hit):
    present = {"a": list(range(8))}
    assert hit([full("a", 4)], present, "--num-tokens", 33, "--device-tokens", 12)["load"] == {"a": [3, 4, 5, 6, 7]}
    longer_on_device = hit([full("a", 4)], {"a": [0]}, "--num-tokens", 33, "--device-tokens", 30)
    assert longer_on_device == {"hit_tokens": 30, "load": {"a": []}, "limited_by": ["a"]}


def test_the_hit_is_a_multiple_of_resume_multiple(hit):
    assert hit([full("a", 4)], {"a": [0, 1, 2]}, "--num-tokens", 13, "--resume-multiple", 8)["hit_tokens"] == 8


def test_chunking_options_apply(hit):
    groups = [full("a", 4), sliding("w", 4, 4)]
    present = {"a": [0, 1], "w": [3]}
    assert hit(groups, present, "--num-tokens", 17, "--blocks-per-chunk", "a=2")["hit_tokens"] == 16
    assert hit(groups, present, "--num-tokens", 17)["hit_tokens"] == 0


def test_scratch_groups_keep_their_place_in_the_load_set(hit):
    groups = [full("ring", 4) | {"kind": "scratch"}, full("a", 4)]
    found = hit(groups, {"a": [0]}, "--num-tokens", 9)
    assert list(found) == ["hit_tokens", "load", "limited_by"]
    assert list(found["load"].items()) == [("ring", []), ("a", [0])]


def test_random_files_answer_as_the_slow_model_does(tmp_path):
    for seed in range(150):
        instance = random_instance(seeded(seed))
        if isinstance(instance.device_tokens, dict):
            continue
        blocks = ",".join(
            f"{instance.chunking.layout.groups[g].name}={instance.chunking.blocks_per_chunk[g]}"
            for g in instance.chunking.layout.cached
        )
        found = document(
            "hit",
            saved(tmp_path, geometry_of(instance.chunking.layout)),
            *("--present", saved(tmp_path, instance.present, "present.json")),
            *("--num-tokens", instance.num_tokens, "--device-tokens", instance.device_tokens),
            *("--resume-multiple", instance.resume_multiple, "--blocks-per-chunk", blocks),
        )
        expected = law.longest_hit(
            instance.chunking,
            instance.num_tokens,
            instance.present,
            instance.device_tokens,
            instance.resume_multiple,
        )
        assert found == expected._asdict() | {"limited_by": list(expected.limited_by)}, seed


def test_the_table_shows_chunks_as_ranges(tmp_path):
    geometry = saved(tmp_path, {"groups": [full("a", 4), sliding("w", 4, 6)]})
    present = saved(tmp_path, {"a": [0, 1, 2, 4], "w": [1, 2]}, "present.json")
    ran = kvjax("hit", geometry, "--num-tokens", 21, "--present", present)
    assert (ran.code, ran.err) == (0, "")
    assert "12 of 21 tokens" in ran.out
    assert "limited by  'a', 'w'" in ran.out
    assert "3: 0-2" in ran.out
    assert "2: 1-2" in ran.out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("[1]", "must hold an object {group name: [chunk_idx …]}, got a list"),
        ('{"global": 3}', "group 'global' must have a list of chunk indices, got 3"),
        ('{"global": {"0": 1}}', "group 'global' must have a list of chunk indices, got {'0': 1}"),
        ('{"global": [true]}', "got True in it"),
        ('{"global": [0, 1.0]}', "got 1.0 in it"),
        ('{"global": [null]}', "got None in it"),
        ('{"global": ["0"]}', "got '0' in it"),
        ('{"global": [[0]]}', "got [0] in it"),
        ('{"global": [-1]}', "`present` of group 'global' must hold non-negative chunk indices, got -1"),
        ('{"other": [0]}', "`present` must name groups of the layout"),
        ('{"ring": []}', "the scratch group 'ring'"),
        ('{"global": [0], "global": [1]}', "the key 'global' is there twice"),
    ],
)
def test_a_bad_presence_file_is_refused_in_one_sentence(tmp_path, content, words):
    present = saved(tmp_path, content, "present.json")
    error = refusal("hit", saved(tmp_path, DESIGN), "--num-tokens", 60, "--present", present)
    assert error.startswith("kvjax hit: error: ")
    assert words in error


def test_an_index_past_every_integer_type_is_only_useless(tmp_path):
    present = saved(tmp_path, {"a": [0, 10**30]}, "present.json")
    argv = ("hit", saved(tmp_path, {"groups": [full("a", 4)]}), "--num-tokens", 9, "--present", present)
    assert document(*argv)["hit_tokens"] == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-tokens", "0"], "`num_tokens` must be a positive int, got 0"),
        (["--num-tokens", "-4"], "`num_tokens` must be a positive int, got -4"),
        (["--num-tokens", "4.0"], "argument --num-tokens: must be an int, got '4.0'"),
        (["--num-tokens", "9", "--present", ""], "--present must be the path of a file, got ''"),
        (["--num-tokens", "9" * 40], "argument --num-tokens: must be an int of at most 30 digits, got 40 of them"),
        (["--num-tokens", "9" * 40 + "x"], "argument --num-tokens: must be an int, got '999"),
        (["--num-tokens", "9" * 25], "`num_tokens` must be below"),
        (["--num-tokens", "9", "--device-tokens", "9"], "`device_tokens` must be at most num_tokens - 1 = 8, got 9"),
        (["--num-tokens", "9", "--device-tokens", "-1"], "`device_tokens` must be a non-negative int, got -1"),
        (["--num-tokens", "9", "--resume-multiple", "0"], "`resume_multiple` must be a positive int, got 0"),
        (["--num-tokens", "9", "--tp", "2"], "--tp is for a model's config.json, and "),
        ([], "the following arguments are required: --num-tokens"),
    ],
)
def test_bad_options_are_refused_on_one_line(tmp_path, options, words):
    present = saved(tmp_path, {"global": [0]}, "present.json")
    assert words in refusal("hit", saved(tmp_path, DESIGN), "--present", present, *options)


def test_presence_is_required_and_must_exist(tmp_path):
    geometry = saved(tmp_path, DESIGN)
    assert "required: --present" in refusal("hit", geometry, "--num-tokens", 9)
    missing = refusal("hit", geometry, "--num-tokens", 9, "--present", tmp_path / "none.json")
    assert missing.endswith("none.json' does not exist")


def test_a_models_config_serves_as_well_as_a_geometry(tmp_path):
    config = saved(
        tmp_path,
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "sliding_window": 32,
        },
        "config.json",
    )
    present = saved(tmp_path, {"full": [0, 1, 2, 3], "sliding": [1, 2]}, "present.json")
    found = document("hit", config, "--num-tokens", 100, "--present", present)
    assert found == {"hit_tokens": 48, "load": {"sliding": [1, 2], "full": [0, 1, 2]}, "limited_by": ["sliding"]}
    wide = document("hit", config, "--num-tokens", 100, "--present", present, "--tokens-per-block", "full=8")
    assert wide["hit_tokens"] == 0
    assert wide["limited_by"] == ["sliding"]


def test_a_config_without_layers_is_refused_by_field(tmp_path):
    config = saved(tmp_path, {"model_type": "llama4"}, "config.json")
    error = refusal("hit", config, "--num-tokens", 9, "--present", config)
    assert error.endswith(f"'{config}': the config must have `num_hidden_layers`, and has none")
