"""The options of `layout_from_config`, and what it refuses."""

import json
from fractions import Fraction

import pytest

import kvjax
from kvjax.models import model_cache
from tests.models import published

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
}


def block_bytes(config, **options):
    return {group.name: group.block_bytes for group in kvjax.layout_from_config(config, **options).groups}


class TestTheSource:
    def test_a_mapping_a_file_and_a_folder_give_the_same(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(LLAMA))
        wanted = kvjax.layout_from_config(LLAMA)
        assert kvjax.layout_from_config(path) == kvjax.layout_from_config(str(path)) == wanted
        assert kvjax.layout_from_config(tmp_path) == wanted

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("", "is empty"),
            ("{", "is not JSON"),
            ("[1]", "must be a config.json's object, got a list"),
            ("null", "must be a config.json's object, got null"),
            ('{"num_hidden_layers": 1, "num_hidden_layers": 2}', "is there twice"),
            ("{}", "must have `num_hidden_layers`"),
            ('{"model_type": 7}', "`model_type` must be a string"),
            ('{"model_type": "llama"}', "must have `num_hidden_layers`"),
        ],
    )
    def test_a_file_that_is_no_config_is_refused(self, tmp_path, content, words):
        path = tmp_path / "config.json"
        path.write_text(content)
        with pytest.raises(ValueError, match=words):
            kvjax.layout_from_config(path)

    def test_a_missing_file_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="does not exist"):
            kvjax.layout_from_config(tmp_path / "none.json")
        with pytest.raises(ValueError, match=r"config\.json' does not exist"):
            kvjax.layout_from_config(tmp_path)

    @pytest.mark.parametrize("config", [None, 7, [("model_type", "llama")], b"config.json"])
    def test_another_type_is_refused(self, config):
        with pytest.raises(ValueError, match="`config` must be"):
            kvjax.layout_from_config(config)


class TestBlocks:
    def test_one_number_or_one_for_each_group(self):
        config = published.hub("gpt-oss-20b")
        tokens = lambda layout: {group.name: group.tokens_per_block for group in layout.groups}  # noqa: E731
        assert tokens(kvjax.layout_from_config(config)) == {"sliding": 16, "full": 16}
        assert tokens(kvjax.layout_from_config(config, tokens_per_block=64)) == {"sliding": 64, "full": 64}
        assert tokens(kvjax.layout_from_config(config, tokens_per_block={"full": 256})) == {"sliding": 16, "full": 256}

    def test_blocks_hold_whole_states(self):
        layout = kvjax.layout_from_config(published.hub("deepseek-v4-flash"), tokens_per_block=6)
        assert {group.name: group.tokens_per_block for group in layout.groups} == {
            "window": 6,
            "compressed_4": 8,
            "compressed_128": 128,
            "index": 8,
            "compressor_4": 6,
            "index_compressor_4": 6,
            "compressor_128": 6,
        }
        leaves = {group.name: group.leaves[0].block_shape for group in layout.groups}
        assert leaves["compressed_4"] == (2, 512)
        assert leaves["compressed_128"] == (1, 512)

    @pytest.mark.parametrize("tokens", [0, -1, 1.0, "16", True, None, {"full": 0}, {"other": 16}])
    def test_what_is_no_number_of_tokens_is_refused(self, tokens):
        with pytest.raises(ValueError, match="`tokens_per_block"):
            kvjax.layout_from_config(LLAMA, tokens_per_block=tokens)

    def test_leaves_are_named_by_layer_and_hold_one_array_each(self):
        leaves = kvjax.layout_from_config(LLAMA).groups[0].leaves
        assert [leaf.name for leaf in leaves[:3]] == ["layers.0.k", "layers.0.v", "layers.1.k"]
        assert (leaves[0].block_shape, leaves[0].dtype.name) == ((16, 4, 64), "bfloat16")
        two = kvjax.layout_from_config(published.hub("longcat-flash")).groups[0].leaves
        assert [leaf.name for leaf in two[:3]] == ["layers.0.latent", "layers.0.1.latent", "layers.1.latent"]


