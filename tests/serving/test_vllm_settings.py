"""What the connector is told, and what it refuses."""

import importlib
import json
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from kvjax.groups import FullAttention, Recurrent, SlidingWindow
from kvjax.serving.vllm.arrays import flattened, leaves_of, unflattened
from kvjax.serving.vllm.layout import groups_of, tokens_per_hash
from kvjax.serving.vllm.messages import Order
from kvjax.serving.vllm.options import Options, options_of
from kvjax.serving.vllm.support import check_supported, model_of
from tests.serving import vllm_interface
from tests.serving.vllm_engine import Group, config_of, vllm_config_of

MIXED = [Group(FullAttention(), 16, (0,)), Group(SlidingWindow(20), 8, (1,)), Group(Recurrent(), 4096, (2,))]


def groups(listed=MIXED):
    return groups_of(config_of(listed, 10, 8))


# --- kv_connector_extra_config --------------------------------------------------------------------------


def test_options_are_read():
    options = options_of(
        {
            "host_bytes": "2GiB",
            "staging_bytes": "1MiB",
            "blocks_per_chunk": {"full0": 4},
            "checkpoint_tokens": 64,
            "tiers": ["file:///x"],
        }
    )
    assert (options.host_bytes, options.staging_bytes) == (2 * 2**30, 2**20)
    assert options.chunking == {"blocks_per_chunk": {"full0": 4}, "block_size": None, "min_chunk_bytes": 65536}
    assert (options.checkpoint_tokens, options.tiers) == (64, ("file:///x",))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "must have `host_bytes`, such as '64GiB', got none"),
        ({"host_bytes": 1, "host_size": 2}, "must have keys among host_bytes, .*, got host_size"),
        ({"host_bytes": "a lot"}, "`host_bytes`"),
        ({"host_bytes": 0}, "`host_bytes`"),
        ({"host_bytes": None}, "`host_bytes`"),
        ({"host_bytes": 2**20, "staging_bytes": -1}, "`staging_bytes`"),
        ({"host_bytes": 2**20, "tiers": "file:///x"}, "`tiers` must be a list of URLs"),
        ({"host_bytes": 2**20, "tiers": [3]}, "`tiers` must be a list of URLs"),
        ({"host_bytes": 2**20, "tiers": 3}, "`tiers` must be a list of URLs"),
        ({"host_bytes": 2**20, "model": 3}, "`model` must be a non-empty string, got 3"),
        ({"host_bytes": 2**20, "store_after": 0}, "`store_after` must be a positive int, got 0"),
        (
            {"host_bytes": 2**20, "checkpoint_tokens": "often"},
            "`checkpoint_tokens` must be a positive int, got 'often'",
        ),
        ({"host_bytes": 2**20, "tiers": {}}, "`tiers` must be a list of URLs, from the fastest one down, got {}"),
        ({"host_bytes": 2**20, "transfer": "fast"}, "`transfer` must be one of 'auto', 'direct', 'staged', got 'fast'"),
        ({"host_bytes": 2**20, "tier_ask_s": None}, "`tier_ask_s` must be a number of seconds, got None"),
        ({"host_bytes": 2**20, "tier_ask_s": -1}, "`tier_ask_s` must be a number of seconds from 0"),
    ],
)
def test_bad_options_are_named(extra, text):
    with pytest.raises(ValueError, match=text):
        options_of(extra)


def test_the_page_lists_every_option_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "serving" / "vllm.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page.split("## Options")[1].split("\n## ")[0], re.MULTILINE)
    listed = {name: json.loads(default.strip("`")) for name, default in rows if default != "must be given"}
    options = {field.name: field.default for field in fields(Options) if field.default is not MISSING}
    assert listed == {**options, "tiers": []}
    assert [name for name, default in rows if default == "must be given"] == ["host_bytes"]
    config = json.loads(page.split("--kv-transfer-config '")[1].split("'")[0])
    assert options_of(config["kv_connector_extra_config"]).host_bytes == 64 * 2**30
    assert config["kv_connector"] == "TPUConnectorHMA"
    assert config["kv_connector_module_path"] == "kvjax.serving.vllm"


# --- vLLM's own settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("kv_transfer_config.kv_role", "kv_producer"), "`kv_role` must be 'kv_both'"),
        (("kv_transfer_config.kv_load_failure_policy", "fail"), "`kv_load_failure_policy` must be 'recompute'"),
        (("parallel_config.data_parallel_size", 2), "`data_parallel_size` must be 1 with kvjax, got 2"),
        (("parallel_config.pipeline_parallel_size", 4), "`pipeline_parallel_size` must be 1"),
        (("parallel_config.decode_context_parallel_size", 4), "`decode_context_parallel_size` must be 1"),
        (("sharding_config", SimpleNamespace(total_dp_size=2)), "over data-parallel ranks with kvjax, got 2 ranks"),
        (("speculative_config", object()), "must be served without speculative decoding"),
        (("additional_config", {"enable_continue_decode": True}), "must be served without `enable_continue_decode`"),
    ],
)
def test_settings_that_might_restore_wrong_bytes_are_refused(change, text):
    config = vllm_config_of({})
    check_supported(config, groups(), by_request=True)
    name, value = change
    owner = config
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part)
    setattr(owner, name.split(".")[-1], value)
    with pytest.raises(ValueError, match=text):
        check_supported(config, groups(), by_request=True)


