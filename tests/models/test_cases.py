"""How layers become groups, and what those weigh: as others got it wrong, with the right answers.

Each docstring tells what happened elsewhere. kvjax has no engine whose pool it could lay out: what is tested is
what it has, sizes, places in block tables and the groups that `layout_from_config` proposes."""

import json
from fractions import Fraction

import numpy as np
import pytest

import kvjax
from kvjax.models import model_cache
from tests.cli.command import document, saved
from tests.models import published

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def config(layer_types, **more):
    return {
        "model_type": "of no family",
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "dtype": "bfloat16",
        **more,
    }


def delta_net(**more):
    """Fields of a gated delta net of 2,146,304 bytes a layer."""
    return {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        **more,
    }


def widths(layout, prefix=""):
    return [group.num_layers for group in layout.groups if group.name.startswith(prefix)]


def test_a_state_has_the_column_of_its_own_groups_block():
    """Elsewhere the smallest tokens per block of all groups (a ring's 4), or the scheduler's 16, divided the
    position of a state: columns 2879 and 719 of a table of 228. The state of 11,520 tokens in blocks of 1,152
    stands in column 9."""
    layout = kvjax.CacheLayout(
        [
            kvjax.GroupSpec("full", kvjax.FullAttention(), 16, block_bytes=64),
            kvjax.GroupSpec("state", kvjax.Recurrent(), 1152, block_bytes=64),
            kvjax.GroupSpec("ring", kvjax.Scratch(), 4, block_bytes=64),
        ]
    )
    cut = kvjax.resolve_chunking(layout, blocks_per_chunk={"full": 72})
    present = {"full": range(10), "state": range(10)}
    hit = kvjax.longest_hit(cut, 11_521, present)
    assert hit.hit_tokens == 11_520
    table = np.full(10, -1)
    table[9] = 77
    units = {"full": np.arange(10)[:, None], "state": [[10]]}
    plan = kvjax.plan_load(cut, hit, {"full": np.arange(720), "state": table}, units)
    moves = next(one for one in plan.moves if one.group_idx == 1)
    assert moves.chunk_idx[: moves.num_chunks].tolist() == [9]
    assert moves.block_ids[: moves.num_chunks].tolist() == [[77]]


def test_layers_that_are_no_multiple_of_one_another_leave_no_padding():
    """Elsewhere 20 full and 30 sliding layers made groups of 20, with 10 layers of padding."""
    found = model_cache(config([FULL, FULL, SLIDING, SLIDING, SLIDING] * 10, sliding_window=512), equalize="bytes")
    assert widths(found.layout) == [10] * 5
    assert set(found.padding_bytes.values()) == {0}


def test_a_lone_layer_does_not_split_all_others():
    """Elsewhere one full layer of another page among 30, 10 and 5 made 46 groups of one layer."""
    kinds = [LINEAR] * 30 + [FULL] * 11 + [SLIDING] * 5
    odd = {"40": {"num_key_value_heads": 2}}
    found = kvjax.layout_from_config(
        config(kinds, sliding_window=512, per_layer_config=odd, **delta_net()), equalize="bytes"
    )
    assert widths(found, "state") == [5] * 6
    assert widths(found, "full") == [5, 5, 1]
    assert widths(found, "sliding") == [5]