class TestDtypes:
    @pytest.mark.parametrize(
        ("dtype", "element"),
        [
            (None, 2),
            ("auto", 2),
            ("float32", 4),
            ("fp8", 1),
            ("fp8_e5m2", 1),
            ("float8_e4m3fn", 1),
            ("torch.float16", 2),
        ],
    )
    def test_keys_and_values_have_the_dtype_asked_for(self, dtype, element):
        assert block_bytes(LLAMA, dtype=dtype) == {"full": 16 * 4 * 2 * 4 * 64 * element}

    def test_the_configs_own_dtype_is_taken(self):
        assert block_bytes(LLAMA | {"torch_dtype": "float32"}) == {"full": 16 * 4 * 2 * 4 * 64 * 4}
        assert block_bytes(LLAMA | {"dtype": "float32"}) == {"full": 16 * 4 * 2 * 4 * 64 * 4}
        assert model_cache(LLAMA).assumed == ()
        silent = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
        assert model_cache(silent).assumed == (
            "the config names no dtype: bfloat16 is assumed, and the cache is counted in it",
        )

    @pytest.mark.parametrize("dtype", ["bf17", 7, "int4", "object"])
    def test_an_unknown_dtype_is_refused(self, dtype):
        with pytest.raises(ValueError, match="`dtype` must"):
            kvjax.layout_from_config(LLAMA, dtype=dtype)
        with pytest.raises(ValueError, match="`torch_dtype` must"):
            kvjax.layout_from_config(LLAMA | {"torch_dtype": dtype})
        with pytest.raises(ValueError, match="`state_dtype` must"):
            kvjax.layout_from_config(published.hub("jamba-v0.1"), state_dtype=dtype)

    def test_convolutions_keep_the_models_dtype(self):
        config = published.hub("qwen3.5-9b")
        narrow = kvjax.layout_from_config(config, dtype="fp8")
        assert {leaf.dtype.name for leaf in narrow.groups[0].leaves} == {"bfloat16", "float32"}
        assert narrow.groups[0] == kvjax.layout_from_config(config).groups[0]

    def test_a_states_dtype_is_the_configs_then_the_options_then_float32(self):
        own = published.hub("qwen3.5-9b")  # mamba_ssm_dtype: float32
        assert block_bytes(own, state_dtype="bfloat16") == block_bytes(own)
        silent = published.hub("qwen3-next-80b-a3b")
        assert block_bytes(silent)["state"] == 36 * (49_152 + 2 * 1_048_576)
        assert block_bytes(silent, state_dtype="bfloat16")["state"] == 36 * (49_152 + 1_048_576)
        assert "float32 is assumed" in model_cache(silent).assumed[0]
        assert model_cache(silent, state_dtype="bfloat16").assumed == ()

    def test_what_only_a_class_fills_in_gives_way_to_the_option(self):
        pytest.importorskip("transformers")
        from transformers import NemotronHConfig

        config = NemotronHConfig(dtype="bfloat16").to_dict()
        assert config["mamba_ssm_cache_dtype"] == "float32"
        wide, narrow = block_bytes(config), block_bytes(config, state_dtype="bfloat16")
        assert wide["state"] - narrow["state"] == 128 * 64 * 128 * 2


class TestRanks:
    @pytest.mark.parametrize(("ranks", "heads", "distinct"), [(1, 4, 1), (2, 2, 2), (4, 1, 4), (8, 1, 4), (16, 1, 4)])
    def test_heads_are_split_or_held_more_than_once(self, ranks, heads, distinct):
        cache = model_cache(LLAMA, tensor_parallel=ranks)
        assert cache.layout.groups[0].leaves[0].block_shape == (16, heads, 64)
        assert cache.distinct_ranks == {"full": distinct}

    def test_latents_and_keys_of_indexers_are_whole_on_every_rank(self):
        cache = model_cache(published.hub("deepseek-v3.2"), tensor_parallel=8)
        assert cache.layout == kvjax.layout_from_config(published.hub("deepseek-v3.2"))
        assert cache.distinct_ranks == {"latent": 1, "index": 1}

    def test_states_are_split(self):
        whole = block_bytes(published.hub("qwen3.5-9b"))["state"]
        cache = model_cache(published.hub("qwen3.5-9b"), tensor_parallel=8)
        assert cache.layout.groups[0].block_bytes * 8 == whole
        assert cache.distinct_ranks["state"] == 8

    def test_mamba_groups_are_held_more_than_once(self):
        one, four = (
            kvjax.layout_from_config(published.hub("falcon-h1-0.5b"), tensor_parallel=n).groups[1].leaves[0].block_shape
            for n in (1, 4)
        )
        assert one == (3, 24 * 64 + 2 * 128)
        assert four == (3, 6 * 64 + 2 * 128)

    @pytest.mark.parametrize(
        ("model", "ranks", "field"),
        [
            ("gemma-2-2b", 3, "num_key_value_heads"),
            ("qwen3.5-9b", 3, "linear_num_key_heads"),
            ("jamba-v0.1", 3, "num_key_value_heads|mamba_expand"),
            ("lfm2-1.2b", 5, "hidden_size|num_key_value_heads"),
        ],
    )
    def test_what_does_not_divide_is_refused_with_both_numbers(self, model, ranks, field):
        with pytest.raises(ValueError, match=rf"`tensor_parallel` must be .*({field}).*, which is \d+, got {ranks}"):
            kvjax.layout_from_config(published.hub(model), tensor_parallel=ranks)

    @pytest.mark.parametrize("ranks", [0, -1, 1.0, "2", True, None])
    def test_what_is_no_number_of_ranks_is_refused(self, ranks):
        with pytest.raises(ValueError, match="`tensor_parallel` must be a positive int"):
            kvjax.layout_from_config(LLAMA, tensor_parallel=ranks)