@pytest.mark.parametrize("number", [1, 3])
def test_a_vllm_that_does_not_hear_of_failures_by_request_is_refused(number):
    with pytest.raises(ValueError, match="vLLM must take failed loads by request with kvjax"):
        check_supported(vllm_config_of({}), groups(MIXED[:number]), by_request=False)


def test_drafts_and_steps_of_many_tokens_are_taken_where_there_are_no_states():
    config = vllm_config_of({})
    config.speculative_config, config.additional_config = object(), {"enable_continue_decode": True}
    check_supported(config, groups(MIXED[:2]), by_request=True)


def test_models_are_told_apart_by_all_that_changes_their_caches():
    names = set()
    for change in ({}, {"revision": "v2"}, {"quantization": "fp8"}, {"dtype": "float32"}, {"hf_overrides": {"a": 1}}):
        config = vllm_config_of({})
        vars(config.model_config).update(change)
        names.add(model_of(config))
    for more in ({}, {"quantization": {"qwix": {"rules": []}}}, {"a": 1}):
        config = vllm_config_of({})
        config.additional_config = more
        names.add(model_of(config))
    assert len(names) == 7
    assert "test@default/none/bfloat16" in names


# --- groups -------------------------------------------------------------------------------------------------


def test_groups_are_named_by_kind_and_place():
    assert [(group.name, group.tokens_per_block) for group in groups()] == [
        ("full0", 16),
        ("sliding1", 8),
        ("state2", 8),
    ]


def test_states_are_in_slots_or_in_blocks():
    config = config_of(MIXED, 10, 8)
    assert [group.has_slots for group in groups_of(config)] == [False, False, True]
    config.kv_cache_groups[2].kv_cache_spec.mamba_cache_mode = "align"
    config.kv_cache_groups[2].kv_cache_spec.block_size = 16
    in_blocks = groups_of(config)[2]
    assert (in_blocks.tokens_per_block, in_blocks.has_slots) == (16, False)


def test_specs_that_cannot_be_restored_are_refused():
    config = config_of(MIXED, 10, 8)
    config.kv_cache_groups[2].kv_cache_spec.mamba_cache_mode = "all"
    with pytest.raises(ValueError, match="`mamba_cache_mode` must be 'none' or 'align' with kvjax, got 'all'"):
        groups_of(config)
    config = config_of(MIXED, 10, 8)
    config.kv_cache_groups[0].kv_cache_spec.non_causal = True
    with pytest.raises(ValueError, match="must read nothing that comes after a token, got `non_causal` attention"):
        groups_of(config)
    config = config_of(MIXED, 10, 8)
    config.kv_cache_groups[0].is_eagle_group = True
    with pytest.raises(ValueError, match="must be the model's own and on the device, got a draft model's"):
        groups_of(config)
    config = config_of(MIXED, 10, 8)
    config.kv_cache_groups[0].kv_cache_spec = type("CrossAttentionSpec", (), {"block_size": 16})()
    with pytest.raises(ValueError, match=r"caches must be of FullAttentionSpec, .*, got CrossAttentionSpec"):
        groups_of(config)
    with pytest.raises(ValueError, match="must have a group of attention layers, got none"):
        groups_of(config_of(MIXED[2:], 10, 8))


def test_layers_of_one_table_are_of_one_kind():
    config = config_of(MIXED[:2], 10, 8)
    many = type("UniformTypeKVCacheSpecs", (), {"block_size": 16})()
    full, sliding = (group.kv_cache_spec for group in config.kv_cache_groups)
    many.kv_cache_specs = {"a": full, "b": full}
    config.kv_cache_groups[0].kv_cache_spec = many
    assert groups_of(config)[0].kind == FullAttention()
    many.kv_cache_specs = {"a": full, "b": sliding}
    with pytest.raises(ValueError, match="layers that share a block table must be of one kind"):
        groups_of(config)


def test_hashes_that_are_too_coarse_are_not_used():
    assert tokens_per_hash(groups(), 8) == 8
    assert tokens_per_hash(groups(), 16) is None
    assert tokens_per_hash(groups(), None) is None


# --- arrays --------------------------------------------------------------------------------------------------


def test_tuples_of_states_are_flattened_and_put_back():
    caches = [jnp.zeros((4, 2)), (jnp.ones(3), jnp.zeros((4, 1)))]
    leaves = flattened(caches)
    assert list(leaves) == ["0", "1.0", "1.1"]
    again = unflattened(caches, leaves)
    assert type(again[1]) is tuple
    assert all(one is other for one, other in zip(flattened(again).values(), leaves.values(), strict=True))