def test_groups_are_weighed_by_bytes_of_the_widest(tmp_path):
    """Elsewhere a block reserved the bytes of the widest group, and groups were cut by counting layers."""
    path = saved(tmp_path, published.hub("glm-5.3-flash"), "config.json")
    plan = document("plan", path, "--equalize", "bytes", "--align-tokens", 128)
    pool = plan["model"]["pool"]
    groups = [group for group in plan["groups"] if group["kind"] != "scratch" and group["name"] != "index"]
    assert pool["block_bytes"] == pool["page_bytes"] * pool["layers_per_group"]
    assert pool["block_bytes"] >= max(group["block_bytes"] for group in groups)
    for group in groups:
        assert group["block_bytes"] + plan["model"]["padding_bytes"][group["name"]] == pool["block_bytes"]
    # No other width, with at most ten groups, leaves fewer pages of a block empty.
    layers = [34, 11]
    assert pool["layers_per_group"] * len(groups) - sum(layers) == min(
        sum(-(-count // width) * width - count for count in layers)
        for width in range(1, 35)
        if sum(-(-count // width) for count in layers) <= 10
    )


def test_caches_of_two_shapes_in_one_layer_are_both_counted():
    """Elsewhere 78 latents of 576 bytes and 21 keys of indexers of 132 bytes per token were sized by one shape."""
    layout = kvjax.layout_from_config(published.hub("glm-5.2"), dtype="fp8")
    assert len(layout.leaves) == 99
    assert sum(Fraction(group.block_bytes, group.tokens_per_block) for group in layout.groups) == 47_700
    for ranks in (2, 8):
        assert kvjax.layout_from_config(published.hub("glm-5.2"), dtype="fp8", tensor_parallel=ranks) == layout


def test_a_cache_of_another_shape_does_not_stretch_the_others():
    """Elsewhere one cache of 8 MiB blocks beside pages of some 37 KB raised every page to its own."""
    alien = {"30": {"num_key_value_heads": 4, "head_dim": 4096}}
    plain = config([FULL] * 31, num_key_value_heads=1, head_dim=36)
    layout = kvjax.layout_from_config(plain | {"per_layer_config": alien}, tokens_per_block=256)
    usual, other = layout.groups
    assert (usual.num_layers, usual.block_bytes) == (30, 30 * 256 * 2 * 36 * 2)
    assert (other.num_layers, other.block_bytes) == (1, 2 * 8_388_608)
    short = kvjax.layout_from_config(plain, tokens_per_block=256).groups[0]
    assert short.block_bytes == 31 * 256 * 2 * 36 * 2


BLOCKS = [  # model, align_tokens, options, changes, tokens per block, padding in percent
    ("qwen3.5-9b", 16, {}, {}, 528, 0.76),
    ("qwen3.8-27b", 16, {"draft_tokens": 15}, {"mamba_ssm_dtype": "bfloat16"}, 480, 1.27),
    ("nemotron-nano-9b-v2", 128, {}, {}, 1408, None),
    ("glm-5.3-flash", 128, {"tensor_parallel": 4}, {}, 1152, None),
    ("glm-5.3-flash", 128, {"tensor_parallel": 2}, {}, 2176, None),
    ("glm-5.3-flash", 128, {"tensor_parallel": 2, "draft_tokens": 3}, {}, 2304, None),
]


@pytest.mark.parametrize(("model", "align", "options", "changes", "tokens", "percent"), BLOCKS)
def test_attention_blocks_follow_from_the_bytes_of_states(model, align, options, changes, tokens, percent):
    """Engines whose groups share one pool make a block of attention as large as a state, in whole alignments."""
    found = published.hub(model)
    found.get("text_config", found).update(changes)
    cache = model_cache(found, equalize="bytes", align_tokens=align, **options)
    growing = [group for group in cache.layout.groups if group.name in ("full", "latent")]
    states = [group for group in cache.layout.groups if isinstance(group.kind, kvjax.Recurrent)]
    assert {group.tokens_per_block for group in (*growing, *states)} == {tokens}
    page = growing[0].block_bytes // growing[0].num_layers
    state = states[0].block_bytes // states[0].num_layers
    assert page == cache.page_bytes
    assert page - page // tokens * align < state <= page
    if percent is not None:
        assert round(100 * (page - state) / state, 2) == percent
        assert cache.padding_bytes[states[0].name] == (page - state) * states[0].num_layers


def test_groups_of_two_widths_get_blocks_of_equal_bytes():
    """An engine's log of this model: five sliding groups in blocks of 16 tokens, one full in blocks of 64."""
    layout = kvjax.layout_from_config(published.hub("gemma-4-12B"), equalize="bytes")
    assert [(group.tokens_per_block, group.num_layers) for group in layout.groups] == [(16, 8)] * 5 + [(64, 8)]
    assert {group.block_bytes for group in layout.groups} == {2 * 65_536 * 8}


def test_a_pool_that_stays_empty_is_told_of():
    """A small convolution beside a wide attention: the pool's pages are those of the attention."""
    kinds = [FULL] * 4 + ["conv"] * 12
    found = model_cache(config(kinds, conv_L_cache=3, hidden_size=64, num_key_value_heads=8), equalize="bytes")
    assert any("stays empty" in note for note in found.notes)
    assert not any("stays empty" in note for note in model_cache(published.hub("gemma-4-12B"), equalize="bytes").notes)


def test_a_layer_may_own_keys_and_a_state():
    """Elsewhere each layer was taken for a member of one group."""
    layout = kvjax.layout_from_config(published.hub("falcon-h1-0.5b"))
    assert [(group.name, group.num_layers) for group in layout.groups] == [("full", 36), ("state", 36)]
    assert layout.groups[0].block_bytes == 36 * 512 * 16
    assert layout.groups[1].block_bytes == 36 * 797_184
    owners = [{leaf.name.split(".")[1] for leaf in group.leaves} for group in layout.groups]
    assert owners[0] == owners[1] == {str(n) for n in range(36)}


def test_a_rank_holds_its_part_and_only_layers_that_hold_keys_count():
    """Elsewhere the bytes of a block were those of all ranks, and of all 93 layers."""
    dense = config([FULL] * 80, num_attention_heads=64, num_key_value_heads=8)
    whole = kvjax.layout_from_config(dense, tokens_per_block=8).groups[0]
    part = kvjax.layout_from_config(dense, tokens_per_block=8, tensor_parallel=8).groups[0]
    assert (whole.block_bytes, part.block_bytes) == (2_621_440, 327_680)
    hybrid = kvjax.layout_from_config(published.hub("kimi-k3"))
    assert {group.name: group.num_layers for group in hybrid.groups} == {"state": 69, "latent": 24}


def test_rings_keep_their_place_and_set_no_hash_unit():
    """Elsewhere a scratch ring of 4 tokens beside blocks of 4,480 stopped the engine at its start."""
    layout = kvjax.layout_from_config(
        published.hub("glm-5.3-flash"),
        equalize="bytes",
        align_tokens=128,
        tensor_parallel=2,
        dtype="fp8",
        draft_tokens=3,
    )
    assert layout.groups[-1].name == "index_tail"
    assert layout.groups[-1].tokens_per_block == 8
    cut = kvjax.resolve_chunking(layout)
    assert cut.tokens_per_hash == 4480
    assert cut.tokens_per_chunk[-1] is None


def test_a_plan_says_what_it_assumed(tmp_path):
    path = saved(tmp_path, json.loads(json.dumps(published.hub("jamba-v0.1"))), "config.json")
    plan = document("plan", path)
    assert plan["model"]["assumed"] == ["the config names no dtype for recurrent states: float32 is assumed"]
    assert document("plan", path, "--state-dtype", "float32")["model"]["assumed"] == []