class TestLatents:
    def test_latents_are_unpadded_unless_asked(self):
        assert block_bytes(published.hub("deepseek-v3")) == {"latent": 61 * 16 * 576 * 2}
        cache = model_cache(published.hub("deepseek-v3"), latent_multiple=128)
        assert cache.layout.groups[0].block_bytes == 61 * 16 * 640 * 2
        assert cache.padding_bytes == {"latent": 61 * 16 * 64 * 2}

    def test_an_engines_packed_form_is_taken_as_it_is(self):
        config = published.hub("deepseek-v4-flash")
        packed = kvjax.layout_from_config(config, latent_bytes=584)
        growing = {
            group.name: group.block_bytes / group.tokens_per_block / group.num_layers
            for group in packed.groups
            if isinstance(group.kind, kvjax.FullAttention)
        }
        assert growing == {"compressed_4": 146, "compressed_128": 4.5625, "index": 33}
        assert sum(
            Fraction(group.block_bytes, group.tokens_per_block)
            for group in packed.groups
            if isinstance(group.kind, kvjax.FullAttention)
        ) == Fraction("3850.25")
        window = packed.groups[0]
        assert window.block_bytes // window.tokens_per_block * 128 == 3_214_336

    def test_keys_of_indexers_may_be_narrower_or_wider(self):
        config = published.hub("deepseek-v3.2")
        assert block_bytes(config)["index"] == 61 * 16 * 132
        assert block_bytes(config, index_bytes=68)["index"] == 61 * 16 * 68


class TestDrafts:
    def test_prediction_layers_count_only_when_asked_for(self):
        config = published.hub("deepseek-v3")
        assert [group.name for group in kvjax.layout_from_config(config).groups] == ["latent"]
        usual, draft = kvjax.layout_from_config(config, draft_layers=1).groups
        assert (draft.name, draft.num_layers, draft.lookahead_tokens) == ("draft_latent", 1, 1)
        assert draft.leaves[0].name == "layers.61.latent"
        assert usual == kvjax.layout_from_config(config).groups[0]

    def test_more_than_the_config_has_are_refused(self):
        with pytest.raises(ValueError, match=r"`draft_layers` must be at most .*, 1, got 2"):
            kvjax.layout_from_config(published.hub("deepseek-v3"), draft_layers=2)
        with pytest.raises(ValueError, match="`draft_layers` must be a non-negative int"):
            kvjax.layout_from_config(LLAMA, draft_layers=-1)

    def test_drafted_tokens_lengthen_convolutions_and_rings(self):
        config = published.hub("glm-5.3-flash")
        for drafts, columns, ring in ((0, 3, 4), (1, 4, 8), (4, 7, 8), (5, 8, 16), (12, 15, 16)):
            state, *_, tail = kvjax.layout_from_config(config, draft_tokens=drafts).groups
            assert state.leaves[0].block_shape[0] == columns
            assert tail.tokens_per_block == ring