def test_every_layer_has_an_array_and_every_array_a_layer():
    caches = [jnp.zeros((4, 16)), jnp.zeros((4, 8)), (jnp.zeros((3, 2)), jnp.zeros((3, 5)))]
    places = {"layer0.0": 0, "layer1.1": 1, "layer2.2": 2}
    found = leaves_of(groups(), caches, places)
    assert [leaf.name for leaf in found["state2"]] == ["2.0", "2.1"]
    with pytest.raises(ValueError, match=r"must have a cache for each layer, got none for 'layer1\.1'"):
        leaves_of(groups(), caches, {"layer0.0": 0, "layer2.2": 2})
    with pytest.raises(ValueError, match=r"must belong to a group's layers, got others at \['3'\]"):
        leaves_of(groups(), [*caches, jnp.zeros((1, 1))], places)


# --- the class -----------------------------------------------------------------------------------------------


def test_both_names_are_the_connector_and_no_other_is(monkeypatch):
    vllm_interface.install(monkeypatch)
    package = importlib.import_module("kvjax.serving.vllm")
    assert package.TPUConnectorHMA is package.KvjaxConnector
    with pytest.raises(AttributeError, match="has no attribute 'Connector'"):
        _ = package.Connector


def test_without_vllm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"needs vLLM, which is not installed: install tpu-inference"):
        _ = importlib.import_module("kvjax.serving.vllm").KvjaxConnector


def connector_of(monkeypatch, role="WORKER", listed=MIXED):
    vllm_interface.install(monkeypatch)
    made = importlib.import_module("kvjax.serving.vllm").KvjaxConnector
    role = vllm_interface.KVConnectorRole[role]
    return made(vllm_config_of({"host_bytes": 2**20}), role, config_of(listed, 10, 8))


def test_caches_of_pytorch_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"must be given the runner of tpu-inference .*, got caches of \['list'\]"):
        connector_of(monkeypatch).register_kv_caches({"layer": []})


def test_a_worker_is_not_asked_for_what_a_scheduler_knows(monkeypatch):
    with pytest.raises(ValueError, match="was made for a worker"):
        connector_of(monkeypatch).reset_cache()


def test_hits_end_where_a_block_of_every_group_does(monkeypatch):
    """Also where no size divides another."""
    listed = [Group(FullAttention(), 24, (0,)), Group(SlidingWindow(20), 16, (1,)), Group(SlidingWindow(40), 36, (2,))]
    assert connector_of(monkeypatch, "SCHEDULER", listed)._books._resume_multiple == 144


def test_what_gives_caches_their_meaning_names_the_chunks(monkeypatch):
    vllm_interface.install(monkeypatch)
    made = importlib.import_module("kvjax.serving.vllm").KvjaxConnector
    config, names = vllm_config_of({"host_bytes": 2**20}), []
    for dtype in ("bfloat16", "float16"):
        config.model_config.dtype = dtype
        connector = made(config, vllm_interface.KVConnectorRole.SCHEDULER, config_of(MIXED, 10, 8))
        names.append(connector._books._model)
    assert names == ["test@default/none/bfloat16", "test@default/none/float16"]
    config.kv_transfer_config.kv_connector_extra_config["model"] = "mine"
    connector = made(config, vllm_interface.KVConnectorRole.SCHEDULER, config_of(MIXED, 10, 8))
    assert connector._books._model == "mine"


def test_a_worker_that_is_closed_waits_for_what_it_issued(monkeypatch):
    connector = connector_of(monkeypatch, listed=MIXED[:1])
    connector.register_runner(
        SimpleNamespace(
            kv_caches=[jnp.zeros((10, 16))], layer_name_to_kvcache_index={"layer0.0": 0}, input_batch=SimpleNamespace()
        )
    )
    settled = []
    connector._worker._under_way[Order(0, "r", None)] = SimpleNamespace(settle=lambda: settled.append("r"))
    connector.shutdown()
    assert settled == ["r"]


def test_reports_of_several_workers_are_refused(monkeypatch):
    connector_of(monkeypatch)
    told = importlib.import_module("kvjax.serving.vllm.connector").KvjaxWorkerMetadata
    with pytest.raises(ValueError, match="with one worker that holds all devices, got several"):
        told().aggregate(told())


def test_states_need_a_runner_that_tells_slots(monkeypatch):
    caches = [jnp.zeros((10, 16)), jnp.zeros((10, 8)), (jnp.zeros((3, 2)), jnp.zeros((3, 5)))]
    runner = SimpleNamespace(
        kv_caches=caches,
        layer_name_to_kvcache_index={"layer0.0": 0, "layer1.1": 1, "layer2.2": 2},
        input_batch=SimpleNamespace(),
    )
    with pytest.raises(ValueError, match="must tell the slots of states"):
        connector_of(monkeypatch).register_runner(runner)


def test_several_processes_are_refused(monkeypatch):
    runner = SimpleNamespace(
        kv_caches=[jnp.zeros((10, 16))], layer_name_to_kvcache_index={"layer0.0": 0}, input_batch=SimpleNamespace()
    )
    connector = connector_of(monkeypatch, listed=MIXED[:1])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="must be used with one process that holds all devices, got 2"):
        connector.register_runner(runner)