class TestContradictions:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"layer_types": ["full_attention"] * 3},
                "`layer_types` must have an entry for each of 4 layers, got 3 entries$",
            ),
            ({"layer_types": ["sliding_attention"] * 4}, "`sliding_window` must be set, as `layer_types` names"),
            (
                {"layer_types": ["odd"] * 4},
                "`layer_types` must name layer types that kvjax understands, such as [a-z_, ]{1,100}, got 'odd'$",
            ),
            ({"num_hidden_layers": 0}, "`num_hidden_layers` must be a positive int"),
            ({"num_hidden_layers": -3}, "`num_hidden_layers` must be a positive int"),
            ({"num_hidden_layers": 4.0}, "`num_hidden_layers` must be a positive int"),
            ({"num_key_value_heads": "4"}, "`num_key_value_heads` must be an int"),
            ({"head_dim": -64}, "`head_dim` must be an int"),
            ({"num_attention_heads": 7}, "must have `head_dim`"),
            ({"layer_types": ["linear_attention"] * 4}, "layer 0 is recurrent, and the config must have the fields"),
            ({"num_kv_shared_layers": 4}, "`num_kv_shared_layers` must be below"),
            ({"per_layer_config": {"9": {}}}, "`per_layer_config` must be an object of objects by layer below 4"),
            (
                {"per_layer_config": {"1": {"attention_sink_size": 4}}},
                "`per_layer_config.1.attention_sink_size` must be a mechanism",
            ),
            ({"hybrid_override_pattern": "M?"}, "`hybrid_override_pattern` must be text of the letters"),
            ({"sliding_window": -5}, "`sliding_window` must be an int"),
        ],
    )
    def test_a_config_that_contradicts_itself_is_refused_by_field(self, changes, words):
        with pytest.raises(ValueError, match=words):
            kvjax.layout_from_config(LLAMA | changes)

    @pytest.mark.parametrize(
        "changes",
        [
            {"sliding_window": 4096, "layer_types": ["full_attention"] * 4},
            {"attention_chunk_size": 128},
            {"mamba_d_state": 16, "mamba_expand": 2, "layer_types": ["full_attention"] * 4},
            {"sliding_window": -1},
            {"sliding_window": False},
            {"dual_chunk_attention_config": {"chunk_size": 262144}},
            {"compression_ratio": 1.0, "use_memory_efficient_attention": True, "context_window": 4096},
            {"quantization_config": {"kv_cache_scheme": None, "sparse_config": {"window_size": 4}}},
            {"rope_parameters": {"full_attention": {"window": 4}}, "vision_config": {"sliding_window": 4}},
            {"layer_types": ["full_attention"] * 4, "hybrid_layer_pattern": [0] * 4, "attn_type_list": [1] * 4},
            {"sliding_window": None},
            {"num_nextn_predict_layers": 2},
            {"layer_types": None},
        ],
    )
    def test_what_no_layer_uses_means_nothing(self, changes):
        assert kvjax.layout_from_config(LLAMA | changes) == kvjax.layout_from_config(LLAMA)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *[
                (name, 4)
                for name in ("attention_sink_size", "num_sink_tokens", "start_size", "recent_size", "num_memory")
            ],
            *[
                (name, 4)
                for name in ("num_memory", "mem_len", "xl_cache_len", "num_persistent_mem_tokens", "init_blocks")
            ],
            *[(name, 4) for name in ("total_ut_steps", "loops", "num_recursion_steps", "layer_repeats", "H_cycles")],
            *[(name, 4) for name in ("cross_layer_interval", "cross_hidden_size", "encoder_hidden_size")],
            *[(name, 4) for name in ("blocksparse_block_size", "nsa_block_size", "moba_topk", "kv_sharing_factor")],
            *[(name, 4) for name in ("mamba_d_state", "ssm_state_size", "lru_width", "conv_L_cache", "cca_time0")],
            *[(name, 4) for name in ("head_size", "d_kv", "size_per_head", "key_head_dim", "value_dim", "kv_heads")],
            *[(name, [0, 2]) for name in ("swa_layers", "global_layers", "attn_layer_idxs", "full_attention_idx")],
            ("mixer_types", ["a"] * 4),
            ("hybrid_block_layout", ["t", "m2"]),
            ("attention_type", "block_sparse"),
            ("attention_config", {"num_sink_tokens": 4}),
            ("attn_config", {"num_sink_tokens": 4}),
            ("attn_config", {"sliding_window_size": 4}),
            ("streaming_llm", {"start_size": 4}),
            ("sparse_config", {"global_tokens": 16}),
            ("some", {"what": [{"deeper": {"num_sink_tokens": 4}}]}),
            ("per_layer_config", {"1": {"attention": {"num_sink_tokens": 4}}}),
            ("per_layer_config", {"1": {"layer_type": "linear_attention"}}),
            ("block_configs", [{"attention": {"sink_tokens": 4}}] * 4),
            ("block_configs", [{"attention": {"sliding_window": 4}}] * 4),
            ("block_configs", [{"attention": {"n_heads_in_group": 5}}] * 4),
            ("num_key_value_heads_per_layer", [4, 4]),
        ],
    )
    def test_a_field_about_the_cache_that_no_rule_reads_is_refused_by_name(self, field, value):
        with pytest.raises(ValueError, match=field if field != "some" else r"some\.what\[\]\.deeper\.num_sink_tokens"):
            kvjax.layout_from_config(LLAMA | {field: value})

    @pytest.mark.parametrize("model_type", ["rwkv6", "gla", "retnet", "ouro", "idefics", "bert-generation"])
    def test_a_family_whose_cache_is_another_is_refused(self, model_type):
        with pytest.raises(ValueError, match=f"`model_type` must be .*{model_type}"):
            kvjax.layout_from_config(LLAMA | {"model_type": model_type})

    def test_states_without_a_word_on_which_layers_have_them_are_refused(self):
        silent = {name: value for name, value in published.hub("nemotron-h-8b").items() if "pattern" not in name}
        with pytest.raises(ValueError, match="must be a mechanism that kvjax understands or be off"):
            kvjax.layout_from_config(silent)
        for model in ("granite-4.0-h-tiny", "bamba-9b"):
            found = {k: v for k, v in published.hub(model).items() if k not in ("layer_types", "attn_layer_indices")}
            assert [group.name for group in kvjax.layout_from_config(found).groups] == ["state"]

    def test_both_forms_of_zamba_have_a_state_in_every_layer(self):
        transformers = pytest.importorskip("transformers")
        config = {
            "model_type": "zamba",
            "attn_layer_offset": 4,
            "attn_layer_period": 6,
            "hidden_size": 3712,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "n_mamba_heads": 2,
            "num_attention_heads": 16,
            "num_hidden_layers": 76,
            "num_key_value_heads": 16,
        }
        published_form = kvjax.layout_from_config(config)
        assert [(group.name, group.num_layers) for group in published_form.groups] == [("state", 76), ("full", 13)]
        assert published_form.groups[1].leaves[0].block_shape == (16, 16, 464)
        assert kvjax.layout_from_config(transformers.ZambaConfig(**config).to_dict()) == published_form

    def test_lists_of_the_published_form_may_stay_beside_layer_types(self):
        pytest.importorskip("transformers")
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        config = published.hub("mimo-v2-flash")
        written = CONFIG_MAPPING["mimo_v2_flash"](**{k: v for k, v in config.items() if k != "model_type"}).to_dict()
        assert "hybrid_layer_pattern" in written
        assert [group.num_layers for group in kvjax.layout_from_config(written).groups] == [9, 39]

    def test_a_width_that_only_the_class_knows_is_taken(self):
        config = published.hub("gemma-4-31B")
        wanted = kvjax.layout_from_config(config)
        del config["text_config"]["global_head_dim"]
        assert kvjax.layout_from_config(config) == wanted

    def test_keys_of_indexers_follow_a_frequency_where_nothing_is_listed(self):
        config = {name: value for name, value in published.hub("glm-5.2").items() if name != "indexer_types"}
        config |= {"index_topk_freq": 4, "index_skip_topk_offset": 3}
        layout = kvjax.layout_from_config(config)
        assert {group.name: group.num_layers for group in layout.groups} == {"latent": 78, "index": 21}
        layers = [int(leaf.name.split(".")[1]) for leaf in layout.groups[1].leaves]
        assert layers[:5] == [0, 1, 2, 6, 10]

    def test_a_name_that_is_null_gives_way_to_another(self):
        config = LLAMA | {"dtype": None, "torch_dtype": "float32", "num_kv_heads": 2, "num_key_value_heads": None}
        assert kvjax.layout_from_config(config).groups[0].leaves[0].block_shape == (16, 2, 64)
        assert kvjax.layout_from_config(config).groups[0].leaves[0].dtype.name == "float32"

    def test_a_dtype_that_only_the_class_knows_is_an_assumption(self):
        config = published.hub("nemotron-h-8b")
        assert "float32 is assumed" in model_cache(config).assumed[0]
        assert block_bytes(config, state_dtype="bfloat16")["state"] == 51_806_208

    def test_heads_of_single_layers_are_read(self):
        layout = kvjax.layout_from_config(LLAMA | {"num_key_value_heads_per_layer": [4, 4, 2, 1]})
        assert [(group.num_layers, group.leaves[0].block_shape) for group in layout.groups] == [
            (2, (16, 4, 64)),
            (1, (16, 2, 64)),
            (1, (16, 1, 64)),
        ]

    @pytest.mark.parametrize(
        ("changes", "heads"),
        [
            ({"n_kv_heads": 2}, 2),
            ({"multi_query": True}, 1),
            ({"multi_query_attention": True}, 1),
            ({"multi_query_attention": True, "multi_query_group_num": 2}, 2),
            ({"multi_query_attention": False, "multi_query_group_num": 2}, 16),
            ({"attn_config": {"attn_type": "multiquery_attention"}}, 1),
            ({"attn_config": {"kv_n_heads": 8}}, 8),
        ],
    )
    def test_heads_of_keys_go_by_many_names(self, changes, heads):
        config = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"} | changes
        assert kvjax.layout_from_config(config).groups[0].leaves[0].block_shape == (16, heads, 64)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"index_topk_pattern": [8]}, "`index_topk_pattern` must be text"),
            ({"index_topk_pattern": [["a"]]}, "`index_topk_pattern` must be text"),
            ({"attention_types": [[None, 8]]}, "`attention_types` must hold pairs"),
            ({"attention_types": [[["global"], 10**12]]}, "`attention_types` must count from 1"),
            ({"attention_types": [[["global"], -5], [["global"], 9]]}, "`attention_types` must count from 1"),
            ({"block_configs": [{"attention": {"n_heads_in_group": "4"}}] * 4}, "`n_heads_in_group` that divides"),
            ({"block_configs": [True] * 4, "layer_types": ["full_attention"] * 4}, "`block_configs` must hold objects"),
            ({"num_key_value_heads": 7}, "`num_key_value_heads` must divide `num_attention_heads`, 16, got 7"),
            ({"num_key_value_heads": 64}, "`num_key_value_heads` must divide"),
            ({"kv_lora_rank": 512}, "must have `qk_rope_head_dim`"),
            ({"text_config": 3}, "`text_config` must be an object, got an int"),
        ],
    )
    def test_odd_types_are_refused(self, changes, words):
        with pytest.raises(ValueError, match=words):
            kvjax.layout_from_config(LLAMA | changes)

    def test_what_is_endless_or_deep_is_refused(self):
        endless = dict(LLAMA)
        endless["text_config"] = endless
        with pytest.raises(ValueError, match="nested at most 8 deep"):
            kvjax.layout_from_config(endless)
        deep = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(ValueError, match="`num_sink_tokens` must"):
            kvjax.layout_from_config(LLAMA | {"num_sink_tokens": deep})

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"equalize": "layers"}, "`equalize` must be None or 'bytes', got 'layers'"),
            ({"align_tokens": 16}, "`align_tokens` goes with `equalize='bytes'` only"),
            ({"equalize": "bytes", "align_tokens": 0}, "`align_tokens` must be a positive int"),
            ({"equalize": "bytes", "tokens_per_block": {"full": 16}}, "`tokens_per_block` must be an int with"),
            ({"latent_multiple": 0}, "`latent_multiple` must be a positive int"),
            ({"latent_bytes": 0}, "`latent_bytes` must be a positive int"),
            ({"index_bytes": 1.5}, "`index_bytes` must be a positive int"),
            ({"draft_tokens": -1}, "`draft_tokens` must be a non-negative int"),
        ],
    )
    def test_an_option_out_of_range_is_refused(self, options, words):
        with pytest.raises(ValueError, match=words):
            kvjax.layout_from_config(LLAMA, **options)

    def test_a_new_mix_of_known_fields_needs_no_family(self):
        config = LLAMA | {
            "model_type": "of no family",
            "num_hidden_layers": 6,
            "layer_types": [
                "sliding_attention",
                "chunked_attention",
                "full_attention",
                "linear_attention",
                "conv",
                "moe",
            ],
            "sliding_window": 256,
            "attention_chunk_size": 512,
            "linear_num_heads": 4,
            "linear_head_dim": 64,
            "conv_L_cache": 3,
            "swa_head_dim": 32,
        }
        found = kvjax.layout_from_config(config)
        assert [(group.name, group.kind, group.num_layers) for group in found.groups] == [
            ("sliding", kvjax.SlidingWindow(256), 1),
            ("chunked", kvjax.ChunkedLocal(512), 1),
            ("full", kvjax.FullAttention(), 1),
            ("state", kvjax.Recurrent(), 1),
            ("conv", kvjax.Recurrent(), 1),
        ]
        assert found.groups[0].block_bytes == 16 * 2 * 4 * 32 * 2
